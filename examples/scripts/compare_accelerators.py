"""Which accelerator gives most tokens per dollar for one model under one load, at these prices."""

import crosstie

dollars_an_hour = {"mi300x": 1.30, "mi355x": 2.90, "h200": 2.90, "b200": 3.70}
card = crosstie.compare(
    "llama-3.3-70b", on=dollars_an_hour, concurrency=64, input_tokens=2000, output_tokens=500, precision="fp8"
)
for entry in card.entries:
    if entry.estimate is None:
        print(f"{entry.accelerator.id:8} {entry.problem}")
        continue
    tokens_per_s = entry.estimate.output_tokens_per_s_per_gpu
    per_million = dollars_an_hour[entry.accelerator.id] / 3600 / tokens_per_s * 1e6
    print(f"{entry.accelerator.id:8} {tokens_per_s:6.0f} tokens/s a GPU   ${per_million:.2f} a million output tokens")
print(card.verdicts[0])

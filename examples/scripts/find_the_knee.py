"""How many requests in flight a replica bears before its tokens come too slowly: every load in one call."""

import numpy as np

import crosstie

catalog = crosstie.Catalog()
model = catalog.model("qwen3-32b")
names = ["mi300x", "h200"]
hardware = crosstie.Hardware([catalog.deployment(model, catalog.accelerator(name)) for name in names])
in_flight = np.arange(1, 129)
steady = crosstie.steady_state(hardware, concurrency=in_flight, input_tokens=2000, output_tokens=500)

limit_s = 0.040
for row, name in enumerate(names):
    kept = in_flight[(steady.tpot_s[row] <= limit_s) & (in_flight <= steady.concurrency_that_fits[row])]
    most = int(kept.max()) if kept.size else 0
    rate = steady.output_tokens_per_s[row, most - 1] if most else 0.0
    print(f"{name:7} {most:4} in flight within {limit_s * 1e3:.0f} ms a token, {rate:,.0f} tokens/s")

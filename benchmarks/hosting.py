"""Thirty models on shared GPUs, MI350X against B200: evictions, cold requests and their waits. SIMULATED: no GPU ran.

    python benchmarks/hosting.py [--quick] [--seed 7001] [--json benchmarks/results/hosting.json]
                                 [--plot docs/img/hosting.svg]
    python benchmarks/hosting.py --policies [--json benchmarks/results/hosting_policies.json]
    python benchmarks/hosting.py --expected

The models are fifteen of the catalog from 7B to 120B, three smaller ones, and twelve fine-tunes of the same shapes, as
a company has them: other weights, the same size. Each takes its weights in the smaller of its own precision and FP8,
what vLLM keeps beside them, and a cache for eight requests of 8,192 tokens. They sit on 1 GPU each, of which so many
are shared by all.

Requests come at random, by day and night (a sine of 24 hours around the mean), for models by Zipf's law with exponent
1. Which model has which rank is drawn anew for each seed, and drifts: every half an hour some models change places
with others up to six ranks away. A request keeps its model busy for a lognormal time, the same on both accelerators,
so that memory alone tells them apart. The first four hours are not counted.

host     weights come from the host's memory (vLLM's sleep, level 1) over PCIe 5
start    an engine is started and reads them from a disk

The same requests go to both accelerators, to the residency that `crosstie serve` has and to plain LRU. --policies has
further ones, on four B200: greedy-dual-size-frequency, and demand by byte without each of the rules against thrash.
The residency's settings were chosen by --policies, on seeds 0 to 4; so the comparison takes others.

--expected sets what the plan expects (host/expected.py) beside the simulation, over requests that do not drift.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.catalog.loading import shipped_loading
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.model import Model
from crosstie.core.workload import Sharing
from crosstie.host.expected import expect
from crosstie.host.hosted import Hosted, KeepingWorth, ResidencySettings
from crosstie.host.sizes import hosted_model, load_path, room_bytes
from crosstie.perf.memory import gpu_weight_bytes
from crosstie.sim.hosting import HostedTraffic, HostingResult, host

ACCELERATORS = ("mi350x", "b200")
GPUS = (3, 4, 5, 6, 8)
# Where loads are slow, one number of GPUs shows what that changes.
GPUS_START = (4,)
SEEDS = 5
# The first of them: those that settings were chosen on, and those that nothing was chosen on.
TUNED_SEED, FRESH_SEED = 0, 7001
# Two-sided 95% of Student's t with four degrees of freedom.
T_95 = 2.776
HOURS, WARM_UP_HOURS = 24.0, 4.0
REQUESTS_PER_S = 0.25
CONTEXT, SEQUENCES = 8192, 8
EXPECTED_GPUS, EXPECTED_REQUESTS = (1, 2, 3, 4, 6, 8), 20_000
DRIFT_S, DRIFTS, DRIFT_RANKS = 1800.0, 3, 6

CATALOG = (
    "mistral-7b", "llama-3.1-8b", "qwen3-8b", "gpt-oss-20b", "gemma-4-26b-a4b", "gemma-3-27b", "qwen3-30b-a3b",
    "qwen3-32b", "falcon-40b", "mixtral-8x7b", "llama-2-70b", "llama-3.1-70b", "llama-3.3-70b", "llama-4-scout",
    "gpt-oss-120b",
)  # fmt: skip
TUNED = {
    "llama-3.1-8b": 4, "qwen3-8b": 2, "mistral-7b": 1, "gpt-oss-20b": 1, "qwen3-30b-a3b": 1, "qwen3-32b": 1,
    "llama-3.3-70b": 2,
}  # fmt: skip
# Shapes of config.json: Qwen3-1.7B and Qwen3-4B as in marin-community/marin experiments/qwen3.py, Llama-3.2-3B as in
# citsjtu2020/LLM-Prof sglang/Model_Config.md, read 2026-11-15.
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8,
    "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "attention_bias": False,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                   "num_attention_heads": 16},
    "qwen3-4b": {**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                 "num_attention_heads": 32},
    "llama-3.2-3b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 128, "hidden_size": 3072,
        "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "attention_bias": False, "mlp_bias": False,
    },
}  # fmt: skip


class Rank(KeepingWorth):
    """Ranks do not add up, there the dearest counts; and they know no margin: whoever is asked for comes in."""

    def lost(self, model: str, now: float) -> float:
        return self.per_byte(model, now)

    def combined(self, losses: Iterable[float]) -> float:
        return max(losses)

    def deserves(self, model: str, loss: float, margin: float, now: float) -> bool:
        return True


class Recency(Rank):
    """When it was last asked for: plain LRU."""

    def per_byte(self, model: str, now: float) -> float:
        return self.asked_at[model]


class Frequency(Rank):
    """Requests since it was loaded x seconds to load / bytes, above the worth of the last one evicted:
    greedy-dual-size-frequency (Cherkasova 1998), which ages by evictions instead of by time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.score = dict.fromkeys(self.hosted, 0.0)
        self.floor = 0.0

    def asked(self, model: str, now: float) -> None:
        self.count[model] += 1.0
        self.score[model] = self.floor + self.count[model] * self.reload_by_byte(model)
        self.asked_at[model] = now

    def evicted(self, model: str) -> None:
        self.floor = max(self.floor, self.score[model])
        self.count[model] = 0.0

    def per_byte(self, model: str, now: float) -> float:
        return self.score[model]


LRU = ResidencySettings(worth=Recency, min_residence_s=0.0, residence_loads=0.0, patience_loads=0.0)
FREQUENCY = ResidencySettings(worth=Frequency, min_residence_s=0.0, residence_loads=0.0, patience_loads=0.0)
POLICIES = {"crosstie": ResidencySettings(), "lru": LRU}
# The residency, and loads that nobody waits for, as `crosstie serve` makes them.
AHEAD = "loads ahead of demand"
STUDIED = {
    **POLICIES,
    "greedy-dual-size-frequency": FREQUENCY,
    "no residence, no patience": ResidencySettings(min_residence_s=0.0, residence_loads=0.0, patience_loads=0.0),
    "no patience": ResidencySettings(patience_loads=0.0),
    "patience for short loads too": ResidencySettings(short_load_s=0.0),
    "patience of three loads": ResidencySettings(patience_loads=3.0),
    "margin 1.5": ResidencySettings(margin=1.5),
    "demand forgotten over ten minutes": ResidencySettings(demand_memory_s=600.0),
    AHEAD: ResidencySettings(),
}


def models(catalog: Catalog) -> list[Model]:
    found = [catalog.model(name) for name in CATALOG]
    with tempfile.TemporaryDirectory() as folder:
        for name, config in SMALL.items():
            file = Path(folder) / name / "config.json"
            file.parent.mkdir()
            file.write_text(json.dumps(config), encoding="utf-8")
            found.append(msgspec.structs.replace(catalog.model(str(file.parent)), id=name))
    for name, count in TUNED.items():
        shape = catalog.model(name)
        found += [msgspec.structs.replace(shape, id=f"{name}-tuned-{number + 1}") for number in range(count)]
    return found


def smallest(catalog: Catalog, model: Model, accelerator: str) -> Deployment:
    """In its own precision or in FP8, whichever takes less."""
    found = []
    for precision in ("native", "fp8"):
        try:
            on = catalog.accelerator(accelerator)
            found.append(catalog.deployment(model, on, Parallelism(), precision, "bf16", "vllm"))
        except BadInput:
            continue
    return min(found, key=gpu_weight_bytes)


def hosted_on(catalog: Catalog, accelerator: str, load_from: str) -> tuple[list[Hosted], float]:
    """The thirty models on one GPU, and the bytes that it has for those that are awake."""
    every = models(catalog)
    sharing = Sharing(models=tuple(model.id for model in every), load_from=load_from)  # type: ignore[arg-type]
    path = load_path(shipped_loading(), catalog.accelerator(accelerator), sharing)
    deployments = [smallest(catalog, model, accelerator) for model in every]
    hosted = [
        hosted_model(one, path, context=min(CONTEXT, one.model.max_context or CONTEXT), sequences=SEQUENCES)
        for one in deployments
    ]
    return hosted, min(room_bytes(one, path, len(every)) for one in deployments)


def shifting(count: int, seed: int, hours: float = HOURS, requests_per_s: float = REQUESTS_PER_S) -> HostedTraffic:
    chance = np.random.default_rng(seed)
    span_s = hours * 3600.0
    total = int(chance.poisson(requests_per_s * span_s))
    # A day's sine by acceptance: the busiest hour has nine times the requests of the quietest.
    candidates = chance.uniform(0.0, span_s, 4 * total)
    kept = chance.random(4 * total) < 0.5 + 0.4 * np.sin(2.0 * math.pi * candidates / 86_400.0)
    at = np.sort(candidates[kept][:total])
    weights = 1.0 / np.arange(1, count + 1)
    weights /= weights.sum()
    ranked = chance.permutation(count)
    wanted = np.zeros(len(at), np.int64)
    for step in range(math.ceil(span_s / DRIFT_S)):
        now = (at >= step * DRIFT_S) & (at < (step + 1) * DRIFT_S)
        wanted[now] = ranked[chance.choice(count, int(now.sum()), p=weights)]
        for _ in range(DRIFTS):
            one = int(chance.integers(count))
            other = int(np.clip(one + chance.integers(-DRIFT_RANKS, DRIFT_RANKS + 1), 0, count - 1))
            ranked[one], ranked[other] = ranked[other], ranked[one]
    return HostedTraffic(at, wanted, chance.lognormal(math.log(6.0), 0.7, len(at)))


def row(found: list[HostingResult]) -> dict[str, Any]:
    """Means over the seeds, with the half-width of their 95% interval."""
    measured = {
        "evictions_per_hour": [float(one.evictions_per_hour) for one in found],
        "cold_share": [one.cold_share for one in found],
        "cold_wait_p50_s": [one.wait_s(0.5) for one in found],
        "cold_wait_p99_s": [one.wait_s(0.99) for one in found],
        "wait_s_a_request": [float(one.cold_wait_s.sum()) / one.requests for one in found],
    }
    return {
        name: {
            "mean": float(np.mean(values)),
            "plus_minus": T_95 * float(np.std(values, ddof=1)) / math.sqrt(SEEDS) if len(values) == SEEDS else None,
            "by_seed": values,
        }
        for name, values in measured.items()
    }


def run(catalog: Catalog, seeds: range, quick: bool) -> dict[str, Any]:
    counts = GPUS[:2] if quick else GPUS
    grid = [("host", name, n, POLICIES) for name in ACCELERATORS for n in counts]
    grid += [("start", name, n, POLICIES) for name in ACCELERATORS for n in GPUS_START]
    return simulated(catalog, grid, seeds, *((6.0, 1.0) if quick else (HOURS, WARM_UP_HOURS)))


def study(catalog: Catalog, seeds: range, quick: bool) -> dict[str, Any]:
    grid = [(load_from, "b200", 4, STUDIED) for load_from in ("host", "start")]
    return simulated(catalog, grid, seeds, *((3.0, 1.0) if quick else (8.0, 1.0)))


def simulated(
    catalog: Catalog,
    grid: list[tuple[str, str, int, dict[str, ResidencySettings]]],
    seeds: range,
    hours: float,
    warm_up: float,
) -> dict[str, Any]:
    traffic = [shifting(30, seed, hours) for seed in seeds]
    rows = []
    shapes: dict[str, Any] = {}
    for load_from, accelerator, gpus, policies in grid:
        hosted, room = hosted_on(catalog, accelerator, load_from)
        shapes[f"{accelerator} {load_from}"] = {
            "room_bytes_a_gpu": room,
            "models": {one.model: [one.taken_bytes, round(one.load_s, 3)] for one in hosted},
        }
        for policy, settings in policies.items():
            ahead = policy == AHEAD
            found = [
                host(hosted, [room] * gpus, one, settings, warm_up_s=warm_up * 3600.0, ahead=ahead) for one in traffic
            ]
            kind = {"load_from": load_from, "accelerator": accelerator, "gpus": gpus, "policy": policy}
            rows.append({**kind, **row(found)})
            print(*kind.values(), f"{rows[-1]['cold_share']['mean']:.2%} cold", file=sys.stderr, flush=True)
    return {
        "simulated": "no AMD or NVIDIA GPU ran; sizes and load times are computed, requests drawn",
        "made": "2026-11-15",
        "seeds": list(seeds),
        "hours": hours,
        "requests_per_s": REQUESTS_PER_S,
        "rows": rows,
        "shapes": shapes,
    }


def expected(catalog: Catalog, seed: int) -> str:
    """Of fifteen and thirty models on one to eight B200, at two rates: the expected share of cold requests over the
    simulated one. Where nobody is evicted there is nothing to compare."""
    every, room = hosted_on(catalog, "b200", "host")
    lines = [
        "| models | GPUs | requests a second | expected cold | simulated cold | ratio |",
        "|---|---|---|---|---|---|",
    ]
    ratios = []
    for count, gpus, rate in product((15, 30), EXPECTED_GPUS, (0.1, 1.0)):
        chance = np.random.default_rng(seed)
        hosted = [every[place] for place in chance.permutation(len(every))[:count]]
        shares = 1.0 / np.arange(1, count + 1)
        shares /= shares.sum()
        span_s = EXPECTED_REQUESTS / rate
        asked = HostedTraffic(
            np.sort(chance.uniform(0.0, span_s, EXPECTED_REQUESTS)),
            chance.choice(count, EXPECTED_REQUESTS, p=shares),
            np.full(EXPECTED_REQUESTS, 3.0),
        )
        found = host(hosted, [room] * gpus, asked, warm_up_s=span_s / 4.0, ahead=False)
        told = expect(hosted, (rate * shares).tolist(), [room] * gpus)
        ratio = "no evictions" if not found.evictions else "the plan would take more GPUs"
        if found.evictions and told.holds:
            ratios.append(told.cold_share / found.cold_share)
            ratio = f"{ratios[-1]:.2f}"
        lines.append(f"| {count} | {gpus} | {rate:g} | {told.cold_share:.2%} | {found.cold_share:.2%} | {ratio} |")
    near = sum(0.75 <= one <= 1.25 for one in ratios)
    lines.append(f"{len(ratios)} compared: {min(ratios):.2f} to {max(ratios):.2f}, {near} of them within 25%")
    return "\n".join(lines)


def table(document: dict[str, Any]) -> str:
    """As docs/hosting.md has it."""

    def shown(one: dict[str, Any], digits: int, scale: float = 1.0, unit: str = "") -> str:
        spread = "" if one["plus_minus"] is None else f" ± {one['plus_minus'] * scale:.{digits}f}"
        return f"{one['mean'] * scale:.{digits}f}{spread}{unit}"

    lines = [
        "| loads from | accelerator | GPUs | policy | evictions an hour | cold requests | p50 wait | p99 wait "
        "| wait a request |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one['load_from']} | {one['accelerator']} | {one['gpus']} | {one['policy']} "
        f"| {shown(one['evictions_per_hour'], 1)} | {shown(one['cold_share'], 2, 100.0, ' %')} "
        f"| {shown(one['cold_wait_p50_s'], 2, unit=' s')} | {shown(one['cold_wait_p99_s'], 1, unit=' s')} "
        f"| {shown(one['wait_s_a_request'], 3, unit=' s')} |"
        for one in document["rows"]
    ]
    return "\n".join(lines)


def draw(document: dict[str, Any], file: Path) -> None:
    from crosstie.web.chart import check_ending, colours, new_figure, save

    check_ending(file)
    figure = new_figure(9, 4)
    drawn_in = dict(zip(ACCELERATORS, colours(), strict=False))
    markers = {"mi350x": "o", "b200": "s"}
    panels = zip(figure.subplots(1, 2), (("evictions_per_hour", 1.0), ("cold_share", 100.0)), strict=True)
    for axes, (metric, scale) in panels:
        for accelerator in ACCELERATORS:
            # A little apart, so that their bars do not hide each other.
            for policy, dash, apart in (("crosstie", "-", 0.0), ("lru", ":", 0.07)):
                rows = [
                    one
                    for one in document["rows"]
                    if (one["accelerator"], one["policy"], one["load_from"]) == (accelerator, policy, "host")
                ]
                axes.errorbar(
                    [one["gpus"] + apart for one in rows],
                    [one[metric]["mean"] * scale for one in rows],
                    yerr=[(one[metric]["plus_minus"] or 0.0) * scale for one in rows],
                    color=drawn_in[accelerator], linestyle=dash, marker=markers[accelerator], markersize=4, capsize=3,
                    label=f"{accelerator}, {'LRU' if policy == 'lru' else policy}",
                )  # fmt: skip
        axes.set_xlabel("GPUs, shared by thirty models")
        axes.set_ylabel("evictions an hour" if scale == 1.0 else "cold requests, %")
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(frameon=False, fontsize=8)
    save(figure, file, "simulated, no GPU ran; bars: 95% intervals over seeds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="six hours, two seeds, fewer GPUs")
    parser.add_argument("--policies", action="store_true", help="what each rule is worth, on four B200")
    parser.add_argument("--expected", action="store_true", help="what the plan expects, beside the simulation")
    parser.add_argument("--seed", type=int, help=f"the first one [{FRESH_SEED}; with --policies {TUNED_SEED}]")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if given.expected:
        print(expected(Catalog([]), given.seed or FRESH_SEED))
        return
    first = given.seed if given.seed is not None else TUNED_SEED if given.policies else FRESH_SEED
    seeds = range(first, first + (2 if given.quick else SEEDS))
    document = (study if given.policies else run)(Catalog([]), seeds, given.quick)
    if given.json:
        given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if given.plot and not given.policies:
        given.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(document, given.plot)
    print(table(document))


if __name__ == "__main__":
    main()

"""What to demand in a contract, filled with a plan's own numbers."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import only_keys, read_record, read_toml
from crosstie.core.errors import BadData
from crosstie.core.figures import dollars, plural, seconds, significant
from crosstie.core.workload import RequestClass
from crosstie.prove.review.figures import Threshold
from crosstie.prove.review.planned import Planned, SavedPool, SavedPower

_FILE = Path(__file__).parent / "data" / "contract.toml"
# Requests of an acceptance run: so many times those in flight, within bounds.
_TURNS, _FEWEST = 10, 200
# Standing by, of the GPUs of a kind: a node of eight for a hundred.
_SPARE = 0.05


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    ask: str
    why: str
    run: str = ""
    each: Literal["once", "pool", "class", "accelerator", "stack"] = "once"


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    # A pool, a class, an accelerator or an engine; "": the whole fleet.
    of: str
    ask: str
    # A command that settles it; "": none does.
    run: str
    why: str


def read_rows(file: Path) -> list[_Row]:
    raw = read_toml(file)
    only_keys(file, "", raw, {"demand"})
    return [read_record(file, f"demand[{i}]", entry, _Row) for i, entry in enumerate(raw.get("demand", []))]


def checklist(catalog: Catalog, planned: Planned, limits: Mapping[str, Threshold], file: Path = _FILE) -> list[Demand]:
    """`limits`: the share of throughput that a warranty leaves is that of a review."""
    demands = []
    for index, row in enumerate(read_rows(file)):
        for of, words in _cases(catalog, planned, limits["throughput"], row.each):
            if "{price}" in row.ask and not words.get("price"):
                continue
            try:
                filled = {name: getattr(row, name).format_map(words) for name in ("ask", "run", "why")}
            except (KeyError, ValueError, IndexError) as error:
                raise BadData(file, f"demand[{index}]", f"has {error} in braces, which nothing fills") from None
            said = {name: " ".join(text.split()) for name, text in filled.items()}
            demands.append(Demand(topic=row.topic, of=of, **said))
    return demands


def _cases(catalog: Catalog, planned: Planned, margin: Threshold, each: str) -> Iterator[tuple[str, dict[str, str]]]:
    common = _of_fleet(planned, margin)
    pools = planned.plan.pools
    if each == "pool":
        for pool in pools:
            yield pool.name, {**common, **_of_pool(planned, pool, margin)}
    elif each == "class":
        for request_class in planned.workload.classes:
            if request_class.ttft or request_class.tpot:
                yield request_class.name, {**common, **_of_class(request_class)}
    elif each == "accelerator":
        for name, count in planned.plan.gpus.items():
            yield name, {**common, **_of_accelerator(planned, name, count)}
    elif each == "stack":
        for stack, release in dict.fromkeys((pool.stack, pool.release) for pool in pools):
            on = sorted({pool.accelerator for pool in pools if (pool.stack, pool.release) == (stack, release)})
            name = catalog.stack(stack).name
            yield stack, {**common, "stack": name, "release": release or "of a named release",
                          "accelerators": " and ".join(on)}  # fmt: skip
    else:
        yield "", common


def _of_fleet(planned: Planned, margin: Threshold) -> dict[str, str]:
    power, pools = planned.plan.power, planned.plan.pools
    most = max(pools, key=lambda pool: pool.usd_per_hour)

    def kilowatts(read: Callable[[SavedPower], float]) -> str:
        return "an unknown amount" if power is None else f"{significant(read(power) / 1e3)} kW"

    return {
        "file": planned.file,
        "bill": dollars(planned.plan.usd_per_hour),
        "margin": f"{margin.share * 100:g}%",
        "mean_kw": kilowatts(lambda saved_power: saved_power.mean),
        "low_kw": kilowatts(lambda saved_power: saved_power.mean_80[0]),
        "high_kw": kilowatts(lambda saved_power: saved_power.mean_80[1]),
        "peak_kw": kilowatts(lambda saved_power: saved_power.at_peak),
        "rated_kw": kilowatts(lambda saved_power: saved_power.rated),
        "kwh": significant(power.kwh_per_million_output_tokens) if power else "an unknown number of",
        "capacity_lost": f"{most.usd_per_hour / planned.plan.usd_per_hour:.0%}",
    }


def _of_pool(planned: Planned, pool: SavedPool, margin: Threshold) -> dict[str, str]:
    inputs, outputs = _lengths(planned, pool)
    in_flight = max(round(pool.estimate["concurrency"]), 1)
    tokens = float(pool.estimate["output_tokens_per_s"])
    return {
        "pool": pool.name,
        "model": pool.model,
        "precision": pool.precision,
        "stack": pool.stack,
        "release": pool.release,
        "layout": str(pool.parallelism),
        "accelerator": pool.accelerator,
        "replicas": plural(pool.replicas, "replica"),
        "utilisation": f"{pool.utilisation:.0%}",
        "headroom": f"{max(1.0 - pool.utilisation, 0.0):.0%}",
        "input": str(inputs),
        "output": str(outputs),
        "in_flight": str(in_flight),
        "requests": str(max(_TURNS * in_flight, _FEWEST)),
        "projected_tokens": significant(tokens),
        "least_tokens": significant(tokens * (1.0 - margin.share)),
        "most_tpot": seconds(float(pool.estimate["tpot_s"]) / (1.0 - margin.share)),
    }


def _lengths(planned: Planned, pool: SavedPool) -> tuple[int, int]:
    """Of what loads the pool most: what its estimate is of."""
    for carry in pool.carries:
        for piece in planned.classes[carry.class_name].slices:
            if piece.longest_input == carry.up_to_input and not piece.exempt:
                return math.ceil(piece.input_tokens), math.ceil(piece.output_tokens)
    first = planned.workload.classes[0]
    return math.ceil(first.input_tokens), math.ceil(first.output_tokens)


def _of_class(kind: RequestClass) -> dict[str, str]:
    targets = [
        f"{target.percentile:.0%} of requests with a {name} of {seconds(target.seconds)} at most"
        for name, target in (("TTFT", kind.ttft), ("TPOT", kind.tpot))
        if target
    ]
    return {"class": kind.name, "targets": " and ".join(targets), "rate": significant(kind.requests_per_s)}


def _of_accelerator(planned: Planned, name: str, count: int) -> dict[str, str]:
    """What to buy, at its price; GPUs on hand need no seller, and their running costs are not a price."""
    wanted = planned.plan.to_be_had.get(name, 0)
    paid = planned.saved.prices[name].usd if wanted and name in planned.saved.prices else None
    flips = [flip for flip in planned.flips if flip.accelerator == name and flip.at_usd_per_gpu_hour is not None]
    at = flips[0].at_usd_per_gpu_hour if flips else None
    dearer = at is not None and not (paid is not None and at <= paid)
    said = f"At {dollars(at or 0.0)} another fleet is as cheap: that is your walk-away price." if dearer else ""
    return {
        "accelerator": name,
        "gpus": str(wanted),
        "price": "" if paid is None else dollars(paid),
        "flip": said,
        "spares": str(max(math.ceil(_SPARE * count), 1)),
    }

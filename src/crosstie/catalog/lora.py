"""Adapters (LoRA): how fast engines are with them, how often each is asked for, and the `lora` of a class."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from crosstie.catalog.reading import read_facts, read_record, read_records, sourced_file, table
from crosstie.core.errors import BadData
from crosstie.core.fact import Fact, Quantity
from crosstie.core.workload import Lora

_FILE = Path(__file__).parent / "data" / "lora.toml"
_ANY = "any"
# Slots of a GPU where nobody says: all adapters, up to this many.
_MOST_SLOTS = 64
_Share = Annotated[float, msgspec.Meta(ge=0.01, le=1)]


class LoraSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Of an engine with models of a kind at a rank: the speed over that without adapters, and its range."""

    engine: str
    moe: bool
    rank: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    speed: Annotated[Fact, Quantity("fraction", 0.01, 1.0, "speed with adapters over that without")]
    low: _Share
    high: _Share


class LoraFacts(msgspec.Struct, frozen=True, kw_only=True):
    load: Annotated[Fact, Quantity("seconds", 0.0, 600.0, "an adapter into the host's memory")]
    speeds: tuple[LoraSpeed, ...]

    def speed(self, engine: str, *, moe: bool, rank: int) -> tuple[float, float, float]:
        """Low, likely and high: between the ranks that were measured by the logarithm, else as at the nearest."""
        own = [row for row in self.speeds if row.engine == engine and row.moe == moe]
        rows = sorted(own or [row for row in self.speeds if row.engine == _ANY and row.moe == moe], key=_rank)
        below = max((row for row in rows if row.rank <= rank), key=_rank, default=rows[0])
        above = min((row for row in rows if row.rank >= rank), key=_rank, default=rows[-1])
        share = math.log(rank / below.rank) / math.log(above.rank / below.rank) if above.rank > below.rank else 0.0

        def between(first: float, second: float) -> float:
            return math.exp((1.0 - share) * math.log(first) + share * math.log(second))

        return (
            between(below.low, above.low),
            between(below.speed.value, above.speed.value),
            between(below.high, above.high),
        )


def _rank(row: LoraSpeed) -> int:
    return row.rank


@cache
def shipped_lora() -> LoraFacts:
    return read_lora_facts(_FILE)


def read_lora_facts(file: Path) -> LoraFacts:
    with sourced_file(file, ["loading", "speed"]) as (raw, sources):
        facts = read_facts(file, "loading", raw.get("loading"), LoraFacts, sources)
        speeds = read_records(file, "speed", raw.get("speed"), LoraSpeed, sources)
    for index, row in enumerate(speeds):
        if not row.low <= row.speed.value <= row.high:
            raise BadData(file, f"speed[{index}].low", "the speed must lie between low and high")
    for moe in (False, True):
        if not any(speed.engine == _ANY and speed.moe == moe for speed in speeds):
            raise BadData(file, "speed", f"missing: engine = 'any' with moe = {str(moe).lower()}")
    return LoraFacts(speeds=speeds, **facts)


def read_lora(file: Path, where: str, raw: object) -> Lora:
    weights = table(file, where, raw).get("popularity")
    counted = {"adapters": len(weights)} if isinstance(weights, list) else {}
    lora = read_record(file, where, raw, Lora, **counted)
    if weights is not None and not sum(lora.popularity):
        raise BadData(file, f"{where}.popularity", "must be weights of which one is above 0, one an adapter")
    if lora.slots and lora.host_slots and lora.host_slots < lora.slots:
        raise BadData(file, f"{where}.host_slots", f"{lora.host_slots} are fewer than the {lora.slots} slots of a GPU")
    return lora


def slots_of(lora: Lora) -> int:
    return min(lora.slots or _MOST_SLOTS, lora.adapters)


def popularity_of(lora: Lora) -> list[float]:
    return shares(lora.popularity) if lora.popularity else zipf(lora.adapters, lora.zipf)


def lora_note(name: str, lora: Lora, requests_per_s: float) -> str:
    """How many requests of a class load their adapter first."""
    popularity, slots = popularity_of(lora), slots_of(lora)
    absent = missing_share(popularity, slots)
    said = f"{name}: {lora.adapters:,} adapters of rank {lora.rank}, {slots} at once on a replica"
    if absent:
        said += f"; {absent:.1%} of requests have theirs copied from the host first ({absent * requests_per_s:.3g}/s)"
    unloaded = missing_share(popularity, min(lora.host_slots or lora.adapters, lora.adapters))
    if unloaded:
        load_s = shipped_lora().load.si
        said += f", {unloaded:.1%} loaded from disk in {load_s:g} s ({unloaded * requests_per_s:.3g}/s)"
    return said


_BISECTIONS = 60


def shares(popularity: Sequence[float]) -> list[float]:
    total = math.fsum(popularity)
    return [share / total for share in popularity]


def zipf(count: int, exponent: float) -> list[float]:
    """Shares of requests by adapter, the n-th in proportion to n^-exponent."""
    return shares([n**-exponent for n in range(1, count + 1)])


def missing_share(popularity: Sequence[float], slots: int) -> float:
    """Share of requests whose adapter is not among those used last, as many as there are slots.

    Che's approximation: an adapter stays for as many requests after its last as fill the slots, the same for all.
    """
    if slots >= sum(share > 0 for share in popularity):
        return 0.0
    low, high = 0.0, 1.0
    while _present(popularity, high) < slots:
        high *= 2.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _present(popularity, middle) < slots else (low, middle)
    return math.fsum(share * math.exp(-share * high) for share in popularity)


def _present(popularity: Sequence[float], lasts: float) -> float:
    return math.fsum(-math.expm1(-share * lasts) for share in popularity)


def most_in_flight(popularity: Sequence[float], slots: int) -> float:
    """Requests that run at once with no more than that many adapters among them, on average; infinite: any number."""
    if slots >= sum(share > 0 for share in popularity):
        return math.inf
    low, high = float(slots), float(slots)
    while _distinct(popularity, high) <= slots:
        high *= 2.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _distinct(popularity, middle) <= slots else (low, middle)
    return low


def _distinct(popularity: Sequence[float], requests: float) -> float:
    return math.fsum(-math.expm1(requests * math.log1p(-min(share, 1.0 - 1e-12))) for share in popularity)

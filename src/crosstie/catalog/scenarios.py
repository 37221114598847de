"""Scenarios of the scorecard: a model, a load and targets each, as data."""

from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from crosstie.catalog.reading import only_keys, read_records, read_toml

_FILE = Path(__file__).parent / "data" / "scenarios.toml"
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
_Ms = Annotated[float, msgspec.Meta(gt=0, le=1e7)]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    precision: str
    input: _Tokens
    output: _Tokens
    # Means that each request shall see; None: it takes what it gets.
    ttft_ms: _Ms | None = None
    tpot_ms: _Ms | None = None
    most_gpus: Annotated[int, msgspec.Meta(ge=1, le=72)] = 8
    # Bought and run at home, in place of rented by the hour.
    owned: bool = False
    # Adapters (LoRA) among which requests choose, and their rank.
    adapters: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    rank: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    # Where it has parts of its own; empty: those that the scorecard is of.
    accelerators: tuple[str, ...] = ()

    @property
    def targets(self) -> tuple[str, ...]:
        limits = [("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms)]
        return tuple(f"{name} {limit / 1e3:g} s" for name, limit in limits if limit)

    @property
    def words(self) -> str:
        kept = " and ".join(self.targets) or "no target"
        tuned = f", {self.adapters:,} adapters of rank {self.rank}" if self.adapters else ""
        return f"{self.model} {self.precision}, {self.input:,} tokens in, {self.output:,} out{tuned}, {kept}"


@cache
def shipped_scenarios() -> tuple[Scenario, ...]:
    return read_scenarios(_FILE)


def read_scenarios(file: Path) -> tuple[Scenario, ...]:
    raw = read_toml(file)
    only_keys(file, "", raw, {"scenario"})
    return read_records(file, "scenario", raw.get("scenario"), Scenario)

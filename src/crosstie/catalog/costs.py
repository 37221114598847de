"""What owning accelerators assumes beside their price: each a likely value between a low and a high, all sourced."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from crosstie.catalog.reading import Sources, only_keys, read_facts, read_toml, sourced_file, table
from crosstie.core.deployment import Accelerator
from crosstie.core.errors import BadData
from crosstie.core.fact import Fact, Quantity
from crosstie.core.units import UNITS

_ENDS = ("likely", "low", "high")


class Ranged(msgspec.Struct, frozen=True, kw_only=True):
    """One assumption; tornado and Monte Carlo go from `low` to `high`."""

    likely: Fact
    low: Fact
    high: Fact


def _spec(unit: str, low: float, high: float, meaning: str) -> Quantity:
    return Quantity(UNITS[unit].dimension, low * UNITS[unit].si, high * UNITS[unit].si, meaning)


COSTS = {key: _spec(**row) for key, row in read_toml(Path(__file__).parent / "data" / "cost_keys.toml").items()}

# What differs for cards that stand in somebody's workstation: these keys are in the table of that name too.
WORKSTATION = "workstation"


def costs_for(accelerator: Accelerator, costs: Mapping[str, Ranged]) -> dict[str, Ranged]:
    """The assumptions for one accelerator: cards of a workstation have no rack, no switch and no landlord."""
    own = {key: cost for key, cost in costs.items() if key in COSTS}
    if accelerator.in_workstation:
        own |= {key: costs[f"{WORKSTATION}.{key}"] for key in COSTS if f"{WORKSTATION}.{key}" in costs}
    return own


def watts(accelerator: Accelerator, costs: Mapping[str, Ranged]) -> float:
    """Rated IT power of one GPU with its share of server and network, before cooling."""
    return accelerator.chip.tdp.si + costs_for(accelerator, costs)["server_watts_per_gpu"].likely.value


def read_costs(file: Path, whole: bool) -> dict[str, Ranged]:
    """`whole`: every assumption must be there; a user's file may have some, and `likely` alone has no range."""
    with sourced_file(file, ["costs", WORKSTATION]) as (raw, sources):
        entries = table(file, "costs", raw.get("costs", {} if WORKSTATION in raw else None))
        cards = table(file, WORKSTATION, raw.get(WORKSTATION, {}))
        only_keys(file, "costs", entries, set(COSTS))
        only_keys(file, WORKSTATION, cards, set(COSTS))
        for key in COSTS if whole else ():
            if key not in entries:
                raise BadData(file, f"costs.{key}", f"missing: {COSTS[key].meaning}")
        ranges = {key: _read_range(file, f"costs.{key}", entries[key], COSTS[key], sources) for key in entries}
        for key, raw_range in cards.items():
            name = f"{WORKSTATION}.{key}"
            ranges[name] = _read_range(file, name, raw_range, COSTS[key], sources)
        return ranges


def _read_range(file: Path, where: str, raw: object, spec: Quantity, sources: Sources) -> Ranged:
    facts = read_facts(file, where, raw, dict.fromkeys(_ENDS, spec), sources, frozenset(("low", "high")))
    ranged = Ranged(**{end: facts.get(end, facts["likely"]) for end in _ENDS})
    if not ranged.low.si <= ranged.likely.si <= ranged.high.si:
        raise BadData(file, where, "must have low <= likely <= high")
    return ranged

"""What owning accelerators assumes beside their price: each a likely value between a low and a high, all sourced."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from crosstie.catalog.reading import Sources, only_keys, read_facts, sourced_file, table
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
    """Bounds in the unit that the key names, since the file and the user write it so."""
    return Quantity(UNITS[unit].dimension, low * UNITS[unit].si, high * UNITS[unit].si, meaning)


# Every key carries its unit, so that `--set usd_per_kwh=0.09` needs no manual.
COSTS: dict[str, Quantity] = {
    "pue": _spec("ratio", 1.0, 3.0, "power of the whole site over that of the IT equipment"),
    "usd_per_kwh": _spec("USD/kWh", 0.0, 1.0, "price of electricity"),
    "hosting_usd_per_kw_month": _spec("USD/kW-month", 0.0, 1e3, "space, feed and cooling plant, without electricity"),
    "server_usd_per_gpu": _spec("USD", 0.0, 1e5, "chassis, CPUs, memory, disks and network cards, for each GPU"),
    "network_usd_per_gpu": _spec("USD", 0.0, 1e5, "switches, optics and cables, for each GPU"),
    "support_per_year": _spec("1/year", 0.0, 0.5, "support and spares, share of all hardware's price"),
    "capital_per_year": _spec("1/year", 0.0, 0.5, "cost of the money that is tied up in hardware"),
    "life_years": _spec("year", 1.0, 15.0, "years over which hardware loses its value"),
    "residual_fraction": _spec("fraction", 0.0, 0.9, "share of its price that hardware still fetches after its life"),
    "server_watts_per_gpu": _spec("W", 0.0, 5000.0, "power of server and network for each GPU, beyond the GPU's own"),
    "mean_power_fraction": _spec("fraction", 0.05, 1.0, "mean power over the rated"),
    "engineer_usd_per_year": _spec("USD/person-year", 0.0, 5e6, "what one engineer costs the employer"),
    "utilisation": _spec("fraction", 0.01, 1.0, "mean output over that of the operating point"),
}


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

"""A saved plan as its review needs it: classes, pools with what they carry, money, power, and what would change it."""

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.catalog.traces import Floats
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadData
from crosstie.core.fleet import Fleet
from crosstie.core.workload import RequestClass, Workload
from crosstie.decide.plan.report import Saved, read_saved
from crosstie.decide.plan.subject import read_subject

_DAYS_PER_YEAR = 365.25


# What a review reads of a saved plan, by the plan's own keys.


class SavedCarried(msgspec.Struct, frozen=True):
    class_name: str = msgspec.field(name="class")
    up_to_input: int
    requests_per_s: float
    hit_rate: float = 0.0


class SavedPool(msgspec.Struct, frozen=True):
    name: str
    model: str
    accelerator: str
    parallelism: Parallelism
    precision: str
    stack: str
    release: str
    replicas: int
    usd_per_hour: float
    utilisation: float
    estimate: dict[str, Any]
    carries: list[SavedCarried]


class SavedCost(msgspec.Struct, frozen=True):
    usd_per_million: float


class SavedPower(msgspec.Struct, frozen=True):
    rated: float
    at_peak: float
    mean: float
    mean_80: tuple[float, float]
    kwh_per_million_output_tokens: float


class SavedSimulated(msgspec.Struct, frozen=True):
    class_name: str = msgspec.field(name="class")
    ttft_s: float | None
    tpot_s: float | None


class SavedFlip(msgspec.Struct, frozen=True):
    accelerator: str
    at_usd_per_gpu_hour: float | None


class _SavedFleet(msgspec.Struct, frozen=True):
    usd_per_hour: float
    gpus: dict[str, int]
    usd_per_million_tokens: SavedCost
    pools: list[SavedPool]
    # To rent or buy, in whole nodes where those are sold; what is on hand is in `gpus` alone.
    to_be_had: dict[str, int] = {}
    power: SavedPower | None = None


class _SavedPlan(msgspec.Struct, frozen=True):
    fleet: _SavedFleet | None
    simulated: list[SavedSimulated] = []
    flips: list[SavedFlip] = []
    # As every answer has them; plans from before have none.
    assumptions: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Planned:
    file: str
    saved: Saved
    plan: _SavedFleet
    simulated: dict[str, SavedSimulated]
    flips: list[SavedFlip]
    # What runs: the plan's own, with addresses, or the fleet file that was given.
    fleet: Fleet
    assumptions: dict[str, Any]

    @property
    def workload(self) -> Workload:
        return self.saved.workload

    @property
    def classes(self) -> dict[str, RequestClass]:
        return {request_class.name: request_class for request_class in self.workload.classes}

    def age_days(self, today: str) -> int:
        made = self.saved.made if len(self.saved.made) > 7 else f"{self.saved.made}-01"
        return max((date.fromisoformat(today) - date.fromisoformat(made)).days, 0)

    def growth(self, today: str) -> float:
        """What the plan expects of traffic by now, over what it was."""
        return float((1.0 + self.workload.growth_per_year) ** (self.age_days(today) / _DAYS_PER_YEAR))

    def hit_rate(self, name: str) -> float:
        """Of a class's prompt tokens, over the pools that carry it."""
        lengths = {prompt_slice.longest_input: prompt_slice.input_tokens for prompt_slice in self.classes[name].slices}
        rows = [
            (carry.requests_per_s * lengths.get(carry.up_to_input, 0.0), carry.hit_rate)
            for pool in self.plan.pools
            for carry in pool.carries
            if carry.class_name == name
        ]
        tokens = sum(weight for weight, _ in rows)
        return sum(weight * rate for weight, rate in rows) / tokens if tokens else 0.0


def read_planned(catalog: Catalog, file: Path, fleet: Path | None = None) -> Planned:
    saved = read_saved(file)
    try:
        plan = msgspec.json.decode(file.read_bytes(), type=_SavedPlan)
    except msgspec.MsgspecError as error:
        raise BadData(file, "", f"is no saved plan: {error}") from None
    if plan.fleet is None:
        raise BadData(file, "fleet", "there is none: nothing was promised that production could keep")
    runs = read_subject(catalog, fleet or file).fleet
    simulated = {simulated_class.class_name: simulated_class for simulated_class in plan.simulated}
    return Planned(str(file), saved, plan.fleet, simulated, plan.flips, runs, plan.assumptions)


def lengths_of(request_class: RequestClass) -> tuple[Floats, Floats, Floats]:
    """Prompts, answers and weights: each slice by its sample."""
    rows = [
        (float(inputs), float(outputs), piece.share / len(piece.sample))
        for piece in request_class.slices
        for inputs, outputs in piece.sample
    ]
    inputs, outputs, weights = np.array(rows).T
    return inputs, outputs, weights


def weighted_quantile(values: Floats, weights: Floats, share: float) -> float:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(reached, share - 1e-9)), len(values) - 1)])

"""What the workload does not ask for and would save: an FP8 cache, FP4 weights, memory of the host for prefixes.

Formats change what the model answers, and memory has a price that the catalog does not know, so neither is chosen
unless the workload names it (`models.NAME.kv`, `models.NAME.precisions`, `prefix.host_gib_per_gpu`); but nobody should
pay for more GPUs without knowing what these would save.

Stacks that nobody measured with such a model on an accelerator are not compared, since among many estimates the best
looking are those that err most. Where they look far cheaper, whoever pays should know, and measure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.catalog.measured import measured_apart
from crosstie.core.deployment import Accelerator
from crosstie.core.disaggregated import Disaggregated
from crosstie.core.workload import ModelChoice, Slice, Workload
from crosstie.decide.plan.answer import Alternative, PoolPlan, alternative, cheapest, fleet_plan, found_share
from crosstie.decide.plan.gate import Gate
from crosstie.decide.plan.market import Market, MarketItem
from crosstie.decide.plan.optimise import Choice, choice
from crosstie.decide.plan.scaling import Reading, scaling_of
from crosstie.decide.plan.solver import solve
from crosstie.decide.plan.survey import Survey, of_one_stack, offers, peak_of, surveys, undominated

# What is tried, with the keys of a model's choice that it adds to.
_TRIED: dict[str, dict[str, tuple[str, ...]]] = {
    "an FP8 KV cache": {"kv_formats": ("fp8",)},
    "FP4 weights": {"precisions": ("mxfp4", "nvfp4")},
}
# Memory of the host for each GPU that is tried where prefixes are measured: what nodes of eight GPUs with 3 TB leave
# beside the engines.
_HOST_GIB = 256
_MEMORY = {0.5: "half the memory for them", 2.0: "twice the memory for them"}
# GPUs whose memory differs by less are taken to have the same.
_SAME_MEMORY = 0.05
# A saving below this share is not worth a check of what the model answers; one below the other, of what nobody has
# measured, is within what estimates err by.
_WORTH_SAYING, _BEYOND_ERRORS = 0.02, 0.1


@dataclass(frozen=True, slots=True)
class Lighter:
    what: str
    fleet: Alternative
    # What is to be settled before it is taken.
    but: str


@dataclass(frozen=True, slots=True)
class MemoryStep:
    """With other memory for what sessions come back to."""

    what: str
    # How many times what there is of it; None where each GPU has what another vendor's has.
    times: float | None
    # By class, the share of prompt tokens that is in a cache.
    found: dict[str, float]
    fleet: Alternative


@dataclass(frozen=True, slots=True)
class Others:
    """The question of the answer's accelerators alone, put for other workloads and other parts. `usd_per_hour`: what
    the answer costs by closed forms; `correction`: by model, of what these say that its replicas take."""

    catalog: Catalog
    workload: Workload
    market: Market
    accelerators: set[str]
    usd_per_hour: float
    correction: Mapping[str, float]

    def lighter_formats(self, known: Sequence[Survey]) -> list[Lighter]:
        """What would make the fleet cheaper. `known`: the surveys of the workload."""
        lighters = []
        asks = [
            (what, _with(self.workload, more), "check what the model then answers") for what, more in _TRIED.items()
        ]
        memory = f"{_HOST_GIB} GiB of host memory a GPU for prefixes"
        asks.append((memory, _with_host_memory(self.workload), "the price of the memory is not counted"))
        for what, asked, but in asks:
            if asked == self.workload:
                continue
            # Surveys of the workload are of the same traffic, and of other hits.
            read = self._read(asked, self.market, known if what in _TRIED else ())
            fleet = cheapest(read, self.usd_per_hour)
            if fleet is not None and fleet.dearer < -_WORTH_SAYING:
                lighters.append(Lighter(what, fleet, but))
        return lighters

    def memory_steps(self, rivals: Sequence[str]) -> list[MemoryStep]:
        """What sessions find, and what that takes of the answer's accelerators, where their GPUs keep half or twice as
        much of them, or have as much memory as those of a rival. None without sessions."""
        if not any(request_class.sessions for request_class in self.workload.classes):
            return []
        asks: list[tuple[str, float | None, Workload, Market]] = [
            (what, times, _with_memory(self.workload, times), self.market) for times, what in _MEMORY.items()
        ]
        parts = {item.id: item.accelerator for item in self.market.items}
        own = [parts[name].memory_bytes for name in self.accelerators]
        for part in (parts[name] for name in rivals):
            if any(abs(part.memory_bytes / size - 1.0) > _SAME_MEMORY for size in own):
                what = f"the {part.memory.capacity} of {part.id} on each GPU"
                asks.append((what, None, self.workload, _with_memory_of(part, self.market, self.accelerators)))
        steps = []
        for what, times, asked, offered in asks:
            read = self._read(asked, offered)
            solution = solve(read.problem, quickly=True)
            fleet = alternative(read, solution, self.usd_per_hour)
            if solution is None or fleet is None:
                continue
            pools = fleet_plan(read, solution, asked)
            found = {one.name: found_share(pools, one) for one in asked.classes if one.sessions}
            steps.append(MemoryStep(what, times, found, fleet))
        return steps

    def _read(self, asked: Workload, offered: Market, known: Sequence[Survey] = ()) -> Choice:
        parts = [item.accelerator for item in offered.items if item.id in self.accelerators]
        scaling, gate = scaling_of(asked), Gate(self.catalog, asked)
        tried = of_one_stack(surveys(self.catalog, asked, parts, gate=gate, known=known), scaling)
        estimated = offers(tried, scaling, peak=peak_of(asked))
        return choice(undominated(estimated.corrected(self.correction)), offered, asked)


def _with_memory_of(part: Accelerator, market: Market, accelerators: set[str]) -> Market:
    """As if these accelerators had the other's memory, and were as fast and as dear as they are."""
    replaced = msgspec.structs.replace

    def swapped(item: MarketItem) -> MarketItem:
        if item.id not in accelerators:
            return item
        sizes = {"capacity": part.memory.capacity, "usable": part.memory.usable}
        own = item.accelerator
        return replace(item, accelerator=replaced(own, memory=replaced(own.memory, **sizes)))

    return replace(market, items=tuple(map(swapped, market.items)))


def _with_memory(workload: Workload, times: float) -> Workload:
    """As if caches held so many times as much between two turns."""
    replaced = msgspec.structs.replace

    def kept(piece: Slice) -> Slice:
        if piece.hits is None:
            return piece
        sizes = tuple(size / times for size in piece.hits.cache_tokens)
        return replaced(piece, hits=replaced(piece.hits, cache_tokens=sizes))

    classes = tuple(replaced(one, slices=tuple(map(kept, one.slices))) for one in workload.classes)
    return replaced(workload, classes=classes)


def _with(workload: Workload, more: dict[str, tuple[str, ...]]) -> Workload:
    """The same with these formats allowed for every model."""

    def wider(chosen: ModelChoice) -> ModelChoice:
        added: dict[str, Any] = {
            key: tuple(dict.fromkeys((*getattr(chosen, key), *names))) for key, names in more.items()
        }
        return msgspec.structs.replace(chosen, **added)

    models = {request_class.model: wider(workload.choice(request_class.model)) for request_class in workload.classes}
    return msgspec.structs.replace(workload, models={**workload.models, **models})


def _with_host_memory(workload: Workload) -> Workload:
    """The same where classes whose hits are measured keep in the host what GPUs drop."""
    replaced = msgspec.structs.replace

    def kept(piece: Slice) -> Slice:
        if piece.hits is None or piece.prefix is None or piece.prefix.host_gib_per_gpu:
            return piece
        return replaced(piece, prefix=replaced(piece.prefix, host_gib_per_gpu=_HOST_GIB))

    classes = tuple(replaced(one, slices=tuple(map(kept, one.slices))) for one in workload.classes)
    return replaced(workload, classes=classes)


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """The fleet with all stacks compared, and those of them that nobody measured there."""

    stacks: tuple[str, ...]
    fleet: Alternative


def is_known_apart(catalog: Catalog, workload: Workload, pools: Iterable[PoolPlan]) -> bool:
    """Whether a fleet may be the answer: where nobody has published what a model does there with prefill and decode
    apart, such pools stand beside it with what they would save, unless all may compete."""
    if workload.constraints.evidence == "any":
        return True
    services = [pool.deployment for pool in pools if isinstance(pool.deployment, Disaggregated)]
    return all(measured_apart(catalog, side) for service in services for side in (service.prefill, service.decode))


def with_unmeasured(
    catalog: Catalog, workload: Workload, gate: Gate, asked: Choice, scaling: Reading, usd_per_hour: float
) -> Unmeasured | None:
    """None where it saves little. `usd_per_hour`: of the fleet that it is compared with, by the same measure."""
    if not gate.passed_over:
        return None
    limits = msgspec.structs.replace(workload.constraints, evidence="any")
    every = msgspec.structs.replace(workload, constraints=limits)
    where = {name for names in gate.passed_over.values() for name in names}
    kinds = [item.accelerator for item in asked.market.items if item.id in where]
    tried = of_one_stack(surveys(catalog, every, kinds, gate=Gate(catalog, every)), scaling)
    read = asked.by(offers(tried, scaling, peak=asked.peak))
    solution = solve(read.problem, quickly=True)
    fleet = alternative(read, solution, usd_per_hour)
    if solution is None or fleet is None or fleet.dearer > -_BEYOND_ERRORS:
        return None
    used = [read.offers.columns[i].deployment.decode for i in np.flatnonzero(solution.replicas)]
    over = [d.stack.name for d in used if d.accelerator.id in gate.passed_over.get((d.model.id, d.stack.name), ())]
    return Unmeasured(tuple(dict.fromkeys(over)), fleet) if over else None

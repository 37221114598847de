"""Prefill and decode of a model together or apart: where an engine can, where it can pay, and what it would cost.

Each look is dearer than the one before, and is taken only where that one has not ruled services out:

    ideal          both sides always busy, nothing lost on the way: no service is cheaper
    closed forms   services of the kinds that the ideal has cheapest, in whole numbers, with queues and percentiles
    simulation     the fleet that closed forms propose, behind the gateway's policy: the times its traffic that it bears
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment
from crosstie.core.disaggregated import Connector, Disaggregated
from crosstie.core.errors import BadInput
from crosstie.core.figures import dollars
from crosstie.core.workload import Workload
from crosstie.decide.plan.answer import PoolPlan, pools_of
from crosstie.decide.plan.apart import able, in_numbers
from crosstie.decide.plan.capacity import GRID
from crosstie.decide.plan.optimise import Choice
from crosstie.decide.plan.programme import Solution
from crosstie.decide.plan.scaling import Reading
from crosstie.decide.plan.solver import solve
from crosstie.decide.plan.survey import Survey, offers, survey, undominated
from crosstie.perf.disaggregated import Sides, without_queues
from crosstie.perf.hardware import Array

# Accelerators are looked at on which a model costs, together, up to so many times what it costs on the best.
_NEAR = 1.25
# Of what the ideal would cost, what services cost at the very least. Measured ones give 0 to 25% less than sides that
# always match (TensorRT-LLM's fifth blog on disaggregated serving, mid-2025); this is no more than the middle of that.
_LOST = 1.1
# Kinds of services that closed forms look at.
_KINDS = 2
# One fleet scaled to what it bears costs up to so many times what a search then finds, which weighs layouts and whole
# nodes by what it has simulated.
_BEFORE_A_SEARCH = 1.25

# Times the traffic that the pools of a model bear in simulation.
Bears = Callable[[str, Sequence[PoolPlan]], float]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What serving a model apart would come to, all else as it is; or why nobody looked further."""

    model: str
    # Of the whole fleet; None where no fleet was looked at.
    usd_per_hour: float | None
    # By what: "ideal", "closed forms" or "simulation".
    by: str
    why: str
    # Whether it is cheap enough as far as was looked for a search of its own.
    may_pay: bool = False


def outlooks(
    catalog: Catalog, workload: Workload, surveyed: Sequence[Survey], asked: Choice, answer: Solution, scaling: Reading,
    bears: Bears,
) -> list[Outlook]:  # fmt: skip
    """Of every model that the workload leaves open."""
    return [
        _Look(catalog, workload, list(surveyed), place, asked, answer, scaling).outlook(bears)
        for place, one in enumerate(surveyed)
        if workload.choice(one.parts[0].request_class.model).apart is None
    ]


def unlooked(workload: Workload) -> list[Outlook]:
    """The same where nothing is simulated: closed forms alone do not decide it."""
    why = "nothing was simulated (--quick), and closed forms alone flatter services"
    models = dict.fromkeys(request_class.model for request_class in workload.classes)
    return [Outlook(name, None, "", why) for name in models if workload.choice(name).apart is None]


class _Kind(NamedTuple):
    """Services of one accelerator and engine: what the model would cost on ideal ones, the layouts that either side may
    have, and the one that decodes at the least cost."""

    usd: float
    sides: list[Deployment]
    decode: Deployment
    connector: Connector


class _Look:
    """At one model of a plan whose replicas all do both."""

    def __init__(
        self, catalog: Catalog, workload: Workload, surveyed: list[Survey], place: int, asked: Choice,
        answer: Solution, scaling: Reading,
    ):  # fmt: skip
        self.catalog, self.workload, self.surveyed, self.place = catalog, workload, surveyed, place
        self.asked, self.answer, self.scaling = asked, answer, scaling
        self.one = surveyed[place]
        self.model = self.one.parts[0].request_class.model
        self.slices = [part.slice for part in self.one.parts]
        self.demand = asked.problem.demand[[part.index for part in self.one.parts]]
        mine = [column.deployment.model.id == self.model for column in asked.offers.columns]
        self.mine = np.array(mine, bool)
        self.paid = float((asked.problem.replica_usd_per_hour * answer.replicas)[self.mine].sum())
        self.others = answer.usd_per_hour - self.paid

    def outlook(self, bears: Bears) -> Outlook:
        why = self._ruled_out()
        if why:
            return Outlook(self.model, None, "", why)
        kinds = self._ideal()
        if not kinds:
            return Outlook(self.model, None, "", "no service keeps its targets, or holds its longest request")
        least = min(2.0 * self._usd(side) * side.gpus for kind in kinds for side in kind.sides)
        if least >= self.paid:
            small = f"the smallest service costs {dollars(least)} an hour, its replicas {dollars(self.paid)}"
            return Outlook(self.model, None, "", small)
        kept = [kind for kind in kinds if kind.usd * _LOST < self._together() and kind.usd <= _NEAR * kinds[0].usd]
        if not kept:
            ruled = f"at best {dollars(self.others + self.paid * kinds[0].usd / self._together())} an hour"
            return Outlook(self.model, None, "ideal", f"{ruled}, if both sides were always busy")
        return self._by_closed_forms(kept[:_KINDS], bears)

    def _ruled_out(self) -> str:
        """What needs no arithmetic."""
        if any(one.pictures for one in self.slices):
            return "where a service encodes pictures is not modelled"
        if not any(part.request_class.tpot for part in self.one.parts):
            return "no class has a TPOT target, which is what other requests' prompts endanger"
        joined = False
        for deployment in self._near:
            try:
                joined |= bool(self.catalog.connector_for(deployment.stack, deployment.accelerator))
            except BadInput as error:
                missing = str(error)
        return "" if joined else missing

    @cached_property
    def _near(self) -> list[Deployment]:
        """Replicas on the accelerators on which the model costs little."""
        columns = [self.asked.offers.columns[i].deployment.accelerator.id for i in np.flatnonzero(self.mine)]
        usd: dict[str, Array] = {}
        for name, row in zip(columns, self._per_request(), strict=True):
            usd[name] = np.minimum(usd.get(name, row), row)
        most = _NEAR * min(float(row @ self.demand) for row in usd.values())
        near = {name for name, row in usd.items() if float(row @ self.demand) <= most}
        near |= {name for name, used in zip(columns, self.answer.replicas[self.mine], strict=True) if used}
        return [d for d in self.one.deployments if isinstance(d, Deployment) and d.accelerator.id in near]

    def _per_request(self) -> Array:
        problem = self.asked.problem
        parts = [part.index for part in self.one.parts]
        return np.asarray(problem.per_request(problem.replica_usd_per_hour)[self.mine][:, parts])

    def _together(self) -> float:
        """What the model would cost together, could replicas be divided."""
        return float(self._per_request().min(axis=0) @ self.demand)

    def _usd(self, deployment: Deployment) -> float:
        """Of a GPU an hour."""
        return float(self.asked.problem.usd_per_hour[self.asked.market.index(deployment.accelerator.id)])

    def _ideal(self) -> list[_Kind]:
        """Kinds of services by the least that they could cost, the cheapest first.

        What a prompt takes of a prefill replica that is never idle, and an answer of a decode replica with as many
        sequences as its TPOT and its memory bear, each in the layout that has it cheapest.
        """
        groups = able(self.catalog, self._near, self.slices)
        groups.sort(key=lambda group: (group[0][0].precision.id, group[0][0].kv_format))
        found = []
        for _, alike in groupby(groups, key=lambda group: (group[0][0].precision.id, group[0][0].kv_format)):
            several = list(alike)
            alone = [
                Disaggregated(prefill=side, prefill_replicas=1, decode=side, decode_replicas=1, connector=connector)
                for sides, connector in several
                for side in sides
            ]
            ends = np.cumsum([len(sides) for sides, _ in several])[:-1]
            needs = zip(*(np.split(need, ends) for need in self._needs(alone)), strict=True)
            for (sides, connector), (prefill, decode) in zip(several, needs, strict=True):
                least = float((prefill.min(axis=0) + decode.min(axis=0)) @ self.demand)
                usd = self._usd(sides[0]) * least / self.asked.correction.get(self.model, 1.0)
                found.append(_Kind(usd, sides, sides[int(np.argmin(decode @ self.demand))], connector))
        return sorted((one for one in found if np.isfinite(one.usd)), key=lambda one: one.usd)

    def _needs(self, alone: list[Disaggregated]) -> tuple[Array, Array]:
        scale, sides = self.scaling(alone), Sides(alone)
        gpus = np.array([float(one.prefill.gpus) for one in alone])
        prefill, decode = [], []
        for part in self.one.parts:
            piece, target = part.slice, part.request_class.tpot
            got = without_queues(
                sides, GRID, piece.input_tokens, piece.output_tokens, cached_tokens=piece.cached_tokens
            )
            keeps = got.tpot_s * scale.tpot[:, None] <= (target.seconds if target else np.inf)
            rate = np.where(keeps & (np.maximum(got.room, 1.0) >= GRID), got.requests_per_s, 0.0).max(axis=1)
            # Beyond a class's percentile prompts may be late.
            ttft = None if piece.exempt else part.request_class.ttft
            in_time = got.ttft_s[:, 0] * scale.ttft <= (ttft.seconds if ttft else np.inf)
            prefill.append(np.where(in_time, gpus * got.service_s[:, 0] / scale.rate, np.inf))
            decode.append(gpus / np.maximum(rate * scale.rate, 1e-300))
        many = np.array(decode)
        return np.array(prefill).T, np.where(many < 1e200, many, np.inf).T

    def _by_closed_forms(self, kinds: Sequence[_Kind], bears: Bears) -> Outlook:
        # Which layout has prompts in time, queues and all, is what closed forms are for.
        found = [
            service
            for kind in kinds
            for service in in_numbers([(side, kind.decode) for side in kind.sides], kind.connector, self.slices)
        ]
        alone = [replace(one, deployments=[]) for one in self.surveyed]
        alone[self.place] = survey(found, self.one.parts)
        offered = offers(alone, self.scaling, peak=self.asked.peak).corrected(self.asked.correction)
        beside = undominated(offered)
        read = self.asked.with_offers(self.asked.offers.beside(beside))
        allowed = np.concatenate([~self.mine & (self.answer.replicas > 0), np.ones(len(beside.columns), bool)])
        solution = solve(read.problem, allowed, quickly=True)
        if solution is None:
            return Outlook(self.model, None, "closed forms", "no service of its layouts keeps its targets")
        usd = solution.usd_per_hour
        if usd >= self._worth_it():
            return Outlook(self.model, usd, "closed forms", "")
        pools = [
            pool
            for pool in pools_of(read, solution, self.workload)
            if pool.deployment.model.id == self.model and pool.carried
        ]
        mine = sum(pool.usd_per_hour for pool in pools)
        usd = usd - mine + mine / max(bears(self.model, pools), 1e-3)
        return Outlook(self.model, usd, "simulation", "", may_pay=usd < _BEFORE_A_SEARCH * self._worth_it())

    def _worth_it(self) -> float:
        """Services are more to run than replicas that are all alike: they must save as much as simplicity is worth."""
        return self.answer.usd_per_hour * (1.0 - self.workload.constraints.simplicity)

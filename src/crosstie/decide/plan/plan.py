"""`plan`: from a workload to the cheapest fleet, with its reasons, its rivals and what would change it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.figures import dollars
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.workload import Workload
from crosstie.decide.plan.answer import (
    NO_FLEET,
    Alternative,
    FleetPlan,
    PoolPlan,
    alternative,
    cheapest,
    fleet_plan,
    measured_words,
)
from crosstie.decide.plan.capacity import EstimateScale
from crosstie.decide.plan.confirm import Confirming
from crosstie.decide.plan.drafts import DraftingPool, drafting_pools
from crosstie.decide.plan.flips import Binding, Flip, bindings, entering, leaving
from crosstie.decide.plan.gate import Gate, LeftOut, PassedOver
from crosstie.decide.plan.infeasible import Obstacle, obstacles
from crosstie.decide.plan.lighter import Lighter, MemoryStep, Others, Unmeasured, is_known_apart, with_unmeasured
from crosstie.decide.plan.market import Market, market
from crosstie.decide.plan.mixture import Mixture, mixture
from crosstie.decide.plan.optimise import (
    Choice,
    choice,
    least_usd_per_hour,
    near_ones_simplified,
    simplest,
    single_vendor,
    without_each,
)
from crosstie.decide.plan.pools import Guided, guide
from crosstie.decide.plan.power import FleetPower, fleet_power
from crosstie.decide.plan.programme import Mask, Solution
from crosstie.decide.plan.run_result import SimulatedClass as SimulatedClass
from crosstie.decide.plan.scaling import WorldScaling, scaling_of
from crosstie.decide.plan.search import times_borne
from crosstie.decide.plan.shared import SharedPlan, beside_shared, own_classes, shared_plan, simulate_sharing
from crosstie.decide.plan.solver import solve, solve_beside, tidied
from crosstie.decide.plan.survey import (
    Survey,
    longer,
    of_accelerators,
    of_one_stack,
    offers,
    peak_of,
    survey,
    surveys,
    undominated,
)
from crosstie.decide.plan.targets import TargetPrice, target_prices
from crosstie.decide.plan.uncertainty import JointErrors, Uncertainty
from crosstie.decide.plan.ways import Outlook, outlooks, unlooked
from crosstie.decide.plan.worth import Worth, worth_measuring
from crosstie.port.preflight.readiness import Readiness

# A fleet as sure as asked is the answer up to so many times what the estimates themselves would buy: beyond, how little
# is known would buy the fleet, and to measure is the cheaper way to be sure.
_MOST_TO_BE_SURE = 5.0
# How sure a fleet may be asked to be: what that costs is told.
_SURE = (0.5, 0.8, 0.95)
# Prompts so many times as long: what the fleet would then be.
_LENGTHS = (2.0,)


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The best fleet that does without some accelerator of the answer."""

    without: str
    fleet: Alternative


@dataclass(frozen=True, slots=True)
class Sureness:
    """The fleet that is enough in so many of cases; None where limits do not allow it."""

    sure: float
    fleet: Alternative | None


@dataclass(frozen=True, slots=True)
class PromptLength:
    factor: float
    fleet: Alternative | None
    # Whether its accelerators are those of the answer.
    decision_holds: bool


@dataclass(frozen=True, slots=True)
class Year:
    """What the fleet is by the end of a year; None where limits do not let it grow so far."""

    year: int
    requests_per_s: float
    fleet: Alternative | None


@dataclass(frozen=True, slots=True)
class Confirmation:
    """How a fleet was confirmed: by how many simulations, the last of them long."""

    simulations: int
    # By model: what its replicas take in simulation over what closed forms say.
    correction: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    workload: Workload
    made: str
    market: Market
    # None where no fleet will do; then `obstacles` says why.
    fleet: FleetPlan | None
    obstacles: list[Obstacle]
    replicas_considered: int
    # What the accelerators of a confirmed answer cost by closed forms: what alternatives are compared with that no
    # simulation has confirmed; of other answers, their price.
    closed_form_usd_per_hour: float = 0.0
    single_vendor: dict[str, Alternative | None] = field(default_factory=dict)
    runner_up: RunnerUp | None = None
    # A fleet that is cheaper by less than its further accelerators and pools are worth.
    cheaper: Alternative | None = None
    # What the same pools may turn out to cost, given how wrong such estimates are; None without calibration.
    uncertainty: Uncertainty | None = None
    flips: list[Flip] = field(default_factory=list)
    lengths: list[PromptLength] = field(default_factory=list)
    years: list[Year] = field(default_factory=list)
    # The cheapest fleet by the estimates themselves, where the plan is by their slow end.
    by_estimates: Alternative | None = None
    # The measurement that would save most; None where none would save a percent.
    worth_measuring: Worth | None = None
    # The fleet that would be as sure as asked, where it costs too many times as much to be the answer.
    too_dear: Alternative | None = None
    # By pool: what was measured near it.
    power: FleetPower | None = None
    measured: dict[str, str] = field(default_factory=dict)
    # How to make it.
    measure_commands: list[str] = field(default_factory=list)
    # What being more or less sure costs; empty without calibration.
    sureness: list[Sureness] = field(default_factory=list)
    # The classes as simulated, and how that was; None where the fleet is by closed forms alone, also where one that
    # holds was looked for by simulation and not found.
    simulated: list[SimulatedClass] = field(default_factory=list)
    confirmed: Confirmation | None = None
    search_failed: bool = False
    # What each target costs, moved both ways.
    targets: list[TargetPrice] = field(default_factory=list)
    # Limits of the workload that make it dearer.
    binding: list[Binding] = field(default_factory=list)
    # What preflight says of each pool, by its name; and the replicas that it kept out.
    readiness: dict[str, Readiness] = field(default_factory=dict)
    will_not_run: list[LeftOut] = field(default_factory=list)
    # What speculation is worth, where pools speculate.
    drafts: list[DraftingPool] = field(default_factory=list)
    # Reserved for the base of a day and on-demand for its peak; None where the workload has no day.
    mixture: Mixture | None = None
    # Formats that the workload does not name and that would make it cheaper.
    lighter: list[Lighter] = field(default_factory=list)
    # Of workloads with sessions: what other memory for them would do.
    memory: list[MemoryStep] = field(default_factory=list)
    # Beside an answer with prefill and decode apart, the fleet with both together; or the other way round, where both
    # ways were confirmed. Of each model that the workload leaves open, how far that was looked at.
    together: Alternative | None = None
    apart: Alternative | None = None
    outlooks: list[Outlook] = field(default_factory=list)
    # Stacks that were not compared: others were measured there, and they were not.
    passed_over: list[PassedOver] = field(default_factory=list)
    # Where requests go while the fleet is idle, by the gateway's own router; at the peak as the pools carry them.
    guide: list[Guided] = field(default_factory=list)
    # With these the fleet would be far cheaper; None where it would not.
    unmeasured: Unmeasured | None = None
    # The replicas that models share, beside the fleet of the others; None where none do.
    shared: SharedPlan | None = None

    @property
    def answered(self) -> bool:
        """Whether all that is asked can be served."""
        own = self.fleet is not None or not own_classes(self.workload)
        return own and (self.shared is None or self.shared.answer is not None)

    @property
    def holds(self) -> bool:
        """Whether no class misses its targets, as far as was simulated."""
        return not self.search_failed and all(simulated_class.holds for simulated_class in self.simulated)

    @property
    def gpus(self) -> dict[str, int]:
        found = dict(self.fleet.gpus) if self.fleet else {}
        if self.shared and self.shared.answer:
            name = self.shared.answer.accelerator
            found[name] = found.get(name, 0) + self.shared.answer.gpus
        return found

    @property
    def usd_per_hour(self) -> float:
        own = self.fleet.usd_per_hour if self.fleet else 0.0
        return own + (self.shared.answer.usd_per_hour if self.shared and self.shared.answer else 0.0)

    @property
    def accelerators(self) -> list[str]:
        return list(self.gpus)


def plan(
    catalog: Catalog,
    workload: Workload,
    *,
    today: str = "",
    confirm: bool = False,
    on_progress: OnProgress = no_progress,
) -> Plan:
    """The cheapest fleet for a workload, with what stands beside it; where none will do, `obstacles` says why.

    `confirm`: fleets are simulated behind the gateway's policy, their capacities corrected, and the answer is one whose
    percentiles hold there, as `crosstie plan` does; without it, by closed forms alone, as `crosstie plan --quick` does.
    `today` (YYYY-MM-DD) dates the plan; `on_progress` hears how far it is. A workload comes from a
    file (`read_workload`) or is made of structs; what is wrong with it raises `BadData` or `BadInput`.
    """
    made = today or date.today().isoformat()
    priced = market(catalog, workload)
    if workload.sharing is None:
        return _own_plan(catalog, workload, priced, made, on_progress, confirm)
    shared = shared_plan(catalog, workload, workload.sharing, priced, on_progress)
    if confirm and shared.answer:
        on_progress(0, 0, "simulating shared replicas")
        shared = replace(shared, simulated=simulate_sharing(shared.answer, workload))
    own = beside_shared(workload, shared)
    if own is None:
        considered = len(shared.pools) + len(shared.left_out)
        return Plan(workload, made, priced, None, [], considered, shared=shared)
    others = _own_plan(catalog, own, market(catalog, own), made, on_progress, confirm)
    return replace(others, workload=workload, market=priced, shared=shared)


def _own_plan(
    catalog: Catalog, workload: Workload, priced: Market, made: str, on_progress: OnProgress, confirm: bool
) -> Plan:
    """Of models that each have replicas of their own; where it may pay to have prefill and decode apart, the cheaper of
    both ways.

    Closed forms are surer of replicas that do both, so that each way is confirmed by itself before they are compared.
    """

    def planning(models: Iterable[str], apart: bool) -> _Planning:
        choices = {name: msgspec.structs.replace(workload.choice(name), apart=apart) for name in models}
        asked = msgspec.structs.replace(workload, models={**workload.models, **choices})
        return _Planning(catalog, asked, priced, made, on_progress, confirm)

    models = dict.fromkeys(request_class.model for request_class in workload.classes)
    found = _Planning(catalog, workload, priced, made, on_progress, confirm).whole()
    named = [name for name in models if workload.choice(name).apart]
    if named and found.fleet:
        on_progress(0, 0, "the same with prefill and decode together")
        return replace(found, together=_beside(planning(named, False).alone(), found))
    # Where replicas that do both keep no targets, services may.
    better = [outlook.model for outlook in found.outlooks if outlook.may_pay] if found.fleet else []
    if confirm and (not found.fleet or found.search_failed):
        better = [name for name in models if workload.choice(name).apart is None]
    if not better:
        return found
    on_progress(0, 0, "the same with prefill and decode apart")
    services = planning(better, True)
    # Most services that pay are not measured and stand beside the answer, which needs no rivals of theirs.
    apart = services.alone()
    if not found.fleet:
        return replace(services.whole(), workload=workload, outlooks=found.outlooks) if apart.fleet else found
    if not apart.fleet or apart.search_failed or (found.holds and not apart.holds):
        # What simulation could not confirm does not stand against what it did.
        return replace(found, outlooks=[_of_one_model_alone(outlook) for outlook in found.outlooks])
    known = is_known_apart(catalog, workload, apart.fleet.pools)
    dear = apart.fleet.usd_per_hour >= found.fleet.usd_per_hour * (1.0 - workload.constraints.simplicity)
    if found.holds >= apart.holds and (dear or not known):
        return replace(found, apart=_beside(apart, found))
    whole = services.whole()
    return replace(whole, workload=workload, together=_beside(found, whole), outlooks=found.outlooks)


def _of_one_model_alone(outlook: Outlook) -> Outlook:
    if not outlook.may_pay:
        return outlook
    return replace(outlook, why="the search found no such fleet that holds when simulated whole", may_pay=False)


def _beside(other: Plan, answer: Plan) -> Alternative | None:
    if not other.fleet or not answer.fleet:
        return None
    usd, seen = other.fleet.usd_per_hour, other.confirmed is not None
    return Alternative(other.fleet.gpus, usd, usd / answer.fleet.usd_per_hour - 1.0, confirmed=seen)


@dataclass(frozen=True, slots=True)
class _Sized:
    """The cheapest fleet by closed forms, as sure as its workload asks; None where there is none."""

    workload: Workload
    surveyed: list[Survey]
    asked: Choice
    answer: Solution | None
    # How sure each estimate is taken to be.
    each: float


class _Planning:
    """A workload under one market: its fleet alone, or with all that stands beside it. What was surveyed and simulated
    for the one is there for the other."""

    def __init__(
        self, catalog: Catalog, workload: Workload, priced: Market, made: str, on_progress: OnProgress, confirm: bool
    ):
        self.catalog, self.workload, self.priced, self.on_progress = catalog, workload, priced, on_progress
        self.gate = Gate(catalog, workload)
        accelerators = [item.accelerator for item in priced.items]
        self.everything = surveys(catalog, workload, accelerators, on_progress, self.gate)
        self.sized, self.too_dear = self._by_closed_forms()
        considered = sum(len(one.deployments) for one in self.everything)
        self.bare = Plan(self.sized.workload, made, priced, None, [], considered)
        self.confirming = None
        if confirm and self.sized.answer:
            size = self.sized
            self.confirming = Confirming(catalog, size.workload, size.surveyed, size.asked, size.each, on_progress)

    def _by_closed_forms(self) -> tuple[_Sized, Alternative | None]:
        """As sure as asked; where that is too dear, by the estimates themselves, and what it would have been."""
        workload = self.workload
        sure = _as_sure(of_one_stack(self.everything, scaling_of(workload)), self.priced, workload, self.on_progress)
        if workload.sureness <= 0.5 or (sure.answer and not _costs_more(sure.answer, _least_by_estimates(sure))):
            return sure, None
        even = msgspec.structs.replace(workload, sure=0.5)
        likely = _as_sure(sure.surveyed, self.priced, even, no_progress)
        if likely.answer is None or not _costs_more(sure.answer, likely.answer.usd_per_hour):
            return sure, None
        # By the estimates another stack may be the better one.
        other = _as_sure(of_one_stack(self.everything, scaling_of(even)), self.priced, even, no_progress)
        best, usd = (other, other.answer) if other.answer else (likely, likely.answer)
        return best, alternative(sure.asked, sure.answer, usd.usd_per_hour) or NO_FLEET

    def _answered(self, with_rivals: bool) -> tuple[Plan, Choice, Solution, WorldScaling, dict[str, Alternative]]:
        """The fleet, confirmed where that is asked for and can be, with how its estimates are read; and vendors' own,
        simulated as well."""
        size = self.sized
        assert size.answer is not None, "asked only where there is one"
        seen = self.confirming.confirmed(with_rivals) if self.confirming else None
        if seen is None:
            bare = replace(self.bare, search_failed=self.confirming is not None)
            return bare, size.asked, size.answer, WorldScaling(size.workload, size.each), {}
        agreed, rivals = seen
        held = Confirmation(agreed.simulations, correction=dict(agreed.asked.correction))
        bare = replace(self.bare, simulated=agreed.classes, confirmed=held)
        return bare, agreed.asked, agreed.answer, agreed.question.scaling, rivals

    def alone(self) -> Plan:
        """The fleet, and nothing beside it."""
        if self.sized.answer is None:
            return self._obstructed()
        bare, asked, answer, _, _ = self._answered(False)
        return replace(bare, fleet=fleet_plan(asked, answer, self.sized.workload))

    def _obstructed(self) -> Plan:
        return replace(self.bare, obstacles=obstacles(self.everything, self.sized.asked, self.workload))

    def whole(self) -> Plan:
        """With the fleets beside it, what would change it, and what preflight says of its pools."""
        catalog, workload, gate = self.catalog, self.workload, self.gate
        found = self._obstructed() if self.sized.answer is None else self._with_rivals()
        pools = found.fleet.pools if found.fleet else []
        found = replace(
            found,
            readiness={pool.name: gate.readiness(pool.deployment.decode) for pool in pools},
            measured={pool.name: measured_words(catalog, pool) for pool in pools},
            passed_over=[PassedOver(*key, tuple(names)) for key, names in gate.passed_over.items()],
            will_not_run=gate.left_out(),
        )
        if found.fleet is None:
            return found
        worth = found.worth_measuring
        used, corrected = set(found.fleet.gpus), found.confirmed.correction if found.confirmed else {}
        others = Others(catalog, workload, self.priced, used, found.closed_form_usd_per_hour, corrected)
        return replace(
            found,
            measure_commands=worth.commands(gate.readiness(worth.deployment)) if worth else [],
            power=fleet_power(catalog, workload, found.fleet),
            guide=guide(catalog, workload, pools),
            mixture=mixture(catalog, workload, self.priced, found.fleet),
            lighter=others.lighter_formats(self.everything),
            memory=others.memory_steps(_rivals(found, used)),
        )

    def _with_rivals(self) -> Plan:
        sized, surveyed = self.sized.workload, self.sized.surveyed
        bare, asked, answer, scaling, rivals = self._answered(True)
        self.on_progress(0, 0, "the fleets beside it, and what would change the answer")

        def bears(model: str, pools: Sequence[PoolPlan]) -> float:
            self.on_progress(0, 0, f"simulating {model} with prefill and decode apart")
            return times_borne(self.catalog, sized, model, pools, scaling, asked.peak)

        seen = bare.confirmed is not None
        looked = outlooks(self.catalog, sized, surveyed, asked, answer, scaling, bears) if seen else unlooked(sized)
        found = _with_alternatives(surveyed, asked, answer, bare, scaling, rivals)
        if seen:
            self.on_progress(0, 0, "with stacks that nobody measured there")
            usd = found.closed_form_usd_per_hour
            unmeasured = with_unmeasured(self.catalog, sized, self.gate, asked, scaling, usd)
            found = replace(found, unmeasured=unmeasured)
        return replace(found, workload=self.workload, too_dear=self.too_dear, outlooks=looked)


def _rivals(found: Plan, used: set[str]) -> list[str]:
    """Of every other vendor, the accelerator that its own fleet has most of."""
    fleets = [fleet.gpus for fleet in found.single_vendor.values() if fleet is not None and not used & set(fleet.gpus)]
    return [max(gpus, key=lambda name: gpus[name]) for gpus in fleets if gpus]


def _costs_more(fleet: Solution | None, usd_per_hour: float) -> bool:
    """Too many times as much, to be sure; or there is no such fleet."""
    return fleet is None or fleet.usd_per_hour > _MOST_TO_BE_SURE * usd_per_hour


def _least_by_estimates(sure: _Sized) -> float:
    """What no fleet costs less than by the estimates themselves."""
    read = sure.asked.by(offers(sure.surveyed, EstimateScale.none, peak=sure.asked.peak))
    return least_usd_per_hour(read.problem, np.ones(len(read.problem.gpus), bool))


def _as_sure(surveyed: list[Survey], priced: Market, workload: Workload, on_progress: OnProgress) -> _Sized:
    """One estimate is taken at the quantile of its error that the workload asks for. Where a fleet rests on several
    that may each be wrong, all of them hold less often, so each is taken as far as makes them sure together."""
    sure = workload.sureness
    scaling = WorldScaling(workload, sure)

    def read(scaling: WorldScaling) -> Choice:
        return choice(undominated(offers(surveyed, scaling, peak=peak_of(workload))), priced, workload)

    asked = read(scaling)
    on_progress(0, 0, f"{len(asked.offers.columns)} pools to choose from")
    answer = solve(asked.problem)
    if answer is None:
        return _Sized(workload, surveyed, asked, None, sure)
    if first := alternative(asked, answer, answer.usd_per_hour):
        # Whoever waits has a number before all that stands beside it.
        on_progress(0, 0, f"{dollars(first.usd_per_hour)} an hour so far: {first.label}")
    each = sure
    while True:
        errors = JointErrors(surveyed, asked, scaling)
        surer = errors.each_sure(answer, sure)
        if surer <= each or errors.enough(answer) >= sure:
            return _Sized(workload, surveyed, asked, answer, each)
        # A fleet of more pools rests on more estimates, and each of them must be surer still.
        scaling = WorldScaling(workload, surer)
        again = read(scaling)
        solution = solve_beside(again.problem)
        if solution is None:
            # Limits leave no room for that; then the answer says how sure it is.
            return _Sized(workload, surveyed, asked, answer, each)
        asked, answer, each = again, solution, surer


def _with_alternatives(
    surveyed: list[Survey], asked: Choice, answer: Solution, bare: Plan, scaling: WorldScaling,
    simulated: Mapping[str, Alternative],
) -> Plan:  # fmt: skip
    """`simulated`: the best of a vendor alone, where simulation has confirmed it."""
    workload, errors = bare.workload, JointErrors(surveyed, asked, scaling)
    alone, without = single_vendor(asked), without_each(asked, answer)
    by_policy = bool(np.any(asked.problem.vendor_share > 0))
    # Another fleet may cost next to nothing more and be simpler: a vendor's own, or one of fewer accelerators.
    rivals = {"": answer, **without} if by_policy else {"": answer, **without, **alone}
    rivals = near_ones_simplified(asked.problem, rivals, workload.constraints.simplicity)
    alone = {vendor: rivals.get(vendor, one) for vendor, one in alone.items()}
    if bare.confirmed:
        least = answer
    else:
        least, best = simplest(rivals, workload.constraints.simplicity, () if by_policy else alone.values())
        answer = tidied(asked.problem, replace(best, bound_usd_per_hour=answer.bound_usd_per_hour))
    without = without_each(asked, answer, rivals)
    known = np.zeros(len(asked.problem.gpus), bool)
    for solution in (answer, *alone.values(), *without.values()):
        if solution is not None:
            known |= solution.replicas > 0
    fleet = fleet_plan(asked, answer, workload)
    # Like with like: what no simulation has confirmed is compared with the answer's accelerators by closed forms.
    bought = fleet.gpus.keys()
    mine = asked.allowing(lambda item: item.id in bought)
    same = solve(asked.problem, mine, quickly=True) if bare.confirmed else None
    basis = same if same and same.usd_per_hour < answer.usd_per_hour else answer
    cost = basis.usd_per_hour
    likely, worth = _by_estimates(surveyed, asked, answer, workload) if workload.sureness > 0.5 else (None, None)
    vendors = {vendor: alternative(asked, one, cost) for vendor, one in alone.items()}
    runner_up = _runner_up(asked, without, cost)
    if bare.confirmed and runner_up:
        # The same fleet as a vendor's alone is shown as that was simulated.
        again = [vendor for vendor, one in vendors.items() if one and one.gpus == runner_up.fleet.gpus]
        runner_up = replace(runner_up, fleet=next((simulated[v] for v in again if v in simulated), runner_up.fleet))
    vendors |= simulated
    used = {pool.deployment.accelerator.vendor for pool in fleet.pools}
    if len(used) == 1 and bare.confirmed:
        vendors[used.pop()] = Alternative(fleet.gpus, fleet.usd_per_hour, 0.0, confirmed=True)
    # What stands further off is looked for among the accelerators of these fleets.
    kinds = {asked.offers.columns[i].deployment.accelerator.id for i in np.flatnonzero(known)}
    near, wider = (of_accelerators(surveyed, some) for some in (kinds, kinds | set(likely.gpus if likely else ())))
    flips = (*leaving(asked, basis, without), *entering(asked, basis, known))
    return replace(
        bare,
        fleet=fleet,
        closed_form_usd_per_hour=cost,
        drafts=drafting_pools(surveyed, asked, answer, fleet.pools, scaling_of(workload)),
        single_vendor=vendors,
        runner_up=runner_up,
        cheaper=alternative(asked, least, cost) if least.usd_per_hour < cost * (1.0 - 1e-6) else None,
        uncertainty=errors.uncertainty(answer),
        flips=[flip for flip in flips if not flip.becomes.is_absurd],
        lengths=[_length(near, asked, basis, workload, factor) for factor in _LENGTHS],
        years=_years(asked, answer, workload, known, cost),
        by_estimates=likely,
        worth_measuring=worth,
        sureness=_sureness(wider, asked, answer, workload, likely, errors),
        binding=bindings(asked, basis, workload),
        targets=target_prices(near, asked, answer, scaling_of(workload), bare.simulated),
        simulated=[_with_predicted(simulated_class, asked, answer) for simulated_class in bare.simulated],
    )


def _with_predicted(simulated_class: SimulatedClass, asked: Choice, answer: Solution) -> SimulatedClass:
    """Beside what was simulated, the shares that closed forms say keep each target at the load of each pool."""
    parts = [part.index for part in asked.offers.parts if part.request_class.name == simulated_class.name]
    weight = np.array([asked.offers.parts[place].slice.share for place in parts])
    share, kept = answer.share[:, parts], asked.problem.kept[:, :, parts]
    ttft, tpot = ((share * kept[k]).sum(axis=0) @ weight / weight.sum() for k in (0, 1))
    return replace(
        simulated_class,
        predicted_ttft=float(ttft) if simulated_class.ttft else None,
        predicted_tpot=float(tpot) if simulated_class.tpot else None,
    )


def _runner_up(asked: Choice, without: dict[str, Solution | None], cost: float) -> RunnerUp | None:
    """Fleets that are cheaper for having more kinds and pools are not what it competes with."""
    rivals = [(name, alternative(asked, other, cost)) for name, other in without.items()]
    dearer = [(name, one) for name, one in rivals if one and one.usd_per_hour >= cost * (1.0 - 1e-9)]
    best = min(dearer, key=lambda pair: pair[1].usd_per_hour, default=None)
    return RunnerUp(*best) if best else None


def _by_estimates(
    surveyed: list[Survey], asked: Choice, answer: Solution, workload: Workload
) -> tuple[Alternative | None, Worth | None]:
    """The fleet by the estimates themselves, and the measurement that would go furthest towards it."""
    read = asked.by(offers(surveyed, EstimateScale.none, peak=asked.peak))
    return cheapest(read, answer.usd_per_hour), worth_measuring(asked, read, answer, scaling_of(workload))


def _sureness(
    surveyed: list[Survey], asked: Choice, answer: Solution, workload: Workload, likely: Alternative | None,
    errors: JointErrors,
) -> list[Sureness]:  # fmt: skip
    """What fleets cost that are less or more sure."""
    if errors.uncertainty(answer) is None:
        return []
    surenesses = []
    ours = alternative(asked, answer, answer.usd_per_hour)
    for sure in sorted({*_SURE, workload.sureness}):
        if sure == workload.sureness:
            fleet = ours
        elif sure == 0.5:
            fleet = likely
        else:
            scaling = WorldScaling(workload, errors.each_sure(answer, sure))
            fleet = cheapest(asked.by(offers(surveyed, scaling, peak=asked.peak)), answer.usd_per_hour)
        # What is surer than asked is sure enough; and what is surer than the answer, which holds, costs no less.
        dearer = fleet is not None and fleet.usd_per_hour > answer.usd_per_hour
        if fleet is not None and sure != workload.sureness and dearer == (sure < workload.sureness):
            fleet = ours
        surenesses.append(Sureness(sure, fleet))
    return surenesses


def _length(surveyed: list[Survey], asked: Choice, answer: Solution, workload: Workload, factor: float) -> PromptLength:
    """The fleet if prompts were so many times as long."""
    again = [survey(one.deployments, longer(one, factor)) for one in surveyed]
    fleet = cheapest(asked.by(offers(again, scaling_of(workload), peak=asked.peak)), answer.usd_per_hour)
    return PromptLength(factor, fleet, fleet is not None and set(fleet.gpus) == set(asked.gpus(answer)))


def _years(asked: Choice, answer: Solution, workload: Workload, known: Mask, cost: float) -> list[Year]:
    """By the end of each year; the first is the answer's, and the others are compared with `cost`."""
    today = sum(request_class.requests_per_s for request_class in workload.classes)
    growth = 1.0 + workload.growth_per_year
    years = []
    for year in range(1, workload.horizon_years + 1):
        times = growth ** (year - 1)
        bigger = replace(asked, problem=replace(asked.problem, demand=asked.problem.demand * times))
        same = alternative(asked, answer, answer.usd_per_hour) if times == 1.0 else None
        years.append(Year(year, today * max(growth, 1.0) * times, same or cheapest(bigger, cost, known)))
    return years

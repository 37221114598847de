"""The cheapest whole numbers of replicas that carry the load: a mixed-integer programme, solved by HiGHS.

    minimise    what the GPUs cost an hour, or draw
    over        n[c] replicas of column c, whole; x[p, c] the share of part p that column c carries
    such that   every part is carried                      sum over c of x[p, c] = 1
                no column carries more than it can         sum over p of x[p, c] demand[p] / rate[c, p] <= n[c]
                every class keeps its percentiles          sum over p, c of weight[p] x[p, c] kept[c, p] >= need
                and the limits on GPUs, money, power and vendors hold

The allocation is Mélange's (arXiv 2404.14527) with the choice of layout and precision in the columns, and
with limits that it does not have. Vectors here are by column, by part or by accelerator.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crosstie.core.errors import BadInput

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]

# Work after which a search stops, with the gap that it then has: limits of time would make the answer depend on what
# else the machine does.
_NODES = 2000
_ITERATIONS = 400_000
# Programmes here are small and their relaxations near: what HiGHS does for large ones costs more than it saves
# (measured on ten of them: a third of the time).
_PLAIN = {
    "mip_heuristic_effort": 0.0,
    "mip_heuristic_run_feasibility_jump": False,
    "mip_allow_cut_separation_at_nodes": False,
    "mip_detect_symmetry": False,
    "mip_pscost_minreliable": 1,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
    "mip_allow_restart": False,
    "threads": 1,
    "random_seed": 1,
}
# The same search with all that HiGHS can do to find some fleet.
_THOROUGH = {"threads": 1, "random_seed": 1, "mip_heuristic_effort": 0.5}


@dataclass(frozen=True, slots=True)
class Percentile:
    """Of the requests of some parts, the share that must keep a target; `kept` as in the programme."""

    kept: int
    parts: Indices
    # By part of it, together 1.
    weight: Array
    need: float


@dataclass(frozen=True, slots=True)
class Programme:
    # (columns, parts): requests/s that one replica takes of a part alone; 0 where it may not.
    rate: Array
    # By part: requests/s to carry.
    demand: Array
    # By column.
    gpus: Array
    accelerator: Indices
    # By accelerator: USD an hour of one GPU that must be bought, and of running one on hand.
    usd_per_hour: Array
    running_usd_per_hour: Array
    watts: Array
    inventory: Array
    # GPUs on hand that are used, and those that are bought, together.
    at_most: Array
    # GPUs that are bought at once: 1, or a node.
    unit: Array
    vendor: Indices
    # By vendor: the least share of the fleet's value, each GPU at its price, on hand or not.
    vendor_share: Array
    budget_usd_per_hour: float = np.inf
    power_watts: float = np.inf
    # (targets, columns, parts): the share of a part's requests that keep their class's TTFT, and TPOT, in a column.
    kept: Array = field(default_factory=lambda: np.zeros((0, 0, 0)))
    percentiles: tuple[Percentile, ...] = ()
    # By column: those of one number are the same replicas under the same promise, meant for other requests. The gateway
    # cannot tell such pools apart, so a fleet has one of them.
    alike: Indices = field(default_factory=lambda: np.zeros(0, np.int64))
    # Whether the fleet is to draw least, to learn what that would be, and not to cost least.
    by_power: bool = False

    @property
    def price(self) -> Array:
        """By accelerator: of what is to be least."""
        return self.watts if self.by_power else self.usd_per_hour

    @property
    def is_coupled(self) -> bool:
        """Whether what one column takes can be another's loss."""
        return bool(
            np.isfinite([self.budget_usd_per_hour, self.power_watts]).any()
            or np.isfinite(self.at_most).any()
            or (self.inventory > 0).any()
            or (self.unit > 1).any()
            or (self.vendor_share > 0).any()
        )

    @property
    def replica_usd_per_hour(self) -> Array:
        """By column: one replica at its price."""
        return self.usd_per_hour[self.accelerator] * self.gpus

    def per_request(self, amount: Array) -> Array:
        """(columns, parts): what one request takes of a column's amount; infinite where it may not go there."""
        return np.divide(amount[:, None], self.rate, out=np.full_like(self.rate, np.inf), where=self.rate > 0)

    @property
    def on_hand_usd_per_hour(self) -> Array:
        """Nobody runs a GPU on hand for more than another one costs."""
        return np.minimum(self.running_usd_per_hour, self.usd_per_hour)

    def bought(self, gpus: Array) -> Array:
        """Of GPUs by accelerator those that must be bought, in whole units; the last axis is accelerators."""
        return np.asarray(np.ceil(np.maximum(gpus - self.inventory, 0.0) / self.unit - 1e-6) * self.unit)

    def spent_usd_per_hour(self, gpus: Array) -> Array:
        """The same in money, by accelerator: what is bought costs its price, used or not; the rest its running."""
        bought = self.bought(gpus)
        return bought * self.usd_per_hour + np.maximum(gpus - bought, 0.0) * self.on_hand_usd_per_hour

    def allows(self, gpus: Array) -> bool:
        """Whether so many by accelerator may be had: by what may be spent, drawn and bought, and by vendors' shares."""
        bought = self.bought(gpus)
        value = np.bincount(self.vendor, gpus * self.usd_per_hour, minlength=len(self.vendor_share))
        return bool(
            self.spent_usd_per_hour(gpus).sum() <= self.budget_usd_per_hour * (1.0 + 1e-9)
            and gpus @ self.watts <= self.power_watts * (1.0 + 1e-9)
            and np.all(bought + np.maximum(gpus - bought, 0.0) <= self.at_most + 1e-6)
            and np.all(value >= self.vendor_share * value.sum() * (1.0 - 1e-9))
        )

    def fleet(self, replicas: Indices, share: Array, bound_usd_per_hour: float = 0.0) -> "Solution":
        """So many replicas of each column, and what they cost."""
        gpus = np.bincount(self.accelerator, replicas * self.gpus, minlength=len(self.usd_per_hour)).astype(np.float64)
        cost = float(self.spent_usd_per_hour(gpus).sum())
        return Solution(
            replicas=replicas,
            share=share,
            usd_per_hour=cost,
            bound_usd_per_hour=min(bound_usd_per_hour, cost),
            gpus=gpus,
            bought=self.bought(gpus),
            watts=float(gpus @ self.watts),
        )

    def only(self, columns: Indices, parts: Indices) -> "Programme":
        return replace(
            self,
            rate=self.rate[np.ix_(columns, parts)],
            demand=self.demand[parts],
            gpus=self.gpus[columns],
            accelerator=self.accelerator[columns],
            kept=self.kept[:, columns][:, :, parts] if self.percentiles else self.kept,
            alike=self.alike[columns] if len(self.alike) else self.alike,
            percentiles=tuple(percentile for kept in self.percentiles if (percentile := _within(kept, parts))),
        )

    def keeps(self, columns: Indices) -> Array:
        """By column and percentile's part: what it keeps of it, nothing where it may not go there."""
        each = []
        for percentile in self.percentiles:
            there = np.ix_(columns, percentile.parts)
            each.append(np.where(self.rate[there] > 0, self.kept[percentile.kept][there], 0.0))
        return np.concatenate(each, axis=1) if each else np.zeros((len(columns), 0))


def _within(percentile: Percentile, parts: Indices) -> Percentile | None:
    """The same among some of the parts: all of its own, or none of them."""
    place = {int(part): index for index, part in enumerate(parts)}
    if not all(int(part) in place for part in percentile.parts):
        return None
    return replace(percentile, parts=np.array([place[int(part)] for part in percentile.parts], np.int64))


@dataclass(frozen=True, slots=True)
class Solution:
    # By column, and (columns, parts).
    replicas: Indices
    share: Array
    usd_per_hour: float
    # What no fleet can undercut, as far as the search went.
    bound_usd_per_hour: float
    # By accelerator: GPUs used, and those of them that are not on hand.
    gpus: Array
    bought: Array
    watts: float

    @property
    def pools(self) -> int:
        return int((self.replicas > 0).sum())

    @property
    def kinds(self) -> int:
        """Of accelerators."""
        return int((self.gpus > 0).sum())

    @property
    def gap(self) -> float:
        return max(0.0, 1.0 - self.bound_usd_per_hour / self.usd_per_hour) if self.usd_per_hour > 0 else 0.0


class Undecided(BadInput):
    """Neither a fleet nor the proof that there is none."""


class SparseRows:
    """Rows of a linear programme, one by one: which variables, times what, between which bounds."""

    def __init__(self) -> None:
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.entries: list[tuple[NDArray[Any], Array]] = []

    def add(self, where: NDArray[Any], values: Array, low: float, high: float) -> None:
        self.entries.append((where, values))
        self.lower.append(low)
        self.upper.append(high)

    def model(self, cost: Array, least: Array, most: Array) -> Any:
        """As HiGHS takes it; `least` and `most` are bounds of the variables."""
        # Only plans need it, and it takes 20 ms to import.
        import highspy

        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(cost), len(self.entries)
        model.col_cost_, model.col_lower_, model.col_upper_ = cost, least, most
        model.row_lower_, model.row_upper_ = np.array(self.lower), np.array(self.upper)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.concatenate(([0], np.cumsum([len(where) for where, _ in self.entries])))
        model.a_matrix_.index_ = np.concatenate([np.zeros(0, np.int64), *(where for where, _ in self.entries)])
        model.a_matrix_.value_ = np.concatenate([np.zeros(0), *(values for _, values in self.entries)])
        return model


class Rows(SparseRows):
    """Variables: n by column, x by pair of column and part; by accelerator units bought, and GPUs on hand in use."""

    def __init__(self, problem: Programme):
        super().__init__()
        self.problem = problem
        self.column, self.part = np.nonzero(problem.rate)
        self.first_share = len(problem.gpus)
        self.first_bought = self.first_share + len(self.column)
        self.first_on_hand = self.first_bought + len(problem.usd_per_hour)
        self.size = self.first_on_hand + len(problem.usd_per_hour)
        self._carry()
        self._gpus()
        self._limits()

    def _carry(self) -> None:
        problem = self.problem
        for part in range(len(problem.demand)):
            where = self.first_share + np.flatnonzero(self.part == part)
            self.add(where, np.ones(len(where)), 1.0, 1.0)
        load = problem.demand[self.part] / problem.rate[self.column, self.part]
        # The first rows are parts, then percentiles: `solver` reads their duals.
        for percentile in problem.percentiles:
            mine = np.flatnonzero(np.isin(self.part, percentile.parts))
            weight = np.zeros(len(problem.demand))
            weight[percentile.parts] = percentile.weight
            kept = weight[self.part[mine]] * problem.kept[percentile.kept][self.column[mine], self.part[mine]]
            self.add(self.first_share + mine, kept, percentile.need - 1e-6, np.inf)
        starts = np.searchsorted(self.column, np.arange(self.first_share + 1))
        for column in range(self.first_share):
            mine = np.arange(starts[column], starts[column + 1])
            where = np.concatenate(([column], self.first_share + mine))
            self.add(where, np.concatenate(([-1.0], load[mine])), -np.inf, 0.0)

    def _gpus(self) -> None:
        problem = self.problem
        for kind in range(len(problem.usd_per_hour)):
            mine = np.flatnonzero(problem.accelerator == kind)
            if not len(mine):
                continue
            sources, unit = [self.first_bought + kind, self.first_on_hand + kind], problem.unit[kind]
            # What is used is bought or on hand.
            needed = np.concatenate((problem.gpus[mine], [-unit, -1.0]))
            self.add(np.concatenate((mine, sources)), needed, -np.inf, 0.0)
            if np.isfinite(problem.at_most[kind]):
                self.add(np.array(sources), np.array([unit, 1.0]), -np.inf, problem.at_most[kind])

    def _limits(self) -> None:
        problem = self.problem
        everything = np.arange(self.size)
        if np.isfinite(problem.budget_usd_per_hour):
            self.add(everything, self.cost(), -np.inf, problem.budget_usd_per_hour)
        if np.isfinite(problem.power_watts):
            self.add(everything, self.power(), -np.inf, problem.power_watts)
        value = problem.replica_usd_per_hour
        for vendor, share in enumerate(problem.vendor_share):
            if share > 0:
                of = problem.vendor[problem.accelerator] == vendor
                self.add(np.arange(self.first_share), (of - share) * value, 0.0, np.inf)

    def cost(self) -> Array:
        problem = self.problem
        cost = np.zeros(self.size)
        cost[self.first_bought : self.first_on_hand] = problem.usd_per_hour * problem.unit
        cost[self.first_on_hand :] = problem.on_hand_usd_per_hour
        return cost

    def power(self) -> Array:
        power = np.zeros(self.size)
        power[: self.first_share] = self.problem.watts[self.problem.accelerator] * self.problem.gpus
        return power

    def work(self, replica: Array) -> Array:
        """Of an amount by replica what is at work, however many replicas there are."""
        problem = self.problem
        work = np.zeros(self.size)
        load = problem.demand[self.part] / problem.rate[self.column, self.part]
        work[self.first_share : self.first_bought] = replica[self.column] * load
        return work

    def whole(self, divisible: bool) -> Mask:
        """Variables that are whole numbers: replicas unless they are divisible, and purchases of nodes."""
        mask = np.zeros(self.size, bool)
        mask[: self.first_share] = not divisible
        # GPUs that are bought one by one are whole by themselves, since replicas are.
        mask[self.first_bought : self.first_on_hand] = self.problem.unit > 1
        return mask

    def most(self) -> Array:
        bounds = np.full(self.size, np.inf)
        bounds[self.first_share : self.first_bought] = 1.0
        bounds[self.first_on_hand :] = self.problem.inventory
        return bounds


class SolverResult(NamedTuple):
    """Values of the variables, or None; the bound that the search proved; and what each row costs, if relaxed."""

    values: Array | None
    bound: float
    duals: Array


def run_highs(
    rows: Rows,
    cost: Array,
    gap: float,
    *,
    replicas: Array | None = None,
    relaxed: bool = False,
    divisible: bool = False,
    thorough: bool = False,
) -> SolverResult:
    """`replicas` fixes their numbers; `divisible` lets them be divided, `relaxed` nodes as well; `thorough` looks for
    any fleet with all means."""
    import highspy

    least, most = np.zeros(rows.size), rows.most()
    if replicas is not None:
        least[: rows.first_share] = most[: rows.first_share] = replicas
    model = rows.model(cost, least, most)
    kinds = highspy.HighsVarType
    if replicas is None and not relaxed:
        model.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for whole in rows.whole(divisible)]
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    limits = {"mip_rel_gap": gap, "mip_max_nodes": _NODES, "simplex_iteration_limit": _ITERATIONS}
    for name, value in {**(_THOROUGH if thorough else _PLAIN), **limits}.items():
        solver.setOptionValue(name, value)
    solver.passModel(model)
    solver.run()
    info = solver.getInfo()
    none = np.zeros(0)
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        status = highspy.HighsModelStatus
        if solver.getModelStatus() in (status.kInfeasible, status.kUnboundedOrInfeasible):
            return SolverResult(None, 0.0, none)
        raise Undecided("no fleet found, and none ruled out: fewer classes or limits would help")
    got = solver.getSolution()
    bound = info.objective_function_value if relaxed else info.mip_dual_bound
    return SolverResult(np.array(got.col_value), float(bound), np.array(got.row_dual) if relaxed else none)

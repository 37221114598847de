"""A programme as rows and variables, and HiGHS to solve them."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crosstie.core.errors import BadInput
from crosstie.decide.plan.programme import Array, Mask, Programme

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

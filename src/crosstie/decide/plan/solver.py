"""From a programme to the cheapest fleet: what cannot matter is left out, what is separate is solved apart."""

from dataclasses import replace

import numpy as np

from crosstie.decide.plan.programme import Array, Indices, Mask, Programme, Rows, Solution, Undecided, run_highs

# Of fleets that cost the same, as in whole nodes many do, the one with the least GPU time at work is the answer: so
# much of its worth counts as cost. Without that it would be whichever the solver came to, which hangs on the last bits
# of its arithmetic and so on the processor. A fleet that saves less than this of its price may be passed over.
WORK = 1e-3
# How far from the best a fleet may be before the search stops, small enough for the same fleet everywhere.
GAP = 1e-6
# How much dearer a request may be on columns that fleets are made of which are only shown beside the answer.
_NEAR = 1.2
# Programmes with more pairs of columns and parts than this are solved with the columns that the relaxation uses and
# those that would be nearest to being used: so many, and where that ends so far above the bound, so many more.
_LARGE, _FEW_COLUMNS, _ABOVE, _MORE_COLUMNS = 120, 10, 1.02, 100
# With more kinds of requests than this the last percent takes longer than it is worth.
MANY_PARTS, MANY_PARTS_GAP = 24, 1e-2
# HiGHS calls some programmes solved whose numbers are none, or such.
_BEYOND_ANY_FLEET = 1e12


def solve(
    problem: Programme, allowed: Mask | None = None, *, quickly: bool = False, bounded: bool = False
) -> Solution | None:
    """The best fleet of the allowed columns, or None where there is none.

    `quickly`: a good fleet will do, and where none was found and none ruled out there is none; its bound is that of
    whole nodes where that is `bounded`.
    """
    usable = problem.rate.max(axis=1, initial=0.0) > 0
    if allowed is not None:
        usable &= allowed
    columns = np.flatnonzero(usable)
    if not np.all((problem.rate[columns] > 0).any(axis=0)):
        return None
    if not quickly:
        return _one_of_alike(problem, columns, False, True)
    try:
        solution = None
        if not problem.is_coupled:
            solution = _one_of_alike(problem, _near_the_best(problem, columns), True, bounded)
        return solution or _one_of_alike(problem, columns, True, bounded)
    except Undecided:
        return None


def solve_beside(problem: Programme) -> Solution | None:
    """The best fleet for a question beside another; None where it was not decided, too: what stands beside an answer
    never takes the answer away."""
    try:
        return solve(problem)
    except Undecided:
        return None


def _one_of_alike(problem: Programme, columns: Indices, quickly: bool, bounded: bool) -> Solution | None:
    """The best fleet in which of columns that are alike only one has replicas: the one that had most, as it turns out.

    The bound is that of all columns together.
    """
    best = solution = _solve(problem, columns, quickly, bounded)
    while solution is not None and best is not None and len(problem.alike):
        used = np.flatnonzero(solution.replicas)
        most: dict[int, int] = {}
        for column in used[np.argsort(-solution.replicas[used], kind="stable")]:
            most.setdefault(int(problem.alike[column]), int(column))
        if len(most) == len(used):
            return replace(solution, bound_usd_per_hour=best.bound_usd_per_hour)
        # Those that are meant for whole classes take the place of several.
        twice = {int(kind) for kind in problem.alike[used] if (problem.alike[used] == kind).sum() > 1}
        widest = {kind: _widest(problem, columns, kind) for kind in twice}
        columns = np.array(
            [c for c in columns if int(problem.alike[c]) not in twice or c == widest[int(problem.alike[c])]], np.int64
        )
        solution = _solve(problem, columns, quickly, bounded)
    return solution


def _widest(problem: Programme, columns: Indices, kind: int) -> int:
    """Of columns that are alike the one that takes most parts, and most of them."""
    mine = columns[problem.alike[columns] == kind]
    rate = problem.rate[mine]
    return int(mine[np.lexsort((rate.sum(axis=1), (rate > 0).sum(axis=1)))[-1]])


def _solve(problem: Programme, columns: Indices, quickly: bool, bounded: bool) -> Solution | None:
    replicas = np.zeros(len(problem.gpus), np.int64)
    share = np.zeros_like(problem.rate)
    bound = 0.0
    for some, parts in _pieces(problem, columns):
        found = _piece(problem.only(some, parts), quickly, bounded)
        if found is None:
            return None
        replicas[some], share[np.ix_(some, parts)] = found[:2]
        bound += found[2]
    # What is at work is worth no more than what is paid for, or on hand.
    on_hand = float((problem.inventory * problem.usd_per_hour).sum())
    least = 0.0 if problem.by_power else max(bound - WORK * on_hand, 0.0) / (1.0 + WORK)
    return problem.fleet(replicas, share, least)


def _pieces(problem: Programme, columns: Indices) -> list[tuple[Indices, Indices]]:
    """Columns and parts that have nothing to do with one another: models, as long as no limit joins them."""
    everything = np.arange(len(problem.demand))
    if problem.is_coupled:
        return [(columns, everything)]
    serves = problem.rate[columns] > 0
    return [
        (worth_their_price(problem, columns[serves[:, parts].any(axis=1)]), parts) for parts in _groups_of_parts(serves)
    ]


def _near_the_best(problem: Programme, columns: Indices) -> Indices:
    """Columns that take some part for little more than the cheapest does, or come in smaller replicas than that."""
    usd = problem.replica_usd_per_hour[columns]
    each = problem.per_request(problem.replica_usd_per_hour)[columns]
    smaller = np.isfinite(each) & (usd[:, None] < usd[each.argmin(axis=0)])
    return np.asarray(columns[((each <= _NEAR * each.min(axis=0)) | smaller).any(axis=1)])


def worth_their_price(problem: Programme, columns: Indices) -> Indices:
    """Without columns for which so many replicas of another take as much of everything for no more of the price.

    This loses no fleet as long as nothing else limits it.
    """
    rate = problem.rate[columns]
    cost = (problem.price[problem.accelerator] * problem.gpus)[columns]
    keeps = problem.keeps(columns)
    # Best first, so that most fall to the first few they meet.
    order = np.argsort(-(rate / cost[:, None]).sum(axis=1), kind="stable")
    kept: list[int] = []
    for index in order:
        instead = np.floor(cost[index] / cost[kept] + 1e-9)
        covers = np.all(instead[:, None] * rate[kept] >= rate[index] * (1.0 - 1e-9), axis=1)
        as_sure = np.all(keeps[kept] >= keeps[index] - 1e-9, axis=1)
        if not np.any(covers & as_sure):
            kept.append(int(index))
    return np.sort(columns[kept])


# Replicas, shares and the bound that was proved.
_Found = tuple[Indices, Array, float]


def _piece(problem: Programme, quickly: bool, bounded: bool) -> _Found | None:
    if np.count_nonzero(problem.rate) <= _LARGE:
        return _mixed(problem)
    rows = Rows(problem)
    objective = _objective(rows)
    relaxed = run_highs(rows, objective, GAP, relaxed=True)
    if relaxed.values is None:
        return None
    bound = max(relaxed.bound, _bound_in_nodes(rows, objective)) if bounded else relaxed.bound
    used = relaxed.values[: rows.first_share] > 1e-6
    nearest = np.argsort(-np.where(used, np.inf, _worth(rows, relaxed.duals)), kind="stable")
    alone, best, least = _best_alone(problem), None, np.inf
    for few in (_FEW_COLUMNS,) if quickly else (_FEW_COLUMNS, _MORE_COLUMNS):
        tried = [np.unique(np.concatenate((nearest[: max(few, int(used.sum()))], *alone))), *alone[:1]]
        for columns in tried:
            found = _of_columns(problem, columns)
            if found is not None and (amount := _amount(problem, found[0])) < least * (1.0 - 1e-9):
                best, least = found, amount
            # Where a search has ended early, one accelerator by itself is known to do.
            if best is not None and least <= best[2] * (1.0 + MANY_PARTS_GAP):
                break
        if least <= _ABOVE * bound:
            break
    # None: limits that whole replicas of these columns cannot keep.
    return (*best[:2], bound) if best else _mixed(problem)


def _bound_in_nodes(rows: Rows, objective: Array) -> float:
    """What no fleet of whole nodes undercuts, though its replicas could be divided."""
    if not (rows.problem.unit > 1).any():
        return 0.0
    try:
        return run_highs(rows, objective, GAP, divisible=True).bound
    except Undecided:
        return 0.0


def _of_columns(problem: Programme, columns: Indices) -> _Found | None:
    """The best fleet of some columns, as one of all."""
    found = _mixed(problem.only(columns, np.arange(len(problem.demand))))
    if found is None:
        return None
    replicas, share = np.zeros(len(problem.gpus), np.int64), np.zeros_like(problem.rate)
    replicas[columns], share[columns] = found[:2]
    return replicas, share, found[2]


def _amount(problem: Programme, replicas: Indices) -> float:
    """What a fleet is to have least of."""
    fleet = problem.fleet(replicas, np.zeros_like(problem.rate))
    return fleet.watts if problem.by_power else fleet.usd_per_hour


def _best_alone(problem: Programme) -> list[Indices]:
    """Of each accelerator that can carry everything by itself, the columns that do so on the fewest GPUs in whole
    replicas, one for each group of parts that replicas share; the accelerator that costs least first.

    The relaxation divides replicas and nodes: of little traffic, which leaves most of a node idle, it knows nothing.
    """
    groups, found, no_shares = _groups_of_parts(problem.rate > 0), [], np.zeros_like(problem.rate)
    for kind in range(len(problem.usd_per_hour)):
        best, replicas = [], np.zeros(len(problem.gpus), np.int64)
        for parts in groups:
            mine = np.flatnonzero((problem.accelerator == kind) & (problem.rate[:, parts] > 0).all(axis=1))
            if not len(mine):
                break
            needed = np.ceil((problem.demand[parts] / problem.rate[np.ix_(mine, parts)]).sum(axis=1) - 1e-9)
            fewest = int(np.argmin(needed * problem.gpus[mine]))
            best.append(mine[fewest])
            replicas[mine[fewest]] = needed[fewest]
        else:
            found.append((problem.fleet(replicas, no_shares).usd_per_hour, np.array(best, np.int64)))
    return [columns for _, columns in sorted(found, key=lambda one: one[0])]


def _groups_of_parts(serves: Mask) -> list[Indices]:
    """Parts that some columns serve together: those of a model."""
    left, found = np.ones(serves.shape[1], bool), []
    while left.any():
        parts = np.zeros_like(left)
        parts[int(np.argmax(left))] = True
        while not np.array_equal(wider := serves[serves[:, parts].any(axis=1)].any(axis=0) | parts, parts):
            parts = wider
        left &= ~parts
        found.append(np.flatnonzero(parts))
    return found


def _worth(rows: Rows, duals: Array) -> Array:
    """By column: what a replica would earn at the relaxation's prices of the parts, over what it costs; 1 at most."""
    problem = rows.problem
    count = len(problem.demand)
    earned = np.repeat(duals[:count][None, :], len(problem.gpus), axis=0)
    for percentile, dual in zip(problem.percentiles, duals[count:], strict=False):
        earned[:, percentile.parts] += dual * percentile.weight * problem.kept[percentile.kept][:, percentile.parts]
    each = np.maximum(problem.price[problem.accelerator] * problem.gpus, 1e-9)
    return np.asarray((earned * problem.rate / problem.demand).max(axis=1) / each)


def _mixed(problem: Programme) -> _Found | None:
    rows = Rows(problem)
    objective = _objective(rows)
    gap = MANY_PARTS_GAP if len(problem.demand) > MANY_PARTS else GAP
    try:
        values, bound, _ = run_highs(rows, objective, gap)
    except Undecided:
        found = _rounded_up(rows)
        if found is not None:
            return found
        # Limits that rounding breaks: any fleet within them will do.
        values, bound, _ = run_highs(rows, objective, gap, thorough=True)
    if values is None or not (np.abs(values) < _BEYOND_ANY_FLEET).all():
        return None
    return np.round(values[: rows.first_share]).astype(np.int64), _shares(rows, values), bound


def _rounded_up(rows: Rows) -> _Found | None:
    """The relaxation with whole replicas, if that keeps the limits: a fleet where the search found none."""
    values, bound, _ = run_highs(rows, _objective(rows), GAP, relaxed=True)
    if values is None:
        return None
    replicas = np.ceil(values[: rows.first_share] - 1e-9)
    kept, _, _ = run_highs(rows, _objective(rows), GAP, replicas=replicas)
    return None if kept is None else (replicas.astype(np.int64), _shares(rows, kept), bound)


def _objective(rows: Rows) -> Array:
    problem = rows.problem
    if problem.by_power:
        return rows.power() + WORK * rows.work(problem.watts[problem.accelerator] * problem.gpus)
    return rows.cost() + WORK * rows.work(problem.replica_usd_per_hour)


def tidied(problem: Programme, solution: Solution) -> Solution:
    """The same replicas with the load put where it costs least: a basic solution, so with few splits.

    The programme does not care which of two idle replicas a request goes to; whoever runs the fleet does.
    """
    used = np.flatnonzero(solution.replicas)
    parts = np.arange(len(problem.demand))
    rows = Rows(replace(problem.only(used, parts), budget_usd_per_hour=np.inf, power_watts=np.inf))
    work = rows.work(rows.problem.replica_usd_per_hour)
    values, _, _ = run_highs(rows, work, GAP, replicas=solution.replicas[used].astype(np.float64))
    if values is None:
        return solution
    share = np.zeros_like(problem.rate)
    share[used] = _shares(rows, values)
    return replace(solution, share=share)


def _shares(rows: Rows, values: Array) -> Array:
    share = np.zeros_like(rows.problem.rate)
    share[rows.column, rows.part] = np.clip(values[rows.first_share : rows.first_bought], 0.0, 1.0)
    # What the solver leaves of a millionth is nobody's traffic.
    share[share < 1e-6] = 0.0
    return np.asarray(share / share.sum(axis=0, keepdims=True))

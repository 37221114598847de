"""The mixed-integer programme against a search through every fleet, on instances small enough for that.

Whether given replicas carry the load is decided without a solver. By Farkas' lemma they do if and only if

    sum over c of w[c] n[c]  >=  sum over p of demand[p] min over c of w[c] / rate[c, p]      for every w >= 0

Both sides are linear between the planes w[c] = 0 and w[c] / rate[c, p] = w[d] / rate[d, p], so it is enough to look
at the rays in which these planes meet.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.needs import one_in
from tests.present import present

from crosstie.core.errors import BadInput
from crosstie.decide.plan import solver
from crosstie.decide.plan.optimise import simplify
from crosstie.decide.plan.programme import Array, Mask, Programme, Solution, Undecided, run_highs
from crosstie.decide.plan.solver import solve, solve_beside, tidied, worth_their_price

LIMITS = ("none", "inventory", "at_most", "budget", "power", "vendor_share", "nodes", "all")


def cheapest(problem: Programme, allowed: Mask | None = None) -> Solution | None:
    """By its price alone: `solve` counts a thousandth of what is at work, so that one of equals is the best."""
    with mock.patch.object(solver, "WORK", 0.0):
        return solve(problem, allowed)


def instance(seed: int, limit: str = "none", columns: int = 0) -> Programme:
    """Two to four columns, one to three parts, whatever limits; at most a handful of replicas of each."""
    chance = np.random.default_rng(seed)
    count, parts, kinds = columns or int(chance.integers(2, 5)), int(chance.integers(1, 4)), int(chance.integers(1, 4))
    rate = np.exp(chance.normal(1.0, 0.6, (count, parts))) * (chance.random((count, parts)) > 0.2)
    gpus = chance.choice([1.0, 2.0, 4.0], count)
    usd: Array = np.exp(chance.normal(1.0, 0.4, kinds))

    def has(name: str, probability: float = 0.6) -> bool:
        return limit == name or (limit == "all" and bool(chance.random() < probability))

    inventory = np.where(has("inventory"), chance.integers(0, 7, kinds), 0.0)
    share = (
        np.array([chance.choice([0.0, 0.3, 0.6]), chance.choice([0.0, 0.4])]) if has("vendor_share") else np.zeros(2)
    )
    # A share of a vendor may ask for replicas that carry nothing: as many as can be had.
    bounded = has("at_most") or bool(share.any())
    nodes = has("nodes")
    demand = np.exp(chance.normal(0.8, 0.5, parts))
    # About what a fleet costs, so that a budget sometimes binds and sometimes forbids everything.
    with np.errstate(divide="ignore"):
        about = float((demand / rate).min(axis=0).clip(max=9).sum() * (usd.mean() * gpus.mean()))
    return Programme(
        rate=rate, demand=demand, gpus=gpus, accelerator=chance.integers(0, kinds, count), usd_per_hour=usd,
        # Running may cost more than the rent: then nobody runs what is on hand.
        running_usd_per_hour=np.where(inventory > 0, usd * chance.choice([0.2, 0.5, 1.3], kinds), 0.0),
        watts=np.round(chance.uniform(300, 1500, kinds)), inventory=inventory,
        at_most=np.where(bounded, chance.integers(2, 13, kinds), np.inf),
        unit=np.where(chance.random(kinds) < 0.7, 8.0, 1.0) if nodes else np.ones(kinds),
        vendor=chance.integers(0, 2, kinds), vendor_share=share,
        budget_usd_per_hour=about * chance.uniform(0.5, 3.0) if has("budget") else np.inf,
        power_watts=about / usd.mean() * 900.0 * chance.uniform(0.5, 3.0) if has("power") else np.inf,
    )  # fmt: skip


def rays(problem: Programme) -> Array:
    """Directions of w in which the planes of the lemma meet; rows."""
    count = len(problem.gpus)
    planes = list(np.eye(count))
    for part in range(len(problem.demand)):
        able = np.flatnonzero(problem.rate[:, part])
        for a, b in itertools.combinations(able, 2):
            plane = np.zeros(count)
            plane[a], plane[b] = problem.rate[b, part], -problem.rate[a, part]
            planes.append(plane)
    chosen = np.array(list(itertools.combinations(planes, count - 1)))
    # The cross product: by cofactors, so without dividing by anything.
    minors = [np.linalg.det(np.delete(chosen, c, axis=2)) * (-1) ** c for c in range(count)]
    found = np.stack(minors, axis=1)
    found = np.concatenate((found, -found))
    size = np.abs(found).max(axis=1, keepdims=True)
    found = found[size[:, 0] > 1e-9] / size[size[:, 0] > 1e-9]
    return np.where(np.abs(found) < 1e-12, 0.0, found)[np.all(found > -1e-12, axis=1)]


def carries(problem: Programme, replicas: Array) -> Mask:
    """For rows of replica counts whether they carry the load."""
    if not np.all((problem.rate > 0).any(axis=0)):
        return np.zeros(len(replicas), bool)
    w = rays(problem)
    per_request = np.where(problem.rate > 0, w[:, :, None] / np.where(problem.rate > 0, problem.rate, 1.0), np.inf)
    asked = per_request.min(axis=1) @ problem.demand
    return np.asarray(np.all(replicas @ w.T >= asked - 1e-9, axis=1))


def fleets(problem: Programme) -> Array:
    """Every number of replicas that could make sense: beyond these all load is carried, or nothing more is had."""
    loads = np.where(problem.rate > 0, problem.demand / np.where(problem.rate > 0, problem.rate, 1.0), 0.0).sum(axis=1)
    had = problem.at_most[problem.accelerator] / problem.gpus
    most = np.floor(had) if problem.vendor_share.any() else np.minimum(np.ceil(loads), np.floor(had))
    most = np.where((problem.rate > 0).any(axis=1), most, 0)
    return np.array(list(itertools.product(*(range(int(n) + 1) for n in most))), float)


def price(problem: Programme, replicas: Array) -> tuple[float, float]:
    """USD an hour and watts from first principles, infinite where a limit is broken."""
    usd = watts = 0.0
    value = np.zeros(len(problem.vendor_share))
    for kind in range(len(problem.usd_per_hour)):
        used = sum(n * g for n, g, a in zip(replicas, problem.gpus, problem.accelerator, strict=True) if a == kind)
        unit, on_hand, each = problem.unit[kind], problem.inventory[kind], problem.usd_per_hour[kind]
        running = min(problem.running_usd_per_hour[kind], each)
        # As many units as it takes, or more: whatever is least and allowed.
        ways = []
        for units in range(int(used // unit) + 2):
            from_stock = max(used - units * unit, 0.0)
            if from_stock <= on_hand and units * unit + from_stock <= problem.at_most[kind]:
                ways.append(units * unit * each + from_stock * running)
        if not ways:
            return np.inf, np.inf
        usd += min(ways)
        watts += used * problem.watts[kind]
        value[problem.vendor[kind]] += used * each
    kept = (
        usd <= problem.budget_usd_per_hour + 1e-9
        and watts <= problem.power_watts + 1e-9
        and np.all(value >= problem.vendor_share * value.sum() - 1e-9)
    )
    return (usd, watts) if kept else (np.inf, np.inf)


def by_search(problem: Programme, what: int = 0) -> float | None:
    """The least cost (0) or power (1) of all fleets."""
    candidates = fleets(problem)
    able = candidates[carries(problem, candidates)]
    least = min((price(problem, one)[what] for one in able), default=np.inf)
    return None if np.isinf(least) else float(least)


def assert_feasible(problem: Programme, found: Solution) -> None:
    """The shares are what they claim to be, and so are the counts."""
    assert np.all(found.share >= 0)
    assert found.share.sum(axis=0) == pytest.approx(1.0)
    assert not np.any(found.share[problem.rate == 0])
    rate = np.where(problem.rate > 0, problem.rate, 1.0)
    load = (found.share * problem.demand / rate).sum(axis=1)
    assert np.all(load <= found.replicas * (1 + 1e-5) + 1e-5)
    usd, watts = price(problem, found.replicas.astype(float))
    assert found.usd_per_hour == pytest.approx(usd)
    assert found.watts == pytest.approx(watts)
    assert found.bound_usd_per_hour <= found.usd_per_hour


def test_farkas_agrees_with_a_greedy_knapsack() -> None:
    """Two columns: fill the first with what it is best at, compared to the second."""

    def greedy(problem: Programme, first: float, second: float) -> bool:
        one, other = problem.rate
        room, left = first, 0.0
        for part in sorted(range(len(problem.demand)), key=lambda p: -one[p] / other[p] if other[p] else -np.inf):
            taken = min(problem.demand[part], room * one[part])
            room -= taken / one[part] if one[part] else 0.0
            rest = problem.demand[part] - taken
            if rest > 1e-12:
                if not other[part]:
                    return False
                left += rest / other[part]
        return bool(left <= second + 1e-9)

    seen = set()
    for seed in range(150):
        problem = instance(seed, columns=2)
        if not np.all((problem.rate > 0).any(axis=0)):
            continue
        counts = np.array(list(itertools.product(np.arange(0, 4, 0.5), repeat=2)))
        for count, able in zip(counts, carries(problem, counts), strict=True):
            assert able == greedy(problem, *count), (seed, count)
            seen.add(bool(able))
    assert seen == {True, False}


@pytest.mark.parametrize("limit", [pytest.param(one, marks=[] if one == "all" else pytest.mark.slow) for one in LIMITS])
def test_solve_finds_what_a_search_finds(limit: str) -> None:
    """The least cost, and None exactly where there is no fleet."""
    found_some = found_none = 0
    for seed in range(60):
        problem = instance(1000 * LIMITS.index(limit) + seed, limit)
        least, found = by_search(problem), cheapest(problem)
        assert (least is None) == (found is None), seed
        if found is None or least is None:
            found_none += 1
            continue
        found_some += 1
        assert_feasible(problem, found)
        assert found.usd_per_hour == pytest.approx(least, rel=1e-6), seed
        assert found.bound_usd_per_hour == pytest.approx(least, rel=1e-5), seed
    assert found_some >= 20
    assert found_none >= 1


@pytest.mark.parametrize("limit", one_in(3, ["all", "none", "nodes"]))
def test_least_power_too(limit: str) -> None:
    for seed in range(40):
        problem = instance(20_000 + seed, limit)
        least, found = by_search(problem, what=1), cheapest(replace(problem, by_power=True))
        assert (least is None) == (found is None), seed
        if found is not None:
            assert found.watts == pytest.approx(least, rel=1e-6), seed


def some(limits: tuple[str, ...] = LIMITS, columns: int = 0) -> Iterator[tuple[int, Programme, Solution]]:
    """Instances that have a fleet, with the exact one."""
    for seed, limit in itertools.product(range(30_000, 30_025), limits):
        problem = instance(seed, limit, columns)
        found = cheapest(problem)
        if found is not None:
            yield seed, problem, found


@pytest.mark.slow
def test_a_quick_fleet_is_a_fleet_and_no_better_than_the_best() -> None:
    for seed, problem, best in some():
        quick = solve(problem, quickly=True)
        assert quick is not None, seed
        assert_feasible(problem, quick)
        assert quick.usd_per_hour >= best.usd_per_hour * (1 - 1e-6), seed
        usual = present(solve(problem))
        assert best.usd_per_hour * (1 - 1e-6) <= usual.usd_per_hour <= best.usd_per_hour * (1 + 2 * solver.WORK), seed


def test_a_programme_allows_the_fleets_that_break_no_limit() -> None:
    for limit in LIMITS:
        allowed = forbidden = 0
        for seed in range(60_000, 60_012):
            problem = instance(seed, limit)
            for replicas in fleets(problem)[::7]:
                gpus = np.bincount(problem.accelerator, replicas * problem.gpus, minlength=len(problem.usd_per_hour))
                can = problem.allows(gpus.astype(float))
                assert can == np.isfinite(price(problem, replicas)[0]), (limit, seed, replicas)
                allowed, forbidden = allowed + can, forbidden + (not can)
        assert allowed >= 5
        # With the others every fleet of the list can be had.
        assert forbidden >= 5 or limit in ("none", "inventory", "at_most", "nodes"), limit


@pytest.mark.slow
def test_columns_that_are_not_allowed_are_not_used() -> None:
    for seed, problem, best in some():
        used = best.replicas > 0
        other = cheapest(problem, ~used)
        if other is not None:
            assert not np.any(other.replicas[used]), seed
            assert other.usd_per_hour >= best.usd_per_hour * (1 - 1e-6), seed
        same = present(cheapest(problem, used))
        assert same.usd_per_hour == pytest.approx(best.usd_per_hour, rel=1e-6), seed


def test_dominance_and_pieces_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cost with every column in one programme; and something was left out, so that this says something."""
    problems = [(seed, problem, best) for seed, problem, best in some(("none",), columns=4)]
    fewer = [len(worth_their_price(problem, np.arange(4))) < 4 for _, problem, _ in problems]
    assert sum(fewer) >= 5
    monkeypatch.setattr(solver, "_pieces", lambda problem, columns: [(columns, np.arange(len(problem.demand)))])
    for seed, problem, best in problems:
        plain = present(cheapest(problem))
        assert plain.usd_per_hour == pytest.approx(best.usd_per_hour, rel=1e-6), seed


@pytest.mark.slow
def test_of_fleets_that_cost_the_same_the_least_busy_is_the_answer_however_columns_are_ordered() -> None:
    """In whole nodes many fleets cost the same. One of them has least at work, and no other is found on the way."""
    several = 0
    for seed in range(50_000, 50_060):
        problem = instance(seed, "nodes", columns=4)
        found = [
            solve(problem.only(order, np.arange(len(problem.demand))))
            for order in (np.arange(4), np.arange(3, -1, -1), np.array([2, 0, 3, 1]))
        ]
        if found[0] is None:
            continue
        first, backwards, mixed = (cast(Solution, one) for one in found)
        assert np.array_equal(first.replicas, backwards.replicas[::-1]), seed
        assert np.array_equal(first.replicas, mixed.replicas[[1, 3, 0, 2]]), seed
        assert first.share == pytest.approx(backwards.share[::-1], abs=1e-4), seed
        equal = present(cheapest(problem))
        assert first.usd_per_hour <= equal.usd_per_hour * (1 + solver.WORK), seed
        several += not np.array_equal(first.replicas, equal.replicas)
    assert several >= 5, "else price alone would have done"


def test_models_are_pieces_of_their_own() -> None:
    """Two problems that share nothing cost what they cost apart."""
    for seed in range(40_000, 40_020):
        one, other = instance(seed, columns=2), instance(seed + 500, columns=2)
        apart = [cheapest(one), cheapest(other)]
        nothing = np.zeros((2, len(other.demand)))
        rate = np.block([[one.rate, nothing], [np.zeros((2, len(one.demand))), other.rate]])
        kinds = len(one.usd_per_hour)

        def join(name: str, one: Programme = one, other: Programme = other) -> Any:
            return np.concatenate((getattr(one, name), getattr(other, name)))

        joined = replace(
            one, rate=rate, accelerator=np.concatenate((one.accelerator, other.accelerator + kinds)),
            **{name: join(name) for name in (
                "demand", "gpus", "usd_per_hour", "running_usd_per_hour", "watts", "inventory", "at_most", "unit", "vendor",
            )},
        )  # fmt: skip
        together = cheapest(joined)
        if apart[0] is None or apart[1] is None:
            assert together is None
            continue
        assert together is not None
        assert len(solver._pieces(joined, np.flatnonzero(rate.any(axis=1)))) >= 2
        assert together.usd_per_hour == pytest.approx(apart[0].usd_per_hour + apart[1].usd_per_hour, rel=1e-6)


@pytest.mark.slow
def test_tidied_keeps_the_fleet_and_carries_the_load_with_few_splits() -> None:
    for seed, problem, best in some():
        tidy = tidied(problem, best)
        assert np.array_equal(tidy.replicas, best.replicas), seed
        assert tidy.usd_per_hour == best.usd_per_hour, seed
        assert_feasible(problem, tidy)
        # A basic solution has as many shares that are not nil as it has rows: parts and pools.
        assert (tidy.share > 0).sum() <= len(problem.demand) + tidy.pools, seed

        def worth(solution: Solution, problem: Programme = problem) -> float:
            rate = np.where(problem.rate > 0, problem.rate, 1.0)
            usd = problem.usd_per_hour[problem.accelerator] * problem.gpus
            return float(usd @ (solution.share * problem.demand / rate).sum(axis=1))

        assert worth(tidy) <= worth(best) * (1 + 1e-5), seed


@pytest.mark.slow
def test_simplified_fleets_have_fewer_pools_and_cost_little_more() -> None:
    fewer = 0
    for seed, problem, best in some():
        simple = simplify(problem, best, 0.3)
        assert_feasible(problem, simple)
        assert simple.pools <= best.pools, seed
        assert simple.usd_per_hour <= best.usd_per_hour * 1.3 * (1 + 1e-9), seed
        fewer += simple.pools < best.pools
    assert fewer >= 3


def two_kinds(**changes: object) -> Programme:
    """One part; a cheap kind that takes 1 request/s and a dear one that takes 2, two GPUs each."""
    plain = Programme(
        rate=np.array([[1.0], [2.0]]), demand=np.array([3.0]), gpus=np.array([2.0, 2.0]), accelerator=np.array([0, 1]),
        usd_per_hour=np.array([1.0, 2.1]), running_usd_per_hour=np.zeros(2), watts=np.array([500.0, 800.0]),
        inventory=np.zeros(2), at_most=np.full(2, np.inf), unit=np.ones(2), vendor=np.array([0, 1]), vendor_share=np.zeros(2),
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


CASES: list[tuple[str, dict[str, object], list[int] | None, float]] = [
    ("three of the cheap kind", {}, [3, 0], 6.0),
    ("a second vendor", {"vendor_share": np.array([0.0, 0.4])}, [1, 1], 6.2),
    ("at most two GPUs of the cheap kind", {"at_most": np.array([2.0, np.inf])}, [1, 1], 6.2),
    ("little power", {"power_watts": 2700.0}, [1, 1], 6.2),
    ("four dear GPUs on hand", {"inventory": np.array([0.0, 4.0]), "running_usd_per_hour": np.array([0.0, 0.5])}, [0, 2], 2.0),
    # Six of the cheap kind would do; that the two idle ones of the node cost their price decides.
    ("a node", {"unit": np.array([8.0, 1.0]), "usd_per_hour": np.array([1.1, 2.1])}, [0, 2], 8.4),
    ("a node, and six on hand", {"unit": np.array([8.0, 8.0]), "inventory": np.array([6.0, 0.0]), "running_usd_per_hour": np.array([0.9, 0.0])}, [3, 0], 5.4),
    # Twelve would do, and nodes of eight make sixteen of them.
    ("nodes within what can be had", {"unit": np.array([8.0, 8.0]), "demand": np.array([6.0]), "at_most": np.array([12.0, np.inf])}, [0, 3], 16.8),
    ("rent below the running cost", {"inventory": np.array([4.0, 0.0]), "running_usd_per_hour": np.array([5.0, 0.0])}, [3, 0], 6.0),
    ("no money", {"budget_usd_per_hour": 5.9}, None, 0.0),
    ("no power", {"power_watts": 2500.0}, None, 0.0),
    ("no vendor", {"vendor": np.array([0, 0]), "vendor_share": np.array([0.0, 0.1])}, None, 0.0),
    ("nothing serves it", {"rate": np.zeros((2, 1))}, None, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "replicas", "usd"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_programme_finds_what_was_worked_by_hand(
    changes: dict[str, object], replicas: list[int] | None, usd: float
) -> None:
    problem = two_kinds(**changes)
    found = cheapest(problem)
    if replicas is None:
        assert found is None
        return
    assert found is not None
    assert found.replicas.tolist() == replicas
    assert found.usd_per_hour == pytest.approx(usd)


def test_idle_gpus_of_a_node_cost_their_price_beside_those_on_hand() -> None:
    """Ten are used: two on hand and a node would do, or nothing on hand and two nodes."""
    problem = two_kinds(
        unit=np.array([8.0, 8.0]), inventory=np.array([2.0, 0.0]), running_usd_per_hour=np.array([0.25, 0.0])
    )
    gpus = np.array([[10.0, 0.0], [9.0, 0.0], [2.0, 0.0], [3.0, 1.0]])
    assert problem.bought(gpus).tolist() == [[8, 0], [8, 0], [0, 0], [8, 8]]
    expected = [[8 + 2 * 0.25, 0], [8 + 0.25, 0], [2 * 0.25, 0], [8, 8 * 2.1]]
    assert problem.spent_usd_per_hour(gpus) == pytest.approx(np.array(expected))


def test_a_search_that_ends_without_an_answer_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that is used up must not read as: there is no fleet."""

    def at_a_loss(*arguments: Any, **options: Any) -> Any:
        raise Undecided("none ruled out")

    monkeypatch.setattr(solver, "run_highs", at_a_loss)
    with pytest.raises(BadInput, match="none ruled out"):
        solve(instance(1000, "all", columns=4))
    # What stands beside an answer is left out, and does not take the answer away.
    assert solve(instance(1000, "all", columns=4), quickly=True) is None
    assert solve_beside(instance(1000, "all", columns=4)) is None


def test_a_search_that_finds_nothing_leaves_the_relaxation_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any, replicas: Any = None, relaxed: bool = False) -> Any:
        if replicas is None and not relaxed:
            raise Undecided("none ruled out")
        return run_highs(*arguments, replicas=replicas, relaxed=relaxed)

    problem = instance(7)
    best = present(cheapest(problem))
    monkeypatch.setattr(solver, "run_highs", slow)
    rounded = present(solve(problem))
    load = np.divide(
        rounded.share * problem.demand, problem.rate, out=np.zeros_like(problem.rate), where=problem.rate > 0
    )
    assert np.all(load.sum(axis=1) <= rounded.replicas + 1e-6)
    assert rounded.share.sum(axis=0) == pytest.approx(1.0)
    assert rounded.bound_usd_per_hour <= best.usd_per_hour + 1e-9 <= rounded.usd_per_hour + 2e-9


@pytest.mark.slow
@given(st.integers(0, 10**6), st.floats(1.0, 3.0))
def test_more_load_or_higher_prices_never_cost_less(seed: int, factor: float) -> None:
    problem = instance(seed)
    now = cheapest(problem)
    if now is None:
        return
    busier = present(cheapest(replace(problem, demand=problem.demand * factor)))
    assert busier.usd_per_hour >= now.usd_per_hour * (1 - 1e-6)
    usd = problem.usd_per_hour.copy()
    usd[0] *= factor
    dearer = present(cheapest(replace(problem, usd_per_hour=usd)))
    assert now.usd_per_hour * (1 - 1e-6) <= dearer.usd_per_hour <= now.usd_per_hour * factor * (1 + 1e-6)


def test_of_little_traffic_whole_nodes_decide_and_not_the_relaxation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relaxation would take the eighth of a node that is cheap by the request; one small card is cheaper."""
    kinds = 12
    # By the request every one of the large kinds is cheaper than the small card, which is had singly.
    rate = np.full((kinds, 1), 100.0)
    rate[-1] = 1.0
    price = np.linspace(2.0, 3.0, kinds)
    problem = two_kinds(
        rate=rate, demand=np.array([0.5]), gpus=np.ones(kinds), accelerator=np.arange(kinds), usd_per_hour=price,
        running_usd_per_hour=np.zeros(kinds), watts=np.full(kinds, 700.0), inventory=np.zeros(kinds),
        at_most=np.full(kinds, np.inf), unit=np.array([8.0] * (kinds - 1) + [1.0]), vendor=np.zeros(kinds, np.int64),
        vendor_share=np.zeros(1),
    )  # fmt: skip
    monkeypatch.setattr(solver, "_LARGE", 0)
    monkeypatch.setattr(solver, "_MORE_COLUMNS", solver._FEW_COLUMNS)
    found = present(solve(problem))
    assert found.usd_per_hour == 3.0
    # The bound counts whole nodes, so that the answer is known to be the best.
    monkeypatch.setattr(solver, "_best_alone", lambda problem: [])
    assert (worse := solve(problem)) is not None
    assert worse.usd_per_hour == 16.0

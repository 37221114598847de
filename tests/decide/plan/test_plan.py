"""Whole plans of small workloads: against a search, against themselves at other prices, and against hand arithmetic."""

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.decide.plan.test_programme import by_search, carries, cheapest
from tests.decide.plan.workloads import BATCH, CHAT, CODE, FEW, TWO, one_class, workload
from tests.present import present

from crosstie.catalog.calibration import empty
from crosstie.catalog.library import Catalog
from crosstie.core.units import HOURS_PER_MONTH
from crosstie.core.workload import RequestClass, Workload
from crosstie.decide.plan.answer import FleetPlan
from crosstie.decide.plan.capacity import EstimateScale
from crosstie.decide.plan.market import market
from crosstie.decide.plan.optimise import Choice, choice
from crosstie.decide.plan.plan import Plan, plan as make_plan
from crosstie.decide.plan.solver import GAP, WORK
from crosstie.decide.plan.survey import offers, one_stack, surveys, undominated

# What a plan may be above the cheapest: what is at work counts a little, the solver's gap, and what fewer pools may cost.
SLACK = (1 + WORK + 2 * GAP) * (1 + 0.01)
CATALOG = Catalog([], calibration=empty())
PRICES = {"mi300x": 2.0, "mi355x": 4.0, "h200": 3.0, "b200": 5.0}
# Planned in a third of the time that all classes take, where the mixture is not the point: three MI300X.
LITTLE = (CODE, BATCH)


@cache
def _planned(classes: tuple[RequestClass, ...], changes: str, values: tuple[Any, ...]) -> Plan:
    return make_plan(CATALOG, workload(*classes, **dict(zip(changes.split(), map(_thawed, values), strict=True))))


def _thawed(value: Any) -> Any:
    return dict(value) if isinstance(value, frozenset) else value


def planned(*classes: RequestClass, **changes: Any) -> Plan:
    """Kept, since many tests compare with the same one."""
    changes = {"usd_per_gpu_hour": PRICES} | changes
    values = tuple(frozenset(v.items()) if isinstance(v, dict) else v for v in changes.values())
    return _planned(classes or (CHAT, CODE, BATCH), " ".join(changes), values)


def fleet_of(plan: Plan) -> FleetPlan:
    return present(plan.fleet)


def cost(plan: Plan) -> float:
    return fleet_of(plan).usd_per_hour


def asked_of(work: Workload) -> Choice:
    priced = market(CATALOG, work)
    surveyed = surveys(CATALOG, work, [item.accelerator for item in priced.items])
    return choice(offers(surveyed, EstimateScale.none), priced, work)


def some_prices(count: int, seed: int = 11) -> list[dict[str, float]]:
    chance = np.random.default_rng(seed)
    return [
        {name: round(usd * float(np.exp(chance.normal(0, 0.4))), 3) for name, usd in PRICES.items()}
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 3))])
def test_a_plan_is_what_a_search_through_all_fleets_finds(seed: int) -> None:
    """Two classes on two accelerators: every count of the few columns that serve them."""
    chance = np.random.default_rng(seed)
    classes = (
        one_class("a", float(chance.uniform(5, 60)), 800, 100, model="llama-3.1-8b"),
        one_class("b", float(chance.uniform(5, 40)), 4000, 50, ttft=(2.0, 0.9), model="llama-3.1-8b"),
    )
    prices = some_prices(6, seed=40 + seed)[seed]
    work = workload(*classes, accelerators=TWO, usd_per_gpu_hour=prices, simplicity=0.0)
    offered = asked_of(work)
    few = offered.problem
    # The four columns that take most for their money, and so few that all their counts can be tried.
    usd = few.usd_per_hour[few.accelerator] * few.gpus
    best = np.argsort((usd[:, None] / np.maximum(few.rate, 1e-9)).min(axis=1), kind="stable")[:4]
    # What a search through counts does not know: percentiles, and pools that are alike.
    small = replace(few.only(best, np.arange(len(few.demand))), percentiles=(), alike=np.arange(4))
    least, found = by_search(small), cheapest(small)
    assert least is not None
    assert found is not None
    assert found.usd_per_hour == pytest.approx(least, rel=1e-6)
    # The plan chooses among more, so it is no dearer; and no cheaper than if replicas could be divided.
    plan = make_plan(CATALOG, work)
    divided = (usd[:, None] / np.maximum(few.rate, 1e-12)).min(axis=0) @ few.demand
    assert cost(plan) >= divided * (1 - 1e-6)


def test_columns_that_are_left_out_would_not_have_helped() -> None:
    """The same least cost with every column, dominated ones too; one stack an accelerator costs a little at most."""
    for classes, prices in itertools.product(((CHAT, CODE), (CODE, BATCH)), some_prices(3)):
        work = workload(*classes, usd_per_gpu_hour=prices)
        everything = asked_of(work)
        fewer = choice(undominated(everything.offers), everything.market, work)
        assert len(fewer.offers.columns) < len(everything.offers.columns)
        least, same = cheapest(everything.problem), cheapest(fewer.problem)
        assert least is not None
        assert same is not None
        assert same.usd_per_hour == pytest.approx(least.usd_per_hour, rel=1e-6)
        single = choice(one_stack(everything.offers), everything.market, work)
        stacks = {(c.deployment.accelerator.id, c.deployment.stack.id) for c in single.offers.columns}
        assert len(stacks) == len({accelerator for accelerator, _ in stacks})
        alone = present(cheapest(single.problem))
        assert least.usd_per_hour * (1 - 1e-6) <= alone.usd_per_hour <= least.usd_per_hour * 1.1


@pytest.mark.slow
@pytest.mark.parametrize("prices", some_prices(6), ids=str)
def test_the_mixed_fleet_is_never_dearer_than_one_vendors(prices: dict[str, float]) -> None:
    plan = planned(usd_per_gpu_hour=prices)
    assert set(plan.single_vendor) == {"AMD", "NVIDIA"}
    for vendor, alone in plan.single_vendor.items():
        assert alone is not None
        assert cost(plan) <= alone.usd_per_hour
        own = cost(planned(usd_per_gpu_hour=prices, vendors=(vendor,)))
        assert cost(plan) <= own * SLACK
        # It is shown beside the answer, so it may be a little above that vendor's best.
        assert own / SLACK <= alone.usd_per_hour <= own * 1.03


@pytest.mark.slow
@pytest.mark.parametrize("prices", some_prices(2, seed=5), ids=str)
def test_cost_is_monotone_in_every_price(prices: dict[str, float]) -> None:
    now = cost(planned(usd_per_gpu_hour=prices))
    for name, factor in itertools.product(FEW, (0.6, 1.5)):
        then = cost(planned(usd_per_gpu_hour={**prices, name: prices[name] * factor}))
        if factor > 1:
            assert now / SLACK <= then <= now * factor * SLACK
        else:
            assert now * factor / SLACK <= then <= now * SLACK


def test_a_discount_is_a_price() -> None:
    cheaper = {**PRICES, "mi300x": PRICES["mi300x"] * 0.8}
    discounted = cost(planned(*LITTLE, discount={"mi300x": 0.2}))
    assert discounted == pytest.approx(cost(planned(*LITTLE, usd_per_gpu_hour=cheaper)))
    assert discounted < cost(planned(*LITTLE))


@pytest.mark.slow
def test_a_discount_of_a_vendor_is_one_of_each_of_its_accelerators() -> None:
    both = {name: usd * (0.7 if name.startswith("mi") else 1.0) for name, usd in PRICES.items()}
    vendors = cost(planned(*LITTLE, discount={"AMD": 0.3}))
    assert vendors == pytest.approx(cost(planned(*LITTLE, usd_per_gpu_hour=both)))


@pytest.mark.parametrize(
    "name", ["mi300x", *(pytest.param(x, marks=pytest.mark.slow) for x in ("h200", "mi355x", "b200"))]
)
@pytest.mark.slow
def test_prices_drive_accelerators_out_and_in(name: str) -> None:
    assert name not in planned(*LITTLE, usd_per_gpu_hour={**PRICES, name: 500.0}).accelerators
    assert planned(*LITTLE, usd_per_gpu_hour={**PRICES, name: 0.01}).accelerators == [name]


@pytest.mark.slow
@pytest.mark.parametrize("prices", [PRICES, *some_prices(2, seed=2)], ids=str)
def test_a_hair_beyond_a_flip_another_fleet_is_cheaper(prices: dict[str, float]) -> None:
    """A hair beyond the price the fleet of the plan is no longer the cheapest: a new plan beats it."""
    plan = planned(usd_per_gpu_hour=prices)
    fleet = fleet_of(plan)
    assert plan.flips
    for flip in plan.flips:
        beyond = flip.at_usd_per_gpu_hour * (1.001 if flip.kind == "price" else 0.999)
        again = planned(usd_per_gpu_hour={**prices, flip.accelerator: beyond}, simplicity=0.0)
        kept = fleet.usd_per_hour + fleet.gpus.get(flip.accelerator, 0) * (beyond - prices[flip.accelerator])
        assert cost(again) <= min(kept, flip.becomes.usd_per_hour) * (1 + WORK + 2 * GAP)
        if flip.kind == "price":
            assert flip.accelerator in fleet.gpus
            assert flip.accelerator not in flip.becomes.gpus
            assert beyond > prices[flip.accelerator]
            # What it says that costs as much there does cost as much.
            assert flip.becomes.usd_per_hour <= kept
        else:
            assert flip.accelerator not in fleet.gpus
            assert flip.accelerator in flip.becomes.gpus
            assert beyond < prices[flip.accelerator]
            assert flip.becomes.usd_per_hour < fleet.usd_per_hour


@pytest.mark.slow
def test_more_to_carry_costs_more() -> None:
    now = cost(planned())
    assert cost(planned(spare=0.5)) > now
    assert cost(planned(growth_per_year=0.5)) > now
    more = tuple(replace_rate(one, 1.5) for one in (CHAT, CODE, BATCH))
    assert cost(planned(*more)) > now
    # It is the same load, however it is said.
    assert cost(planned(spare=0.5)) == pytest.approx(cost(planned(*more)))
    assert cost(planned(growth_per_year=0.5)) == pytest.approx(cost(planned(*more)))
    # Traffic that shrinks is still there today.
    assert cost(planned(growth_per_year=-0.5)) == pytest.approx(now)


def replace_rate(one: RequestClass, factor: float) -> RequestClass:
    return msgspec.structs.replace(one, requests_per_s=one.requests_per_s * factor)


@pytest.mark.parametrize(
    "shares",
    [
        {"NVIDIA": 0.5},
        pytest.param({"AMD": 0.5}, marks=pytest.mark.slow),
        pytest.param({"AMD": 0.3, "NVIDIA": 0.3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.slow
def test_shares_of_vendors_are_kept(shares: dict[str, float]) -> None:
    plan = planned(*LITTLE, vendor_share=shares)
    value = {name: count * PRICES[name] for name, count in fleet_of(plan).gpus.items()}
    vendor = {item.id: item.vendor for item in plan.market.items}
    for name, share in shares.items():
        assert sum(usd for one, usd in value.items() if vendor[one] == name) >= share * sum(value.values()) * (1 - 1e-6)
    assert cost(plan) >= cost(planned(*LITTLE)) / SLACK
    for bound in plan.binding:
        assert bound.key == "vendor_share"
        assert bound.saves_usd_per_hour == pytest.approx(cost(plan) - bound.without_it.usd_per_hour)


def test_whole_nodes_are_paid_for_whole() -> None:
    plan = planned(*LITTLE, whole_nodes=True)
    nodes = {name: -(-count // 8) * 8 for name, count in fleet_of(plan).gpus.items()}
    assert cost(plan) == pytest.approx(sum(count * PRICES[name] for name, count in nodes.items()))
    assert cost(plan) >= cost(planned(*LITTLE)) / SLACK


def test_gpus_on_hand_make_it_cheaper() -> None:
    plan = planned(*LITTLE, inventory={"h200": 2})
    assert cost(plan) < cost(planned(*LITTLE))
    assert fleet_of(plan).on_hand == {"h200": min(2, fleet_of(plan).gpus.get("h200", 0))}
    running = next(item.running_usd_per_hour for item in plan.market.items if item.id == "h200")
    own = fleet_of(plan).on_hand["h200"]
    bought = sum(n * PRICES[name] for name, n in fleet_of(plan).gpus.items()) - own * PRICES["h200"]
    assert cost(plan) == pytest.approx(bought + own * running)


def test_rent_below_the_running_cost_is_no_obstacle() -> None:
    plan = planned(*LITTLE, inventory={"h200": 2}, usd_per_gpu_hour={**PRICES, "h200": 0.05})
    assert plan.accelerators == ["h200"]
    assert cost(plan) == pytest.approx(0.05 * fleet_of(plan).gpus["h200"])


@pytest.mark.slow
def test_limits_are_kept() -> None:
    free = fleet_of(planned(*LITTLE))
    most = max(free.gpus, key=lambda name: free.gpus[name])
    limited = planned(*LITTLE, at_most={most: free.gpus[most] - 1})
    assert fleet_of(limited).gpus.get(most, 0) < free.gpus[most]
    enough = planned(*LITTLE, budget_usd_per_month=free.usd_per_hour * HOURS_PER_MONTH * 1.001)
    assert cost(enough) <= free.usd_per_hour * 1.001


@pytest.mark.slow
def test_safe_is_never_cheaper_than_likely() -> None:
    calibrated = Catalog([])
    for classes in ((CHAT,), (CHAT, CODE, BATCH)):
        safe, likely = (make_plan(calibrated, workload(*classes, sizing=sizing)) for sizing in ("safe", "likely"))
        assert cost(safe) >= cost(likely) / SLACK
        assert present(safe.by_estimates).usd_per_hour <= cost(safe)
        doubt = present(safe.uncertainty)
        assert present(doubt.low_usd_per_hour) <= present(doubt.high_usd_per_hour)
        assert 0 <= doubt.enough <= 1


def test_uncertainty_counts_what_is_on_hand_as_the_plan_does() -> None:
    plan = make_plan(Catalog([]), workload(CHAT, accelerators=("h200",), inventory={"h200": 100}, sizing="safe"))
    running = next(item.running_usd_per_hour for item in plan.market.items)
    doubt = present(plan.uncertainty)
    assert present(doubt.high_usd_per_hour) <= 100 * running
    assert present(doubt.low_usd_per_hour) <= cost(plan) * 1.001


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"whole_nodes": True}, marks=pytest.mark.slow),
        pytest.param({"spare": 0.3}, marks=pytest.mark.slow),
        pytest.param({"growth_per_year": 0.4, "mean_over_peak": 0.3}, marks=pytest.mark.slow),
        pytest.param({"inventory": {"h200": 4, "mi300x": 2}}, marks=pytest.mark.slow),
        pytest.param({"vendor_share": {"AMD": 0.4, "NVIDIA": 0.4}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_arithmetic_of_a_fleet(changes: dict[str, Any]) -> None:
    """Shares, loads and costs, recomputed from the pools."""
    plan = planned(**changes)
    fleet, work = fleet_of(plan), plan.workload
    growth = max(1.0 + work.growth_per_year, 1.0)
    shares: dict[tuple[str, int], float] = {}
    for pool in fleet.pools:
        assert pool.replicas >= 1
        load = sum(one.load for one in pool.carried)
        assert load <= pool.replicas / (1 + work.constraints.spare) * (1 + 1e-5)
        assert pool.utilisation == pytest.approx(load / pool.replicas)
        for one in pool.carried:
            key = one.part.request_class.name, one.part.index
            shares[key] = shares.get(key, 0.0) + one.share
            asked = one.part.request_class.requests_per_s * one.part.slice.share * growth
            assert one.requests_per_s == pytest.approx(one.share * asked)
            assert pool.tier.admits(one.part.request_class)
    assert len(shares) == sum(len(one.slices) for one in work.classes)
    assert list(shares.values()) == pytest.approx([1.0] * len(shares))
    assert sum(pool.usd_per_hour for pool in fleet.pools) == pytest.approx(fleet.usd_per_hour)
    counted: dict[str, int] = {}
    for pool in fleet.pools:
        counted[pool.deployment.accelerator.id] = counted.get(pool.deployment.accelerator.id, 0) + pool.gpus
    assert counted == fleet.gpus
    # An hour of mean traffic, by hand.
    hour = 3600 * work.mean_over_peak
    total_in = sum(one.requests_per_s * one.input_tokens for one in work.classes) * hour
    total_out = sum(one.requests_per_s * one.output_tokens for one in work.classes) * hour
    assert fleet.cost.usd_per_million == pytest.approx(fleet.usd_per_hour / (total_in + total_out) * 1e6)
    used = fleet.cost.usd_per_million_input * total_in + fleet.cost.usd_per_million_output * total_out
    idle = fleet.cost.usd_per_million_idle * (total_in + total_out)
    assert (used + idle) / 1e6 == pytest.approx(fleet.usd_per_hour)
    busy = sum(pool.usd_per_hour * pool.utilisation for pool in fleet.pools) * work.mean_over_peak / growth
    assert used / 1e6 == pytest.approx(busy)
    by_class = [
        fleet.by_class[one.name].usd_per_thousand_requests * one.requests_per_s * hour / 1e3 for one in work.classes
    ]
    assert sum(by_class) == pytest.approx(fleet.usd_per_hour)


@pytest.mark.slow
def test_pools_that_carry_nothing_are_paid_for_too() -> None:
    """So little traffic that one replica would do, and a policy that asks for two vendors."""
    fleet = fleet_of(planned(one_class("rare", 0.5, 500, 50), vendor_share={"AMD": 0.4, "NVIDIA": 0.4}))
    assert [len(pool.carried) for pool in fleet.pools] in ([0, 1], [1, 0])
    hourly = 0.5 * 3600 * 0.5
    assert fleet.cost.usd_per_thousand_requests == pytest.approx(fleet.usd_per_hour / hourly * 1e3)
    assert fleet.by_class["rare"] == fleet.cost


def test_pools_carry_their_load_by_an_independent_test() -> None:
    """Farkas' lemma on the fleet of a plan: its replicas do carry the peak, and with any one fewer they do not."""
    work = workload(CHAT, CODE, accelerators=TWO, usd_per_gpu_hour=PRICES, simplicity=0.0)
    asked = asked_of(work)
    found = present(cheapest(asked.problem))
    used = np.flatnonzero(found.replicas)
    small = asked.problem.only(used, np.arange(len(asked.problem.demand)))
    counts = found.replicas[used].astype(float)
    assert carries(small, counts[None, :]).all()
    fewer = counts - np.eye(len(counts))
    assert not carries(small, fewer).any(), "a replica that is not needed would have been saved"


def test_runner_up_and_years_are_other_fleets() -> None:
    plan = planned(*LITTLE, growth_per_year=0.5, horizon_years=3)
    assert plan.runner_up is not None
    assert plan.runner_up.without not in plan.runner_up.fleet.gpus
    assert plan.runner_up.fleet.usd_per_hour >= cost(plan) * (1 - 1e-6)
    costs = [year.fleet.usd_per_hour for year in plan.years if year.fleet]
    assert len(costs) == 3
    assert costs[0] == cost(plan)
    assert costs == sorted(costs)
    rates = [year.requests_per_s for year in plan.years]
    assert rates == pytest.approx([50 * 1.5, 50 * 1.5**2, 50 * 1.5**3])


@pytest.mark.slow
def test_classes_without_each_other_cost_no_less_apart() -> None:
    """One fleet for all is never dearer than a fleet for each."""
    apart = sum(cost(planned(one)) for one in (CHAT, CODE, BATCH))
    assert cost(planned()) <= apart * SLACK


def test_the_plan_says_how_far_from_the_best_it_may_be() -> None:
    """Of the columns that it chose from."""
    work = workload(usd_per_gpu_hour=PRICES)
    everything = asked_of(work)
    exact = present(cheapest(choice(one_stack(everything.offers), everything.market, work).problem))
    fleet = fleet_of(planned())
    assert 0 <= fleet.gap < 0.02
    assert fleet.usd_per_hour * (1 - fleet.gap) <= exact.usd_per_hour * (1 + 1e-6)
    assert exact.usd_per_hour <= fleet.usd_per_hour * (1 + 1e-6)

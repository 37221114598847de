"""What is predicted, against the engine that `sim` runs, and laws that it must keep."""

import math
from typing import Any

import pytest
from hypothesis import given, strategies as some
from tests.route.fleets import CATALOG, ask, decided, live, load, pool

from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Pool
from crosstie.route.ask import Ask
from crosstie.route.build import deployment_of
from crosstie.route.live import LiveFleet, Replica
from crosstie.route.policies import make_policy
from crosstie.route.policy import predict
from crosstie.route.speed import Prediction
from crosstie.sim.engine import Engine

BIG: dict[str, Any] = {"model": "llama-3.3-70b", "max_context": 131_072}
POOLS: dict[str, Pool] = {
    "small": pool(replicas=1),
    "tensorrt": pool("nvidia", "h200", replicas=1, stack="tensorrt-llm"),
    "split": pool(replicas=1, stack="sglang", parallelism=Parallelism(tp=4), **BIG),
    "staged": pool(replicas=1, parallelism=Parallelism(tp=2, pp=2), **BIG),
    "drafting": pool(
        replicas=1,
        parallelism=Parallelism(tp=4),
        stack="sglang",
        speculation="eagle3:3",
        text="coding",
        acceptance=2.4,
        **BIG,
    ),
    "ranks": pool(
        "b200", "b200", replicas=1, model="gpt-oss-120b", precision="native", parallelism=Parallelism(dp=4, ep=4)
    ),
}
FLEETS: dict[str, LiveFleet] = {name: live(one, classes=()) for name, one in POOLS.items()}


def predicted(fleet: LiveFleet, replica: Replica, asked: Ask, now: float) -> Prediction:
    replica.advance(now)
    return predict(fleet, replica, asked)


def request(name: str, **changes: Any) -> Any:
    return ask(**{"model": POOLS[name].model, "class_name": None, "ttft_s": None, "tpot_s": None, **changes})


def engine_of(name: str) -> Engine:
    deployment = deployment_of(CATALOG, POOLS[name])
    assert deployment is not None
    return Engine(deployment, 1125.0)


@pytest.mark.parametrize("name", sorted(POOLS))
@pytest.mark.parametrize("inputs", [50, 1000, 7000, 30_000])
def test_an_idle_replica_gives_what_the_engine_does(name: str, inputs: int) -> None:
    fleet, one = FLEETS[name], engine_of(name)
    one.add("a", inputs, 100, 0.0)
    first, last = one.advance(math.inf)
    told = predicted(fleet, fleet.replicas()[0], request(name, input_tokens=float(inputs), output_tokens=100.0), 0.0)
    # The engine runs pipelines in whole passes, the prediction chunk by chunk.
    assert told.ttft_s == pytest.approx(first.at, rel=0.25 if name == "staged" else 0.2)
    assert told.tpot_s == pytest.approx((last.at - first.at) / 99, rel=0.15)
    idle = fleet.pools[0].speed.idle_s(float(inputs), 100.0)
    assert idle == pytest.approx(last.at, rel=0.35)


@pytest.mark.parametrize("name", sorted(POOLS))
@pytest.mark.parametrize("waiting", [3, 20])
def test_prompts_ahead_are_waited_for_as_in_the_engine(name: str, waiting: int) -> None:
    fleet, one = live(POOLS[name], classes=()), engine_of(name)
    replica = fleet.replicas()[0]
    for index in range(waiting):
        one.add(index, 3000, 200, 0.0)
    load(replica, waiting, decoding=False, input_tokens=3000.0, ttft_s=None, tpot_s=None)
    one.add("last", 1000, 200, 0.0)
    first = next(token.at for token in one.advance(math.inf) if token.id == "last")
    told = predicted(fleet, replica, request(name, input_tokens=1000.0), 0.0)
    assert told.ttft_s == pytest.approx(first, rel=0.3)


@pytest.mark.parametrize("name", sorted(POOLS))
def test_a_crowd_decodes_as_in_the_engine(name: str) -> None:
    fleet, one = live(POOLS[name], classes=()), engine_of(name)
    replica = fleet.replicas()[0]
    load(replica, 40, input_tokens=1000.0, output_tokens=400.0, ttft_s=None, tpot_s=None)
    replica.prompt_rate = 0.0
    for index in range(41):
        one.add(index, 1000, 400, 0.0)
    moments = [token.at for token in one.advance(math.inf) if token.id == 40]
    told = predicted(fleet, replica, request(name, output_tokens=400.0), 0.0)
    assert told.tpot_s == pytest.approx((moments[-1] - moments[0]) / 399, rel=0.15)


def test_prefill_takes_its_share_of_decoding() -> None:
    fleet = live(pool(replicas=1))
    replica = fleet.replicas()[0]
    load(replica, 10)
    busy = predicted(fleet, replica, ask(), 0.0).tpot_s
    assert predicted(fleet, replica, ask(), 60.0).tpot_s < busy, "the rate of prompts fades"


def test_a_full_cache_is_waited_for() -> None:
    fleet = live(pool(replicas=1, max_in_flight=1000, max_context=131_072))
    replica = fleet.replicas()[0]
    speed = fleet.pools[0].speed
    long: dict[str, Any] = {"input_tokens": 100_000.0, "ttft_s": None, "tpot_s": None}
    fits = int(speed.cache_tokens / 100_100)
    load(replica, fits - 1, **long)
    roomy = predicted(fleet, replica, ask(**long), 0.0).ttft_s
    load(replica, 1, **long)
    assert predicted(fleet, replica, ask(**long), 0.0).ttft_s > roomy + 0.5


def test_memory_makes_long_requests_cheap_where_there_is_much_of_it() -> None:
    fleet = live(
        pool("mi300x", "mi300x", usd_per_gpu_hour=3.0, max_in_flight=1000, max_context=131_072),
        pool("rtx", "rtx-4090", usd_per_gpu_hour=0.5, max_in_flight=1000, max_context=131_072),
        classes=(),
    )

    def ratio(held: float) -> float:
        roomy, tight = (one.request_usd(100.0, held, 500.0) for one in fleet.pools)
        return roomy / tight

    assert ratio(30_000.0) < 0.9 * ratio(500.0)


def test_the_price_is_that_of_a_full_replica() -> None:
    """As many requests as it is meant for, one after the other all hour long, pay for the replica."""
    one = pool(replicas=1, max_in_flight=32)
    fleet = live(one)
    engine = engine_of("small")
    for index in range(32 * 12):
        engine.add(index, 1000, 200, 0.0)
        engine.most = 32
    spent = engine.advance(math.inf)[-1].at
    paid = 32 * 12 * fleet.pools[0].request_usd(1000.0, 0.0, 200.0)
    assert paid == pytest.approx(spent * one.usd_per_gpu_hour / 3600, rel=0.2)


@given(
    before=some.integers(0, 60), more=some.integers(1, 30), inputs=some.floats(1, 60_000), ahead=some.floats(1, 20_000),
    name=some.sampled_from(sorted(POOLS)),
)  # fmt: skip
def test_more_load_never_lowers_the_predicted_ttft(
    before: int, more: int, inputs: float, ahead: float, name: str
) -> None:
    fleet = FLEETS[name]
    replica = fleet.replicas()[0]
    flights = []
    try:
        flights += load(replica, before, input_tokens=ahead)
        least = predicted(fleet, replica, request(name, input_tokens=inputs), 0.0)
        flights += load(replica, more, decoding=before % 2 == 0, input_tokens=ahead)
        most = predicted(fleet, replica, request(name, input_tokens=inputs), 0.0)
        assert most.ttft_s >= least.ttft_s * (1 - 1e-9)
        assert most.tpot_s >= least.tpot_s * (1 - 1e-9)
    finally:
        for flight in flights:
            flight.end(0.0, output_tokens=None, input_tokens=None, completed=False)
        replica.prompt_rate = 0.0


@pytest.mark.slow
@given(
    states=some.lists(some.sampled_from(["up", "down", "draining", "busy", "full", "tried"]), min_size=4, max_size=4),
    name=some.sampled_from(["cheapest-meeting-target", "fastest", "round-robin", "least-loaded", "weighted", "prefix"]),
    loads=some.lists(some.integers(0, 63), min_size=4, max_size=4),
    seed=some.integers(0, 5),
)
def test_a_decision_never_picks_what_was_dropped(states: list[str], name: Any, loads: list[int], seed: int) -> None:
    fleet = live()
    tried = set()
    for replica, state, requests in zip(fleet.replicas(), states, loads, strict=True):
        load(replica, 64 if state == "full" else requests)
        replica.up = state != "down"
        replica.draining = state == "draining"
        if state == "busy":
            replica.full(0.0, 1.0)
        if state == "tried":
            tried.add(replica.key)
    got = decided(make_policy(name, seed), fleet, ask(), 0.0, exclude=tried, explain=True)
    able = [one for one, state in zip(fleet.replicas(), states, strict=True) if state == "up"]
    if able:
        assert got.outcome == "send"
        assert got.replica in able
    else:
        waits = any(state in ("busy", "full") for state in states)
        assert got.outcome == ("wait" if waits else "refuse")
    assert len(got.considered) == 2

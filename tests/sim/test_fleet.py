"""Policies over simulated fleets: unequal pairs in a closed loop, and a plan's fleet under recorded traffic."""

import inspect
from dataclasses import replace
from functools import cache
from heapq import heapify, heappop, heappush
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from tests.route.fleets import CATALOG, MODEL, fleet, pool, routed, served

from crosstie.catalog.library import Catalog
from crosstie.catalog.traces import read_trace, shipped_traces
from crosstie.catalog.workloads import find_workload, read_workload
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Policy, Pool, ServedClass
from crosstie.core.workload import RequestClass, Target, Workload
from crosstie.decide.plan.pools import class_of
from crosstie.route import cheapest
from crosstie.route.ask import Ask
from crosstie.route.build import Tables, live_fleet
from crosstie.route.live import LiveFleet
from crosstie.route.policies import make_policy
from crosstie.route.router import Router
from crosstie.sim.fleet import FleetSimulator, SimulatedAnswer, SimulatedRequest

FAST, SLOW = "http://fast", "http://slow"
REQUEST = SimulatedRequest(0.0, MODEL, 1000, 150)
SPAN_S = 30.0


def alone(accelerator: str | None, name: str, **changes: Any) -> Pool:
    plain = {"replicas": 1, "backends": (f"http://{name}",), "max_in_flight": 256, "usd_per_gpu_hour": 2.0}
    return pool(name, accelerator, **{**plain, **changes})


# Two accelerators of which one is five times as fast; two that are said to be equal; two of which nothing is said.
PAIRS: dict[str, tuple[tuple[Pool, Pool], dict[str, float]]] = {
    "different": ((alone("h200", "fast"), alone("l40s", "slow", usd_per_gpu_hour=0.4)), {}),
    "said to be equal": ((alone("h200", "fast"), alone("h200", "slow")), {SLOW: 5.0}),
    "unknown": ((alone(None, "fast"), alone(None, "slow")), {SLOW: 5.0}),
}


def simulator_of(pools: tuple[Pool, ...], policy: Policy, slower: dict[str, float]) -> FleetSimulator:
    """`slower`: how much slower than modelled a backend is. What the router is not told of, an H200 serves."""
    real = (pool if pool.accelerator else alone("h200", pool.name) for pool in pools)
    made = FleetSimulator(CATALOG, fleet(*real, classes=()), policy)
    made.live = live_fleet(CATALOG, fleet(*pools, classes=()), 0.0)
    made.router = Router(made.live, make_policy(policy, 0))
    for key, factor in slower.items():
        if key in made.engines:
            made.engines[key].slower = factor
    return made


def test_who_waits_for_a_first_token_is_known() -> None:
    """In the waiting room, where the one place is taken, and on a replica that computes the prompt."""
    made = FleetSimulator(CATALOG, fleet(alone("h200", "fast", max_in_flight=1), classes=()), None)
    sent = [replace(REQUEST, input_tokens=1000 + number) for number in range(3)]
    for request in sent:
        made.send(request)
    assert len(made.room) == 2
    assert sorted(made.without_first_token) == sent
    while len(made.without_first_token) == 3:
        made.advance(made.next_s)
    # The first one has its first token, and is not through.
    assert sorted(made.without_first_token) == sent[1:]
    assert made.inside == 3
    made.advance(inf)
    assert made.without_first_token == []


def closed_loop(simulator: FleetSimulator, clients: int, template: SimulatedRequest, until_s: float) -> float:
    """So many clients, each of whom sends its next request when the last one ends; answers a second in the later half.

    Clients start one after the other, so that they do not run in step.
    """
    waiting = [(0.01 * index, index) for index in range(clients)]
    heapify(waiting)
    seen = 0
    while True:
        due = waiting[0][0] if waiting else inf
        step_ends = min(simulator.planned.values(), default=inf)
        if min(due, step_ends) > until_s:
            break
        if due <= step_ends:
            heappop(waiting)
            simulator.advance(due)
            simulator.send(replace(template, arrival_s=due))
        else:
            simulator.advance(step_ends)
        for _ in range(len(simulator.answered) - seen):
            heappush(waiting, (simulator.now, seen))
            seen += 1
    half = 0.5 * until_s
    done = sum(one.pool is not None and one.request.arrival_s + one.finished_s > half for one in simulator.answered)
    return done / half


def throughput(
    pools: tuple[Pool, ...], slower: dict[str, float], clients: int, policy: Policy = "cheapest-meeting-target"
) -> float:
    return closed_loop(simulator_of(pools, policy, slower), clients, REQUEST, SPAN_S)


@cache
def ideal(name: str, clients: int) -> float:
    """The best fixed split of the clients over both."""
    pools, slower = PAIRS["said to be equal" if name == "unknown" else name]
    splits = [round(clients * share) for share in (0.0, 0.05, 0.1, 0.15)]
    return max(
        throughput(pools[:1], slower, clients - slow) + (throughput(pools[1:], slower, slow) if slow else 0.0)
        for slow in splits
    )


@pytest.mark.slow
@pytest.mark.parametrize("clients", [16, 128])
@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_of_five_to_one_gives_what_it_can(name: str, clients: int) -> None:
    assert throughput(*PAIRS[name], clients) > 0.9 * ideal(name, clients)
    assert throughput(*PAIRS[name], clients, "fastest") > 0.9 * ideal(name, clients)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_taking_turns_gives_a_third_or_so(name: str) -> None:
    assert throughput(*PAIRS[name], 128, "round-robin") < 0.55 * ideal(name, 128)


@pytest.mark.parametrize(("policy", "most"), [("cheapest-meeting-target", 0.2), ("prefix", 0.5)])
def test_a_shared_prefix_does_not_pull_all_to_the_slow_one(policy: Policy, most: float) -> None:
    pools, slower = PAIRS["said to be equal"]
    simulator = simulator_of(pools, policy, slower)
    shared = replace(REQUEST, input_tokens=6000, prefix=tuple(range(10)))
    simulator.live.pools[1].replicas[0].prefixes.add(shared.prefix)
    closed_loop(simulator, 64, shared, SPAN_S)
    slow = sum(one.backend == SLOW for one in simulator.answered) / len(simulator.answered)
    assert slow < most


@pytest.mark.slow
def test_a_replica_that_recovers_is_used_again() -> None:
    pools, slower = PAIRS["said to be equal"]
    simulator = simulator_of(pools, "cheapest-meeting-target", slower)
    closed_loop(simulator, 64, REQUEST, SPAN_S)
    before = simulator.live.pools[1].replicas[0].tpot.factor(SPAN_S)
    assert before > 2.0
    simulator.engines[SLOW].slower = 1.0
    for index in range(4000):
        at = SPAN_S + 10.0 + index * 0.04
        simulator.advance(at)
        simulator.send(replace(REQUEST, arrival_s=at))
    simulator.advance(float("inf"))
    tried = [one for one in simulator.answered if one.backend == SLOW and one.request.arrival_s > SPAN_S + 60.0]
    assert tried, "what was learnt has faded"
    slow, fast = (simulator.live.pools[index].replicas[0].tpot.factor(simulator.now) for index in (1, 0))
    assert slow < 1.6 * fast


@pytest.mark.slow
def test_a_fleet_that_stood_still_is_soon_itself_again() -> None:
    still_s, ended_s = 30.0, 54.0
    classes = (served(routes=routed("fast", "other")),)
    simulator = FleetSimulator(CATALOG, fleet(alone("h200", "fast"), alone("mi300x", "other"), classes=classes))
    for request in traffic(60.0, 110.0):
        for engine in simulator.engines.values():
            engine.slower = 30.0 if still_s < request.arrival_s < ended_s else 1.0
        simulator.advance(request.arrival_s)
        simulator.send(request)
    simulator.advance(inf)

    def found(since_s: float, until_s: float) -> Score:
        return score(simulator.live, [a for a in simulator.answered if since_s < a.request.arrival_s < until_s])

    assert found(5.0, 20.0).within > 0.95
    assert found(still_s, ended_s).within < 0.5
    assert found(ended_s + 20.0, 105.0).within > 0.9
    assert found(ended_s + 20.0, 105.0).refused == 0.0


class Score(NamedTuple):
    """Shares of the requests whose targets were both kept, and of those turned away; what a thousand served ones cost."""

    within: float
    refused: float
    usd_per_thousand: float


def score(live: LiveFleet, answered: list[SimulatedAnswer]) -> Score:
    served = [one for one in answered if one.pool is not None]
    return Score(
        within=sum(kept(live, one) for one in served) / len(answered),
        refused=1.0 - len(served) / len(answered),
        usd_per_thousand=1e3 * sum(one.usd for one in served) / max(len(served), 1),
    )


def kept(live: LiveFleet, one: SimulatedAnswer) -> bool:
    served = live.classes[one.request.class_name or ""]
    times = ((served.ttft, one.ttft_s), (served.tpot, one.tpot_s))
    return all(target is None or seconds <= target.seconds for target, seconds in times)


def traffic(rate: float, span_s: float = 20.0, seed: int = 1, **changes: Any) -> list[SimulatedRequest]:
    chance = np.random.default_rng(seed)
    at = np.cumsum(chance.exponential(1.0 / rate, int(rate * span_s)))
    return [replace(REQUEST, arrival_s=float(t), class_name="chat", **changes) for t in at]


def test_it_is_the_same_every_time_and_nobody_is_lost() -> None:
    asked = traffic(60.0, 8.0)
    both = fleet(alone("h200", "fast"), alone("l40s", "slow"))
    runs = [FleetSimulator(CATALOG, both).run(asked) for _ in range(2)]
    assert runs[0] == runs[1]
    assert sorted(one.request for one in runs[0]) == sorted(asked)
    simulator = FleetSimulator(CATALOG, both)
    simulator.run(list(reversed(asked)))
    assert simulator.answered == runs[0]
    assert all(replica.in_flight == 0 and replica.held_tokens == 0 for replica in simulator.live.replicas())
    assert all(engine.idle for engine in simulator.engines.values())


def test_too_much_for_the_fleet_is_turned_away_and_counted() -> None:
    tiny = fleet(alone("h200", "fast", max_in_flight=2), max_queued=5, queue_s=0.5)
    simulator = FleetSimulator(CATALOG, tiny)
    asked = traffic(60.0)
    got = simulator.run(asked)
    assert len(got) == len(asked)
    found = score(simulator.live, got)
    assert 0.2 < found.refused < 1.0
    assert found.within <= 1.0 - found.refused + 1e-9
    assert all(one.usd == 0 for one in got if one.pool is None)


def test_nobody_waits_longer_than_its_patience() -> None:
    crowded = fleet(alone("h200", "fast", max_in_flight=8), queue_s=2.0)
    got = FleetSimulator(CATALOG, crowded).run(traffic(40.0))
    served = [one for one in got if one.pool is not None]
    assert max(one.ttft_s for one in served) < 2.0 + 1.0


def test_nothing_unknown_is_simulated() -> None:
    with pytest.raises(BadInput, match="nothing to simulate"):
        FleetSimulator(CATALOG, fleet(alone(None, "fast")))
    with pytest.raises(BadInput, match="there twice"):
        FleetSimulator(CATALOG, fleet(alone("h200", "fast"), alone("h200", "fast2", backends=(FAST,))))


@pytest.mark.parametrize("policy", ["cheapest-meeting-target", pytest.param("fastest", marks=pytest.mark.slow)])
def test_replicas_that_cannot_win_are_skipped_and_no_decision_changes(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop over replicas leaves most of them out by bounds; with bounds that drop nobody it decides the same."""
    many = fleet(
        alone("h200", "fast", backends=tuple(f"http://fast-{i}" for i in range(12)), max_in_flight=32),
        alone("l40s", "slow", backends=tuple(f"http://slow-{i}" for i in range(6))),
    )
    chance = np.random.default_rng(4)
    asked = [
        replace(
            one, input_tokens=int(chance.integers(20, 6000)), output_tokens=int(chance.integers(1, 600)),
            session=str(chance.integers(40)), prefix=tuple(range(int(chance.integers(0, 4)))),
        )
        for one in traffic(90.0, 8.0)
    ]  # fmt: skip
    skipping = FleetSimulator(CATALOG, many, policy).run(asked)
    source = inspect.getsource(cheapest.best_of)
    assert source.count("> least") == 3, "the bounds are called otherwise now"
    names = dict(vars(cheapest))
    exec(source.replace("> least", "> inf"), names)
    monkeypatch.setattr(cheapest, "best_of", names["best_of"])
    every = FleetSimulator(CATALOG, many, policy).run(asked)
    assert skipping == every
    assert len({one.backend for one in every}) >= 12


def test_a_pool_that_dies_hands_its_requests_over_and_is_used_again() -> None:
    both = fleet(alone("h200", "fast"), alone("l40s", "slow"))
    simulator = FleetSimulator(CATALOG, both)
    asked = traffic(20.0, 30.0)
    dead = simulator.live.pools[0]
    for one in asked:
        if simulator.now < 10.0 <= one.arrival_s:
            simulator.advance(10.0)
            under_way = {id(sent.request) for sent in simulator._sent.values() if sent.flight.replica.pool is dead}
            simulator.fail(dead.replicas)
        if simulator.now < 20.0 <= one.arrival_s:
            simulator.advance(20.0)
            simulator.restore(dead.replicas)
        simulator.advance(one.arrival_s)
        simulator.send(one)
    simulator.advance(inf)
    got = simulator.answered
    assert len(got) == len(asked)
    meanwhile = [one for one in got if 10.0 <= one.request.arrival_s < 20.0]
    assert meanwhile
    assert all(one.backend != FAST or one.request.arrival_s + one.ttft_s >= 20.0 for one in meanwhile)
    handed = [one for one in got if id(one.request) in under_way]
    assert handed
    assert any(one.backend == SLOW for one in handed)
    # What was under way has its first token where it had come, and pays for being read again.
    begun = [one for one in handed if one.backend and one.request.arrival_s + one.ttft_s < 10.0]
    assert begun
    undisturbed = [one for one in got if one.backend == FAST and one.request.arrival_s < 8.0]
    assert min(one.finished_s for one in begun) > np.median([one.finished_s for one in undisturbed])
    assert any(one.backend == FAST and one.request.arrival_s > 20.0 for one in got)
    assert all(replica.in_flight == 0 for replica in simulator.live.replicas())
    assert all(engine.idle for engine in simulator.engines.values())


def test_without_resuming_an_answer_that_is_broken_off_is_lost() -> None:
    both = fleet(alone("h200", "fast"), alone("l40s", "slow"), resume=False)
    simulator = FleetSimulator(CATALOG, both)
    for one in traffic(20.0, 10.0):
        simulator.advance(one.arrival_s)
        simulator.send(one)
    cut = sum(simulator.engines[FAST].made(number) > 0 for number in simulator._sent)
    assert cut
    simulator.fail(simulator.live.pools[0].replicas)
    simulator.advance(inf)
    assert sum(one.pool is None for one in simulator.answered) == cut


class Impatient(FleetSimulator):
    """Nobody waits for others' targets."""

    def _ask(self, request: SimulatedRequest) -> Ask:
        ask = super()._ask(request)
        ask.patience_s = 0.0
        return ask


def test_waiting_rather_than_breaking_others_targets_keeps_more_of_them() -> None:
    """A little more than the fleet can bear, of requests with a tight TPOT."""
    chat = served(routes=routed("slow"), tpot=Target(seconds=0.03, percentile=0.9))
    tight = fleet(alone("l40s", "slow", max_in_flight=64), classes=(chat,))
    within = []
    for kind in (Impatient, FleetSimulator):
        simulator = kind(CATALOG, tight)
        within.append(score(simulator.live, simulator.run(traffic(8.0, 40.0))).within)
    assert within[1] > within[0] + 0.25


RECORDED = {"chat": "azure-2023-conversation", "code": "azure-2023-code", "documents": "mooncake-conversation"}


def part(name: str, replicas: int, max_in_flight: int, **changes: Any) -> Pool:
    return pool(
        name, replicas=replicas, max_in_flight=max_in_flight, max_context=131072, precision="fp8",
        backends=tuple(f"http://{name}-{i}" for i in range(replicas)), **changes,
    )  # fmt: skip


@cache
def planned(rate: float = 12.0) -> tuple[Workload, Fleet]:
    """The shipped workload at another rate, and a fleet of both vendors that a plan once had for it: policies are
    judged here, and not by what today's prices and estimates make of the fleet."""
    catalog = Catalog([])
    whole = read_workload(catalog, find_workload(Path("assistant")))
    total = sum(one.requests_per_s for one in whole.classes)
    classes = tuple(
        msgspec.structs.replace(one, requests_per_s=one.requests_per_s * rate / total) for one in whole.classes
    )
    asked = msgspec.structs.replace(whole, growth_per_year=0.0, classes=classes)
    wide = {"accelerator": "h200", "parallelism": Parallelism(tp=4), "stack": "tensorrt-llm", "usd_per_gpu_hour": 2.9}
    one = {"accelerator": "mi300x", "usd_per_gpu_hour": 1.3}
    pools = (
        part("documents-h200", 1, 12, model="llama-3.3-70b", **wide),
        part("chat-mi300x", 8, 18, model="llama-3.3-70b", **one),
        part("documents-mi300x", 4, 4, model="llama-3.3-70b", **one),
        part("code-mi300x", 1, 378, model="llama-3.1-8b", **one),
    )
    return asked, fleet(*pools, classes=tuple(map(as_served, classes)))


# As that plan sent them.
ROUTES = {
    "chat": ("chat-mi300x",),
    "code": ("code-mi300x",),
    "documents": ("documents-mi300x", "documents-h200"),
    "batch": ("chat-mi300x", "documents-mi300x"),
}


def as_served(one: RequestClass) -> ServedClass:
    return class_of(one, routed(*ROUTES[one.name]))


def recorded(workload: Workload, load: float, span_s: float, seed: int = 0) -> list[SimulatedRequest]:
    """Arrivals and lengths as recorded, at the workload's rates; what nobody recorded comes at random."""
    chance = np.random.default_rng(seed)
    found = []
    for one in workload.classes:
        count = int(one.requests_per_s * load * span_s)
        if one.name in RECORDED:
            trace = read_trace(shipped_traces()[RECORDED[one.name]])
            assert trace.arrival_s is not None
            start = int(chance.integers(0, len(trace) - count))
            part = slice(start, start + count)
            at = trace.arrival_s[part] - trace.arrival_s[start]
            at = at / max(float(at[-1]), 1e-9) * span_s
            lengths = list(zip(trace.input_tokens[part].tolist(), trace.output_tokens[part].tolist(), strict=True))
        else:
            at = np.sort(chance.uniform(0.0, span_s, count))
            shares = np.array([piece.share for piece in one.slices])
            pieces = chance.choice(len(shares), count, p=shares / shares.sum())
            samples = [one.slices[piece].sample for piece in pieces]
            lengths = [sample[int(chance.integers(len(sample)))] for sample in samples]
        longest = max(piece.longest_input for piece in one.slices)
        found += [
            SimulatedRequest(float(t), one.model, min(inputs, longest), outputs, one.name)
            for t, (inputs, outputs) in zip(at, lengths, strict=True)
        ]
    return sorted(found)


def served_by(policy: Policy, load: float, span_s: float = 100.0) -> tuple[FleetSimulator, list[SimulatedAnswer]]:
    workload, made = planned()
    simulator = FleetSimulator(CATALOG, made, policy)
    got = simulator.run(recorded(workload, load, span_s))
    # The first part only fills the fleet.
    return simulator, [one for one in got if one.request.arrival_s > 0.2 * span_s]


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.8, 1.0])
def test_the_default_keeps_more_targets_for_less_money(load: float) -> None:
    simulator, got = served_by("cheapest-meeting-target", load)
    best = score(simulator.live, got)
    assert best.refused == 0.0
    for one in simulator.live.classes.values():
        mine = [answer for answer in got if answer.request.class_name == one.name]
        if one.ttft:
            assert np.mean([a.ttft_s <= one.ttft.seconds for a in mine]) >= one.ttft.percentile, one.name
        if one.tpot:
            assert np.mean([a.tpot_s <= one.tpot.seconds for a in mine]) >= one.tpot.percentile, one.name
    others: list[Policy] = ["round-robin", "least-loaded", "prefix"]
    for policy in others:
        other = score(simulator.live, served_by(policy, load)[1])
        assert best.within >= other.within - 1e-9, policy
        assert best.usd_per_thousand < 0.95 * other.usd_per_thousand, policy


def test_tables_of_an_earlier_simulation_change_nothing() -> None:
    asked, tables = fleet(alone("h200", "fast"), alone("l40s", "slow"), classes=()), Tables()
    sent = [replace(REQUEST, arrival_s=0.05 * n, input_tokens=200 + 37 * n) for n in range(120)]
    first, again, other = (FleetSimulator(CATALOG, asked, tables=shared).run(sent) for shared in (tables, tables, None))
    assert first == again == other


def test_who_waits_is_decided_for_anew_where_something_has_changed() -> None:
    """Of a fleet that is overrun, every token of any engine was a decision over all replicas for each kind that waits,
    which was most of what such a simulation took."""
    simulator = FleetSimulator(CATALOG, fleet(alone("h200", "a"), alone("h200", "b")), None, 0, prefixes=False)
    counts = {"decide": 0, "may_take": 0}
    for name in counts:
        whole = getattr(simulator.router, name)

        def counted(*args: Any, name: str = name, whole: Any = whole, **options: Any) -> Any:
            counts[name] += 1
            return whole(*args, **options)

        setattr(simulator.router, name, counted)
    simulator.live.classes.update({"chat": served(ttft=Target(seconds=0.5, percentile=0.9))})
    sent = [SimulatedRequest(0.01 * n, MODEL, 3000, 150, "chat") for n in range(600)]
    answers = simulator.run(sent)
    assert len(answers) == len(sent)
    assert counts["may_take"] > 0
    # By tokens it was some three for each request, over all replicas.
    assert counts["decide"] < 2.5 * len(sent)

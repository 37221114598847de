"""Fleets behind the gateway's own policies, by simulation: what comes out, and what is asked wrongly."""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.decide.plan.workloads import CHAT, TWO, one_class, workload
from tests.needs import one_in
from tests.present import present

from crosstie.catalog.library import Catalog
from crosstie.catalog.traces import Trace
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.market import adjusted
from crosstie.decide.plan.plan import Plan, plan
from crosstie.decide.plan.run_result import Outage, Run
from crosstie.decide.plan.simulate import Simulation, simulate
from crosstie.decide.plan.subject import Subject, of_fleet, of_plan
from crosstie.decide.plan.sweep import RequestSource
from crosstie.decide.plan.traffic import poisson

WORK = workload(CHAT, accelerators=TWO, spare=0.2)


@pytest.fixture(scope="module")
def made(catalog: Catalog) -> Plan:
    return plan(catalog, WORK, today="2026-11-15")


@pytest.fixture(scope="module")
def subject(made: Plan) -> Subject:
    return of_plan(made)


def simulated(catalog: Catalog, subject: Subject, requests: int = 1500, **options: object) -> Simulation:
    return simulate(catalog, [subject], RequestSource(None, requests=requests), processes=1, **options)  # type: ignore[arg-type]


def only(found: Simulation) -> Run:
    (one,) = found.runs
    return one


@pytest.fixture(scope="module")
def at_peak(catalog: Catalog, subject: Subject) -> Run:
    return only(simulated(catalog, subject))


def test_a_planned_fleet_keeps_its_targets_at_its_peak_and_not_at_many_times_it(
    catalog: Catalog, subject: Subject, at_peak: Run
) -> None:
    assert at_peak.requests == 1200, "the first fifth fills the fleet"
    (chat,) = at_peak.classes
    assert (chat.name, chat.requests, chat.within) == ("chat", 1200, at_peak.within)
    assert at_peak.within > 0.85
    assert at_peak.holds
    assert (at_peak.refused, at_peak.unsteady) == (0, None)
    flooded = simulated(catalog, subject, 600, loads=[8.0])
    assert only(flooded).within < at_peak.within
    assert not flooded.holds


def test_sums_add_up(at_peak: Run) -> None:
    one = at_peak
    assert sum(sum(pool.requests.values()) for pool in one.pools) + one.refused == one.requests
    assert one.usd_per_hour == pytest.approx(sum(pool.usd_per_hour for pool in one.pools))
    assert one.requests_per_s == pytest.approx(sum(kind.requests_per_s for kind in WORK.classes), rel=0.15)
    sent = poisson(WORK, 1500, None, 1.0, 0)
    tokens = int((sent.input_tokens + sent.output_tokens)[300:].sum())
    assert one.usd_per_million_tokens == pytest.approx(one.usd_per_hour / 3600 * one.measured_s / tokens * 1e6)
    assert all(0.0 <= pool.utilisation <= 1.0 for pool in one.pools)
    busy = next(pool for pool in one.pools if sum(pool.requests.values()) > 500)
    assert busy.mean_in_flight > 1.0
    points = len(one.course.at_s)
    assert one.course.at_s == sorted(one.course.at_s)
    assert all(len(column.busy) == len(column.waiting) == points for column in one.course.pools.values())


def test_a_plan_and_its_fleet_are_the_same_question_and_a_seed_the_same_answer(
    catalog: Catalog, made: Plan, subject: Subject
) -> None:
    asked = RequestSource(WORK, requests=300)
    first, second = (simulate(catalog, [one], asked).runs for one in (subject, of_fleet(fleet_of(made))))
    assert first == second
    assert simulated(catalog, subject, 300, seeds=[8]).runs != first
    assert only(simulated(catalog, subject, 300, policies=["round-robin"])).policy == "round-robin"


def test_what_is_compared_is_run_each_with_the_same_requests(catalog: Catalog, subject: Subject) -> None:
    other = replace(subject, label="other")
    found = simulate(
        catalog, [subject, other], RequestSource(None, requests=100), policies=["round-robin", "fastest"], loads=[0.5, 1.0],
        seeds=[0, 1], processes=1,
    )  # fmt: skip
    assert len(found.runs) == found.asked == 16
    assert len({(one.label, one.load, one.policy, one.seed) for one in found.runs}) == 16
    assert set(found.bounds) == {(label, load) for label in (subject.label, "other") for load in (0.5, 1.0)}
    by_label = [[msgspec.structs.replace(one, label="") for one in found.runs if one.label == label]
                for label in (subject.label, "other")]  # fmt: skip
    assert by_label[0] == by_label[1]


@pytest.mark.slow
def test_lengths_that_are_known_do_not_make_it_worse(catalog: Catalog, subject: Subject) -> None:
    blind, seeing = simulated(catalog, subject, clairvoyant=True).runs
    assert (blind.knows_lengths, seeing.knows_lengths) == (False, True)
    assert seeing.within >= blind.within - 0.03


@pytest.mark.parametrize("policy", one_in(2, ["cheapest-meeting-target", "fastest", "round-robin", "least-loaded"]))
@pytest.mark.parametrize("load", [1.0, pytest.param(0.2, marks=pytest.mark.slow)])
def test_no_policy_beats_the_bound(catalog: Catalog, subject: Subject, policy: str, load: float) -> None:
    found = simulated(catalog, subject, policies=[policy], loads=[load])
    one, bound = only(found), found.bounds[subject.label, load]
    assert one.within <= bound.within
    (chat,), (least,) = one.classes, bound.classes
    # The bound is over all requests, the run without those that fill the fleet: a little slack for the difference.
    assert present(chat.ttft_s.at_target) >= 0.97 * least.ttft_s
    assert present(chat.tpot_s.at_target) >= 0.97 * least.tpot_s
    busy_usd = sum(pool.utilisation * pool.usd_per_hour for pool in one.pools)
    assert 0.0 < bound.usd_per_hour <= busy_usd


def test_the_bound_is_met_by_one_request_at_a_time(catalog: Catalog, subject: Subject) -> None:
    """Where nobody meets anybody, the fastest pool gives what the bound says."""
    found = simulated(catalog, subject, 200, loads=[1e-4], policies=["fastest"])
    (chat,), (least,) = only(found).classes, found.bounds[subject.label, 1e-4].classes
    assert chat.ttft_s.at_target == pytest.approx(least.ttft_s, rel=0.05)
    assert chat.tpot_s.at_target == pytest.approx(least.tpot_s, rel=0.02)


def trace_of(**changes: object) -> Trace:
    chance = np.random.default_rng(3)
    plain = {
        "file": "made.csv", "arrival_s": np.sort(chance.uniform(0, 100, 400)),
        "input_tokens": chance.integers(10, 3000, 400), "output_tokens": chance.integers(1, 200, 400),
    }  # fmt: skip
    return Trace(**{**plain, **changes})  # type: ignore[arg-type]


def test_a_trace_comes_at_its_own_times_or_at_a_rate(catalog: Catalog, subject: Subject) -> None:
    def run(**options: object) -> Run:
        return only(simulate(catalog, [subject], RequestSource(None, **{"trace": trace_of(), **options})))  # type: ignore[arg-type]

    own = run()
    assert own.requests == 400, "a trace is measured whole"
    assert own.measured_s == pytest.approx(100.0, rel=0.03)
    assert run(requests_per_s=40.0).measured_s == pytest.approx(10.0, rel=0.03)
    assert run(requests=100).requests == 100
    double = only(simulate(catalog, [subject], RequestSource(None, trace_of()), loads=[2.0]))
    assert double.measured_s == pytest.approx(50.0, rel=0.03)
    shared = trace_of(blocks=((1, 2, 3),) * 400, input_tokens=np.full(400, 1600))
    assert run(trace=shared).prefix_hit_rate > 0.8


def test_a_pool_that_dies_is_told_of(catalog: Catalog, subject: Subject, at_peak: Run) -> None:
    (first, *_) = sorted(subject.fleet.pools, key=lambda pool: -pool.replicas)
    span = at_peak.measured_s / 0.8
    found = simulated(catalog, subject, outages=[Outage(first.name, 0.4 * span, 0.2 * span)])
    (told,) = only(found).outages
    assert told.pool == first.name
    assert told.until_s == pytest.approx(0.6 * span)
    assert told.handed_over > 0
    assert present(told.during) < present(told.before)
    assert only(found).unsteady is None, "a fleet that lost a pool is not asked to be at rest"
    with pytest.raises(BadInput, match=r"--kill nobody: fleet 'test' has"):
        simulated(catalog, subject, outages=[Outage("nobody", 1.0)])
    with pytest.raises(BadInput, match=r"the traffic lasts .* s; name an earlier moment"):
        simulated(catalog, subject, outages=[Outage(first.name, 1e6)])


def test_more_than_the_fleet_can_bear_has_no_steady_state(catalog: Catalog, subject: Subject) -> None:
    said = present(only(simulated(catalog, subject, 2000, loads=[20.0])).unsteady)
    assert said.startswith("no steady state: ")
    assert "requests/s are carried: --load" in said
    better = float(said.rpartition("--load ")[2].partition(" ")[0])
    assert 0.5 < better < 20.0


def with_classes(fleet: Fleet, **changes: object) -> Fleet:
    return msgspec.structs.replace(
        fleet, classes=tuple(msgspec.structs.replace(one, **changes) for one in fleet.classes)
    )


def test_questions_that_mean_nothing_are_refused(catalog: Catalog, subject: Subject) -> None:
    with pytest.raises(BadInput, match="at least 100"):
        simulated(catalog, subject, 5)
    for load in (0.0, math.inf):
        with pytest.raises(BadInput, match="times the peak: must be above 0"):
            simulated(catalog, subject, loads=[load])
    with pytest.raises(BadInput, match="unknown policy 'guess'"):
        simulated(catalog, subject, policies=["guess"])
    with pytest.raises(BadInput, match="two fleets are called"):
        simulate(catalog, [subject, subject], RequestSource(None))
    other = workload(one_class(model="gpt-oss-20b"), accelerators=TWO)
    with pytest.raises(BadInput, match="serves gpt-oss-20b, which workload"):
        simulate(catalog, [subject], RequestSource(other))
    renamed = workload(msgspec.structs.replace(CHAT, name="talk"), accelerators=TWO)
    with pytest.raises(BadInput, match=r"has no class talk, which workload .* sends; it has chat: plan"):
        simulate(catalog, [subject], RequestSource(renamed))
    silent = replace(subject, fleet=with_classes(subject.fleet, requests_per_s=0.0), workload=None)
    with pytest.raises(BadInput, match=r"no class with requests_per_s.*--workload FILE or --trace FILE"):
        simulate(catalog, [silent], RequestSource(None))


def test_traces_that_do_not_match_are_refused(catalog: Catalog, subject: Subject) -> None:
    def refused(trace: Trace, why: str, class_name: str | None = None) -> None:
        with pytest.raises(BadInput, match=why):
            simulate(catalog, [subject], RequestSource(None, trace, class_name))

    refused(trace_of(classes=("else",) * 400), "has requests of else, but fleet 'test' has chat; --class NAME")
    refused(trace_of(), "--class nobody: fleet 'test' has chat", "nobody")
    refused(trace_of(input_tokens=np.full(400, 10**7)), "all its requests have more than .* longer max_context")
    refused(trace_of(arrival_s=None), "has no times, so the rate must be given")


def test_what_was_left_out_and_what_says_little_is_told(catalog: Catalog, subject: Subject) -> None:
    some_long = np.full(400, 500)
    some_long[:7] = 10**7
    found = simulate(catalog, [subject], RequestSource(None, trace_of(input_tokens=some_long)))
    assert any("7 of 400 requests have more than" in note for note in found.notes)
    assert only(found).requests == 393
    short = simulated(catalog, subject, 100)
    assert any(note.startswith("a short run: ") for note in short.notes)
    means = simulate(catalog, [replace(subject, workload=None)], RequestSource(None, requests=300))
    assert any("its class's mean lengths" in note for note in means.notes)


def test_a_workload_is_adjusted_in_what_is_given_and_nothing_else() -> None:
    got = adjusted(WORK, usd_per_gpu_hour={"mi300x": 1.5}, discount={"NVIDIA": 0.1}, accelerators=["h200", "h200"])
    assert got.prices.usd_per_gpu_hour == {"mi300x": 1.5}
    assert got.prices.discount == {"NVIDIA": 0.1}
    assert got.constraints == msgspec.structs.replace(WORK.constraints, accelerators=("h200",))
    assert adjusted(WORK) == WORK
    for wrong, why in (
        ({"usd_per_gpu_hour": {"mi300x": 0.0}}, "from 0.001"),
        ({"discount": {"AMD": 1.0}}, "from 0%"),
        ({"accelerators": []}, "none is named"),
    ):
        with pytest.raises(BadInput, match=why):
            adjusted(WORK, **wrong)

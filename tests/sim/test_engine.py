"""The engine by itself: the outer clock changes nothing, and what goes in comes out once."""

import math

import msgspec
import pytest
from hypothesis import given, settings, strategies as some
from tests.sim.reference import ReferenceEngine
from tests.sim.test_arrivals import RANKS, SMALL, TINY, WHOLE, replica

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.speculation import Speculation
from crosstie.perf.tabulated import StepTimes
from crosstie.sim.engine import Engine, Token

CONTEXT = 1000.0
# Looking steps up is quick, tabulating them is not.
TIMES = {id(one): StepTimes(one, CONTEXT) for one in (SMALL, WHOLE, TINY, RANKS)}
BOTH = {"small": SMALL, "whole": WHOLE, "tiny": TINY, "ranks": RANKS}

requests = some.lists(
    some.tuples(some.floats(0, 3), some.integers(1, 20_000), some.integers(1, 60)), min_size=1, max_size=25
)


def engine(deployment: object = SMALL, **options: bool) -> Engine:
    return Engine(deployment, CONTEXT, times=TIMES[id(deployment)], **options)  # type: ignore[arg-type]


def filled(one: Engine, asked: list[tuple[float, int, int]]) -> Engine:
    for index, (at, inputs, outputs) in enumerate(sorted(asked)):
        one.add(index, inputs, outputs, at)
    return one


def drafting(deployment: Deployment) -> Deployment:
    """The same with two drafts a step, of which a part is kept."""
    return msgspec.structs.replace(
        deployment,
        speculation=Speculation(
            method="ngram", acceptance=(0.7, 0.4), drafter=None, text="any", range=(1.5, 2.5), basis="assumed",
            source="this test", date="2026-11-16",
        ),
    )  # fmt: skip


SGLANG = replica("qwen3-8b", "rtx-4090", "sglang")
COMPARED = {
    "small": SMALL, "whole": WHOLE, "tiny": TINY, "ranks": RANKS, "sglang": SGLANG, "drafting": drafting(TINY),
}  # fmt: skip
COMPARED_TIMES = {name: StepTimes(one, CONTEXT) for name, one in COMPARED.items()}


@given(
    asked=some.lists(
        some.tuples(some.floats(0, 3), some.integers(1, 9_000), some.integers(1, 400)), min_size=1, max_size=40
    ),
    which=some.sampled_from(sorted(COMPARED)),
    room=some.sampled_from([0, 40, 700, 9_000]),
)
@settings(max_examples=30, deadline=None)
def test_stretches_are_the_steps_that_they_stand_for(
    asked: list[tuple[float, int, int]], which: str, room: int
) -> None:
    """Against the engine that takes one step at a time; `room`: blocks of a cache that is made smaller."""
    deployment, times = COMPARED[which], COMPARED_TIMES[which]
    one = Engine(deployment, CONTEXT, times=times)
    if room:
        one.blocks = room
    reference = ReferenceEngine(deployment, times, one)
    first, last = {}, {}
    for token in filled(one, asked).advance(math.inf):
        if token.tokens == 1:
            first[token.id] = token.at
        if token.finished:
            last[token.id] = token.at
    for index, expected in enumerate(reference.run(asked)):
        assert first[index] == pytest.approx(expected.first_s, rel=1e-9)
        assert last[index] == pytest.approx(expected.last_s, rel=1e-9)
    assert one.preemptions == reference.preemptions


def test_the_reference_throws_out_and_shares_blocks() -> None:
    """What the comparison above rests on: that its small caches are full, and that blocks matter."""
    one = engine(TINY)
    one.blocks = 40
    reference = ReferenceEngine(TINY, TIMES[id(TINY)], one)
    reference.run([(0.0, 300, 200)] * 3)
    assert reference.preemptions > 0
    # 16 to a block: two prompts of 303 tokens and their first ones take 19 blocks each, of 305 one more.
    fits, not_quite = engine(TINY), engine(TINY)
    for tight, tokens in ((fits, 303), (not_quite, 304)):
        tight.blocks = 38
        filled(tight, [(0.0, tokens, 2)] * 2)
        tight.next_event_s()
    assert (fits.running, not_quite.running) == (2, 1)


def test_a_prompt_under_way_is_thrown_out_before_those_that_decode() -> None:
    one = engine(TINY)
    one.blocks = 700
    # Twenty answers fill the cache while a prompt of several chunks is read beside them.
    asked = [(0.0, 200, 200)] * 20 + [(0.1, 7000, 5)]
    got = filled(one, asked).advance(math.inf)
    assert one.preemptions == 1
    assert [token.id for token in got if token.finished][-1] == 20
    assert sum(token.finished for token in got) == 21


@given(asked=requests, looks=some.lists(some.floats(0, 10), max_size=20), which=some.sampled_from(sorted(BOTH)))
def test_when_one_looks_changes_nothing(asked: list[tuple[float, int, int]], looks: list[float], which: str) -> None:
    at_once = filled(engine(BOTH[which]), asked).advance(math.inf)
    often, got = engine(BOTH[which]), []
    ordered = sorted(asked)
    for moment in sorted({*looks, *(at for at, _, _ in ordered)}):
        got += often.advance(moment)
        for index, (at, inputs, outputs) in enumerate(ordered):
            if at == moment:
                often.add(index, inputs, outputs, at)
    while (upcoming := often.next_event_s()) is not None:
        got += often.advance(upcoming)
    assert got == at_once


@given(asked=requests, which=some.sampled_from(sorted(BOTH)))
def test_first_and_last_tokens_come_once_and_in_order(asked: list[tuple[float, int, int]], which: str) -> None:
    one = filled(engine(BOTH[which]), asked)
    seen: dict[object, list[Token]] = {}
    for token in one.advance(math.inf):
        seen.setdefault(token.id, []).append(token)
    for index, (at, _, outputs) in enumerate(sorted(asked)):
        tokens = seen[index]
        told = [(1, False), (outputs, True)] if outputs > 1 else [(1, True)]
        assert [(token.tokens, token.finished) for token in tokens] == told
        assert at < tokens[0].at <= tokens[-1].at
    assert one.idle
    assert (one.running, one.waiting) == (0, 0)
    assert one.kv_used_fraction == pytest.approx(0.0, abs=1e-9)
    assert one.next_event_s() is None


@given(
    asked=requests,
    gone=some.lists(some.tuples(some.integers(0, 24), some.floats(0, 3)), max_size=12),
    which=some.sampled_from(sorted(BOTH)),
)
def test_whoever_is_cancelled_leaves_nothing(
    asked: list[tuple[float, int, int]], gone: list[tuple[int, float]], which: str
) -> None:
    one = filled(engine(BOTH[which]), asked)
    ended: set[object] = set()
    cancelled: set[object] = set()
    for index, at in sorted(gone, key=lambda pair: pair[1]):
        ended |= {token.id for token in one.advance(at) if token.finished}
        assert one.cancel(index) == (index < len(asked) and index not in ended | cancelled)
        if index < len(asked) and index not in ended:
            cancelled.add(index)
        assert one.running >= 0
        assert one.waiting >= 0
        assert one.running + one.waiting == len(asked) - len(ended) - len(cancelled)
    ended |= {token.id for token in one.advance(math.inf) if token.finished}
    assert ended == set(range(len(asked))) - cancelled
    assert one.idle
    assert one.kv_used_fraction == pytest.approx(0.0, abs=1e-9)


def test_answers_that_outgrow_the_cache_are_thrown_out_and_computed_again() -> None:
    asked = [(0.0, 2000, 400)] * 60
    patient, thrown = engine(TINY, preempts=False), engine(TINY)
    first, second = (filled(one, asked).advance(math.inf) for one in (patient, thrown))
    assert patient.preemptions == 0
    assert thrown.preemptions > 0
    assert sum(token.finished for token in first) == sum(token.finished for token in second) == 60
    assert [token.tokens for token in second].count(1) == 60, "a first token comes once, preempted or not"
    whole = engine(WHOLE)
    filled(whole, asked).advance(math.inf)
    assert whole.preemptions == 0, "an engine that sets whole answers aside never runs out"


def test_a_cached_prefix_is_not_computed() -> None:
    def first(cached: int) -> float:
        one = engine()
        one.add("a", 6000, 5, 0.0, cached_tokens=cached)
        return one.advance(math.inf)[0].at

    assert first(0) > 1.5 * first(4000) > 1.5 * first(6000)
    assert first(10**6) == first(5999), "the last token of a prompt is always computed"


def test_load_is_told_as_engines_tell_it() -> None:
    one = engine()
    one.add("a", 3 * one.budget, 10, 0.0)
    one.add("b", 100, 10, 0.0)
    assert (one.running, one.waiting) == (0, 2)
    one.advance(one.next_event_s() or 0.0)
    assert (one.running, one.waiting) == (1, 1)
    assert 0 < one.kv_used_fraction < 1


def test_a_slower_engine_is_slower_from_then_on() -> None:
    def last(slower_from: float) -> float:
        one = engine()
        one.add("a", 100, 100, 0.0)
        before = one.advance(slower_from)
        one.slower = 5.0
        return [*before, *one.advance(math.inf)][-1].at

    assert last(math.inf) < last(0.2) < last(0.0)
    assert last(0.0) - engine().request_s == pytest.approx(5 * (last(math.inf) - engine().request_s))


def test_pipelines_step_in_passes() -> None:
    staged = Engine(replica("llama-3.3-70b", "mi300x", "vllm", Parallelism(tp=2, pp=2)), CONTEXT)
    got = filled(staged, [(0.0, 20_000, 20)] * 8).advance(math.inf)
    assert sum(token.finished for token in got) == 8


@given(asked=requests, which=some.sampled_from(["small", "whole", "ranks"]))
def test_whoever_sleeps_until_the_next_answer_misses_none(asked: list[tuple[float, int, int]], which: str) -> None:
    at_once = filled(engine(BOTH[which], preempts=False), asked).advance(math.inf)
    sleepy = filled(engine(BOTH[which], preempts=False), asked)
    got: list[Token] = []
    moment, looks = 0.0, 0
    while (upcoming := sleepy.next_answer_s()) is not None:
        # A step that begins at a moment is not begun by looking at that very moment.
        moment, looks = max(upcoming, moment) + 1e-9, looks + 1
        fresh = sleepy.advance(moment)
        assert all(token.at > moment - 1e-6 for token in fresh), "not one came while asleep"
        got += fresh
    assert got == at_once


def test_sleeping_takes_few_looks_at_a_long_answer() -> None:
    one = engine()
    one.add("a", 100, 5000, 0.0)
    looks, moment = 0, 0.0
    while (upcoming := one.next_answer_s()) is not None:
        moment, looks = max(upcoming, moment) + 1e-9, looks + 1
        one.advance(moment)
    assert looks < 20


def test_how_far_an_answer_has_come() -> None:
    began: dict[object, float] = {}
    one = Engine(SMALL, CONTEXT, times=TIMES[id(SMALL)], began=began)
    one.add("a", 100, 50, 0.0)
    assert one.made("a") == one.made("nobody") == 0
    one.advance(one.next_event_s() or 0.0)
    assert one.made("a") == 1
    assert began["a"] == pytest.approx(one.request_s)
    for _ in range(10):
        assert one.next_event_s() is not None, "the next step begins"
        one.advance(one.clock)
    assert one.made("a") == 11
    one.advance(math.inf)
    assert one.made("a") == 0


def test_how_long_it_was_busy_by_a_moment() -> None:
    one = engine()
    one.add("a", 100, 50, 1.0)
    begins = 1.0 + one.request_s
    assert one.next_event_s() is not None
    assert one.busy_by(begins) == one.busy_by(0.5) == 0.0
    one.advance(begins + 0.05)
    assert one.busy_by(begins + 0.05) == pytest.approx(0.05)
    one.advance(math.inf)
    assert one.busy_by(1e9) == one.busy_s == pytest.approx(one.clock - begins)


def test_nonsense_is_refused() -> None:
    one = engine()
    one.add("a", 10, 10, 0.0)
    with pytest.raises(BadInput, match="there already"):
        one.add("a", 10, 10, 0.0)
    with pytest.raises(BadInput, match="at least 1"):
        one.add("b", 0, 10, 0.0)
    with pytest.raises(BadInput, match="at least 1"):
        one.add("c", 10, 0, 0.0)
    assert not one.cancel("b")


@pytest.mark.parametrize(("stack", "steps"), [("vllm", 2), ("llama.cpp", 1)])
def test_a_request_waits_for_the_step_that_was_ready_before_it_came(catalog: Catalog, stack: str, steps: int) -> None:
    """While one sequence decodes, another comes in the middle of a step: an engine that makes steps ready ahead has the
    next one without it."""
    deployment = catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator("h200"), stack=stack)
    engine = Engine(deployment, 1000.0)
    engine.add("first", 500, 400, 0.0)
    until = engine.request_s + 0.2
    engine.advance(until)
    began, step = engine.made("first"), engine.times.seconds(1, 700.0, 0, 0, 0.0)
    engine.add("second", 500, 2, until - engine.request_s)
    done = engine.advance(until + 20 * step)
    first = next(token for token in done if token.id == "second")
    prompt = engine.times.seconds(1, 700.0, 500, 500, 0.5 * 500 * 500)
    waited = first.at - prompt - until
    assert (steps - 1) * step < waited < steps * step * 1.01
    assert began > 10

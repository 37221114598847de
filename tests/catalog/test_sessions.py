"""Classes of sessions: what a file says of one becomes a rate, lengths and hits."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from crosstie.catalog.library import Catalog
from crosstie.catalog.reuse import reuse
from crosstie.catalog.sessions import session_trace, session_turns
from crosstie.catalog.traces import Trace
from crosstie.catalog.workloads import read_workload
from crosstie.core.errors import BadData
from crosstie.core.workload import RequestClass, SessionShape, SubAgents
from crosstie.sim.prefix_cache import PrefixCache

CATALOG = Catalog()
SESSIONS = """live = 100
turns = 20
system = 4000
first = 1000
added = 2000
output = 300
pause_s = 9
context = 100000
"""


def shape(**changed: float) -> SessionShape:
    values = {"turns": 20, "first": 1000, "added": 2000, "output": 300, "pause_s": 9, **changed}

    def always(name: str) -> tuple[float, ...]:
        return (float(values[name]),)

    return SessionShape(
        turns=always("turns"), first=always("first"), added=always("added"), output=always("output"),
        pause_s=always("pause_s"), system=values.get("system", 4000.0), context=values.get("context", 1e6),
        compact_to=values.get("compact_to", 2000.0),
    )  # fmt: skip


def trace_of(one: SessionShape, answer_s: float = 0.0) -> Trace:
    return session_trace("agents", one, answer_s)[0]


def read(sessions: str, rest: str = "", targets: str = "tpot_ms = { p90 = 30 }") -> RequestClass:
    content = f'[[class]]\nname = "agents"\nmodel = "llama-3.1-8b"\n{targets}\n[class.sessions]\n{sessions}{rest}'
    return read_workload(CATALOG, Path("w.toml"), content).classes[0]


def test_prompts_grow_by_their_answers_and_what_was_added() -> None:
    trace = trace_of(shape())
    # Turn n of 20 has the system prompt, the task and n times 2,300 tokens.
    assert trace.input_tokens.mean() == pytest.approx(4000 + 1000 + 9.5 * 2300, rel=0.03)
    assert trace.output_tokens.mean() == pytest.approx(300)


def test_endless_memory_finds_all_but_what_is_new() -> None:
    trace = trace_of(shape())
    found = reuse(trace).cached_tokens(np.inf)
    # New are what is added each turn and, in the first of 20, the task; answers were made by the engine itself.
    new = 2000 * 19 / 20 + 1000 / 20
    assert trace.input_tokens.sum() - found == pytest.approx(new * len(trace), rel=0.05)


@pytest.mark.parametrize("sessions", [4, 20, 40])
def test_hits_are_those_of_a_cache_that_is_replayed(sessions: int) -> None:
    trace = trace_of(shape())
    size = sessions * float((trace.input_tokens + trace.output_tokens).mean())
    cache = PrefixCache(size, trace.block_tokens)
    assert trace.blocks is not None
    for row, keys in enumerate(trace.blocks):
        cache.look_up(keys, int(trace.input_tokens[row]))
        cache.keep(keys, int(trace.input_tokens[row]))
        cache.keep_answer(int(trace.output_tokens[row]))
    by_distance = reuse(trace).cached_tokens(size) / trace.input_tokens.sum()
    assert by_distance == pytest.approx(cache.hits / cache.queries, abs=0.02)


def test_a_cache_for_all_sessions_finds_nearly_all_and_half_of_it_far_less() -> None:
    trace = trace_of(shape())
    asked, found = trace.input_tokens.sum(), reuse(trace)
    # 48 sessions at work in the trace.
    working_set = 48 * float((trace.input_tokens + trace.output_tokens).mean())
    assert found.cached_tokens(1.5 * working_set) > 0.98 * found.cached_tokens(np.inf)
    assert found.cached_tokens(0.3 * working_set) / asked < 0.5 * found.cached_tokens(np.inf) / asked


def test_the_rate_is_that_of_littles_law() -> None:
    # 100 sessions, each turn 9 s of pause and 300 x 30 ms of answer.
    one = read(SESSIONS)
    assert one.requests_per_s == pytest.approx(100 / 18.0, rel=0.02)
    assert one.sessions is not None
    assert (one.sessions.live, one.sessions.turns) == (100, 20)
    begun = read(SESSIONS.replace("live = 100", "starts_per_hour = 1000"))
    # 1,000 an hour for 20 turns of 18 s.
    assert begun.requests_per_s == pytest.approx(1000 * 20 / 3600, rel=0.02)


def test_beyond_the_context_a_session_is_summarised() -> None:
    trace = trace_of(shape(turns=60, context=40000.0))
    assert (trace.input_tokens + trace.output_tokens).max() <= 40000
    # Every (40,000 - 6,000) / 2,300 turns or so one more request, whose answer is the summary.
    summaries = int((trace.output_tokens == 2000).sum())
    assert summaries == pytest.approx(len(trace) / 16, rel=0.2)


def helpers(**changed: object) -> SubAgents:
    one = SubAgents(share=1.0, count=(3.0,), forks=True, turns=(2.0,), first=(100.0,), added=(500.0,), output=(40.0,),
                    pause_s=(1.0,))  # fmt: skip
    return msgspec.structs.replace(one, **changed)


def test_sub_agents_go_on_from_the_conversation_or_begin_as_all_do() -> None:
    for forks in (True, False):
        asked = msgspec.structs.replace(shape(turns=3), subagents=helpers(forks=forks))
        shared = tuple(range(8))
        turns = list(session_turns(asked, np.random.default_rng(0), 5, shared, 512))
        # None after the last turn: nobody would wait for them.
        assert [len(turn.subagents) for turn in turns] == [3, 3, 0]
        first = turns[0]
        for one in first.subagents:
            assert [turn.pause_s for turn in one] == [0.0, 1.0]
            begins = first.known if forks else 4000
            assert [turn.input_tokens for turn in one] == [begins + 100, begins + 640]
            common = first.known // 512 if forks else 8
            assert one[0].blocks[:common] == first.blocks[:common]
            assert one[1].blocks[: len(one[0].blocks)] == one[0].blocks
        own = [block for one in first.subagents for block in one[1].blocks[common:]]
        assert len(own) == len({*own, *turns[1].blocks}) - len(turns[1].blocks)
        assert turns[1].blocks[: first.known // 512] == first.blocks[: first.known // 512]


def test_sub_agents_make_requests_and_find_what_they_go_on_from() -> None:
    plain = trace_of(shape(), 9.0)
    apart = msgspec.structs.replace(shape(), subagents=helpers(share=0.5, turns=(1.0,)))
    assert apart.requests == pytest.approx(20 + 19 * 0.5 * 3)
    trace, rate = session_trace("agents", apart, 9.0)
    alone = session_trace("agents", shape(), 9.0)[1]
    # Those of a turn work at once: three more requests in the time of one more answer, of 40 tokens.
    assert rate / alone == pytest.approx((1 + 0.5 * 3) * 18 / 18, rel=0.1)
    calls = trace.output_tokens == 40
    assert calls.mean() == pytest.approx(1.5 / 2.5, abs=0.04)
    found = reuse(trace)
    spared = np.bincount(found.request, found.tokens, len(trace))
    # Their prompts are the whole conversation and a hundred tokens.
    assert spared[calls].sum() / trace.input_tokens[calls].sum() > 0.97
    assert found.cached_tokens(np.inf) / trace.input_tokens.sum() > (
        reuse(plain).cached_tokens(np.inf) / plain.input_tokens.sum()
    )


def test_sub_agents_are_read_and_say_only_what_is_theirs() -> None:
    one = read(SESSIONS, '[class.sessions.subagents]\nshare = 0.2\ncount = 2\nturns = 4\nbegins = "conversation"\n')
    assert one.sessions is not None
    made = one.sessions.shape.subagents
    assert made is not None
    assert (made.forks, made.count, made.turns, made.added, made.first) == (True, (2.0,), (4.0,), (2000.0,), (1000.0,))
    assert one.sessions.turns == pytest.approx(20 + 19 * 0.2 * 8)


def test_the_same_file_gives_the_same_trace() -> None:
    first, again = trace_of(shape()), trace_of(shape())
    assert first.blocks == again.blocks
    assert (first.input_tokens == again.input_tokens).all()


def test_memory_beside_the_gpus_is_read_and_hits_are_measured() -> None:
    one = read(SESSIONS, "[class.prefix]\nhost_gib_per_gpu = 64\n")
    assert one.prefix is not None
    assert one.prefix.measured
    assert one.prefix.host_gib_per_gpu == 64
    assert 0.8 < one.cached_tokens / one.input_tokens < 1.0


@pytest.mark.parametrize(
    ("sessions", "rest", "fault"),
    [
        (SESSIONS.replace("live = 100", ""), "", "sessions: give live, sessions at work at once, or starts_per_hour"),
        (SESSIONS + "starts_per_hour = 3\n", "", "sessions: give live"),
        (SESSIONS.replace("turns = 20", ""), "", "sessions.turns: missing: a number of turns"),
        (SESSIONS.replace("pause_s = 9", "pause_s = -1"), "", "sessions.pause_s: -1 must be a number of seconds"),
        (SESSIONS.replace("100000", "400000"), "", "sessions.context: "),
        (SESSIONS.replace("system = 4000", "system = 99000"), "", "are 101,800 tokens, the context 100,000"),
        (SESSIONS + "tools = 3\n", "", "sessions.tools: unknown"),
        (SESSIONS, "[class.sessions.subagents]\nshare = 0.2\ncount = 2\n", "subagents.turns: missing"),
        (SESSIONS, "[class.sessions.subagents]\nshare = 2\ncount = 2\nturns = 1\n", "subagents.share: "),
        (SESSIONS, "[class.sessions.subagents]\nbegins = 'all'\n", "subagents.begins: 'all' must be system or conv"),
        (SESSIONS, "[class.sessions.subagents]\nlive = 3\n", "subagents.live: unknown"),
        (SESSIONS, "[class.prefix]\nhit_rate = 0.9\n", "prefix.hit_rate: is what measured = true finds out"),
    ],
)  # fmt: skip
def test_a_slip_is_refused_by_its_key(sessions: str, rest: str, fault: str) -> None:
    with pytest.raises(BadData) as caught:
        read(sessions, rest)
    assert fault in str(caught.value)


@pytest.mark.parametrize("key", ["input = 100", "output = 5", "requests_per_s = 3", "trace = 'azure-2023-code'"])
def test_what_sessions_say_is_not_said_twice(key: str) -> None:
    with pytest.raises(BadData, match="the class has sessions, which say its lengths and its rate"):
        read(SESSIONS, targets=key)


def test_without_a_pause_a_target_must_say_how_long_answers_take() -> None:
    without = SESSIONS.replace("pause_s = 9", "pause_s = 0")
    with pytest.raises(BadData, match="nothing says how often turns come"):
        read(without, targets="")
    assert read(without).requests_per_s == pytest.approx(100 / 9.0, rel=0.02)


def test_a_turn_is_its_first_token_and_the_others() -> None:
    one = read(SESSIONS, targets="turn_s = { p95 = 20 }\nttft_ms = { p95 = 5000 }")
    assert one.ttft is not None
    assert one.tpot is not None
    assert one.ttft.seconds + one.tpot.seconds * 299 == pytest.approx(20)
    assert (one.ttft.seconds, one.tpot.percentile) == (5.0, 0.95)
    bare = read(SESSIONS, targets="turn_s = { p95 = 20 }")
    assert bare.ttft is not None
    assert bare.ttft.seconds == 5.0


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        ("turn_s = { p95 = 20 }\ntpot_ms = { p90 = 30 }", "give one of them"),
        ("turn_s = { p95 = 4 }\nttft_ms = { p95 = 5000 }", "no more than ttft_ms leaves"),
        ("turn_s = { p95 = 0 }", "must be a number"),
    ],
)
def test_turns_that_say_nothing(targets: str, says: str) -> None:
    with pytest.raises(BadData, match=says):
        read(SESSIONS, targets=targets)


def test_turns_are_of_sessions() -> None:
    content = '[[class]]\nname = "a"\nmodel = "llama-3.1-8b"\ninput = 9\noutput = 9\nturn_s = { p95 = 9 }\n'
    with pytest.raises(BadData, match="is of classes with sessions"):
        read_workload(CATALOG, Path("w.toml"), content + "requests_per_s = 1\n")

"""Logs of agents' sessions, in the form of AgentX: each session an object, its sub-agents inside."""

import json
from pathlib import Path
from typing import Any

import pytest

from crosstie.catalog.recorded_sessions import recorded_turns, workload_text
from crosstie.catalog.traces import Trace, read_trace
from crosstie.core.errors import BadData


def asked(at: float, tokens: int, first: int = 1, **more: Any) -> dict[str, Any]:
    """A prompt of blocks of 64 tokens that are numbered from `first` on."""
    ids = list(range(first, first + tokens // 64))
    return {"t": at, "type": "n", "model": "m", "in": tokens, "out": 100, "hash_ids": ids, "api_time": 2.0} | more


def session(helper_t: float = 0.0, sent_off_s: float = 12.0) -> dict[str, Any]:
    """Two turns, two sub-agents that begin anew at once, and a third turn when both have ended."""
    helpers = [
        {"t": sent_off_s, "type": "subagent", "agent_id": f"a{number}", "status": "completed",
         "requests": [asked(helper_t, 1024, number), asked(helper_t + 5, 2048, number)]}
        for number in (1000, 2000)
    ]  # fmt: skip
    turns = [asked(0.0, 5120), asked(10.0, 6144)]
    return {
        "id": "s", "models": ["m"], "block_size": 64, "hash_id_scope": "local",
        "requests": [*turns, *helpers, asked(30.0, 8192)],
    }  # fmt: skip


def trace_of(folder: Path, *sessions: dict[str, Any], indent: int | None = None) -> Trace:
    file = folder / "log.jsonl"
    file.write_text("\n".join(json.dumps(one, indent=indent) for one in sessions))
    return read_trace(file)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("helper_t", [0.0, 12.0])
def test_sub_agents_are_of_the_session_that_has_them(tmp_path: Path, helper_t: float, indent: int | None) -> None:
    """Seconds of sub-agents are since their own begin in some logs, in others since the session's."""
    trace = trace_of(tmp_path, session(helper_t), indent=indent)
    assert trace.arrival_s is not None
    assert trace.arrival_s.tolist() == [0, 10, 12, 12, 17, 17, 30]
    ((first, second, third),), left_out = recorded_turns(trace, 100_000)
    assert (left_out, first.subagents, third.subagents) == (0, (), ())
    assert [[turn.input_tokens for turn in helper] for helper in second.subagents] == [[1024, 2048]] * 2
    # From the last answer on: of the turn before, which took two seconds, and of the sub-agents.
    assert (second.pause_s, third.pause_s) == (8.0, 30 - 17 - 2.0)
    assert [helper[1].pause_s for helper in second.subagents] == [3.0, 3.0]
    assert len({turn.conversation for turn in (first, second, third)}) == 1


def test_blocks_are_as_long_as_those_of_other_traces(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, session(), session())
    assert trace.blocks is not None
    lengths = {len(held) * 512 for held in trace.blocks}
    assert lengths == set(trace.input_tokens.tolist())
    first, other = ([held for held, (number, _) in zip(trace.blocks, trace.sessions or (), strict=True) if number == n]
                    for n in (0, 1))  # fmt: skip
    assert first[0] == first[1][:10] == first[-1][:10]
    # Numbers hold within a session.
    assert not {block for held in first for block in held} & {block for held in other for block in held}
    everywhere = trace_of(tmp_path, *(session() | {"hash_id_scope": "global"} for _ in range(2)))
    assert everywhere.blocks is not None
    assert len(set(everywhere.blocks)) == len(set(first))


def test_a_log_becomes_a_class_of_sessions_with_sub_agents(tmp_path: Path) -> None:
    text = workload_text(trace_of(tmp_path, session(), session()))
    assert "2 of 14 requests" in text
    for line in (
        "live = 2",
        "turns = 3",
        "[class.sessions.subagents]",
        "share = 0.5",
        "count = 2",
        'begins = "system"',
    ):
        assert f"\n{line}" in text
    assert "\nfirst = 1024\n" in text


def test_requests_that_a_session_makes_beside_each_other_are_its_own(tmp_path: Path) -> None:
    """A log that does not name its sub-agents: a call with a prompt of its own, while the session goes on."""
    one = session()
    one["requests"] = [asked(0.0, 5120), asked(3.0, 1024, 3000), asked(10.0, 6144)]
    ((first, second),), _ = recorded_turns(trace_of(tmp_path, one), 100_000)
    assert ([helper[0].input_tokens for helper in first.subagents], second.input_tokens) == ([1024], 6144)
    # Answered after the next prompt had come: nobody waited for it.
    one["requests"][1]["api_time"] = 60.0
    ((first, second),), _ = recorded_turns(trace_of(tmp_path, one), 100_000)
    assert (len(first.subagents), second.input_tokens, second.pause_s) == (1, 6144, 8.0)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"block_size": 100}, "line 2: block_size 100 does not divide 512"),
        ({"hash_id_scope": "per_context"}, "line 2: Invalid enum value 'per_context'"),
        ({"requests": [{"t": "noon", "type": "n"}]}, "line 2: Expected `float`"),
        ({"requests": [asked(0.0, 64) | {"in": 0}]}, "line 2: input of 0 tokens"),
        ({"requests": [asked(0.0, 64) | {"type": "tool"}]}, "line 2: Invalid enum value 'tool'"),
    ],
)
def test_a_slip_is_refused_by_its_line(tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    with pytest.raises(BadData) as caught:
        trace_of(tmp_path, session(), session() | change)
    assert fault in str(caught.value)

"""A recording's sessions, written as a class of a workload file."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.catalog.test_sessions import shape

from crosstie.catalog.library import Catalog
from crosstie.catalog.recorded_sessions import recorded_turns, workload_text
from crosstie.catalog.sessions import session_trace
from crosstie.catalog.traces import Trace, find_trace, read_trace
from crosstie.catalog.workloads import example_text, read_workload
from crosstie.core.errors import BadData, BadInput


def written(text: str) -> dict[str, Any]:
    return tomllib.loads(text)["class"][0]["sessions"]  # type: ignore[no-any-return]


def mean(value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    bins = value["histogram"]
    return float(sum((low + high) / 2 * part for low, high, part in bins))


def test_what_was_made_of_a_shape_tells_that_shape() -> None:
    trace, _ = session_trace("agents", shape(), answer_s=0.0)
    found = written(workload_text(trace))
    # Those that the trace's end cuts off are shorter.
    assert mean(found["turns"]) == pytest.approx(20, rel=0.15)
    assert found["live"] == pytest.approx(48, rel=0.1)
    assert found["system"] == pytest.approx(4000, rel=0.1)
    assert mean(found["first"]) == pytest.approx(1000, rel=0.5)
    assert mean(found["added"]) == pytest.approx(2000, rel=0.1)
    assert mean(found["output"]) == pytest.approx(300)
    assert mean(found["pause_s"]) == pytest.approx(9, rel=0.05)


@pytest.mark.slow
def test_a_recorded_trace_makes_a_workload_that_is_read() -> None:
    text = example_text("mooncake-conversation")
    one = read_workload(Catalog(), Path("w.toml"), text).classes[0]
    assert one.sessions is not None
    # 12,031 requests in 6,745 sessions.
    assert one.sessions.turns == pytest.approx(12031 / 6745, rel=0.15)


def test_answers_times_are_no_pause(tmp_path: Path) -> None:
    file = tmp_path / "recording.jsonl"
    lines = [
        {"timestamp": turn * 10_000, "input_length": 1024 * (turn + 1), "output_length": 11, "pool": "a",
         "hash_ids": list(range(2 * turn + 2)), "ttft_ms": 1000, "tpot_ms": 200}
        for turn in range(4)
    ]  # fmt: skip
    file.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    found = written(workload_text(read_trace(file)))
    # Ten seconds from prompt to prompt, of which the answer took 1 + 10 x 0.2.
    assert mean(found["pause_s"]) == pytest.approx(7.0)
    assert mean(found["added"]) == pytest.approx(1024 - 11)
    assert (found["turns"], found["live"]) == (4, 1)


def recording(folder: Path, *rows: tuple[float, int, list[int]]) -> Trace:
    """Second of arrival, tokens and blocks of each prompt."""
    file = folder / "recording.jsonl"
    lines = [
        {"timestamp": round(at * 1000), "input_length": tokens, "output_length": 50, "hash_ids": blocks, "pool": "a",
         "ttft_ms": 500, "tpot_ms": 0}
        for at, tokens, blocks in sorted(rows)
    ]  # fmt: skip
    file.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    return read_trace(file)


FIRST, SECOND = list(range(4)), list(range(6))


def test_calls_of_sub_agents_are_of_the_session_that_they_go_on_from(tmp_path: Path) -> None:
    """Three at once, one of them with two turns, and then the session's own next turn."""
    trace = recording(
        tmp_path, (0, 2048, FIRST), (9, 3072, SECOND),
        (11, 3584, [*SECOND, 10]), (11, 3584, [*SECOND, 20]), (12, 4096, [*SECOND, 30, 31]),
        (14, 4096, [*SECOND, 10, 11]), (20, 5120, [*SECOND, 7, 8, 9, 40]), (29, 5632, [*SECOND, 7, 8, 9, 40, 41]),
    )  # fmt: skip
    (turns,), _ = recorded_turns(trace, 100_000)
    assert [turn.input_tokens for turn in turns] == [2048, 3072, 5120, 5632]
    assert [[step.input_tokens for step in helper] for helper in turns[1].subagents] == [[3584, 4096], [3584], [4096]]
    # The session waited for the second turn of the first of them.
    assert turns[2].pause_s == pytest.approx(20 - 14.5)
    assert [turn.subagents for turn in (turns[0], *turns[2:])] == [(), (), ()]
    found = written(workload_text(trace))
    assert (found["turns"], found["live"]) == (4, 1)
    helpers = found["subagents"]
    assert (helpers["share"], helpers["count"], helpers["begins"]) == (
        pytest.approx(1 / 3, abs=1e-4),
        3,
        "conversation",
    )
    assert mean(helpers["turns"]) == pytest.approx(4 / 3, rel=0.1)


def test_sessions_that_only_begin_alike_are_not_joined(tmp_path: Path) -> None:
    """A system prompt of two blocks, and first messages that are shorter than a block: no prompt tells of another."""
    lengths = [1300, 1100, 1250, 1400, 1060, 1200]
    rows = [(5.0 * place, tokens, [0, 1, 100 + place]) for place, tokens in enumerate(lengths)]
    sessions, _ = recorded_turns(recording(tmp_path, *rows), 100_000)
    assert [len(session) for session in sessions] == [1] * 6
    # Second turns are of one of those before, never two of the same: which, no block says, so a few first turns may be.
    for place, tokens in enumerate(lengths):
        own = [1000 * (place + 1) + number for number in range(9)]
        rows += [(5 * place + turn * 9, tokens + 512 * turn, [0, 1, *own[: turn + 1]]) for turn in (1, 2, 3)]
    sessions, _ = recorded_turns(recording(tmp_path, *rows), 100_000)
    assert len(sessions) == 6
    assert all(3 <= len(session) <= 5 for session in sessions)
    assert not any(turn.subagents for session in sessions for turn in session)


def test_who_begins_as_another_did_while_that_one_goes_on_is_no_sub_agent(tmp_path: Path) -> None:
    """Two that share a first prompt: the first goes on while the second is at work, and was not waiting for it."""
    rows = [(0, 2048, FIRST), (9, 3072, SECOND), (12, 3072, [*FIRST, 50, 51]), (18, 4096, [*SECOND, 6, 7]),
            (22, 4096, [*FIRST, 50, 51, 52, 53]), (27, 5120, [*SECOND, 6, 7, 8, 9])]  # fmt: skip
    sessions, _ = recorded_turns(recording(tmp_path, *rows), 100_000)
    assert sorted([turn.input_tokens for turn in session] for session in sessions) == [
        [2048, 3072, 4096, 5120], [3072, 4096],
    ]  # fmt: skip


def test_prompts_with_nothing_in_common_are_no_sessions(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="needs times and hash_ids"):
        workload_text(read_trace(find_trace("azure-2023-code", tmp_path)))
    trace, _ = session_trace("one turn each", shape(turns=1), answer_s=0.0)
    with pytest.raises(BadData, match="hardly go on with one another"):
        workload_text(trace)


def test_an_unknown_example_is_answered_by_those_that_there_are() -> None:
    with pytest.raises(BadInput, match="Did you mean agents"):
        example_text("agent")
    assert "[class.sessions]" in example_text("agents")

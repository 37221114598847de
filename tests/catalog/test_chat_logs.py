"""Logs of OpenAI's API as traces: lengths from usage, and which prompts begin alike from the messages."""

import json
from pathlib import Path
from typing import Any

import pytest

from crosstie.catalog.recorded_sessions import workload_text
from crosstie.catalog.traces import Trace, read_trace
from crosstie.core.errors import BadData

SYSTEM = {"role": "system", "content": "You repair programs. " * 400}
WORDS = "The test of line %d fails for session %d and nobody knows why. "


def said(number: int, session: int) -> dict[str, str]:
    return {"role": "user" if number % 2 else "assistant", "content": WORDS % (number, session) * 60}


def calls(sessions: int = 4, turns: int = 5) -> list[dict[str, Any]]:
    """In the order of their turns: each prompt is the last one, an answer and something new."""
    found = []
    for turn in range(turns):
        for session in range(sessions):
            messages = [SYSTEM, *(said(number, session) for number in range(1, 2 * turn + 2))]
            tokens = sum(len(json.dumps(one)) for one in messages) // 4
            usage = {"prompt_tokens": tokens, "completion_tokens": 900, "total_tokens": tokens + 900}
            found.append({"created": 1_790_000_000 + 60 * turn + session, "messages": messages, "usage": usage})
    return found


def trace_of(folder: Path, lines: list[dict[str, Any]]) -> Trace:
    file = folder / "calls.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_trace(file)


def test_prompts_that_begin_alike_have_the_same_blocks(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, calls())
    assert trace.blocks is not None
    assert trace.arrival_s is not None
    assert (len(trace), trace.arrival_s[:5].tolist()) == (20, [0.0, 1.0, 2.0, 3.0, 60.0])
    assert set(trace.output_tokens.tolist()) == {900}
    for row, blocks in enumerate(trace.blocks):
        assert len(blocks) == -(-int(trace.input_tokens[row]) // 512)
        # All but the last two, which may not have been whole then: bytes a token are the log's, not the prompt's.
        before = trace.blocks[row - 4][:-2] if row >= 4 else ()
        assert blocks[: len(before)] == before
    # Sessions have the system prompt in common, 2,100 tokens, and nothing else.
    common = [first == second for first, second in zip(trace.blocks[16], trace.blocks[17], strict=False)]
    assert 3 <= sum(common) <= 4
    assert common.index(False) == sum(common)


def test_a_log_becomes_a_class_of_sessions(tmp_path: Path) -> None:
    text = workload_text(trace_of(tmp_path, calls()))
    assert "4 of 20 requests" in text
    assert "turns = 5" in text


@pytest.mark.parametrize("form", ["request", "body"])
def test_a_call_and_its_answer_stand_side_by_side(tmp_path: Path, form: str) -> None:
    plain = trace_of(tmp_path, calls())
    lines = []
    for call in calls():
        answer = {"usage": call["usage"], "created": call["created"]}
        response = answer if form == "request" else {"status_code": 200, "body": answer}
        lines.append({form: {"model": "m", "messages": call["messages"]}, "response": response})
    other = trace_of(tmp_path, lines)
    assert other.blocks == plain.blocks
    assert (other.input_tokens == plain.input_tokens).all()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"usage": None}, "line 3: has no usage of its answer"),
        ({"created": None}, "line 3: has no timestamp or created"),
        ({"messages": None}, "line 3: has no messages"),
        ({"usage": {"prompt_tokens": "many", "completion_tokens": 3}}, "line 3: Expected `int`"),
        ({"usage": {"prompt_tokens": 0, "completion_tokens": 3}}, "line 3: input of 0 tokens"),
    ],
)
def test_a_slip_is_refused_by_its_line(tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    lines = calls()
    lines[2] |= change
    with pytest.raises(BadData) as caught:
        trace_of(tmp_path, lines)
    assert fault in str(caught.value)

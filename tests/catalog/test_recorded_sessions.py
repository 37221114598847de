"""A recording's sessions, written as a class of a workload file."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.catalog.test_sessions import shape

from crosstie.catalog.library import Catalog
from crosstie.catalog.recorded_sessions import workload_text
from crosstie.catalog.sessions import session_trace
from crosstie.catalog.traces import find_trace, read_trace
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

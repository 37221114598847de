"""Chaos in small: every request ends once and usage adds up; and the harness would say so if it were otherwise."""

import importlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import crosstie

SOURCE = Path(crosstie.__file__).parents[1]
CHAOS = Path(__file__).parents[3] / "benchmarks" / "chaos"
# Twenty times what it takes on an idle machine.
LONG_S = 600


@pytest.fixture(scope="module")
def harness() -> Any:
    """Its modules, by name: scripts beside each other, and no package."""
    sys.path.insert(0, str(CHAOS))
    try:
        yield {name: importlib.import_module(name) for name in ("plan", "http_answer", "crowd", "verdict")}
    finally:
        sys.path.remove(str(CHAOS))


@pytest.mark.storm
@pytest.mark.parametrize("more", [[], ["--kill-gateway", "--requests", "600"]], ids=["", "gateway-killed"])
def test_nothing_is_lost_and_everything_adds_up(tmp_path: Path, more: list[str]) -> None:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [
            sys.executable, CHAOS / "run.py", "--requests", "1500", "--seed", "7", "--connections", "24", "--gap", "0.3",
            "--replicas", "2", "--local-share", "0", "--keep", tmp_path / "run", "--json", result, *more,
        ],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, timeout=LONG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(result.read_text())
    assert (said["lost"], said["problems"]) == (0, [])
    assert said["troubles_in_all"] > 0
    assert said["ends"]["answer"] > said["requests"] // 2


def plain(harness: Any, number: int = 0, **changes: Any) -> Any:
    """A plan of a plain stream, with whatever a test wants to be otherwise."""
    usual = {
        "manner": "plain", "local": False, "chat": False, "stream": True, "usage": True, "tokens": 10, "wrong": "",
        "key": "plain-a", "prompt": "x" * 40,
    }  # fmt: skip
    made = harness["plan"].planned(1, number, 0.0)
    return made._replace(**{**usual, **changes})


def stream_of(plan: Any, text: str | None = None, *, usage: Any = None, end: str = "data: [DONE]\n\n") -> bytes:
    pieces: list[dict[str, Any]] = [
        {"id": "a", "choices": [{"text": plan.text if text is None else text, "finish_reason": "length"}]}
    ]
    counted = {"prompt_tokens": plan.prompt_tokens, "completion_tokens": plan.tokens} if usage is None else usage
    if counted:
        pieces.append({"id": "a", "choices": [], "usage": counted})
    return ("".join(f"data: {json.dumps(one)}\n\n" for one in pieces) + end).encode()


def judged(harness: Any, plan: Any, body: bytes, *, status: int = 200, id: bytes | None = None) -> Any:
    crowd = harness["crowd"].Crowd(
        0, {}, {}, first=0, requests=1, seed=1, local_share=0, connections=1, deadline=0.0, killed=lambda a, b: False
    )
    head = b"HTTP/1.1 %d X\r\nx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (status, id or plan.id, len(body))
    answer = harness["http_answer"].Answer()
    assert answer.feed(head + body) == b""
    seen = harness["crowd"].Seen(plan)
    crowd._judge(seen, answer)
    return seen


def test_a_right_stream_is_an_answer(harness: Any) -> None:
    plan = plain(harness)
    assert judged(harness, plan, stream_of(plan)).how == "answer"


@pytest.mark.parametrize(
    "wrong",
    ["another text", "short", "no end", "half an event", "usage", "no usage", "two finishes", "two ids", "other's"],
)
def test_a_wrong_stream_is_lost(harness: Any, wrong: str) -> None:
    plan = plain(harness)
    good = stream_of(plan)
    extra: dict[str, Any] = {"id": "b" if wrong == "two ids" else "a", "choices": []}
    if wrong == "two finishes":
        extra["choices"] = [{"text": "", "finish_reason": "stop"}]
    bodies = {
        "another text": stream_of(plan, plan.text[:-1] + "?"),
        "short": stream_of(plan, plan.text[:-4]),
        "no end": stream_of(plan, end=""),
        "half an event": good + b"data: {",
        "usage": stream_of(plan, usage={"prompt_tokens": 1, "completion_tokens": 10}),
        "no usage": stream_of(plan, usage={}),
        "two finishes": f"data: {json.dumps(extra)}\n\n".encode() + good,
        "two ids": f"data: {json.dumps(extra)}\n\n".encode() + good,
        "other's": good,
    }
    assert judged(harness, plan, bodies[wrong], id=b"chaos-99" if wrong == "other's" else None).how == "lost"


def test_errors_must_be_clear(harness: Any) -> None:
    plan = plain(harness)
    clear = b'{"error": {"message": "no", "code": "no_backend"}}'
    assert judged(harness, plan, clear, status=503).how == "error"
    assert judged(harness, plan, b"oops", status=503).how == "lost"
    assert judged(harness, plain(harness, wrong="no-json"), stream_of(plan)).how == "lost"
    cut = stream_of(
        plan, plan.text[:8], usage={}, end='data: {"error": {"message": "cut", "code": "upstream_cut"}}\n\n'
    )
    assert judged(harness, plan, cut).how == "in-band error"
    wrong = stream_of(plan, "nonsense", usage={}, end='data: {"error": {"message": "cut"}}\n\n')
    assert judged(harness, plan, wrong).how == "lost"


def test_answers_come_in_any_pieces(harness: Any) -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    two = chunked + b"HTTP/1.1 404 X\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno"
    for size in range(1, len(two)):
        first, second = harness["http_answer"].Answer(), harness["http_answer"].Answer()
        for start in range(0, len(two), size):
            piece = two[start : start + size]
            rest = piece if first.complete else first.feed(piece)
            if first.complete and rest:
                second.feed(rest)
        assert (first.body, second.body, second.status, second.complete) == (b"abcde", b"no", 404, True)
        assert second.closes
    with pytest.raises(harness["http_answer"].Malformed):
        harness["http_answer"].Answer().feed(chunked.replace(b"3\r\n", b"2\r\n"))


def line(plan: Any, **changes: Any) -> dict[str, Any]:
    usual = {
        "event": "request", "request_id": plan.id.decode(), "key": 1, "status": 200, "outcome": "served", "attempts": 1,
        "input_tokens": plan.prompt_tokens, "output_tokens": plan.tokens, "resumed": 0, "backend": "b",
        "counted": True,
    }  # fmt: skip
    return {**usual, **changes}


def seen_of(harness: Any, plan: Any, how: str = "answer", **changes: Any) -> Any:
    one = harness["crowd"].Seen(plan)
    one.complete_request, one.status, one.tokens = True, 200, plan.tokens
    one.end(how)
    for name, value in changes.items():
        setattr(one, name, value)
    return one


def problems(harness: Any, folder: Path, seen: list[Any], lines: list[Any], stored: tuple[int, int, int]) -> list[str]:
    log, store = folder / "log", folder / "usage.db"
    log.write_text("".join(json.dumps(one) + "\n" for one in lines))
    store.unlink(missing_ok=True)
    with sqlite3.connect(store) as at:
        at.execute("CREATE TABLE crosstie_keys (id, name)")
        at.execute("INSERT INTO crosstie_keys VALUES (1, 'plain-a')")
        at.execute("CREATE TABLE crosstie_usage (key_id, pool, requests, input_tokens, output_tokens)")
        at.execute("INSERT INTO crosstie_usage VALUES (1, 'amd', ?, ?, ?)", stored)
    verdict, told = harness["verdict"].Verdict(), harness["verdict"].Told(log)
    verdict.each_ended_once(seen, told, killed=False)
    verdict.store_equals_log(store, told)
    return [*verdict.problems, *told.complaints]


def test_what_adds_up_is_no_problem(harness: Any, tmp_path: Path) -> None:
    plan = plain(harness)
    assert problems(harness, tmp_path, [seen_of(harness, plan)], [line(plan)], (1, 10, 10)) == []
    # What was counted by bytes may be off by a little, and says so.
    cut, by_bytes = seen_of(harness, plan, "in-band error"), line(plan, outcome="cut", output_tokens=9, counted=False)
    assert problems(harness, tmp_path, [cut], [by_bytes], (1, 10, 9)) == []


@pytest.mark.parametrize(
    ("how", "changes", "stored", "said"),
    [
        ("lost", [{}], (1, 10, 10), "lost"),
        ("answer", [], (0, 0, 0), "told of no end"),
        ("answer", [{}, {}], (2, 20, 20), "2 times"),
        ("answer", [{"outcome": "cut"}], (1, 10, 10), "told was cut"),
        ("answer", [{"output_tokens": 9}], (1, 10, 9), "counted (10, 9)"),
        ("in-band error", [{"outcome": "cut", "output_tokens": 4}], (1, 10, 4), "before the error, counted 4"),
        ("in-band error", [{"outcome": "cut", "output_tokens": 9}], (1, 10, 9), "before the error, counted 9"),
        ("in-band error", [{"outcome": "cut", "output_tokens": 8, "counted": False}], (1, 10, 8), "counted 8"),
        ("left", [{"outcome": "client gone", "output_tokens": 11}], (1, 10, 11), "counted 11"),
        ("error", [{"outcome": "failed", "status": 502, "output_tokens": 0}], (1, 10, 0), "told was 502"),
        ("answer", [{}], (2, 10, 10), "in the store"),
        ("answer", [{}], (1, 10, 20), "in the store"),
        ("answer", [{}, {"request_id": "who"}], (2, 20, 20), "nobody sent"),
        ("answer", [{}, {"event": "internal_error"}], (1, 10, 10), "internal_error"),
    ],
)
def test_what_does_not_add_up_is_a_problem(
    harness: Any, tmp_path: Path, how: str, changes: list[dict[str, Any]], stored: tuple[int, int, int], said: str
) -> None:
    plan = plain(harness)
    lines = [line(plan, **change) for change in changes]
    found = problems(harness, tmp_path, [seen_of(harness, plan, how)], lines, stored)
    assert any(said in problem for problem in found), found


def test_many_failures_of_those_who_did_nothing_are_a_problem(harness: Any) -> None:
    def found(failed: int, **changes: Any) -> list[str]:
        plans = [plain(harness, number, **changes) for number in range(100)]
        seen = [seen_of(harness, one) for one in plans[failed:]]
        seen += [seen_of(harness, one, "error", status=503, code="unavailable") for one in plans[:failed]]
        verdict = harness["verdict"].Verdict()
        verdict.innocent_are_served(seen)
        return list(verdict.problems)

    assert found(2) == []
    assert found(3) == ["3 of 100 plain requests failed: {'503 unavailable': 3}"]
    assert found(50, manner="poison") == []


def test_after_a_kill_usage_keeps_within_what_was_served(harness: Any, tmp_path: Path) -> None:
    plan = plain(harness)
    for stored, good in ((10, True), (9, False), (21, False)):
        verdict = harness["verdict"].Verdict()
        early, late = seen_of(harness, plan, ended=1.0), seen_of(harness, plan, ended=99.9)
        store = tmp_path / f"usage-{stored}.db"
        with sqlite3.connect(store) as at:
            at.execute("CREATE TABLE crosstie_keys (id, name)")
            at.execute("INSERT INTO crosstie_keys VALUES (1, 'plain-a')")
            at.execute("CREATE TABLE crosstie_usage (key_id, pool, requests, input_tokens, output_tokens)")
            at.execute("INSERT INTO crosstie_usage VALUES (1, 'amd', 1, 1, ?)", (stored,))
        verdict.store_within_bounds(store, [early, late], [[100.0, 101.0]])
        assert bool(verdict.problems) != good

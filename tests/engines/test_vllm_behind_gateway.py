"""The same real failures with `crosstie serve` between: what a client sees of them, and what another engine saves.

Pool `vllm` gets every request that it can take. Pool `llama`, where there is one, is a llama.cpp that serves the same
model by name and gets what vLLM could not answer.
"""

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engines.conftest import Start
from tests.engines.streams import Stream, get, metric, post, refuses
from tests.engines.test_vllm_cpu import LONG, settled
from tests.engines.vllm_server import MODEL, VllmServer
from tests.run.service.processes import Running, comes_true, serving

from crosstie_gateway.start.local import LocalEngine, start_local

pytestmark = pytest.mark.vllm_cpu
# Patience of these gateways, and how much later than that a client may hear of it on a busy machine.
FIRST_BYTE_S, IDLE_S, SLACK_S = 20, 5, 15
# What is asked of those that llama.cpp may have to answer: it takes a second.
SHORT = 12
FLEET = f"""
format = 1
policy = "weighted"
[serve]
first_byte_timeout_s = {FIRST_BYTE_S}
idle_timeout_s = {IDLE_S}
health_every_s = 0.5
metrics_every_s = 0.2
slow_start_s = 0
queue_s = 30
drain_s = 5
[[pool]]
name = "vllm"
model = "{MODEL}"
weight = 1
backends = ["VLLM"]
"""
SECOND = f"""
[[pool]]
name = "llama"
model = "{MODEL}"
served_as = "smollm2-135m"
weight = 0
backends = ["LLAMA"]
"""
Note = Callable[[str, object], None]


@pytest.fixture(scope="module")
def llama() -> Iterator[LocalEngine]:
    with start_local(threads=1) as engine:
        yield engine


@contextlib.contextmanager
def before(folder: Path, server: VllmServer, other: LocalEngine | None = None) -> Iterator[Running]:
    file = folder / "fleet.toml"
    text = FLEET.replace("VLLM", server.url)
    file.write_text(text if other is None else text + SECOND.replace("LLAMA", other.url))
    with serving(folder, file) as running:
        yield running
        assert "Traceback" not in running.errors
        assert running.ends() in (0, 1)


@contextlib.contextmanager
def streams(running: Running, *tokens: int) -> Iterator[list[Stream]]:
    """The first has begun; the others have had time to reach the engine, and wait there."""
    opened = [Stream(running.url, MODEL, tokens[0]).read(60, until_events=2)]
    try:
        for count in tokens[1:]:
            opened.append(Stream(running.url, MODEL, count).read(0.5))
        yield opened
    finally:
        for stream in opened:
            stream.leave()


def told(running: Running, name: str) -> float:
    return metric(get(running.url, "/metrics").text, name)


def faults(running: Running) -> int:
    text = get(running.url, "/metrics").text
    found = [line for line in text.splitlines() if line.startswith('crosstie_backend_faults_total{pool="vllm"}')]
    return int(found[0].rpartition(" ")[2]) if found else 0


def down(running: Running) -> bool:
    pools = json.loads(get(running.url, "/ready").text)["pools"]
    return bool(pools["vllm"]["up"] == 0)


def assert_saved(waiting: Stream) -> None:
    """Nothing of vLLM's failure has reached it: another engine gave the whole answer."""
    assert waiting.ending in ("length", "stop"), waiting.body
    assert waiting.header("x-crosstie-pool") == "llama"
    assert waiting.events[-1] == "[DONE]"
    assert waiting.usage is not None
    assert waiting.usage["completion_tokens"] > 0


def assert_ended_or_told(busy: Stream, since: float, note: Note) -> None:
    """A stream that had begun is whole, or says that it is not; within the patience of the gateway."""
    busy.read(IDLE_S + SLACK_S)
    note("running stream", f"{busy.ending} after {time.monotonic() - since:.1f} s: {busy.events[-1][:160]}")
    assert busy.complete, "silence, or an end without the last chunk"
    assert busy.ending in ("length", "error")
    if busy.ending == "error":
        errors = [chunk["error"] for chunk in busy.chunks if "error" in chunk]
        assert len(errors) == 1
        assert json.loads(json.dumps(errors[0]))["message"]


# One engine that lives on


def test_streams_have_a_role_tokens_and_their_usage_if_asked_for(
    small_vllm: VllmServer, tmp_path: Path, record_property: Note
) -> None:
    settled(small_vllm)
    with before(tmp_path, small_vllm) as running:
        stream = Stream(running.url, MODEL, 5).read(60)
        first, *middle, last = stream.chunks
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all("usage" not in chunk for chunk in [first, *middle])
        assert last["usage"]["completion_tokens"] == 5
        assert stream.ending == "length"
        assert stream.header("x-crosstie-pool") == "vllm"
        plain = Stream(running.url, MODEL, 5, stream_options=None).read(60)
        assert plain.ending == "length"
        assert plain.usage is None
        assert all(chunk["choices"] for chunk in plain.chunks)
        assert plain.events[-1] == "[DONE]"
        # Asked for or not, it was counted.
        assert comes_true(lambda: 'kind="output"} 10' in get(running.url, "/metrics").text)
        every = Stream(running.url, MODEL, 5, stream_options={"continuous_usage_stats": True}).read(60)
        record_property("continuous usage without include_usage", f"{every.ending}, usage {every.usage}")
        assert every.ending == "length"


def test_refusals_pass_as_they_are(small_vllm: VllmServer, tmp_path: Path) -> None:
    with before(tmp_path, small_vllm) as running:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "fleet " * 3000}], "stream": True}
        answer = post(running.url, "/v1/chat/completions", body)
        assert answer.status == 400
        assert json.loads(answer.text)["error"]["type"] == "BadRequestError"
        whole = post(running.url, "/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 3, "n": 2})
        assert (whole.status, len(json.loads(whole.text)["choices"])) == (200, 2)
        unable = post(running.url, "/v1/embeddings", {"model": MODEL, "input": "a"})
        assert 400 <= unable.status < 600
        assert faults(running) == 0
        assert not down(running)


def test_a_full_engine_is_passed_over_or_waited_for(
    small_vllm: VllmServer, llama: LocalEngine, tmp_path: Path, record_property: Note
) -> None:
    settled(small_vllm)
    with before(tmp_path, small_vllm, llama) as running, streams(running, LONG, LONG, LONG):
        saved = Stream(running.url, MODEL, SHORT).read(60)
        assert_saved(saved)
        assert faults(running) == 0
        assert not down(running)
    settled(small_vllm)
    with before(tmp_path, small_vllm) as running, streams(running, LONG, LONG, LONG) as three:
        refused = Stream(running.url, MODEL, SHORT).read(60)
        record_property("alone and full", f"{refused.status} {refused.body[:160]}")
        assert refused.status == 503
        # For the next second nobody is sent there: they wait in the gateway, and get in when there is room.
        patient = Stream(running.url, MODEL, SHORT).read(0.2)
        assert patient.received == b""
        for stream in three:
            stream.leave()
        assert patient.read(60).ending == "length"
        assert faults(running) == 0


def test_traffic_of_others_is_seen(small_vllm: VllmServer, tmp_path: Path) -> None:
    settled(small_vllm)
    with before(tmp_path, small_vllm) as running:
        assert comes_true(lambda: told(running, "crosstie_engine_running") == 0)
        others = [Stream(small_vllm.url, MODEL, LONG).read(0.5) for _ in range(3)]
        try:
            assert comes_true(
                lambda: (told(running, "crosstie_engine_running"), told(running, "crosstie_engine_waiting")) == (1, 2)
            )
            assert told(running, "crosstie_in_flight") == 0
        finally:
            for other in others:
                other.leave()
        assert comes_true(lambda: told(running, "crosstie_engine_running") == 0)


def test_a_client_that_leaves_the_gateway_leaves_the_engine(small_vllm: VllmServer, tmp_path: Path) -> None:
    settled(small_vllm)
    with before(tmp_path, small_vllm) as running:
        with streams(running, LONG, LONG):
            assert comes_true(lambda: told(running, "crosstie_engine_waiting") == 1)
        settled(small_vllm)


def test_a_frozen_engine_costs_its_patience_and_no_more(
    small_vllm: VllmServer, llama: LocalEngine, tmp_path: Path, record_property: Note
) -> None:
    settled(small_vllm)
    with before(tmp_path, small_vllm, llama) as running, streams(running, LONG, SHORT) as (busy, waiting):
        small_vllm.send_all(signal.SIGSTOP)
        since = time.monotonic()
        try:
            assert_ended_or_told(busy, since, record_property)
            assert busy.ending == "error"
            assert comes_true(lambda: down(running))
            waiting.read(FIRST_BYTE_S + SLACK_S)
            record_property("waiting stream", f"{waiting.ending} after {time.monotonic() - since:.1f} s")
            assert_saved(waiting)
            assert_saved(Stream(running.url, MODEL, SHORT).read(60))
        finally:
            small_vllm.send_all(signal.SIGCONT)
        assert comes_true(lambda: not down(running))
        settled(small_vllm)
        assert Stream(running.url, MODEL, SHORT).read(60).header("x-crosstie-pool") == "vllm"


# Engines that end


def test_sigterm_of_the_engine(start_vllm: Start, llama: LocalEngine, tmp_path: Path, record_property: Note) -> None:
    """Whatever vLLM's race makes of its streams, none of the gateway's clients is left in silence."""
    with (
        start_vllm("--max-num-seqs", "1") as server,
        before(tmp_path, server, llama) as running,
        streams(running, LONG, SHORT, SHORT) as (busy, *waiting),
    ):
        server.send(signal.SIGTERM)
        since = time.monotonic()
        assert comes_true(lambda: refuses(server.url))
        assert_saved(Stream(running.url, MODEL, SHORT).read(60))
        assert_ended_or_told(busy, since, record_property)
        for stream in waiting:
            stream.read(FIRST_BYTE_S + SLACK_S)
            record_property("waiting stream", f"{stream.ending} after {time.monotonic() - since:.1f} s")
            assert_saved(stream)
        assert comes_true(lambda: down(running))


def test_an_engine_that_hangs_in_its_shutdown(
    start_vllm: Start, llama: LocalEngine, tmp_path: Path, record_property: Note
) -> None:
    """With --shutdown-timeout vLLM leaves every stream open and silent; it is the gateway's patience that ends it."""
    with (
        start_vllm("--max-num-seqs", "1", "--shutdown-timeout", "2") as server,
        before(tmp_path, server, llama) as running,
        streams(running, LONG, SHORT, SHORT) as (busy, *waiting),
    ):
        server.send(signal.SIGTERM)
        since = time.monotonic()
        # While it drains it answers 500 to whoever is new, and 200 to /health.
        assert_saved(Stream(running.url, MODEL, SHORT).read(60))
        assert_ended_or_told(busy, since, record_property)
        for stream in waiting:
            stream.read(FIRST_BYTE_S + SLACK_S)
            record_property("waiting stream", f"{stream.ending} after {time.monotonic() - since:.1f} s")
            assert_saved(stream)
        assert comes_true(lambda: down(running))


@pytest.mark.parametrize("alone", [False, True], ids=["with its engine", "alone"])
def test_kill_9_of_the_server(
    start_vllm: Start, llama: LocalEngine, tmp_path: Path, record_property: Note, alone: bool
) -> None:
    with (
        start_vllm("--max-num-seqs", "1") as server,
        before(tmp_path, server, llama) as running,
        streams(running, LONG, SHORT) as (busy, waiting),
    ):
        (server.send if alone else server.send_all)(signal.SIGKILL)
        since = time.monotonic()
        assert_ended_or_told(busy, since, record_property)
        assert busy.chunks[-1]["error"]["code"] == "upstream_cut"
        waiting.read(FIRST_BYTE_S + SLACK_S)
        record_property("waiting stream", f"{waiting.ending} after {time.monotonic() - since:.1f} s")
        assert_saved(waiting)
        assert comes_true(lambda: down(running))
        assert_saved(Stream(running.url, MODEL, SHORT).read(60))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_process_behind_a_living_server_ends(
    start_vllm: Start, llama: LocalEngine, tmp_path: Path, record_property: Note, number: signal.Signals
) -> None:
    """Killed, it is an error event under 200; told to end, it looks as if it had finished."""
    with (
        start_vllm("--max-num-seqs", "1") as server,
        before(tmp_path, server, llama) as running,
        streams(running, LONG, SHORT) as (busy, waiting),
    ):
        server.send_core(number)
        since = time.monotonic()
        assert_ended_or_told(busy, since, record_property)
        assert busy.ending == "error"
        waiting.read(FIRST_BYTE_S + SLACK_S)
        record_property("waiting stream", f"{waiting.ending} after {time.monotonic() - since:.1f} s")
        assert_saved(waiting)
        assert comes_true(lambda: down(running))
        assert_saved(Stream(running.url, MODEL, SHORT).read(60))

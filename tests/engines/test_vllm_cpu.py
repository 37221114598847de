"""How vLLM speaks, refuses and fails, from the real thing: what a gateway in front of it has to cope with."""

import json
import signal
import time
from pathlib import Path

import pytest
from tests.engines.conftest import Chat, Front, Start
from tests.engines.streams import get, metric, metric_names, post, refuses
from tests.engines.vllm_server import MODEL, VllmServer

pytestmark = pytest.mark.vllm_cpu
SAMPLE = Path(__file__).parent / "data" / "vllm_metrics.txt"
# Tokens that take longer than any test looks at them, within the context of the tiny model.
LONG = 1900


def settled(server: VllmServer) -> None:
    """Waits for an engine without work: the one before may just have been left."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = get(server.url, "/metrics").text
        if metric(text, "vllm:num_requests_running") + metric(text, "vllm:num_requests_waiting") == 0:
            return
        time.sleep(0.2)
    raise AssertionError("requests whose clients have left are still there")


def test_it_prints_the_metrics_of_the_sample(small_vllm: VllmServer, chat: Chat) -> None:
    settled(small_vllm)
    assert chat(small_vllm, 2).read(60).ending == "length"
    assert metric_names(SAMPLE.read_text()) <= metric_names(get(small_vllm.url, "/metrics").text)


def test_a_stream_begins_with_a_role_and_ends_with_usage(small_vllm: VllmServer, chat: Chat) -> None:
    settled(small_vllm)
    stream = chat(small_vllm, 5).read(60)
    first, *middle, last = stream.chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("usage" not in chunk for chunk in [first, *middle])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert stream.events[-1] == "[DONE]"


def test_a_full_queue_is_a_503_and_a_waiting_request_has_its_headers_already(
    small_vllm: VllmServer, chat: Chat
) -> None:
    settled(small_vllm)
    chat(small_vllm, LONG).read(60, until_events=2)
    waiting = [chat(small_vllm, LONG).read(1), chat(small_vllm, LONG).read(1)]
    refused = chat(small_vllm, 5).read(30)
    text = get(small_vllm.url, "/metrics").text
    assert [stream.status for stream in waiting] == [200, 200]
    assert [stream.events for stream in waiting] == [[], []]
    assert refused.status == 503
    assert json.loads(refused.body)["error"]["code"] == 503
    assert metric(text, "vllm:num_requests_running") == 1
    assert metric(text, "vllm:num_requests_waiting") == 2
    assert metric(text, "vllm:admission_rejections_total") >= 1


def test_clients_that_leave_take_their_requests_along(small_vllm: VllmServer, chat: Chat) -> None:
    settled(small_vllm)
    for stream in [chat(small_vllm, LONG).read(1) for _ in range(3)]:
        stream.leave()
    settled(small_vllm)


def test_a_prompt_that_does_not_fit_is_a_400(small_vllm: VllmServer, front: Front) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "fleet " * 3000}], "stream": True}
    answer = post(front(small_vllm.url), "/v1/chat/completions", body)
    assert answer.status == 400
    error = json.loads(answer.text)["error"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", "input_tokens", 400)


def test_a_frozen_engine_accepts_and_says_nothing(small_vllm: VllmServer, chat: Chat) -> None:
    """SIGSTOP, as of a debugger, a hung driver or a paused machine: no error, no end, no timeout but one's own."""
    settled(small_vllm)
    busy = chat(small_vllm, LONG).read(60, until_events=2)
    small_vllm.send_all(signal.SIGSTOP)
    try:
        busy.read(1)
        seen = len(busy.events)
        assert len(busy.read(2).events) == seen
        assert busy.ending == "open"
        assert not refuses(small_vllm.url)
        with pytest.raises(TimeoutError):
            get(small_vllm.url, "/health", timeout_s=2)
    finally:
        small_vllm.send_all(signal.SIGCONT)
    assert len(busy.read(30, until_events=seen + 1).events) > seen


def test_sigterm_ends_running_streams_early_in_one_of_three_ways(start_vllm: Start, chat: Chat) -> None:
    """A race inside vLLM: the stream says `abort` with its usage, or brings an error event, or stays open for good.

    Under HTTP 200 in all cases, and never with the tokens that were asked for.
    """
    with start_vllm("--max-num-seqs", "2") as server:
        streams = [chat(server, LONG).read(60, until_events=2) for _ in range(2)]
        server.send(signal.SIGTERM)
        for stream in streams:
            stream.read(8)
        assert {stream.ending for stream in streams} <= {"abort", "error", "open", "cut"}
        assert all(stream.status == 200 for stream in streams)
        for stream in streams:
            assert (stream.ending == "abort") == (stream.usage is not None)
            assert stream.usage is None or stream.usage["completion_tokens"] < LONG
        assert refuses(server.url)


def test_sigterm_with_requests_that_outlast_the_drain_hangs(start_vllm: Start, chat: Chat) -> None:
    """The port refuses, the process stays, and every client, running or waiting, gets nothing and no end."""
    with start_vllm("--max-num-seqs", "1", "--shutdown-timeout", "2") as server:
        busy = chat(server, LONG).read(60, until_events=2)
        waiting = chat(server, LONG).read(1)
        server.send(signal.SIGTERM)
        deadline = time.monotonic() + 30
        while not refuses(server.url) and time.monotonic() < deadline:
            busy.read(0.2)
        assert refuses(server.url)
        busy.read(2)
        seen = len(busy.events)
        assert [stream.read(6).ending for stream in (busy, waiting)] == ["open", "open"]
        assert len(busy.events) == seen
        assert waiting.events == []
        assert server.running()


def test_an_engine_told_to_end_passes_for_one_that_finished(start_vllm: Start, chat: Chat) -> None:
    """A running stream says `abort`. A waiting one is a success to all appearances, but has no words and no reason."""
    with start_vllm("--max-num-seqs", "1") as server:
        busy = chat(server, LONG).read(60, until_events=2)
        waiting = chat(server, LONG).read(1)
        server.send_core(signal.SIGTERM)
        assert [stream.read(20).ending for stream in (busy, waiting)] == ["abort", "nothing said"]
        assert [stream.events[-1] for stream in (busy, waiting)] == ["[DONE]", "[DONE]"]
        assert busy.usage is not None
        assert waiting.usage is not None
        assert busy.usage["completion_tokens"] > 0
        assert waiting.usage["completion_tokens"] == 0


def test_kill_9_cuts_streams_without_an_end(start_vllm: Start, chat: Chat) -> None:
    with start_vllm("--max-num-seqs", "1") as server:
        busy = chat(server, LONG).read(60, until_events=2)
        waiting = chat(server, LONG).read(1)
        server.send_all(signal.SIGKILL)
        assert [stream.read(10).ending for stream in (busy, waiting)] == ["cut", "cut"]
        assert busy.usage is None
        assert busy.events[-1] != "[DONE]"


def test_a_dead_engine_behind_a_living_server_is_an_error_event_under_200(start_vllm: Start, chat: Chat) -> None:
    with start_vllm("--max-num-seqs", "1") as server:
        busy = chat(server, LONG).read(60, until_events=2)
        server.send_core(signal.SIGKILL)
        assert busy.read(20).ending == "error"
        assert busy.status == 200
        assert busy.usage is None
        assert busy.events[-1] == "[DONE]"
        assert busy.chunks[-1]["error"]["code"] == 500

"""The samples of /metrics that other tests read: what they are, and that they hold what a gateway looks for."""

from pathlib import Path

import pytest
from tests.engines.streams import Stream, metric, metric_names, unchunked

DATA = Path(__file__).parent / "data"
LOOKED_FOR: dict[str, dict[str, float]] = {
    "vllm_metrics.txt": {
        "vllm:num_requests_running": 1,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.0009770395701026446,
        "vllm:cache_config_info": 1,
        "vllm:prefix_cache_queries_total": 7,
        "vllm:prefix_cache_hits_total": 0,
        "vllm:num_preemptions_total": 0,
        "vllm:prompt_tokens_total": 7,
        "vllm:generation_tokens_total": 190,
        "vllm:admission_rejections_total": 2,
        "vllm:request_success_total": 0,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 189,
        "vllm:request_time_per_output_token_seconds_count": 0,
        "vllm:e2e_request_latency_seconds_count": 0,
        "vllm:request_queue_time_seconds_count": 0,
    },
    "llamacpp_metrics.txt": {
        "llamacpp:requests_processing": 4,
        "llamacpp:requests_deferred": 2,
        "llamacpp:prompt_tokens_total": 144,
        "llamacpp:tokens_predicted_total": 0,
    },
}


@pytest.mark.parametrize("name", LOOKED_FOR)
def test_a_sample_says_what_it_is_and_holds_what_is_looked_for(name: str) -> None:
    text = (DATA / name).read_text()
    assert text.startswith("# ")
    assert "GET /metrics on 20" in text.splitlines()[0]
    assert set(LOOKED_FOR[name]) <= metric_names(text)
    for metric_name, value in LOOKED_FOR[name].items():
        assert metric(text, metric_name) == value


class Recorded(Stream):
    """A stream from bytes, so that each ending is seen without an engine."""

    def __init__(self, body: bytes, closed: bool = False):
        self.received = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body
        self.closed = closed


def chunk(text: str) -> bytes:
    return f"{len(text):x}\r\n{text}\r\n".encode()


WORD = chunk('data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n')
LAST = chunk('data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n')
FAULT = chunk('data: {"error":{"code":500}}\n\n')
END = chunk("data: [DONE]\n\n") + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("body", "closed", "ending"),
    [
        (WORD + LAST + END, False, "length"),
        (WORD + FAULT + END, False, "error"),
        (WORD + END, False, "nothing said"),
        (WORD, False, "open"),
        (WORD, True, "cut"),
        (WORD + LAST, True, "cut"),
        (WORD + b"5\r\nda", True, "cut"),
    ],
)
def test_endings_are_told_apart(body: bytes, closed: bool, ending: str) -> None:
    assert Recorded(body, closed).ending == ending


def test_a_body_in_pieces_is_put_together() -> None:
    assert unchunked(chunk("data: [DO") + chunk("NE]\n\n")) == (b"data: [DONE]\n\n", False)
    assert Recorded(chunk("data: [DO") + chunk("NE]\n\n")).events == ["[DONE]"]

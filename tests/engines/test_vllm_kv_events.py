"""KV events of a real vLLM, followed by `crosstie serve`: what it counts on as cached, and what vLLM reports."""

import contextlib
import json
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engines.conftest import Start
from tests.engines.streams import post
from tests.engines.vllm_server import MODEL, VllmServer, free_port
from tests.run.service.processes import Running, comes_true, serving

pytestmark = pytest.mark.vllm_cpu
REQUESTS = 100
# Of 32 tokens, the least that vLLM takes on a CPU: what the requests have in common does not fit, so that some of it is
# always dropped.
BLOCKS, BLOCK_TOKENS = 80, 32
FLEET = f"""
format = 1
policy = "prefix"
[serve]
health_every_s = 0.5
slow_start_s = 0
lame_duck_s = 0
[[pool]]
name = "vllm"
model = "{MODEL}"
max_context = 2048
tokenizer = "TOKENIZER"
kv_events = "tcp://{{host}}:EVENTS"
kv_replay = "tcp://{{host}}:REPLAY"
backends = ["VLLM"]
"""
SUBJECTS = ("routing", "memory", "power", "prices", "faults", "limits")
SYSTEMS = [f"You know about {one} of fleets, and answer briefly. " * (12 + 2 * n) for n, one in enumerate(SUBJECTS)]


@contextlib.contextmanager
def telling(start_vllm: Start) -> Iterator[tuple[VllmServer, int, int]]:
    events, replay = free_port(), free_port()
    said = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    flags = (
        "--enable-prompt-tokens-details",
        "--num-gpu-blocks-override",
        str(BLOCKS),
        "--block-size",
        str(BLOCK_TOKENS),
    )
    with start_vllm("--kv-events-config", json.dumps(said), *flags) as server:
        yield server, events, replay


def predicted(running: Running, body: dict[str, object]) -> tuple[float, float]:
    """Tokens in, and those that are counted on as cached."""
    said = json.loads(post(running.url.removesuffix("/v1"), "/crosstie/explain", body).text)
    return said["request"]["input_tokens"], said["considered"][0]["predicted"]["cached_tokens"]


def compared(running: Running, chance: random.Random, requests: int) -> tuple[float, int]:
    """Tokens by which predictions were off, and those that were reported as cached."""
    off, reported = 0.0, 0
    for _ in range(requests):
        user = " ".join(chance.choices(SUBJECTS, k=chance.randint(3, 40)))
        messages = [{"role": "user", "content": chance.choice(SYSTEMS)}, {"role": "user", "content": user}]
        body: dict[str, object] = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}
        tokens, counted_on = predicted(running, body)
        answer = json.loads(post(running.url, "/v1/chat/completions", body).text)
        usage = answer["usage"]
        assert usage["prompt_tokens"] == tokens
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        off, reported = off + abs(counted_on - cached), reported + cached
    return off, reported


def test_predicted_and_reported_cached_tokens_agree(
    start_vllm: Start, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    chance = random.Random(5)
    with telling(start_vllm) as (server, events, replay):
        # Beside the weights, as vLLM itself reads it.
        words = Path(f"/proc/{server.pid}/cwd").resolve() / "tokenizer.json"
        file = tmp_path / "fleet.toml"
        text = FLEET.replace("TOKENIZER", str(words)).replace("VLLM", server.url)
        file.write_text(text.replace("EVENTS", str(events)).replace("REPLAY", str(replay)))
        # What was asked before there was a gateway is replayed to it.
        first = {"model": MODEL, "messages": [{"role": "user", "content": SYSTEMS[0]}], "max_tokens": 4}
        post(server.url, "/v1/chat/completions", first)
        with serving(tmp_path, file) as running:
            comes_true(lambda: predicted(running, first)[1] > 0)
            off, reported = compared(running, chance, REQUESTS)
            record_property("cached tokens reported", reported)
            record_property("off by", off / reported)
            print(f"reported {reported}, off by {off / reported:.2%}")
            assert off <= 0.05 * reported
            assert "Traceback" not in running.errors
            running.send(signal.SIGTERM)

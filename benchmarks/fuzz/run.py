"""Fuzzes a real `crosstie serve` from both sides for as long as it is told: hostile clients, misbehaving engines.

    python benchmarks/fuzz/run.py [--minutes M] [--seed N] [--clients N] [--faults FRACTION] [--json FILE]

Every request carries a mark that its engine repeats. Exit status 1 if a client ever saw another's mark, an engine saw
a request that nobody sent, the gateway died, hung, wrote a traceback, or kept sockets, requests or memory. README.md
says what is checked and how to read the figures.
"""

import argparse
import asyncio
import contextlib
import errno
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httptools
from clients import Planned, planned
from upstream import Upstream, marks

ROOT = Path(__file__).parents[2]
MODEL = "fuzzed"
# No answer takes longer: the gateway's own patience is a few seconds (FLEET).
HANG_S = 40.0
# Memory that a warm process may still take: caches that fill, an allocator that keeps.
MOST_GROWTH_MIB = 16.0
FLEET = """format = 1
[serve]
connect_timeout_s = 1
first_byte_timeout_s = 2
idle_timeout_s = 2
total_timeout_s = 10
queue_s = 2
slow_start_s = 0
health_every_s = 0.5
drain_s = 15
max_body_mib = 1
"""
POOL = '[[pool]]\nname = "{name}"\nmodel = "{model}"\nmax_in_flight = 64\nbackends = ["http://127.0.0.1:{port}/v1"]\n'


@dataclass
class Found:
    violations: list[str] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    hangs: int = 0
    cut: int = 0

    def violation(self, what: str, data: bytes = b"") -> None:
        self.violations.append(f"{what}{f': {data[:1500]!r}' if data else ''}")
        sys.stderr.write(f"VIOLATION {self.violations[-1]}\n")


class Answers:
    """Answers on one connection, as another parser reads them."""

    def __init__(self) -> None:
        self.whole: list[tuple[int, bytes]] = []
        self._body = b""
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.whole.append((status, self._body))
        self._body = b""


async def converse(port: int, plan: Planned, generator: random.Random, found: Found) -> None:
    """One connection: sent in pieces, left at any moment, read slowly or not at all; then everything is looked at."""
    found.sent[plan.kind] += 1
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    leaves = plan.kind != "page" and generator.random() < 0.15
    half = not leaves and generator.random() < 0.15
    got, answers = b"", Answers()
    try:
        async with asyncio.timeout(HANG_S):
            cuts = sorted({generator.randrange(1, len(plan.data)) for _ in range(generator.choice([0, 0, 1, 4]))})
            for a, b in zip([0, *cuts], [*cuts, len(plan.data)], strict=True):
                writer.write(plan.data[a:b])
                await asyncio.sleep(generator.choice([0, 0, 0.001, 0.01]))
                if leaves and generator.random() < 0.3:
                    break
            if leaves:
                await asyncio.sleep(generator.choice([0, 0.005, 0.05]))
                # Half a request has no answer to wait for.
                with contextlib.suppress(TimeoutError):
                    got += await asyncio.wait_for(reader.read(200), 0.1) if generator.random() < 0.5 else b""
                return
            if half or plan.answers is None:
                writer.write_eof()
            if generator.random() < 0.05:
                await asyncio.sleep(generator.uniform(0, 1))
            while plan.answers is None or len(answers.whole) < plan.answers:
                piece = await reader.read(generator.choice([1000, 65536]))
                if not piece:
                    break
                got += piece
                if plan.kind == "page" and plan.data.startswith(b"HEAD"):
                    if got.endswith(b"\r\n\r\n"):
                        return
                elif plan.answers is not None:
                    answers.feed(piece)
    except TimeoutError:
        found.hangs += 1
        found.violation(f"no end within {HANG_S:g} s ({plan.kind}, sent, then got)", plan.data[:700] + b" ---> " + got)
    except httptools.HttpParserError as error:
        found.violation(f"an answer that is no HTTP ({error})", got)
    except OSError as error:
        # Of a connection that the other side has just reset, a socket may also say that it is not connected.
        if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
            raise
        found.cut += 1
    finally:
        writer.transport.abort()
        foreign = marks(got) - plan.own
        if foreign:
            found.violation(f"saw {foreign} besides its own {plan.own} ({plan.kind})", got)
        if not leaves:
            judge(plan, got, answers, half, found)


def judge(plan: Planned, got: bytes, answers: Answers, half: bool, found: Found) -> None:
    for line in got.split(b"HTTP/1.1 ")[1:]:
        if line[:3].isdigit() and line[:3] != b"100":
            found.statuses[int(line[:3])] += 1
    if plan.answers is None or plan.data.startswith(b"HEAD"):
        return
    if len(answers.whole) != plan.answers:
        found.violation(
            f"{len(answers.whole)} answers to {plan.answers} requests ({plan.kind}, half-closed: {half})", got
        )
    for status, body in answers.whole if plan.own else []:
        if status == 200 and not marks(body) and b'"error"' not in body:
            found.violation("an answer without its mark", body)
        if status not in (200, 429, 500, 502, 503, 504):
            found.violation(f"a good request was answered {status}", body)


async def client(port: int, owner: int, seed: str, until: float, found: Found) -> None:
    generator, number = random.Random(seed), 0
    while time.monotonic() < until and len(found.violations) < 20:
        number += 1
        try:
            await converse(port, planned(generator, MODEL, owner, number), generator, found)
        except OSError as error:
            found.violation(f"cannot connect: {error}")
            return


def memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024


def by_tenth(track: list[int]) -> list[float]:
    """The median of each tenth of the run, in MiB: a body that is being read is no growth."""
    ends = [round(len(track) * i / 10) for i in range(11)]
    parts = [track[a:b] for a, b in pairwise(ends) if b > a]
    return [round(statistics.median(part) / 2**20, 1) for part in parts]


def sockets(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def page(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    said = await reader.read(-1)
    writer.close()
    return said.decode()


def gauge(text: str, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name)


async def fuzz(options: argparse.Namespace, folder: Path, found: Found) -> dict[str, object]:
    upstreams = [Upstream(f"{options.seed}-upstream-{i}", options.faults) for i in range(3)]
    for one in upstreams:
        await one.start()
    file = folder / "fleet.toml"
    file.write_text(
        FLEET + "".join(POOL.format(name=f"pool-{i}", model=MODEL, port=one.port) for i, one in enumerate(upstreams))
    )
    complaints = folder / "stderr"
    with complaints.open("wb") as lines:
        process = subprocess.Popen(
            [*options.crosstie, "serve", str(file), "--port", "0", "--json"], stdout=subprocess.PIPE, stderr=lines,
            env={**os.environ, "CROSSTIE_CATALOG": str(folder / "catalog")},
        )  # fmt: skip
    try:
        port = await asyncio.to_thread(announced, process)
        begun, until = time.monotonic(), time.monotonic() + options.minutes * 60
        first_sockets, track = sockets(process.pid), [memory(process.pid)]
        tasks = [
            asyncio.create_task(client(port, i, f"{options.seed}-{i}", until, found)) for i in range(options.clients)
        ]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(min(5.0, max(until - time.monotonic(), 0.5)))
            if process.poll() is not None:
                found.violation(f"the gateway ended by itself, status {process.returncode}")
                break
            track.append(memory(process.pid))
            if sys.stderr.isatty():
                done = (
                    f"{time.monotonic() - begun:.0f} s, {found.sent.total()} connections, {track[-1] / 2**20:.0f} MiB"
                )
                sys.stderr.write(f"\r{done}, {len(found.violations)} violations\x1b[K")
        await asyncio.gather(*tasks)
        left = await settled(process.pid, port, first_sockets) if process.poll() is None else {}
        if any(left.values()):
            found.violation(f"left behind: {left}")
        tenths = by_tenth(track)
        growth_mib = tenths[-1] - tenths[min(2, len(tenths) - 1)]
        if growth_mib > MOST_GROWTH_MIB:
            found.violation(f"memory grew by {growth_mib:.0f} MiB from the third to the last tenth")
        process.terminate()
        status = await asyncio.to_thread(process.wait, 60)
    finally:
        process.kill()
        process.wait()
        for one in upstreams:
            one.stop()
    if status != 0:
        found.violation(f"it ended with status {status}")
    said = complaints.read_text()
    if "Traceback" in said or "Exception" in said:
        found.violation("it complained", said.encode())
    if marks(said.encode()):
        found.violation("prompts in its log", said.encode())
    for one in upstreams:
        for what in one.smuggled:
            found.violation("an engine was asked what nobody asked", what)
        for what in one.malformed:
            found.violation("an engine was sent what is no request", what)
    asked = sum((one.asked for one in upstreams), Counter[str]())
    return {
        "seed": options.seed, "seconds": round(time.monotonic() - begun), "connections": dict(found.sent),
        "answers_by_status": dict(sorted(found.statuses.items())), "connections_cut": found.cut, "hangs": found.hangs,
        "asked_of_engines": asked.total(), "engine_faults": asked.total() - asked["calm"],
        "memory_mib_by_tenth": tenths, "memory_mib_at_most": round(max(track) / 2**20),
        "left_behind": left, "violations": found.violations,
    }  # fmt: skip


def announced(process: "subprocess.Popen[bytes]") -> int:
    said = b""
    while process.stdout is not None and (piece := os.read(process.stdout.fileno(), 65536)):
        said += piece
        with contextlib.suppress(json.JSONDecodeError):
            return int(str(json.loads(said)["url"]).rpartition(":")[2].removesuffix("/v1"))
    raise SystemExit("the gateway did not start")


async def settled(pid: int, port: int, first_sockets: int) -> dict[str, float]:
    """What is left once every client has gone: patience of the gateway, then all of it should be zero."""
    deadline = time.monotonic() + 60
    while True:
        text = await page(port)
        left = {name: gauge(text, f"crosstie_{name}") for name in ("exchanges", "in_flight", "queued")}
        # Connections to engines stay for a few seconds, and the page itself takes one.
        left["sockets"] = float(max(sockets(pid) - first_sockets - 8, 0))
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--faults", type=float, default=0.2, help="how often an engine misbehaves")
    parser.add_argument("--crosstie", default=f"{sys.executable} -P -m crosstie", type=str.split)
    parser.add_argument("--json", type=Path, help="writes the figures there too")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found = Found()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(fuzz(options, Path(folder), found))
    text = json.dumps(figures, indent=2)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)
    raise SystemExit(1 if found.violations else 0)


if __name__ == "__main__":
    main()

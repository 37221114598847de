"""Fuzzes a real `crosstie serve` from both sides for as long as it is told: hostile clients, misbehaving engines.

    python benchmarks/fuzz/run.py [--minutes M] [--seed N] [--clients N] [--faults FRACTION] [--json FILE]

Every request carries a mark that its engine repeats. Exit status 1 if a client ever saw another's mark, an engine saw
a request that nobody sent, the gateway died, hung, wrote a traceback, or kept sockets, requests or memory. README.md
says what is checked and how to read the figures.
"""

import argparse
import asyncio
import base64
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
import jwt
from clients import Planned, planned
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, derive_private_key
from jwt.algorithms import ECAlgorithm
from upstream import Upstream, mark, marks

from crosstie_gateway.ledger.keys import Key, digest, new_public_id, new_secret, shown
from crosstie_gateway.ledger.places import open_store

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
[state]
keys = "required"
store = "keys.db"
[jwt]
issuer = "https://issuer.example"
audience = "crosstie"
jwks = "jwks.json"
"""
ISSUER = {"iss": "https://issuer.example", "aud": "crosstie", "sub": "somebody", "iat": 1, "exp": 2**33}
# Of a batch: between two looks at it, and how long it may take.
_LOOK_S, _BATCH_S = 0.5, 120.0
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
    for status, body in answers.whole if plan.kind == "forged" else []:
        if status != 401:
            found.violation(f"a forged credential was answered {status}", plan.data[:700] + b" ---> " + body)
    for status, body in answers.whole if plan.own else []:
        if status == 200 and not marks(body) and b'"error"' not in body:
            found.violation("an answer without its mark", body)
        if status not in (200, 429, 500, 502, 503, 504):
            found.violation(f"a good request was answered {status}", body)


class Door:
    """The gateway's port, what lets clients in there, and what does not."""

    def __init__(self, folder: Path):
        self.port = 0
        public, secret = new_public_id(), new_secret()
        store = open_store(str(folder / "keys.db"), create=True)
        key = Key(name="fuzz", public_id=public, digest=digest(secret), explains=True, created_at=time.time())
        store.add_key(key)
        store.close()
        self.key = shown(public, secret).encode()
        signer, other = (derive_private_key(number, SECP256R1()) for number in (7, 8))
        known = ECAlgorithm.to_jwk(signer.public_key(), as_dict=True) | {"kid": "a", "use": "sig", "alg": "ES256"}
        (folder / "jwks.json").write_text(json.dumps({"keys": [known]}))

        def token(by: EllipticCurvePrivateKey | str, kind: str = "ES256", name: str = "a", **claims: object) -> bytes:
            return jwt.encode(ISSUER | claims, by, kind, {"kid": name}).encode()

        good = token(signer)
        head, claims, signature = good.split(b".")
        more = base64.urlsafe_b64encode(json.dumps(ISSUER | {"sub": "another"}).encode()).rstrip(b"=")
        self.let_in = [self.key, self.key, good, token(signer, sub="another")]
        self.forged = [
            token(other), token(other, name="b"), token("", "none"), token(known["x"] * 2, "HS256"),
            token(signer, exp=2), token(signer, aud="other"), token(signer, iss="other"), token(signer, nbf=2**33),
            b".".join((head, more, signature)), b".".join((head, claims, b"")), good[:-9], good + b".",
            self.key[:-1] + b"_", self.key[:-4], b"ct-", b"x" * 8000,
        ]  # fmt: skip

    async def ask(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> tuple[int, bytes]:
        """One request of the key, on a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: {kind}\r\n"
        head += f"authorization: Bearer {self.key.decode()}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        said, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
        writer.close()
        return int(said[9:12] or 0), rest


async def batches(door: Door, owner: int, seed: str, until: float, found: Found) -> None:
    """One after the other: uploaded, run and read, and some are cancelled, or their file is deleted."""
    generator, number = random.Random(seed), 0
    while time.monotonic() < until and len(found.violations) < 20:
        number += 1
        own = {mark("o", owner, number * 10_000 + at) for at in range(generator.randint(1, 5))}
        try:
            async with asyncio.timeout(_BATCH_S):
                await _batch(door, sorted(own), generator, found)
        except TimeoutError:
            found.hangs += 1
            found.violation(f"a batch has not ended within {_BATCH_S:g} s")
        except OSError as error:
            found.violation(f"cannot connect for a batch: {error}")
            return


async def _batch(door: Door, own: list[bytes], generator: random.Random, found: Found) -> None:
    found.sent["batch"] += 1
    line = {"method": "POST", "url": "/v1/chat/completions"}
    asked = [{"model": MODEL, "messages": [{"role": "user", "content": one.decode()}]} for one in own]
    lines = "".join(json.dumps({"custom_id": str(at), **line, "body": one}) + "\n" for at, one in enumerate(asked))
    part = '--x\r\ncontent-disposition: form-data; name="'
    form = f'{part}purpose"\r\n\r\nbatch\r\n{part}file"; filename="a"\r\n\r\n{lines}\r\n--x--\r\n'
    status, said = await door.ask("POST", "/v1/files", form.encode(), "multipart/form-data; boundary=x")
    if status != 200:
        found.violation(f"a file was answered {status}", said)
        return
    file = json.loads(said)["id"]
    wish = {"input_file_id": file, "endpoint": line["url"], "completion_window": "24h"}
    status, said = await door.ask("POST", "/v1/batches", json.dumps(wish).encode())
    if status != 200:
        found.violation(f"a batch was answered {status}", said)
        return
    name, toss = json.loads(said)["id"], generator.random()
    if toss < 0.3:
        await asyncio.sleep(generator.choice([0, 0.1, 1]))
        spoils = ("POST", f"/v1/batches/{name}/cancel") if toss < 0.15 else ("DELETE", f"/v1/files/{file}")
        await door.ask(*spoils)
    while True:
        status, said = await door.ask("GET", f"/v1/batches/{name}")
        batch = json.loads(said)
        if batch.get("status") in ("completed", "failed", "cancelled", "expired"):
            break
        await asyncio.sleep(_LOOK_S)
    read = b""
    for kind in ("output_file_id", "error_file_id"):
        if batch.get(kind):
            status, said = await door.ask("GET", f"/v1/files/{batch[kind]}/content")
            read += said
            await door.ask("DELETE", f"/v1/files/{batch[kind]}")
    await door.ask("DELETE", f"/v1/files/{file}")
    judge_batch(own, batch["status"], read, found)


def judge_batch(own: list[bytes], status: str, read: bytes, found: Found) -> None:
    """`read`: its lines, of answers and of errors."""
    if foreign := marks(read) - set(own):
        found.violation(f"a batch saw {foreign} besides its own", read)
    ends = sorted(json.loads(one)["custom_id"] for one in read.splitlines())
    if status == "completed" and ends != [str(at) for at in range(len(own))]:
        found.violation(f"a batch of {len(own)} lines ended with {ends}", read)
    if status == "failed":
        found.violation("a batch failed", read)


async def client(door: Door, owner: int, seed: str, until: float, found: Found) -> None:
    generator, number = random.Random(seed), 0
    while time.monotonic() < until and len(found.violations) < 20:
        number += 1
        try:
            plan = planned(generator, MODEL, owner, number, door.let_in, door.forged)
            await converse(door.port, plan, generator, found)
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
    complaints, door = folder / "stderr", Door(folder)
    with complaints.open("wb") as lines:
        process = subprocess.Popen(
            [*options.crosstie, "serve", str(file), "--port", "0", "--json", "--batches", str(folder / "batches")],
            stdout=subprocess.PIPE, stderr=lines,
            env={**os.environ, "CROSSTIE_CATALOG": str(folder / "catalog")},
        )  # fmt: skip
    try:
        door.port = await asyncio.to_thread(announced, process)
        begun, until = time.monotonic(), time.monotonic() + options.minutes * 60
        first_sockets, track = sockets(process.pid), [memory(process.pid)]
        tasks = [
            asyncio.create_task(asks(door, i, f"{options.seed}-{i}", until, found))
            for i, asks in enumerate([batches, *[client] * options.clients])
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
        left = await settled(process.pid, door, first_sockets) if process.poll() is None else {}
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


async def settled(pid: int, door: Door, first_sockets: int) -> dict[str, float]:
    """What is left once every client has gone: patience of the gateway, then all of it should be zero."""
    deadline = time.monotonic() + 60
    while True:
        text = (await door.ask("GET", "/metrics"))[1].decode()
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

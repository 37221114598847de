"""Small requests beside hostile clients: how late one key's are while others send what is dear to read or to hold.

    python benchmarks/gateway/beside.py [--seconds 6] [--shape NAME ...] [--senders 2] [--crosstie COMMAND] [--json]

One gateway with keys, tokens, batches and kept responses over one fake backend, one connection that asks a small thing
every 5 ms, and beside it, shape by shape, senders who send nothing but that shape: each body after the other, or on
many connections at once. `nothing` is the same without senders, before
and after all the others: what is above it is what the attack does. Times are from the request's first byte to the end
of the answer's head, in milliseconds; CPU is what each body costs the gateway, and a turn the most CPU that its loop
took before it looked at its sockets again (turns.c, by the C compiler `cc`): neighbours change these least. Senders are
`nice`, since real ones have machines of their own; the state of this one is printed beside. Exit status 1 where a
small request was not answered 200.
"""

import argparse
import asyncio
import base64
import json
import os
import shlex
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Event, Process, Queue
from multiprocessing.synchronize import Event as Signal
from pathlib import Path
from typing import Any

from fake_backend import MODEL
from load import HOST
from peers import backends, cpu_seconds, fleet, free_port

from crosstie_gateway.ledger.keys import Key, digest, new_public_id, new_secret, shown
from crosstie_gateway.ledger.places import open_store

MIB = 2**20
HEAD = b'{"model":"%b",' % MODEL.encode()
PIECE = 2**18
# Announced and never sent in full, by so many at once; the others send whole bodies.
HELD = {"held back, no key": (16, 64 * MIB, False), "held back, with a key": (16, 30 * MIB, True)}


CHAT, MESSAGES, FORM = "/v1/chat/completions", "/v1/messages", "/v1/audio/transcriptions"
FILES, RESPONSES = "/v1/files", "/v1/responses"
ISSUER = "https://issuer.example"
# Between two sendings of a crowd's connection; and how many connections it has.
_PAUSE_S, _CROWD = 0.02, 200
# A point of P-256: its generator, whose private key is 1.
_X, _Y = "axfR8uEsQkf4vOblY6RA8ncDfYEt6zOg9KE5RdiYwpY", "T-NC4v4af5uO5-tKfA-eFivOM1drMV7Oy7ZAaDe_UfU"


def chat(text: bytes) -> bytes:
    return HEAD + b'"max_tokens":5,"messages":[{"role":"user","content":"' + text + b'"}]}'


def form(file: bytes, name: str = "model", value: str = MODEL) -> bytes:
    part = b'--b\r\ncontent-disposition: form-data; name="'
    first = b'%b%b"\r\n\r\n%b\r\n' % (part, name.encode(), value.encode())
    return b'%b%bfile"; filename="a"\r\n\r\n%b\r\n--b--\r\n' % (first, part, file)


def bodies() -> dict[str, bytes]:
    return {
        "objects": HEAD + b'"messages":[' + b"{}," * (7 * MIB) + b"{}]}",
        "top-level keys": HEAD + b'"a":1,' * (4 * MIB) + b'"b":1}',
        "token ids": HEAD + b'"prompt":[' + b"1," * (12 * MIB) + b"1]}",
        "one text": chat(b"x" * (30 * MIB)),
        "escaped text": chat(b'\\"' * (15 * MIB)),
        "names of pictures": chat(b"_url" * (7 * MIB)),
        "90,000 texts": HEAD + b'"prompt":[' + b'"%b",' % (b"x" * 330) * 90_000 + b'""]}',
        "Anthropic's messages": chat(b"x" * (30 * MIB)),
        "a recording": form(b"x" * (30 * MIB)),
        "deep nesting": HEAD + b'"messages":' + b"[" * (8 * MIB) + b"]" * (8 * MIB) + b"}",
        "a form of fields' names": form(b'name="model"\r\n' * (2 * MIB)),
        "a form of boundaries": form(b"\r\n--" * (7 * MIB)),
        "a batch of one line's keys": form(b'{"custom_id":"a"' + b',"a":1' * (4 * MIB) + b"}", "purpose", "batch"),
        "a response to keep": HEAD + b'"input":"' + b"x" * (30 * MIB) + b'"}',
        "80,000 objects": HEAD + b'"messages":[' + b"{}," * 80_000 + b"{}]}",
    }


PATHS = {
    "Anthropic's messages": MESSAGES, "a recording": FORM, "a form of fields' names": FORM,
    "a form of boundaries": FORM, "a batch of one line's keys": FILES, "a response to keep": RESPONSES,
}  # fmt: skip


def forged(key_id: str) -> bytes:
    """A token of the issuer's whose signature is anybody's."""
    claims = {"iss": ISSUER, "aud": "crosstie", "sub": "x", "exp": 2**33, "iat": 1}
    said = [json.dumps(part).encode() for part in ({"alg": "ES256", "kid": key_id, "typ": "JWT"}, claims)]
    parts = [base64.urlsafe_b64encode(part).rstrip(b"=") for part in (*said, os.urandom(64))]
    return b".".join(parts)


class Crowd:
    """So many connections that send the same again and again: at first, and then at each turn."""

    def __init__(self, connections: int, first: bytes, then: bytes, pause_s: float = _PAUSE_S, *, reads: bool = True):
        self.connections, self.first, self.then = connections, first, then
        self.pause_s, self.reads = pause_s, reads


def crowds(key: str) -> dict[str, Crowd]:
    asked = HEAD + b'"stream":true,"max_tokens":2000,"messages":[{"role":"user","content":"hi"}]}'
    chunked = head(0, key).replace(b"content-length: 0", b"transfer-encoding: chunked")
    h2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x01\x01\x05\x00\x00\x00\x01\x82" * 128
    empty = HEAD + b'"messages":[]}'
    token = head(len(empty), forged("first").decode()) + empty
    return {
        "slow heads": Crowd(_CROWD, b"GET /v1/models HTTP/1.1\r\nhost: a\r\n", b"x: y\r\n", 0.2),
        "slow bodies": Crowd(_CROWD, head(MIB, key) + HEAD, b" "),
        "bytes as chunks": Crowd(8, chunked, b"1\r\n \r\n" * 4096),
        "pipelined": Crowd(8, b"", b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" * 200),
        "HTTP/2's preface": Crowd(_CROWD, h2, b"", 0.1),
        "forged tokens": Crowd(32, b"", token),
        "wrong keys": Crowd(32, b"", head(len(empty), "ct-" + "a" * 12 + "-" + "a" * 43) + empty),
        "unread streams": Crowd(64, head(len(asked), key) + asked, b"", reads=False),
    }


async def _one_of(crowd: Crowd, port: int, stop: Signal, answers: Counter[str]) -> None:
    while not stop.is_set():
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(HOST, port, limit=2**16)
            writer.write(crowd.first)
            while not stop.is_set() and not reader.at_eof():
                writer.write(crowd.then)
                await writer.drain()
                await asyncio.sleep(crowd.pause_s)
                if crowd.reads:
                    with suppress(TimeoutError):
                        said = await asyncio.wait_for(reader.read(2**16), 0.001)
                        answers[said[9:12].decode("latin-1") or "closed"] += 1
            writer.transport.abort()
        await asyncio.sleep(crowd.pause_s)


def gather(crowd: Crowd, port: int, stop: Signal, told: "Queue[Any]") -> None:
    os.nice(19)
    answers: Counter[str] = Counter()

    async def all_of_them() -> None:
        await asyncio.gather(*(_one_of(crowd, port, stop, answers) for _ in range(crowd.connections)))

    asyncio.run(all_of_them())
    known = Counter({said: count for said, count in answers.items() if said.isdigit() or said == "closed"})
    told.put(known + Counter({"more": sum(answers.values()) - sum(known.values())}))


def head(length: int, key: str | None, path: str = CHAT) -> bytes:
    own = b"authorization: Bearer %b\r\n" % key.encode() if key else b""
    if path in (FORM, FILES):
        own += b"content-type: multipart/form-data; boundary=b\r\n"
    return b"POST %b HTTP/1.1\r\nhost: gateway\r\n%bcontent-length: %d\r\n\r\n" % (path.encode(), own, length)


def small(port: int, key: str, stop: Signal, told: "Queue[Any]") -> None:
    """Asks until it is told to stop; tells its times, and the statuses that were not 200."""
    body = HEAD + b'"messages":[{"role":"user","content":"hi"}],"max_tokens":1}'
    asked, times, bad = head(len(body), key) + body, [], Counter[str]()
    line = socket.create_connection((HOST, port), timeout=120)
    while not stop.is_set():
        began, got = time.perf_counter(), b""
        line.sendall(asked)
        while b"\r\n\r\n" not in got:
            more = line.recv(65536)
            if not more:
                bad["closed"] += 1
                line = socket.create_connection((HOST, port), timeout=120)
                break
            got += more
        times.append(time.perf_counter() - began)
        if got and got[9:12] != b"200":
            bad[got[9:12].decode()] += 1
        time.sleep(0.005)
    told.put((sorted(times), dict(bad)))


def send(port: int, key: str, path: str, body: bytes, stop: Signal, told: "Queue[Any]") -> None:
    """One body after the other; tells what was answered."""
    os.nice(19)
    answers: Counter[str] = Counter()
    while not stop.is_set():
        with socket.create_connection((HOST, port), timeout=60) as line:
            try:
                line.sendall(head(len(body), key, path))
                for at in range(0, len(body), PIECE):
                    if stop.is_set():
                        # Half a body gets no answer before the gateway's patience is over.
                        break
                    line.sendall(body[at : at + PIECE])
                else:
                    answers[line.recv(64)[9:12].decode() or "closed"] += 1
            except OSError:
                # Closed while it still sent; what was said before that may be lost with it.
                answers["closed"] += 1
    told.put(answers)


def hold(port: int, key: str | None, length: int, stop: Signal, told: "Queue[Any]") -> None:
    """All of a body but its last byte, and then nothing more."""
    os.nice(19)
    line = socket.create_connection((HOST, port), timeout=5)
    said = b""
    try:
        begun = HEAD + b'"messages":[{"role":"user","content":"'
        line.sendall(head(length, key) + begun)
        left = length - len(begun) - 1
        while left:
            line.sendall(b"x" * min(left, PIECE))
            left -= min(left, PIECE)
        stop.wait()
    except OSError:
        stop.wait()
    with suppress(OSError):
        line.settimeout(0.5)
        said = line.recv(64)
    line.close()
    told.put(Counter({said[9:12].decode() or "held": 1}))


def measured(
    server: int, turns: Path, port: int, key: str, attack: list[Callable[..., Process]], seconds: float
) -> dict[str, Any]:
    """`server`: the gateway's process, whose CPU is counted; `key`: of the small requests."""
    with turns.open("r+b") as file:
        file.write(bytes(8))
    stop, told, answers = Event(), Queue(), Queue()
    client, cpu_s = Process(target=small, args=(port, key, stop, told)), cpu_seconds(server)
    senders = [begin(stop, answers) for begin in attack]
    for sender in senders:
        sender.start()
    client.start()
    time.sleep(seconds)
    stop.set()
    times, bad = told.get(timeout=180)
    sent: Counter[str] = Counter()
    for _ in senders:
        sent.update(answers.get(timeout=180))
    for process in (client, *senders):
        process.join()
    at = [times[min(int(len(times) * share), len(times) - 1)] * 1e3 for share in (0.5, 0.99, 1.0)]
    cpu_s = cpu_seconds(server) - cpu_s
    return {
        "requests": len(times),
        "cpu_s": cpu_s,
        "turn_ms": struct.unpack("q", turns.read_bytes())[0] / 1e6,
        "p50_ms": at[0],
        "p99_ms": at[1],
        "max_ms": at[2],
        "not_200": bad,
        "sent": sent,
    }


def attacks(port: int, key: str, senders: int) -> dict[str, list[Callable[..., Process]]]:
    def sends(name: str, body: bytes) -> Callable[..., Process]:
        path = PATHS.get(name, CHAT)
        return lambda stop, told: Process(target=send, args=(port, key, path, body, stop, told))

    def holds(length: int, own: str | None) -> Callable[..., Process]:
        return lambda stop, told: Process(target=hold, args=(port, own, length, stop, told))

    found = {name: [sends(name, body)] * senders for name, body in bodies().items()}
    for name, (count, length, keyed) in HELD.items():
        found[name] = [holds(length, key if keyed else None)] * count

    def gathers(crowd: Crowd) -> Callable[..., Process]:
        return lambda stop, told: Process(target=gather, args=(crowd, port, stop, told))

    return found | {name: [gathers(crowd)] for name, crowd in crowds(key).items()}


def additions_ms() -> float:
    """A million of them, the least of five: how fast this machine is just now."""
    found = []
    for _ in range(5):
        began, total = time.perf_counter(), 0
        for number in range(1_000_000):
            total += number
        found.append(time.perf_counter() - began)
    return min(found) * 1e3


def serve(command: str, folder: Path, port: int, behind: list[int]) -> "subprocess.Popen[bytes]":
    file = folder / "fleet.toml"
    known = {"keys": [{"kty": "EC", "crv": "P-256", "kid": "first", "x": _X, "y": _Y, "alg": "ES256", "use": "sig"}]}
    (folder / "jwks.json").write_text(json.dumps(known))
    tokens = f'[jwt]\nissuer = "{ISSUER}"\naudience = "crosstie"\njwks = "jwks.json"\n'
    file.write_text(f'{fleet(behind)}\n[state]\nkeys = "required"\nstore = "keys.db"\n{tokens}')
    shim, source = str(folder / "turns.so"), str(Path(__file__).with_name("turns.c"))
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    with (folder / "gateway.log").open("wb") as log:
        server = subprocess.Popen(
            [
                *shlex.split(command), "serve", str(file), "--port", str(port), "--batches", str(folder / "batches"),
                "--responses", str(folder / "responses.db"),
            ],
            stdout=log, stderr=log, env=os.environ | {"LD_PRELOAD": shim, "TURNS": str(folder / "turns")},
        )  # fmt: skip
    until = time.monotonic() + 90
    while time.monotonic() < until and server.poll() is None:
        with suppress(OSError), socket.create_connection((HOST, port), timeout=5):
            return server
        time.sleep(0.2)
    server.terminate()
    sys.exit((folder / "gateway.log").read_text()[-500:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each shape")
    parser.add_argument("--senders", type=int, default=2, help="of whole bodies at once")
    parser.add_argument(
        "--shape", action="append", default=[], choices=[*bodies(), *HELD, *crowds("")], help="these alone"
    )
    parser.add_argument("--crosstie", default=f"{sys.executable} -m crosstie", help="the command of the gateway")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name, backends(2, 20, Path(name)) as (_, ports):
        folder, port, keys = Path(name), free_port(), []
        turns = folder / "turns"
        store = open_store(str(folder / "keys.db"), create=True)
        for who in ("small", "hostile"):
            public, secret = new_public_id(), new_secret()
            store.add_key(Key(name=who, public_id=public, digest=digest(secret), created_at=time.time()))
            keys.append(shown(public, secret))
        store.close()
        server = serve(chosen.crosstie, folder, port, ports)
        state = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0], "million_additions_ms": additions_ms()}
        try:
            rows["nothing"] = measured(server.pid, turns, port, keys[0], [], chosen.seconds)
            for shape, attack in attacks(port, keys[1], chosen.senders).items():
                if not chosen.shape or shape in chosen.shape:
                    rows[shape] = measured(server.pid, turns, port, keys[0], attack, chosen.seconds)
            rows["nothing, after"] = measured(server.pid, turns, port, keys[0], [], chosen.seconds)
        finally:
            server.terminate()
            server.wait()
        state |= {"load_after": os.getloadavg()[0], "million_additions_after_ms": additions_ms()}
    if chosen.json:
        print(json.dumps({"state": state, "shapes": rows}))
    else:
        print("; ".join(f"{what.replace('_', ' ')} {value:.3g}" for what, value in state.items()))
        print(
            f"{'beside':26}{'requests':>9}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}{'turn ms':>9}{'CPU ms':>9}"
            "  answers to the senders"
        )
        alone = rows["nothing"]["cpu_s"] / rows["nothing"]["requests"]
        for shape, row in rows.items():
            figures = "".join(f"{row[what]:>9.1f}" for what in ("p50_ms", "p99_ms", "max_ms", "turn_ms"))
            sent = ", ".join(f"{count} x {said}" for said, count in sorted(row["sent"].items()))
            number = sum(row["sent"].values())
            figures += f"{(row['cpu_s'] - alone * row['requests']) * 1e3 / number:>9.1f}" if number else f"{'':9}"
            bad = f"; NOT 200: {row['not_200']}" if row["not_200"] else ""
            print(f"{shape:26}{row['requests']:>9}{figures}  {sent}{bad}")
    return int(any(row["not_200"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())

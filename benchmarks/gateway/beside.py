"""Small requests beside hostile bodies: how late one key's are while another sends what is dear to read.

    python benchmarks/gateway/beside.py [--seconds 6] [--shape NAME ...] [--senders 2] [--crosstie COMMAND] [--json]

One gateway with keys over one fake backend, one connection that asks a small thing every 5 ms, and beside it, shape by
shape, senders who send nothing but that shape, each body after the other. `nothing` is the same without senders, before
and after all the others: what is above it is what the attack does. Times are from the request's first byte to the end
of the answer's head, in milliseconds; CPU is what each body costs the gateway, which neighbours change least. Senders
are `nice`, since real ones have machines of their own; the state of this one is printed beside. Exit status 1 where a
small request was not answered 200.
"""

import argparse
import json
import os
import shlex
import socket
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


def chat(text: bytes) -> bytes:
    return HEAD + b'"max_tokens":5,"messages":[{"role":"user","content":"' + text + b'"}]}'


def form(file: bytes) -> bytes:
    part = b'--b\r\ncontent-disposition: form-data; name="'
    return b'%bmodel"\r\n\r\n%b\r\n%bfile"; filename="a"\r\n\r\n%b\r\n--b--\r\n' % (part, MODEL.encode(), part, file)


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
        "80,000 objects": HEAD + b'"messages":[' + b"{}," * 80_000 + b"{}]}",
    }


PATHS = {"Anthropic's messages": MESSAGES, "a recording": FORM}


def head(length: int, key: str | None, path: str = CHAT) -> bytes:
    own = b"authorization: Bearer %b\r\n" % key.encode() if key else b""
    if path == FORM:
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


def measured(server: int, port: int, key: str, attack: list[Callable[..., Process]], seconds: float) -> dict[str, Any]:
    """`server`: the gateway's process, whose CPU is counted; `key`: of the small requests."""
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
    return found


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
    file.write_text(fleet(behind) + '\n[state]\nkeys = "required"\nstore = "keys.db"\n')
    with (folder / "gateway.log").open("wb") as log:
        server = subprocess.Popen(
            [*shlex.split(command), "serve", str(file), "--port", str(port)], stdout=log, stderr=log
        )
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
    parser.add_argument("--shape", action="append", default=[], choices=[*bodies(), *HELD], help="these alone")
    parser.add_argument("--crosstie", default=f"{sys.executable} -m crosstie", help="the command of the gateway")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name, backends(2, 20, Path(name)) as (_, ports):
        folder, port, keys = Path(name), free_port(), []
        store = open_store(str(folder / "keys.db"), create=True)
        for who in ("small", "hostile"):
            public, secret = new_public_id(), new_secret()
            store.add_key(Key(name=who, public_id=public, digest=digest(secret), created_at=time.time()))
            keys.append(shown(public, secret))
        store.close()
        server = serve(chosen.crosstie, folder, port, ports)
        state = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0], "million_additions_ms": additions_ms()}
        try:
            rows["nothing"] = measured(server.pid, port, keys[0], [], chosen.seconds)
            for shape, attack in attacks(port, keys[1], chosen.senders).items():
                if not chosen.shape or shape in chosen.shape:
                    rows[shape] = measured(server.pid, port, keys[0], attack, chosen.seconds)
            rows["nothing, after"] = measured(server.pid, port, keys[0], [], chosen.seconds)
        finally:
            server.terminate()
            server.wait()
        state |= {"load_after": os.getloadavg()[0], "million_additions_after_ms": additions_ms()}
    if chosen.json:
        print(json.dumps({"state": state, "shapes": rows}))
    else:
        print("; ".join(f"{what.replace('_', ' ')} {value:.3g}" for what, value in state.items()))
        print(
            f"{'beside':24}{'requests':>9}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}{'CPU ms':>9}  answers to the senders"
        )
        alone = rows["nothing"]["cpu_s"] / rows["nothing"]["requests"]
        for shape, row in rows.items():
            figures = "".join(f"{row[what]:>9.1f}" for what in ("p50_ms", "p99_ms", "max_ms"))
            sent = ", ".join(f"{count} x {said}" for said, count in sorted(row["sent"].items()))
            number = sum(row["sent"].values())
            figures += f"{(row['cpu_s'] - alone * row['requests']) * 1e3 / number:>9.1f}" if number else f"{'':9}"
            bad = f"; NOT 200: {row['not_200']}" if row["not_200"] else ""
            print(f"{shape:24}{row['requests']:>9}{figures}  {sent}{bad}")
    return int(any(row["not_200"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())

"""What an open page costs the gateway: CPU a request with somebody looking at /crosstie/ over that with nobody.

    python benchmarks/dashboard.py [--replicas 200] [--seconds 10] [--rounds 3] [--connections 16] [--pages 1] [--json]

One gateway with --dashboard over fake backends, asked small things as fast as it answers, in turns without and with
pages that follow its stream. CPU is the gateway's own, looking after its replicas included, so neighbours change it
little; the medians of the rounds count. A page costs a fixed amount a second, so its share depends on the rate: the
rate that was reached is printed, and what the page adds is also told for 1,000 requests a second. Runs what is
installed: compiled modules where there are any.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent / "gateway"))

from fake_backend import MODEL
from load import HOST, chat, closed_loop
from peers import Running, backends, crosstie, start

KEY = "the-key-of-this-benchmark"
AT_RATE = 1000.0


async def _signed_in(port: int) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port)
    body = json.dumps({"key": KEY}).encode()
    head = b"POST /crosstie/session HTTP/1.1\r\nhost: %b\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(head % HOST.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    return next(line for line in answer.split(b"\r\n") if line.startswith(b"set-cookie: ")).split(b" ")[1].rstrip(b";")


async def _page(port: int, cookie: bytes, ready: asyncio.Event) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(b"GET /crosstie/live HTTP/1.1\r\nhost: %b\r\ncookie: %b\r\n\r\n" % (HOST.encode(), cookie))
        while await reader.read(2**20):
            ready.set()
    finally:
        writer.close()


@asynccontextmanager
async def looking(port: int, pages: int) -> AsyncIterator[None]:
    cookie = await _signed_in(port) if pages else b""
    events = [asyncio.Event() for _ in range(pages)]
    tasks = [asyncio.create_task(_page(port, cookie, one)) for one in events]
    async with asyncio.timeout(60):
        for one in events:
            await one.wait()
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(server: Running, options: argparse.Namespace) -> dict[str, float]:
    asked, found = chat(MODEL), {0: list[tuple[float, float, float]](), options.pages: []}
    for turn in range(2 * options.rounds):
        pages = options.pages if turn % 2 else 0
        async with looking(server.port, pages):
            began, before = asyncio.get_running_loop().time(), server.cpu()
            await asyncio.sleep(options.seconds)
            idle = (server.cpu() - before) / (asyncio.get_running_loop().time() - began)
            seen = await closed_loop(server.door, asked, options.connections, options.seconds, cpu=server.cpu)
        if seen.errors:
            sys.exit(f"{seen.errors} requests failed: {seen.reasons}")
        found[pages].append((seen.cpu_s / seen.units, seen.units / seen.seconds, idle))
    (closed, rate, idle_closed), (opened, _, idle_open) = (
        tuple(median(column) for column in zip(*rows, strict=True)) for rows in found.values()
    )
    # What a request takes beside looking after the replicas, which is done at any rate.
    own = closed - idle_closed / rate
    return {
        "replicas": options.replicas, "pages": options.pages, "requests_per_s": rate,
        "closed_us": 1e6 * closed, "open_us": 1e6 * opened, "ratio": opened / closed,
        "idle_closed_ms_per_s": 1e3 * idle_closed, "idle_open_ms_per_s": 1e3 * idle_open,
        "ratio_at_1000_per_s": (AT_RATE * own + idle_open) / (AT_RATE * own + idle_closed),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--pages", type=int, default=1)
    parser.add_argument("--crosstie", default="crosstie")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["CROSSTIE_ADMIN_KEY"] = KEY
    with tempfile.TemporaryDirectory() as name, backends(options.replicas, 1, Path(name)) as (_, ports):
        server = start(crosstie(options.crosstie, ["--dashboard"]), ports, Path(name))
        try:
            said = asyncio.run(measure(server, options))
        finally:
            server.stop()
    if options.json:
        print(json.dumps(said, indent=2))
        return
    for label, value in said.items():
        print(f"{label:24} {value:12.4g}")


if __name__ == "__main__":
    main()

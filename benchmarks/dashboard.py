"""What an open page costs the gateway: CPU a request with somebody looking at /crosstie/ over that with nobody.

    python benchmarks/dashboard.py [--replicas 200] [--requests 500] [--rounds 7] [--pages 1] [--json]

One gateway with --dashboard over fake backends. In turns without and with pages that follow its stream it answers the
same number of small requests; a round is a turn of each, the one that comes first changing from round to round, and the
median of the rounds' ratios counts. CPU is the gateway's own. Looking after its replicas costs it some a second at any
rate, and a page costs some a second as well: both are taken apart from what a request costs by the times that turns
took, and the ratio is also told for 1,000 requests a second, which slow machines do not reach. Runs what is installed:
compiled modules where there are any.
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
# A turn that takes longer is given up.
MOST_S = 120.0


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
    asked = chat(MODEL)

    async def turn(pages: int, requests: int) -> tuple[float, float]:
        """CPU and seconds of so many requests; of none, while a clock runs."""
        async with looking(server.port, pages):
            if not requests:
                began, before = asyncio.get_running_loop().time(), server.cpu()
                await asyncio.sleep(options.idle_s)
                return server.cpu() - before, asyncio.get_running_loop().time() - began
            seen = await closed_loop(server.door, asked, options.connections, MOST_S, requests, cpu=server.cpu)
        if seen.errors or seen.requests < requests - options.connections:
            sys.exit(f"{seen.requests} of {requests} requests, {seen.errors} failed: {seen.reasons}")
        return seen.cpu_s / seen.requests * requests, seen.seconds

    # Code that is warm, connections that are there.
    await turn(0, options.requests)
    cpu, seconds = await turn(0, 0)
    tending = cpu / seconds
    rounds = []
    for number in range(options.rounds):
        closed_first = number % 2 == 0
        first = await turn(0 if closed_first else options.pages, options.requests)
        second = await turn(options.pages if closed_first else 0, options.requests)
        (closed, closed_s), (opened, opened_s) = (first, second) if closed_first else (second, first)
        # Each turn without looking after the replicas for as long as it took.
        request = (closed - tending * closed_s) / options.requests
        page = (opened - tending * opened_s - request * options.requests) / opened_s
        rounds.append(
            {
                "requests_per_s": options.requests / closed_s, "closed_us": 1e6 * closed / options.requests,
                "open_us": 1e6 * opened / options.requests, "ratio": opened / closed,
                "page_ms_per_s": 1e3 * page, "ratio_at_1000_per_s": 1.0 + page / (AT_RATE * request + tending),
            }
        )  # fmt: skip
        print(f"round {number + 1}: ratio {rounds[-1]['ratio']:.3f}", file=sys.stderr)
    ratios = sorted(one["ratio"] for one in rounds)
    return {
        "replicas": options.replicas, "pages": options.pages, "rounds": options.rounds, "requests": options.requests,
        **{name: median(one[name] for one in rounds) for name in rounds[0]},
        "least_ratio": ratios[0], "greatest_ratio": ratios[-1], "tending_ms_per_s": 1e3 * tending,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=200)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--idle-s", type=float, default=10.0)
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

"""What the picker adds: latency over the same Envoy without it, and CPU a request beside a picker that does nothing.

    CROSSTIE_ENVOY=/path/to/envoy PYTHONPATH=src:. python benchmarks/pick.py --requests 2000

Three rounds over one fake engine that answers at once, one request at a time, interleaved so that a slow minute of the
machine falls on all: Envoy alone, Envoy with a picker that names the one endpoint and passes every message as it came,
Envoy with `crosstie pick`. Pickers run in processes of their own; their CPU is read from /proc before and after.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time

from tests.run.gateway.fakes import MODEL, Fake, fleet_of, pool_of
from tests.run.pick.envoys import envoy, free_port

from crosstie.catalog.fleet_text import fleet_text
from crosstie.wire.address import Address
from crosstie.wire.client import Origin
from crosstie.wire.fetch import fetch
from crosstie.wire.loops import run_on_loop

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello " * 200}]}).encode()


def cpu_s(pid: int) -> float:
    """User and system time of a process and its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


async def noop(port: int, endpoint: str) -> None:
    """A picker that names one endpoint and passes everything on."""
    import grpc
    from tests.run.pick.declared import ProcessingRequest

    from crosstie_gateway.pick import messages
    from crosstie_gateway.pick.server import EXT_PROC

    async def process(_: object, context: grpc.aio.ServicerContext) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("kind")
            if kind == "request_headers":
                await context.write(messages.picked(endpoint, (), ()))
            elif kind == "response_headers":
                await context.write(messages.headed((), ()))
            else:
                said, side = getattr(message, kind), getattr(messages, kind.upper())
                [piece] = messages.pieces(side, said.body, ends=said.end_of_stream)
                await context.write(piece)

    # Its replies are written by hand as ours are, which favours it.
    handler = grpc.stream_stream_rpc_method_handler(process, ProcessingRequest.FromString, lambda reply: reply)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXT_PROC, {"Process": handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


def pace_s() -> float:
    """How long this machine takes for ten million additions: some 0.45 s where nothing holds it back."""
    began, total = process_time(), 0
    for at in range(10_000_000):
        total += at
    return process_time() - began


async def timed(origin: Origin, number: int) -> list[float]:
    took = []
    for _ in range(number):
        began = perf_counter()
        answer = await fetch(origin, "POST", "/v1/chat/completions", body=_BODY, timeout_s=60.0)
        took.append(perf_counter() - began)
        if answer.status != 200:
            raise SystemExit(f"answered {answer.status}: {answer.body[:200]!r}")
    return took


async def measure(requests: int, rounds: int) -> None:
    fake, loop = Fake(), asyncio.get_running_loop()
    await fake.start()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "fleet.toml"
        file.write_text(fleet_text(fleet_of(pool_of("one", fake.url))))
        ports = {"no-op picker": free_port(), "crosstie pick": free_port()}
        commands = {
            "no-op picker": [__file__, "--noop", str(ports["no-op picker"]), f"127.0.0.1:{fake.port}"],
            "crosstie pick": ["-m", "crosstie", "pick", str(file), "--port", str(ports["crosstie pick"]), "--json"],
        }
        pickers = {
            who: subprocess.Popen([sys.executable, *given], stdout=subprocess.PIPE) for who, given in commands.items()
        }
        try:
            for one in pickers.values():
                # It says that it is ready.
                await loop.run_in_executor(None, one.stdout.readline)
            await asyncio.sleep(1.0)
            async with (
                envoy(folder, None, [fake.url]) as alone,
                envoy(folder, ports["no-op picker"], [fake.url]) as idle,
                envoy(folder, ports["crosstie pick"], [fake.url]) as ours,
            ):
                urls = {"Envoy alone": alone, "no-op picker": idle, "crosstie pick": ours}
                origins = {who: Origin(loop, Address(url)) for who, url in urls.items()}
                took: dict[str, list[float]] = {who: [] for who in urls}
                for origin in origins.values():
                    await timed(origin, 50)
                used = dict.fromkeys(pickers, 0.0)
                for _ in range(rounds):
                    for who, origin in origins.items():
                        before = cpu_s(pickers[who].pid) if who in pickers else 0.0
                        took[who] += await timed(origin, requests // rounds)
                        if who in pickers:
                            used[who] += cpu_s(pickers[who].pid) - before
                base = median(took["Envoy alone"])
                print(f"10M additions: {pace_s():.2f} s of CPU; load {os.getloadavg()[0]:.1f}")
                for who, times in took.items():
                    at = median(times)
                    cpu = f", {used[who] / len(times) * 1e3:.2f} ms CPU a request" if who in used else ""
                    p95 = quantiles(times, n=20)[-1]
                    print(f"{who}: p50 {at * 1e3:.2f} ms ({(at - base) * 1e3:+.2f}), p95 {p95 * 1e3:.2f} ms{cpu}")
        finally:
            for one in pickers.values():
                one.kill()
                one.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--noop", nargs=2, metavar=("PORT", "ENDPOINT"))
    options = parser.parse_args()
    run_on_loop(
        noop(int(options.noop[0]), options.noop[1]) if options.noop else measure(options.requests, options.rounds)
    )

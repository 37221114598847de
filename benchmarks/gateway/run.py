"""Gateways side by side: what forwarding costs in CPU and in latency, Crosstie's and its peers'.

    python benchmarks/gateway/run.py [--rounds N] [--vllm-router PYTHON] [--sglang-router PYTHON] [--soak] [--json FILE]

All gateways stand before the same two fake backends in one run. Each round takes every load once for every
gateway, in an order that turns from round to round, so that a busy neighbour hits all of them. README.md says how
to read the result.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from fake_backend import MODEL
from load import Outcome, chat, closed_loop, paced_streams, percentile, soak
from peers import (
    ROOT,
    CannotStart,
    Neighbours,
    Running,
    Target,
    backends,
    crosstie,
    crosstie_with_keys,
    crosstie_with_tls,
    envoy,
    nginx,
    other,
    sglang_router,
    start,
    version,
    vllm_router,
)

DIRECT = "direct"
CONNECTIONS, STREAMS, INTERVAL_MS = 64, 32, 20
LONG_PROMPT = "lorem ipsum dolor sit amet " * (256 * 1024 // 27)
SOAK_STREAMS, SOAK_INTERVAL_MS, SOAK_CHUNKS = 2000, 100, 64
# As many replicas as so many streams would take: the gateway turns away what its fleet could not carry.
SOAK_BACKENDS = 16

# Key, heading, factor from SI, decimals. All of them: less is better.
FIGURES = (
    ("request_cpu_s", "CPU us a request", 1e6, 0),
    ("chunk_cpu_s", "CPU us a chunk", 1e6, 1),
    ("one_p50_s", "p50 us, 1 conn.", 1e6, 0),
    ("one_p99_s", "p99 us, 1 conn.", 1e6, 0),
    ("added_p50_s", "added p50 us", 1e6, 0),
    ("long_p50_s", "p50 ms, 256 KB", 1e3, 2),
)
COMPARED = ("request_cpu_s", "chunk_cpu_s", "added_p50_s", "long_p50_s")

Figures = dict[str, float]


@dataclass
class Results:
    rounds: dict[str, list[Figures]] = field(default_factory=dict)
    soak: dict[str, dict[str, float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    neighbour_cores: list[float] = field(default_factory=list)

    def least(self, name: str, key: str) -> float:
        """Noise only ever adds, so the least of the rounds is nearest to what the work costs."""
        if key == "added_p50_s":
            return self.least(name, "one_p50_s") - self.least(DIRECT, "one_p50_s")
        return min(figures[key] for figures in self.rounds[name])

    def check(self, name: str, load: str, outcome: Outcome) -> None:
        if outcome.errors or outcome.incomplete:
            reasons = ", ".join(f"{reason} x {count}" for reason, count in outcome.reasons.items())
            self.faults.append(f"{name}, {load}: {outcome.errors} errors, {outcome.incomplete} incomplete ({reasons})")


# --- one round ----------------------------------------------------------------------------------------------------


def brief(server: Running) -> bytes:
    return chat(MODEL, key=server.key)


def lengthy(server: Running) -> bytes:
    return chat(MODEL, LONG_PROMPT, key=server.key)


def small(server: Running, seconds: float) -> tuple[Figures, Outcome]:
    outcome = uvloop.run(closed_loop(server.door, brief(server), CONNECTIONS, seconds, cpu=server.cpu))
    return {"request_cpu_s": outcome.cpu_us_per_unit / 1e6, "requests_per_s": outcome.units_per_s}, outcome


def streams(server: Running, seconds: float) -> tuple[Figures, Outcome]:
    outcome = uvloop.run(paced_streams(server.door, MODEL, STREAMS, INTERVAL_MS / 1e3, seconds, server.cpu))
    return {"chunk_cpu_s": outcome.cpu_us_per_unit / 1e6, "chunks_per_s": outcome.units_per_s}, outcome


def one(server: Running, seconds: float) -> tuple[Figures, Outcome]:
    outcome = uvloop.run(closed_loop(server.door, brief(server), 1, seconds / 2))
    times = outcome.latencies_s
    return {"one_p50_s": percentile(times, 0.5), "one_p99_s": percentile(times, 0.99)}, outcome


def long(server: Running, seconds: float) -> tuple[Figures, Outcome]:
    outcome = uvloop.run(closed_loop(server.door, lengthy(server), 1, seconds / 2, count=500))
    return {"long_p50_s": percentile(outcome.latencies_s, 0.5)}, outcome


LOADS: dict[str, Callable[[Running, float], tuple[Figures, Outcome]]] = {
    "small requests": small,
    "paced streams": streams,
    "one connection": one,
    "long prompts": long,
}


def speed_round(servers: Sequence[Running], seconds: float, turn: int, results: Results) -> None:
    found: dict[str, Figures] = {server.name: {} for server in servers}
    for shift, (load, measure) in enumerate(LOADS.items()):
        by = (turn + shift) % len(servers)
        for server in [*servers[by:], *servers[:by]]:
            figures, outcome = measure(server, seconds)
            results.check(server.name, load, outcome)
            found[server.name] |= figures
    for name, figures in found.items():
        figures["added_p50_s"] = figures["one_p50_s"] - found[DIRECT]["one_p50_s"]
        results.rounds.setdefault(name, []).append(figures)


def warm_up(servers: Iterable[Running]) -> None:
    for server in servers:
        uvloop.run(closed_loop(server.door, brief(server), CONNECTIONS, 0.5))
        uvloop.run(closed_loop(server.door, lengthy(server), 1, 0.2, count=20))


def measure_speed(targets: Sequence[Target], given: argparse.Namespace, folder: Path, results: Results) -> None:
    with ExitStack() as stack:
        backend, ports = stack.enter_context(backends(2, INTERVAL_MS, folder, in_step=given.in_step))
        servers = [Running(DIRECT, ports[0], backend.process, backend.log)]
        for target in targets:
            try:
                servers.append(start(target, ports, folder))
            except CannotStart as fault:
                results.faults.append(f"{target.name} was left out: {fault}")
                continue
            stack.callback(servers[-1].stop)
        warm_up(servers)
        for turn in range(given.rounds):
            note(f"round {turn + 1} of {given.rounds}")
            neighbours = Neighbours(servers)
            speed_round(servers, given.seconds, turn, results)
            results.neighbour_cores.append(neighbours.cores())


# --- the soak -----------------------------------------------------------------------------------------------------


def measure_soak(targets: Sequence[Target], given: argparse.Namespace, folder: Path, results: Results) -> None:
    """Each gateway alone, started on one core; driver and backends have the others."""
    cores = sorted(os.sched_getaffinity(0))
    mine, rest = {cores[0]}, set(cores[1:]) or {cores[0]}
    os.sched_setaffinity(0, rest)
    interval_s = given.soak_interval_ms / 1e3
    try:
        for target in targets:
            note(f"soak of {target.name}")
            with backends(SOAK_BACKENDS, given.soak_interval_ms, folder, in_step=given.in_step, cores=rest) as (
                backend,
                ports,
            ):
                try:
                    server = start(target, ports, folder, cores=mine)
                except CannotStart as fault:
                    results.faults.append(f"{target.name} was left out of the soak: {fault}")
                    continue
                try:
                    neighbours = Neighbours([backend, server])
                    outcome = uvloop.run(
                        soak(
                            server.door,
                            MODEL,
                            given.soak_streams,
                            interval_s,
                            SOAK_CHUNKS,
                            given.soak_seconds,
                            server.cpu,
                        )
                    )
                    others = neighbours.cores()
                finally:
                    server.stop()
            results.check(target.name, "soak", outcome)
            results.soak[target.name] = {
                "streams_whole": outcome.requests - outcome.incomplete,
                "errors": outcome.errors,
                "incomplete": outcome.incomplete,
                "chunks_per_s": outcome.units_per_s,
                "core_fraction": outcome.cpu_s / outcome.seconds if outcome.seconds else 0.0,
                "chunk_cpu_s": outcome.cpu_us_per_unit / 1e6,
                "first_late_p99_s": percentile(outcome.first_s, 0.99) - interval_s,
                "gap_p50_s": outcome.gap_s(0.5),
                "gap_p99_s": outcome.gap_s(0.99),
                "neighbour_cores": others,
            }
    finally:
        os.sched_setaffinity(0, cores)


# --- telling ------------------------------------------------------------------------------------------------------


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown, its columns lined up."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| "
        + " | ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        + " |"
        for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def speed_tables(results: Results) -> str:
    titles = {name: f"{name} {results.versions.get(name, '')}".strip() for name in results.rounds}
    rows = [["gateway", *(heading for _, heading, _, _ in FIGURES), "requests/s"]]
    for name, rounds in results.rounds.items():
        cells = [f"{results.least(name, key) * factor:,.{digits}f}" for key, _, factor, digits in FIGURES]
        rows.append([titles[name], *cells, f"{max(figures['requests_per_s'] for figures in rounds):,.0f}"])
    text = table(rows)
    if "crosstie" not in results.rounds:
        return text
    headings = {key: heading for key, heading, _, _ in FIGURES}
    rows = [["crosstie over", *(headings[key] for key in COMPARED)]]
    for name in results.rounds:
        if name not in (DIRECT, "crosstie"):
            rows.append([titles[name], *(ratio(results, name, key) for key in COMPARED)])
    return f"{text}\n\n{table(rows)}" if len(rows) > 1 else text


def ratio(results: Results, name: str, key: str) -> str:
    """The median of the rounds' ratios, each of two loads a few seconds apart, and their range."""
    pairs = zip(results.rounds["crosstie"], results.rounds[name], strict=True)
    single = [ours[key] / theirs[key] for ours, theirs in pairs if theirs[key]]
    return f"{statistics.median(single):.2f} ({min(single):.2f} to {max(single):.2f})" if single else "-"


def soak_table(results: Results) -> str:
    heads = ["soak", "errors", "incomplete", "whole", "chunks/s", "of a core", "CPU us a chunk"]
    rows = [[*heads, "first late p99 ms", "gap p99 ms", "neighbours"]]
    for name, got in results.soak.items():
        rows.append(
            [
                name,
                *(f"{got[key]:,.0f}" for key in ("errors", "incomplete", "streams_whole", "chunks_per_s")),
                f"{got['core_fraction']:.0%}",
                f"{got['chunk_cpu_s'] * 1e6:.1f}",
                f"{got['first_late_p99_s'] * 1e3:,.0f}",
                f"{got['gap_p99_s'] * 1e3:,.0f}",
                f"{got['neighbour_cores']:.2f} cores",
            ]
        )
    return table(rows)


def machine() -> dict[str, object]:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


# --- asking -------------------------------------------------------------------------------------------------------


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crosstie", default=str(ROOT / ".venv/bin/crosstie"), help="its command")
    parser.add_argument("--crosstie-args", default="", metavar="TEXT", help="more of `crosstie serve`")
    for name in ("vllm-router", "sglang-router"):
        usual = str(ROOT / f".venvs/{name}/bin/python")
        parser.add_argument(f"--{name}", default=usual, metavar="PYTHON", help="of the environment that holds it")
    parser.add_argument("--other", action="append", default=[], metavar="NAME=COMMAND", help="with {port} and {urls}")
    for name in ("nginx", "envoy"):
        parser.add_argument(f"--{name}", metavar="PROGRAM", help="a plain proxy beside; with --edge by TLS too")
    parser.add_argument("--edge", action="store_true", help="Crosstie with keys, and with TLS, as rows of their own")
    names = (DIRECT, "crosstie", "vllm-router", "sglang-router")
    parser.add_argument("--only", action="append", default=[], choices=names, help="these alone; others by --other")
    parser.add_argument("--rounds", type=int, default=5, help="0 leaves the speed out (default 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each load (default 2)")
    parser.add_argument("--in-step", action="store_true", help="backends send all streams' chunks together")
    parser.add_argument("--soak", action="store_true", help="many streams through each gateway on one core")
    parser.add_argument("--soak-streams", type=int, default=SOAK_STREAMS)
    parser.add_argument("--soak-seconds", type=float, default=60.0)
    parser.add_argument("--soak-interval-ms", type=int, default=SOAK_INTERVAL_MS, help="between a stream's chunks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every figure of every round")
    return parser


def chosen(given: argparse.Namespace, results: Results) -> list[Target]:
    places = {"crosstie": given.crosstie, "vllm-router": given.vllm_router, "sglang-router": given.sglang_router}
    more = shlex.split(given.crosstie_args)
    makers = {
        "crosstie": lambda binary: crosstie(binary, more),
        "vllm-router": vllm_router,
        "sglang-router": sglang_router,
    }
    targets = []
    for name, place in places.items():
        if given.only and name not in given.only:
            continue
        if not Path(place).exists():
            results.faults.append(f"{name} was left out: there is no {place}")
            continue
        results.versions[name] = version(place, name)
        targets.append(makers[name](place))
    if given.edge:
        targets += [crosstie_with_keys(given.crosstie), crosstie_with_tls(given.crosstie)]
    for program, made in ((given.nginx, nginx), (given.envoy, envoy)):
        if program is not None:
            targets += [made(program), *([made(program, tls=True)] if given.edge else [])]
    return targets + [other(text) for text in given.other]


def main() -> int:
    given = arguments().parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two thousand streams are as many sockets
    results = Results()
    with tempfile.TemporaryDirectory(prefix="gateway-bench-") as name:
        folder = Path(name)
        try:
            targets = chosen(given, results)
            if given.rounds > 0:
                measure_speed(targets, given, folder, results)
                print(speed_tables(results))
                others = ", ".join(f"{cores:.2f}" for cores in results.neighbour_cores)
                print(f"\nOther processes took, round by round, of {os.cpu_count()} cores: {others}")
            if given.soak:
                measure_soak(targets, given, folder, results)
                print(f"\n{soak_table(results)}")
        except CannotStart as fault:
            note(f"cannot start: {fault}")
            return 2
    for line in results.faults:
        print(f"! {line}")
    if given.json:
        document = {"machine": machine(), "versions": results.versions, "rounds": results.rounds}
        document |= {"neighbour_cores": results.neighbour_cores}
        given.json.write_text(json.dumps({**document, "soak": results.soak, "faults": results.faults}, indent=1) + "\n")
    return 1 if results.faults else 0


if __name__ == "__main__":
    sys.exit(main())

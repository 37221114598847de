"""How replays look on a terminal: a bar while they run, and tables of classes and pools."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from crosstie.cli.show import count, dollars, print_table, seconds, share, table
from crosstie.core.workload import Target
from crosstie.prove.replay.accounts import Spent
from crosstie.prove.replay.outcomes import ClassResult, Percentiles, ReplayResult

# What is replayed, of how many requests, so many have ended and so many of these failed.
Track = Callable[[str, int, int, int], None]


@contextmanager
def replay_progress() -> Iterator[tuple[Callable[[str], None], Track]]:
    """To tell what is being done, and to track requests: on a terminal's error stream, silent elsewhere."""
    stream = Console(stderr=True, highlight=False, markup=False)
    if not stream.is_terminal:
        yield lambda _: None, lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stream, transient=True) as bars:
        task = bars.add_task("", total=None)

        def tell(what: str) -> None:
            bars.update(task, description=what, total=None, completed=0)

        def track(what: str, total: int, done: int, failed: int) -> None:
            said = f"replaying, {what}" if not failed else f"replaying, {what}, {failed:,} failed"
            bars.update(task, description=said, total=total, completed=done)

        yield tell, track


def latency(value: float) -> str:
    return "-" if math.isnan(value) else seconds(value)


def promised(target: Target | None) -> str:
    return "-" if target is None else f"p{round(target.percentile * 100)} {seconds(target.seconds)}"


def kept(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.1%}"


def show_result(
    out: Console, result: ReplayResult, spent: Spent, usd_per_good_million: float | None, speed: float
) -> None:
    emulated = f", {count(speed)} to each second of the clock" if speed != 1.0 else ""
    out.print(
        f"{result.requests:,} requests over {seconds(result.seconds)}{emulated}, {result.failed:,} failed; "
        f"{kept(result.kept)} within their targets"
    )
    columns = [("class", "left"), ("requests", "right"), ("failed", "right")]
    columns += [(name, "right") for name in ("TTFT p50", "p95", "p99", "target", "kept")]
    columns += [(name, "right") for name in ("TPOT p50", "p90", "p99", "target", "kept", "both kept")]
    print_table(out, table("", columns, [_class_row(one) for one in result.classes]))
    if any(one.name != "-" for one in result.pools):
        columns = [
            (name, "right") for name in ("pool", "requests", "share", "tokens in", "out", "TTFT p50", "TPOT p50")
        ]
        columns[0] = ("pool", "left")
        rows = [
            (
                one.name, f"{one.requests:,}", share(one.requests / result.requests), f"{one.input_tokens:,}",
                f"{one.output_tokens:,}", latency(one.ttft_s.p50), latency(one.tpot_s.p50),
            )
            for one in result.pools
        ]  # fmt: skip
        print_table(out, table("", columns, rows))
    if spent.usd:
        out.print(f"attributed by the gateway: {dollars(spent.usd_per_million)} a million tokens")
    if usd_per_good_million is not None and math.isfinite(usd_per_good_million):
        out.print(f"the fleet's bill over what kept its targets: {dollars(usd_per_good_million)} a million tokens")
    for why, times in result.faults:
        out.print(f"- {times:,} x {why}")
    out.print(
        "  latencies count from the moment at which a request was due, so none hides behind a stall; "
        f"the client itself was late by {latency(result.late_s.p99)} at p99 and {latency(result.latest_s)} at most"
    )
    if result.disturbed:
        out.print("  this machine stood still meanwhile, and the server did not: latencies are partly its own")


def _class_row(one: ClassResult) -> tuple[str, ...]:
    ttft, tpot = one.seen.ttft_s, one.seen.tpot_s
    return (
        one.seen.name, f"{one.seen.requests:,}", f"{one.seen.failed:,}",
        latency(ttft.p50), latency(ttft.p95), latency(ttft.p99), promised(one.targets.ttft), kept(one.ttft_kept),
        latency(tpot.p50), latency(tpot.p90), latency(tpot.p99), promised(one.targets.tpot), kept(one.tpot_kept),
        kept(one.kept),
    )  # fmt: skip


def at(spread: Percentiles, target: Target) -> str:
    return latency(spread.at(target.percentile))

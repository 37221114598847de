"""How replays look on a terminal: what kept its targets, and latencies by class and pool."""

import math

from crosstie.core.figures import dollars, percent, seconds, share, significant
from crosstie.core.workload import Target
from crosstie.prove.replay.accounts import Spent
from crosstie.prove.replay.outcomes import Percentiles, ReplayedClass, ReplayResult
from crosstie.web.parts import Parts, Table, closing, note

DETAILS = "every percentile, and what was sent to each pool"


def latency(value: float) -> str:
    return "-" if math.isnan(value) else seconds(value)


def promised(target: Target | None) -> str:
    return "-" if target is None else f"p{round(target.percentile * 100)} {seconds(target.seconds)}"


def kept(value: float | None) -> str:
    return "-" if value is None else percent(value)


def replay_parts(
    result: ReplayResult, spent: Spent, usd_per_good_million: float | None, speed: float, verbose: bool
) -> Parts:
    emulated = f", {significant(speed)} to each second of the clock" if speed != 1.0 else ""
    yield (
        f"{result.requests:,} requests over {seconds(result.seconds)}{emulated}, {result.failed:,} failed; "
        f"{kept(result.kept)} within their targets"
    )
    columns = ["class", ">requests", ">failed", ">TTFT p50", ">p99", ">kept", ">TPOT p50", ">p99", ">kept"]
    if verbose:
        columns = ["class", ">requests", ">failed", ">both kept"]
        columns += [f">TTFT {name}" for name in ("p50", "p95", "p99", "target", "kept")]
        columns += [f">TPOT {name}" for name in ("p50", "p90", "p99", "target", "kept")]
    yield Table(columns, [_class_row(one, verbose) for one in result.classes])
    yield from (f"- {times:,} x {why}" for why, times in result.faults)
    if spent.usd:
        yield f"attributed by the gateway: {dollars(spent.usd_per_million)} per million tokens"
    if usd_per_good_million is not None and math.isfinite(usd_per_good_million):
        yield f"the fleet's bill over what kept its targets: {dollars(usd_per_good_million)} per million tokens"
    if verbose and any(one.name != "-" for one in result.pools):
        rows = [
            (
                one.name, f"{one.requests:,}", share(one.requests / result.requests), f"{one.input_tokens:,}",
                f"{one.output_tokens:,}", latency(one.ttft_s.p50), latency(one.tpot_s.p50),
            )
            for one in result.pools
        ]  # fmt: skip
        columns = ["pool", ">requests", ">share", ">input tokens", ">output tokens", ">TTFT p50", ">TPOT p50"]
        yield Table(columns, rows)
    yield note(
        "latencies count from the moment at which a request was due, so none hides behind a stall; "
        f"the client itself was late by {latency(result.late_s.p99)} at p99 and {latency(result.latest_s)} at most"
    )
    if result.disturbed:
        yield "this machine stood still meanwhile, and the server did not: latencies are partly its own"
    if not verbose:
        yield closing(DETAILS)


def _class_row(one: ReplayedClass, verbose: bool) -> list[str]:
    ttft, tpot = one.seen.ttft_s, one.seen.tpot_s
    counts = [one.seen.name, f"{one.seen.requests:,}", f"{one.seen.failed:,}"]
    if not verbose:
        return [
            *counts, latency(ttft.p50), latency(ttft.p99), kept(one.ttft_kept), latency(tpot.p50), latency(tpot.p99),
            kept(one.tpot_kept),
        ]  # fmt: skip
    return [
        *counts, kept(one.kept),
        latency(ttft.p50), latency(ttft.p95), latency(ttft.p99), promised(one.targets.ttft), kept(one.ttft_kept),
        latency(tpot.p50), latency(tpot.p90), latency(tpot.p99), promised(one.targets.tpot), kept(one.tpot_kept),
    ]  # fmt: skip


def at(spread: Percentiles, target: Target) -> str:
    return latency(spread.at(target.percentile))

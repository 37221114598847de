"""How a benchmark looks on a terminal: loads and what they came to, endpoints side by side, the limit of each."""

import math
from collections.abc import Callable

from crosstie.core.figures import dollars, gigabytes, percent, seconds, share, significant
from crosstie.core.workload import Target
from crosstie.prove.bench.bench import Bench, Measured
from crosstie.prove.bench.summary import MeasuredInterval, PointResult, ratio
from crosstie.prove.replay.outcomes import ReplayedClass
from crosstie.prove.replay.prompts import Sizing
from crosstie.web.parts import Parts, Table, closing, note

_LATENCIES = {"TTFT": "ttft_s", "TPOT": "tpot_s", "whole": "e2e_s", "longest gap": "longest_gap_s"}
DETAILS = "every percentile with its interval, the client's own account, and each GPU"
_ARRIVALS = {
    "steady": "steady, while all clients were at work",
    "lockstep": "lockstep: all clients began at once, and the start burst counts",
    "schedule": "a rate that changes, which no prediction is of: validate leaves it out",
    "sessions": "conversations, which no prediction is of: validate leaves them out",
    "unsettled": "never all at work at once: too few requests, so that validate leaves it out",
}
_STATISTICS = ("mean", "p50", "p90", "p95", "p99")


def bench_parts(bench: Bench, verbose: bool) -> Parts:
    for measured in bench.measured:
        yield from _endpoint(measured, bench, verbose)
    if len(bench.measured) > 1:
        yield from _side_by_side(bench)
    yield from _client(bench)
    if bench.interrupted:
        yield "interrupted: what was measured until then is above and in the file"
    if not verbose:
        yield closing(DETAILS)


def _endpoint(measured: Measured, bench: Bench, verbose: bool) -> Parts:
    of = measured.endpoint
    emulated = "  EMULATED: the performance model's own time, no GPU ran" if of.emulated else ""
    yield f"{of.name}: {of.model} at {of.url}{emulated}"
    served = next((point for point in measured.points if not math.isnan(point.input_tokens)), None)
    lengths = f"{served.input_tokens:,.0f} tokens in and {served.output_tokens:,.0f} out on average; " if served else ""
    yield note(f"  {lengths}{_counted(measured.sizing)}")
    if texts := bench.settings.prompts:
        yield note(f"  prompts of {texts.source}: {texts.kind}, {len(texts.texts):,} of them ({texts.sha256})")
    if measured.points:
        wants = measured.points[0].kept is not None
        columns = ["load", ">kept" if wants else ">requests", ">tok/s", ">TTFT p50", ">p95", ">TPOT p50", ">p95"]
        yield Table(columns, [_row(point, wants) for point in measured.points])
    for arrivals, said in _ARRIVALS.items():
        own = [point.load.name for point in measured.points if point.arrivals == arrivals]
        if own:
            yield note(f"  {', '.join(own)}: {said}")
    for point in measured.points:
        yield from _phases(point)
        yield from _classes(point, verbose)
        yield from (f"- {point.load.name}: {times:,} failed: {why}" for why, times in point.faults)
    watched = [point for point in measured.points if point.gpus]
    if watched:
        columns = ["load", ">GPUs", ">W", ">W at most", ">memory at most", ">busy", ">J a token"]
        yield Table(columns, [_power(point) for point in watched])
    if measured.limit is not None:
        yield from _limit(measured, bench)
    if verbose:
        yield from _details(measured)


def _phases(point: PointResult) -> Parts:
    if point.acceptance_length is not None:
        kept = f"{significant(point.acceptance_length)} tokens a step, of drafts of {point.draft_tokens}"
        yield f"  {point.load.name}: {kept}, by the engine's own counters"
    if not point.phases:
        return
    rows = [
        [phase.name, f"{phase.requests:,}", f"{phase.input_tokens / max(phase.requests - phase.failed, 1):,.0f}",
         latency(phase.ttft_s.p50), latency(phase.ttft_s.p95), latency(phase.tpot_s.p50), latency(phase.tpot_s.p95)]
        for phase in point.phases
    ]  # fmt: skip
    columns = [point.load.name, ">requests", ">tokens in", ">TTFT p50", ">p95", ">TPOT p50", ">p95"]
    yield Table(columns, rows)
    if point.prefix_queries:
        hits, queries = point.prefix_hits or 0.0, point.prefix_queries
        said = f"{hits:,.0f} of {queries:,.0f} tokens of prompts"
        yield f"  prefix cache, by the engine's own counters: {said} ({share(hits / queries)})"


def _classes(point: PointResult, verbose: bool) -> Parts:
    """By class what kept its targets, by pool what was served, and money."""
    if point.classes:
        columns = ["class", ">requests", ">failed", ">TTFT p50", ">p99", ">kept", ">TPOT p50", ">p99", ">kept"]
        if verbose:
            columns = ["class", ">requests", ">failed", ">both kept"]
            columns += [f">TTFT {name}" for name in ("p50", "p95", "p99", "target", "kept")]
            columns += [f">TPOT {name}" for name in ("p50", "p90", "p99", "target", "kept")]
        yield Table(columns, [_class_row(replayed_class, verbose) for replayed_class in point.classes])
    if verbose and point.pools:
        rows = [
            [pool.name, f"{pool.requests:,}", share(pool.requests / point.requests), f"{pool.input_tokens:,}",
             f"{pool.output_tokens:,}", latency(pool.ttft_s.p50), latency(pool.tpot_s.p50)]
            for pool in point.pools
        ]  # fmt: skip
        columns = ["pool", ">requests", ">share", ">input tokens", ">output tokens", ">TTFT p50", ">TPOT p50"]
        yield Table(columns, rows)
    if point.attributed_usd_per_million_tokens is not None:
        yield f"attributed by the gateway: {dollars(point.attributed_usd_per_million_tokens)} per million tokens"
    bill = point.fleet_usd_per_million_tokens_within_target
    if bill is not None and math.isfinite(bill):
        yield f"the fleet's bill over what kept its targets: {dollars(bill)} per million tokens"
    if point.disturbed:
        yield "this machine stood still meanwhile, and the server did not: latencies are partly its own"


def _class_row(kind: ReplayedClass, verbose: bool) -> list[str]:
    ttft, tpot = kind.seen.ttft_s, kind.seen.tpot_s
    counts = [kind.seen.name, f"{kind.seen.requests:,}", f"{kind.seen.failed:,}"]
    if not verbose:
        return [
            *counts, latency(ttft.p50), latency(ttft.p99), kept(kind.ttft_kept), latency(tpot.p50), latency(tpot.p99),
            kept(kind.tpot_kept),
        ]  # fmt: skip
    return [
        *counts, kept(kind.kept),
        latency(ttft.p50), latency(ttft.p95), latency(ttft.p99), promised(kind.targets.ttft), kept(kind.ttft_kept),
        latency(tpot.p50), latency(tpot.p90), latency(tpot.p99), promised(kind.targets.tpot), kept(kind.tpot_kept),
    ]  # fmt: skip


def latency(value: float) -> str:
    return _known(value, seconds)


def promised(target: Target | None) -> str:
    return "-" if target is None else f"p{round(target.percentile * 100)} {seconds(target.seconds)}"


def kept(value: float | None) -> str:
    return "-" if value is None else percent(value)


def _counted(sizing: Sizing) -> str:
    """How prompts were made as long as asked."""
    around = sizing.template_tokens
    template = f", {significant(around)} tokens around each" if around >= 0.5 else ""
    if sizing.words or (sizing.texts is not None and sizing.texts.tokens):
        return f"prompts counted by {sizing.counted_by}{template}"
    return f"prompts of {significant(sizing.bytes_per_token)} bytes a token, by {sizing.counted_by}{template}"


def _row(point: PointResult, wants: bool) -> list[str]:
    metrics = point.metrics
    cells = [point.load.name if point.complete else f"{point.load.name}, cut short"]
    cells.append(percent(point.kept) if wants and point.kept is not None else f"{point.requests:,}")
    cells.append(_number(metrics.get("output_tokens_per_s")))
    return cells + [_seconds(metrics.get(name)) for name in ("ttft_s_p50", "ttft_s_p95", "tpot_s_p50", "tpot_s_p95")]


def _number(interval: MeasuredInterval | None) -> str:
    if interval is None or math.isnan(interval.value):
        return "-"
    said = f"{interval.value:,.0f}" if interval.value >= 100 else significant(interval.value)
    return said + _within(interval)


def _within(interval: MeasuredInterval) -> str:
    """Half of its width."""
    known = not math.isnan(interval.low)
    return f" ±{share((interval.high - interval.low) / 2 / interval.value)}" if known else ""


def _seconds(interval: MeasuredInterval | None) -> str:
    return "-" if interval is None or math.isnan(interval.value) else seconds(interval.value)


def _between(span: MeasuredInterval) -> str:
    known = not math.isnan(span.low)
    return seconds(span.value) + (f" ({seconds(max(span.low, 0.0))} to {seconds(span.high)})" if known else "")


def _power(point: PointResult) -> list[str]:
    watts = sum(use.power_w for use in point.gpus)
    joules = point.metrics.get("joules_per_output_token")
    busy = [use.busy for use in point.gpus if not math.isnan(use.busy)]
    return [
        point.load.name, str(len(point.gpus)), _known(watts, _whole),
        _known(sum(use.most_power_w for use in point.gpus), _whole),
        _known(sum(use.most_memory_bytes for use in point.gpus), gigabytes),
        share(sum(busy) / len(busy)) if busy else "-", significant(joules.value) if joules else "-",
    ]  # fmt: skip


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _known(value: float, form: Callable[[float], str]) -> str:
    return "-" if math.isnan(value) else form(value)


def _limit(measured: Measured, bench: Bench) -> Parts:
    limit, targets = measured.limit, bench.settings.targets
    assert limit is not None
    words = [
        f"{name} p{round(target.percentile * 100)} {seconds(target.seconds)}"
        for name, target in (("TTFT", targets.ttft), ("TPOT", targets.tpot))
        if target is not None
    ]
    within = f"within {' and '.join(words)}"
    if limit.requests_per_s is None:
        alone = "" if limit.trials else ": requests one by one miss them already"
        yield f"no rate keeps {' and '.join(words)}{alone}"
        return
    sure = "confirmed with fresh arrivals" if limit.confirmed else "not confirmed"
    missed = f"; {significant(limit.missed)} misses" if limit.missed is not None else ""
    goodput = significant(limit.goodput_requests_per_s or 0.0)
    yield (
        f"limit: {significant(limit.requests_per_s)} requests a second {within}, {goodput} of them good "
        f"({len(limit.trials)} trials, {sure}{missed})"
    )


def _side_by_side(bench: Bench) -> Parts:
    first, *others = bench.measured
    if any(measured.limit is not None for measured in bench.measured):
        limits = [measured.limit.requests_per_s if measured.limit else None for measured in bench.measured]
        for other, limit in zip(others, limits[1:], strict=True):
            if limit and limits[0]:
                times = significant(limit / limits[0])
                yield f"{other.endpoint.name} stands {times} times the rate of {first.endpoint.name}"
        return
    rows = []
    for other in others:
        for point, base in zip(other.points, first.points, strict=False):
            cells = [_times(ratio(point, base, name)) for name in ("output_tokens_per_s", "ttft_s_p50", "tpot_s_p50")]
            rows.append([f"{other.endpoint.name}, {point.load.name}", *cells])
    if rows:
        yield Table([f"over {first.endpoint.name}", ">tok/s", ">TTFT p50", ">TPOT p50"], rows)
        if bench.settings.repeats == 1:
            yield note("one run each: --repeat 3 tells whether a difference is more than chance")


def _times(interval: MeasuredInterval) -> str:
    if math.isnan(interval.value):
        return "-"
    return f"{interval.value:.2f}x{_within(interval)}"


def _client(bench: Bench) -> Parts:
    points = [point for measured in bench.measured for point in measured.points]
    if not points:
        return
    late = max(point.client.late_p99_s for point in points)
    lag = max(point.client.lag_p99_s for point in points)
    busy = max(point.client.busy for point in points)
    cpu = max(point.client.cpu_s_per_request for point in points)
    yield note(
        f"latencies count from when a request was due; at worst the client sent {seconds(late)} late and looked "
        f"{seconds(lag)} late (p99), {share(busy)} of a processor busy, {seconds(cpu)} of it a request"
    )
    bent = sum(point.bent for point in points)
    if bent:
        of = "" if len(points) == 1 else f" in {bent} of {len(points)} loads"
        yield f"that is enough to bend TTFT{of}: use a quieter machine, or more --workers"


def _details(measured: Measured) -> Parts:
    for point in measured.points:
        rows = [
            [name, *(_between(point.metrics[key]) if (key := f"{metric}_{at}") in point.metrics else "-"
                     for at in _STATISTICS)]
            for name, metric in _LATENCIES.items()
        ]  # fmt: skip
        how = "over repeats" if point.intervals == "student" else "by stretches of one run"
        yield Table([point.load.name, *(f">{at}" for at in _STATISTICS)], rows)
        account = point.client
        yield note(
            f"  95% intervals {how}; client: {account.senders} sender{'s' * (account.senders > 1)}, late "
            f"{seconds(account.late_p99_s)} at p99 and {seconds(account.latest_s)} at most, loop late "
            f"{seconds(account.lag_p99_s)}, {seconds(account.cpu_s_per_request)} of processor a request"
        )
        for gpu in point.gpus:
            yield note(
                f"  GPU {gpu.gpu}: {_known(gpu.power_w, _whole)} W, {_known(gpu.most_memory_bytes, gigabytes)}, "
                f"{gpu.readings} readings"
            )

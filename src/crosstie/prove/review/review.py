"""A plan against production: traffic, lengths, hit rates, throughput, latencies and money, each predicted and seen."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.progress import OnProgress, no_progress
from crosstie.prove.review.expected import Expected, expected
from crosstie.prove.review.figures import (
    FEW,
    MeasuredValue,
    ReviewFigure,
    Threshold,
    at_quantile,
    mean_seen,
    quantile_seen,
    rate_seen,
    share_seen,
)
from crosstie.prove.review.planned import Planned, lengths_of, weighted_quantile
from crosstie.prove.review.production import DAY_S, MetricTotals, Recorded, Usage

_MILLION, _HOUR_S = 1e6, 3600.0
_USUAL = 0.9
_TOLD = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Review:
    planned: Planned
    today: str
    production: Recorded
    figures: list[ReviewFigure]
    expected: Expected | None
    # What has to be known to read it.
    notes: list[str] = field(default_factory=list)

    @property
    def beyond(self) -> list[ReviewFigure]:
        return [figure for figure in self.figures if figure.verdict == "beyond"]

    @property
    def unsure(self) -> list[ReviewFigure]:
        return [figure for figure in self.figures if figure.verdict == "unsure"]

    @property
    def holds(self) -> bool:
        return not self.beyond

    def of(self, check: str) -> list[ReviewFigure]:
        return [figure for figure in self.figures if figure.check == check]


def review(
    catalog: Catalog, planned: Planned, production: Recorded, limits: Mapping[str, Threshold], today: str, *,
    metrics: MetricTotals | None = None, usage: Usage | None = None, on_progress: OnProgress = no_progress,
) -> Review:  # fmt: skip
    notes = list(_about(planned, production))
    expectation = expected(catalog, planned.fleet, production, on_progress)
    simulated = expectation if isinstance(expectation, Expected) else None
    notes += [f"nothing is expected of the fleet: {expectation}"] if isinstance(expectation, str) else expectation.notes
    figures = [
        *_traffic(planned, production, today),
        *_lengths(planned, production),
        *_hits(planned, production, metrics, notes),
        *_throughput(simulated),
        *_latencies(planned, production, simulated),
        *_kept(planned, production, metrics),
        *_money(planned, production, usage, today, notes),
        *_failures(metrics, usage),
    ]
    if not production.has_latencies:
        notes.append("the recording has no latencies of streamed answers: neither they nor throughput are told")
    elif simulated is not None and not simulated.speeds:
        notes.append("no throughput is told: the recording is hardly longer than its requests take")
    held = [replace(figure, limit=limits[figure.check]) if figure.check else figure for figure in figures]
    return Review(planned, today, production, held, simulated, notes)


def _about(planned: Planned, production: Recorded) -> Iterator[str]:
    count, span = len(production.classes), production.span_s
    if count < FEW:
        yield f"{count} requests are few: intervals are wide, and what is not beyond a limit is not known to hold"
    for name in planned.classes:
        few = len(production.rows(name))
        if few < FEW <= count:
            yield f"{name}: {few} requests, which are few"
    others = sum(name not in planned.classes for name in production.classes)
    if others:
        named = ", ".join(sorted(set(production.classes) - set(planned.classes)))
        yield f"{others:,} of {count:,} requests are of classes that the plan has not: {named}"
    if not production.whole_day:
        yield (
            f"the recording covers {_span(span)}, not a day: its traffic and cost are held against the plan's peak, "
            "not its mean"
        )


def _span(seconds: float) -> str:
    for unit, size in (("days", DAY_S), ("hours", _HOUR_S), ("minutes", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.0f} s"


def _traffic(planned: Planned, production: Recorded, today: str) -> Iterator[ReviewFigure]:
    """In the busiest hour, against the peak that the plan expects by now."""
    grown, begin = planned.growth(today), float(production.arrivals[production.busy.start])
    rates = {name: request_class.requests_per_s * grown for name, request_class in planned.classes.items()}
    seen: dict[str, MeasuredValue] = {}
    names = [*rates, *sorted(set(production.classes) - set(rates))]
    what = "requests/s" if production.span_s <= _HOUR_S else "requests/s, peak hour"
    for name in names:
        at = production.arrivals[production.rows(name, busy=True)] - begin
        seen[name] = rate_seen(at, production.busy_span_s) or MeasuredValue(0.0, None, None, 0)
        yield ReviewFigure("traffic", name, what, "1/s", rates.get(name, 0.0), seen[name])
    total = sum(measured_value.requests for measured_value in seen.values())
    if len(names) > 1:
        for name in names:
            part = share_seen(seen[name].requests, total)
            if part is not None:
                yield ReviewFigure(
                    "mix", name, "share of requests", "share", rates.get(name, 0.0) / sum(rates.values()), part
                )
    if production.whole_day:
        mean = (len(production.classes) - 1) / production.span_s
        peak = sum(measured_value.value for measured_value in seen.values())
        ratio = MeasuredValue(mean / peak, None, None, len(production.classes))
        yield ReviewFigure("", "", "mean over busiest hour", "share", planned.workload.mean_over_peak, ratio)


def _lengths(planned: Planned, production: Recorded) -> Iterator[ReviewFigure]:
    trace = production.trace
    for name, request_class in planned.classes.items():
        rows = production.rows(name)
        if not len(rows):
            continue
        inputs, outputs, weights = lengths_of(request_class)
        for what, plan, mean, seen in (
            ("prompt", inputs, request_class.input_tokens, trace.input_tokens),
            ("answer", outputs, request_class.output_tokens, trace.output_tokens),
        ):
            values = seen[rows].astype(np.float64)
            measured_value = mean_seen(values)
            assert measured_value is not None
            yield ReviewFigure("lengths", name, f"{what} tokens, mean", "tokens", mean, measured_value)
            for share in (0.5, 0.95):
                at = quantile_seen(values, share)
                assert at is not None
                yield ReviewFigure("", name, f"{what} tokens, p{share * 100:g}", "tokens",
                             weighted_quantile(plan, weights, share), at)  # fmt: skip


def _hits(
    planned: Planned, production: Recorded, metrics: MetricTotals | None, notes: list[str]
) -> Iterator[ReviewFigure]:
    trace = production.trace
    cached = trace.answers.cached_tokens if trace.answers is not None else np.full(len(trace), np.nan)
    told = not bool(np.isnan(cached).all())
    wanted = {name: planned.hit_rate(name) for name in planned.classes}
    if told:
        for name, predicted in wanted.items():
            rows = production.rows(name)
            tokens = trace.input_tokens[rows].astype(np.float64)
            seen = mean_seen(np.minimum(cached[rows], tokens) / np.maximum(tokens, 1.0), tokens)
            if seen is not None:
                yield ReviewFigure("hit-rate", name, "prompts cached", "share", predicted, _within_one(seen))
    elif metrics is not None and metrics.queried:
        total = sum(kind.requests_per_s * kind.input_tokens for kind in planned.classes.values())
        predicted = sum(
            wanted[name] * kind.requests_per_s * kind.input_tokens for name, kind in planned.classes.items()
        )
        seen = MeasuredValue(metrics.found / metrics.queried, None, None, len(production.classes))
        yield ReviewFigure("hit-rate", "", "prompts cached", "share", predicted / max(total, 1e-9), seen)
    elif any(wanted.values()):
        notes.append(
            "no engine says how many prompt tokens it had in its cache: vLLM does with "
            "--enable-prompt-tokens-details, or in its own metrics (--metrics)"
        )


def _within_one(seen: MeasuredValue) -> MeasuredValue:
    return replace(seen, low=None if seen.low is None else max(seen.low, 0.0),
                   high=None if seen.high is None else min(seen.high, 1.0))  # fmt: skip


def _throughput(awaited: Expected | None) -> Iterator[ReviewFigure]:
    for speed in awaited.speeds if awaited else ():
        projected, ratio = speed.projected_tokens_per_s, speed.ratio
        seen = MeasuredValue(
            speed.output_tokens_per_s, None if ratio.low is None else ratio.low * projected,
            None if ratio.high is None else ratio.high * projected, ratio.requests,
        )  # fmt: skip
        yield ReviewFigure(
            "throughput", speed.pool, "output tokens/s a replica", "tokens/s", projected, seen,
            note=f"{speed.in_flight:.3g} in flight",
        )  # fmt: skip


def _latencies(planned: Planned, production: Recorded, awaited: Expected | None) -> Iterator[ReviewFigure]:
    if awaited is None or not production.has_latencies:
        return
    for name, request_class in planned.classes.items():
        mine = awaited.counted[[awaited.classes[row] == name for row in awaited.counted]]
        before = planned.simulated.get(name)
        was = (before.ttft_s, before.tpot_s) if before else (None, None)
        for word, target, plan, seen, simulated in (
            ("TTFT", request_class.ttft, was[0], awaited.seen.ttft_s, awaited.simulated.ttft_s),
            ("TPOT", request_class.tpot, was[1], awaited.seen.tpot_s, awaited.simulated.tpot_s),
        ):
            should = np.sort(simulated[mine][~np.isnan(simulated[mine])])
            share = target.percentile if target else _USUAL
            at = quantile_seen(seen[mine], share)
            if at is None or not len(should):
                continue
            promise = f"target {target.seconds * 1e3:,.4g} ms" if target else "no target"
            yield ReviewFigure("latency", name, f"{word} p{share * 100:g}", "s", at_quantile(should, share), at,
                         planned=plan, note=promise)  # fmt: skip
            for other in _TOLD:
                told = quantile_seen(seen[mine], other)
                if other != share and told is not None:
                    yield ReviewFigure("", name, f"{word} p{other * 100:g}", "s", at_quantile(should, other), told)


def _kept(planned: Planned, production: Recorded, metrics: MetricTotals | None) -> Iterator[ReviewFigure]:
    answers = production.trace.answers
    for name, request_class in planned.classes.items():
        for word, target in (("ttft", request_class.ttft), ("tpot", request_class.tpot)):
            if target is None:
                continue
            seen = None
            if answers is not None:
                values = (answers.ttft_s if word == "ttft" else answers.tpot_s)[production.rows(name)]
                values = values[~np.isnan(values)]
                seen = share_seen(float((values <= target.seconds).sum()), float(len(values)))
            if seen is None and metrics is not None and (name, word) in metrics.targets:
                seen = share_seen(*metrics.targets[name, word])
            if seen is not None:
                what = f"{word.upper()} within {target.seconds * 1e3:,.4g} ms"
                yield ReviewFigure("targets", name, what, "share", target.percentile, seen)


def _money(
    planned: Planned, production: Recorded, usage: Usage | None, today: str, notes: list[str]
) -> Iterator[ReviewFigure]:
    """The fleet's bill over its tokens: of usage where that is a day and more, else of the recording."""
    bill = planned.fleet.usd_per_hour
    mean = planned.plan.usd_per_million_tokens.usd_per_million / planned.growth(today)
    trace = production.trace
    if usage is not None and usage.hours:
        whole, counts = usage.span_s >= 0.95 * DAY_S, usage.sums
        tokens = np.array([float(hour.input_tokens + hour.output_tokens) for hour in usage.hours])
        span_s, requests = usage.span_s, counts.requests
        if not whole:
            notes.append(f"usage covers {_span(span_s)}, not a day: its cost is held against the plan's peak")
        if counts.usd and tokens.sum():
            told = MeasuredValue(counts.usd / float(tokens.sum()) * _MILLION, None, None, requests)
            yield ReviewFigure("", "", "$/M tokens, charged", "usd", None, told)
    else:
        whole, span_s, requests = production.whole_day, production.span_s, len(production.classes)
        parts = min(20, len(trace) // 2)
        both = trace.input_tokens + trace.output_tokens
        tokens = np.histogram(production.arrivals, parts, (0.0, span_s), weights=both)[0].astype(np.float64)
    predicted = mean if whole else mean * planned.workload.mean_over_peak
    per_s = mean_seen(tokens)
    if per_s is None or not tokens.sum():
        return
    value = bill * span_s / _HOUR_S / float(tokens.sum()) * _MILLION
    # How many tokens come is what is not sure; prices are known.
    spread = [None if end is None or end <= 0.0 else value * per_s.value / end for end in (per_s.high, per_s.low)]
    what = "$/M tokens, mean" if whole else "$/M tokens, as busy"
    yield ReviewFigure("cost", "", what, "usd", predicted, MeasuredValue(value, spread[0], spread[1], requests))


def _failures(metrics: MetricTotals | None, usage: Usage | None) -> Iterator[ReviewFigure]:
    if metrics is not None and metrics.requests:
        failed, of = metrics.failed, metrics.requests
    elif usage is not None and usage.hours:
        counts = usage.sums
        failed, of = counts.refused + counts.failed, counts.requests + counts.refused
    else:
        return
    seen = share_seen(failed, of)
    if seen is not None:
        yield ReviewFigure("failures", "", "turned away or failed", "share", 0.0, seen)

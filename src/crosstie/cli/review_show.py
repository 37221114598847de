"""What a review and a checklist say, on the screen and as `--json` prints them."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from msgspec import to_builtins
from rich.text import Text

from crosstie.core.document import picked
from crosstie.core.figures import dollars, plural, seconds, share, significant
from crosstie.core.units import HOURS_PER_MONTH
from crosstie.prove.review.again import Again, RevisedPlan
from crosstie.prove.review.checklist import Demand
from crosstie.prove.review.figures import LEVEL, ReviewFigure
from crosstie.prove.review.planned import Planned
from crosstie.prove.review.review import Review
from crosstie.web.parts import Heading, Parts, Table, closing, note

DETAILS = "percentiles, limits, and the requests behind each figure"
# The order of the answer, and what each part of it is called.
_PARTS = {
    "Traffic": ("traffic", "mix", "lengths", "hit-rate"),
    "Output tokens/s of a replica, by the model at as many in flight": ("throughput",),
    "Latencies; predicted: simulated under the requests that came": ("latency",),
    "Targets, failures and money": ("targets", "failures", "cost"),
}
_WORDS = {"holds": "holds", "beyond": "BEYOND", "unsure": "unsure", "told": ""}
_PLAN = "file name=workload.name made=saved.made"


def review_parts(review: Review, learnt: Again | None, verbose: bool) -> Parts:
    yield Text.assemble((review.planned.workload.name, "bold"), f": {_subject(review)}")
    yield _answer(review)
    yield from (f"- {_sentence(figure)}" for figure in (*review.beyond, *review.unsure))
    for title, figures in _parts(review, verbose):
        columns, rows = _table(figures, verbose)
        yield Table(columns, rows, title)
    if learnt is not None:
        yield from _again(learnt)
    yield from (f"- {note}" for note in review.notes)
    if line := review.planned.assumptions.get("line"):
        yield note(f"the plan {line}")
    if not verbose:
        yield closing(DETAILS)


def _subject(review: Review) -> str:
    planned, production = review.planned, review.production
    age = planned.age_days(review.today)
    return (
        f"plan of {planned.saved.made}, {plural(age, 'day')} old, against {len(production.classes):,} requests "
        f"over {_span(production.span_s)}"
    )


def _span(value: float) -> str:
    return f"{value / 3600:,.1f} hours" if value >= 5400 else f"{value:,.0f} s"


def _answer(review: Review) -> str:
    held = [figure for figure in review.figures if figure.verdict != "told"]
    if review.beyond:
        return f"Production is not as planned: {len(review.beyond)} of {len(held)} figures are beyond their limits"
    if review.unsure:
        return (
            f"Nothing is surely beyond its limit; of {len(held)} figures {len(review.unsure)} may be: "
            "too few requests to tell"
        )
    return f"Production is as planned: {len(held)} figures are within their limits"


def _sentence(figure: ReviewFigure) -> str:
    limit = figure.limit.words if figure.limit else ""
    sure = "" if figure.verdict == "beyond" else "; the interval reaches within, so this may be chance"
    return (
        f"{f'{figure.of}: ' if figure.of else ''}{figure.what} {_value(figure, figure.seen.value)}, predicted "
        f"{_value(figure, figure.predicted)} ({_off(figure)}, limit {limit}){sure}"
    )


def _parts(review: Review, verbose: bool) -> list[tuple[str, list[ReviewFigure]]]:
    parts: list[tuple[str, list[ReviewFigure]]] = []
    for title, checks in _PARTS.items():
        figures = [row for row in review.figures if row.check in checks or (verbose and _told_in(row) == title)]
        if figures:
            parts.append((title, figures))
    return parts


def _told_in(figure: ReviewFigure) -> str:
    """Where a figure without a limit stands."""
    if figure.check:
        return ""
    places = list(_PARTS)
    return places[2] if figure.unit == "s" else places[3] if figure.unit == "usd" else places[0]


def _table(figures: Sequence[ReviewFigure], verbose: bool) -> tuple[list[str], list[list[str]]]:
    """Throughput has its load in place of a name, and latencies have what the plan said of its own traffic."""
    loads, planned = figures[0].check == "throughput", any(row.planned is not None for row in figures)
    columns = ["pool" if loads else "of", "load" if loads else "figure"]
    columns += [">plan"] * planned + [">predicted", ">seen (95% interval)", ">off by", "verdict"]
    columns += [">limit", ">requests"] * verbose
    rows = []
    for figure in figures:
        cells = [figure.of or "all", figure.note if loads else figure.what]
        cells += [_value(figure, figure.planned)] * planned
        cells += [_value(figure, figure.predicted), _seen(figure), _off(figure), _WORDS[figure.verdict]]
        rows.append([*cells, *[figure.limit.words if figure.limit else "", f"{figure.seen.requests:,}"] * verbose])
    return columns, rows


def _seen(row: ReviewFigure) -> str:
    low, high = row.seen.low, row.seen.high
    if low is None and high is None:
        return f"{_value(row, row.seen.value)} (?)"
    value, ends = _value(row, row.seen.value), [_value(row, end) if end is not None else "?" for end in (low, high)]
    if value.endswith(" ms") and all(end.endswith(" ms") or end == "?" for end in ends):
        # The unit once.
        ends = [end.removesuffix(" ms") for end in ends]
    return f"{value} ({ends[0].removeprefix('$')}-{ends[1].removeprefix('$')})"


def _value(figure: ReviewFigure, value: float | None) -> str:
    if value is None:
        return "-"
    if figure.unit == "s":
        return seconds(value)
    if figure.unit == "share":
        return f"{value:.1%}" if 0.995 <= value < 0.9995 else share(value)
    if figure.unit == "usd":
        return dollars(value)
    return significant(value)


def _off(figure: ReviewFigure) -> str:
    off = figure.difference
    if off is None:
        return "-"
    if not math.isfinite(off):
        return "new"
    points = figure.unit == "share"
    return f"{off * 100:+.0f} pt" if points else f"{off:+.0%}"


def _again(learnt: Again) -> Parts:
    first = learnt.steps[0]
    rows = [_step(step, first) for step in learnt.steps]
    yield Table(["~planned again", "~fleet", ">$/h", ">$/M tokens", ">$/month more"], rows)
    yield from (f"- {lesson}" for lesson in learnt.learnt)


def _step(plan: RevisedPlan, first: RevisedPlan) -> list[str]:
    if plan.usd_per_hour is None:
        return [plan.what, f"no fleet: {plan.why}", "-", "-", "-"]
    fleet = ", ".join(f"{count} {name}" for name, count in plan.gpus.items())
    more = (plan.usd_per_hour - (first.usd_per_hour or 0.0)) * HOURS_PER_MONTH
    moved = "" if plan is first else f"{more:+,.0f}"
    return [plan.what, fleet, f"{plan.usd_per_hour:,.2f}", dollars(plan.usd_per_million or 0.0), moved]


def checklist_parts(planned: Planned, items: Sequence[Demand], *, boxes: bool = False) -> Parts:
    """With `boxes` to tick, as Markdown has them."""
    yield Text.assemble((planned.workload.name, "bold"), f": what to demand, by the plan of {planned.saved.made}")
    topic = ""
    for item in items:
        if item.topic != topic:
            yield Heading(item.topic)
            topic = item.topic
        yield f"- {'[ ] ' if boxes else ''}{f'{item.of}: ' if item.of else ''}{item.ask}"
        if item.run:
            yield f"    {item.run}"
        yield note(f"  why: {item.why}")
    yield (
        "Hours, names and shares that no plan knows are proposals of ours; numbers are the plan's, by its calibration. "
        "Have it read by whoever reads your contracts."
    )


def review_document(review: Review, learnt: Again | None) -> dict[str, Any]:
    planned, production = review.planned, review.production
    return {
        "plan": picked(planned, _PLAN),
        "today": review.today,
        "age_days": planned.age_days(review.today),
        "recorded": {
            "file": production.trace.file,
            "requests": len(production.classes),
            "span_s": production.span_s,
            "simulated_requests": len(review.expected.rows) if review.expected else 0,
        },
        "holds": review.holds,
        "beyond": len(review.beyond),
        "unsure": len(review.unsure),
        "level": LEVEL,
        "figures": [_figure(figure) for figure in review.figures],
        "notes": review.notes,
        "assumptions": planned.assumptions or None,
        "again": None if learnt is None else asdict(learnt),
    }


def _figure(figure: ReviewFigure) -> dict[str, Any]:
    made = picked(
        figure,
        "check of what unit predicted planned seen=seen.value interval=seen.low requests=seen.requests few=seen.few "
        "difference limit verdict note",
    )
    known = figure.difference is not None and math.isfinite(figure.difference)
    return {
        **made,
        **{key: made[key] or None for key in ("check", "of", "note")},
        "interval": [figure.seen.low, figure.seen.high],
        "difference": figure.difference if known else None,
        "limit": figure.limit and picked(figure.limit, "share side"),
    }


def checklist_document(planned: Planned, items: list[Demand]) -> dict[str, Any]:
    return {
        "plan": picked(planned, _PLAN),
        "demands": to_builtins(items),
        "assumptions": planned.assumptions or None,
    }

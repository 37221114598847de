"""What a review and a checklist say."""

import math
from collections.abc import Sequence

from rich.text import Text

from crosstie.core.figures import dollars, plural, seconds, share, significant
from crosstie.core.units import HOURS_PER_MONTH
from crosstie.prove.review.again import Again, RevisedPlan
from crosstie.prove.review.checklist import Demand
from crosstie.prove.review.figures import ReviewFigure
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


def review_parts(found: Review, learnt: Again | None, verbose: bool) -> Parts:
    yield Text.assemble((found.planned.workload.name, "bold"), f": {_subject(found)}")
    yield _answer(found)
    yield from (f"- {_sentence(one)}" for one in (*found.beyond, *found.unsure))
    for title, figures in _parts(found, verbose):
        columns, rows = _table(figures, verbose)
        yield Table(columns, rows, title)
    if learnt is not None:
        yield from _again(learnt)
    yield from (f"- {note}" for note in found.notes)
    if line := found.planned.assumptions.get("line"):
        yield note(f"the plan {line}")
    if not verbose:
        yield closing(DETAILS)


def _subject(found: Review) -> str:
    planned, production = found.planned, found.production
    age = planned.age_days(found.today)
    return (
        f"plan of {planned.saved.made}, {plural(age, 'day')} old, against {len(production.classes):,} requests "
        f"over {_span(production.span_s)}"
    )


def _span(value: float) -> str:
    return f"{value / 3600:,.1f} hours" if value >= 5400 else f"{value:,.0f} s"


def _answer(found: Review) -> str:
    held = [one for one in found.figures if one.verdict != "told"]
    if found.beyond:
        return f"Production is not as planned: {len(found.beyond)} of {len(held)} figures are beyond their limits"
    if found.unsure:
        return (
            f"Nothing is surely beyond its limit; of {len(held)} figures {len(found.unsure)} may be: "
            "too few requests to tell"
        )
    return f"Production is as planned: {len(held)} figures are within their limits"


def _sentence(one: ReviewFigure) -> str:
    limit = one.limit.words if one.limit else ""
    sure = "" if one.verdict == "beyond" else "; the interval reaches within, so this may be chance"
    return (
        f"{f'{one.of}: ' if one.of else ''}{one.what} {_value(one, one.seen.value)}, predicted "
        f"{_value(one, one.predicted)} ({_off(one)}, limit {limit}){sure}"
    )


def _parts(found: Review, verbose: bool) -> list[tuple[str, list[ReviewFigure]]]:
    parts: list[tuple[str, list[ReviewFigure]]] = []
    for title, checks in _PARTS.items():
        figures = [one for one in found.figures if one.check in checks or (verbose and _told_in(one) == title)]
        if figures:
            parts.append((title, figures))
    return parts


def _told_in(one: ReviewFigure) -> str:
    """Where a figure without a limit stands."""
    if one.check:
        return ""
    places = list(_PARTS)
    return places[2] if one.unit == "s" else places[3] if one.unit == "usd" else places[0]


def _table(figures: Sequence[ReviewFigure], verbose: bool) -> tuple[list[str], list[list[str]]]:
    """Throughput has its load in place of a name, and latencies have what the plan said of its own traffic."""
    loads, planned = figures[0].check == "throughput", any(one.planned is not None for one in figures)
    columns = ["pool" if loads else "of", "load" if loads else "figure"]
    columns += [">plan"] * planned + [">predicted", ">seen (95% interval)", ">off by", "verdict"]
    columns += [">limit", ">requests"] * verbose
    rows = []
    for one in figures:
        cells = [one.of or "all", one.note if loads else one.what]
        cells += [_value(one, one.planned)] * planned
        cells += [_value(one, one.predicted), _seen(one), _off(one), _WORDS[one.verdict]]
        rows.append([*cells, *[one.limit.words if one.limit else "", f"{one.seen.requests:,}"] * verbose])
    return columns, rows


def _seen(one: ReviewFigure) -> str:
    low, high = one.seen.low, one.seen.high
    if low is None and high is None:
        return f"{_value(one, one.seen.value)} (?)"
    value, ends = _value(one, one.seen.value), [_value(one, end) if end is not None else "?" for end in (low, high)]
    if value.endswith(" ms") and all(end.endswith(" ms") or end == "?" for end in ends):
        # The unit once.
        ends = [end.removesuffix(" ms") for end in ends]
    return f"{value} ({ends[0].removeprefix('$')}-{ends[1].removeprefix('$')})"


def _value(one: ReviewFigure, value: float | None) -> str:
    if value is None:
        return "-"
    if one.unit == "s":
        return seconds(value)
    if one.unit == "share":
        return f"{value:.1%}" if 0.995 <= value < 0.9995 else share(value)
    if one.unit == "usd":
        return dollars(value)
    return significant(value)


def _off(one: ReviewFigure) -> str:
    off = one.difference
    if off is None:
        return "-"
    if not math.isfinite(off):
        return "new"
    points = one.unit == "share"
    return f"{off * 100:+.0f} pt" if points else f"{off:+.0%}"


def _again(learnt: Again) -> Parts:
    first = learnt.steps[0]
    rows = [_step(one, first) for one in learnt.steps]
    yield Table(["~planned again", "~fleet", ">$/h", ">$/M tokens", ">$/month more"], rows)
    yield from (f"- {one}" for one in learnt.learnt)


def _step(one: RevisedPlan, first: RevisedPlan) -> list[str]:
    if one.usd_per_hour is None:
        return [one.what, f"no fleet: {one.why}", "-", "-", "-"]
    fleet = ", ".join(f"{count} {name}" for name, count in one.gpus.items())
    more = (one.usd_per_hour - (first.usd_per_hour or 0.0)) * HOURS_PER_MONTH
    moved = "" if one is first else f"{more:+,.0f}"
    return [one.what, fleet, f"{one.usd_per_hour:,.2f}", dollars(one.usd_per_million or 0.0), moved]


def checklist_parts(planned: Planned, items: Sequence[Demand], *, boxes: bool = False) -> Parts:
    """With `boxes` to tick, as Markdown has them."""
    yield Text.assemble((planned.workload.name, "bold"), f": what to demand, by the plan of {planned.saved.made}")
    topic = ""
    for one in items:
        if one.topic != topic:
            yield Heading(one.topic)
            topic = one.topic
        yield f"- {'[ ] ' if boxes else ''}{f'{one.of}: ' if one.of else ''}{one.ask}"
        if one.run:
            yield f"    {one.run}"
        yield note(f"  why: {one.why}")
    yield (
        "Hours, names and shares that no plan knows are proposals of ours; numbers are the plan's, by its calibration. "
        "Have it read by whoever reads your contracts."
    )

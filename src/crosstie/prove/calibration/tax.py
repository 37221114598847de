"""The software tax over time: what an engine's release left of the accelerator's roofline.

A result's fraction is the ideal time of its work over the measured one. Ideal is every step of the load
at the datasheet's peak rates, no host, no launches, no network. The tax is one minus the fraction.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from crosstie.catalog.library import SHIPPED, Catalog
from crosstie.catalog.releases import newest_file
from crosstie.core.progress import OnProgress, no_progress
from crosstie.prove.calibration.cases import Cases, MeasuredCase, campaign_of, release_of
from crosstie.prove.calibration.columns import UNPREDICTABLE, reason_of
from crosstie.prove.calibration.predict import Predictor, quantity_of
from crosstie.prove.calibration.results import MeasuredRow, Results

_RESULTS = "measured/results.csv.gz"
UNSTATED = "unstated"
_DATE = re.compile(r"\d{4}-\d\d(-\d\d)?")
# Whole work first: the shares of prompts and of decoding differ, and a point counts once.
_WHOLE = ("throughput", "batch", "e2e", "tpot", "ttft", "step", "decode_step", "prefill")

_WHY_ABOVE = {
    "full": "its batch is not published, and the memory model's is smaller than what ran",
    "limits": "its batch is not published, and the one predicted within the limits is smaller than what ran",
    "loop": "less work than the row says: a smaller cache format, prompts found in a prefix cache, or a wrong label",
}


def shipped_results() -> Path:
    """The measured results that come with Crosstie, or with the release of its catalog that is in force."""
    return newest_file(SHIPPED / _RESULTS, _RESULTS)


class Series(NamedTuple):
    """Results that a trend may run through. MLPerf's are tuned by hand for one load, so they stand apart."""

    accelerator: str
    engine: str
    campaign: str

    def __str__(self) -> str:
        return " ".join(part for part in self if part)


@dataclass(frozen=True)
class RooflineReading:
    """One operating point: how much of its roofline was delivered."""

    case: MeasuredCase
    row: MeasuredRow
    # What was measured: throughput, batch, request (TTFT and all later tokens), or one metric alone.
    kind: str
    # Seconds of the whole kind, or of one output token where that is throughput.
    ideal_s: float
    measured_s: float

    @property
    def fraction(self) -> float:
        return self.ideal_s / self.measured_s

    @property
    def likely(self) -> str:
        """Why a fraction above one is likely to be wrong."""
        return _WHY_ABOVE.get(self.case.method, "the row or the roofline is wrong")

    @property
    def series(self) -> Series:
        """An engine that the row does not name is not to be blamed for it, nor praised."""
        deployment = self.case.deployment
        engine = UNSTATED if "engine" in self.case.assumed else deployment.stack.id
        return Series(deployment.accelerator.id, engine, "MLPerf" if campaign_of(self.case) else "")

    @property
    def release(self) -> str:
        release = release_of(self.case)
        if campaign_of(self.case):
            return release.removeprefix("mlperf_")
        # An image's name may have no other number than that of the libraries below the engine.
        libraries = f"rocm{release}" in self.case.point["engine_version"].casefold()
        return f"ROCm {release} image" if release and libraries else release or UNSTATED

    @property
    def date(self) -> str:
        """Empty for a row that says something else there, or nothing."""
        return self.case.point["date"] if _DATE.fullmatch(self.case.point["date"]) else ""

    @property
    def conditions(self) -> tuple[object, ...]:
        """What two releases must share to be compared: a data set counts as its lengths, which vary by run."""
        case, point = self.case, self.case.point
        deployment = case.deployment
        lengths = (point["input_len"], point["output_len"]) if point["input_len"] else ("data set",)
        load = (case.method, case.clients, case.requests_per_s, case.ttft_limit_s, case.tpot_limit_s)
        return (deployment.model.id, deployment.precision.id, case.gpus, *lengths, *load, self.kind)


@dataclass(frozen=True)
class ReleaseTax:
    """A release on an accelerator. Fractions above one are impossible, so they are counted apart."""

    series: Series
    release: str
    date: str
    points: int
    median: float | None
    p10: float | None
    p90: float | None
    above_roofline: int
    models: tuple[str, ...]
    readings: tuple[RooflineReading, ...] = field(repr=False, compare=False)

    @property
    def tax(self) -> float | None:
        return None if self.median is None else 1.0 - self.median

    @cached_property
    def seconds(self) -> dict[tuple[object, ...], float]:
        """By the conditions of an operating point: repeated measurements are one."""
        repeats: dict[tuple[object, ...], list[float]] = {}
        for reading in self.readings:
            repeats.setdefault(reading.conditions, []).append(reading.measured_s)
        return {conditions: float(np.median(values)) for conditions, values in repeats.items()}


@dataclass(frozen=True)
class Trend:
    """From one release to a later one: how much faster on points that both have.

    Without such points the ratio is one of median fractions, and no speed-up.
    """

    series: Series
    first: ReleaseTax
    last: ReleaseTax
    common_points: int
    ratio: float


@dataclass(frozen=True)
class Tax:
    rows: int
    groups: list[ReleaseTax]
    trends: list[Trend]
    above_roofline: list[RooflineReading]
    # Points (or rows that are none) by the reason why they have no fraction.
    left_out: dict[str, int]

    @property
    def points(self) -> int:
        return sum(group.points + group.above_roofline for group in self.groups)


def tax(
    catalog: Catalog,
    results: Results,
    accelerators: Collection[str] = (),
    models: Collection[str] = (),
    engines: Collection[str] = (),
    on_progress: OnProgress = no_progress,
) -> Tax:
    """Fractions of all results on these accelerators, models and engines, by their ids; all where none is named."""
    left_out = Counter(row.reason for row in results.unusable)
    resolve = Cases(catalog)
    cases: list[MeasuredCase] = []
    for at, point in enumerate(results.points):
        on_progress(at, len(results.points), "measured points")
        try:
            case = resolve.of(point)
        except UNPREDICTABLE as error:
            left_out[reason_of(error)] += 1
            continue
        if case.deployment.speculation:
            left_out["speculative decoding: its roofline hangs on how many drafts were kept"] += 1
        elif case.service:
            left_out["prefill and decode apart: pools that wait for each other have no one roofline"] += 1
        elif _wanted(case, accelerators, models, engines):
            cases.append(case)
    ideal = Predictor(cases, on_progress).ideal() if cases else {}
    readings = []
    for index, case in enumerate(cases):
        reading = _reading(case, {name: column[index] for name, column in ideal.items()})
        if reading is None:
            left_out["latency under a load that the run chose: its batch is not known, and idling is no tax"] += 1
        else:
            readings.append(reading)
    groups = _groups(readings)
    above = sorted((r for r in readings if r.fraction > 1.0), key=lambda r: -r.fraction)
    return Tax(results.rows, groups, _trends(groups), above, dict(left_out.most_common()))


def _wanted(
    case: MeasuredCase, accelerators: Collection[str], models: Collection[str], engines: Collection[str]
) -> bool:
    deployment = case.deployment
    asked = (accelerators, deployment.accelerator.id), (models, deployment.model.id), (engines, deployment.stack.id)
    unnamed = bool(engines) and "engine" in case.assumed
    return not unnamed and all(not names or own in names for names, own in asked)


def _reading(case: MeasuredCase, ideal: dict[str, Any]) -> RooflineReading | None:
    """The point's fraction by the metric that covers most of its work; tails say how uneven, not how fast."""
    rows: dict[str, MeasuredRow] = {}
    for row in sorted(case.point.rows, key=lambda row: row.metric.statistic != "mean"):
        if row.metric.statistic in ("mean", "p50"):
            rows.setdefault(row.metric.kind, row)
    later = case.mean_output_tokens - 1.0

    def seconds(row: MeasuredRow) -> tuple[float, float]:
        name, factor = quantity_of(case, row.metric)
        if row.metric.kind == "throughput":
            return 1.0 / float(ideal[name]), factor / row.value
        return float(ideal[name]) * factor, row.value

    kind = next((name for name in _WHOLE if name in rows), "")
    if not kind:
        return None
    ideal_s, measured_s = seconds(rows[kind])
    if kind == "tpot" and "ttft" in rows:
        first = seconds(rows["ttft"])
        kind, ideal_s, measured_s = "request", first[0] + ideal_s * later, first[1] + measured_s * later
    reading = RooflineReading(case, rows["tpot" if kind == "request" else kind], kind, ideal_s, measured_s)
    return reading if np.isfinite(reading.fraction) else None


def _groups(readings: Sequence[RooflineReading]) -> list[ReleaseTax]:
    releases: dict[tuple[Series, str], list[RooflineReading]] = {}
    for reading in readings:
        releases.setdefault((reading.series, reading.release), []).append(reading)
    groups = [_group(series, release, own) for (series, release), own in releases.items()]
    # Undated releases come last: nobody knows where they belong.
    return sorted(
        groups, key=lambda group: (group.series.accelerator, group.date or "9999", group.series, group.release)
    )


def _group(series: Series, release: str, readings: Sequence[RooflineReading]) -> ReleaseTax:
    possible = [reading.fraction for reading in readings if reading.fraction <= 1.0]
    low, middle, high = np.quantile(possible, (0.1, 0.5, 0.9)).tolist() if possible else (None,) * 3
    return ReleaseTax(
        series, release, date=min((reading.date for reading in readings if reading.date), default=""),
        points=len(possible), median=middle, p10=low, p90=high, above_roofline=len(readings) - len(possible),
        models=tuple(sorted({reading.case.deployment.model.id for reading in readings})), readings=tuple(readings),
    )  # fmt: skip


def _trends(groups: Sequence[ReleaseTax]) -> list[Trend]:
    """First release to last; where these share no point, also the pair furthest apart that does."""
    lines: dict[Series, list[ReleaseTax]] = {}
    for group in groups:
        if group.date and group.release != UNSTATED and group.median is not None:
            lines.setdefault(group.series, []).append(group)
    made: list[Trend] = []
    for members in lines.values():
        if len(members) < 2:
            continue
        whole = _trend(members[0], members[-1])
        made.append(whole)
        if not whole.common_points:
            pairs = [(abs(_day(b.date) - _day(a.date)), _trend(a, b)) for a, b in combinations(members, 2)]
            shared = [pair for pair in pairs if pair[1].common_points]
            made += [max(shared, key=lambda pair: (pair[0], pair[1].common_points))[1]] if shared else []
    return sorted(made, key=lambda trend: trend.series)


def _day(date: str) -> int:
    return int(np.datetime64(date, "D").astype(int))


def _trend(first: ReleaseTax, last: ReleaseTax) -> Trend:
    common = common_points(first, last)
    ratios = [first.seconds[conditions] / last.seconds[conditions] for conditions in common]
    ratio = float(np.median(ratios)) if ratios else (last.median or 0.0) / (first.median or 1.0)
    return Trend(first.series, first, last, len(common), ratio)


def common_points(first: ReleaseTax, last: ReleaseTax) -> list[tuple[object, ...]]:
    return sorted(first.seconds.keys() & last.seconds.keys(), key=str)

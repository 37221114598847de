"""Predictions against measured results: coverage, errors, ranks and how often intervals hold."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import numpy as np

from crosstie.catalog.calibration import kind_of
from crosstie.catalog.library import Catalog
from crosstie.catalog.posterior import CLOCK, Posterior
from crosstie.catalog.power import tokens_verified
from crosstie.catalog.writing import csv_text
from crosstie.core.estimate import CONSTANTS, DRAFTING, METRICS as ESTIMATED, Correction
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.worlds import LEVEL
from crosstie.perf.hardware import Array
from crosstie.perf.worlds import two_piece
from crosstie.prove.calibration.cases import Cases, MeasuredCase, measured_subject
from crosstie.prove.calibration.columns import UNPREDICTABLE, reason_of
from crosstie.prove.calibration.groups import summary
from crosstie.prove.calibration.predict import BY_THE_CLOCK, QUANTITIES, Predictor, quantity_of
from crosstie.prove.calibration.results import MeasuredRow, Metric, OperatingPoint, Results, UnusableRow, read_results

# What is reported apart; a tail (p90 and beyond) is its own metric, because a mean says little about it.
METRICS = {
    "ttft": "time to first token, mean or median",
    "tpot": "time per output token after the first, mean or median",
    "throughput": "tokens per second",
    "e2e": "whole request",
    "batch": "one batch from start to end",
    "step": "mean step of a batch",
    "decode_step": "GPU work of a decode step",
    "prefill": "GPU work of a prefill",
    "hit": "share of prompt tokens in a cache",
    "energy": "joules of an output token",
    "power": "power of a GPU",
    "ttft_tail": "time to first token, p90 to p99",
    "tpot_tail": "time per output token, p90 to p99",
    "e2e_tail": "whole request, p90 to p99",
}
# A constant is moved by so much, in logarithms, to see what follows from it.
_MOVE = 0.05
_NO_INTERVAL = ("energy", "power", "hit")
# Share of the roofline where a prediction has none, as of prefill and decode apart: about the median of the others.
_ROOFLINE = 0.25
# Two results that differ by less than this are a tie.
_TIE = 1.10


@dataclass(frozen=True)
class PredictedRow:
    """One row and what was predicted for it, in seconds or tokens per second."""

    row: MeasuredRow
    case: MeasuredCase
    metric: str
    predicted: float
    low: float
    high: float
    # Share of the worlds that lie below the measurement; not a number where no world says anything.
    below: float

    @property
    def correction(self) -> Correction:
        return self.case.deployment.correction

    @property
    def error(self) -> float:
        return self.predicted / self.row.value - 1.0

    @property
    def held(self) -> bool:
        return self.low <= self.row.value <= self.high

    @property
    def has_interval(self) -> bool:
        """Means and medians only: what worlds say of a tail is not theirs to promise."""
        return self.low > 0.0 and not self.metric.endswith("_tail")

    @property
    def deviations(self) -> float:
        """How many half widths of its interval a measurement lies from the middle."""
        middle, half = 0.5 * np.log(self.low * self.high), 0.5 * np.log(self.high / self.low)
        return float(abs(np.log(self.row.value) - middle) / max(half, 1e-9))


@dataclass(frozen=True)
class Missed:
    row: MeasuredRow | UnusableRow
    reason: str
    point: OperatingPoint | None = None


@dataclass(frozen=True)
class Validation:
    """Every row of the results: with its prediction, or with the reason why there is none."""

    rows: int
    outcomes: list[PredictedRow]
    missed: list[Missed]

    @property
    def coverage(self) -> float:
        return len(self.outcomes) / self.rows if self.rows else 0.0

    @property
    def reasons(self) -> dict[str, int]:
        return dict(Counter(missed.reason for missed in self.missed).most_common())


def validate(
    catalog: Catalog,
    results: Results | str | Path | Sequence[str | Path],
    on_progress: OnProgress = no_progress,
    given: Mapping[str, str] | None = None,
) -> Validation:
    """Predicts every row of the results, files or already read, as it was measured; `document` sums it up.

    `given`: what files of benchmark tools do not say, such as the accelerator.
    """
    if not isinstance(results, Results):
        results = read_results(*([results] if isinstance(results, str | Path) else results), given=given)
    resolve = Cases(catalog)
    cases: list[MeasuredCase] = []
    missed = [Missed(row, row.reason) for row in results.unusable]
    for done, point in enumerate(results.points):
        on_progress(done, len(results.points), "operating points")
        try:
            cases.append(resolve.of(point))
        except UNPREDICTABLE as error:
            missed += [Missed(row, reason_of(error), point) for row in point.rows]
    on_progress(0, 0, f"predicting {len(cases):,} cases")
    predictor = Predictor(cases)
    columns = _columns(catalog, predictor, results) if cases else {}
    worlds = RowsInWorlds(predictor, columns, catalog.calibration.posterior, on_progress)
    outcomes = []
    for index, case in enumerate(cases):
        for row in case.point.rows:
            name, factor = quantity_of(case, row.metric)
            value = float(columns[name][index] * factor)
            if not np.isfinite(value) or value <= 0:
                missed.append(Missed(row, "the model gives no finite value", case.point))
            else:
                outcomes.append(_outcome(row, case, value, worlds.logs(row.metric, index)))
    return Validation(results.rows, outcomes, missed)


def _columns(catalog: Catalog, predictor: Predictor, results: Results) -> dict[str, Any]:
    cases = predictor.cases
    columns: dict[str, Any] = predictor.predict()
    if any(row.metric.kind in ("energy", "power") for point in results.points for row in point.rows):
        reached = predictor.ideal()["run"] / columns["run"]
        # Where requests come by the clock nobody says how many are there at once: by Little's law.
        there = columns["output_tokens_per_s"] * columns["run"] / [case.output_tokens for case in cases]
        watts = [
            catalog.power.watts(
                case.deployment.accelerator,
                share if share > 0 else _ROOFLINE,
                (by_rate if case.method in BY_THE_CLOCK else case.clients)
                * tokens_verified(case.deployment)
                / case.gpus,
            )
            for case, share, by_rate in zip(cases, reached.tolist(), there.tolist(), strict=True)
        ]
        columns["power"] = np.array(watts)
        columns["energy"] = columns["power"] * [case.gpus for case in cases] / columns["output_tokens_per_s"]
    return columns


def _outcome(row: MeasuredRow, case: MeasuredCase, predicted: float, worlds: Array | None) -> PredictedRow:
    name = row.metric.kind
    if name in ("ttft", "tpot", "e2e") and row.metric.statistic not in ("mean", "p50"):
        name += "_tail"
    low, high, below = 0.0, float("inf"), float("nan")
    if worlds is not None and name not in _NO_INTERVAL:
        low, high = (predicted * np.exp(np.quantile(worlds, [0.5 - LEVEL / 2.0, 0.5 + LEVEL / 2.0]))).tolist()
        # Between two worlds as quantiles are, so that both ends of an interval are where its level says.
        below = float(np.interp(np.log(row.value / predicted), np.sort(worlds), np.linspace(0.0, 1.0, len(worlds))))
    return PredictedRow(row, case, name, predicted, low, high, below)


def errors(outcomes: Iterable[PredictedRow]) -> dict[str, Any]:
    errors = np.array([outcome.error for outcome in outcomes])
    return summary(errors) if len(errors) else {"n": 0, "median_ape": None, "p90_ape": None, "bias": None}


def by_metric(outcomes: Sequence[PredictedRow]) -> dict[str, dict[str, Any]]:
    """Errors of each metric that occurs; the three that everybody asks for always."""
    by_name = {}
    for metric in METRICS:
        own = [outcome for outcome in outcomes if outcome.metric == metric]
        if own or metric in ("ttft", "tpot", "throughput"):
            by_name[metric] = errors(own)
    return by_name


GROUPINGS: dict[str, Callable[[PredictedRow], str]] = {
    "by_accelerator": lambda outcome: outcome.case.deployment.accelerator.id,
    "by_engine": lambda outcome: outcome.case.deployment.stack.id,
    "by_model": lambda outcome: outcome.case.deployment.model.id,
    "by_source": lambda outcome: outcome.case.point["source_id"] or "unnamed",
    "by_nearness": lambda outcome: outcome.correction.nearness,
}


def grouped(outcomes: Iterable[PredictedRow], of: Callable[[PredictedRow], str]) -> dict[str, list[PredictedRow]]:
    return {name: list(members) for name, members in groupby(sorted(outcomes, key=of), key=of)}


def interval(outcomes: Sequence[PredictedRow]) -> dict[str, Any]:
    """How many measurements the intervals hold, and how wide they are: the median of high over low."""
    own = [outcome for outcome in outcomes if outcome.has_interval]
    return {
        "level": LEVEL if own else None,
        "n": len(own),
        "inside": sum(outcome.held for outcome in own) / len(own) if own else None,
        "width": float(np.median([outcome.high / outcome.low for outcome in own])) if own else None,
    }


def intervals(outcomes: Sequence[PredictedRow], of: Callable[[PredictedRow], str]) -> dict[str, dict[str, Any]]:
    """The same for each group and metric, of those that users ask for."""
    judged = [outcome for outcome in outcomes if outcome.has_interval and outcome.metric in _WITH_INTERVALS]
    return {
        name: {
            metric: interval(rows)
            for metric in _WITH_INTERVALS
            if (rows := [outcome for outcome in own if outcome.metric == metric])
        }
        for name, own in grouped(judged, of).items()
    }


def reliability(outcomes: Sequence[PredictedRow]) -> dict[str, list[dict[str, float]]]:
    """What intervals of other levels would hold, by metric: a level that says the truth holds its own share."""
    tables = {}
    for metric in _WITH_INTERVALS:
        off = np.array([abs(row.below - 0.5) for row in outcomes if row.has_interval and row.metric == metric])
        if len(off):
            tables[metric] = [{"level": level, "inside": float(np.mean(off <= level / 2.0))} for level in _LEVELS]
    return tables


# Groups of intervals: by what they may be too wide or too narrow.
INTERVAL_GROUPS: dict[str, Callable[[PredictedRow], str]] = {
    "accelerator and engine": lambda row: f"{GROUPINGS['by_accelerator'](row)}, {GROUPINGS['by_engine'](row)}",
    "kind": lambda row: kind_of(row.case.deployment.model),
    "nearest measurement": GROUPINGS["by_nearness"],
    "source": GROUPINGS["by_source"],
}
_WITH_INTERVALS = ("tpot", "ttft", "throughput")
_LEVELS = tuple(percent / 100.0 for percent in range(10, 100, 5))
# What a row is odd from: so many half widths from the middle of its interval.
_ODD = 3.0


def odd(outcomes: Sequence[PredictedRow]) -> dict[str, Any]:
    """Sources of whose rows fewer than half lie within their intervals, and the rows that lie furthest from theirs."""
    by_source = intervals(outcomes, GROUPINGS["by_source"])
    sources = {
        name: {metric: told["inside"] for metric, told in table.items() if told["inside"] < 0.5 and told["n"] >= 10}
        for name, table in by_source.items()
    }
    far = sorted((row for row in outcomes if row.has_interval and row.deviations > _ODD), key=lambda o: -o.deviations)
    return {
        "sources": {name: table for name, table in sources.items() if table},
        "rows": [
            {"file": row.row.file, "line": row.row.line, "metric": row.metric, "measured": row.row.value,
             "low": row.low, "high": row.high}
            for row in far[:20]
        ],
    }  # fmt: skip


class RowsInWorlds:
    """Logarithms of what worlds give over what is predicted, by case and quantity; straight in the constants."""

    def __init__(
        self, predictor: Predictor, columns: Mapping[str, Any], posterior: Posterior | None,
        on_progress: OnProgress = no_progress,
    ):  # fmt: skip
        self._cases, self._posterior = predictor.cases, posterior
        self._worlds = [case.deployment.correction.worlds for case in self._cases]
        self._slopes: dict[str, Array] = {}
        if not any(self._worlds):
            return
        count = len(self._cases)
        drafts = any(case.deployment.speculation for case in self._cases)
        moved = [i for i, name in enumerate(CONSTANTS) if drafts or name not in DRAFTING]
        self._slopes = {name: np.zeros((count, len(CONSTANTS))) for name in QUANTITIES}
        for done, i in enumerate(moved):
            on_progress(done, len(moved), "how sure the predictions are")
            factors = {name: np.full(count, np.exp(_MOVE) if name == CONSTANTS[i] else 1.0) for name in CONSTANTS}
            predictor.correct(factors, more=True)
            for name, values in predictor.predict().items():
                with np.errstate(divide="ignore", invalid="ignore"):
                    slope = np.log(values / columns[name]) / _MOVE
                self._slopes[name][:, i] = np.nan_to_num(slope, posinf=0.0, neginf=0.0)
        predictor.correct({name: np.ones(count) for name in CONSTANTS}, more=True)

    def _by_the_clock(self, case: MeasuredCase, metric: str) -> float:
        """How many times as much latencies are off by where requests come when they come."""
        subject = measured_subject(case)
        scales = self._posterior.scales_of(subject.mode, subject.stack, subject.accelerator) if self._posterior else {}
        late = self._posterior.scales.get(CLOCK, {}) if self._posterior else {}
        return late[metric] / scales[metric] if late.get(metric) and scales.get(metric) else 1.0

    def logs(self, metric: Metric, index: int) -> Array | None:
        """Of a row of that case."""
        worlds, case = self._worlds[index], self._cases[index]
        name, _ = quantity_of(case, metric)
        if worlds is None or name not in self._slopes:
            return None
        off = metric.kind if metric.kind in ESTIMATED else "tpot"
        times = self._by_the_clock(case, off) if case.method in BY_THE_CLOCK else 1.0
        logs = worlds.constants @ self._slopes[name][index] + times * worlds.metrics[:, ESTIMATED.index(off)]
        drafts = case.deployment.speculation
        if drafts and off != "ttft":
            kept = two_piece(worlds.acceptance, *drafts.doubt)
            logs = logs + (kept if off == "throughput" else -kept)
        return np.asarray(logs)


@dataclass(frozen=True)
class _Ranked:
    """A point's throughput per GPU: as measured, or by Little's law from its latencies."""

    accelerator: str
    load: tuple[float, float, str]
    measured: float
    predicted: float


def rank(outcomes: Sequence[PredictedRow]) -> dict[str, Any]:
    """Pairs of different accelerators at the same model, precision and lengths: how many are ordered right.

    `alike` counts the pairs among them at the same clients, GPUs and method of measuring, which are harder.
    """
    groups: dict[tuple[Any, ...], list[_Ranked]] = {}
    for own in grouped(outcomes, lambda outcome: str(id(outcome.case.point))).values():
        ranked = _ranked(own)
        case = own[0].case
        if ranked:
            point = case.point
            key = (point["model"], point["precision"], point["input_len"], round(case.output_tokens / 25), case.method)
            groups.setdefault(key, []).append(ranked)
    counts = Counter[str]()
    for points in groups.values():
        for first, second in combinations(points, 2):
            ratio = first.measured / second.measured
            if first.accelerator != second.accelerator and not 1.0 / _TIE <= ratio <= _TIE:
                right = (ratio > 1.0) == (first.predicted > second.predicted)
                alike = first.load == second.load
                counts.update(pairs=1, correct=right, alike_pairs=alike, alike_correct=alike and right)
    return {
        "pairs": counts["pairs"],
        "correct": counts["correct"],
        "alike": {"pairs": counts["alike_pairs"], "correct": counts["alike_correct"]},
    }


def _ranked(outcomes: Sequence[PredictedRow]) -> _Ranked | None:
    case = outcomes[0].case
    rows = {outcome.metric: outcome for outcome in outcomes}
    load = (case.clients, case.gpus, case.method)
    accelerator = case.deployment.accelerator.id
    rate = next((o for o in outcomes if o.metric == "throughput" and not o.row.metric.with_input), None)
    if rate:
        share = 1.0 if rate.row.metric.per_gpu else 1.0 / case.gpus
        return _Ranked(accelerator, load, rate.row.value * share, rate.predicted * share)
    if "ttft" in rows and "tpot" in rows and case.clients:
        ttft, tpot, later = rows["ttft"], rows["tpot"], case.mean_output_tokens - 1.0
        measured = case.clients / (ttft.row.value + tpot.row.value * later) / case.gpus
        predicted = case.clients / (ttft.predicted + tpot.predicted * later) / case.gpus
        return _Ranked(accelerator, load, measured, predicted)
    return None


def document(validation: Validation) -> dict[str, Any]:
    """Coverage, errors by metric and by group, ranks and how often intervals hold: what `validate --json` prints."""
    outcomes = validation.outcomes
    return {
        "rows": validation.rows,
        "covered": len(outcomes),
        "coverage": validation.coverage,
        "uncovered": validation.reasons,
        "metrics": by_metric(outcomes),
        "rank": rank(outcomes),
        "interval": interval(outcomes),
        "intervals": {name: intervals(outcomes, of) for name, of in INTERVAL_GROUPS.items()},
        "reliability": reliability(outcomes),
        "odd": odd(outcomes),
        **{
            name: {group: by_metric(own) for group, own in grouped(outcomes, of).items()}
            for name, of in GROUPINGS.items()
        },
    }


COLUMNS = ("file", "line", "source_id", "accelerator", "num_accelerators", "model", "precision", "engine",
           "engine_version", "parallelism", "input_len", "output_len", "concurrency", "scenario", "metric", "statistic",
           "unit", "measured", "predicted", "low", "high", "error", "nearness", "points", "assumed",
           "reason")  # fmt: skip
_OF_POINT = COLUMNS[2:14]


def predictions(validation: Validation) -> str:
    """Every row of the results, predicted or not, as CSV; seconds and tokens per second."""
    lines: list[dict[str, Any]] = [*map(_line, validation.outcomes), *map(_missed_line, validation.missed)]
    lines.sort(key=lambda line: (line["file"], line["line"]))
    return csv_text(COLUMNS, lines)


def _line(outcome: PredictedRow) -> dict[str, Any]:
    case, row = outcome.case, outcome.row
    return {
        "file": row.file,
        "line": row.line,
        **{name: case.point[name] for name in _OF_POINT},
        "metric": row.metric.kind,
        "statistic": row.metric.statistic,
        "unit": {"throughput": "tok/s", "energy": "J/tok", "power": "W"}.get(row.metric.kind, "s"),
        "measured": f"{row.value:.6g}",
        "predicted": f"{outcome.predicted:.6g}",
        "low": f"{outcome.low:.6g}",
        "high": f"{outcome.high:.6g}",
        "error": f"{outcome.error:.4f}",
        "nearness": outcome.correction.nearness,
        "points": outcome.correction.points,
        "assumed": "; ".join(case.assumed),
    }


def _missed_line(missed: Missed) -> dict[str, Any]:
    line: dict[str, Any] = {"file": missed.row.file, "line": missed.row.line, "reason": missed.reason}
    if missed.point and isinstance(missed.row, MeasuredRow):
        line |= {name: missed.point[name] for name in _OF_POINT}
        line |= {"metric": missed.row.metric.kind, "measured": f"{missed.row.value:.6g}"}
    return line

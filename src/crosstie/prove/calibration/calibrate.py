"""Makes a calibration: measured results, kernels and probes in, corrections and honest spreads out."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.calibration import (
    FORMAT,
    Calibration,
    Subject,
    calibration_text,
    empty,
    points_key,
    spread_groups,
)
from crosstie.catalog.library import SHIPPED, Catalog
from crosstie.catalog.reading import text_of
from crosstie.catalog.writing import write_text
from crosstie.core.errors import BadInput
from crosstie.core.estimate import CONSTANTS, METRICS, NEARNESS, Spread
from crosstie.core.progress import OnProgress, no_progress
from crosstie.perf.hardware import Array, Mask
from crosstie.prove.calibration.cases import Case, Cases
from crosstie.prove.calibration.columns import UNPREDICTABLE
from crosstie.prove.calibration.kernels import KINDS, Kernel, read_kernels
from crosstie.prove.calibration.regression import Measurements, Regression, gather
from crosstie.prove.calibration.results import Metric, Point, Row, read_results
from crosstie.prove.calibration.validate import summary
from crosstie.prove.probe.document import Measurement, Probe, read_probe

# What the shipped calibration is made from.
SHIPPED_RESULTS = tuple(
    SHIPPED / "measured" / name for name in ("results.csv.gz", "nvidia-kernels.csv.gz", "h200-probe.json")
)
# Share of measurements that an interval is meant to hold.
LEVEL = 0.8
# Fewer errors than this say little about their spread: the wider group's is taken.
_FEWEST = 40
_FOLDS = 5
# Corrections smaller than this are left out of the file.
_NOTHING = 5e-4
_METRIC_OF = {"ttft": "ttft", "throughput": "throughput"}


@dataclass
class Inputs:
    """Everything measured, and what of it could not be used."""

    cases: list[Case] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    files: list[dict[str, str | int]] = field(default_factory=list)
    unused: Counter[str] = field(default_factory=Counter)


def read_inputs(catalog: Catalog, paths: Sequence[Path]) -> Inputs:
    """Results, tables of kernels and probes, told apart by what they hold."""
    found = Inputs()
    resolve = Cases(catalog)
    for path in paths:
        before = len(found.cases), len(found.kernels)
        if path.suffix == ".json":
            _add_probe(found, resolve, read_probe(path))
        elif _is_kernel_table(path):
            found.kernels += read_kernels(path)
        else:
            results = read_results(path)
            found.unused.update(row.reason for row in results.unusable)
            for point in results.points:
                _add_point(found, resolve, point)
        found.files.append(
            {
                "file": path.name,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:16],
                "points": len(found.cases) - before[0],
                "kernels": len(found.kernels) - before[1],
            }
        )
    if not found.cases and not found.kernels:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in found.unused.most_common(3))
        raise BadInput(f"no row of {', '.join(path.name for path in paths)} can be learnt from: {reasons or 'empty'}")
    return found


def _is_kernel_table(path: Path) -> bool:
    return {"kind", "seconds", "stack"} <= set(text_of(path)[:400].split("\n")[0].strip().split(","))


def _add_point(found: Inputs, resolve: Cases, point: Point) -> None:
    try:
        cases = resolve.of(point)
    except UNPREDICTABLE as error:
        found.unused[str(error)] += 1
        return
    if len(cases) == 1:
        found.cases += cases
    else:
        found.unused["a mixed fleet says nothing about one accelerator"] += 1


def _add_probe(found: Inputs, resolve: Cases, probe: Probe) -> None:
    accelerator = probe.provenance.accelerator
    if accelerator is None:
        raise BadInput(f"the probe of '{probe.provenance.device}' names no accelerator of the catalog")
    for measurement in probe.measurements:
        if measurement.kind in ("decode-step", "prefill-step"):
            _add_point(found, resolve, _step_point(measurement, accelerator))
        elif measurement.kind in KINDS and measurement.format in ("bf16", "fp8"):
            found.kernels.append(_probed_kernel(measurement, accelerator))
        else:
            found.unused[f"a probe's {measurement.kind} is no constant's"] += 1


def _step_point(measurement: Measurement, accelerator: str) -> Point:
    kind = "decode_step" if measurement.kind == "decode-step" else "prefill"
    row = Row("probe", 0, Metric(kind), measurement.seconds)
    conditions = {
        "accelerator": accelerator,
        "model": measurement.model or "",
        "precision": measurement.format or "bf16",
        "engine": "pytorch",
        "tp": "1",
        "input_len": str(measurement.context),
        "output_len": "1",
        "concurrency": str(measurement.batch or 1),
    }
    return Point(conditions, [row])


def _probed_kernel(measurement: Measurement, accelerator: str) -> Kernel:
    shared = set(Kernel.__struct_fields__) & set(Measurement.__struct_fields__)
    given = {name: value for name in shared if (value := getattr(measurement, name)) is not None}
    given |= {"accelerator": accelerator, "stack": "pytorch"}
    given |= {"batch": measurement.sequences or 0, "gpus": measurement.ranks or 1}
    return msgspec.convert(given, Kernel)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A calibration, and how many rows were not learnt from, by the reason."""

    calibration: Calibration
    unused: dict[str, int]

    def write(self, file: Path) -> None:
        """As `Catalog(calibration=...)`, or the file calibration.json of a catalog folder, takes it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, calibration_text(self.calibration))


def calibrate(
    results: Sequence[str | Path] = (),
    *,
    with_shipped: bool = True,
    directories: Sequence[Path] | None = None,
    on_progress: OnProgress = no_progress,
) -> Calibrated:
    """Fits the model's constants to measured results, kernel tables and documents of `crosstie probe`.

    `with_shipped`: learns from the measurements that Crosstie ships, too. `directories`: folders of the catalog beside
    the shipped one; the user's own by default. Takes minutes.
    """
    # What an earlier calibration says is no evidence, and one that cannot be read must not be in the way.
    catalog = Catalog(directories, calibration=empty())
    inputs = read_inputs(catalog, [*(SHIPPED_RESULTS if with_shipped else ()), *map(Path, results)])
    return Calibrated(learn(catalog, inputs, on_progress), dict(inputs.unused.most_common()))


def learn(catalog: Catalog, inputs: Inputs, on_progress: OnProgress = no_progress) -> Calibration:
    on_progress(0, 0, "schedules")
    evidence = gather(catalog, inputs.cases, inputs.kernels)
    if not len(evidence.logs):
        raise BadInput("no row says anything about the constants: tails and arrivals by the clock do not")
    fit = Regression(catalog, evidence)
    everything = np.ones(len(evidence.logs), dtype=bool)
    parts = fit.solve(everything, on_progress=on_progress)
    groupings = left_out_groups(evidence)
    left_out = fit.left_out(parts, *groupings.values(), on_progress=on_progress)
    errors = dict(zip(groupings, left_out, strict=True))
    rounded = {
        scope: tuple(round(float(part), 4) for part in parts[index])
        for scope, index in fit.scopes.items()
        if np.abs(parts[index]).max() > _NOTHING
    }
    found = spreads(evidence, errors)
    return Calibration(
        format=FORMAT,
        made={"by": f"crosstie {version('crosstie')} calibrate", "date": date.today().isoformat()},
        results=inputs.files,
        constants=CONSTANTS,
        scopes=rounded,
        points=dict(Counter(map(points_key, evidence.subjects[: len(inputs.cases)])).most_common()),
        level=LEVEL,
        spreads=found,
        coverage=coverage(evidence, errors, found),
        errors=error_tables(evidence, errors),
    )


def left_out_groups(evidence: Measurements) -> dict[str, NDArray[np.str_]]:
    """What is left out to learn how wrong an estimate of each nearness is; kernels go with their accelerator."""
    subjects = [evidence.subjects[i] for i in evidence.origin]
    measured = evidence.kind != "kernel"
    folds = np.array([_fold(evidence, row) for row in evidence.origin])

    def words(of: Callable[[Subject], str], kernels: bool) -> NDArray[np.str_]:
        return np.array([of(s) if kernels or own else "" for s, own in zip(subjects, measured, strict=True)])

    return {
        "model": np.where(measured, folds, ""),
        "stack": words(lambda s: s.model, kernels=False),
        "accelerator": words(lambda s: f"{s.accelerator} {s.stack}", kernels=True),
        "family": words(lambda s: s.accelerator, kernels=True),
        "nothing": words(lambda s: s.family, kernels=True),
        "release": words(lambda s: f"{s.stack} {s.release}" if s.release else "", kernels=False),
    }


def _fold(evidence: Measurements, origin: int) -> str:
    """By what the point is, so that the order of rows does not matter."""
    if origin >= len(evidence.cases):
        return ""
    point = evidence.cases[origin].point
    name = repr(sorted(point.conditions.items())).encode()
    return str(int.from_bytes(hashlib.sha256(name).digest()[:4]) % _FOLDS)


class _Error(NamedTuple):
    """A measurement that was left out: of what, and the logarithm of measured over predicted."""

    nearness: str
    subject: Subject
    metric: str
    log: float


def _left_out(evidence: Measurements, errors: dict[str, Array]) -> Iterator[_Error]:
    """Of every nearness, the errors of operating points; kernels only help."""
    metrics = _metrics(evidence)
    for nearness in NEARNESS:
        for row in np.flatnonzero(~np.isnan(errors[nearness]) & (metrics != "")):
            subject = evidence.subjects[evidence.origin[row]]
            yield _Error(nearness, subject, str(metrics[row]), -float(errors[nearness][row]))


def _metrics(evidence: Measurements) -> NDArray[np.str_]:
    """Which metric's error a row's is; none for a kernel."""
    return np.array(["" if kind == "kernel" else _METRIC_OF.get(kind, "tpot") for kind in evidence.kind])


def spreads(evidence: Measurements, errors: dict[str, Array]) -> dict[str, dict[str, Spread]]:
    """Quantiles of measured over predicted, by nearness, and by vendor and stack where there are enough."""
    tail = (1.0 - LEVEL) / 2.0
    collected: dict[tuple[str, str], list[float]] = {}
    for nearness, subject, metric, log in _left_out(evidence, errors):
        vendor = f"{nearness} / {subject.vendor}"
        for group in (nearness, vendor, f"{vendor} / {subject.stack}"):
            collected.setdefault((group, metric), []).append(log)
    found: dict[str, dict[str, Spread]] = {}
    for (group, metric), values in sorted(collected.items()):
        if len(values) >= _FEWEST or "/" not in group:
            low, high = np.quantile(values, [tail, 1.0 - tail])
            spread = Spread(low=round(float(low), 4), high=round(float(high), 4), points=len(values))
            found.setdefault(group, {})[metric] = spread
    return found


_TITLES = {
    "model": "points left out",
    "stack": "a model left out",
    "accelerator": "an accelerator under one stack left out",
    "family": "an accelerator left out",
    "nothing": "a family left out",
    "release": "a release left out",
}


def error_tables(evidence: Measurements, errors: dict[str, Array]) -> dict[str, dict[str, dict[str, float]]]:
    """Cross-validated errors: overall, by accelerator for points, and by what was left out for the rest."""
    subjects = [evidence.subjects[i] for i in evidence.origin]
    own = evidence.subjects[: len(evidence.cases)]
    names = {subject.model: case.deployment.model.id for subject, case in zip(own, evidence.cases, strict=True)}
    metrics = _metrics(evidence)
    accelerators = np.array([s.accelerator for s in subjects])
    models = np.array([names.get(s.model, s.model) for s in subjects])
    stacks = np.array([s.stack for s in subjects])
    sources = np.array([_source(evidence, row) for row in evidence.origin])
    by = {
        "model": (accelerators, stacks, models, sources),
        "stack": (models, sources),
        "family": (accelerators,),
        "release": (np.array([f"{s.stack} {s.release}" for s in subjects]),),
    }
    found: dict[str, dict[str, dict[str, float]]] = {}
    for nearness, title in _TITLES.items():
        error = errors[nearness]
        found[title] = _by_metric(metrics, error, ~np.isnan(error))
        for labels in by.get(nearness, ()):
            for name in sorted(set(labels.tolist()) - {""}):
                table = _by_metric(metrics, error, ~np.isnan(error) & (labels == name))
                if table:
                    found[f"{title}: {name}"] = table
    return found


def _source(evidence: Measurements, origin: int) -> str:
    return evidence.cases[origin].point["source_id"] if origin < len(evidence.cases) else ""


def coverage(evidence: Measurements, errors: dict[str, Array], found: dict[str, dict[str, Spread]]) -> dict[str, float]:
    """Share of the left-out measurements that their intervals hold, by nearness and vendor."""
    held: dict[str, list[bool]] = {}
    for nearness, subject, metric, log in _left_out(evidence, errors):
        spread = next(found[g][metric] for g in spread_groups(nearness, subject) if metric in found.get(g, {}))
        vendor = f"{nearness} / {subject.vendor}"
        for group in (nearness, vendor, f"{vendor} / {metric}"):
            held.setdefault(group, []).append(spread.low <= log <= spread.high)
    return {group: round(float(np.mean(inside)), 4) for group, inside in sorted(held.items())}


def _by_metric(metrics: NDArray[np.str_], error: Array, rows: Mask) -> dict[str, dict[str, float]]:
    table = {}
    for metric in METRICS:
        own = rows & (metrics == metric)
        if own.any():
            table[metric] = {name: round(value, 4) for name, value in summary(np.expm1(error[own])).items()}
    return table

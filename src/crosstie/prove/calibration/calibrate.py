"""Makes a calibration: measured results, kernels and probes in, corrections and honest spreads out."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.calibration import (
    FORMAT,
    KNOWN,
    LEVELS,
    MODE_LEVELS,
    Calibration,
    CalibrationSubject,
    Counted,
    Level,
    calibration_text,
    counted,
    empty,
    evidence as evidence_of,
    points_key,
    spread_groups,
)
from crosstie.catalog.library import SHIPPED, Catalog, update_and_user_directories, user_directories
from crosstie.catalog.reading import text_of
from crosstie.catalog.releases import measured_files
from crosstie.catalog.writing import write_text
from crosstie.core.errors import BadInput
from crosstie.core.estimate import CONSTANTS, METRICS, NEARNESS, Spread
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.version import __version__
from crosstie.perf.hardware import Array, Mask
from crosstie.prove.calibration.cases import Cases, MeasuredCase, measured_subject, release_of
from crosstie.prove.calibration.columns import UNPREDICTABLE
from crosstie.prove.calibration.frontiers import frontier_errors
from crosstie.prove.calibration.kernels import KINDS, MeasuredKernel, read_kernels
from crosstie.prove.calibration.regression import Measurements, Regression, gather
from crosstie.prove.calibration.results import MeasuredRow, Metric, OperatingPoint, read_results
from crosstie.prove.calibration.tools import is_emulated
from crosstie.prove.calibration.validate import summary
from crosstie.prove.probe.document import Measurement, Probe, is_probe, read_probe

# What the shipped calibration is made from.
SHIPPED_RESULTS = tuple(
    SHIPPED / "measured" / name
    for name in (
        "results.csv.gz",
        "results-2026-11.csv.gz",
        "nvidia-kernels.csv.gz",
        "h200-probe.json",
        "h200-verify-steps.json",
    )
)
# Share of measurements that an interval is meant to hold.
LEVEL = 0.8
# Fewer errors than this say little about their spread: the wider group's is taken.
_FEWEST = 40
# And of fewer sources than this, little about how sources differ.
_SOURCES = 3
_MODE_ROUNDS = 6
_FOLDS = 5
# Corrections smaller than this are left out of the file.
_NOTHING = 5e-4
_METRIC_OF = {"ttft": "ttft", "throughput": "throughput"}


@dataclass
class Inputs:
    """Everything measured, and what of it could not be used."""

    cases: list[MeasuredCase] = field(default_factory=list)
    kernels: list[MeasuredKernel] = field(default_factory=list)
    files: list[dict[str, str | int]] = field(default_factory=list)
    unused: Counter[str] = field(default_factory=Counter)


def read_inputs(catalog: Catalog, paths: Sequence[Path], given: Mapping[str, str] | None = None) -> Inputs:
    """Results, tables of kernels and probes, told apart by what they hold."""
    found = Inputs()
    resolve = Cases(catalog)
    for path in paths:
        before = len(found.cases), len(found.kernels)
        if path.suffix == ".json" and is_probe(text_of(path)):
            _add_probe(found, resolve, read_probe(path))
        elif path.suffix == ".json" and _is_verify_steps(path):
            for point in _verify_points(path):
                _add_point(found, resolve, point)
        elif _is_kernel_table(path):
            found.kernels += read_kernels(path)
        else:
            results = read_results(path, given=given)
            found.unused.update(row.reason for row in results.unusable)
            for point in results.points:
                _add_point(found, resolve, point)
        entry: dict[str, str | int] = {
            "file": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:16],
            "points": len(found.cases) - before[0],
            "kernels": len(found.kernels) - before[1],
        }
        if is_emulated(path, text_of(path)):
            entry["emulated"] = 1
        found.files.append(entry)
    found.cases = once(found.cases)
    if not found.cases and not found.kernels:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in found.unused.most_common(3))
        raise BadInput(f"no row of {', '.join(path.name for path in paths)} can be learnt from: {reasons or 'empty'}")
    return found


# What may differ between two runs of one configuration.
_OF_THE_RUN = frozenset(("date", "notes", "engine_version", "trust", "accelerator_raw", "metric", "unit", "value"))


def once(cases: Sequence[MeasuredCase]) -> list[MeasuredCase]:
    """Nightly repeats of one configuration under one release as one case, with the median of each metric."""
    runs: dict[tuple[object, ...], list[MeasuredCase]] = {}
    for case in cases:
        said = sorted((k, v) for k, v in case.point.conditions.items() if k not in _OF_THE_RUN)
        runs.setdefault(
            (*said, release_of(case), case.method, id(case) if not case.point["source_id"] else 0), []
        ).append(case)
    found = []
    for same in runs.values():
        rows: dict[Metric, list[MeasuredRow]] = {}
        for case in same:
            for row in case.point.rows:
                rows.setdefault(row.metric, []).append(row)
        merged = [replace(own[0], value=float(np.median([row.value for row in own]))) for own in rows.values()]
        found.append(
            replace(same[0], point=OperatingPoint(same[0].point.conditions, merged)) if len(same) > 1 else same[0]
        )
    return found


def _is_verify_steps(path: Path) -> bool:
    text = text_of(path)
    return '"queries"' in text and '"measurements"' in text


class _VerifyStep(msgspec.Struct):
    model: str
    format: str
    context: int
    batch: int
    queries: int
    seconds: float


class _VerifySteps(msgspec.Struct):
    """As benchmarks/verify_steps.py writes them."""

    machine: dict[str, object]
    measurements: list[_VerifyStep]


def _verify_points(path: Path) -> Iterator[OperatingPoint]:
    """Steps with several queries a sequence, which nobody drafted; those with one are a probe's."""
    found = msgspec.json.decode(text_of(path), type=_VerifySteps)
    for one in found.measurements:
        if one.queries > 1:
            yield _point("decode_step", one.seconds, str(found.machine["accelerator"]), one.model, one.format,
                         one.context, one.batch, spec_decode=f"ngram{one.queries - 1}")  # fmt: skip


def _is_kernel_table(path: Path) -> bool:
    return {"kind", "seconds", "stack"} <= set(text_of(path)[:400].split("\n")[0].strip().split(","))


def _add_point(found: Inputs, resolve: Cases, point: OperatingPoint) -> None:
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


def _step_point(measurement: Measurement, accelerator: str) -> OperatingPoint:
    kind = "decode_step" if measurement.kind == "decode-step" else "prefill"
    return _point(kind, measurement.seconds, accelerator, measurement.model, measurement.format, measurement.context,
                  measurement.batch)  # fmt: skip


def _point(
    kind: str, seconds: float, accelerator: str, model: str | None, format: str | None, context: int | None,
    batch: int | None, **more: str,
) -> OperatingPoint:  # fmt: skip
    """GPU work of one step of PyTorch's kernels, without host or network."""
    conditions = {
        "accelerator": accelerator,
        "model": model or "",
        "precision": format or "bf16",
        "engine": "pytorch",
        "tp": "1",
        "input_len": str(context),
        "output_len": "1",
        "concurrency": str(batch or 1),
    }
    return OperatingPoint(conditions | more, [MeasuredRow("probe", 0, Metric(kind), seconds)])


def _probed_kernel(measurement: Measurement, accelerator: str) -> MeasuredKernel:
    shared = set(MeasuredKernel.__struct_fields__) & set(Measurement.__struct_fields__)
    given = {name: value for name in shared if (value := getattr(measurement, name)) is not None}
    given |= {"accelerator": accelerator, "stack": "pytorch"}
    given |= {"batch": measurement.sequences or 0, "gpus": measurement.ranks or 1}
    return msgspec.convert(given, MeasuredKernel)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A calibration, the files that it learnt from, and how many rows it did not, by the reason."""

    calibration: Calibration
    files: list[dict[str, str | int]]
    unused: dict[str, int]

    def write(self, file: Path) -> None:
        """As `Catalog(calibration=...)`, or the file calibration.json of a catalog folder, takes it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, calibration_text(self.calibration))


def calibrate(
    results: Sequence[str | Path] = (),
    *,
    with_shipped: bool = True,
    quick: bool = False,
    directories: Sequence[Path] | None = None,
    given: Mapping[str, str] | None = None,
    on_progress: OnProgress = no_progress,
) -> Calibrated:
    """Fits the model's constants to measured results, kernel tables and documents of `crosstie probe`.

    `with_shipped`: learns from the measurements that Crosstie ships, too, or the release of the catalog in force.
    `quick`: takes the calibration that was made of those as it is, and learns what the results change of it: seconds,
    where fitting all of it again takes minutes. `directories`: folders of the catalog beside the shipped one; by
    default that release and the user's own. `given`: what files of benchmark tools do not say.
    """
    if quick:
        beside = Catalog(directories, calibration=_shipped_calibration())
        own = read_inputs(beside, [*map(Path, results)], given)
        return Calibrated(learn_beside(beside, own, on_progress), own.files, dict(own.unused.most_common()))
    # What an earlier calibration says is no evidence, and one that cannot be read must not be in the way.
    catalog = Catalog(directories, calibration=empty())
    known = measured_files(SHIPPED_RESULTS) if directories is None else SHIPPED_RESULTS
    inputs = read_inputs(catalog, [*(known if with_shipped else ()), *map(Path, results)], given)
    return Calibrated(learn(catalog, inputs, on_progress), inputs.files, dict(inputs.unused.most_common()))


def learn(catalog: Catalog, inputs: Inputs, on_progress: OnProgress = no_progress) -> Calibration:
    """Plain serving first; then what speculation, and prefill and decode apart, change beyond it."""
    on_progress(0, 0, "schedules")
    plain = [case for case in inputs.cases if not measured_subject(case).mode]
    evidence = gather(catalog, plain, inputs.kernels)
    if not len(evidence.logs):
        raise BadInput("no row says anything about the constants: tails and arrivals by the clock do not")
    fit = Regression(catalog, evidence)
    parts = fit.solve(np.ones(len(evidence.logs), dtype=bool), on_progress=on_progress)
    found = calibration_of(fit, parts, inputs.files, on_progress)
    for mode in MODE_LEVELS:
        points = [case.point for case in inputs.cases if measured_subject(case).mode == mode]
        found = learn_mode(catalog.calibrated_by(found), mode, points, on_progress)
    return found


def _shipped_calibration() -> Calibration:
    """That of the catalog in force, without the user's own, which is learnt anew."""
    own = user_directories()
    return Catalog([one for one in update_and_user_directories() if one not in own]).calibration


def learn_beside(catalog: Catalog, inputs: Inputs, on_progress: OnProgress = no_progress) -> Calibration:
    """The catalog's calibration with what a few results change of it; without any of the measurements it is made of.

    Only scopes of the accelerators that were measured move, and those that nobody has measured anything in: what others
    rest on stays as it is, so that a handful of rows cannot move the rest of the world. Intervals stay, too: forty rows
    of one machine say little about how machines differ.
    """
    found = catalog.calibration
    if found.constants != CONSTANTS:
        raise BadInput("the calibration in force is of another version of Crosstie: learn with --full")
    on_progress(0, 0, "schedules")
    learnt = False
    for mode in ("", *MODE_LEVELS):
        under = catalog.calibrated_by(found)
        resolve = Cases(under)
        points = [case.point for case in inputs.cases if measured_subject(case).mode == mode]
        kernels = [] if mode else inputs.kernels
        evidence = gather(under, [case for point in points for case in resolve.of(point)], kernels)
        if len(evidence.logs):
            found = _moved(under, evidence, mode, on_progress)
            learnt = True
    if not learnt:
        raise BadInput("no row says anything about the constants: tails and arrivals by the clock do not")
    made = {"by": f"crosstie {__version__} calibrate", "date": date.today().isoformat()}
    beside = catalog.calibration.made.get("date", "")
    return msgspec.structs.replace(
        found, made=made | {"beside": f"the calibration of {beside}"}, results=[*found.results, *inputs.files]
    )


# What `learn_beside` says of its own rows: before it, and left out of it.
BESIDE = {"before": "as predicted before", "model": "learnt, points left out", "curve": "learnt, a curve left out"}


def _moved(catalog: Catalog, evidence: Measurements, mode: str, on_progress: OnProgress) -> Calibration:
    before = catalog.calibration

    def moves(level: Level, scope: str) -> bool:
        return "accelerator" in level.words or scope not in before.scopes

    fit = Regression(catalog, evidence, MODE_LEVELS.get(mode, LEVELS), more=True, moves=moves)
    parts = fit.solve(np.ones(len(evidence.logs), dtype=bool), on_progress=on_progress)
    groups = left_out_groups(evidence)
    left_out = fit.left_out(parts, groups["model"], groups["curve"], on_progress=on_progress)
    unmoved = np.where(evidence.kind == "kernel", np.nan, fit.predict(0.0 * fit.corrections(parts)) - evidence.logs)
    metrics = _metrics(evidence)
    tables = {
        f"{title}{', ' * bool(mode)}{mode}": _by_metric(metrics, error, ~np.isnan(error))
        for title, error in zip(BESIDE.values(), (unmoved, *left_out), strict=True)
    }
    nothing = (0.0,) * len(CONSTANTS)
    scopes = {
        scope: tuple(round(was + more, 4) for was, more in zip(before.scopes.get(scope, nothing), moved, strict=True))
        for scope, moved in _rounded(fit, parts).items()
    }
    loads = {
        key: (min(low, before.loads.get(key, (low, high))[0]), max(high, before.loads.get(key, (low, high))[1]))
        for key, (low, high) in _loads(evidence).items()
    }
    return msgspec.structs.replace(
        before,
        scopes=before.scopes | scopes,
        points=dict((Counter(before.points) + Counter(_points(evidence))).most_common()),
        loads=before.loads | loads,
        errors=before.errors | {title: table for title, table in tables.items() if table},
    )


def learn_mode(
    catalog: Catalog, mode: str, points: Sequence[OperatingPoint], on_progress: OnProgress = no_progress
) -> Calibration:
    """The catalog's calibration with what these points change of it where they are alike, and nowhere else."""
    resolve = Cases(catalog)
    evidence = gather(catalog, [case for point in points for case in resolve.of(point)])
    if not len(evidence.logs):
        return catalog.calibration
    fit = Regression(catalog, evidence, MODE_LEVELS[mode], more=True)
    parts = fit.solve(np.ones(len(evidence.logs), dtype=bool), rounds=_MODE_ROUNDS, on_progress=on_progress)
    return with_mode(catalog.calibration, mode, fit, parts, on_progress)


def with_mode(
    before: Calibration, mode: str, fit: Regression, parts: Array, on_progress: OnProgress = no_progress
) -> Calibration:
    """The calibration with the parts of a mode, and what leaving things out says about their errors."""
    evidence = fit.evidence
    groupings = left_out_groups(evidence)
    errors = dict(zip(groupings, fit.left_out(parts, *groupings.values(), on_progress=on_progress), strict=True))
    misses = list(left_out_errors(evidence, errors, before.points))
    found = spreads(misses)
    return msgspec.structs.replace(
        before,
        scopes=before.scopes | _rounded(fit, parts),
        points=before.points | _points(evidence),
        loads=before.loads | _loads(evidence),
        spreads=before.spreads | found,
        coverage=before.coverage | coverage(misses, found),
        sources=tuple(sorted({*before.sources, *(subject.source for subject in evidence.subjects)} - {""})),
        errors=before.errors | _mode_errors(evidence, errors, mode),
    )


def _mode_errors(evidence: Measurements, errors: dict[str, Array], mode: str) -> dict[str, dict[str, dict[str, float]]]:
    metrics = _metrics(evidence)
    found = {
        _TITLES[grouping]: _by_metric(metrics, errors[grouping], ~np.isnan(errors[grouping]))
        for grouping in ("model", "curve", "source")
    }
    found |= frontier_errors(evidence, errors["curve"])
    return {f"{title}, {mode}": table for title, table in found.items()}


def calibration_of(
    fit: Regression, parts: Array, files: list[dict[str, str | int]], on_progress: OnProgress = no_progress
) -> Calibration:
    """The parts as they are kept in a file, with what leaving things out says about their errors."""
    evidence = fit.evidence
    groupings = left_out_groups(evidence) | {end: groups for end, (groups, _) in left_out_loads(evidence).items()}
    untold: list[Array] = []
    left_out = fit.left_out(parts, *groupings.values(), on_progress=on_progress, untold=untold)
    # Intervals are of services that are warm. The tables say what is known of a source that nobody has seen.
    errors, shown = (dict(zip(groupings, each, strict=True)) for each in (left_out, untold))
    misses = list(left_out_errors(evidence, errors))
    found = spreads(misses)
    return Calibration(
        format=FORMAT,
        made={"by": f"crosstie {__version__} calibrate", "date": date.today().isoformat()},
        results=files,
        constants=CONSTANTS,
        scopes=_rounded(fit, parts),
        points=_points(evidence),
        loads=_loads(evidence),
        load_doubt=load_doubt(evidence, errors),
        level=LEVEL,
        spreads=found,
        coverage=coverage(misses, found),
        sources=tuple(sorted({subject.source for subject in evidence.subjects} - {""})),
        errors=error_tables(evidence, shown) | frontier_errors(evidence, errors["curve"]),
    )


def _rounded(fit: Regression, parts: Array) -> dict[str, tuple[float, ...]]:
    return {
        scope: tuple(round(float(part), 4) for part in parts[index])
        for scope, index in fit.scopes.items()
        if np.abs(parts[index]).max() > _NOTHING
    }


def _points(evidence: Measurements) -> dict[str, int]:
    return dict(Counter(map(points_key, evidence.subjects[: len(evidence.cases)])).most_common())


def _loads(evidence: Measurements) -> dict[str, tuple[float, float]]:
    """By what was measured, the fewest and most requests in flight a GPU."""
    found: dict[str, list[float]] = {}
    for case, subject in zip(evidence.cases, evidence.subjects, strict=False):
        if case.clients:
            found.setdefault(points_key(subject), []).append(round(case.load, 4))
    return {key: (min(loads), max(loads)) for key, loads in found.items()}


# Loads of a configuration that are left out together to learn how errors grow beyond the measured ones: its lowest and
# its highest third, where it has at least this many.
_LOADS = 4


def left_out_loads(evidence: Measurements) -> dict[str, tuple[NDArray[np.str_], Array]]:
    """Groups of rows at the lowest and highest loads, and how many doublings each is from those that are left."""
    loads: dict[str, list[float]] = {}
    keys = [points_key(subject) for subject in evidence.subjects[: len(evidence.cases)]]
    for case, key in zip(evidence.cases, keys, strict=True):
        if case.clients and case.load not in loads.setdefault(key, []):
            loads[key].append(case.load)
    found = {}
    for end, sign in (("low loads", -1.0), ("high loads", 1.0)):
        groups, far = [""] * len(evidence.logs), np.zeros(len(evidence.logs))
        for row, origin in enumerate(evidence.origin):
            if origin >= len(keys) or not evidence.cases[origin].clients:
                continue
            ordered = sorted(sign * math.log2(load) for load in loads[keys[origin]])
            kept = ordered[: -(len(ordered) // 3) or None]
            beyond = sign * math.log2(evidence.cases[origin].load) - kept[-1]
            if len(ordered) >= _LOADS and beyond > 0.0:
                groups[row], far[row] = keys[origin], beyond
        found[end] = (np.array(groups), far)
    return found


def load_doubt(evidence: Measurements, errors: dict[str, Array]) -> dict[str, tuple[float, float]]:
    """By metric, what a doubling below and above the measured loads adds to a spread, so that it holds its share of
    rows whose loads were left out: beside what points left out among others have, and independent of that."""
    metrics, ends = _metrics(evidence), left_out_loads(evidence)
    found = {}
    for metric in METRICS:
        own = metrics == metric
        within = np.abs(errors["model"][own & ~np.isnan(errors["model"])])
        beyond = [(far[own & (far > 0.0)], errors[end][own & (far > 0.0)]) for end, (_, far) in ends.items()]
        if min(len(within), *(len(off) for _, off in beyond)) < _FEWEST:
            continue
        usual = float(np.quantile(within, LEVEL))
        needed = [np.sqrt(np.maximum(off**2 - usual**2, 0.0)) / far for far, off in beyond]
        low, high = (round(float(np.quantile(each, LEVEL)), 4) for each in needed)
        found[metric] = (low, high)
    return found


# What a curve is the same in: one configuration at all its concurrencies, whenever it was run.
_OF_A_CURVE = ("source_id", "accelerator", "num_accelerators", "model", "precision", "engine", "parallelism", "tp",
               "input_len", "output_len", "scenario", "spec_decode", "disagg")  # fmt: skip


def left_out_groups(evidence: Measurements) -> dict[str, NDArray[np.str_]]:
    """What is left out to learn how wrong an estimate of each nearness is; kernels go with their accelerator."""
    subjects = [evidence.subjects[i] for i in evidence.origin]
    measured = evidence.kind != "kernel"
    folds = np.array([_fold(evidence, row) for row in evidence.origin])
    layouts = {points_key(s).rsplit(" / ", 2)[0]: set[str]() for s in evidence.subjects[: len(evidence.cases)]}
    for s in evidence.subjects[: len(evidence.cases)]:
        layouts[points_key(s).rsplit(" / ", 2)[0]].add(points_key(s))

    def words(of: Callable[[CalibrationSubject], str], kernels: bool) -> NDArray[np.str_]:
        return np.array([of(s) if kernels or own else "" for s, own in zip(subjects, measured, strict=True)])

    def layout(subject: CalibrationSubject) -> str:
        key = points_key(subject)
        return key if len(layouts.get(key.rsplit(" / ", 2)[0], ())) > 1 else ""

    def curve(origin: int) -> str:
        if origin >= len(evidence.cases):
            return ""
        return " / ".join(evidence.cases[origin].point[column] for column in _OF_A_CURVE)

    return {
        "model": np.where(measured, folds, ""),
        "curve": np.array([curve(row) for row in evidence.origin]),
        "source": np.array([_source(evidence, row) for row in evidence.origin]),
        "layout": words(layout, kernels=False),
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


class HeldOut(NamedTuple):
    """A measurement that was left out: with what, how near the rest was, of what it is, and the logarithm of measured
    over predicted."""

    grouping: str
    nearness: str
    subject: CalibrationSubject
    source: str
    metric: str
    log: float

    def groups(self, lonely: bool) -> list[str]:
        """Of spreads that it is one of: for results of its own source, for everybody else, or for both.

        `lonely`: there is one source alone, so that nothing says how sources differ.
        """
        known, strange = self.grouping != "source", self.grouping != "curve" or lonely
        first = spread_groups(self.nearness, self.subject, known=True)
        return first[:3] * known + first[3:6] * strange


def left_out_errors(
    evidence: Measurements, errors: dict[str, Array], beside: Mapping[str, int] | None = None
) -> Iterator[HeldOut]:
    """The errors of operating points; kernels only help.

    A user's own machine is nobody's source, so what was measured of one source is left out whole, and is as near as the
    other sources' points are. Where no two sources measured alike, models, accelerators and families left out tell.
    `beside`: points that were measured besides, of other modes.
    """
    metrics = _metrics(evidence)
    sources = [_source(evidence, origin) for origin in range(len(evidence.cases))]
    own = evidence.subjects[: len(evidence.cases)]
    everywhere = Counter(map(points_key, own))
    elsewhere: dict[str, Counted] = {}
    for source in sorted(set(sources)):
        here = Counter(points_key(s) for s, name in zip(own, sources, strict=True) if name == source)
        elsewhere[source] = counted({**(beside or {}), **(everywhere - here)})
    near: dict[tuple[str, str], str] = {}

    def missed(grouping: str, nearness: Callable[[int], str]) -> Iterator[HeldOut]:
        for row in np.flatnonzero(~np.isnan(errors[grouping]) & (metrics != "")):
            origin = evidence.origin[row]
            log = -float(errors[grouping][row])
            yield HeldOut(grouping, nearness(origin), own[origin], sources[origin], str(metrics[row]), log)

    def without_its_source(origin: int) -> str:
        key = (points_key(own[origin]), sources[origin])
        if key not in near:
            near[key] = evidence_of(elsewhere[sources[origin]], own[origin])[0]
        return near[key]

    yield from missed("source", without_its_source)
    yield from missed("curve", lambda origin: "model")
    for nearness in NEARNESS:
        if nearness != "model":
            yield from missed(nearness, lambda origin, nearness=nearness: nearness)  # type: ignore[misc]


def _metrics(evidence: Measurements) -> NDArray[np.str_]:
    """Which metric's error a row's is; none for a kernel, or for a step that nobody served."""
    steps = np.array([i < len(evidence.cases) and bool(evidence.subjects[i].mode) for i in evidence.origin])
    steps &= evidence.kind == "decode_step"
    names = ["" if kind == "kernel" else _METRIC_OF.get(kind, "tpot") for kind in evidence.kind]
    return np.where(steps, "", names)


def spreads(misses: Sequence[HeldOut]) -> dict[str, dict[str, Spread]]:
    """Quantiles of measured over predicted, by nearness, and by vendor and stack where there are enough.

    For somebody whose results were not learnt from, sources count by the root of their rows and a group needs three
    of them: how sources differ is most of what such an estimate is off by. Sources left out say it best; where they
    are few, models, layouts and accelerators left out are taken in.
    """
    collected: dict[tuple[str, str], list[HeldOut]] = {}
    lonely = len({miss.source for miss in misses if miss.grouping == "source"}) < _SOURCES
    for miss in misses:
        for group in miss.groups(lonely):
            collected.setdefault((group, miss.metric), []).append(miss)
    found: dict[str, dict[str, Spread]] = {}
    for (group, metric), every in sorted(collected.items()):
        own = [miss for miss in every if miss.grouping == "source"]
        chosen = own if _enough(own) else every
        if group.startswith(KNOWN) or lonely:
            good, weights = len(chosen) >= _FEWEST, np.ones(len(chosen))
        else:
            rows = Counter(miss.source for miss in chosen)
            good, weights = _enough(chosen), np.array([rows[miss.source] ** -0.5 for miss in chosen])
        if good or "/" not in group:
            low, high = _quantiles(np.array([miss.log for miss in chosen]), weights)
            spread = Spread(low=round(low, 4), high=round(high, 4), points=len(chosen))
            found.setdefault(group, {})[metric] = spread
    return found


def _enough(misses: Sequence[HeldOut]) -> bool:
    return len(misses) >= _FEWEST and len({miss.source for miss in misses}) >= _SOURCES


def _quantiles(values: Array, weights: Array) -> tuple[float, float]:
    """Between them lies the level's share of the weight."""
    tail = (1.0 - LEVEL) / 2.0
    order = np.argsort(values, kind="stable")
    below = (np.cumsum(weights[order]) - 0.5 * weights[order]) / weights.sum()
    low, high = np.interp([tail, 1.0 - tail], below, values[order])
    return float(low), float(high)


_TITLES = {
    "model": "points left out",
    "curve": "a curve left out",
    "source": "a source left out",
    "layout": "a layout left out",
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
        "curve": (accelerators, stacks, models, sources),
        "source": (accelerators, sources),
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


def coverage(misses: Sequence[HeldOut], found: dict[str, dict[str, Spread]]) -> dict[str, float]:
    """Share of the left-out measurements that their intervals hold, by nearness and vendor.

    "a source left out" is stricter: each source's are held against intervals made from the other sources alone.
    """
    held: dict[str, list[bool]] = {}

    def count(misses: Iterable[HeldOut], spreads: dict[str, dict[str, Spread]], title: str = "") -> None:
        for miss in misses:
            groups = spread_groups(miss.nearness, miss.subject, known=miss.grouping == "curve")
            spread = next((spreads[g][miss.metric] for g in groups if miss.metric in spreads.get(g, {})), None)
            if spread is None:
                continue
            name = title or (KNOWN if miss.grouping == "curve" else "") + miss.nearness
            name = f"{miss.subject.mode}: {name}" if miss.subject.mode else name
            vendor = f"{name} / {miss.subject.vendor}"
            for group in (name, vendor, f"{vendor} / {miss.metric}"):
                held.setdefault(group, []).append(spread.low <= miss.log <= spread.high)

    count(misses, found)
    of_sources = [miss for miss in misses if miss.grouping == "source"]
    for source in sorted({miss.source for miss in of_sources}):
        others = spreads([miss for miss in misses if miss.source != source])
        count([miss for miss in of_sources if miss.source == source], others, _TITLES["source"])
    return {group: round(float(np.mean(inside)), 4) for group, inside in sorted(held.items())}


def _by_metric(metrics: NDArray[np.str_], error: Array, rows: Mask) -> dict[str, dict[str, float]]:
    table = {}
    for metric in METRICS:
        own = rows & (metrics == metric)
        if own.any():
            table[metric] = {name: round(value, 4) for name, value in summary(np.expm1(error[own])).items()}
    return table

"""Makes a calibration: measured results, kernels and probes in, corrections and honest spreads out."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from crosstie.catalog.calibration import FORMAT, MODE_LEVELS, Calibration, calibration_text, empty
from crosstie.catalog.library import SHIPPED, Catalog, update_and_user_directories, user_directories
from crosstie.catalog.posterior import CLOCK
from crosstie.catalog.reading import text_of
from crosstie.catalog.releases import measured_files
from crosstie.catalog.writing import csv_text, write_text
from crosstie.core.errors import BadInput
from crosstie.core.estimate import CONSTANTS
from crosstie.core.progress import OnProgress, no_progress
from crosstie.perf.hardware import Array
from crosstie.prove.calibration.cases import Cases, MeasuredCase, measured_subject, release_of
from crosstie.prove.calibration.columns import UNPREDICTABLE
from crosstie.prove.calibration.groups import (
    by_metric,
    frontier_errors,
    left_out_groups,
    loads_of,
    metrics_of,
    points_of,
)
from crosstie.prove.calibration.kernels import KINDS, MeasuredKernel, read_kernels
from crosstie.prove.calibration.own import NOTHING, NOTHING_LEARNT, learn_own, made_now
from crosstie.prove.calibration.predict import BY_THE_CLOCK, Predictor, quantity_of
from crosstie.prove.calibration.regression import Measurements, Regression, gather
from crosstie.prove.calibration.results import MeasuredRow, Metric, OperatingPoint, read_results
from crosstie.prove.calibration.sureness import Fitted, LearntSureness, likeliest_scale
from crosstie.prove.calibration.tools import is_emulated, is_tool_file, tool_rows
from crosstie.prove.probe.document import Measurement, Probe, is_probe, read_probe

# What the shipped calibration is made from.
SHIPPED_RESULTS = tuple(
    SHIPPED / "measured" / name
    for name in (
        "results.csv.gz",
        "results-2026-11.csv.gz",
        "h200-vllm-2026-11.csv",
        "nvidia-kernels.csv.gz",
        "h200-probe.json",
        "h200-verify-steps.json",
    )
)
# Of a user's catalog: what they have added.
_KEPT = "measured"
_MODE_ROUNDS = 6
# Fewer latencies than this say nothing about a scale of their own.
_FEWEST_LATE = 20


@dataclass
class Inputs:
    """Everything measured, and what of it could not be used."""

    cases: list[MeasuredCase] = field(default_factory=list)
    kernels: list[MeasuredKernel] = field(default_factory=list)
    files: list[dict[str, str | int]] = field(default_factory=list)
    unused: Counter[str] = field(default_factory=Counter)


def read_inputs(catalog: Catalog, paths: Sequence[Path], given: Mapping[str, str] | None = None) -> Inputs:
    """Results, tables of kernels and probes, told apart by what they hold."""
    inputs = Inputs()
    resolve = Cases(catalog)
    for path in paths:
        before = len(inputs.cases), len(inputs.kernels)
        if path.suffix == ".json" and is_probe(text_of(path)):
            _add_probe(inputs, resolve, read_probe(path))
        elif path.suffix == ".json" and _is_verify_steps(path):
            for point in _verify_points(path):
                _add_point(inputs, resolve, point)
        elif _is_kernel_table(path):
            inputs.kernels += read_kernels(path)
        else:
            results = read_results(path, given=given)
            inputs.unused.update(row.reason for row in results.unusable)
            for point in results.points:
                _add_point(inputs, resolve, point)
        entry: dict[str, str | int] = {
            "file": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:16],
            "points": len(inputs.cases) - before[0],
            "kernels": len(inputs.kernels) - before[1],
        }
        if is_emulated(path, text_of(path)):
            entry["emulated"] = 1
        inputs.files.append(entry)
    inputs.cases = once(inputs.cases)
    if not inputs.cases and not inputs.kernels:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in inputs.unused.most_common(3))
        raise BadInput(f"no row of {', '.join(path.name for path in paths)} can be learnt from: {reasons or 'empty'}")
    return inputs


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
    return [_merged(same) if len(same) > 1 else same[0] for same in runs.values()]


def _merged(same: Sequence[MeasuredCase]) -> MeasuredCase:
    rows: dict[Metric, list[MeasuredRow]] = {}
    for case in same:
        for row in case.point.rows:
            rows.setdefault(row.metric, []).append(row)
    merged = [replace(own[0], value=float(np.median([row.value for row in own]))) for own in rows.values()]
    return replace(same[0], point=OperatingPoint(same[0].point.conditions, merged))


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
    steps = msgspec.json.decode(text_of(path), type=_VerifySteps)
    for step in steps.measurements:
        if step.queries > 1:
            accelerator = str(steps.machine["accelerator"])
            yield _step_point("decode_step", step, accelerator, spec_decode=f"ngram{step.queries - 1}")


def _is_kernel_table(path: Path) -> bool:
    return {"kind", "seconds", "stack"} <= set(text_of(path)[:400].split("\n")[0].strip().split(","))


def _add_point(inputs: Inputs, resolve: Cases, point: OperatingPoint) -> None:
    try:
        case = resolve.of(point)
    except UNPREDICTABLE as error:
        inputs.unused[str(error)] += 1
        return
    if case.benchmark is None:
        inputs.cases.append(case)
    else:
        # Lengths and hits are the benchmark's, not the row's: a row that is off may say that these are.
        inputs.unused["prompts of sessions or shared beginnings are predicted, not learnt from"] += 1


def _add_probe(inputs: Inputs, resolve: Cases, probe: Probe) -> None:
    accelerator = probe.provenance.accelerator
    if accelerator is None:
        raise BadInput(f"the probe of '{probe.provenance.device}' names no accelerator of the catalog")
    for measurement in probe.measurements:
        if measurement.kind in _PROBED_STEPS:
            _add_point(inputs, resolve, _step_point(_PROBED_STEPS[measurement.kind], measurement, accelerator))
        elif measurement.kind in KINDS and measurement.format in ("bf16", "fp8"):
            inputs.kernels.append(_probed_kernel(measurement, accelerator))
        else:
            inputs.unused[f"a probe's {measurement.kind} is no constant's"] += 1


# The metric of each kind of step that a probe times.
_PROBED_STEPS = {"decode-step": "decode_step", "prefill-step": "prefill"}


def _step_point(kind: str, step: Measurement | _VerifyStep, accelerator: str, **more: str) -> OperatingPoint:
    """GPU work of one step of PyTorch's kernels, without host or network."""
    conditions = {
        "accelerator": accelerator,
        "model": step.model or "",
        "precision": step.format or "bf16",
        "engine": "pytorch",
        "tp": "1",
        "input_len": str(step.context),
        "output_len": "1",
        "concurrency": str(step.batch or 1),
    }
    return OperatingPoint(conditions | more, [MeasuredRow("probe", 0, Metric(kind), step.seconds)])


def _probed_kernel(measurement: Measurement, accelerator: str) -> MeasuredKernel:
    shared = set(MeasuredKernel.__struct_fields__) & set(Measurement.__struct_fields__)
    given = {name: value for name in shared if (value := getattr(measurement, name)) is not None}
    given |= {"accelerator": accelerator, "stack": "pytorch", "batch": measurement.sequences or 0}
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
        return Calibrated(
            learn_own(beside, own.cases, own.kernels, own.files, on_progress), own.files, dict(own.unused.most_common())
        )
    # What an earlier calibration says is no evidence, and one that cannot be read must not be in the way.
    catalog = Catalog(directories, calibration=empty())
    known = measured_files(SHIPPED_RESULTS) if directories is None else SHIPPED_RESULTS
    inputs = read_inputs(catalog, [*(known if with_shipped else ()), *map(Path, results)], given)
    return Calibrated(learn(catalog, inputs, on_progress), inputs.files, dict(inputs.unused.most_common()))


def learn(catalog: Catalog, inputs: Inputs, on_progress: OnProgress = no_progress) -> Calibration:
    """Plain serving first; then what speculation, and prefill and decode apart, change beyond it; then how sure all of
    that is."""
    on_progress(0, 0, "schedules")
    plain = [case for case in inputs.cases if not measured_subject(case).mode]
    evidence = gather(catalog, plain, inputs.kernels)
    if not len(evidence.logs):
        raise BadInput(NOTHING_LEARNT)
    fit = Regression(catalog, evidence)
    parts = fit.solve(np.ones(len(evidence.logs), dtype=bool), on_progress=on_progress)
    calibration, errors = calibration_of(fit, parts, inputs.files, on_progress)
    fits = [(evidence, errors)]
    for mode in MODE_LEVELS:
        points = [case.point for case in inputs.cases if measured_subject(case).mode == mode]
        calibration, more = learn_mode(catalog.calibrated_by(calibration), mode, points, on_progress)
        fits += more
    sure = LearntSureness(catalog, calibration, inputs.cases, inputs.kernels, fits, on_progress)
    calibration = msgspec.structs.replace(calibration, posterior=sure.posterior(), coverage=sure.coverage(TITLES))
    return _with_clock(catalog.calibrated_by(calibration), inputs.cases)


def _with_clock(catalog: Catalog, cases: Sequence[MeasuredCase]) -> Calibration:
    """With the scale of latencies under arrivals by the clock, which teach no constant: queues make them less sure."""
    calibration, resolve = catalog.calibration, Cases(catalog)
    assert calibration.posterior is not None, "a calibration that was just made knows how sure it is"
    late = [resolve.of(case.point) for case in cases if case.method in BY_THE_CLOCK]
    predicted = Predictor(late).predict() if late else {}
    scales = {}
    for metric in ("ttft", "tpot"):
        miss = [
            np.log(predicted[name][index] * factor / row.value)
            for index, case in enumerate(late)
            for row in case.point.rows
            if row.metric.kind == metric and row.metric.statistic in ("mean", "p50")
            for name, factor in (quantity_of(case, row.metric),)
        ]
        known = np.array([error for error in miss if np.isfinite(error)])
        if len(known) >= _FEWEST_LATE:
            scales[metric] = round(likeliest_scale(known, 0.0 * known), 4)
    if not scales:
        return calibration
    posterior = msgspec.structs.replace(calibration.posterior, scales=calibration.posterior.scales | {CLOCK: scales})
    return msgspec.structs.replace(calibration, posterior=posterior)


def _shipped_calibration() -> Calibration:
    """That of the catalog in force, without the user's own, which is learnt anew."""
    own = user_directories()
    return Catalog([folder for folder in update_and_user_directories() if folder not in own]).calibration


def learn_mode(
    catalog: Catalog, mode: str, points: Sequence[OperatingPoint], on_progress: OnProgress = no_progress
) -> tuple[Calibration, list[Fitted]]:
    """The catalog's calibration with what these points change of it where they are alike, and nowhere else."""
    resolve = Cases(catalog)
    evidence = gather(catalog, [resolve.of(point) for point in points])
    if not len(evidence.logs):
        return catalog.calibration, []
    fit = Regression(catalog, evidence, MODE_LEVELS[mode], more=True)
    parts = fit.solve(np.ones(len(evidence.logs), dtype=bool), rounds=_MODE_ROUNDS, on_progress=on_progress)
    groupings = left_out_groups(evidence)
    errors = dict(zip(groupings, fit.left_out(parts, *groupings.values(), on_progress=on_progress), strict=True))
    before = catalog.calibration
    calibration = msgspec.structs.replace(
        before,
        scopes=before.scopes | _rounded(fit, parts),
        points=before.points | points_of(evidence),
        loads=before.loads | loads_of(evidence),
        errors=before.errors | _mode_errors(evidence, errors, mode),
    )
    return calibration, [(evidence, errors)]


def _mode_errors(evidence: Measurements, errors: dict[str, Array], mode: str) -> dict[str, dict[str, dict[str, float]]]:
    metrics = metrics_of(evidence)
    tables = {
        TITLES[grouping]: by_metric(metrics, errors[grouping], ~np.isnan(errors[grouping]))
        for grouping in ("model", "curve", "source")
    }
    tables |= frontier_errors(evidence, errors["curve"])
    return {f"{title}, {mode}": table for title, table in tables.items()}


def calibration_of(
    fit: Regression, parts: Array, files: list[dict[str, str | int]], on_progress: OnProgress = no_progress
) -> tuple[Calibration, dict[str, Array]]:
    """The parts as they are kept in a file, with what leaving things out says about their errors."""
    evidence = fit.evidence
    groupings = left_out_groups(evidence)
    untold: list[Array] = []
    left_out = fit.left_out(parts, *groupings.values(), on_progress=on_progress, untold=untold)
    # Intervals are of services that are warm. The tables say what is known of a source that nobody has seen.
    errors, shown = (dict(zip(groupings, each, strict=True)) for each in (left_out, untold))
    calibration = Calibration(
        format=FORMAT,
        made=made_now(),
        results=files,
        constants=CONSTANTS,
        scopes=_rounded(fit, parts),
        points=points_of(evidence),
        loads=loads_of(evidence),
        errors=error_tables(evidence, shown) | frontier_errors(evidence, errors["curve"]),
    )
    return calibration, errors


def _rounded(fit: Regression, parts: Array) -> dict[str, tuple[float, ...]]:
    return {
        scope: tuple(round(float(part), 4) for part in parts[index])
        for scope, index in fit.scopes.items()
        if np.abs(parts[index]).max() > NOTHING
    }


TITLES = {
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
    metrics = metrics_of(evidence)
    accelerators = np.array([s.accelerator for s in subjects])
    models = np.array([names.get(s.model, s.model) for s in subjects])
    stacks = np.array([s.stack for s in subjects])
    sources = left_out_groups(evidence)["source"]
    by = {
        "model": (accelerators, stacks, models, sources),
        "curve": (accelerators, stacks, models, sources),
        "source": (accelerators, sources),
        "stack": (models, sources),
        "family": (accelerators,),
        "release": (np.array([f"{s.stack} {s.release}" for s in subjects]),),
    }
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for nearness, title in TITLES.items():
        error = errors[nearness]
        tables[title] = by_metric(metrics, error, ~np.isnan(error))
        for labels in by.get(nearness, ()):
            for name in sorted(set(labels.tolist()) - {""}):
                table = by_metric(metrics, error, ~np.isnan(error) & (labels == name))
                if table:
                    tables[f"{title}: {name}"] = table
    return tables


def kept_files(catalog_folder: Path, besides: Iterable[Path] = ()) -> list[Path]:
    """Results that a user has added to their catalog; one that is added again takes its own place."""
    again = {_kept_name(path) for path in besides}
    there = (catalog_folder / _KEPT).glob("*")
    return sorted(path for path in there if path.suffix in (".csv", ".json") and path.name not in again)


def keep(catalog_folder: Path, paths: Sequence[Path], given: Mapping[str, str]) -> None:
    """Adds results, so that the next calibration has them too: files of tools as tables, with what was given beside
    them, the others as they are."""
    (catalog_folder / _KEPT).mkdir(parents=True, exist_ok=True)
    for path in paths:
        text = text_of(path)
        if _is_of_a_tool(text):
            rows = list(tool_rows(path, text, given))
            text = csv_text(list(dict.fromkeys(name for row in rows for name in row)), rows)
        write_text(catalog_folder / _KEPT / _kept_name(path), text)


def _is_of_a_tool(text: str) -> bool:
    return is_tool_file(text) and not is_probe(text)


def _kept_name(path: Path) -> str:
    """A probe's document stays JSON; everything else is kept as a table."""
    text = text_of(path)
    suffix = ".json" if is_tool_file(text) and not _is_of_a_tool(text) else ".csv"
    return path.name.removesuffix(".gz").rpartition(".")[0] + suffix

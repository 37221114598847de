"""Fits the corrections of constants to measured results, with priors, and says how wrong they are.

Every constant of every scope starts at no correction with a prior width (catalog.calibration.LEVELS).
Measurements pull at the scopes that they fall in, and a scope with few of them stays near its parents:
partial pooling, in other words, or shrinkage. In terms of cells (sets of scopes that occur together)
this is Gaussian-process regression on the logarithms, solved anew around each guess because the model
is not linear; measurements far off count less (Student's t), because published tables have faults.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.calibration import LEVELS, Level, Subject, scope_of
from crosstie.catalog.library import Catalog
from crosstie.core.estimate import CONSTANTS
from crosstie.core.progress import OnProgress, no_progress
from crosstie.perf.hardware import Array, Mask
from crosstie.prove.calibration.cases import Case, measured_subject
from crosstie.prove.calibration.kernels import Kernel, KernelPredictor, subject_of_kernel
from crosstie.prove.calibration.predict import QUANTITIES, Predictor, quantity_of

# Spread of a measurement around a model that is right, as the standard deviation of its logarithm.
NOISE = {"tpot": 0.05, "ttft": 0.15, "throughput": 0.06, "batch": 0.05, "decode_step": 0.05, "prefill": 0.05,
         "kernel": 0.3}  # fmt: skip
_FREEDOM = 4.0
_STEP = 0.03
_FURTHEST_MOVE = 0.8
_SETTLED = 0.03
Rows = NDArray[np.intp]
MOST_ROUNDS = 12
_CONSTANTS = len(CONSTANTS)


@dataclass
class Measurements:
    """Measured logarithms, one a row, and where each row's prediction is found."""

    cases: Sequence[Case]
    kernels: Sequence[Kernel]
    subjects: list[Subject]
    logs: Array
    noise: Array
    kind: NDArray[np.str_]
    # Index into cases, then kernels.
    origin: Rows
    quantity: Rows
    factor: Array


def gather(catalog: Catalog, cases: Sequence[Case], kernels: Sequence[Kernel] = ()) -> Measurements:
    """One row a quantity: totals and the same per GPU are one measurement, tails are none of the constants'."""
    # Logarithm, noise, kind, origin, quantity and factor of each.
    rows: list[tuple[float, float, str, int, int, float]] = []
    for index, case in enumerate(cases):
        seen = set[str]()
        for row in case.point.rows:
            name, scale = quantity_of(case, row.metric)
            if name not in LEARNT[case.method] or name in seen or not scale:
                continue
            seen.add(name)
            noise = NOISE.get(row.metric.kind, NOISE["batch"])
            rows.append((np.log(row.value), noise, row.metric.kind, index, QUANTITIES.index(name), np.log(scale)))
    for index, kernel in enumerate(kernels, start=len(cases)):
        rows.append((np.log(kernel.seconds), NOISE["kernel"], "kernel", index, len(QUANTITIES), 0.0))
    subjects = [measured_subject(case) for case in cases]
    subjects += [subject_of_kernel(catalog, kernel) for kernel in kernels]
    columns = zip(*rows, strict=True) if rows else ((),) * 6
    return Measurements(cases, kernels, subjects, *map(np.array, columns))


# Quantities by method: what each says something about constants with.
LEARNT = {
    "loop": {"ttft_mean", "ttft_p50", "tpot", "output_tokens_per_s"},
    "batch": {"run", "output_tokens_per_s"},
    "full": {"output_tokens_per_s"},
    "limits": {"output_tokens_per_s"},
    "rate": set[str](),
    "alone": {"decode_step", "prefill"},
}


# How far a constant moves in a scope, over the level's width: rates of weights depend on their format, and
# overheads do not; spreading experts changes what is sent and how they are multiplied.
def width_of(level: Level, constant: str) -> float:
    weights = constant in ("compute", "experts", "weights")
    links = constant in ("collective", "link")
    if "layout" in level.words:
        share = 1.0 if links or constant in ("experts", "routing") else 0.4
    elif "bits" in level.words and "kind" not in level.words and "model" not in level.words:
        share = 1.0 if weights else 0.3
    elif not level.words or level.words == ("family",) or level.words == ("stack",):
        share = 1.0
    else:
        share = 0.5 if links and ("kind" in level.words or "model" in level.words) else 1.0
    return level.width * share


class Regression:
    """The evidence with its predictors; solves for any part of it."""

    def __init__(
        self, catalog: Catalog, evidence: Measurements, levels: Sequence[Level] = LEVELS,
        width: Callable[[Level, str], float] = width_of,
    ):  # fmt: skip
        self.evidence = evidence
        self.predictor = Predictor(evidence.cases)
        self.kernels = KernelPredictor(catalog, evidence.kernels)
        self.scopes: dict[str, int] = {}
        variances: list[list[float]] = []
        cells: dict[tuple[int, ...], int] = {}
        member = []
        for subject in evidence.subjects:
            found = []
            for level in levels:
                scope = scope_of(level, subject)
                if scope is None:
                    continue
                if scope not in self.scopes:
                    self.scopes[scope] = len(self.scopes)
                    variances.append([width(level, constant) ** 2 for constant in CONSTANTS])
                found.append(self.scopes[scope])
            member.append(cells.setdefault(tuple(found), len(cells)))
        self.variance = np.array(variances)
        self.belongs = np.zeros((len(cells), len(self.scopes)))
        for cell, index in cells.items():
            self.belongs[index, list(cell)] = 1.0
        # Cells of subjects, and of rows.
        self.cell: Rows = np.array(member)
        self.row_cell = self.cell[evidence.origin]
        # Prior covariance of each constant between cells: the variance of the scopes that they share.
        self.covariance = [(self.belongs * self.variance[:, i]) @ self.belongs.T for i in range(_CONSTANTS)]

    def corrections(self, parts: Array) -> Array:
        """Logarithms of the factors, one row a cell."""
        return np.asarray(self.belongs @ parts)

    def predict(self, cells: Array) -> Array:
        """Predicted logarithms of all rows."""
        count = len(self.evidence.cases)
        factors = np.exp(cells)[self.cell]
        columns = {name: factors[:, i] for i, name in enumerate(CONSTANTS)}
        self.predictor.correct({name: values[:count] for name, values in columns.items()})
        self.kernels.correct({name: values[count:] for name, values in columns.items()})
        found = self.predictor.predict()
        table = np.full((len(QUANTITIES) + 1, len(self.cell)), np.nan)
        for i, name in enumerate(QUANTITIES):
            table[i, :count] = found[name]
        table[-1, count:] = self.kernels.predict()
        return np.asarray(np.log(table[self.evidence.quantity, self.evidence.origin]) + self.evidence.factor)

    def slopes(self, cells: Array, base: Array) -> Array:
        steps = np.eye(_CONSTANTS) * _STEP
        return np.stack([(self.predict(cells + step) - base) / _STEP for step in steps], axis=1)

    def solve(
        self, used: Mask, start: Array | None = None, rounds: int = MOST_ROUNDS,
        on_progress: OnProgress = no_progress,
    ) -> Array:  # fmt: skip
        """The parts of all scopes, (scopes, constants), that the used rows make most likely."""
        parts = np.zeros((len(self.scopes), _CONSTANTS)) if start is None else start.copy()
        rows = np.flatnonzero(used)
        for done in range(rounds):
            on_progress(done, rounds, "fit, in rounds until it settles")
            around = self._around(parts, rows)
            pull: Array = np.asarray(np.linalg.solve(around.covariance, around.target), np.float64)
            change = self._parts(rows, around.slopes, pull) - parts
            furthest = float(np.abs(self.corrections(change)).max())
            parts = parts + _FURTHEST_MOVE / max(furthest, _FURTHEST_MOVE) * change
            if furthest < _SETTLED:
                break
        return parts

    def _around(self, parts: Array, rows: Rows) -> "_Linear":
        """The model taken as linear around a guess: what the rows say, and how they vary together."""
        cells = self.corrections(parts)
        base = self.predict(cells)
        slopes = self.slopes(cells, base)[rows]
        cell, noise = self.row_cell[rows], self.evidence.noise[rows]
        miss = self.evidence.logs[rows] - base[rows]
        weight = (_FREEDOM + 1.0) / (_FREEDOM + (miss / noise) ** 2) / noise**2
        together = np.zeros((len(rows), len(rows)))
        for i in range(_CONSTANTS):
            scaled = slopes[:, i]
            together += self.covariance[i][np.ix_(cell, cell)] * np.outer(scaled, scaled)
        together[np.diag_indices_from(together)] += 1.0 / weight
        return _Linear(miss + (slopes * cells[cell]).sum(axis=1), slopes, together)

    def left_out(
        self, parts: Array, *groupings: NDArray[np.str_], on_progress: OnProgress = no_progress
    ) -> list[Array]:
        """Errors, as logarithms of predicted over measured, of each group had it been left out.

        A row whose group is "" is never left out. One inverse, with the model taken as linear around the whole
        fit, gives what every group's absence would change of the parts; the model itself then predicts the group.
        """
        everything = np.arange(len(self.evidence.logs))
        around = self._around(parts, everything)
        inverse = np.linalg.inv(around.covariance)
        pull = inverse @ around.target
        found = []
        for done, grouping in enumerate(groupings):
            on_progress(done, len(groupings), "cross-validation")
            error = np.full(len(pull), np.nan)
            for name in sorted(set(grouping.tolist()) - {""}):
                group = np.flatnonzero(grouping == name)
                own = np.linalg.solve(inverse[np.ix_(group, group)], pull[group])
                lost: Array = np.asarray(inverse[:, group] @ own, np.float64)
                change = self.corrections(self._parts(everything, around.slopes, lost))
                # As far as a round of the fit would go: beyond that the tangent says nothing.
                kept = self.corrections(parts) - np.clip(change, -_FURTHEST_MOVE, _FURTHEST_MOVE)
                error[group] = (self.predict(kept) - self.evidence.logs)[group]
            found.append(error)
        return found

    def _parts(self, rows: Rows, slopes: Array, pull: Array) -> Array:
        """What the pull of rows makes of every scope's parts."""
        gathered = np.zeros((len(self.belongs), _CONSTANTS))
        np.add.at(gathered, self.row_cell[rows], slopes * pull[:, None])
        return np.asarray(self.variance * (self.belongs.T @ gathered))


class _Linear(NamedTuple):
    target: Array
    slopes: Array
    covariance: Array

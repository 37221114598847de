"""Fits the corrections of constants to measured results, with priors, and says how wrong they are.

Every constant of every scope starts at no correction with a prior width (catalog.calibration.LEVELS).
Measurements pull at the scopes that they fall in, and a scope with few of them stays near its parents:
partial pooling, in other words, or shrinkage. In terms of cells (sets of scopes that occur together)
this is Gaussian-process regression on the logarithms, solved anew around each guess because the model
is not linear; measurements far off count less (Student's t), because published tables have faults.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.calibration import LEVELS, CalibrationSubject, Level, scopes_of
from crosstie.catalog.library import Catalog
from crosstie.catalog.posterior import FREEDOM, AlikeConstants, SharedScopes, covariance
from crosstie.core.estimate import CONSTANTS
from crosstie.core.progress import OnProgress, no_progress
from crosstie.perf.hardware import Array, Mask
from crosstie.prove.calibration.cases import MeasuredCase, measured_subject
from crosstie.prove.calibration.kernels import KernelPredictor, MeasuredKernel, subject_of_kernel
from crosstie.prove.calibration.predict import QUANTITIES, Predictor, quantity_of

# Spread of a measurement around a model that is right, as the standard deviation of its logarithm.
NOISE = {"tpot": 0.05, "ttft": 0.15, "throughput": 0.06, "batch": 0.05, "decode_step": 0.05, "prefill": 0.05,
         "kernel": 0.3}  # fmt: skip
_STEP = 0.03
_FURTHEST_MOVE = 0.8
# Combinations of constants of which a cell's rows say less than this, over what is known before, are left alone.
_TOLD = 1e-3
_SETTLED = 0.03
Rows = NDArray[np.intp]
MOST_ROUNDS = 12
_CONSTANTS = len(CONSTANTS)


@dataclass
class Measurements:
    """Measured logarithms, one a row, and where each row's prediction is found."""

    cases: Sequence[MeasuredCase]
    kernels: Sequence[MeasuredKernel]
    subjects: list[CalibrationSubject]
    logs: Array
    noise: Array
    kind: NDArray[np.str_]
    # Index into cases, then kernels.
    origin: Rows
    quantity: Rows
    factor: Array


def gather(catalog: Catalog, cases: Sequence[MeasuredCase], kernels: Sequence[MeasuredKernel] = ()) -> Measurements:
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
    if not level.moves(constant):
        return 0.0
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

    def __init__(self, catalog: Catalog, evidence: Measurements, levels: Sequence[Level] = LEVELS, more: bool = False):
        """`more`: the parts are those beyond what the cases' own deployments are corrected by."""
        self.evidence, self.more = evidence, more
        self.predictor = Predictor(evidence.cases)
        self.kernels = KernelPredictor(catalog, evidence.kernels)
        self.scopes: dict[str, int] = {}
        # By scope: its level's name.
        self.levels: list[str] = []
        variances: list[list[float]] = []
        cells: dict[tuple[int, ...], int] = {}
        member = []
        for subject in evidence.subjects:
            scope_numbers = []
            for level in levels:
                for scope in scopes_of(level, subject):
                    if scope not in self.scopes:
                        self.scopes[scope] = len(self.scopes)
                        variances.append([width_of(level, constant) ** 2 for constant in CONSTANTS])
                        self.levels.append(level.name)
                    scope_numbers.append(self.scopes[scope])
            member.append(cells.setdefault(tuple(scope_numbers), len(cells)))
        self.variance = np.array(variances)
        # What is known of the kernels already, where that is gone beyond: their deployments carry no corrections.
        known = [catalog.calibration.factors(own) if more else {} for own in evidence.subjects[len(evidence.cases) :]]
        self._known = np.array([[told.get(name, 1.0) for name in CONSTANTS] for told in known]).reshape(-1, _CONSTANTS)
        self.belongs = np.zeros((len(cells), len(self.scopes)))
        for cell, index in cells.items():
            self.belongs[index, list(cell)] = 1.0
        self._shared_scopes = SharedScopes(self.belongs, self.levels)
        # Cells of subjects, and of rows.
        self.cell: Rows = np.array(member)
        self.row_cell = self.cell[evidence.origin]

    def corrections(self, parts: Array) -> Array:
        """Logarithms of the factors, one row a cell."""
        return np.asarray(self.belongs @ parts)

    def predict(self, cells: Array) -> Array:
        """Predicted logarithms of all rows."""
        return self._predict(np.exp(cells)[self.cell])

    def _predict(self, factors: Array) -> Array:
        """The same under the factors of each subject, which need not be its cell's."""
        count = len(self.evidence.cases)
        columns = {name: factors[:, i] for i, name in enumerate(CONSTANTS)}
        self.predictor.correct({name: values[:count] for name, values in columns.items()}, self.more)
        known = dict(zip(CONSTANTS, self._known.T, strict=True))
        self.kernels.correct({name: values[count:] * known[name] for name, values in columns.items()})
        predicted = self.predictor.predict()
        table = np.full((len(QUANTITIES) + 1, len(self.cell)), np.nan)
        for i, name in enumerate(QUANTITIES):
            table[i, :count] = predicted[name]
        table[-1, count:] = self.kernels.predict()
        return np.asarray(np.log(table[self.evidence.quantity, self.evidence.origin]) + self.evidence.factor)

    def slopes(self, cells: Array, base: Array) -> Array:
        """By constant; nothing for one that no scope may move."""
        slopes = np.zeros((len(base), _CONSTANTS))
        for i in np.flatnonzero(self.variance.any(axis=0)):
            slopes[:, i] = (self.predict(cells + np.eye(_CONSTANTS)[i] * _STEP) - base) / _STEP
        return slopes

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
            change = self._parts(around, pull) - parts
            furthest = float(np.abs(self.corrections(change)).max())
            parts = parts + _FURTHEST_MOVE / max(furthest, _FURTHEST_MOVE) * change
            if furthest < _SETTLED:
                break
        return parts

    def _around(self, parts: Array, rows: Rows) -> "Linear":
        return self.linear(self.tangent(parts), rows, self.evidence.noise, self.variance)

    def tangent(self, parts: Array) -> "Tangent":
        cells = self.corrections(parts)
        base = self.predict(cells)
        return Tangent(cells, base, self.slopes(cells, base))

    def linear(self, tangent: "Tangent", rows: Rows, noise: Array, variance: Array, told: float = _TOLD) -> "Linear":
        """The model taken as linear around a guess: what the rows say, and how that varies together.

        The rows of a cell say something about as many combinations of constants as there are constants, and clearly
        about fewer. Each such combination is one entry of the linear problem, with noise of one; those of which less
        is told than `told`, over what is known before, are left alone.
        """
        slopes, noise = tangent.slopes[rows], noise[rows]
        miss = self.evidence.logs[rows] - tangent.base[rows]
        weight = np.sqrt((FREEDOM + 1.0) / (FREEDOM + (miss / noise) ** 2)) / noise
        whitened = slopes * weight[:, None]
        target = (miss + (slopes * tangent.cells[self.row_cell[rows]]).sum(axis=1)) * weight
        shared = self._shared_scopes.alike(variance)
        # By cell, how far each constant may be off.
        spreads = np.sqrt(self.belongs @ variance)
        entries: list[Array] = []
        targets: list[Array] = []
        owners: list[int] = []
        # By row: its share in the entries of its cell.
        shares: dict[int, CellShare] = {}
        order = np.argsort(self.row_cell[rows], kind="stable")
        starts = np.flatnonzero(np.diff(self.row_cell[rows][order], prepend=-1))
        for own in np.split(order, starts[1:]):
            cell = int(self.row_cell[rows[own[0]]])
            spread = spreads[cell]
            left, size, right = np.linalg.svd(whitened[own] * spread, full_matrices=False)
            kept = size**2 > told
            left = left[:, kept]
            places = range(len(owners), len(owners) + left.shape[1])
            shares[cell] = CellShare(rows[own], left, target[own], weight[own], places)
            entries.append(size[kept, None] * right[kept] / np.where(spread > 0.0, spread, np.inf))
            targets.append(left.T @ target[own])
            owners += [cell] * left.shape[1]
        stacked, where = np.concatenate(entries), np.array(owners, dtype=np.intp)
        return Linear(np.concatenate(targets), stacked, covariance(stacked, where, shared), where, shares, shared)

    def left_out(
        self, parts: Array, *groupings: NDArray[np.str_], on_progress: OnProgress = no_progress,
        untold: list[Array] | None = None,
    ) -> list[Array]:  # fmt: skip
        """Errors, as logarithms of predicted over measured, of each group had it been left out.

        A row whose group is "" is never left out; rows of one subject are of one group. One inverse, with the model
        taken as linear around the whole fit, gives what every group's absence would change of the parts; the model
        itself then predicts the group. `untold` gets the same where first waves that were read off a group's own rows
        are left out with them.
        """
        around = self._around(parts, np.arange(len(self.evidence.logs)))
        inverse: Array = np.asarray(np.linalg.inv(around.covariance), np.float64)
        pull: Array = np.asarray(inverse @ around.target, np.float64)
        whole, every = self.corrections(parts), np.arange(len(self.belongs))
        whole_linear = self._corrected(around, pull, every)
        errors = []
        for done, grouping in enumerate(groupings):
            on_progress(done, len(groupings), "cross-validation")
            kept = whole[self.cell]
            told = np.ones(len(self.evidence.cases), dtype=bool)
            for name in sorted(set(grouping.tolist()) - {""}):
                out = grouping == name
                subjects = np.unique(self.evidence.origin[out])
                cells, place = np.unique(self.cell[subjects], return_inverse=True)
                without = self._corrected(around, self._without(around, inverse, pull, out), cells)
                # As far as a round of the fit would go: beyond that the tangent says nothing.
                change = np.clip(whole_linear[cells] - without, -_FURTHEST_MOVE, _FURTHEST_MOVE)
                kept[subjects] = (whole[cells] - change)[place]
                told[self._told_alone(subjects)] = False
            errors.append(self._missed(kept, grouping))
            if untold is not None:
                self.predictor.tell_first_waves(told)
                untold.append(errors[-1] if told.all() else self._missed(kept, grouping))
                self.predictor.tell_first_waves(np.ones_like(told))
        return errors

    def _missed(self, kept: Array, grouping: NDArray[np.str_]) -> Array:
        error = self._predict(np.exp(kept)) - self.evidence.logs
        return np.where(grouping == "", np.nan, error)

    def _told_alone(self, subjects: Rows) -> Rows:
        """Those of them whose first waves were read off no other case: what a rule says of such rows goes with them."""
        out = set(subjects.tolist())
        waves: dict[tuple[str, float], set[int]] = {}
        for index, case in enumerate(self.evidence.cases):
            if case.first_wave_s:
                waves.setdefault((case.point["source_id"], case.first_wave_s), set()).add(index)
        return np.array([i for own in waves.values() if own <= out for i in own], dtype=np.intp)

    def _without(self, around: "Linear", inverse: Array, pull: Array, out: Mask) -> Array:
        """What the entries pull with when these rows are not there. The entries of all other cells follow those of the
        rows' cells by the inverse."""
        cells = left_out_cells(around, inverse, pull, self.row_cell, out)
        mean = np.linalg.solve(cells.spread, cells.mean + cells.covariance @ cells.target)
        change = cells.target - cells.stay @ mean - pull[cells.entries]
        return np.asarray(pull + inverse[:, cells.entries] @ (cells.noisy @ change))

    def _corrected(self, around: "Linear", pull: Array, cells: Rows) -> Array:
        """What the pull of the entries makes of some cells' corrections."""
        corrected = np.zeros((len(cells), _CONSTANTS))
        for same in around.shared:
            told = around.entries[:, same.constants] * pull[:, None]
            corrected[:, same.constants] = same.between[np.ix_(cells, around.owners)] @ told
        return corrected

    def _parts(self, around: "Linear", pull: Array) -> Array:
        """What the pull of the entries makes of every scope's parts."""
        gathered = np.zeros((len(self.belongs), _CONSTANTS))
        np.add.at(gathered, around.owners, around.entries * pull[:, None])
        return np.asarray(self.variance * (self.belongs.T @ gathered))


class Tangent(NamedTuple):
    """The corrections of every cell, what rows are predicted with them, and by how much each constant moves that."""

    cells: Array
    base: Array
    slopes: Array


class CellShare(NamedTuple):
    """The rows of a cell, what each has in the cell's entries, and what it says; with the weight of each."""

    rows: Rows
    left: Array
    target: Array
    weight: Array
    entries: range


class Linear(NamedTuple):
    target: Array
    entries: Array
    covariance: Array
    owners: Rows
    shares: dict[int, CellShare]
    shared: list[AlikeConstants]


class LeftOutCells(NamedTuple):
    """The cells of rows that are left out.

    Given the entries of all other cells, theirs have the mean `mean` and the covariance `covariance`; `noisy` is that
    with their noise. Their own rows that stay say `target` of them, which is `stay` times the entries and noise of that
    covariance; given these too, the covariance is that of the others over `spread`.
    """

    shares: list[CellShare]
    entries: Rows
    noisy: Array
    mean: Array
    covariance: Array
    stay: Array
    target: Array
    spread: Array


def left_out_cells(linear: Linear, inverse: Array, pull: Array, row_cell: Rows, out: Mask) -> LeftOutCells:
    """`inverse`: of the covariance of the entries; `pull`: what that makes of their targets. `row_cell`: by row."""
    shares = [linear.shares[int(cell)] for cell in np.unique(row_cell[out])]
    entries = np.array([entry for share in shares for entry in share.entries], dtype=np.intp)
    lost, taken = np.zeros((len(entries), len(entries))), np.zeros(len(entries))
    begin = 0
    for share in shares:
        own, at = out[share.rows], slice(begin, begin := begin + len(share.entries))
        lost[at, at] = share.left[own].T @ share.left[own]
        taken[at] = share.left[own].T @ share.target[own]
    unit = np.eye(len(entries))
    noisy: Array = np.asarray(np.linalg.inv(inverse[np.ix_(entries, entries)]), np.float64)
    covariance, stay, target = noisy - unit, unit - lost, linear.target[entries]
    mean, spread = target - noisy @ pull[entries], unit + covariance @ stay
    return LeftOutCells(shares, entries, noisy, mean, covariance, stay, target - taken, spread)

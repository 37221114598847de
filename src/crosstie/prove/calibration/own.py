"""Own measurements: the posterior of the calibration in force, given a few rows more.

The rows say something about their own cells, and by the scopes that these share with others something about their
neighbours: a rank-k update of the posterior, which needs none of the measurements that it was made of. What nobody
knows of a machine before (who measures there, and which release) is learnt with it, so that estimates for that
machine become surer than for anybody's.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import date
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.calibration import ALL_LEVELS, HERE, Calibration, empty, points_key
from crosstie.catalog.library import Catalog
from crosstie.catalog.posterior import FREEDOM, Cells, Posterior, pack, solve_lower
from crosstie.core.errors import BadInput
from crosstie.core.estimate import CONSTANTS
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.version import __version__
from crosstie.perf.hardware import Array
from crosstie.prove.calibration.cases import Cases, MeasuredCase
from crosstie.prove.calibration.groups import by_metric, left_out_groups, loads_of, metrics_of, points_of
from crosstie.prove.calibration.kernels import MeasuredKernel
from crosstie.prove.calibration.regression import Measurements, Regression, Tangent, gather
from crosstie.prove.calibration.results import OperatingPoint
from crosstie.prove.calibration.sureness import LeftOutRows

NOTHING_LEARNT = "no row says anything about the constants: tails and arrivals by the clock do not"
_OTHER_VERSION = "the calibration in force is of another version of Crosstie: learn with --full"
# What is said of own rows: before, and left out of what was learnt.
OWN = {"before": "as predicted before", "model": "learnt, points left out", "curve": "learnt, a curve left out"}
# The model is not linear: the rows are looked at anew from where they have moved the constants to.
_ROUNDS = 3
# About half of the variance that is besides is of the machine and configuration, which is what is to be learnt here;
# the rest is of each run.
_OWN_SHARE = 0.7
# The scale of what measurements are off by counts as so many rows, and never falls below this share of itself.
_PRIOR_ROWS, _LEAST_SCALE = 2.0, 0.35
# Corrections smaller than this are left out of the file.
NOTHING = 5e-4


def made_now() -> dict[str, str]:
    return {"by": f"crosstie {__version__} calibrate", "date": date.today().isoformat()}


def learn_own(
    catalog: Catalog, cases: Sequence[MeasuredCase], kernels: Sequence[MeasuredKernel],
    files: list[dict[str, str | int]], on_progress: OnProgress = no_progress,
) -> Calibration:  # fmt: skip
    """The catalog's calibration with what a few results change of it."""
    before, known = _in_force(catalog)
    bare, evidence = _gathered(catalog, [case.point for case in cases], kernels)
    on_progress(0, _ROUNDS, "what the rows change")
    learnt = Update(bare, before, known, evidence, on_progress)
    loads = loads_of(evidence)
    for key, (low, high) in before.loads.items():
        if key in loads:
            loads[key] = min(low, loads[key][0]), max(high, loads[key][1])
    return msgspec.structs.replace(
        before,
        made=made_now() | {"beside": f"the calibration of {before.made.get('date', '')}"},
        results=[*before.results, *files],
        scopes=before.scopes | learnt.scopes(),
        points=dict((Counter(before.points) + Counter(points_of(evidence))).most_common()),
        loads=before.loads | loads,
        posterior=learnt.posterior(),
        errors=before.errors | learnt.errors(),
    )


def _in_force(catalog: Catalog) -> tuple[Calibration, Posterior]:
    before = catalog.calibration
    if before.constants != CONSTANTS or before.posterior is None:
        raise BadInput(_OTHER_VERSION)
    return before, before.posterior


def _gathered(
    catalog: Catalog, points: Sequence[OperatingPoint], kernels: Sequence[MeasuredKernel]
) -> tuple[Catalog, Measurements]:
    """The catalog without its calibration, and the points as evidence by it."""
    bare = catalog.calibrated_by(empty())
    resolve = Cases(bare)
    evidence = gather(bare, [resolve.of(point) for point in points], kernels)
    if not len(evidence.logs):
        raise BadInput(NOTHING_LEARNT)
    # As estimates have it: of today's software, but for kernels, which are no engine's gain.
    evidence.subjects = [
        subject._replace(**HERE, month="" if subject.model else subject.month) for subject in evidence.subjects
    ]
    return bare, evidence


class NewCells:
    """Own rows' cells beside those of a posterior.

    With C the covariance of what is known and K its covariance with the constants of the new cells, Q = C^-1 K is
    worked out once. Constants of new cells given what is known have the covariance G = (theirs before) - K' Q.
    """

    def __init__(self, bare: Catalog, before: Calibration, known: Posterior, evidence: Measurements):
        self.before, self.known, self.evidence = before, known, evidence
        self.fit = Regression(bare, evidence, ALL_LEVELS)
        self._variance = np.array([known.widths[level] for level in self.fit.levels]) ** 2
        self._first = np.zeros((len(self.fit.scopes), len(CONSTANTS)))
        for scope, place in self.fit.scopes.items():
            self._first[place] = before.scopes.get(scope, self._first[place])
        self._metrics = metrics_of(evidence)
        self._join()

    def _join(self) -> None:
        """The cells of both without entries of the new; Q and G."""
        old = self.known.cells
        place = {scope: index for index, scope in enumerate(old.scopes)}
        scopes, levels = list(old.scopes), list(old.levels)
        for scope, level in zip(self.fit.scopes, self.fit.levels, strict=True):
            if scope not in place:
                place[scope] = len(scopes)
                scopes.append(scope)
                levels.append(level)
        names = list(self.fit.scopes)
        members = [np.array([place[names[i]] for i in np.flatnonzero(row)], np.int16) for row in self.fit.belongs]
        self._cells = Cells(
            scopes=tuple(scopes), levels=tuple(levels), members=(*old.members, *members), owners=old.owners,
            entries=old.entries,
        )  # fmt: skip
        self._variances = self._cells.variances(self.known.widths)
        count, owners, entries = len(old.members), old.owners.astype(np.intp), old.entries.astype(np.float64)
        new, width = len(members), len(CONSTANTS)
        with_new = np.zeros((len(owners), new, width))
        among_new = np.zeros((new, width, new, width))
        shared = self._cells.shared(self._variances)
        for same in shared:
            for i in same.constants:
                with_new[:, :, i] = same.between[owners, count:] * entries[:, i : i + 1]
                among_new[:, i, :, i] = same.between[count:, count:]
        self._with_new = with_new.reshape(len(owners), new * width)
        lower = self.known.factor(shared)
        half = solve_lower(lower, self._with_new.astype(np.float32))
        self._through = solve_lower(lower, half, transposed=True).astype(np.float64)
        given = among_new.reshape(new * width, new * width) - self._with_new.T @ self._through
        self._given = 0.5 * (given + given.T)

    def _scales(self) -> Array:
        """By row: what measurements of its kind are off by besides their constants."""
        rows = zip(self.evidence.origin, self._metrics.tolist(), self.evidence.noise.tolist(), strict=True)
        return np.array([
            self.known.scales_of(subject.mode, subject.stack, subject.accelerator).get(metric, fallback)
            for origin, metric, fallback in rows
            for subject in (self.evidence.subjects[origin],)
        ])  # fmt: skip

    def _of_cells(self, slopes: Array, owners: NDArray[np.intp]) -> Array:
        """(rows, constants of all new cells): each row is of its own cell alone."""
        table = np.zeros((len(slopes), len(self.fit.belongs), len(CONSTANTS)))
        table[np.arange(len(slopes)), owners] = slopes
        return table.reshape(len(slopes), -1)

    def told(self) -> "RowsTold":
        """What rows would say, whatever they turn out to be: taken as linear around what is known."""
        cells = self.fit.corrections(self._first)
        slopes = self.fit.slopes(cells, self.fit.predict(cells))
        return RowsTold(self._of_cells(slopes, self.fit.row_cell), self._scales(), self._given)


class RowsTold(NamedTuple):
    """Of rows that may be measured: by how much each constant of all cells moves their logarithms, what they are off by
    besides; and how the constants vary together by what is known."""

    slopes: Array
    scales: Array
    given: Array

    def after(self, rows: Sequence[int]) -> "RowsTold":
        """Once these rows are measured: a rank-k update. What nobody knows yet is what they turn out to be, which the
        covariance of a linear problem does not depend on."""
        slopes = self.slopes[list(rows)]
        across = self.given @ slopes.T
        together = slopes @ across + np.diag((_OWN_SHARE * self.scales[list(rows)]) ** 2)
        less = across @ np.linalg.solve(together, across.T)
        return self._replace(given=self.given - 0.5 * (less + less.T))

    def deviations(self, rows: Sequence[int]) -> Array:
        """Standard deviations of the logarithms of these rows, by what is not known of the constants."""
        slopes = self.slopes[list(rows)]
        return np.asarray(np.sqrt(np.maximum(np.einsum("ri,ij,rj->r", slopes, self.given, slopes), 0.0)))


def rows_told(catalog: Catalog, points: Sequence[OperatingPoint]) -> tuple[RowsTold, NDArray[np.intp]]:
    """What measurements at these points, each with its rows, would tell the catalog's calibration; and the point that
    each row is of. What the rows' values are does not matter."""
    bare, evidence = _gathered(catalog, points, ())
    return NewCells(bare, *_in_force(catalog), evidence).told(), evidence.origin


class Update(NewCells, LeftOutRows):
    """The entries of a posterior, and those of own rows E beside them, whose covariance is S = E G E' + 1."""

    def __init__(
        self, bare: Catalog, before: Calibration, known: Posterior, evidence: Measurements,
        on_progress: OnProgress = no_progress,
    ):  # fmt: skip
        super().__init__(bare, before, known, evidence)
        self._groups = left_out_groups(evidence)
        self._shift = np.zeros((len(self.fit.belongs), len(CONSTANTS)))
        self.unmoved = np.zeros(0)
        self._noise = _OWN_SHARE * self._scales()
        for done in range(_ROUNDS):
            on_progress(done, _ROUNDS, "what the rows change")
            self._solve()
            if not done:
                self._doubt_odd_points()

    def _doubt_odd_points(self) -> None:
        """A point that is further off than what is known and all other points let expect counts less, as one of
        Student's t would: alone, one that is ten times off is a slip, and five that agree are a machine. What slips
        does so in all metrics of its point, which are one witness then."""
        points = self.evidence.origin
        error, sd = self.left_out(points.astype(str))
        likely = sd**2 + self._noise**2
        rarer = np.maximum((FREEDOM + error**2 / likely) / (FREEDOM + 1.0), 1.0)
        witnesses = np.where(rarer > 1.0, np.bincount(points)[points], 1.0)
        self._noise = np.sqrt(witnesses * (likely * rarer - sd**2))
        self._shift[:] = 0.0

    def measured(self) -> dict[str, dict[str, float]]:
        """What own configurations are off by once they are measured: their rows' scatter, as far as these are many."""
        predicted = self.fit.predict(self.fit.corrections(self._first) + self._shift)
        miss, scales = predicted - self.evidence.logs, self._scales()
        measured: dict[str, dict[str, float]] = {}
        keys = [points_key(subject) for subject in self.evidence.subjects]
        rows: dict[tuple[str, str], list[int]] = {}
        for row, (origin, metric) in enumerate(zip(self.evidence.origin, self._metrics.tolist(), strict=True)):
            if metric:
                rows.setdefault((keys[origin], metric), []).append(row)
        for (key, metric), own in rows.items():
            before = float(scales[own].max())
            square = (_PRIOR_ROWS * before**2 + float((miss[own] ** 2).sum())) / (_PRIOR_ROWS + len(own))
            measured.setdefault(key, {})[metric] = round(max(float(np.sqrt(square)), _LEAST_SCALE * before), 4)
        return self.known.measured | measured

    def _solve(self) -> None:
        cells = self.fit.corrections(self._first) + self._shift
        base = self.fit.predict(cells)
        if not len(self.unmoved):
            self.unmoved = base - self.evidence.logs
        # From where the known mean is.
        tangent = Tangent(self._shift, base, self.fit.slopes(cells, base))
        rows = np.arange(len(self.evidence.logs))
        self.linear = self.fit.linear(tangent, rows, self._noise, self._variance)
        self._wide = self._of_cells(self.linear.entries, self.linear.owners)
        together = self._wide @ self._given @ self._wide.T + np.eye(len(self._wide))
        self.inverse = np.asarray(np.linalg.inv(0.5 * (together + together.T)), np.float64)
        self.pull = np.asarray(self.inverse @ self.linear.target, np.float64)
        self._shift = (self._given @ (self._wide.T @ self.pull)).reshape(self._shift.shape)

    def _all_cells(self) -> Cells:
        """With the new entries."""
        old, linear = self.known.cells, self.linear
        return Cells(
            scopes=self._cells.scopes,
            levels=self._cells.levels,
            members=self._cells.members,
            owners=np.concatenate([old.owners, linear.owners + len(old.members)]).astype(np.int16),
            entries=np.concatenate([old.entries, linear.entries]).astype(np.float32),
        )

    def _old_pull(self, new: Array) -> Array:
        """What the known entries pull with, beside new ones that pull so."""
        return np.asarray(-self._through @ (self._wide.T @ new))

    def scopes(self) -> dict[str, tuple[float, ...]]:
        """All parts that moved."""
        cells, pull = self._all_cells(), np.concatenate([self._old_pull(self.pull), self.pull])
        gathered = np.zeros((len(cells.members), len(CONSTANTS)))
        np.add.at(gathered, cells.owners.astype(np.intp), cells.entries * pull[:, None])
        moved = self._variances * (cells.belongs.T @ gathered)
        nothing = (0.0,) * len(CONSTANTS)
        return {
            scope: tuple(
                round(was + float(more), 4)
                for was, more in zip(self.before.scopes.get(scope, nothing), part, strict=True)
            )
            for scope, part in zip(cells.scopes, moved, strict=True)
            if np.abs(part).max() > NOTHING
        }

    def posterior(self) -> Posterior:
        cells, known = self._all_cells(), self.known.pulls
        # What the known entries' own draws make of the new ones is theirs already.
        drawn = cells.drawn(self._variances, len(known)) - self._wide @ (self._with_new.T @ known)
        new = self.inverse @ drawn
        pulls = np.concatenate([known + self._old_pull(new), new])
        return pack(self.known.widths, self.known.scales, cells, pulls, self.measured())

    def errors(self) -> dict[str, dict[str, dict[str, float]]]:
        tables = {OWN["before"]: np.where(self._metrics == "", np.nan, self.unmoved)}
        tables |= {OWN[grouping]: self.left_out(self._groups[grouping])[0] for grouping in ("model", "curve")}
        by_title = {title: by_metric(self._metrics, error, ~np.isnan(error)) for title, error in tables.items()}
        return {title: table for title, table in by_title.items() if table}

"""Own measurements: the posterior of the calibration in force, given a few rows more.

The rows say something about their own cells, and by the scopes that these share with others something about their
neighbours: a rank-k update of the posterior, which needs none of the measurements that it was made of. What nobody
knows of a machine before (who measures there, and which release) is learnt with it, so that estimates for that
machine become surer than for anybody's.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import date

import msgspec
import numpy as np

from crosstie import __version__
from crosstie.catalog.calibration import ALL_LEVELS, HERE, Calibration, CalibrationSubject, empty
from crosstie.catalog.library import Catalog
from crosstie.catalog.posterior import Cells, Posterior, pack
from crosstie.core.errors import BadInput
from crosstie.core.estimate import CONSTANTS
from crosstie.core.progress import OnProgress, no_progress
from crosstie.perf.hardware import Array
from crosstie.prove.calibration.cases import Cases, MeasuredCase
from crosstie.prove.calibration.groups import by_metric, left_out_groups, loads_of, metrics_of, points_of
from crosstie.prove.calibration.kernels import MeasuredKernel
from crosstie.prove.calibration.regression import Measurements, Regression, gather
from crosstie.prove.calibration.sureness import LeftOut, curves_of

NOTHING_LEARNT = "no row says anything about the constants: tails and arrivals by the clock do not"
# What is said of own rows: before, and left out of what was learnt.
OWN = {"before": "as predicted before", "model": "learnt, points left out", "curve": "learnt, a curve left out"}
# The model is not linear: the rows are looked at anew from where they have moved the constants to.
_ROUNDS = 3
# Corrections smaller than this are left out of the file.
NOTHING = 5e-4


def made_now() -> dict[str, str]:
    return {"by": f"crosstie {__version__} calibrate", "date": date.today().isoformat()}


def learn_own(
    catalog: Catalog, cases: Sequence[MeasuredCase], kernels: Sequence[MeasuredKernel],
    files: list[dict[str, str | int]], on_progress: OnProgress = no_progress,
) -> Calibration:  # fmt: skip
    """The catalog's calibration with what a few results change of it."""
    before = catalog.calibration
    if before.constants != CONSTANTS or before.posterior is None:
        raise BadInput("the calibration in force is of another version of Crosstie: learn with --full")
    bare = catalog.calibrated_by(empty())
    resolve = Cases(bare)
    evidence = gather(bare, [case for one in cases for case in resolve.of(one.point)], kernels)
    if not len(evidence.logs):
        raise BadInput(NOTHING_LEARNT)
    evidence.subjects = [_here(subject) for subject in evidence.subjects]
    on_progress(0, _ROUNDS, "what the rows change")
    learnt = Update(bare, before, before.posterior, evidence, on_progress)
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


def _here(subject: CalibrationSubject) -> CalibrationSubject:
    return subject._replace(release=HERE, campaign=HERE, source=HERE, month="")


class Update(LeftOut):
    """The entries of a posterior, and those of own rows beside them.

    With C the covariance of what is known, B its covariance with the new entries and D theirs alone, new entries given
    the known ones have the covariance S = D - B' C^-1 B.
    """

    def __init__(
        self, bare: Catalog, before: Calibration, known: Posterior, evidence: Measurements,
        on_progress: OnProgress = no_progress,
    ):  # fmt: skip
        self.before, self.known, self.evidence = before, known, evidence
        self.fit = Regression(bare, evidence, ALL_LEVELS)
        self._variance = np.array([known.widths[level] for level in self.fit.levels]) ** 2
        self._first = np.zeros((len(self.fit.scopes), len(CONSTANTS)))
        for scope, place in self.fit.scopes.items():
            self._first[place] = before.scopes.get(scope, self._first[place])
        self._metrics, self._groups = metrics_of(evidence), left_out_groups(evidence)
        self._shift = np.zeros_like(self._first)
        self.unmoved = np.zeros(0)
        for done in range(_ROUNDS):
            on_progress(done, _ROUNDS, "what the rows change")
            self._solve()

    def _noise(self) -> Array:
        """Half of the variance that is besides is of a curve, all of whose rows share it."""
        _, rows = curves_of(self._groups["curve"], self._metrics)
        scales = np.array([
            self.known.scales.get(self.evidence.subjects[origin].mode, {}).get(metric, fallback)
            for origin, metric, fallback in zip(
                self.evidence.origin, self._metrics.tolist(), self.evidence.noise.tolist(), strict=True
            )
        ])  # fmt: skip
        return np.asarray(scales * np.sqrt(0.5 * (1.0 + rows)))

    def _solve(self) -> None:
        tangent = self.fit.tangent(self._first + self._shift)
        if not len(self.unmoved):
            self.unmoved = tangent.base - self.evidence.logs
        # From where the known mean is.
        tangent = tangent._replace(cells=self.fit.corrections(self._shift))
        rows = np.arange(len(self.evidence.logs))
        self.linear = self.fit.linear(tangent, rows, self._noise(), self._variance)
        self._join()
        self.inverse = np.asarray(np.linalg.inv(self._given), np.float64)
        self.pull = np.asarray(self.inverse @ self.linear.target, np.float64)
        everywhere = np.concatenate([-self._through @ self.pull, self.pull])
        parts = self._parts(everywhere)
        self._shift = np.array([parts[self._place[scope]] for scope in self.fit.scopes])
        self._moved = parts

    def _join(self) -> None:
        """The cells of both; S, and C^-1 B."""
        old = self.known.cells
        self._place = {scope: place for place, scope in enumerate(old.scopes)}
        scopes, levels = list(old.scopes), list(old.levels)
        for scope, level in zip(self.fit.scopes, self.fit.levels, strict=True):
            if scope not in self._place:
                self._place[scope] = len(scopes)
                scopes.append(scope)
                levels.append(level)
        names = list(self.fit.scopes)
        members = [np.array([self._place[names[i]] for i in np.flatnonzero(row)], np.int16) for row in self.fit.belongs]
        self._cells = Cells(
            scopes=tuple(scopes),
            levels=tuple(levels),
            members=(*old.members, *members),
            owners=np.concatenate([old.owners, self.linear.owners + len(old.members)]).astype(np.int16),
            entries=np.concatenate([old.entries, self.linear.entries]).astype(np.float32),
        )
        self._widths = self._cells.variances(self.known.widths)
        count = len(old.owners)
        # Built once, since what is known does not change from round to round.
        if not hasattr(self, "_covariance"):
            self._covariance = old.covariance(old.variances(self.known.widths))
        beside = self._cells.covariance_with(self._widths, count)
        between, alone = beside[:count], beside[count:] + np.eye(len(self.linear.owners))
        self._through: Array = np.asarray(np.linalg.solve(self._covariance, between), np.float64)
        self._given = alone - between.T @ self._through
        self._given = 0.5 * (self._given + self._given.T)

    def _parts(self, pull: Array) -> Array:
        cells = self._cells
        gathered = np.zeros((len(cells.members), len(CONSTANTS)))
        np.add.at(gathered, cells.owners.astype(np.intp), cells.entries * pull[:, None])
        return np.asarray(self._widths * (cells.belongs.T @ gathered))

    def scopes(self) -> dict[str, tuple[float, ...]]:
        """All parts that moved."""
        nothing = (0.0,) * len(CONSTANTS)
        return {
            scope: tuple(
                round(was + float(more), 4)
                for was, more in zip(self.before.scopes.get(scope, nothing), moved, strict=True)
            )
            for scope, moved in zip(self._cells.scopes, self._moved, strict=True)
            if np.abs(moved).max() > NOTHING
        }

    def posterior(self) -> Posterior:
        known = self.known.pulls
        count = len(known)
        drawn = self._cells.drawn(self._widths, count)
        # The known entries' own draws stand; C' times the new pulls gives the new entries theirs.
        between = self._cells.covariance_with(self._widths, count)[:count]
        new = self.inverse @ (drawn - between.T @ known)
        pulls = np.concatenate([known - self._through @ new, new])
        return pack(self.known.widths, self.known.scales, self._cells, pulls)

    def errors(self) -> dict[str, dict[str, dict[str, float]]]:
        tables = {OWN["before"]: np.where(self._metrics == "", np.nan, self.unmoved)}
        tables |= {OWN[grouping]: self.left_out(self._groups[grouping])[0] for grouping in ("model", "curve")}
        found = {title: by_metric(self._metrics, error, ~np.isnan(error)) for title, error in tables.items()}
        return {title: table for title, table in found.items() if table}

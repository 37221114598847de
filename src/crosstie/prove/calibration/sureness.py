"""Learns how sure a calibration is: the posterior over the parts of all scopes, from the rows that made it.

The corrections stand where the fit has put them, with prior widths under which models that are left out are predicted
best. How far they may be off is learnt from the same rows, in one linear problem around the corrections:

    widths   of each level, by kind of constant: those that make the rows most likely (EM, empirical Bayes), drawn
             towards the fit's own where a level has few scopes
    scales   what a measurement is off by besides: that of its configuration, which all rows of one curve share, and
             its own. Leaving out one curve at a time tells both together. m rows of a curve count as one whose noise
             is (own^2 + m curve^2) each, so that a long curve is not taken for many independent witnesses.

Leaving out a group, whole sources and models among them, gives the error that its rows would have had and how sure
the posterior would have been of them: `coverage` is the share of rows within their 80% intervals.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.calibration import ALL_LEVELS, Calibration
from crosstie.catalog.library import Catalog
from crosstie.catalog.posterior import FREEDOM, Cells, Posterior, pack, scale_name
from crosstie.core.estimate import CONSTANTS, DRAFTING, METRICS
from crosstie.core.progress import OnProgress, no_progress
from crosstie.perf.hardware import Array, Mask
from crosstie.prove.calibration.cases import MeasuredCase
from crosstie.prove.calibration.groups import left_out_groups, metrics_of
from crosstie.prove.calibration.kernels import MeasuredKernel
from crosstie.prove.calibration.regression import Linear, Measurements, Regression, gather

_ROUNDS = 6
# A level's width counts as if so many scopes had been seen with the fit's own.
_PRIOR_SCOPES = 6.0
# Combinations of constants that a cell tells less about than this share of what is not known are left out.
_TOLD = 0.02
# Constants whose widths are learnt together: rates, links, overheads, and what only speculation has.
_RATES, _LINKS = ("compute", "experts", "weights", "attention", "cache"), ("collective", "link")
# Where the ends of 80% intervals lie: of a normal distribution, and of Student's t with 4 degrees of freedom.
END, TAIL = 1.2816, 1.5332
# Scales that are tried, from one to 150 per cent.
_SCALES: Array = np.exp(np.linspace(np.log(0.01), np.log(1.5), 60))
# Fewer rows than this say nothing about a scale of their own.
_FEWEST = 20
# And fewer than this nothing about what differs between stacks.
_STACK = 60
# The smallest group that a share of rows within intervals is told of.
_GROUP = 40


CoverageTables = dict[str, dict[str, dict[str, float]]]


def _kind(constant: str) -> int:
    if constant in DRAFTING:
        return 3
    return 0 if constant in _RATES else 1 if constant in _LINKS else 2


KINDS = np.array([_kind(name) for name in CONSTANTS])


@dataclass
class Noise:
    """By row, as standard deviations: what it is off by for itself, and with all rows of its curve and metric."""

    own: Array
    curve: Array
    rows_of_curve: Array

    @property
    def fitted(self) -> Array:
        return np.sqrt(self.own**2 + self.rows_of_curve * self.curve**2)

    @property
    def predicted(self) -> Array:
        return np.sqrt(self.own**2 + self.curve**2)


class LeftOutRows:
    """A linear problem around a fit, solved; and what leaving some of its rows out says of them."""

    fit: Regression
    linear: Linear
    # Of the covariance of its entries; and what that makes of their targets.
    inverse: Array
    pull: Array

    def left_out(self, grouping: NDArray[np.str_]) -> tuple[Array, Array]:
        """Of every row had its group been left out: the logarithm of predicted over measured, and its standard
        deviation by what is not known of the constants. Not a number where the group is ""."""
        error, sd = np.full((2, len(grouping)), np.nan)
        for name in sorted(set(grouping.tolist()) - {""}):
            for rows, found, deviation in self._without(grouping == name):
                error[rows], sd[rows] = found, deviation
        return error, sd

    def _without(self, out: Mask) -> Iterator[tuple[NDArray[np.intp], Array, Array]]:
        """What the others say of these rows, cell by cell.

        Entries of the affected cells given those of all others have the mean m and the covariance P, both read off the
        inverse; of the cells' own rows those that stay then tell R and y.
        """
        shares = [self.linear.shares[int(cell)] for cell in np.unique(self.fit.row_cell[out])]
        where = np.array([entry for share in shares for entry in share.entries], dtype=np.intp)
        lost, taken = np.zeros((len(where), len(where))), np.zeros(len(where))
        begin = 0
        for share in shares:
            own, at = out[share.rows], slice(begin, begin := begin + len(share.entries))
            lost[at, at] = share.left[own].T @ share.left[own]
            taken[at] = share.left[own].T @ share.target[own]
        one = np.eye(len(where))
        noisy: Array = np.asarray(np.linalg.inv(self.inverse[np.ix_(where, where)]), np.float64)
        mean, known = self.linear.target[where] - noisy @ self.pull[where], noisy - one
        shrunk = np.linalg.solve(one + known @ (one - lost), np.concatenate([known, mean[:, None]], axis=1))
        covariance = shrunk[:, :-1]
        mean = shrunk[:, -1] + covariance @ (self.linear.target[where] - taken)
        begin = 0
        for share in shares:
            own, at = out[share.rows], slice(begin, begin := begin + len(share.entries))
            left, weight = share.left[own], share.weight[own]
            variance = np.einsum("ri,ij,rj->r", left, covariance[at, at], left)
            yield (
                share.rows[own],
                (left @ mean[at] - share.target[own]) / weight,
                np.sqrt(np.maximum(variance, 0.0)) / weight,
            )


class LearntSureness(LeftOutRows):
    """The rows around the corrections of a calibration, and what leaving some of them out says."""

    def __init__(self, catalog: Catalog, calibration: Calibration, cases: Sequence[MeasuredCase],
                 kernels: Sequence[MeasuredKernel], on_progress: OnProgress = no_progress):  # fmt: skip
        self.evidence = gather(catalog, cases, kernels)
        self.fit = Regression(catalog, self.evidence, ALL_LEVELS)
        parts = np.zeros((len(self.fit.scopes), len(CONSTANTS)))
        for scope, place in self.fit.scopes.items():
            parts[place] = calibration.scopes.get(scope, parts[place])
        on_progress(0, _ROUNDS, "how sure that is")
        self.tangent = self.fit.tangent(parts)
        self.metrics = metrics_of(self.evidence)
        self.modes = np.array([self.evidence.subjects[i].mode for i in self.evidence.origin])
        self.stacks = np.array([self.evidence.subjects[i].stack for i in self.evidence.origin])
        self.groups = left_out_groups(self.evidence)
        self.variance = self.fit.variance.copy()
        self.noise = Noise(self.evidence.noise.copy(), 0.0 * self.evidence.noise, self._rows_of_curve())
        for done in range(_ROUNDS):
            on_progress(done, _ROUNDS, "how sure that is")
            self._solve()
            self._learn_widths()
            self._learn_noise()
        self._solve()

    def _rows_of_curve(self) -> Array:
        self._curve, counts = curves_of(self.groups["curve"], self.metrics)
        return counts

    def _solve(self) -> None:
        rows = np.arange(len(self.evidence.logs))
        self.linear = self.fit.linear(self.tangent, rows, self.noise.fitted, self.variance, _TOLD)
        self.inverse = np.asarray(np.linalg.inv(self.linear.covariance), np.float64)
        self.pull = np.asarray(self.inverse @ self.linear.target, np.float64)

    def _learn_widths(self) -> None:
        """EM: the mean square of a level's parts, as far as they are known."""
        linear, belongs = self.linear, self.fit.belongs
        gathered = np.zeros((len(belongs), len(CONSTANTS)))
        np.add.at(gathered, linear.owners, linear.entries * self.pull[:, None])
        square = (self.variance * (belongs.T @ gathered)) ** 2 + self.variance
        for scope in range(len(self.fit.scopes)):
            own = np.flatnonzero(belongs[linear.owners, scope])
            entries = linear.entries[own]
            told = ((self.inverse[np.ix_(own, own)] @ entries) * entries).sum(axis=0)
            square[scope] -= self.variance[scope] ** 2 * told
        first, levels = self.fit.variance, np.array(self.fit.levels)
        over = np.divide(square, first, out=np.zeros_like(square), where=first > 0.0)
        for level in dict.fromkeys(self.fit.levels):
            for kind in range(4):
                moved = np.outer(levels == level, kind == KINDS) & (first > 0.0)
                if moved.any():
                    times = (over[moved].sum() + _PRIOR_SCOPES) / (moved.sum() + _PRIOR_SCOPES)
                    self.variance[moved] = times * first[moved]

    def _learn_noise(self) -> None:
        error, sd = self.left_out(self.groups["curve"])
        modes = [f"{kind} {mode}" for kind, mode in zip(self.evidence.kind, self.modes, strict=True)]
        stacks = [f"{mode} / {stack}" for mode, stack in zip(modes, self.stacks, strict=True)]
        miss = self.evidence.logs - self.tangent.base
        self._learn_noise_of(np.array(modes), miss, error, sd, _FEWEST)
        self._learn_noise_of(np.array(stacks), miss, error, sd, _STACK)

    def _learn_noise_of(self, kinds: NDArray[np.str_], miss: Array, error: Array, sd: Array, fewest: int) -> None:
        """The noise of each kind of rows that has so many."""
        for kind in sorted(set(kinds.tolist())):
            own = (kinds == kind) & ~np.isnan(error) & (self.metrics != "")
            if own.sum() >= fewest:
                every = kinds == kind
                together = likeliest_scale(error[own], sd[own])
                alone = min(self._within_curves(miss, own) or together, together)
                self.noise.own[every] = alone
                self.noise.curve[every] = np.sqrt(together**2 - alone**2)

    def _within_curves(self, miss: Array, rows: Mask) -> float | None:
        """The scatter of rows around their curve's mean, by the median."""
        places = self._curve[rows]
        counts = np.bincount(places)[places]
        mean = np.bincount(places, miss[rows])[places] / counts
        several = counts > 2
        if several.sum() < _FEWEST:
            return None
        away = (miss[rows] - mean)[several] * np.sqrt(counts[several] / (counts[several] - 1.0))
        return float(1.4826 * np.median(np.abs(away)))

    def half_width(self, sd: Array) -> Array:
        """Of an 80% interval, as a logarithm."""
        return np.hypot(END * sd, TAIL * self.noise.predicted)

    def posterior(self) -> Posterior:
        fit, linear = self.fit, self.linear
        cells = Cells(
            scopes=tuple(fit.scopes),
            levels=tuple(fit.levels),
            members=tuple(np.flatnonzero(row).astype(np.int16) for row in fit.belongs),
            owners=linear.owners.astype(np.int16),
            entries=linear.entries.astype(np.float32),
        )
        return pack(self.widths(), self.scales(), cells, self.inverse @ cells.drawn(self.variance))

    def widths(self) -> dict[str, tuple[float, ...]]:
        found = {level.name: (0.0,) * len(CONSTANTS) for level in ALL_LEVELS}
        for level, variance in zip(self.fit.levels, self.variance, strict=True):
            found[level] = tuple(round(float(width), 4) for width in np.sqrt(variance))
        return found

    def scales(self) -> dict[str, dict[str, float]]:
        """By mode, and by mode and stack, and by metric: the median over its rows of what they are off by besides."""
        names = {mode: self.modes == mode for mode in sorted(set(self.modes.tolist()))}
        both = [scale_name(mode, stack) for mode, stack in zip(self.modes, self.stacks, strict=True)]
        names |= {name: np.array(both) == name for name in sorted(set(both))}
        found = {
            name: {
                metric: round(float(np.median(self.noise.predicted[own])), 4)
                for metric in METRICS
                if (own := (self.metrics == metric) & rows).sum() >= (_STACK if "/" in name else 1)
            }
            for name, rows in names.items()
        }
        return {name: table for name, table in found.items() if table}

    def coverage(self, errors: Mapping[str, Array], titles: Mapping[str, str]) -> CoverageTables:
        """By what was left out, and among that by accelerator, stack, source and mode: rows, the share of them within
        their 80% intervals, and how wide these are. `errors`: of the product itself where they were worked out."""
        subjects = [self.evidence.subjects[i] for i in self.evidence.origin]
        labels = {
            "": [""] * len(subjects),
            "mode": [subject.mode or "plain serving" for subject in subjects],
            "accelerator": [f"{subject.accelerator}, {subject.stack}" for subject in subjects],
            "source": [subject.source for subject in subjects],
        }
        found: dict[str, dict[str, dict[str, float]]] = {}
        for grouping, title in titles.items():
            error, sd = self.left_out(self.groups[grouping])
            error = np.where(np.isnan(errors[grouping]), error, errors[grouping]) if grouping in errors else error
            half = self.half_width(sd)
            for kind, names in labels.items():
                for name in sorted(set(names)) if kind else [""]:
                    own = (np.array(names) == name) & ~np.isnan(error)
                    table = {
                        metric: held(error[rows], half[rows])
                        for metric in METRICS
                        if (rows := own & (self.metrics == metric)).sum() >= _GROUP
                    }
                    if table and (name or not kind):
                        found[f"{title}: {name}" if name else title] = table
        return found


def curves_of(curves: NDArray[np.str_], metrics: NDArray[np.str_]) -> tuple[NDArray[np.intp], Array]:
    """By row: a number for its curve and metric, and how many rows that has."""
    both = enumerate(zip(curves.tolist(), metrics.tolist(), strict=True))
    keys = [f"{curve} {metric}" if metric and curve else str(row) for row, (curve, metric) in both]
    _, place, counts = np.unique(np.array(keys), return_inverse=True, return_counts=True)
    return place, np.asarray(counts[place], np.float64)


def held(error: Array, half: Array) -> dict[str, float]:
    """Rows, the share of them within their intervals, and how wide the middle one is, high over low."""
    return {
        "n": len(error),
        "inside": round(float((np.abs(error) <= half).mean()), 4),
        "width": round(float(np.exp(2.0 * np.median(half))), 3),
    }


def likeliest_scale(error: Array, sd: Array) -> float:
    """The scale of Student's t beside what is not known of the constants."""
    square = sd[:, None] ** 2 + _SCALES[None, :] ** 2
    tail = np.log1p(error[:, None] ** 2 / square / FREEDOM)
    return float(_SCALES[int(np.argmax((-0.5 * np.log(square) - 0.5 * (FREEDOM + 1.0) * tail).sum(axis=0)))])


def joint_errors(joint: Measurements, fits: Sequence[tuple[Measurements, Mapping[str, Array]]]) -> dict[str, Array]:
    """Errors of fits that had a part of the rows each, by the rows of all."""
    places = {_row_key(joint, row): row for row in range(len(joint.logs))}
    found: dict[str, Array] = {}
    for evidence, errors in fits:
        rows = [places.get(_row_key(evidence, row), -1) for row in range(len(evidence.logs))]
        known = np.array([row >= 0 for row in rows])
        for grouping, error in errors.items():
            whole = found.setdefault(grouping, np.full(len(joint.logs), np.nan))
            whole[np.array(rows)[known]] = error[known]
    return found


def _row_key(evidence: Measurements, row: int) -> tuple[int, int]:
    origin = int(evidence.origin[row])
    if origin < len(evidence.cases):
        return id(evidence.cases[origin].point), int(evidence.quantity[row])
    return -1 - origin + len(evidence.cases), -1

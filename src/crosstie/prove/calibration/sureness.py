"""Learns how sure a calibration is: the posterior over the parts of all scopes, from the rows that made it.

The corrections stand where the fit has put them, with prior widths under which models that are left out are predicted
best. How far they may be off is learnt from the same rows, in one linear problem around the corrections:

    widths   of each level, by kind of constant: those that make the rows most likely (EM, empirical Bayes), drawn
             towards the fit's own where a level has few scopes. What a model, a publisher and an accelerator bring is
             then scaled so that intervals hold what they say where these are left out
    scales   what a measurement is off by besides: that of its configuration, which all rows of one curve share, and its
             own. The logarithm of a scale is a sum of parts by metric and mode, engine, accelerator and publisher,
             pooled as those of constants are: an engine with few rows stays near what all have. A careless publisher
             has a part of its own, which no estimate has, so that it makes nobody else less sure. Leaving out one curve
             at a time tells both together. m rows of a curve count as one whose noise is (own^2 + m curve^2) each, so
             that a long curve is not taken for many independent witnesses

Leaving out a group, whole sources and models among them, gives the error that its rows would have had and how sure
the posterior would have been of them: `coverage` is the share of rows within their 80% intervals, beside the shares
that would come about by chance if the posterior were right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.calibration import ALL_LEVELS, MODE_LEVELS, Calibration, points_key
from crosstie.catalog.library import Catalog
from crosstie.catalog.posterior import FREEDOM, NEW_LAYOUT, Cells, Posterior, pack, scale_name
from crosstie.core.estimate import CONSTANTS, DRAFTING, METRICS
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.worlds import LEVEL
from crosstie.perf.hardware import Array, Mask
from crosstie.prove.calibration.cases import MeasuredCase
from crosstie.prove.calibration.groups import left_out_groups, metrics_of
from crosstie.prove.calibration.kernels import MeasuredKernel
from crosstie.prove.calibration.regression import Linear, Measurements, Regression, gather, left_out_cells

_ROUNDS = 6
# A level's width counts as if so many scopes had been seen with the fit's own.
_PRIOR_SCOPES = 6.0
# Combinations of constants that a cell tells less about than this share of what is not known are left out.
_TOLD = 0.02
# Constants whose widths are learnt together: rates, links, overheads, and what only speculation has.
_RATES, _LINKS = ("compute", "experts", "weights", "attention", "cache"), ("collective", "link")
# Where the ends of 80% intervals lie: of a normal distribution, and of Student's t with 4 degrees of freedom.
END, TAIL = 1.2816, 1.5332
# How far the logarithms of scales differ between engines, and between accelerators and publishers of one engine.
_ENGINES, _PLACES = 0.4, 0.3
# The root mean square of a scale over its median, of an engine, an accelerator and neither that are not known.
_UNKNOWN = (float(np.exp(_ENGINES**2 + _PLACES**2)), float(np.exp(_PLACES**2)), 1.0)
# What a share within intervals might be by chance: drawn so often, and all but one draw in a hundred of those.
_CHANCES, _ODD = 400, 0.01
# Times that a variance, or a scale, may be learnt to be of what it was.
_TIMES, _MORE = np.linspace(0.1, 2.0, 39), np.linspace(1.0, 1.6, 25)
# Of fewer models, or publishers, that are left out chance decides how many lie within their intervals.
_FEWEST_LEFT_OUT = 3
# Words of levels that are scaled by leaving out, each with what is.
_SCALED = {"model": "stack", "source": "source", "accelerator": "accelerator"}
# The smallest group that a share of rows within intervals is told of.
_GROUP = 40
Labels = NDArray[np.str_]
# Scales that are tried, from one to 150 per cent, and by how much a part may change one.
_SCALES: Array = np.linspace(np.log(0.01), np.log(1.5), 60)
_PARTS: Array = np.linspace(-1.2, 1.2, 49)
_POOLING_ROUNDS = 4
# Fewer rows than this say nothing about how rows scatter around their curve.
FEWEST = 20
CoverageTables = dict[str, dict[str, dict[str, float]]]
# The rows of a fit, and their errors by what was left out.
Fitted = tuple[Measurements, dict[str, Array]]


def _kind(constant: str) -> int:
    if constant in DRAFTING:
        return 3
    return 0 if constant in _RATES else 1 if constant in _LINKS else 2


KINDS = np.array([_kind(name) for name in CONSTANTS])


class Part(NamedTuple):
    """Which rows share a part of a scale, and how far that moves its logarithm before anything is measured; None for
    the scale itself. Rows named "" have none."""

    names: Labels
    width: float | None = None


@dataclass
class Noise:
    """By row: what it is off by for itself, and with all rows of its curve and metric; and what an estimate of the same
    would be off by, whose publisher nobody knows."""

    own: Array
    curve: Array
    rows_of_curve: Array
    here: Array

    @property
    def fitted(self) -> Array:
        return np.sqrt(self.own**2 + self.rows_of_curve * self.curve**2)


def log_likelihood(error: Array, sd: Array, scale: Array) -> Array:
    """Of Student's t beside what is not known of the constants."""
    square = sd**2 + scale**2
    return np.asarray(-0.5 * np.log(square) - 0.5 * (FREEDOM + 1.0) * np.log1p(error**2 / square / FREEDOM))


def likeliest_scale(error: Array, sd: Array) -> float:
    tried = log_likelihood(error[:, None], sd[:, None], np.exp(_SCALES)[None, :]).sum(axis=0)
    return float(np.exp(_SCALES[int(np.argmax(tried))]))


def pooled_scales(error: Array, sd: Array, weight: Array, parts: Sequence[Part]) -> list[Array]:
    """By part and row, the likeliest logarithm; rows without an error tell nothing and have their parts, too."""
    told = ~np.isnan(error)
    moved = [np.zeros(len(error)) for _ in parts]
    for _ in range(_POOLING_ROUNDS):
        for place, part in enumerate(parts):
            steps = _SCALES if part.width is None else _PARTS
            prior = 0.0 if part.width is None else 0.5 * (steps / part.width) ** 2
            others = sum(moved) - moved[place]
            for name in sorted(set(part.names[told].tolist()) - {""}):
                every = part.names == name
                own = every & told
                scale = np.exp(others[own][:, None] + steps[None, :])
                tried = weight[own] @ log_likelihood(error[own][:, None], sd[own][:, None], scale) - prior
                moved[place][every] = steps[int(np.argmax(tried))]
    return moved


def scatter_within_curves(miss: Array, curve: NDArray[np.intp], rows: Mask) -> float | None:
    """The scatter of rows around their curve's mean, by the median."""
    places = curve[rows]
    counts = np.bincount(places)[places]
    mean = np.bincount(places, miss[rows])[places] / counts
    several = counts > 2
    if several.sum() < FEWEST:
        return None
    away = (miss[rows] - mean)[several] * np.sqrt(counts[several] / (counts[several] - 1.0))
    return float(1.4826 * np.median(np.abs(away)))


class LeftOutRows:
    """A linear problem around a fit, solved; and what leaving some of its rows out says of them."""

    fit: Regression
    linear: Linear
    # Of the covariance of its entries; and what that makes of their targets.
    inverse: Array
    pull: Array

    def left_out(self, grouping: Labels, chances: NDArray[np.float32] | None = None) -> tuple[Array, Array]:
        """Of every row had its group been left out: the logarithm of predicted over measured, and its standard
        deviation by what is not known of the constants. Not a number where the group is "". `chances`, (rows, any
        number), gets errors drawn by that, of all rows of a group together."""
        error, sd = np.full((2, len(grouping)), np.nan)
        rng = np.random.default_rng(0)
        for name in sorted(set(grouping.tolist()) - {""}):
            out = grouping == name
            cells = left_out_cells(self.linear, self.inverse, self.pull, self.fit.row_cell, out)
            known = np.concatenate([cells.covariance, cells.mean[:, None]], axis=1)
            shrunk = np.linalg.solve(cells.spread, known)
            covariance = shrunk[:, :-1]
            mean = shrunk[:, -1] + covariance @ cells.target
            drawn = np.zeros((len(mean), 0)) if chances is None else _drawn(rng, covariance, chances.shape[1])
            begin = 0
            for share in cells.shares:
                own, at = out[share.rows], slice(begin, begin := begin + len(share.entries))
                rows, left, weight = share.rows[own], share.left[own], share.weight[own]
                error[rows] = (left @ mean[at] - share.target[own]) / weight
                variance = np.einsum("ri,ij,rj->r", left, covariance[at, at], left)
                sd[rows] = np.sqrt(np.maximum(variance, 0.0)) / weight
                if chances is not None:
                    chances[rows] = left @ drawn[at] / weight[:, None]
        return error, sd


def _drawn(rng: np.random.Generator, covariance: Array, count: int) -> Array:
    sizes, ways = np.linalg.eigh(0.5 * (covariance + covariance.T))
    return np.asarray((ways * np.sqrt(np.maximum(sizes, 0.0))) @ rng.standard_normal((len(sizes), count)))


class LearntSureness(LeftOutRows):
    """The rows around the corrections of a calibration, and what leaving some of them out says."""

    def __init__(
        self, catalog: Catalog, calibration: Calibration, cases: Sequence[MeasuredCase],
        kernels: Sequence[MeasuredKernel], fits: Sequence[Fitted] = (), on_progress: OnProgress = no_progress,
    ):  # fmt: skip
        """`fits`: with errors of the product itself, each of a part of the rows; the linear problem's elsewhere."""
        self.evidence = gather(catalog, cases, kernels)
        self._errors = joint_errors(self.evidence, fits)
        self.fit = Regression(catalog, self.evidence, ALL_LEVELS)
        parts = np.zeros((len(self.fit.scopes), len(CONSTANTS)))
        for scope, place in self.fit.scopes.items():
            parts[place] = calibration.scopes.get(scope, parts[place])
        on_progress(0, _ROUNDS, "how sure that is")
        self.tangent = self.fit.tangent(parts)
        self.metrics = metrics_of(self.evidence)
        self.subjects = [self.evidence.subjects[i] for i in self.evidence.origin]
        self.modes = np.array([subject.mode for subject in self.subjects])
        self.groups = left_out_groups(self.evidence)
        self.variance = self.fit.variance.copy()
        self._curve, counts = curves_of(self.groups["curve"], self.metrics)
        noise = self.evidence.noise
        self.noise = Noise(noise.copy(), 0.0 * noise, counts, noise.copy())
        self._new_layout: dict[str, float] = {}
        for done in range(_ROUNDS):
            on_progress(done, _ROUNDS, "how sure that is")
            self._solve()
            self._learn_widths()
            self._learn_noise()
        self._solve()
        self._learn_new_layouts()
        self._scale_widths()

    def _solve(self) -> None:
        rows = np.arange(len(self.evidence.logs))
        self.linear = self.fit.linear(self.tangent, rows, self.noise.fitted, self.variance, _TOLD)
        self.inverse = np.asarray(np.linalg.inv(self.linear.covariance), np.float64)
        self.pull = np.asarray(self.inverse @ self.linear.target, np.float64)
        self._missed: dict[str, tuple[Array, Array]] = {}

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

    def missed(self, grouping: str, chances: NDArray[np.float32] | None = None) -> tuple[Array, Array]:
        """As `left_out`, with the product's own errors where they are known, and none of what is no metric."""
        if chances is not None or grouping not in self._missed:
            error, sd = self.left_out(self.groups[grouping], chances)
            known = self._errors.get(grouping, error)
            error = np.where(self.metrics == "", np.nan, np.where(np.isnan(known), error, known))
            self._missed[grouping] = error, sd
        return self._missed[grouping]

    def _scale_widths(self) -> None:
        """What a new model, publisher or accelerator brings, and what a mode of serving does, so much that the
        intervals of all that were left out hold LEVEL."""
        levels = [level.split(" / ") for level in self.fit.levels]
        self._scale({word: [word in words for words in levels] for word in _SCALED}, "")
        self._solve()
        for mode, (level, *_) in MODE_LEVELS.items():
            self._scale({"": [words[0] == level.name for words in levels]}, mode)
        self._solve()

    def _scale(self, scaled: Mapping[str, Sequence[bool]], mode: str) -> None:
        _, near = self.missed("curve")
        for word, scopes in scaled.items():
            groupings = [grouping for other, grouping in _SCALED.items() if word in ("", other)]
            held_by: list[NDArray[np.bool_]] = []
            fewest = 0
            for grouping in groupings:
                error, sd = self.missed(grouping)
                rows = ~np.isnan(error) & ~np.isnan(near) & (self.modes == mode)
                fewest = max(fewest, len(set(self.groups[grouping][rows].tolist())))
                variance = near[rows, None] ** 2 + np.maximum(sd**2 - near**2, 0.0)[rows, None] * _TIMES
                half = half_width(np.sqrt(variance), self._predicted(grouping)[rows, None])
                held_by.append(np.abs(error[rows, None]) <= half)
            if fewest >= _FEWEST_LEFT_OUT:
                times = np.interp(LEVEL, np.concatenate(held_by).mean(axis=0), _TIMES)
                self.variance[np.array(scopes)] *= times

    def _learn_noise(self) -> None:
        error, sd = self.missed("curve")
        modes = np.array([f"{kind} {mode}" for kind, mode in zip(self.evidence.kind, self.modes, strict=True)])

        def named(*words: str) -> Labels:
            told = [[getattr(subject, word) for word in words] for subject in self.subjects]
            return np.array([
                scale_name(mode, *own) if all(own) else "" for mode, own in zip(modes, told, strict=True)
            ])  # fmt: skip

        noise = self.noise
        shared = noise.curve**2 / np.maximum(noise.own**2 + noise.curve**2, 1e-12)
        # Rows of a curve are as many witnesses as their shared error leaves of them.
        weight = 1.0 / (1.0 + (noise.rows_of_curve - 1.0) * shared)
        parts = [Part(modes), Part(named("stack"), _ENGINES), Part(named("stack", "accelerator"), _PLACES),
                 Part(named("stack", "source"), _PLACES)]  # fmt: skip
        *here, publisher = pooled_scales(error, sd, weight, parts)
        known = np.isin(modes, np.unique(modes[~np.isnan(error)]))
        noise.here = np.where(known, np.exp(sum(here)), noise.here)
        total = np.where(known, noise.here * np.exp(publisher), np.hypot(noise.own, noise.curve))
        alone = total.copy()
        miss = self.evidence.logs - self.tangent.base
        for mode in np.unique(modes[known]).tolist():
            rows = (modes == mode) & ~np.isnan(error)
            within = scatter_within_curves(miss / total, self._curve, rows) if rows.sum() >= FEWEST else None
            alone[modes == mode] *= min(within or 1.0, 1.0)
        noise.own, noise.curve = alone, np.sqrt(total**2 - alone**2)

    def _learn_new_layouts(self) -> None:
        error, sd = self.missed("layout")
        for metric in METRICS:
            rows = ~np.isnan(error) & (self.metrics == metric)
            if rows.sum() >= FEWEST:
                tried = log_likelihood(
                    error[rows, None], sd[rows, None], self.noise.here[rows, None] * _MORE[None, :]
                ).sum(axis=0)
                self._new_layout[metric] = round(float(_MORE[int(np.argmax(tried))]), 3)

    def _predicted(self, grouping: str) -> Array:
        """What each row is off by besides its constants: more, if its layout was left out with it."""
        more = np.array([self._new_layout.get(metric, 1.0) for metric in self.metrics])
        groups: dict[str, set[str]] = {}
        keys = [points_key(subject) for subject in self.subjects]
        for key, group in zip(keys, self.groups[grouping].tolist(), strict=True):
            groups.setdefault(key, set()).add(group)
        alone = np.array([len(groups[key]) == 1 for key in keys])
        return np.where(alone, more, 1.0) * self.noise.here

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
        widths = {level.name: (0.0,) * len(CONSTANTS) for level in ALL_LEVELS}
        for level, variance in zip(self.fit.levels, self.variance, strict=True):
            widths[level] = tuple(round(float(width), 4) for width in np.sqrt(variance))
        return widths

    def scales(self) -> dict[str, dict[str, float]]:
        """By mode, and by mode and stack and accelerator, and by metric: what an estimate is off by besides, the median
        over the rows that were served, if any were. What nobody measured may be noisier than the rest."""
        rows: dict[tuple[str, str], list[tuple[bool, float]]] = {}
        kinds = self.evidence.kind.tolist()
        for subject, metric, kind, scale in zip(
            self.subjects, self.metrics.tolist(), kinds, self.noise.here.tolist(), strict=True
        ):
            words = subject.mode, subject.stack, subject.accelerator
            for count, wider in enumerate(_UNKNOWN, start=1) if metric else ():
                rows.setdefault((scale_name(*words[:count]), metric), []).append((kind == metric, wider * scale))
        scales: dict[str, dict[str, float]] = {NEW_LAYOUT: self._new_layout}
        for (name, metric), own in sorted(rows.items()):
            served = [scale for is_served, scale in own if is_served] or [scale for _, scale in own]
            scales.setdefault(name, {})[metric] = round(float(np.median(served)), 4)
        return scales

    def coverage(self, titles: Mapping[str, str]) -> CoverageTables:
        """By what was left out, and among that by accelerator, stack, source and mode: rows, the share of them within
        their 80% intervals, how wide these are, and what share might be by chance."""
        labels = {
            "": np.array([""] * len(self.subjects)),
            "mode": np.array([subject.mode or "plain serving" for subject in self.subjects]),
            "accelerator": np.array([f"{subject.accelerator}, {subject.stack}" for subject in self.subjects]),
            "source": np.array([subject.source for subject in self.subjects]),
        }
        tables: CoverageTables = {}
        for grouping, title in titles.items():
            chances = np.zeros((len(self.subjects), _CHANCES), np.float32)
            error, sd = self.missed(grouping, chances)
            half = half_width(sd, predicted := self._predicted(grouping))
            # A careful publisher is more often inside than others, a careless one less.
            publisher = np.hypot(self.noise.own, self.noise.curve) / self.noise.here
            by_chance = np.abs(chances + self._noise_by_chance(predicted * publisher)) <= half[:, None]
            for kind, names in labels.items():
                for name in sorted(set(names.tolist())) if kind else [""]:
                    own = (names == name) & ~np.isnan(error)
                    table = {
                        metric: held(error[rows], half[rows], by_chance[rows].mean(axis=0))
                        for metric in METRICS
                        if (rows := own & (self.metrics == metric)).sum() >= _GROUP
                    }
                    if table and (name or not kind):
                        tables[f"{title}: {name}" if name else title] = table
        return tables

    def _noise_by_chance(self, scale: Array) -> NDArray[np.float32]:
        """Student's t, a part of it shared by the rows of a curve."""
        rng = np.random.default_rng(1)
        count = len(scale), _CHANCES
        shared = self.noise.curve**2 / np.maximum(self.noise.own**2 + self.noise.curve**2, 1e-12)
        alone, together = (rng.standard_t(FREEDOM, count).astype(np.float32) for _ in range(2))
        drawn = np.sqrt(1.0 - shared)[:, None] * alone + np.sqrt(shared)[:, None] * together[self._curve]
        return np.asarray(scale[:, None] * drawn, np.float32)


def curves_of(curves: Labels, metrics: Labels) -> tuple[NDArray[np.intp], Array]:
    """By row: a number for its curve and metric, and how many rows that has."""
    both = enumerate(zip(curves.tolist(), metrics.tolist(), strict=True))
    keys = [f"{curve} {metric}" if metric and curve else str(row) for row, (curve, metric) in both]
    _, place, counts = np.unique(np.array(keys), return_inverse=True, return_counts=True)
    return place, np.asarray(counts[place], np.float64)


def half_width(sd: Array, scale: Array) -> Array:
    """Of an 80% interval, as a logarithm."""
    return np.hypot(END * sd, TAIL * scale)


def held(error: Array, half: Array, by_chance: Array) -> dict[str, float]:
    """Rows, the share of them within their intervals, how wide the middle one is, high over low, and between which
    shares it would be in 99 of 100 cases if the posterior were right."""
    least, most = np.quantile(by_chance, [_ODD / 2.0, 1.0 - _ODD / 2.0]).tolist()
    return {
        "n": len(error),
        "inside": round(float((np.abs(error) <= half).mean()), 4),
        "width": round(float(np.exp(2.0 * np.median(half))), 3),
        "least": round(least, 4),
        "most": round(most, 4),
    }


def joint_errors(joint: Measurements, fits: Sequence[Fitted]) -> dict[str, Array]:
    """Errors of fits that had a part of the rows each, by the rows of all."""
    places = {_row_key(joint, row): row for row in range(len(joint.logs))}
    errors_of: dict[str, Array] = {}
    for evidence, errors in fits:
        rows = [places.get(_row_key(evidence, row), -1) for row in range(len(evidence.logs))]
        known = np.array([row >= 0 for row in rows])
        for grouping, error in errors.items():
            whole = errors_of.setdefault(grouping, np.full(len(joint.logs), np.nan))
            whole[np.array(rows)[known]] = error[known]
    return errors_of


def _row_key(evidence: Measurements, row: int) -> tuple[int, int]:
    origin = int(evidence.origin[row])
    if origin < len(evidence.cases):
        return id(evidence.cases[origin].point), int(evidence.quantity[row])
    return -1 - origin + len(evidence.cases), -1

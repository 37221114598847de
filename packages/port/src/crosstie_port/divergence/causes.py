"""What a difference looks like: from samples and norms of one tensor on two machines to its likely causes.

Each signature is a relation between the two, such as one factor for all values, and is only told where it holds up to
rounding. Several may: the most specific comes first.
"""

import math
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from crosstie_port.divergence.by_token import later_tokens, other_indices, other_mask, shifted
from crosstie_port.divergence.digest import (
    LAYOUTS,
    Floats,
    TensorSummary,
    normed_rows,
    sampled_columns,
    sampled_rows,
)
from crosstie_port.divergence.pair import BesideTensors, Cause, ComparedPair, cause, distance
from crosstie_port.divergence.records import RecordedTensor


def cause_of(
    entry: RecordedTensor,
    a: TensorSummary,
    b: TensorSummary,
    tolerance: float,
    known: BesideTensors,
) -> list[Cause]:
    """The first signature of each kind that holds; where none does, what the error is as large as. What the module's
    weights show stands beside it, and in its place where it is vague."""
    rows = [int(row) for row in sampled_rows(a.shape, known.seed)]
    pair = ComparedPair(entry=entry, a=a, b=b, tolerance=tolerance, known=known, rows=rows)
    causes = next(filter(None, (list(look(pair)) for look in _LOOKS)), [])
    if entry.leaf and known.kind and known.kind != entry.kind and causes[0].signature in _VAGUE:
        what = f"another module: {entry.kind} in the first, {known.kind} in the second"
        return [cause("other-module", causes[0].evidence, what)]
    if known.weights is None:
        return causes
    signature, said = known.weights
    if signature and causes[0].signature in (_VAGUE[:2] if signature == "weight-other" else _VAGUE):
        return [cause(signature, causes[0].evidence, said)]
    return [msgspec.structs.replace(causes[0], evidence=f"{causes[0].evidence}; {said}"), *causes[1:]]


# Signatures that say less than the weights do; the first two less than that these are others.
_VAGUE = ("unknown", "precision", "part", "positions", "scale-by-token", "indices")


def _not_numbers(pair: ComparedPair) -> Iterator[Cause]:
    a, b = pair.a, pair.b
    if b.nans > a.nans:
        yield cause("nan", f"{b.nans:,} of {b.elements:,} values, {a.nans:,} in the first")
    elif b.infinities > a.infinities:
        yield cause(
            "infinite", f"{b.infinities:,} of {b.elements:,} values; the largest of the first is {a.largest:.3g}"
        )
    elif (a.nans, a.infinities) != (b.nans, b.infinities):
        yield cause(
            "nan-first",
            f"{a.nans:,} NaN and {a.infinities:,} infinite in the first, {b.nans:,} and {b.infinities:,} in the second",
        )


def _nothing(pair: ComparedPair) -> Iterator[Cause]:
    a, b = pair.a, pair.b
    if not a.norm or a.is_whole:
        return
    if b.norm <= 1e-12 * a.norm:
        yield cause("zeros", f"norm {b.norm:.3g}, and {a.norm:.3g} in the first")
        return
    for name, one, other in (("groups of columns", a.groups, b.groups), ("rows", a.rows, b.rows)):
        gone = np.flatnonzero((other[:, 0] <= 1e-12 * one[:, 0]) & (one[:, 0] > 0.0))
        if len(gone) and _rest_agrees(one, other, gone, pair.tolerance):
            yield cause(
                "zeros-in-part",
                f"{name} {_spans(gone)}",
                f"zeros in {len(gone)} of {len(one)} {name}, and the rest agrees",
            )
            return


def _rest_agrees(one: Floats, other: Floats, gone: NDArray[np.int64], tolerance: float) -> bool:
    kept = np.setdiff1d(np.arange(len(one)), gone)
    return bool(len(kept)) and distance(one[kept, 0], other[kept, 0]) <= 4.0 * tolerance


def _spans(numbers: NDArray[np.int64], most: int = 4) -> str:
    """0-3, 7, ..."""
    found: list[list[int]] = []
    for one in map(int, numbers):
        if found and one == found[-1][1] + 1:
            found[-1][1] = one
        else:
            found.append([one, one])
    words = [f"{low}" if low == high else f"{low}-{high}" for low, high in found]
    return ", ".join(words[:most]) + (", ..." if len(words) > most else "")


def _order(pair: ComparedPair) -> Iterator[Cause]:
    """The same values in another order: the whole tensor's norm, mean and largest stay."""
    a, b = pair.a, pair.b
    if abs(a.norm - b.norm) > pair.tolerance * a.norm or abs(a.largest - b.largest) > 4 * pair.tolerance * a.largest:
        return
    for number, name in enumerate(LAYOUTS, 1):
        for there, back in ((a.grid(number), pair.y), (b.grid(number), pair.x)):
            if pair.x.size > 2 and distance(there, back) <= 4.0 * pair.tolerance < distance(pair.x, pair.y):
                side = "second" if back is pair.y else "first"
                evidence = (
                    f"{pair.x.size} samples agree to {distance(there, back):.2g} once put in order; norm and largest "
                )
                what = f"the same values in another order: {name}, in the {side}"
                yield cause(name.replace(" ", "-"), f"{evidence}; norm and largest are the same", what)
                return
    for name, one, other in (("heads", a.groups, b.groups), ("rows", a.rows, b.rows)):
        moved = _permutation(one, other, pair.tolerance)
        if moved is not None:
            swaps = [f"{i} is at {j}" for i, j in enumerate(moved) if i != j]
            evidence = f"norm, mean and largest of each agree once put in order; {', '.join(swaps[:4])}"
            yield cause(f"permuted-{name}", evidence, f"permuted {name}: {len(swaps)} of {len(one)} are elsewhere")
            return


def _permutation(one: Floats, other: Floats, tolerance: float) -> list[int] | None:
    """Where each row of `one` is in `other`, if all of them are and some are not in their place."""
    if len(one) < 2 or len(one) != len(other):
        return None
    scale = np.maximum(np.abs(one).max(0), 1e-300)
    apart = (np.abs(one[:, None, :] - other[None, :, :]) / scale).max(2)
    nearest = apart.argmin(1)
    if len(set(nearest.tolist())) < len(one) or (nearest == np.arange(len(one))).all():
        return None
    matched = apart[np.arange(len(one)), nearest]
    unmoved = apart.diagonal()[nearest != np.arange(len(one))]
    # Each is found where it went far better than where it was.
    return nearest.tolist() if matched.max() <= tolerance and unmoved.min() > 4.0 * matched.max() else None


def _factor(pair: ComparedPair) -> Iterator[Cause]:
    """One factor for all."""
    sound = np.isfinite(pair.x) & np.isfinite(pair.y)
    x, y = pair.x[sound], pair.y[sound]
    size = float((x * x).sum())
    if not size:
        return
    factor = float((x * y).sum()) / size
    if not factor or not pair.explains(factor * pair.x) or abs(pair.b.norm / pair.a.norm / abs(factor) - 1.0) > 0.05:
        return
    near = 4.0 * pair.tolerance + 0.01
    evidence = f"all {x.size} samples by a factor of {factor:.5g}, to {distance(factor * x, y):.2g}"
    if min(abs(factor / 2.0 - 1.0), abs(factor / 0.5 - 1.0)) < near:
        half = factor < 1.0
        what = f"{'half of' if half else 'twice'} what it should be, as with the other FP8 dialect"
        yield cause("half" if half else "twice", evidence, what)
    elif abs(factor + 1.0) < near:
        yield cause("sign", evidence)
    else:
        yield _scale(pair, factor, near, evidence)


def _scale(pair: ComparedPair, factor: float, near: float, evidence: str) -> Cause:
    """A multiplier that has a name, a scale that is somewhat other, or one that is missing."""
    named = next((name for name, value in _multipliers(pair) if abs(abs(factor) / value - 1.0) < near / 4.0), None)
    if named is not None:
        what = f"all values are {factor:.4g} times what they should be: {named}"
    elif 0.8 < factor < 1.25:
        what = f"all values are {abs(factor - 1.0):.1%} {'larger' if factor > 1.0 else 'smaller'}: one scale is another"
    else:
        what = f"a scale is missing, or applied twice: {factor:.4g} for all values"
        evidence = f"{evidence}; a scale of {1.0 / factor:.5g} taken as 1 would look so"
    return cause("scale-somewhat" if 0.8 < factor < 1.25 else "scale", evidence, what)


def _multipliers(pair: ComparedPair) -> Iterator[tuple[str, float]]:
    """Those of the config, the width's root, and FP8's ranges: each missing or taken twice."""
    width = math.sqrt(pair.a.shape[-1]) if pair.a.shape else 1.0
    named = {
        f"sqrt({pair.a.shape[-1]}), by which some models multiply embeddings": width,
        "448/240, FP8's ranges": 28 / 15,
    }
    for name, value in pair.known.settings.items():
        if type(value) in (int, float) and value > 0 and "eps" not in name and "window" not in name:
            named[name] = float(value)
    for name, value in named.items():
        if abs(value - 1.0) > 0.02:
            yield f"{name}, once too often", value
            yield f"{name}, left out", 1.0 / value


def _cap(pair: ComparedPair, capped: Floats, free: Floats) -> float | None:
    """The c for which `capped` is c tanh(`free` / c)."""
    largest = float(np.abs(capped).max())
    if not largest:
        return None

    def away(c: float) -> float:
        return distance(c * np.tanh(free / c), capped)

    given = [
        float(value) for name, value in pair.known.settings.items() if "softcap" in name and type(value) in (int, float)
    ]
    best, wide = min([*given, *largest * np.geomspace(1.0001, 20.0, 40)], key=away), 1.1
    for _ in range(7):
        best, wide = min([best, *best * np.geomspace(1 / wide, wide, 21)], key=away), wide**0.15
    explains = away(best) <= 4.0 * pair.tolerance and away(best) < 0.3 * distance(free, capped)
    return float(best) if explains else None


def _capped(pair: ComparedPair) -> Iterator[Cause]:
    if not np.isfinite(pair.x).all() or not np.isfinite(pair.y).all():
        return
    for capped, free, what in (
        (pair.x, pair.y, "uncapped: the first caps these values and the second does not"),
        (pair.y, pair.x, "capped: the second caps these values and the first does not"),
    ):
        cap = _cap(pair, capped, free)
        if cap is not None:
            yield cause(
                "softcap",
                f"c tanh(x / c) with c = {cap:.4g} makes one of the other, to "
                f"{distance(cap * np.tanh(free / cap), capped):.2g}",
                f"{what}, at {cap:.4g}",
            )
            return


def _by_column(pair: ComparedPair) -> Iterator[Cause]:
    if len(pair.x) < 3:
        return
    added = np.median(pair.y - pair.x, axis=0)
    if np.abs(added).max() > 0.0 and pair.explains(pair.x + added):
        yield cause("bias", f"{distance(pair.x + added, pair.y):.2g} remains once it is added")
        return
    found = _ratios(pair.x, pair.y, axis=0)
    if found is not None and pair.explains(found * pair.x):
        what = "each column has a factor of its own: scales by channel are missing"
        factors = f"factors {float(found.min()):.4g} to {float(found.max()):.4g}, the same in {len(pair.x)} rows"
        if "norm" in pair.entry.kind.lower():
            yield cause("scale-of-norm", factors, f"{what}, or the norm's weight is w in place of 1 + w")
        else:
            yield cause("scale-by-channel", factors, what)


def _by_row(pair: ComparedPair) -> Iterator[Cause]:
    if pair.x.shape[1] < 3 or len(pair.x) < 2:
        return
    found = _ratios(pair.x, pair.y, axis=1)
    if found is not None and pair.explains(found * pair.x):
        yield cause(
            "scale-by-token",
            f"factors {float(found.min()):.4g} to {float(found.max()):.4g}, the same in all sampled columns",
        )


def _ratios(x: Floats, y: Floats, axis: int) -> Floats | None:
    size = (x * x).sum(axis, keepdims=True)
    return (x * y).sum(axis, keepdims=True) / size if (size > 0.0).all() else None


def _few(pair: ComparedPair) -> Iterator[Cause]:
    """Most rows or groups agree, by their norms and by the samples that lie in them, and a few do not."""
    a, b, seed = pair.a, pair.b, pair.known.seed
    width = max(a.shape[-1] // max(len(a.groups), 1), 1)
    for name, one, other, samples, axis in (
        ("groups of columns", a.groups, b.groups, sampled_columns(a.shape, seed) // width, 1),
        ("rows", a.rows, b.rows, np.searchsorted(normed_rows(a.shape, seed), pair.rows), 0),
    ):
        if len(one) < 4:
            continue
        typical = math.sqrt(float(np.mean(one[:, 0] ** 2))) or 1.0
        off = np.abs(one[:, 0] - other[:, 0]) / np.maximum(one[:, 0], 0.1 * typical)
        apart = [
            distance(pair.y.take([i], axis), pair.x.take([i], axis)) > 4.0 * pair.tolerance for i in range(len(samples))
        ]
        bad = np.union1d(np.flatnonzero(off > 4.0 * pair.tolerance), samples[apart])
        kept = np.setdiff1d(samples, bad)
        if 0 < len(bad) <= len(one) // 2 and np.mean(apart) <= 0.5:
            yield cause(
                "part",
                f"{name} {_spans(bad)}, by up to {float(off.max()):.2g}",
                f"{len(bad)} of {len(one)} {name} differ, the others agree",
            )
            return
        if axis and pair.entry.side == "in" and len(kept) and 0 < len(bad) < len(one):
            agree = np.setdiff1d(np.arange(len(one)), bad)
            yield cause(
                "head-groups",
                f"heads {_spans(agree)} agree",
                f"{len(agree)} of {len(one)} heads agree: the others may read another key and value head",
            )
            return


_FORMATS = {
    "FP8 (e4m3)": 2.0**-4, "bfloat16": 2.0**-8, "TF32 or float16": 2.0**-11, "sums in another order": 2.0**-20,
}  # fmt: skip


def _precision(pair: ComparedPair) -> Iterator[Cause]:
    """No relation holds. Where the two are still close, an arithmetic of fewer digits explains it."""
    error = distance(pair.y, pair.x)
    likes: Callable[[float], bool] = lambda unit: 0.1 * unit < error < 4.0 * unit  # noqa: E731
    name = next((name for name, unit in _FORMATS.items() if likes(unit)), None)
    if name is not None and error < 0.2:
        yield cause(
            "precision",
            f"error {error:.2g} over {pair.x.size} samples, norms {pair.a.norm:.5g} and {pair.b.norm:.5g}",
            f"close, and further apart than its type explains: as if computed in {name}",
        )
        return
    a, b = np.nan_to_num(pair.x).ravel(), np.nan_to_num(pair.y).ravel()
    sizes = math.sqrt(float((a * a).sum() * (b * b).sum()))
    cosine = float((a * b).sum()) / sizes if sizes else 0.0
    ratio = pair.b.norm / pair.a.norm if pair.a.norm else math.inf
    yield cause("unknown", f"cosine {cosine:.3f}, norm {ratio:.4g} of the first's")


_LOOKS: tuple[Callable[[ComparedPair], Iterator[Cause]], ...] = (
    other_mask, _not_numbers, _nothing, other_indices, _order, shifted, _factor, _capped, later_tokens, _few,
    _by_column, _by_row, _precision,
)  # fmt: skip

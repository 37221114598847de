"""What a difference looks like: from samples and norms of one tensor on two machines to its likely causes.

Each signature is a relation between the two, such as one factor for all values, and is only told where it holds up to
rounding. Several may: the most specific comes first.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from crosstie_port.divergence.digest import LAYOUTS, TensorSummary
from crosstie_port.divergence.records import RecordedTensor

Floats = NDArray[np.float64]


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    # A stable name, such as "factor-2".
    signature: str
    what: str
    # The figures that it rests on.
    evidence: str
    look: str


class _Pair(msgspec.Struct, frozen=True, kw_only=True):
    entry: RecordedTensor
    a: TensorSummary
    b: TensorSummary
    # What rounding explains, relative.
    tolerance: float
    settings: Mapping[str, Any]
    rows: list[int]

    @property
    def x(self) -> Floats:
        return self.a.grid()

    @property
    def y(self) -> Floats:
        return self.b.grid()

    def explains(self, made: Floats) -> bool:
        """Whether what a hypothesis makes of one side is the other, up to a few roundings."""
        return _away(made, self.y) <= 4.0 * self.tolerance


def cause_of(
    entry: RecordedTensor,
    a: TensorSummary,
    b: TensorSummary,
    tolerance: float,
    settings: Mapping[str, Any],
    rows: NDArray[np.int64],
) -> list[Cause]:
    """The first signature of each kind that holds; where none does, what the error is as large as."""
    pair = _Pair(entry=entry, a=a, b=b, tolerance=tolerance, settings=settings, rows=[int(row) for row in rows])
    for look in (_not_numbers, _nothing, _indices, _order, _factor, _capped, _positions, _few, _by_column, _by_row):
        found = list(look(pair))
        if found:
            return found
    return list(_precision(pair))


def _away(a: Floats, b: Floats) -> float:
    sound = np.isfinite(a) & np.isfinite(b)
    size = math.sqrt(float((np.where(sound, b, 0.0) ** 2).sum()))
    away = math.sqrt(float((np.where(sound, a - b, 0.0) ** 2).sum()))
    return away / size if size else (math.inf if away else 0.0)


def _not_numbers(pair: _Pair) -> Iterator[Cause]:
    a, b = pair.a, pair.b
    if b.nans > a.nans:
        yield Cause(
            signature="nan",
            what="NaN where the other has numbers",
            evidence=f"{b.nans:,} of {b.elements:,} values, {a.nans:,} in the first",
            look="FP8 bytes of e4m3fn read as e4m3fnuz (0x80, minus zero, is NaN there); memory that no kernel wrote; "
            "a row that is masked whole; an overflow before it",
        )
    elif b.infinities > a.infinities:
        yield Cause(
            signature="infinite",
            what="infinite values where the other has numbers",
            evidence=f"{b.infinities:,} of {b.elements:,} values; the largest of the first is {a.largest:.3g}",
            look="a range that is exceeded: 65,504 in float16, 448 in e4m3fn, 240 in e4m3fnuz; or a mask that is added "
            "twice",
        )
    elif (a.nans, a.infinities) != (b.nans, b.infinities):
        yield Cause(
            signature="nan",
            what="the first recording has values that are no numbers, and the second fewer",
            evidence=f"{a.nans:,} NaN and {a.infinities:,} infinite in the first, {b.nans:,} and {b.infinities:,} in "
            "the second",
            look="the first machine: its recording is taken for right, and is not",
        )


def _nothing(pair: _Pair) -> Iterator[Cause]:
    a, b = pair.a, pair.b
    if not a.norm:
        return
    if b.norm <= 1e-12 * a.norm:
        yield Cause(
            signature="zeros",
            what="zeros: nothing was computed or nothing was loaded",
            evidence=f"norm {b.norm:.3g}, and {a.norm:.3g} in the first",
            look="a kernel that returned without writing; weights that the loader did not find; a scale of 0",
        )
        return
    for name, one, other in (("groups of columns", a.groups, b.groups), ("rows", a.rows, b.rows)):
        gone = np.flatnonzero((other[:, 0] <= 1e-12 * one[:, 0]) & (one[:, 0] > 0.0))
        if len(gone) and _rest_agrees(one, other, gone, pair.tolerance):
            yield Cause(
                signature="zeros",
                what=f"zeros in {len(gone)} of {len(one)} {name}, and the rest agrees",
                evidence=f"{name} {_spans(gone)}",
                look="a shard that was not loaded or not gathered; a grid that is too small for the shape",
            )
            return


def _rest_agrees(one: Floats, other: Floats, gone: NDArray[np.int64], tolerance: float) -> bool:
    kept = np.setdiff1d(np.arange(len(one)), gone)
    return bool(len(kept)) and _away(one[kept, 0], other[kept, 0]) <= 4.0 * tolerance


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


def _indices(pair: _Pair) -> Iterator[Cause]:
    if pair.a.is_whole:
        differ = float(np.mean(pair.x != pair.y))
        yield Cause(
            signature="indices",
            what="other indices for more tokens than near ties explain",
            evidence=f"{differ:.0%} of the sampled ones differ",
            look="the order in which equal scores are taken; a bias of the router that is left out; groups of experts; "
            "position ids or a mask made another way",
        )


def _order(pair: _Pair) -> Iterator[Cause]:
    """The same values in another order: the whole tensor's norm, mean and largest stay."""
    a, b = pair.a, pair.b
    if abs(a.norm - b.norm) > pair.tolerance * a.norm or abs(a.largest - b.largest) > 4 * pair.tolerance * a.largest:
        return
    for number, name in enumerate(LAYOUTS, 1):
        for there, back in ((a.grid(number), pair.y), (b.grid(number), pair.x)):
            if pair.x.size > 2 and _away(there, back) <= 4.0 * pair.tolerance < _away(pair.x, pair.y):
                side = "second" if back is pair.y else "first"
                yield Cause(
                    signature=name.replace(" ", "-"),
                    what=f"the same values in another order: {name}, in the {side}",
                    evidence=f"{pair.x.size} samples agree to {_away(there, back):.2g} once put in order; norm and "
                    "largest are the same",
                    look=_ORDERS[name],
                )
                return
    for name, one, other in (("heads", a.groups, b.groups), ("rows", a.rows, b.rows)):
        moved = _permutation(one, other, pair.tolerance)
        if moved is not None:
            swaps = [f"{i} is at {j}" for i, j in enumerate(moved) if i != j]
            yield Cause(
                signature=f"permuted-{name}",
                what=f"permuted {name}: {len(swaps)} of {len(one)} are elsewhere",
                evidence=f"norm, mean and largest of each agree once put in order; {', '.join(swaps[:4])}",
                look=_ORDERS[name],
            )
            return


_ORDERS = {
    "transposed": "a weight or an activation that is stored transposed and read as it lies",
    "heads before tokens": "a view in place of a transpose: [heads, tokens, width] for [tokens, heads, width]",
    "halves of a head for pairs": "rotary weights in the other layout (GPT-J's pairs, NeoX's halves): `is_neox_style`, "
    "or a conversion that permutes q and k, done twice or not at all",
    "halves swapped": "gate and up, or key and value, fused the other way round",
    "heads": "the order of heads where q, k and v are split or fused; of shards where they are gathered",
    "rows": "the order of tokens: padding on the other side, sequences of a batch in another order, experts' tokens "
    "not put back",
}


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


def _factor(pair: _Pair) -> Iterator[Cause]:
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
    evidence = f"all {x.size} samples by a factor of {factor:.5g}, to {_away(factor * x, y):.2g}"
    if min(abs(factor / 2.0 - 1.0), abs(factor / 0.5 - 1.0)) < near:
        half = factor < 1.0
        yield Cause(
            signature="factor-2",
            what=f"{'half of' if half else 'twice'} what it should be, as with the other FP8 dialect",
            evidence=evidence,
            look="bytes of e4m3fn read as e4m3fnuz are half as large: `crosstie preflight` says whether the loader "
            "converts them, `crosstie convert` does it exactly"
            if half
            else "e4m3fnuz bytes read as e4m3fn, or scales doubled twice: a checkpoint that was converted, and is "
            "converted again while it is loaded (`crosstie preflight`)",
        )
    elif abs(factor + 1.0) < near:
        yield Cause(
            signature="sign",
            what="the sign is the other",
            evidence=evidence,
            look="a subtraction with its sides swapped",
        )
    else:
        scale = 1.0 / factor
        yield Cause(
            signature="scale",
            what=f"a scale is missing, or applied twice: {factor:.4g} for all values",
            evidence=f"{evidence}; a scale of {scale:.5g} taken as 1 would look so",
            look="weight_scale, input_scale or k_scale that the loader did not find and took as 1; the softmax scale; "
            "a multiplier of the config (embedding, residual, logits)",
        )


def _cap(pair: _Pair, capped: Floats, free: Floats) -> float | None:
    """The c for which `capped` is c tanh(`free` / c)."""
    largest = float(np.abs(capped).max())
    if not largest:
        return None

    def away(c: float) -> float:
        return _away(c * np.tanh(free / c), capped)

    given = [float(value) for name, value in pair.settings.items() if "softcap" in name and type(value) in (int, float)]
    best, wide = min([*given, *largest * np.geomspace(1.0001, 20.0, 40)], key=away), 1.1
    for _ in range(7):
        best, wide = min([best, *best * np.geomspace(1 / wide, wide, 21)], key=away), wide**0.15
    return float(best) if away(best) <= 4.0 * pair.tolerance else None


def _capped(pair: _Pair) -> Iterator[Cause]:
    if not np.isfinite(pair.x).all() or not np.isfinite(pair.y).all():
        return
    for capped, free, what in (
        (pair.x, pair.y, "uncapped: the first caps these values and the second does not"),
        (pair.y, pair.x, "capped: the second caps these values and the first does not"),
    ):
        cap = _cap(pair, capped, free)
        if cap is not None:
            yield Cause(
                signature="softcap", what=f"{what}, at {cap:.4g}",
                evidence=f"c tanh(x / c) with c = {cap:.4g} makes one of the other, to "
                f"{_away(cap * np.tanh(free / cap), capped):.2g}",
                look="attn_logit_softcapping or final_logit_softcapping, which the attention backend may not know",
            )  # fmt: skip
            return


def _by_column(pair: _Pair) -> Iterator[Cause]:
    if len(pair.x) < 3:
        return
    added = np.median(pair.y - pair.x, axis=0)
    if np.abs(added).max() > 0.0 and pair.explains(pair.x + added):
        yield Cause(
            signature="bias",
            what="a bias is missing, or added twice: each column is off by the same in every row",
            evidence=f"{_away(pair.x + added, pair.y):.2g} remains once it is added",
            look="a bias that the loader did not find; one that every rank adds before the all-reduce",
        )
        return
    found = _ratios(pair.x, pair.y, axis=0)
    if found is not None and pair.explains(found * pair.x):
        norm = "norm" in pair.entry.kind.lower()
        yield Cause(
            signature="scale-by-channel",
            what="each column has a factor of its own: scales by channel are missing"
            + (", or the norm's weight is w in place of 1 + w" if norm else ""),
            evidence=f"factors {float(found.min()):.4g} to {float(found.max()):.4g}, the same in {len(pair.x)} rows",
            look="weight_scale by channel taken as 1; smoothing factors; "
            + ("Gemma's norms, which store w - 1" if norm else "channels in another order than their scales"),
        )


def _by_row(pair: _Pair) -> Iterator[Cause]:
    if pair.x.shape[1] < 3 or len(pair.x) < 2:
        return
    found = _ratios(pair.x, pair.y, axis=1)
    if found is not None and pair.explains(found * pair.x):
        yield Cause(
            signature="scale-by-token",
            what="each row has a factor of its own: a scale by token, or a normalisation, is missing",
            evidence=f"factors {float(found.min()):.4g} to {float(found.max()):.4g}, the same in all sampled columns",
            look="the dynamic scale of activations; a norm that is skipped or taken with another epsilon; weights of "
            "experts that are not renormalised",
        )


def _ratios(x: Floats, y: Floats, axis: int) -> Floats | None:
    size = (x * x).sum(axis, keepdims=True)
    return (x * y).sum(axis, keepdims=True) / size if (size > 0.0).all() else None


def _positions(pair: _Pair) -> Iterator[Cause]:
    """The first token agrees and later ones do not: it attends to itself alone, whatever its position means."""
    if len(pair.x) < 3 or pair.rows[0] != 0:
        return
    errors = [_away(pair.y[i], pair.x[i]) for i in range(len(pair.x))]
    rotary = "rotary" in pair.entry.kind.lower() or "rope" in pair.entry.kind.lower()
    if errors[0] <= 4.0 * pair.tolerance < float(np.median(errors[1:])):
        scaling = pair.settings.get("rope_scaling") or pair.settings.get("rope_parameters")
        said = f"; the config says {scaling}" if scaling else ""
        yield Cause(
            signature="positions",
            what="position 0 agrees and later ones do not: "
            + ("the rotary angles are others" if rotary else "positions, the mask or the cache"),
            evidence=f"error {errors[0]:.2g} at row 0, " + ", ".join(
                f"{error:.2g} at {row}" for row, error in zip(pair.rows[1:], errors[1:], strict=True)
            ) + said,
            look="RoPE scaling that is dropped or another (rope_scaling, rope_theta, a factor by wavelength); pairs "
            "for halves; a mask that shows too much or too little; keys written to other slots of the cache",
        )  # fmt: skip


def _few(pair: _Pair) -> Iterator[Cause]:
    """Most rows or groups agree, and a few do not."""
    for name, one, other in (("groups of columns", pair.a.groups, pair.b.groups), ("rows", pair.a.rows, pair.b.rows)):
        if len(one) < 4:
            continue
        typical = math.sqrt(float(np.mean(one[:, 0] ** 2))) or 1.0
        off = np.abs(one[:, 0] - other[:, 0]) / np.maximum(one[:, 0], 0.1 * typical)
        bad = np.flatnonzero(off > 4.0 * pair.tolerance)
        if 0 < len(bad) <= len(one) // 2:
            yield Cause(
                signature="part",
                what=f"{len(bad)} of {len(one)} {name} differ, the others agree",
                evidence=f"{name} {_spans(bad)}, by up to {float(off.max()):.2g}",
                look="one shard, head or expert: its weights, its scale, or a tile that the kernel handles apart",
            )
            return


_FORMATS = {
    "FP8 (e4m3)": 2.0**-4, "bfloat16": 2.0**-8, "TF32 or float16": 2.0**-11, "sums in another order": 2.0**-20,
}  # fmt: skip


def _precision(pair: _Pair) -> Iterator[Cause]:
    """No relation holds. Where the two are still close, an arithmetic of fewer digits explains it."""
    error = _away(pair.y, pair.x)
    likes: Callable[[float], bool] = lambda unit: 0.1 * unit < error < 4.0 * unit  # noqa: E731
    name = next((name for name, unit in _FORMATS.items() if likes(unit)), None)
    if name is not None and error < 0.2:
        yield Cause(
            signature="precision",
            what=f"close, and further apart than its type explains: as if computed in {name}",
            evidence=f"error {error:.2g} over {pair.x.size} samples, norms {pair.a.norm:.5g} and {pair.b.norm:.5g}",
            look="a product in a narrower type than on the other machine (allow_tf32, an FP8 path, a fused kernel)",
        )
        return
    a, b = np.nan_to_num(pair.x).ravel(), np.nan_to_num(pair.y).ravel()
    sizes = math.sqrt(float((a * a).sum() * (b * b).sum()))
    cosine = float((a * b).sum()) / sizes if sizes else 0.0
    ratio = pair.b.norm / pair.a.norm if pair.a.norm else math.inf
    yield Cause(
        signature="unknown",
        what="other values, by no relation that is known here",
        evidence=f"cosine {cosine:.3f}, norm {ratio:.4g} of the first's",
        look="the weights themselves (another tensor loaded in its place, transposed, block scales in another order), "
        "or an operation that is another: an activation, a mask, a norm's epsilon",
    )

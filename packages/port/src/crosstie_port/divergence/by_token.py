"""Signatures that lie in which tokens differ: masks, positions, windows, the softmax, experts chosen by a router."""

from collections.abc import Iterator

import numpy as np

from crosstie_port.divergence.digest import MASK, Floats, normed_rows
from crosstie_port.divergence.masks import mask_difference
from crosstie_port.divergence.pair import Cause, ComparedPair, cause, distance, is_rotary


def other_mask(pair: ComparedPair) -> Iterator[Cause]:
    if pair.a.dtype == pair.b.dtype == MASK:
        what, figures = mask_difference(pair.a, pair.b, pair.known.seed)
        yield cause("mask", figures, f"another attention mask: {what}")


def other_indices(pair: ComparedPair) -> Iterator[Cause]:
    if not pair.a.is_whole:
        return
    shift = set((pair.y - pair.x).ravel().tolist())
    if len(shift) == 1 and 0.0 not in shift and pair.x.size > 1:
        by = int(shift.pop())
        yield cause(
            "position-shift",
            f"all {pair.x.size} sampled ones, and the mean by {pair.b.mean - pair.a.mean:.4g}",
            f"every one is {abs(by)} {'higher' if by > 0 else 'lower'}: positions begin at another number",
        )
    else:
        differ = float(np.mean(pair.x != pair.y))
        wide = max(pair.known.margins.values(), default=0.0)
        margins = f"; margins between the experts up to {wide:.2g}, scores {pair.known.scores_off:.2g} off"
        yield cause("indices", f"{differ:.0%} of the sampled ones differ{margins if wide else ''}")


def shifted(pair: ComparedPair) -> Iterator[Cause]:
    """Each token has what the one some places further has: angles of a rotary embedding, or rows of a table."""
    at = normed_rows(pair.a.shape, pair.known.seed)
    one, other = pair.a.rows, pair.b.rows
    # Every row.
    if len(at) < 8 or (np.diff(at) != 1).any():
        return
    unmoved = distance(one, other)
    for by in (1, -1, 2, -2, 3, -3, 4, -4):
        there, here = (one[by:], other[:-by]) if by > 0 else (one[:by], other[-by:])
        if 8.0 * distance(there, here) < unmoved > pair.tolerance >= distance(there, here):
            yield cause(
                "position-shift",
                f"norm, mean and largest of {len(there)} rows agree to {distance(there, here):.2g} once moved",
                f"every token has what the one {abs(by)} {'after' if by > 0 else 'before'} it has in the first",
            )
            return


def later_tokens(pair: ComparedPair) -> Iterator[Cause]:
    """The first token agrees and later ones do not: it attends to itself alone, whatever its position means."""
    if len(pair.x) < 3 or pair.rows[0] != 0:
        return
    if pair.entry.side == "in" and _sees_ahead(pair):
        yield cause("mask-ahead", f"the norm of row {pair.a.rows.shape[0] - 1} agrees, and that of row 0 does not")
        return
    errors = [distance(pair.y[i], pair.x[i]) for i in range(len(pair.x))]
    rotary = is_rotary(pair.entry.kind)
    if errors[0] <= 4.0 * pair.tolerance < float(np.median(errors[1:])):
        if not rotary and pair.entry.side == "in" and (inside := _window(pair, errors) or _sharper(pair)) is not None:
            yield inside
            return
        scaling = pair.known.settings.get("rope_scaling") or pair.known.settings.get("rope_parameters")
        others = [*pair.known.suspects, "the cache", "the softmax's scale"]
        what = "the rotary angles" if rotary else " or ".join(others)
        said = f"; the config says {scaling}" if scaling else ""
        yield cause(
            "positions",
            (
                f"error {errors[0]:.2g} at row 0, "
                + ", ".join(f"{error:.2g} at {row}" for row, error in zip(pair.rows[1:], errors[1:], strict=True))
                + said
            ),
            f"position 0 agrees and later ones do not: {what}",
        )


def _off_by(pair: ComparedPair) -> Floats:
    """By how much the norm of each row differs, relative."""
    return np.asarray(np.abs(pair.b.rows[:, 0] / np.maximum(pair.a.rows[:, 0], 1e-300) - 1.0))


def _sees_ahead(pair: ComparedPair) -> bool:
    """The last row agrees and the first does not, nor do most."""
    off = _off_by(pair)
    rounding = 4.0 * pair.tolerance
    return bool(len(off) > 4 and off[-1] <= rounding < off[0] and 8.0 * off[-1] < np.median(off[:-1]) > rounding)


def _window(pair: ComparedPair, errors: list[float]) -> Cause | None:
    """Tokens up to one agree, and those after it do not at once: what a token sees ends earlier in one of the two."""
    off, at = _off_by(pair), normed_rows(pair.a.shape, pair.known.seed)
    first = int(np.argmax(off > pair.tolerance))
    later = [error for row, error in zip(pair.rows, errors, strict=True) if row >= at[first]]
    # What grows from token to token is no window.
    if first < 3 or not later or 16.0 * off[:first].max() > min(later):
        return None
    return cause(
        "window",
        ", ".join(f"{error:.2g} at row {row}" for row, error in zip(pair.rows, errors, strict=True)),
        f"tokens up to {at[first - 1]} agree and later ones do not: a sliding window, or keys lost beyond it",
    )


def _sharper(pair: ComparedPair) -> Cause | None:
    """A softmax that is scaled up averages less: what it makes is longer for nearly all tokens but the first."""
    one, other = pair.a.rows[1:, 0], pair.b.rows[1:, 0]
    off = _off_by(pair)[1:] > 4.0 * pair.tolerance
    if off.sum() < 8:
        return None
    longer = float(np.mean(other[off] > one[off]))
    if 0.1 < longer < 0.9:
        return None
    word = "larger" if longer > 0.5 else "smaller"
    return cause(
        "softmax-scale",
        f"the norms of {max(longer, 1.0 - longer):.0%} of {int(off.sum())} rows that differ are {word}",
        f"position 0 agrees, and later ones are {'longer' if longer > 0.5 else 'shorter'}: the softmax's scale is "
        f"{word}",
    )

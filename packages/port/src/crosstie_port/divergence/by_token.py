"""Signatures that lie in which tokens differ: masks, positions, windows, the softmax, experts chosen by a router."""

from collections.abc import Iterator

import numpy as np

from crosstie_port.divergence.digest import MASK, Floats, normed_rows
from crosstie_port.divergence.masks import mask_difference
from crosstie_port.divergence.pair import Cause, ComparedPair, distance, is_rotary


def other_mask(pair: ComparedPair) -> Iterator[Cause]:
    if pair.a.dtype == pair.b.dtype == MASK:
        what, figures = mask_difference(pair.a, pair.b, pair.known.seed)
        yield Cause(
            signature="mask", what=f"another attention mask: {what}", evidence=figures,
            look="is_causal, sliding_window and the side of the padding in the attention backend; whether True shows "
            "or blocks",
        )  # fmt: skip


_POSITION_IDS = (
    "position_ids after padding on the left, or after a cached prefix; an offset of the position embedding (OPT's and "
    "BART's 2)"
)


def other_indices(pair: ComparedPair) -> Iterator[Cause]:
    if not pair.a.is_whole:
        return
    shift = set((pair.y - pair.x).ravel().tolist())
    if len(shift) == 1 and 0.0 not in shift and pair.x.size > 1:
        by = int(shift.pop())
        yield Cause(
            signature="position-shift",
            what=f"every one is {abs(by)} {'higher' if by > 0 else 'lower'}: positions begin at another number",
            evidence=f"all {pair.x.size} sampled ones, and the mean by {pair.b.mean - pair.a.mean:.4g}",
            look=_POSITION_IDS,
        )
    else:
        differ = float(np.mean(pair.x != pair.y))
        wide = max(pair.known.margins.values(), default=0.0)
        margins = f"; margins between the experts up to {wide:.2g}, scores {pair.known.scores_off:.2g} off"
        yield Cause(
            signature="indices",
            what="other indices for more tokens than near ties explain",
            evidence=f"{differ:.0%} of the sampled ones differ{margins if wide else ''}",
            look="the order in which equal scores are taken; a bias of the router that is left out; groups of experts; "
            "position ids or a mask made another way",
        )


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
            yield Cause(
                signature="position-shift",
                what=f"every token has what the one {abs(by)} {'after' if by > 0 else 'before'} it has in the first",
                evidence=f"norm, mean and largest of {len(there)} rows agree to {distance(there, here):.2g} once moved",
                look=_POSITION_IDS,
            )
            return


def later_tokens(pair: ComparedPair) -> Iterator[Cause]:
    """The first token agrees and later ones do not: it attends to itself alone, whatever its position means."""
    if len(pair.x) < 3 or pair.rows[0] != 0:
        return
    if pair.entry.side == "in" and _sees_ahead(pair):
        yield Cause(
            signature="mask", what="the last token agrees and those before it do not: they see what comes after them",
            evidence=f"the norm of row {pair.a.rows.shape[0] - 1} agrees, and that of row 0 does not",
            look="is_causal of the attention backend; a mask that it does not take",
        )  # fmt: skip
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
        yield Cause(
            signature="positions",
            what=f"position 0 agrees and later ones do not: {what}",
            evidence=f"error {errors[0]:.2g} at row 0, " + ", ".join(
                f"{error:.2g} at {row}" for row, error in zip(pair.rows[1:], errors[1:], strict=True)
            ) + said,
            look="RoPE scaling that is dropped or another (rope_scaling, rope_theta, a factor by wavelength); pairs "
            "for halves; a mask that shows too much or too little; keys written to other slots of the cache",
        )  # fmt: skip


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
    return Cause(
        signature="window",
        what=f"tokens up to {at[first - 1]} agree and later ones do not: a sliding window, or keys lost beyond it",
        evidence=", ".join(f"{error:.2g} at row {row}" for row, error in zip(pair.rows, errors, strict=True)),
        look="sliding_window of the config and of the attention backend (inclusive in one, exclusive in the other); "
        "the size of a block of the cache; chunked attention",
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
    return Cause(
        signature="softmax-scale",
        what=f"position 0 agrees, and later ones are {'longer' if longer > 0.5 else 'shorter'}: the softmax's scale is "
        f"{word}",
        evidence=f"the norms of {max(longer, 1.0 - longer):.0%} of {int(off.sum())} rows that differ are {word}",
        look="1/sqrt(head_dim), attention_multiplier, query_pre_attn_scalar or YaRN's attention_factor as the backend "
        "takes it; a norm of q or k that is left out",
    )

"""How many drafts an engine makes unless told, and how many are kept: acceptance lengths by model, method and kind of
text, and the Speculation that follows.

A length counts the token that the model itself adds: 1 + kept drafts / verifying steps.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from crosstie.catalog.drafters import drafter_of
from crosstie.catalog.reading import cell_number, read_records, read_rows, sourced_file
from crosstie.core.errors import BadData, BadInput, UnknownName
from crosstie.core.fact import Basis
from crosstie.core.model import Model
from crosstie.core.speculation import (
    DEEPEST,
    METHODS,
    TEXTS,
    Method,
    Speculation,
    Text,
    by_position,
    constant_acceptance,
)

COLUMNS = ("model", "method", "text", "lengths", "low", "high", "basis", "date", "source", "note")
# The way of not speculating, where ways are listed.
NO_SPECULATION = "none"
# Depths that recipes of engines have: one at high load, three at low.
USUAL_DEPTHS = (1, 3)
# The row for models that nobody has measured.
ANY = "*"
_PAIR = re.compile(r"(\d+):(\d+(?:\.\d+)?)")
# Kept drafts on a kind of text that was not measured, over those on another kind of the same model.
_OTHER_TEXT = (0.7, 1.3)
_FILE = Path(__file__).parent / "data" / "drafts.toml"


class AcceptanceCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance lengths by depth, as one source has them."""

    model: str
    method: Method
    text: Text
    lengths: dict[int, float]
    # Kept drafts of other heads, modes and runs over these, least and most.
    low: float
    high: float
    basis: Basis
    source: str
    date: str
    note: str

    def by_position(self, depth: int) -> tuple[float, ...]:
        """Conditional acceptance; past the deepest measured one, what its last position keeps."""
        deepest = max(self.lengths)
        if set(self.lengths) == set(range(1, deepest + 1)):
            shares = by_position(tuple(self.lengths[i] for i in range(1, deepest + 1)))
        else:
            shares = constant_acceptance(self.lengths[deepest], deepest)
        return (*shares[:depth], *(shares[-1:] * max(depth - len(shares), 0)))


def read_acceptance(file: Path, models: Mapping[str, object]) -> tuple[AcceptanceCurve, ...]:
    """`models`: the ids that a row may name, besides `*` for all others."""
    return tuple(_curve(file, where, row, models) for where, row in read_rows(file, COLUMNS))


def _curve(file: Path, where: str, row: dict[str, str], models: Mapping[str, object]) -> AcceptanceCurve:
    if row["model"] != ANY and row["model"] not in models:
        raise BadData(file, where, f"model '{row['model']}' is not in the catalog")
    for column, known in (("method", METHODS), ("text", TEXTS)):
        if row[column] not in known:
            raise BadData(file, where, f"{column} '{row[column]}' is not one of {', '.join(known)}")
    lengths: dict[int, float] = {}
    for part in row["lengths"].split():
        match = _PAIR.fullmatch(part)
        if not match or not 1 <= int(match[1]) <= DEEPEST:
            raise BadData(file, where, f"lengths '{part}' is no DEPTH:LENGTH with a depth of 1 to {DEEPEST}")
        depth, length = int(match[1]), float(match[2])
        if not 1.0 <= length <= depth + 1.0:
            raise BadData(file, where, f"lengths '{part}': {depth} drafts give 1 to {depth + 1} tokens a step")
        lengths[depth] = length
    if not lengths:
        raise BadData(file, where, "lengths is empty")
    low, high = (cell_number(file, where, row, side) for side in ("low", "high"))
    if not 0.0 < low <= 1.0 <= high <= 10.0:
        raise BadData(file, where, "low and high are shares of the kept drafts, around 1")
    kept = {name: row[name] for name in ("model", "method", "text", "basis", "source", "date", "note")}
    return AcceptanceCurve(**kept, lengths=lengths, low=low, high=high)  # type: ignore[arg-type]


def parse_speculation(asked: str) -> tuple[Method, int, str]:
    """`mtp:3`, or `draft:4:MODEL`: the method, how many tokens it drafts, and the model that drafts them."""
    method, _, rest = asked.strip().partition(":")
    depth, _, draft = rest.partition(":")
    method = method.casefold()
    if method not in METHODS:
        raise BadInput(f"speculation '{asked}': its method must be one of {', '.join(METHODS)}, as in mtp:3")
    if not depth.isdigit() or not 1 <= int(depth) <= DEEPEST:
        raise BadInput(f"speculation '{asked}': write METHOD:DEPTH with a depth of 1 to {DEEPEST}, such as mtp:3")
    if draft and method != "draft":
        raise BadInput(f"speculation '{asked}': only draft takes a model")
    if method == "draft" and not draft:
        raise BadInput(f"speculation '{asked}': write draft:DEPTH:MODEL, with the model that drafts")
    return method, int(depth), draft  # type: ignore[return-value]


def speculation_of(
    curves: Sequence[AcceptanceCurve],
    model: Model,
    method: Method,
    depth: int,
    *,
    text: str = "chat",
    length: float | None = None,
    draft: Model | None = None,
) -> Speculation:
    """With `length` as the acceptance length where one is given, else what was measured nearest."""
    if text not in TEXTS:
        raise UnknownName("kind of text", text, TEXTS)
    drafter = drafter_of(model, method, draft)
    own = [curve for curve in curves if curve.model == model.id and curve.method == method]
    same = [curve for curve in own if curve.text == text]
    unmeasured = [curve for curve in curves if curve.model == ANY and curve.method == method]
    # The first row of the text itself, a user's before a shipped one; of other texts the one with most depths.
    nearest = next(iter(same), None) or max(own or unmeasured, key=lambda curve: len(curve.lengths), default=None)
    if nearest is None:
        raise BadInput(f"speculation {method}: no acceptance is known of it")
    positions = nearest.by_position(depth)
    if len(nearest.lengths) == 1:
        full = [curve for curve in own if len(curve.lengths) > 1]
        deepest = max(nearest.lengths)
        if full:
            positions = _scaled(full[0].by_position(deepest), nearest.lengths[deepest], depth)
    low, high = nearest.low, nearest.high
    basis, source, day = nearest.basis, nearest.source, nearest.date
    if not same and own:
        low, high, basis = low * _OTHER_TEXT[0], high * _OTHER_TEXT[1], "derived"
        source = f"{source}, measured on {nearest.text}"
    if length is not None:
        positions, basis, source = _scaled(positions, length, depth), "claimed", "given"
        low = high = 1.0
    speculation = Speculation(
        method=method, acceptance=positions, drafter=drafter, text=text, range=(1.0, 1.0), basis=basis, source=source,
        date=day,
    )  # fmt: skip
    kept, most = speculation.acceptance_length - 1.0, float(depth)
    return msgspec.structs.replace(speculation, range=(1.0 + low * kept, 1.0 + min(high * kept, most)))


def _scaled(positions: tuple[float, ...], length: float, depth: int) -> tuple[float, ...]:
    """The same decline by position with another length: every chance to the same power."""
    if not 1.0 <= length <= len(positions) + 1.0:
        raise BadInput(f"an acceptance length of {length:g}: {len(positions)} drafts give 1 to {len(positions) + 1}")
    positions = tuple(max(share, 1e-3) for share in positions)
    low, high = 0.0, 1000.0
    for _ in range(80):
        power = 0.5 * (low + high)
        total = survived = 1.0
        for share in positions:
            survived *= share**power
            total += survived
        low, high = (power, high) if total > length else (low, power)
    scaled = tuple(share ** (0.5 * (low + high)) for share in positions)
    return (*scaled[:depth], *(scaled[-1:] * max(depth - len(scaled), 0)))


class DefaultDepth(msgspec.Struct, frozen=True, kw_only=True):
    # Ids of stacks, or "*".
    engines: tuple[str, ...]
    methods: tuple[Method, ...]
    depth: Annotated[int, msgspec.Meta(ge=1, le=DEEPEST)]
    basis: Basis
    source: str
    date: str
    note: str = ""


@cache
def shipped_depths() -> tuple[DefaultDepth, ...]:
    return read_depths(_FILE)


def default_depth(engine: str, method: str) -> DefaultDepth | None:
    """Of an engine's id; None: neither the engine nor its documentation has one."""
    fitting = (depth for depth in shipped_depths() if method in depth.methods and {engine, ANY} & set(depth.engines))
    return next(fitting, None)


def read_depths(file: Path) -> tuple[DefaultDepth, ...]:
    with sourced_file(file, ["default"]) as (raw, sources):
        return read_records(file, "default", raw.get("default"), DefaultDepth, sources)

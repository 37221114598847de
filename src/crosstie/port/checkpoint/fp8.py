"""The two dialects of 8-bit E4M3 numbers, and the exact way from one to the other; scales doubled or halved.

A byte that is finite in both dialects means twice as much in e4m3fn (OCP; NVIDIA, gfx950) as in e4m3fnuz (gfx942).
So a conversion keeps the bytes and doubles or halves the scale; it is exact except for the bytes below, and for scales
that have no exact double or half in their type.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Dialect = Literal["e4m3fn", "e4m3fnuz"]
Bytes = NDArray[np.uint8]

DTYPES: dict[Dialect, str] = {"e4m3fn": "F8_E4M3", "e4m3fnuz": "F8_E4M3FNUZ"}
OTHER: dict[Dialect, Dialect] = {"e4m3fn": "e4m3fnuz", "e4m3fnuz": "e4m3fn"}
# What a scale is multiplied by when the bytes it belongs to are read in this dialect from now on.
SCALE_FACTOR: dict[Dialect, float] = {"e4m3fnuz": 2.0, "e4m3fn": 0.5}

# Minus zero in e4m3fn, the only NaN in e4m3fnuz.
_SIGN_ONLY = 0x80
_MAGNITUDE = 0x7F
# Without its sign: NaN in e4m3fn, 240 in e4m3fnuz, which would be 480 in e4m3fn, beyond its 448.
_ALL_ONES = 0x7F
# Without its sign, 240 in e4m3fn: the largest that a cast of the value to e4m3fnuz would keep.
_VALUE_240 = 0x77
# Scratch space that stays in a core's second-level cache.
_BLOCK = 1 << 18
# Weights that were rounded to minus zero are rare: rows of a block without one need no comparison.
_ROW = 1 << 12

_FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
_EXPONENT_BIAS = 127
_EXPONENT_NAN = 255


def _values(bias: int) -> NDArray[np.float64]:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 0xF, codes & 0x7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0 ** (1 - bias), (1 + mantissa / 8) * 2.0 ** (exponent - bias))
    return np.where(codes & _SIGN_ONLY, -magnitude, magnitude)


def _tables() -> dict[Dialect, NDArray[np.float64]]:
    fn, fnuz = _values(7), _values(8)
    fn[[_ALL_ONES, _ALL_ONES | _SIGN_ONLY]] = np.nan
    fnuz[_SIGN_ONLY] = np.nan
    for table in (fn, fnuz):
        table.flags.writeable = False
    return {"e4m3fn": fn, "e4m3fnuz": fnuz}


# What each of the 256 bytes means.
VALUES = _tables()
# Of the magnitudes, which are in the order of their bytes: those that are finite, and the middle between neighbours.
_MAGNITUDES = {dialect: table[:0x80][np.isfinite(table[:0x80])] for dialect, table in VALUES.items()}
_MIDDLES = {dialect: (found[1:] + found[:-1]) / 2 for dialect, found in _MAGNITUDES.items()}
LARGEST = {dialect: float(found[-1]) for dialect, found in _MAGNITUDES.items()}


def encode(values: NDArray[np.float64], dialect: Dialect) -> Bytes:
    """The nearest byte of each finite value, of two the even one; what is beyond the largest becomes the largest."""
    magnitudes = np.abs(values)
    codes = np.searchsorted(_MIDDLES[dialect], magnitudes)
    last = len(_MIDDLES[dialect]) - 1
    codes += (magnitudes == _MIDDLES[dialect][np.minimum(codes, last)]) & (codes % 2 == 1)
    signed: Bytes = codes.astype(np.uint8)
    signed[np.signbit(values)] |= _SIGN_ONLY
    # A minus zero would be NaN in e4m3fnuz.
    if dialect == "e4m3fnuz":
        signed[signed == _SIGN_ONLY] = 0
    return signed


class Codes(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in E4M3 bytes, as far as the dialects differ over it."""

    total: int = 0
    # 0x80: minus zero in e4m3fn, NaN in e4m3fnuz.
    sign_only: int = 0
    # 0x7F and 0xFF: NaN in e4m3fn, +-240 in e4m3fnuz.
    all_ones: int = 0
    # Read as e4m3fn: magnitudes of 256 to 448, which a cast of the values to e4m3fnuz turns into NaN. Counted by
    # `Recoder.count` alone: it would cost a conversion an eighth of its time.
    beyond_240: int = 0

    def __add__(self, other: "Codes") -> "Codes":
        return Codes(
            total=self.total + other.total,
            sign_only=self.sign_only + other.sign_only,
            all_ones=self.all_ones + other.all_ones,
            beyond_240=self.beyond_240 + other.beyond_240,
        )

    def nans(self, dialect: Dialect) -> int:
        return self.all_ones if dialect == "e4m3fn" else self.sign_only

    def lost(self, to: Dialect) -> int:
        """How many bytes have no counterpart: NaN either way, and +-240 of e4m3fnuz in e4m3fn."""
        return self.all_ones + (self.sign_only if to == "e4m3fn" else 0)


class Recoder:
    """Converts and counts, block by block, in scratch space of its own: one for each process."""

    def __init__(self, to: Dialect):
        self._clears = to == "e4m3fnuz"
        self._mask = np.empty(_BLOCK, np.bool_)

    def recode(self, codes: Bytes, out: Bytes) -> Codes:
        """`out` gets the bytes in the other dialect; those that are lost (see `Codes.lost`) have no meaning there."""
        if 0 < codes.size <= _BLOCK:
            return self._recode_block(codes, out)
        blocks = zip(_blocks(codes), _blocks(out), strict=True)
        return sum((self._recode_block(source, target) for source, target in blocks), Codes())

    def _recode_block(self, source: Bytes, target: Bytes) -> Codes:
        rows = _rows_with_sign_only(source)
        if rows is None:
            sign_only = self._clear_all(source, target)
        else:
            np.copyto(target, source)
            some = source.reshape(-1, _ROW)[rows]
            found = some == _SIGN_ONLY
            sign_only = int(np.count_nonzero(found))
            if self._clears and sign_only:
                some[found] = 0
                target.reshape(-1, _ROW)[rows] = some
        return Codes(total=source.size, sign_only=sign_only, all_ones=_count_all_ones(source))

    def _clear_all(self, source: Bytes, target: Bytes) -> int:
        mask = self._mask[: source.size]
        np.not_equal(source, _SIGN_ONLY, out=mask)
        if self._clears:
            np.multiply(source, mask.view(np.uint8), out=target)
        else:
            np.copyto(target, source)
        return source.size - int(np.count_nonzero(mask))

    def count(self, codes: Bytes) -> Codes:
        found = Codes()
        for block in _blocks(codes):
            magnitudes = block & _MAGNITUDE
            all_ones = _count_all_ones(block)
            found += Codes(
                total=block.size,
                sign_only=int(np.count_nonzero(block == _SIGN_ONLY)),
                all_ones=all_ones,
                beyond_240=int(np.count_nonzero(magnitudes > _VALUE_240)) - all_ones,
            )
        return found


def _rows_with_sign_only(codes: Bytes) -> NDArray[np.intp] | None:
    """Where the few are, in rows of so many bytes; None where they are everywhere, or the bytes make no whole rows."""
    if codes.size % _ROW:
        return None
    # With its sign, 0x80 is the least of all bytes.
    rows = np.flatnonzero(np.minimum.reduce(codes.view(np.int8).reshape(-1, _ROW), axis=1) == np.int8(-0x80))
    return rows if 4 * rows.size < codes.size // _ROW else None


def _count_all_ones(codes: Bytes) -> int:
    # Largest of all bytes with their sign, and without: two passes that are cheaper than one comparison.
    largest = np.maximum.reduce
    if largest(codes) < _ALL_ONES | _SIGN_ONLY and largest(codes.view(np.int8)) < _ALL_ONES:
        return 0
    return int(np.count_nonzero(codes & _MAGNITUDE == _ALL_ONES))


def same(some: Bytes, others: Bytes) -> bool:
    """As np.array_equal, eight bytes at a time where that is possible."""
    if some.size == others.size and some.size % 8 == 0:
        wide, wide_others = some.view(np.uint64), others.view(np.uint64)
        if wide.flags.aligned and wide_others.flags.aligned:
            return bool((wide == wide_others).all())
    return np.array_equal(some, others)


def _blocks(codes: Bytes) -> Iterator[Bytes]:
    for start in range(0, codes.size, _BLOCK):
        yield codes[start : start + _BLOCK]


class Inexact(ValueError):
    """A scale that no quantiser writes, or that has no exact double or half in its type; says which."""


def scale_values(raw: Bytes, dtype: str) -> NDArray[np.float64]:
    # Some NaN make casts complain.
    with np.errstate(invalid="ignore"):
        if dtype in _FLOATS:
            return raw.view(_FLOATS[dtype]).astype(np.float64)
        if dtype == "BF16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    # A power of two: F8_E8M0, or the same in a plain byte.
    values = np.ldexp(1.0, raw.astype(np.int32) - _EXPONENT_BIAS)
    values[raw == _EXPONENT_NAN] = np.nan
    return values


def sound_scales(raw: Bytes, dtype: str) -> NDArray[np.float64]:
    """As `scale_values`, all of them finite and positive."""
    found = scale_values(raw, dtype)
    if not np.isfinite(found).all():
        raise Inexact(f"{np.count_nonzero(~np.isfinite(found)):,} scales are not finite numbers")
    if not (found > 0).all():
        first = found[np.argmax(found <= 0)]
        raise Inexact(f"{np.count_nonzero(found <= 0):,} scales are not positive, such as {first:g}: they are damaged")
    return found


def rescale(raw: Bytes, dtype: str, factor: float) -> Bytes:
    """Each scale times `factor`, a power of two, in the same type."""
    before = sound_scales(raw, dtype)
    wanted = before * factor
    made = stored(wanted, dtype)
    wrong = scale_values(made, dtype) != wanted
    if wrong.any():
        first = before[np.argmax(wrong)]
        verb = "double" if factor > 1 else "half"
        raise Inexact(f"{np.count_nonzero(wrong):,} scales, such as {first:.6g}, have no exact {verb} in {dtype}")
    return made


def stored(values: NDArray[np.float64], dtype: str) -> Bytes:
    """The nearest, or some other number where there is none near: the caller compares."""
    with np.errstate(over="ignore", under="ignore"):
        if dtype in _FLOATS:
            return values.astype(_FLOATS[dtype]).view(np.uint8)
        if dtype == "BF16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    exponents = np.frexp(values)[1] - 1 + _EXPONENT_BIAS
    made: Bytes = np.clip(exponents, 0, _EXPONENT_NAN - 1).astype(np.uint8)
    return made

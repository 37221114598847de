"""Scales of any stored type doubled or halved, exactly or not at all."""

import numpy as np
from numpy.typing import NDArray

from crosstie.port.checkpoint.fp8 import Bytes

_FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
_EXPONENT_BIAS = 127
_EXPONENT_NAN = 255


class Inexact(ValueError):
    """A scale that has no exact double or half in its type; says which."""


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


def rescale(raw: Bytes, dtype: str, factor: float) -> Bytes:
    """Each scale times `factor`, a power of two, in the same type."""
    before = scale_values(raw, dtype)
    if not np.isfinite(before).all():
        raise Inexact(f"{np.count_nonzero(~np.isfinite(before)):,} scales are not finite numbers")
    wanted = before * factor
    made = _stored(wanted, dtype)
    wrong = scale_values(made, dtype) != wanted
    if wrong.any():
        first = before[np.argmax(wrong)]
        verb = "double" if factor > 1 else "half"
        raise Inexact(f"{np.count_nonzero(wrong):,} scales, such as {first:.6g}, have no exact {verb} in {dtype}")
    return made


def _stored(values: NDArray[np.float64], dtype: str) -> Bytes:
    """The nearest, or some other number where there is none near: the caller compares."""
    with np.errstate(over="ignore", under="ignore"):
        if dtype in _FLOATS:
            return values.astype(_FLOATS[dtype]).view(np.uint8)
        if dtype == "BF16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    exponents = np.frexp(values)[1] - 1 + _EXPONENT_BIAS
    stored: Bytes = np.clip(exponents, 0, _EXPONENT_NAN - 1).astype(np.uint8)
    return stored

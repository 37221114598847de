"""All 256 codes of both dialects, against an implementation of neither our making nor numpy's."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

from crosstie.port.checkpoint.fp8 import SCALE_FACTOR, VALUES, Codes, Dialect, Recoder

ALL = bytes(range(256))
ORACLES = {
    dialect: np.frombuffer(ALL, dtype=dtype).astype(np.float64)
    for dialect, dtype in (("e4m3fn", ml_dtypes.float8_e4m3fn), ("e4m3fnuz", ml_dtypes.float8_e4m3fnuz))
}
IN_BOTH = bytes(code for code in ALL if code & 0x7F != 0x7F and code != 0x80)


def recoded(codes: bytes, to: Dialect) -> bytes:
    """In the other dialect; raises where a byte has no counterpart."""
    source = np.frombuffer(codes, np.uint8)
    out = np.empty_like(source)
    lost = Recoder(to).recode(source, out).lost(to)
    if lost:
        raise ValueError(f"{lost:,} of {source.size:,} bytes have no counterpart in {to}")
    return out.tobytes()


def to_fnuz(codes: bytes) -> bytes:
    return recoded(codes, "e4m3fnuz")


def to_fn(codes: bytes) -> bytes:
    return recoded(codes, "e4m3fn")


def count_codes(codes: bytes) -> Codes:
    return Recoder("e4m3fn").count(np.frombuffer(codes, np.uint8))


@pytest.mark.parametrize("dialect", ["e4m3fn", "e4m3fnuz"])
def test_the_tables_are_those_of_ml_dtypes(dialect: str) -> None:
    ours = VALUES[dialect]  # type: ignore[index]
    np.testing.assert_array_equal(ours, ORACLES[dialect])
    # assert_array_equal takes -0 for 0.
    finite = ~np.isnan(ours)
    np.testing.assert_array_equal(np.signbit(ours)[finite], np.signbit(ORACLES[dialect])[finite])


def test_every_code_that_fn_has_keeps_its_value_in_fnuz() -> None:
    convertible = bytes(code for code in ALL if code & 0x7F != 0x7F)
    there = np.frombuffer(to_fnuz(convertible), np.uint8)
    before = ORACLES["e4m3fn"][np.frombuffer(convertible, np.uint8)]
    np.testing.assert_array_equal(before, SCALE_FACTOR["e4m3fnuz"] * ORACLES["e4m3fnuz"][there])
    assert len(convertible) == 254
    assert to_fnuz(b"\x80") == b"\x00"


@pytest.mark.parametrize("places", [[], [5], [4095, 4096, 200_000], range(0, 1 << 18, 64)])
@pytest.mark.parametrize("size", [1 << 18, (1 << 18) + 5, 4096, 4097])
def test_minus_zero_is_cleared_and_counted_wherever_it_is(places: Sequence[int], size: int) -> None:
    codes = np.resize(np.frombuffer(IN_BOTH, np.uint8), size).copy()
    there = [place for place in places if place < size]
    codes[there] = 0x80
    for to, left in (("e4m3fnuz", 0x00), ("e4m3fn", 0x80)):
        out = np.empty_like(codes)
        found = Recoder(to).recode(codes, out)  # type: ignore[arg-type]
        assert found == Codes(total=size, sign_only=len(there))
        wanted = codes.copy()
        wanted[there] = left
        np.testing.assert_array_equal(out, wanted)


def test_every_code_that_fnuz_has_and_fn_can_hold_keeps_its_value() -> None:
    there = np.frombuffer(to_fn(IN_BOTH), np.uint8)
    before = ORACLES["e4m3fnuz"][np.frombuffer(IN_BOTH, np.uint8)]
    np.testing.assert_array_equal(before, SCALE_FACTOR["e4m3fn"] * ORACLES["e4m3fn"][there])
    assert len(IN_BOTH) == 253


@pytest.mark.parametrize("code", [b"\x7f", b"\xff"])
def test_nan_of_fn_and_240_of_fnuz_are_refused(code: bytes) -> None:
    with pytest.raises(ValueError, match="1 of 2 bytes have no counterpart in e4m3fnuz"):
        to_fnuz(b"\x01" + code)
    with pytest.raises(ValueError, match="no counterpart in e4m3fn"):
        to_fn(code)


def test_nan_of_fnuz_is_refused() -> None:
    with pytest.raises(ValueError, match="no counterpart in e4m3fn"):
        to_fn(b"\x80")


@given(st.binary(max_size=400))
def test_there_and_back_loses_the_sign_of_zero_alone(raw: bytes) -> None:
    codes = bytes(code for code in raw if code & 0x7F != 0x7F)
    assert to_fn(to_fnuz(codes)) == codes.replace(b"\x80", b"\x00")


@given(st.binary(max_size=400))
def test_counts_are_what_a_loop_would_count(raw: bytes) -> None:
    values = [VALUES["e4m3fn"][code] for code in raw]
    assert count_codes(raw) == Codes(
        total=len(raw),
        sign_only=raw.count(b"\x80"),
        all_ones=sum(bool(np.isnan(value)) for value in values),
        beyond_240=sum(bool(abs(value) > 240) for value in values),
    )


def test_counts_and_bytes_are_right_across_blocks() -> None:
    codes = np.tile(np.frombuffer(IN_BOTH + b"\x80", np.uint8), 3000)
    out = np.empty_like(codes)
    assert Recoder("e4m3fnuz").recode(codes, out) == Codes(total=762_000, sign_only=3000)
    np.testing.assert_array_equal(out, np.where(codes == 0x80, 0, codes))
    assert count_codes(codes.tobytes()) == Codes(total=762_000, sign_only=3000, beyond_240=42_000)


def test_what_is_nan_depends_on_who_reads() -> None:
    found = count_codes(b"\x80\x80\x7f")
    assert (found.nans("e4m3fn"), found.nans("e4m3fnuz")) == (1, 2)
    assert (found.lost("e4m3fnuz"), found.lost("e4m3fn")) == (1, 3)

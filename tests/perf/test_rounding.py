"""Nine digits: near, the same again, and the same for numbers whose last bits differ."""

import numpy as np

from crosstie.perf.rounding import nine_digits

NUMBERS = np.random.default_rng(3).lognormal(0.0, 12.0, 10_000) * np.tile([1.0, -1.0], 5_000)


def test_it_is_near_and_stays_what_it_is() -> None:
    found = nine_digits(NUMBERS)
    assert np.abs(found / NUMBERS - 1.0).max() <= 1e-9
    assert np.array_equal(nine_digits(found), found)
    assert (found != NUMBERS).mean() > 0.99, "else nothing was rounded"
    assert nine_digits([0.0, 1.0, 0.5, 48.0, np.inf]).tolist() == [0.0, 1.0, 0.5, 48.0, np.inf]
    assert np.isnan(nine_digits([np.nan])[0])


def test_numbers_that_differ_in_their_last_bits_become_the_same() -> None:
    beside = NUMBERS * (1.0 + np.random.default_rng(4).integers(-4, 5, len(NUMBERS)) * 2.0**-52)
    assert (beside != NUMBERS).any()
    # But those few between which the border of two lies.
    assert (nine_digits(beside) != nine_digits(NUMBERS)).sum() <= 1


def test_order_is_kept() -> None:
    found = nine_digits(np.sort(NUMBERS))
    assert (np.diff(found) >= 0.0).all()

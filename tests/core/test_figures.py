"""Numbers as people read them: no exponent, nothing rounded away that matters."""

import math

import pytest

from crosstie.core.figures import arithmetic, bandwidth, dollars, gigabytes, many, number, percent, seconds, share


@pytest.mark.parametrize(
    ("shown", "written"),
    [
        (dollars(8.7e-5), "$0.000087"), (dollars(0.0), "$0.00"), (dollars(82.4), "$82.40"), (dollars(60_152), "$60,152"),
        (dollars(2_770_000), "$2.77M"), (arithmetic(2e16), "20,000 TFLOP/s"), (bandwidth(7.7e12), "7.7 TB/s"),
        (bandwidth(450e9), "450 GB/s"), (bandwidth(325e3), "0.325 MB/s"), (seconds(4.2e-7), "0.42 us"),
        (seconds(0.0213), "21.3 ms"), (seconds(1.812), "1,812 ms"), (seconds(20.0), "20 s"), (seconds(math.inf), "never"),
        (gigabytes(141.1e9), "141.1 GB"), (gigabytes(2e6), "2.0 MB"), (share(0.004), "<1%"), (share(0.0), "0%"),
        (percent(0.1234), "12.3%"), (percent(math.nan), "-"), (many(3.13e9), "3.13 billion"), (number(None), "-"),
        (number(304), "304"), (number(20_000.4), "20,000"),
    ],
)  # fmt: skip
def test_numbers(shown: str, written: str) -> None:
    assert shown == written

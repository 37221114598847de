"""What accelerators draw while they serve."""

from pathlib import Path

import pytest

from crosstie.catalog.library import SHIPPED, Catalog
from crosstie.catalog.power import read_power
from crosstie.core.errors import BadData


def test_power_grows_with_work_and_stays_within_the_rating(catalog: Catalog) -> None:
    for accelerator in catalog.accelerators.values():
        shares = [catalog.power.fraction(accelerator, roofline, 8) for roofline in (0.0, 0.05, 0.2, 0.5, 1.0)]
        assert shares == sorted(shares)
        assert catalog.power.least.value <= shares[0] <= shares[-1] <= 1.0
        loads = [catalog.power.fraction(accelerator, 0.2, load) for load in (0.1, 1, 10, 1000)]
        assert loads == sorted(loads)
        assert catalog.power.watts(accelerator, 0.2, 8) == pytest.approx(accelerator.chip.tdp.si * shares[2])


def test_a_published_point_is_met(catalog: Catalog) -> None:
    """MI300X runs near its 750 W under any load of note, a B200 between 450 and 950 of 1,000."""
    assert catalog.power.watts(catalog.accelerator("mi300x"), 0.11, 8) == pytest.approx(700, rel=0.1)
    assert 450 < catalog.power.watts(catalog.accelerator("b200"), 0.3, 1) < 950


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("value = 0.731", "value = 7.31", "scale.b200"),
        ("b200 =", "b900 =", "b900"),
        ("least = ", "most = ", "most"),
    ],
)
def test_a_slip_is_named(tmp_path: Path, catalog: Catalog, old: str, new: str, key: str) -> None:
    file = tmp_path / "power.toml"
    file.write_text((SHIPPED / "power.toml").read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(BadData, match=key):
        read_power(file, catalog.accelerators)

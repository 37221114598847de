"""Every number of the shipped catalog has a unit, a basis, a source and a date."""

import re
from collections.abc import Iterator

import msgspec
import pytest

from crosstie.catalog.describe import describe
from crosstie.catalog.library import Catalog
from crosstie.core.fact import BASES, Fact
from crosstie.core.figures import significant, with_unit
from crosstie.core.units import UNITS


def shipped_lines(catalog: Catalog) -> Iterator[tuple[str, str, str, str]]:
    for name in (*catalog.accelerators, *catalog.models, *catalog.stacks):
        for line in describe(catalog, name)[1]:
            yield f"{name} {line.key}", line.basis, line.source, line.date


def test_no_number_without_provenance(catalog: Catalog) -> None:
    seen = 0
    for where, basis, source, day in shipped_lines(catalog):
        assert basis in BASES, where
        assert len(source) > 3, where
        assert re.fullmatch(r"\d{4}-\d{2}(-\d{2})?", day), where
        seen += 1
    assert seen > 1000


def test_conflicts_are_kept_with_a_reason(catalog: Catalog) -> None:
    fact = catalog.accelerator("b200").memory.bandwidth
    assert fact.si == 7.7e12
    assert 8.0 in [other.value for other in fact.alternatives]
    assert fact.chosen_because


def test_sparse_peaks_are_kept_apart(catalog: Catalog) -> None:
    h100 = catalog.accelerator("h100-sxm")
    assert h100.dense["fp8"].si == pytest.approx(1.979e15, rel=1e-3)
    assert h100.sparse["fp8"].si == pytest.approx(3.958e15, rel=1e-3)


@pytest.mark.parametrize(
    ("unit", "si"), [("GiB", 2**30), ("GB/s", 1e9), ("Gbit/s", 1.25e8), ("TFLOP/s", 1e12), ("USD/h", 1 / 3600)]
)
def test_units_become_si(unit: str, si: float) -> None:
    assert UNITS[unit].si == pytest.approx(si)
    assert Fact(value=2, unit=unit, basis="spec", source="s", date="2026-01").si == pytest.approx(2 * si)


def test_facts_do_not_change() -> None:
    fact = Fact(value=2, unit="GB", basis="spec", source="s", date="2026-01")
    with pytest.raises(AttributeError):
        fact.value = 3.0  # type: ignore[misc]
    assert msgspec.structs.replace(fact, value=3.0).value == 3.0


@pytest.mark.parametrize(
    ("value", "figures", "text"),
    [(8.7e-5, 2, "0.000087"), (2e4, 3, "20,000"), (20_460.0, 3, "20,460"), (9.996, 3, "10"), (0.0, 3, "0"), (-1.5, 3, "-1.5")],
)  # fmt: skip
def test_numbers_have_separators_and_no_exponent(value: float, figures: int, text: str) -> None:
    assert significant(value, figures) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (304, "count", "304"), (206_141_652_992, "B", "191.98 GiB"), (512, "B", "512 B"), (0.9, "fraction", "0.9"),
        (0.0723, "1/year", "7.23%/year"), (1307.4, "TFLOP/s", "1,307.4 TFLOP/s"), (5, "year", "5 years"),
    ],
)  # fmt: skip
def test_quantities_are_written_as_people_do(value: float, unit: str, text: str) -> None:
    assert with_unit(value, unit) == text

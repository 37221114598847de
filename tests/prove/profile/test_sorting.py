"""Each row of the table takes its own examples, and nothing is guessed."""

from pathlib import Path

import pytest

from crosstie.core.errors import BadData
from crosstie_port.profile import sorting
from crosstie_port.profile.sorting import UNKNOWN, KernelKind, KernelRule, rows, sorted_by_name

EXAMPLES = [(row, example) for row, _ in rows() for example in row.examples]


@pytest.mark.parametrize(("row", "example"), EXAMPLES, ids=[example[:60] for _, example in EXAMPLES])
def test_an_example_goes_to_its_own_row(row: KernelRule, example: str) -> None:
    assert sorted_by_name(example) == KernelKind(row.sort, row.what)


@pytest.mark.parametrize("name", ["void mine::frobnicate<float>(float*)", "kernel 17", ""])
def test_what_no_row_names_is_not_known(name: str) -> None:
    assert sorted_by_name(name).sort == UNKNOWN


def test_every_kind_of_bookkeeping_has_a_row() -> None:
    assert {row.what for row, _ in rows() if row.sort == "bookkeeping"} == {
        "routing", "sorting", "sampling", "casts", "copies", "gathers", "cache",
    }  # fmt: skip


def test_a_row_without_a_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels.toml").write_text(
        '[[kernel]]\nsort = "attention"\npattern = "x"\nexamples = ["x"]\nsource = ""\n'
    )
    monkeypatch.setattr(sorting, "DATA", tmp_path / "kernels.toml")
    rows.cache_clear()
    try:
        with pytest.raises(BadData, match="source: must be a non-empty string"):
            rows()
    finally:
        rows.cache_clear()

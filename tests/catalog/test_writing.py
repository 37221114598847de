from pathlib import Path

import pytest

from crosstie.catalog.writing import write_whole


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "a.toml"
    target.write_text("old")
    write_whole(target, lambda draft: draft.write_text("new"))
    assert [file.read_text() for file in tmp_path.iterdir()] == ["new"]


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "a.toml"
    target.write_text("old")

    def half(draft: Path) -> None:
        draft.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(target, half)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]

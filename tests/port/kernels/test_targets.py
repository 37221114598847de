"""Instruction sets are rows of a file, each with its reason."""

from pathlib import Path

import pytest

from crosstie.core.errors import BadData
from crosstie_port.kernels.targets import isas

HEAD = "isa,wave_width,lds_kib,unit_lds_kib,simds,waves_per_simd,reserved_lds_kib,fp8,basis,source,date\n"
ROW = "gfx999,64,64,64,4,8,0,fp8e4nv fp8e5,assumed,a guess,2026-11-15\n"


def written(folder: Path, text: str) -> Path:
    file = folder / "isas.csv"
    file.write_text(text)
    return file


def test_a_new_instruction_set_is_a_row(tmp_path: Path) -> None:
    found = isas(written(tmp_path, HEAD + ROW))["gfx999"]
    assert (found.lds_bytes, found.fp8, found.basis) == (65536, ("fp8e4nv", "fp8e5"), "assumed")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (ROW + ROW, "stands here twice"),
        (ROW.replace("gfx999", "mi300x"), "no instruction set"),
        (ROW.replace(",64,64,4", ",64,65536,4"), "unit_lds_kib '65536' must be a whole number from 16 to 1024"),
        (ROW.replace("fp8e5,", "fp9,"), "has other words than"),
        (ROW.replace("a guess", ""), "source is empty"),
        (ROW.replace("assumed", "remembered"), "basis 'remembered' is not one of"),
    ],
)
def test_a_row_without_sense_or_reason_fails(tmp_path: Path, row: str, reason: str) -> None:
    with pytest.raises(BadData, match=reason):
        isas(written(tmp_path, HEAD + row))

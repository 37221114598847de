"""What AITER's own kernels cover, as data and as a table."""

import json
from pathlib import Path

import pytest
from tests.conftest import Command

from crosstie.core.errors import BadData, BadInput
from crosstie_port.kernels.aiter import aiter_coverage, coverage


def kernels(about: str, isa: str) -> int:
    return sum(row.kernels for row in aiter_coverage([isa], about))


def test_fp4_products_are_gfx950s_alone() -> None:
    assert kernels("GEMM MXFP4", "gfx942") == 0
    assert kernels("GEMM MXFP4", "gfx950") > 30
    (row, *_) = aiter_coverage(["gfx942"], "GEMM MXFP4")
    assert (row.otherwise, row.triton) == ("none", "")
    assert "refuses parts without FP4" in row.instead


def test_what_takes_the_place_of_a_kernel_that_is_not_there() -> None:
    (row,) = aiter_coverage(["gfx942"], "MLA decode fp8 queries 32 heads")
    assert (row.kernels, row.otherwise, row.triton) == (0, "Triton", "decode_attention_fwd")
    assert row.instead.startswith("aiter/ops/triton/attention/mla_decode.py:")


def test_every_row_names_commit_and_line() -> None:
    rows = coverage()
    assert len(rows) > 150
    assert {row.isa for row in rows} == {"gfx942", "gfx950"}
    for row in rows:
        assert row.source.startswith("ROCm/aiter@")
        assert row.source.rpartition(":")[2].isdecimal() == (row.kernels > 0)


def test_the_table_of_two_parts(crosstie: Command) -> None:
    done = crosstie("preflight", "kernels", "--aiter", "MXFP4 silu bf16", "--on", "mi300x,mi355x")
    assert done.status == 0
    said = " ".join(done.out.split())
    assert "fused_moe_mxfp4_silu" in said
    assert "ROCm/aiter@" in said
    rows = json.loads(crosstie("preflight", "kernels", "--aiter", "MLA", "--on", "mi300x", "--json").out)["rows"]
    assert {row["isa"] for row in rows} == {"gfx942"}


@pytest.mark.parametrize(
    ("asked", "said"),
    [(("--on", "h200"), "no assembly kernels for sm_90"), (("haiku", "--on", "mi300x"), "nothing about 'haiku'")],
)
def test_what_it_does_not_have_is_one_line(crosstie: Command, asked: tuple[str, ...], said: str) -> None:
    done = crosstie("preflight", "kernels", "--aiter", *asked)
    assert done.status == 2
    assert said in done.err
    assert len(done.err.strip().splitlines()) == 1


HEAD = "operation,types,shape,isa,kernels,instead,basis,source,date\n"
ROW = "GEMM,bf16,plain,gfx942,{kernels},{instead},derived,a/b@1234567 c.csv:2,2026-08-22\n"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ((ROW.format(kernels=1, instead="x"), ROW.format(kernels=2, instead="x")), "stands here twice"),
        ((ROW.format(kernels="some", instead="x"),), "must be a whole number"),
        ((ROW.format(kernels=1, instead=""),), "instead is empty"),
    ],
)
def test_slips_in_the_table_are_named(tmp_path: Path, rows: tuple[str, ...], said: str) -> None:
    file = tmp_path / "aiter.csv"
    file.write_text(HEAD + "".join(rows))
    with pytest.raises(BadData, match=said):
        coverage(file)


def test_an_operation_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(BadInput, match="MLA, decode"):
        aiter_coverage(["gfx950"], "convolution")

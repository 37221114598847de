"""CUDA's libraries beside ROCm's: every row has a source and a date, and remedies of source findings send to them."""

from pathlib import Path

import pytest
from tests.conftest import Command

from crosstie.catalog.counterparts import read_counterparts
from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData
from crosstie_port.source.rules import name_rules

GOOD = """[sources]
a = { ref = "somebody's page", date = "2026-01-02" }
[nccl]
cuda = "NCCL"
rocm = "RCCL"
state = "same"
differs = "little"
source = "a"
hipify = { converted = 3, of = 4, source = "a" }
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "libraries.toml"
    file.write_text(text)
    return file


def test_a_row(tmp_path: Path) -> None:
    row = read_counterparts(written(tmp_path, GOOD))["nccl"]
    assert (row.cuda, row.rocm, row.state, row.date) == ("NCCL", "RCCL", "same", "2026-01-02")
    assert row.hipify
    assert (row.hipify.converted, row.hipify.of) == (3, 4)


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ('"same"', '"similar"', "state"),
        ('differs = "little"', "", "differs"),
        ('source = "a"\nhipify', 'source = "b"\nhipify', "b"),
        ("converted = 3", "converted = 5", "5 of 4 names"),
        ("rocm =", "amd =", "amd"),
        ('of = 4, source = "a"', 'of = 4, source = "a", extra = 1', "extra"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, was: str, becomes: str, said: str) -> None:
    assert was in GOOD
    with pytest.raises(BadData, match=said):
        read_counterparts(written(tmp_path, GOOD.replace(was, becomes)))


def test_shipped_rows_name_what_porters_ask_for() -> None:
    rows = Catalog([]).libraries
    assert {
        "cublas", "cublaslt", "cudnn", "nccl", "cutlass", "flash-attention", "tensorrt-llm", "nsight-systems",
        "nsight-compute", "nvidia-smi", "nvml", "mig", "cub", "thrust", "cufft", "curand", "cusparse", "cusolver",
        "nvshmem", "gds", "triton", "nvtx", "dcgm",
    } <= set(rows)  # fmt: skip
    assert all(row.source and row.date for row in rows.values())


def test_remedies_of_source_findings_send_to_a_row() -> None:
    sent = {rule.library: rule.remedy for rule in name_rules() if rule.library}
    assert "Composable Kernel: crosstie catalog show libraries cutlass" in sent["cutlass"]
    assert set(sent) <= set(Catalog([]).libraries)


def test_a_source_rule_that_sends_nowhere_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "names.toml"
    file.write_text(
        '[sources]\ns = { ref = "a page", date = "2026-01-01" }\n[[rule]]\nid = "a"\nseverity = "error"\n'
        'names = ["x"]\nsays = "s"\nremedy = "r"\nsource = "s"\nlibrary = "nowhere"\n'
    )
    with pytest.raises(BadData, match="in no row of libraries"):
        name_rules(file)


def test_the_command_shows_all_or_one(crosstie: Command) -> None:
    whole = crosstie("catalog", "show", "libraries")
    assert "Nothing here ran on an AMD GPU" in whole.out
    one = crosstie("catalog", "show", "libraries", "NCCL").out
    assert "RCCL" in one
    assert "source" in one
    missing = crosstie("catalog", "show", "libraries", "ncl")
    assert missing.status == 2
    assert "Did you mean nccl?" in missing.err

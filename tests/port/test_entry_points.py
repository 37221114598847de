"""What the wing offers as a library: one call a question, names in, a report with findings and verdicts out."""

from pathlib import Path

import pytest
from tests.port.checkpoint.samples import CONVERTIBLE, write_model

from crosstie.core.errors import BadInput, UnknownName
from crosstie.port.preflight.model import preflight
from crosstie_port.checkpoint.convert import convert
from crosstie_port.kernels.report import preflight_kernels
from crosstie_port.source.check import preflight_source


def test_a_model_of_the_catalog_on_one_accelerator_or_several() -> None:
    one = preflight("qwen3-32b", on="mi300x")
    assert set(one.verdicts) == set(one.settings) == set(one.layouts) == {"mi300x"}
    several = preflight("qwen3-32b", on=["mi300x", "h200", "mi300x"], engine="vllm==0.28.0", tp=2)
    assert list(several.verdicts) == ["mi300x", "h200"]
    assert list(preflight("qwen3-32b", on="mi300x, h200").verdicts) == ["mi300x", "h200"]
    assert several.layouts == {"mi300x": "TP2", "h200": "TP2"}
    assert {finding.check for finding in several.findings} >= {"architecture", "memory", "kernel-gemm"}


def test_settings_of_the_user_are_taken_as_given() -> None:
    asked = preflight("deepseek-v3", on="mi300x", environment={"VLLM_ROCM_USE_AITER": "1"})
    assert "VLLM_ROCM_USE_AITER=1" in preflight("deepseek-v3", on="mi300x").settings["mi300x"]
    assert "VLLM_ROCM_USE_AITER=1" not in asked.settings["mi300x"]


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(BadInput, match="not one of"):
        preflight("qwen3-32b", on="mi300x", features=["telepathy"])
    with pytest.raises(BadInput, match="names no accelerator"):
        preflight("qwen3-32b", on=[])
    with pytest.raises(UnknownName):
        preflight_source(Path(__file__), on="mi9000")
    with pytest.raises(BadInput, match="a file or a module"):
        preflight_kernels(on="mi300x")
    with pytest.raises(BadInput, match="no such file"):
        preflight_kernels("./none.py", on="gfx942")


def test_a_source_is_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("__global__ void f() { __shfl_down_sync(0xffffffff, 1, 16); }\n")
    found = preflight_source(tmp_path, on="mi300x", hipify=False)
    assert found.verdicts == {"mi300x": "needs changes"}
    assert "mask-32-bit" in {finding.check for finding in found.findings}


def test_a_conversion_can_be_tried_dry(tmp_path: Path) -> None:
    make, quantisation, recoded, rescaled = CONVERTIBLE[next(iter(CONVERTIBLE))]
    source = write_model(tmp_path / "model", make(), quantisation)
    dry = convert(source, tmp_path / "out", "e4m3fnuz", even_if_normalised=True, dry_run=True)
    assert (set(dry.recoded), set(dry.rescaled), dry.converted) == (recoded, rescaled, None)
    assert not (tmp_path / "out").exists()
    done = convert(source, tmp_path / "out", "e4m3fnuz", even_if_normalised=True, jobs=1)
    assert done.converted is not None
    assert (done.was, done.to) == ("e4m3fn", "e4m3fnuz")

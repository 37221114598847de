"""Remedies that name a conversion: carried out, the engine loads what comes out of it."""

import re
from pathlib import Path
from typing import get_args

import pytest
from packaging.version import Version
from tests.port.checkpoint import samples
from tests.port.checkpoint.samples import write_model

from crosstie.port.checkpoint.formats import read_scheme
from crosstie.port.checkpoint.index import open_checkpoint
from crosstie.port.preflight.rules import EngineRule, Value, decide
from crosstie_port.checkpoint.convert import convert
from crosstie_port.checkpoint.requantisation import Granularity


def decided(engine: str, release: str, folder: Path) -> EngineRule:
    scheme = read_scheme(open_checkpoint(folder))
    ((way,),) = [scheme.parts["linear"]]
    facts: dict[str, Value] = {
        "method": scheme.method, "scheme": way.scheme, "part": "linear", "activations": way.activations,
        "scales": way.scales, "dialect": "fn" if scheme.dialect == "e4m3fn" else "fnuz", "converted": scheme.converted,
        "compute": "bf16", "act_order": False,
    }  # fmt: skip
    found = decide(engine, Version(release), "gfx942", "load", facts)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("engine", "release", "to"),
    [
        ("vllm", "0.32.0", "compressed-tensors"),
        ("vllm", "0.20.2", "compressed-tensors"),
        ("sglang", "0.5.18", "fp8-channel"),
    ],
)
def test_modelopts_fp8_on_gfx942_is_converted_as_the_remedy_says(
    tmp_path: Path, engine: str, release: str, to: str
) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    before = decided(engine, release, source)
    assert before.outcome == "error"
    named = re.search(r"crosstie convert --to ([\w-]+)", before.remedy)
    assert named is not None
    assert named[1] == to
    convert(source, tmp_path / "out", to)  # type: ignore[arg-type]
    after = decided(engine, release, tmp_path / "out")
    assert (after.outcome, after.implementation) == ("note", "normalised")


def test_sglang_clips_compressed_tensors_by_tensor_and_says_which_conversions_help(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    convert(source, tmp_path / "clipped", "compressed-tensors")
    before = decided("sglang", "0.5.18", tmp_path / "clipped")
    assert before.outcome == "error"
    named = re.findall(r"--to ([\w-]+)", before.remedy)
    assert named == ["fp8-channel", "fp8-block"]
    assert set(named) <= set(get_args(Granularity))
    for to in named:
        convert(tmp_path / "clipped", tmp_path / to, to)
        assert decided("sglang", "0.5.18", tmp_path / to).outcome == "note"

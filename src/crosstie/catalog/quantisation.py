"""How a checkpoint stores each role: quantization_config in, role -> format out."""

import re
from typing import Any

from crosstie.catalog.config import Config
from crosstie.core.errors import BadData
from crosstie.core.formats import LINEAR_ROLES, ROLES

# The module name that stands for each role when a config lists modules it leaves alone.
_MODULES = {
    "embedding": "model.embed_tokens",
    "head": "lm_head",
    "attention": "model.layers.0.self_attn.q_proj",
    "key": "model.layers.0.self_attn.k_proj",
    "output": "model.layers.0.self_attn.o_proj",
    "value": "model.layers.0.self_attn.v_proj",
    "mlp": "model.layers.0.mlp.gate_proj",
    "mlp_down": "model.layers.0.mlp.down_proj",
    "shared": "model.layers.0.mlp.shared_experts.gate_proj",
    "shared_down": "model.layers.0.mlp.shared_experts.down_proj",
    "experts": "model.layers.0.mlp.experts.0.gate_proj",
    "experts_down": "model.layers.0.mlp.experts.0.down_proj",
}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
_METHODS = "fp8, fbgemm_fp8, compressed-tensors, modelopt, mxfp4, awq, gptq, quark"


def native_formats(config: Config) -> tuple[dict[str, str], str]:
    """Role -> format id, and the name of the checkpoint's precision."""
    dtype = config.get_outer("torch_dtype") or config.get_outer("dtype") or "bfloat16"
    base = _DTYPES.get(str(dtype))
    if base is None:
        raise BadData(config.file, "torch_dtype", f"'{dtype}' is not one of {', '.join(_DTYPES)}")
    by_role = dict.fromkeys(ROLES, base)
    name = base
    quantisation = config.get_outer("quantization_config")
    if quantisation:
        if not isinstance(quantisation, dict):
            raise BadData(config.file, "quantization_config", "must be an object")
        name = _quantised_format(config, quantisation)
        kept = _left_alone(quantisation)
        roles = ("experts", "experts_down") if quantisation.get("quant_method") == "mxfp4" else LINEAR_ROLES
        for role in roles:
            if not any(pattern.search(_MODULES[role]) for pattern in kept):
                by_role[role] = name
    if config.get("expert_dtype") == "fp4":
        by_role["experts"] = by_role["experts_down"] = "mxfp4-a8"
        name = f"{name}+mxfp4"
    return by_role, "mxfp4" if name == "mxfp4-a8" else name


def _quantised_format(config: Config, quantisation: dict[str, Any]) -> str:
    method = str(quantisation.get("quant_method", "")).lower()
    where = "quantization_config"
    if method == "fp8":
        return "fp8-block" if quantisation.get("weight_block_size") else "fp8"
    if method == "fbgemm_fp8":
        return "fp8-channel"
    if method == "mxfp4":
        return "mxfp4-a8"
    if method in ("awq", "gptq"):
        bits = quantisation.get("bits", quantisation.get("w_bit", 4))
        return _integer(config, bits, quantisation.get("group_size", quantisation.get("q_group_size", 128)))
    if method == "modelopt":
        algorithm = str(quantisation.get("quant_algo", "")).upper()
        if algorithm in ("NVFP4", "FP8"):
            return algorithm.lower()
        raise BadData(config.file, f"{where}.quant_algo", f"'{algorithm}' is not one of NVFP4, FP8")
    if method in ("compressed-tensors", "quark"):
        return _grouped_format(config, quantisation, method)
    raise BadData(config.file, f"{where}.quant_method", f"'{method}' is not one of {_METHODS}")


def _grouped_format(config: Config, quantisation: dict[str, Any], method: str) -> str:
    if method == "quark":
        layers = quantisation.get("global_quant_config") or {}
        weights = layers.get("weight") or {}
        if weights.get("dtype") == "fp4":
            return "mxfp4"
        if str(weights.get("dtype", "")).startswith("fp8"):
            return "fp8-channel" if weights.get("qscheme") == "per_channel" else "fp8"
        raise BadData(
            config.file,
            "quantization_config.global_quant_config.weight.dtype",
            f"{weights.get('dtype')!r} is not fp4 or fp8",
        )
    groups = quantisation.get("config_groups") or {}
    weights = next((group.get("weights") for group in groups.values() if group.get("weights")), None)
    if not weights:
        raise BadData(config.file, "quantization_config.config_groups", "names no weights")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if kind == "float" and bits == 4:
        return "nvfp4" if weights.get("group_size") == 16 else "mxfp4-a8"
    if kind == "float" and bits == 8:
        return {"channel": "fp8-channel", "block": "fp8-block"}.get(str(strategy), "fp8")
    if kind == "int":
        return _integer(config, bits, weights.get("group_size") or 0)
    raise BadData(config.file, "quantization_config.config_groups", f"{bits}-bit {kind} weights are not known")


def _integer(config: Config, bits: object, group: object) -> str:
    if bits == 8:
        return "int8"
    if bits == 4 and group in (32, 64, 128):
        return f"int4-g{group}"
    raise BadData(
        config.file,
        "quantization_config",
        f"{bits}-bit integers in groups of {group} are not known: 4 bits in 32, 64 or 128, or 8",
    )


def _left_alone(quantisation: dict[str, Any]) -> list[re.Pattern[str]]:
    patterns = []
    for entry in (
        quantisation.get("ignore") or quantisation.get("modules_to_not_convert") or quantisation.get("exclude") or ()
    ):
        if entry.startswith("re:"):
            patterns.append(re.compile(entry[3:]))
        else:
            # Plain entries name whole path components; `*` stands for any.
            body = re.escape(entry).replace(r"\*", "[^.]*" if "." in entry else ".*")
            patterns.append(re.compile(rf"(^|\.){body}(\.|$)"))
    return patterns

"""The precision a user names, spelled out as a format for each role of one model."""

from collections.abc import Mapping

from crosstie.core.errors import UnknownName
from crosstie.core.model import ATTENTION_ROLES, LINEAR_ROLES, ROLES, Format, Mix, Model, Precision, only

# Precisions that store every linear layer of the blocks in one format and the rest in 16 bits.
UNIFORM = ("bf16", "fp16", "fp8", "fp8-channel", "fp8-block", "int8")
# Published 4-bit checkpoints of expert models leave attention alone; those of dense models do not.
FOUR_BIT = {"mxfp4": "mxfp4", "nvfp4": "nvfp4", "int4": "int4-g128"}
# llama.cpp's file types: the base format, and the one for tensors that get more bits.
GGUF = {
    "q4_k_m": ("q4_k", "q6_k"),
    "q5_k_m": ("q5_k", "q6_k"),
    "q6_k": ("q6_k", "q6_k"),
    "q8_0": ("q8_0", "q8_0"),
}
PRECISIONS = ("native", *UNIFORM, *FOUR_BIT, *GGUF)

_FALLBACK = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


def resolve(model: Model, name: str, formats: Mapping[str, Format]) -> Precision:
    name = name.casefold()
    if name == "native":
        by_role = {role: _native(model, role, formats) for role in ROLES}
        return Precision(id=model.native_name, by_role=by_role)
    if name in UNIFORM:
        wide = "fp16" if name == "fp16" else "bf16"
        by_role = dict.fromkeys(ROLES, only(formats[wide]))
        by_role.update(dict.fromkeys(LINEAR_ROLES, only(formats[name])))
    elif name in FOUR_BIT:
        by_role = dict.fromkeys(ROLES, only(formats["bf16"]))
        by_role.update(dict.fromkeys(LINEAR_ROLES, only(formats[FOUR_BIT[name]])))
        if model.is_moe:
            by_role.update({role: _native(model, role, formats) for role in ATTENTION_ROLES})
    elif name in GGUF:
        by_role = _gguf(model, *GGUF[name], formats)
    else:
        raise UnknownName("precision", name, PRECISIONS)
    return Precision(id=name, by_role=by_role)


def _native(model: Model, role: str, formats: Mapping[str, Format]) -> Mix:
    shares = model.native[role]
    return Mix(formats=tuple(formats[name] for name in shares), fractions=tuple(shares.values()))


def _gguf(model: Model, base: str, better: str, formats: Mapping[str, Format]) -> dict[str, Mix]:
    """llama.cpp's choice per tensor (llama_tensor_get_type): some layers get the better format."""
    share = more_bits_layers(model.layer_count) / model.layer_count
    narrow = {t.role for t, _ in model.tensors() if t.cols % 256}

    def stored(role: str, name: str) -> Format:
        # Super-blocks of 256 that do not divide a row fall back to a 32-wide relative.
        return formats[_FALLBACK.get(name, name) if role in narrow else name]

    def raised(role: str, name: str) -> Mix:
        if name == better:
            return only(stored(role, name))
        return Mix(formats=(stored(role, better), stored(role, name)), fractions=(share, 1 - share))

    by_role = {role: only(stored(role, base)) for role in ROLES}
    by_role.update({role: raised(role, base) for role in ("value", "mlp_down", "shared_down", "experts_down")})
    by_role.update(head=only(stored("head", better)), router=only(formats["fp32"]), small=only(formats["fp32"]))
    if any(t.role == "embedding" and t.is_multiplied for t in model.outer):
        by_role["embedding"] = only(stored("embedding", better))
    if base == "q4_k" and model.layer_count == 80 and not model.is_moe:
        by_role["value"] = raised("value", "q5_k")
    if model.experts == 8:
        by_role.update(key=only(formats["q8_0"]), value=only(formats["q8_0"]))
        if base == "q4_k":
            by_role["output"] = only(stored("output", "q5_k"))
    return by_role


def more_bits_layers(layers: int) -> int:
    """How many layers llama.cpp's use_more_bits picks: both eighths at the ends, every third between."""
    eighth = layers // 8
    return sum(1 for i in range(layers) if i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2)

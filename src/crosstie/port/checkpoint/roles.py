"""What each tensor of a checkpoint is, by its name, type and shape: weights with the scales that belong to them.

Checkpoints name their scales after the weight that they belong to, each format in a way of its own. A weight's name
gives a few stems, each stem with a known ending is a scale; nothing else is taken for one.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from crosstie.port.checkpoint.headers import TensorInfo

ModelPart = Literal["linear", "moe"]

E4M3 = ("F8_E4M3", "F8_E4M3FNUZ")
E5M2 = ("F8_E5M2", "F8_E5M2FNUZ")
FLOATS = ("F16", "BF16", "F32", "F64")
# A byte that is an exponent: ModelOpt and Quark store it as a plain byte.
EXPONENTS = ("F8_E8M0", "U8")
_PACKED = ("U8", "I8", "F4", "I32")
# Engines compute in 16 bits whatever a plain weight is stored in.
_PLAIN = {"BF16": "bf16", "F16": "fp16", "F32": "bf16", "F64": "bf16"}
QUANTISED = ("fp8-tensor", "fp8-channel", "fp8-block", "mxfp8", "nvfp4", "mxfp4", "int8", "int4")

# What multiplies the stored numbers. DeepSeek's "inv" is no reciprocal: it multiplies as well.
_WEIGHT_SCALES = ("weight_scale", "weight_scale_inv", "scale", "scale_inv", "scales", "scale_weight", "qscale_weight")
_GLOBAL_SCALES = ("weight_scale_2", "scale_2", "scale2", "weight_global_scale", "global_scale")
# What an activation is divided by before it becomes FP8.
_INPUT_SCALES = ("input_scale", "activation_scale", "act_scale", "scale_input", "qscale_act")
_FP4_INPUT_SCALES = ("input_global_scale", "input_scale_2", "act_global_scale")
# Limits on activations themselves (fbgemm), the same in either dialect.
_BOUNDS = ("input_scale_ub", "weight_scale_ub", "activation_scale_ub")
_SCALE_ENDINGS = tuple(
    sorted((*_WEIGHT_SCALES, *_GLOBAL_SCALES, *_INPUT_SCALES, *_FP4_INPUT_SCALES, *_BOUNDS), key=len, reverse=True)
)
_INTEGER_ENDINGS = ("qweight", "weight_packed")

_KV_SCALE = re.compile(
    r"(^|\.)([kvq]|kv|prob)_scale$"
    r"|\.[kvq]_proj\.output_scale$|(^|[._])prob_output_scale$"
    r"|\.[kv]_cache\.scale$|\.self_attn\.q\.scale$"
    r"|\.([kvq]|kv)_fake_quantizer\.qscale_act$"
)
# What may be one as well, in a spelling that no loader was seen to have.
_LIKE_KV_SCALE = re.compile(
    r"(attn|attention|mixer)\..*\b(k|v|q|kv|qkv|p|key|value|query|prob|cache|bmm\d?|output)"
    r"(_(cache|proj|bmm\d?|output|act))*_scales?(_inv)?$"
)
_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
_MX_GROUP = 32
_MOST_FUSED = 8


class Problem(msgspec.Struct, frozen=True):
    """What is wrong or not understood: a file, a tensor or a key in it, and why."""

    file: str
    key: str
    reason: str


class Weight(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix, or the stacked matrices of experts, with the names of what goes with it."""

    name: str
    part: ModelPart
    # One of QUANTISED, bnb4 (the NF4 or FP4 of bitsandbytes, flattened), bf16, fp16 or unknown.
    scheme: str
    nbytes: int
    # What its numbers are multiplied by.
    scales: tuple[str, ...] = ()
    # Static scales of its input.
    inputs: tuple[str, ...] = ()
    # The second level of NVFP4: for the weights, and for the input.
    globals: tuple[str, ...] = ()

    @property
    def is_fp8(self) -> bool:
        return self.scheme.startswith("fp8") or self.scheme == "mxfp8"


class Roles(msgspec.Struct, frozen=True, kw_only=True):
    weights: tuple[Weight, ...]
    kv_scales: tuple[str, ...]
    problems: tuple[Problem, ...]


def read_roles(tensors: Mapping[str, TensorInfo]) -> Roles:
    kv_scales = dict.fromkeys(name for name in tensors if is_kv_scale(name))
    problems: list[Problem] = []
    weights = [
        weight
        for name, info in tensors.items()
        if name not in kv_scales and not _is_scale(name, tensors) and (weight := _weight(name, info, tensors, problems))
    ]
    problems += _unplaced(weights, tensors)
    return Roles(weights=tuple(weights), kv_scales=tuple(kv_scales), problems=tuple(problems))


def is_kv_scale(name: str) -> bool:
    """Scales of keys, values, queries and attention's probabilities."""
    return name.endswith(("scale", "qscale_act")) and _KV_SCALE.search(name) is not None


def stems(name: str) -> Iterator[str]:
    """What the names of a weight's scales begin with: "a.b.weight" -> "a.b.", "a.w13_weight" -> "a.w13_"."""
    for ending in ("weight_packed", "qweight", "weight", "blocks"):
        if name.endswith(ending):
            yield name.removesuffix(ending)
            break
    else:
        yield f"{name}_"
    yield f"{name}."


def module_of(name: str) -> str:
    """The module that a weight belongs to: "a.b.weight" and "a.b.qweight" -> "a.b", "a.b_blocks" -> "a.b"."""
    for ending in (".weight_packed", ".qweight", ".weight", "_blocks"):
        if name.endswith(ending):
            return name.removesuffix(ending)
    return name


def _found(name: str, endings: tuple[str, ...], tensors: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    return tuple(made for stem in stems(name) for ending in endings if (made := stem + ending) in tensors)


def _is_scale(name: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """Ends like a scale, and a tensor is there to which it could belong."""
    if "scale" not in name:
        return False
    for ending in _SCALE_ENDINGS:
        if not name.endswith(ending) or len(name) == len(ending) or name[-len(ending) - 1] not in "._":
            continue
        stem = name.removesuffix(ending)
        owners = (f"{stem}weight", f"{stem}weight_packed", f"{stem}qweight", f"{stem}blocks", stem[:-1])
        if any(owner in tensors for owner in owners):
            return True
    # An E4M3 tensor with such a name is no weight, even where its owner is missing.
    return name.endswith(("_scale", ".scale", "_scales", "_scale_inv"))


def _weight(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo], problems: list[Problem]) -> Weight | None:
    scales = _found(name, _WEIGHT_SCALES, tensors)
    if info.dtype in E4M3:
        scheme = _fp8_scheme(name, info, scales, tensors, problems)
    elif info.dtype in E5M2:
        problems.append(Problem(info.file.name, name, f"{info.dtype}: no engine's loader of such weights was found"))
        scheme = "unknown"
    elif name.endswith(_INTEGER_ENDINGS) and info.dtype == "I32":
        scheme = "int4"
    elif name.endswith("weight") and f"{name}.absmax" in tensors:
        scheme = "bnb4"
    elif info.dtype == "I8" and f"{name.removesuffix('weight')}SCB" in tensors:
        scheme = "int8"
    elif info.dtype in _PACKED and scales:
        scheme = _packed_scheme(info, tensors[scales[0]])
    elif info.dtype in _PACKED and name.endswith((".weight", *_INTEGER_ENDINGS)):
        scheme = "unknown"
    elif info.dtype in _PLAIN and len(info.shape) >= 2:
        scheme = _PLAIN[info.dtype]
    else:
        return None
    return Weight(
        name=name,
        part="moe" if _EXPERTS.search(name) else "linear",
        scheme=scheme,
        nbytes=info.nbytes,
        scales=scales if scheme in QUANTISED else (),
        inputs=_found(name, _INPUT_SCALES, tensors),
        globals=_found(name, (*_GLOBAL_SCALES, *_FP4_INPUT_SCALES), tensors),
    )


def _packed_scheme(info: TensorInfo, scale: TensorInfo) -> str:
    """Two 4-bit numbers a byte, told apart by their scales; whole bytes with a float are integers."""
    if scale.dtype in E4M3:
        return "nvfp4"
    if scale.dtype in EXPONENTS:
        return "mxfp4"
    if info.dtype == "I32":
        return "int4"
    return "int8" if info.dtype == "I8" else "unknown"


def _fp8_scheme(
    name: str, info: TensorInfo, scales: tuple[str, ...], tensors: Mapping[str, TensorInfo], problems: list[Problem]
) -> str:
    def wrong(reason: str) -> str:
        problems.append(Problem(info.file.name, name, reason))
        return "unknown"

    if not scales:
        return wrong(f"{info.dtype} without a scale: neither weight_scale, weight_scale_inv nor scale is there")
    if len(scales) > 1:
        return wrong(f"several scales, and which of them counts is not known: {', '.join(scales)}")
    scale = tensors[scales[0]]
    if scale.dtype not in (*FLOATS, *EXPONENTS):
        return wrong(f"its scale {scales[0]} is {scale.dtype}, which no format of scales is")
    scheme = scale_scheme(info.shape, scale.shape, exponents=scale.dtype in EXPONENTS)
    return scheme or wrong(f"its scale {scales[0]} of shape {list(scale.shape)} does not fit {list(info.shape)}")


def scale_scheme(weight: tuple[int, ...], scale: tuple[int, ...], *, exponents: bool) -> str | None:
    """By tensor, by channel or by block, as the shapes say; None where they do not go together."""
    if len(weight) < 2 or 0 in weight or 0 in scale:
        return None
    stacked, (rows, columns) = weight[:-2], weight[-2:]
    if exponents and columns % _MX_GROUP == 0 and scale == (*weight[:-1], columns // _MX_GROUP):
        return "mxfp8"
    longer = tuple(side for side in scale if side != 1)
    if not longer or (stacked and longer in (stacked, (*stacked, 2))):
        return "fp8-tensor"
    if scale in ((*stacked, rows), (*stacked, rows, 1), (*stacked, 1, columns)):
        return "fp8-channel"
    # Convolutions: their first side is the channels, where that of three sides counts experts.
    if len(weight) > 3 and longer == weight[:1] == scale[:1]:
        return "fp8-channel"
    sides = _sides(scale, weight)
    if scale[: len(stacked)] == stacked and len(sides) == 2 and all(map(_divides, (rows, columns), sides)):
        return "fp8-block"
    # Fused projections keep a scale for each of their parts.
    fused = not stacked and len(scale) == 1 and scale[0] <= _MOST_FUSED
    return "fp8-tensor" if fused and not exponents else None


def _sides(scale: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, ...]:
    """The blocks of a matrix's two sides; ModelOpt writes [rows, 1, columns, 1]."""
    own = scale[len(weight) - 2 :]
    return own[::2] if len(own) == 4 and own[1::2] == (1, 1) else own


def _divides(side: int, blocks: int) -> bool:
    """Whether some length of block cuts the side into so many, the last one perhaps short."""
    return 0 < blocks <= side and -(-side // -(-side // blocks)) == blocks


def _prefixes(name: str) -> Iterator[str]:
    """What could be the stem of a name: up to the last dot, and up to each underscore behind it."""
    last = name.rfind(".")
    yield from (name[: at + 1] for at in range(max(last, 0), len(name)) if name[at] in "._")


def _unplaced(weights: list[Weight], tensors: Mapping[str, TensorInfo]) -> Iterator[Problem]:
    """Scales and zero points beside an FP8 weight that no rule knows: converting around them would be a guess."""
    fp8 = [weight for weight in weights if weight.is_fp8]
    known = {name for weight in weights for name in (weight.name, *weight.scales, *weight.inputs, *weight.globals)}
    beside = {stem: weight for weight in fp8 for stem in stems(weight.name)}
    for name, info in tensors.items():
        ending = name.rpartition(".")[2]
        if name in known or is_kv_scale(name) or name.endswith(_BOUNDS):
            continue
        owner = next((beside[stem] for stem in _prefixes(name) if stem in beside), None)
        if owner is not None and ("scale" in ending or "zero_point" in ending):
            yield Problem(info.file.name, name, f"beside the FP8 weight {owner.name}, and not known")
        elif fp8 and "_scale" in ending and _LIKE_KV_SCALE.search(name):
            yield Problem(info.file.name, name, "like a scale of the KV cache, and not known")
    for weight in fp8:
        for name in weight.globals:
            reason = f"a second scale of the FP8 weight {weight.name}, and not known"
            yield Problem(tensors[name].file.name, name, reason)
    owned = {name for weight in weights for name in weight.scales}
    for name, info in tensors.items():
        if info.dtype in E4M3 and name not in owned and name not in known:
            yield Problem(info.file.name, name, f"{info.dtype} and named like a scale, without packed weights")

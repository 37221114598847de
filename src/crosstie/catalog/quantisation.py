"""How a checkpoint stores each role: quantization_config in, role -> shares of formats out.

Configs name modules, layer by layer; a role is one or more modules of a layer. Each role is looked up
on every layer, so that "all but the first and the last" becomes a share.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstie.catalog.config import Config
from crosstie.catalog.reading import read_toml
from crosstie.core.errors import BadData
from crosstie.core.model import ATTENTION_ROLES, LINEAR_ROLES, ROLES

# What a checkpoint stores of a role: format id -> share of the layers.
Shares = dict[str, float]

# Module names of each role inside a layer, what linear attention has instead, and words of the settings.
_DATA: dict[str, Any] = read_toml(Path(__file__).parent / "data" / "quantisation.toml")
_METHODS = "fp8, fbgemm_fp8, compressed-tensors, modelopt, mxfp4, awq, gptq, quark, bitsandbytes"

Pattern = re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Names:
    """What a layer has that a config could name: its roles, and whether its attention is linear."""

    roles: frozenset[str]
    linear: bool


def native_formats(config: Config, layers: Sequence[Names]) -> tuple[dict[str, Shares], str]:
    """Role -> shares of formats, and the name of the checkpoint's precision."""
    dtype = str(config.get_outer("torch_dtype") or config.get_outer("dtype") or "bfloat16").removeprefix("torch.")
    dtypes: dict[str, str] = _DATA["dtypes"]
    if dtype not in dtypes:
        raise config.bad("torch_dtype", f"'{dtype}' is not one of {', '.join(dtypes)}")
    base = dtypes[dtype]
    by_role: dict[str, Shares] = {role: {base: 1.0} for role in ROLES}
    name = base
    quantisation = config.get_outer("quantization_config") or config.get_outer("compression_config")
    if quantisation:
        quantisation = config.object("quantization_config", quantisation)
        if isinstance(quantisation.get("quantization"), Mapping):
            quantisation = {**quantisation, **quantisation["quantization"]}
        name = _quantise(config, quantisation, by_role, base, layers)
    if config.get("expert_dtype") == "fp4":
        # ModelOpt's DeepSeek-V4 keeps the method and the type, and says beside them that its experts are NVFP4.
        other = str(config.object("quantization_config", quantisation or {}).get("moe_quant_algo") or "").upper()
        if other not in ("", "NVFP4"):
            raise config.bad("quantization_config.moe_quant_algo", f"'{other}' is not NVFP4")
        format = "nvfp4" if other else "mxfp4-a8"
        by_role["experts"] = by_role["experts_down"] = {format: 1.0}
        name = f"{name}+{format.removesuffix('-a8')}"
    return by_role, name.removesuffix("-a8")


def _quantise(
    config: Config, quantisation: Mapping[str, Any], by_role: dict[str, Shares], base: str, layers: Sequence[Names]
) -> str:
    groups = _groups(config, quantisation)
    kept = left_alone(config, quantisation)
    has_experts = any("experts" in layer.roles for layer in layers)
    only_experts = quantisation.get("quant_method") == "mxfp4" and has_experts
    for role in ("experts", "experts_down") if only_experts else LINEAR_ROLES:
        having = [i for i, layer in enumerate(layers) if role in layer.roles]
        formats = Counter(_stored(_names(role, i, layers[i].linear), groups, kept, base) for i in having)
        if formats:
            by_role[role] = {format: count / len(having) for format, count in formats.items()}
    if quantisation.get("lm_head") is True:
        by_role["head"] = {groups[-1][1]: 1.0}
    # The precision is named after what stores most of the weights.
    roles = {role for layer in layers for role in layer.roles}
    main = by_role["experts" if has_experts else "mlp" if "mlp" in roles else "attention"]
    return max(main, key=lambda format: main[format])


def _names(role: str, layer: int, linear: bool) -> list[str]:
    modules = _DATA["linear"].get(role, ()) if linear and role in ATTENTION_ROLES else _DATA["modules"][role]
    return [prefix.format(layer) + module for prefix in _DATA["prefixes"] for module in modules]


def _stored(names: list[str], groups: list[tuple[Pattern | None, str]], kept: list[Pattern], base: str) -> str:
    """The first group that targets any of the names, unless the config leaves them alone."""
    if any(pattern.search(name) for pattern in kept for name in names):
        return base
    for target, format in groups:
        if target is None or any(target.search(name) for name in names):
            return format
    return base


def _groups(config: Config, quantisation: Mapping[str, Any]) -> list[tuple[Pattern | None, str]]:
    """(target, format) pairs, the narrow ones first; a target of None takes every linear layer."""
    method = str(quantisation.get("quant_method", "")).lower()
    where = "quantization_config"
    if method == "compressed-tensors":
        return _compressed_groups(config, quantisation)

    def first(name: str, other: str, default: int) -> object:
        return quantisation.get(name, quantisation.get(other, default))

    by_method: dict[str, Callable[[], str]] = {
        "fp8": lambda: _by_block(config, quantisation.get("weight_block_size")),
        "fbgemm_fp8": lambda: "fp8-channel",
        "mxfp4": lambda: "mxfp4-a8",
        "awq": lambda: _integer(config, first("bits", "w_bit", 4), first("group_size", "q_group_size", 128)),
        "gptq": lambda: _integer(config, quantisation.get("bits", 4), quantisation.get("group_size", 128)),
        "bitsandbytes": lambda: "int8" if quantisation.get("load_in_8bit") else "nf4",
        "modelopt": lambda: _modelopt(config, quantisation),
        "quark": lambda: _quark(config, quantisation),
    }
    if method not in by_method:
        raise config.bad(f"{where}.quant_method", f"'{method}' is not one of {_METHODS}")
    overrides = quantisation.get("dynamic")
    if isinstance(overrides, Mapping) and any(not str(key).startswith("-:") for key in overrides):
        raise config.bad(f"{where}.dynamic", "bits that differ by module are not understood")
    return [(None, by_method[method]())]


def _compressed_groups(config: Config, quantisation: Mapping[str, Any]) -> list[tuple[Pattern | None, str]]:
    where = "quantization_config.config_groups"
    groups = quantisation.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise config.bad(where, "must be an object of groups")
    patterns: list[tuple[Pattern | None, str]] = []
    for name, group in groups.items():
        weights = config.object(f"{where}.{name}", group).get("weights")
        if weights is None:
            continue
        at = f"{where}.{name}.weights"
        format = _compressed_format(config, at, config.object(at, weights))
        for target in _strings(config, f"{where}.{name}.targets", group.get("targets") or ["Linear"]):
            pattern = None if target == "Linear" else _pattern(config, f"{where}.{name}.targets", target)
            patterns.append((pattern, format))
    if not patterns:
        raise config.bad(where, "names no weights")
    return sorted(patterns, key=lambda pair: pair[0] is None)


def _compressed_format(config: Config, where: str, weights: Mapping[str, Any]) -> str:
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if kind == "float" and bits == 4:
        return "nvfp4" if weights.get("group_size") == 16 else "mxfp4-a8"
    if kind == "float" and bits == 8:
        return {"channel": "fp8-channel", "block": "fp8-block"}.get(str(strategy), "fp8")
    if kind == "int":
        return _integer(config, bits, -1 if strategy == "channel" else weights.get("group_size"), where)
    raise config.bad(where, f"{bits}-bit {kind} weights are not known")


def _by_block(config: Config, block: object) -> str:
    if not block:
        return "fp8"
    if not isinstance(block, list) or len(block) != 2 or not all(type(side) is int and side > 0 for side in block):
        raise config.bad("quantization_config.weight_block_size", f"must be two whole numbers, not {block!r}")
    return "fp8-block"


def _modelopt(config: Config, quantisation: Mapping[str, Any]) -> str:
    algorithm = str(quantisation.get("quant_algo", "")).upper()
    formats: dict[str, str] = _DATA["modelopt"]
    if algorithm not in formats:
        raise config.bad("quantization_config.quant_algo", f"'{algorithm}' is not one of {', '.join(formats)}")
    return formats[algorithm]


def _quark(config: Config, quantisation: Mapping[str, Any]) -> str:
    where = "quantization_config.global_quant_config"
    everywhere = config.object(where, quantisation.get("global_quant_config"))

    def format_of(key: str, entry: Mapping[str, Any]) -> str:
        weights = config.object(f"{key}.weight", entry.get("weight"))
        dtype = str(weights.get("dtype"))
        if dtype == "fp4":
            return "mxfp4"
        if dtype.startswith("fp8"):
            return "fp8-channel" if weights.get("qscheme") == "per_channel" else "fp8"
        if dtype == "int8":
            return "int8"
        raise config.bad(f"{key}.weight.dtype", f"'{dtype}' is not one of fp4, fp8, int8")

    main = format_of(where, everywhere)
    where = "quantization_config.layer_quant_config"
    for name, entry in config.object(where, quantisation.get("layer_quant_config") or {}).items():
        key = f"{where}.{name}"
        if not isinstance(entry, Mapping) or (entry.get("weight") and format_of(key, entry) != main):
            raise config.bad(key, "formats that differ by layer are not understood")
    return main


def _integer(config: Config, bits: object, group: object, where: str = "quantization_config") -> str:
    width = int(bits) if isinstance(bits, str) and bits.isdigit() else bits
    known = {None: "channel", -1: "channel", 0: "channel", 32: "g32", 64: "g64", 128: "g128"}
    if width in (4, 8) and (group is None or isinstance(group, int)) and group in known:
        return f"int{width}" if (width, known[group]) == (8, "channel") else f"int{width}-{known[group]}"
    raise config.bad(where, f"{bits}-bit integers in groups of {group}: only 4 or 8 bits by channel, 32, 64 or 128")


def left_alone(config: Config, quantisation: Mapping[str, Any]) -> list[Pattern]:
    overrides = quantisation.get("dynamic")
    named = [
        (key, entry)
        for key in _DATA["ignored"]
        for entry in _strings(config, f"quantization_config.{key}", quantisation.get(key) or [])
    ]
    named += [("dynamic", f"re:{str(key)[2:]}") for key in overrides] if isinstance(overrides, Mapping) else []
    return [_pattern(config, f"quantization_config.{key}", entry) for key, entry in named]


def _strings(config: Config, where: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise config.bad(where, "must be a list of strings")
    return value


def _pattern(config: Config, where: str, entry: str) -> Pattern:
    """A regular expression after "re:", else whole components of a module's path; * stands for any."""
    path = re.escape(entry).replace(r"\*", ".*")
    # compressed-tensors matches its expressions from the start of the name.
    body = rf"^(?:{entry[3:]})" if entry.startswith("re:") else rf"(^|\.){path}(\.|$)"
    try:
        return re.compile(body)
    except re.error as error:
        raise BadData(config.file, where, f"'{entry}' is no regular expression: {error}") from None

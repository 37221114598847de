"""Which quantisation a checkpoint has: what its config says, what its tensors show, and where the two disagree."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from crosstie.catalog.config import load_config
from crosstie.core.errors import BadData
from crosstie.port.checkpoint.fp8 import DTYPES, Dialect
from crosstie.port.checkpoint.index import Checkpoint
from crosstie.port.checkpoint.roles import EXPONENTS, QUANTISED, ModelPart, Problem, Roles, Weight, read_roles

Method = Literal[
    "none", "fp8", "compressed-tensors", "modelopt", "quark", "fbgemm_fp8", "mxfp4", "awq", "gptq", "bitsandbytes",
    "other",
]  # fmt: skip
Activations = Literal["none", "static", "dynamic"]

# What `convert` adds to the quantisation config and to the metadata of each shard: the weights' dialect and, where
# KV scales were left alone, theirs.
MARK = "crosstie_fp8_dialect"
KV_MARK = "crosstie_fp8_kv_dialect"
MODELOPT_FILE = "hf_quant_config.json"

# vLLM loads "mxfp8" through ModelOpt's classes; the rest are spellings.
_METHODS: dict[str, Method] = {
    **{method: method for method in get_args(Method) if method not in ("none", "other")},
    "compressed_tensors": "compressed-tensors",
    **dict.fromkeys(("modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8", "mxfp8"), "modelopt"),
}
_ANY_FP8 = ("fp8-tensor", "fp8-channel", "fp8-block", "mxfp8")
# What a method's weights can be; those that are not here can be anything.
_POSSIBLE: dict[Method, tuple[str, ...]] = {
    "none": (),
    "fp8": (*_ANY_FP8, "mxfp4"),
    "fbgemm_fp8": ("fp8-channel",),
    "mxfp4": ("mxfp4",),
    "awq": ("int4", "int8"),
    "gptq": ("int4", "int8"),
}
_MODELOPT_ALGORITHMS = {
    "FP8": ("fp8-tensor",),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8-channel",),
    "FP8_PB_WO": ("fp8-block",),
    "NVFP4": ("nvfp4",),
    "W4A16_NVFP4": ("nvfp4",),
    "MXFP8": ("mxfp8",),
}
# Embeddings and the head outweigh a small model's layers, and say nothing of what those multiply by.
_ENDS = re.compile(r"(^|\.)(lm_head|embed\w*|wte|wpe|tok_embeddings)\.|^output\.weight$")


class PartScheme(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of the dense matrices or of the experts that are stored alike."""

    scheme: str
    # How their inputs are rounded.
    activations: Activations
    # Whether the scales of FP8 weights are floats or powers of two.
    scales: Literal["float", "ue8m0"]
    nbytes: int


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    # What the config says, ModelOpt's nesting undone; empty where it says nothing.
    quantisation: dict[str, Any]
    method: Method
    # What most bytes of all parts are stored in.
    scheme: str
    # Where there are such weights: each way in which they are stored, that of most bytes first.
    parts: dict[ModelPart, tuple[PartScheme, ...]]
    # Of the E4M3 weights, by the type that the headers give them; None where there are none, or both.
    dialect: Dialect | None
    # Whether `crosstie convert` made it.
    converted: bool
    weights: tuple[Weight, ...]
    kv_scales: tuple[str, ...]
    # Whether they were left alone when the weights were converted.
    kv_kept: bool
    # What the config says of the cache: "fp8", another word, or "" where it says nothing.
    kv_format: str
    problems: tuple[Problem, ...]

    @property
    def integer_bits(self) -> set[int]:
        """The widths that the config gives to integers."""
        found = {entry.get(key) for entry in _entries(self.quantisation) for key in ("num_bits", "bits", "w_bit")}
        return {int(bits) for bits in found if isinstance(bits, int | str) and str(bits) in ("2", "3", "4", "8")}

    @property
    def block_sizes(self) -> set[tuple[int, int]]:
        """The rows and columns that share a scale, as far as the config says so."""
        return {block for entry in _entries(self.quantisation) if (block := _block(entry)) is not None}

    @property
    def fp8_weights(self) -> Iterator[Weight]:
        return (weight for weight in self.weights if weight.is_fp8)


def read_scheme(checkpoint: Checkpoint, raw: Mapping[str, Any] | None = None) -> Scheme:
    """`raw`: the config, where it does not lie beside the tensors."""
    raw, file = load_config(checkpoint.folder) if raw is None else (raw, checkpoint.folder / "config.json")
    quantisation = quantisation_config(raw, file)
    method = method_of(quantisation)
    roles = _as_declared(read_roles(checkpoint.tensors), checkpoint, quantisation)
    stored = {checkpoint[weight.name].dtype for weight in roles.weights if weight.is_fp8}
    dialects = {dialect for dialect, dtype in DTYPES.items() if dtype in stored}
    dialect = next(iter(dialects)) if len(dialects) == 1 else None
    marks = _marks(MARK, checkpoint, quantisation)
    problems = (
        *roles.problems,
        *_dialect_problems(dialects, marks, quantisation, file),
        *_config_problems(method, quantisation, roles, file),
    )
    parts = _parts(checkpoint, roles, quantisation)
    nbytes: Counter[str] = Counter()
    for way in chain.from_iterable(parts.values()):
        nbytes[way.scheme] += way.nbytes
    return Scheme(
        quantisation=quantisation,
        method=method,
        scheme=max(nbytes, key=nbytes.__getitem__, default="unknown"),
        parts=parts,
        dialect=dialect,
        converted=bool(marks),
        weights=roles.weights,
        kv_scales=roles.kv_scales,
        kv_kept=bool(_marks(KV_MARK, checkpoint, quantisation)),
        kv_format=_kv_format(quantisation),
        problems=problems,
    )


def quantisation_config(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Wherever the config keeps it, ModelOpt's nesting undone; empty where there is none."""
    text = raw.get("text_config")
    for place in (raw, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            found = place.get(key)
            if found is None:
                continue
            if not isinstance(found, Mapping):
                raise BadData(file, key, "must be an object")
            inner = found.get("quantization")
            return {**found, **inner} if isinstance(inner, Mapping) else dict(found)
    return {}


def method_of(quantisation: Mapping[str, Any]) -> Method:
    if not quantisation:
        return "none"
    # ModelOpt's own file has no method, but says who made it.
    named = str(quantisation.get("quant_method") or ("modelopt" if "quant_algo" in quantisation else ""))
    return _METHODS.get(named.lower(), "other")


def _marks(key: str, checkpoint: Checkpoint, quantisation: Mapping[str, Any]) -> set[str]:
    found = {header.metadata[key] for header in checkpoint.headers.values() if key in header.metadata}
    return found | ({str(quantisation[key])} if key in quantisation else set())


def _as_declared(roles: Roles, checkpoint: Checkpoint, quantisation: Mapping[str, Any]) -> Roles:
    """What tensors do not show by themselves: the bits of packed integers, and that one scale is one block's."""
    said = _entries(quantisation)
    bits = {str(entry.get("num_bits", entry.get("bits"))) for entry in said}
    blocks = {block for entry in said if (block := _block(entry)) is not None}

    def scheme(weight: Weight) -> str:
        if weight.scheme == "int4" and bits == {"8"}:
            return "int8"
        if weight.scheme in ("fp8-tensor", "fp8-channel") and blocks:
            shape, scale = checkpoint[weight.name].shape, checkpoint[weight.scales[0]].shape
            cut = {(*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns)) for rows, columns in blocks}
            return "fp8-block" if scale in cut else weight.scheme
        return weight.scheme

    weights = tuple(msgspec.structs.replace(weight, scheme=scheme(weight)) for weight in roles.weights)
    return msgspec.structs.replace(roles, weights=weights)


def _entries(quantisation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What the config says of weights, group by group."""
    groups = quantisation.get("config_groups")
    entries = groups.values() if isinstance(groups, Mapping) else ({"weights": quantisation},)
    return [w for entry in entries if isinstance(entry, Mapping) and isinstance(w := entry.get("weights"), Mapping)]


def _block(said: Mapping[str, Any]) -> tuple[int, int] | None:
    found = said.get("weight_block_size") or said.get("block_structure")
    whole = isinstance(found, list) and len(found) == 2 and all(type(side) is int and side > 0 for side in found)
    return (found[0], found[1]) if isinstance(found, list) and whole else None


def _dialect_problems(
    dialects: set[Dialect], marks: set[str], quantisation: Mapping[str, Any], file: Path
) -> Iterator[Problem]:
    spelt = str(quantisation.get("fmt", "")).removeprefix("float8_")
    if len(dialects) > 1:
        yield Problem(file.name, "quantization_config", "some weights are stored as F8_E4M3, others as F8_E4M3FNUZ")
    elif marks and marks != dialects:
        said, stored = " and ".join(sorted(marks)), next(iter(dialects), "nothing in E4M3")
        yield Problem(file.name, MARK, f"marked as {said}, but the headers say {stored}")
    elif spelt in DTYPES and dialects and {spelt} != dialects:
        yield Problem(file.name, "quantization_config.fmt", f"says {spelt}, but the headers say {min(dialects)}")


def _config_problems(method: Method, quantisation: Mapping[str, Any], roles: Roles, file: Path) -> Iterator[Problem]:
    stored = {weight.scheme for weight in roles.weights if weight.scheme in QUANTISED}
    shown = ", ".join(sorted(stored)) or "nothing"
    algorithm = str(quantisation.get("quant_algo", "")).upper()
    possible = _MODELOPT_ALGORITHMS.get(algorithm) if method == "modelopt" else _POSSIBLE.get(method)
    key = "quantization_config"
    if roles.problems:
        # Tensors that are not understood say nothing about the config.
        return
    if method == "none":
        if stored:
            yield Problem(file.name, key, f"missing, but tensors are stored as {shown}")
    elif not stored and method in ("fp8", "compressed-tensors", "modelopt", "quark", "fbgemm_fp8", "mxfp4"):
        yield Problem(file.name, key, f"says {method}, but no tensor is quantised")
    elif possible is not None and not stored <= set(possible):
        said = f"{method} {algorithm}".strip()
        yield Problem(file.name, key, f"says {said}, but tensors are stored as {shown}")
    elif method == "fp8" and quantisation.get("weight_block_size") and not stored & {"fp8-block", "mxfp8"}:
        yield Problem(file.name, f"{key}.weight_block_size", f"says blocks, but tensors are stored as {shown}")


# compressed-tensors' and Quark's words for what shares a scale.
_STRATEGIES = {
    "tensor": "fp8-tensor", "channel": "fp8-channel", "block": "fp8-block", "per_tensor": "fp8-tensor",
    "per_channel": "fp8-channel",
}  # fmt: skip


def scale_problems(scheme: Scheme, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Scales that are not of the kind or the grid that the config announces, and static ones that are missing.

    A loader stumbles over them; a conversion refuses scales of another kind or grid.
    """
    method, quantisation = scheme.method, scheme.quantisation
    announced, blocks = _announced(method, quantisation), scheme.block_sizes
    static = _inputs_are_static(method, quantisation)
    for weight in scheme.weights:
        file = checkpoint[weight.name].file.name
        if weight.scheme not in ("fp8-tensor", "fp8-channel", "fp8-block"):
            continue
        if announced and weight.scheme not in announced:
            scale = checkpoint[weight.scales[0]]
            said = " or ".join(sorted(one.removeprefix("fp8-") for one in announced))
            kind = f"scales by {weight.scheme.removeprefix('fp8-')} (shape {list(scale.shape)})"
            yield Problem(file, weight.scales[0], f"{kind}, and the config says by {said}")
        elif weight.scheme == "fp8-block" and len(blocks) == 1:
            shape, scale = checkpoint[weight.name].shape, checkpoint[weight.scales[0]]
            rows, columns = min(blocks)
            grid = (-(-shape[-2] // rows), -(-shape[-1] // columns))
            if tuple(side for side in scale.shape if side != 1) != tuple(
                side for side in (*shape[:-2], *grid) if side != 1
            ):
                reason = (
                    f"a grid of {list(scale.shape)}, and blocks of {rows}x{columns} cut {list(shape)} into {list(grid)}"
                )
                yield Problem(file, weight.scales[0], reason)
        if static and not weight.inputs:
            yield Problem(file, weight.name, "no input_scale, and the config says that activations are static")


def _announced(method: Method, quantisation: Mapping[str, Any]) -> set[str]:
    """How FP8 weights may share their scales; empty where the config does not say."""
    if method == "fp8":
        return {"fp8-block"} if quantisation.get("weight_block_size") else {"fp8-tensor"}
    if method == "compressed-tensors":
        said = [entry.get("strategy") for entry in _entries(quantisation) if is_fp8(entry)]
    elif method == "quark":
        said = [entry.get("qscheme") for entry in _quark_weights(quantisation) if is_fp8(entry)]
    else:
        return set()
    found = {_STRATEGIES.get(str(word), "") for word in said}
    return set() if "" in found else found


def _quark_weights(quantisation: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    layers = quantisation.get("layer_quant_config")
    inner = layers.values() if isinstance(layers, Mapping) else ()
    for entry in (quantisation.get("global_quant_config"), *inner):
        said = entry.get("weight") if isinstance(entry, Mapping) else None
        if isinstance(said, Mapping):
            yield said


def _inputs_are_static(method: Method, quantisation: Mapping[str, Any]) -> bool:
    """Whether every FP8 weight needs the scale of its input."""
    if method == "fp8":
        return quantisation.get("activation_scheme") == "static"
    if method == "modelopt":
        return str(quantisation.get("quant_algo", "")).upper() == "FP8"
    said = input_config(quantisation)
    # Where groups differ, which of them a weight is in is not looked up.
    groups = quantisation.get("config_groups")
    several = isinstance(groups, Mapping) and len(groups) > 1
    return bool(said) and not several and said is not None and said.get("dynamic", said.get("is_dynamic")) is False


def _parts(
    checkpoint: Checkpoint, roles: Roles, quantisation: Mapping[str, Any]
) -> dict[ModelPart, tuple[PartScheme, ...]]:
    """The matrices of the layers, without embeddings and the head."""
    alike: dict[ModelPart, dict[str, list[Weight]]] = {"linear": {}, "moe": {}}
    for weight in roles.weights:
        if not _ENDS.search(weight.name):
            alike[weight.part].setdefault(weight.scheme, []).append(weight)
    parts: dict[ModelPart, tuple[PartScheme, ...]] = {}
    for part, by_scheme in alike.items():
        ways = [
            PartScheme(
                scheme=scheme,
                activations=_activations(scheme, like, quantisation),
                scales="ue8m0"
                if any(checkpoint[n].dtype in EXPONENTS for one in like for n in one.scales)
                else "float",
                nbytes=sum(weight.nbytes for weight in like),
            )
            for scheme, like in by_scheme.items()
        ]
        if ways:
            main = max(ways, key=lambda way: way.nbytes)
            parts[part] = (main, *(way for way in ways if way is not main))
    return parts


def _activations(scheme: str, like: Sequence[Weight], quantisation: Mapping[str, Any]) -> Activations:
    if scheme not in QUANTISED:
        return "none"
    if any(weight.inputs for weight in like):
        return "static"
    if str(quantisation.get("quant_algo", "")).upper() == "W4A16_NVFP4" or scheme == "int4":
        return "none"
    said = input_config(quantisation)
    if said is not None:
        return "none" if not said else ("static" if said.get("dynamic", said.get("is_dynamic")) is False else "dynamic")
    return "none" if quantisation.get("quant_method") in ("mxfp4", "bitsandbytes") else "dynamic"


def input_config(quantisation: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What compressed-tensors or Quark say of activations: {} that they are left alone, None that they say nothing."""
    groups = quantisation.get("config_groups")
    if isinstance(groups, Mapping):
        found = [group.get("input_activations") for group in groups.values() if isinstance(group, Mapping)]
        return next((said for said in found if isinstance(said, Mapping)), {})
    everywhere = quantisation.get("global_quant_config")
    if isinstance(everywhere, Mapping):
        said = everywhere.get("input_tensors")
        return said if isinstance(said, Mapping) else {}
    return None


def is_fp8(said: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors or Quark describe numbers in FP8."""
    return str(said.get("dtype")).startswith("fp8") or (said.get("num_bits"), said.get("type")) == (8, "float")


def _kv_format(quantisation: Mapping[str, Any]) -> str:
    scheme = quantisation.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return "fp8" if is_fp8(scheme) else "other"
    algorithm = quantisation.get("kv_cache_quant_algo")
    if isinstance(algorithm, str):
        return "fp8" if algorithm.lower().startswith("fp8") else algorithm.lower()
    # Quark: the cache is what its projections put out.
    layers = quantisation.get("layer_quant_config")
    for entry in layers.values() if isinstance(layers, Mapping) else ():
        said = entry.get("output_tensors") if isinstance(entry, Mapping) else None
        if isinstance(said, Mapping):
            return "fp8" if is_fp8(said) else "other"
    return ""

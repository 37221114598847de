"""What a conversion will do to each tensor, or why it is refused: decided before anything is written."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from crosstie.catalog.reading import read_json
from crosstie.core.errors import BadData, BadInput
from crosstie.port.checkpoint.formats import (
    KV_MARK,
    MARK,
    MODELOPT_FILE,
    Scheme,
    input_config,
    is_fp8,
    read_scheme,
    scale_problems,
)
from crosstie.port.checkpoint.fp8 import DTYPES, OTHER, Dialect
from crosstie.port.checkpoint.headers import Header, encode_header
from crosstie.port.checkpoint.index import Checkpoint
from crosstie.port.checkpoint.roles import EXPONENTS, FLOATS
from crosstie_port.checkpoint.shard import ByteRange, Change, ShardPlan, identity_of

FORMAT: Final = "compressed-tensors"
FP8_NUMBERS: Final = {"num_bits": 8, "type": "float", "symmetric": True}
BY_TENSOR: Final = {**FP8_NUMBERS, "strategy": "tensor", "dynamic": False}
CONFIG = "config.json"
_CONFIGS = (MODELOPT_FILE, CONFIG)
# Matrices that engines fuse, and checkpoints of fused ones.
_FUSED = re.compile(r"(?i)qkv|gate_up|up_gate|w13|kv_a|query_key_value|in_proj|fused|pack|ba_proj")
_MOST_FUSED = 8
_NORMALISED = "vLLM and SGLang convert it themselves when they load it on gfx942"
_IN_SOFTWARE = "vLLM and SGLang decode it in software on gfx942, as e4m3fn"
# Loaders that would take a converted checkpoint for an unconverted one, as read in vLLM a014e35f and SGLang cce0a124.
_LOADERS: dict[tuple[str, str], str] = {
    **{
        (method, scheme): _NORMALISED
        for method in ("fp8", "compressed-tensors", "quark", "fbgemm_fp8")
        for scheme in ("fp8-tensor", "fp8-channel", "fp8-block")
    },
    ("modelopt", "fp8-channel"): "vLLM converts it itself when it loads it on gfx942",
    ("modelopt", "fp8-block"): "vLLM converts it itself when it loads it on gfx942",
    **{(method, "mxfp8"): _IN_SOFTWARE for method in ("fp8", "compressed-tensors", "modelopt", "quark")},
}


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    to: Dialect
    checkpoint: Checkpoint
    scheme: Scheme
    shards: tuple[ShardPlan, ...]
    # Names of tensors by what becomes of them; all others are copied.
    recoded: frozenset[str]
    rescaled: frozenset[str]
    # The configs as they will be, by file name; config.json last.
    configs: dict[str, str]
    # Files of the source that would contradict the new config.
    dropped: frozenset[str] = frozenset()
    # What stays as it is although the other dialect might have been expected there, and why.
    kept: dict[str, str]

    @property
    def nbytes(self) -> int:
        return sum(shard.size for shard in self.shards)

    def layout(self, shard: ShardPlan) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of each tensor that a new shard will have."""
        return {
            name: (DTYPES[self.to] if name in self.recoded else info.dtype, info.shape)
            for name, info in self.checkpoint.headers[shard.name].tensors.items()
        }


def plan_conversion(
    checkpoint: Checkpoint, to: Dialect, *, even_if_normalised: bool = False, keep_kv_scales: bool = False
) -> Conversion:
    scheme = understood(checkpoint)
    if scheme.dialect == to:
        again = f", converted by crosstie (see {MARK} in its metadata)" if scheme.converted else ""
        raise BadInput(
            f"{checkpoint.folder}: its FP8 weights are {to} already{again}: applied twice, it would be wrong"
        )
    if to == "e4m3fnuz" and not even_if_normalised:
        _refuse_what_is_normalised(checkpoint, scheme)
    recoded = frozenset(weight.name for weight in scheme.fp8_weights)
    keep_kv_scales = keep_kv_scales or scheme.kv_kept
    rescaled, kept = _scales(checkpoint, scheme, keep_kv_scales)
    marks = _marks(to, keep_kv_scales and bool(scheme.kv_scales))
    return Conversion(
        to=to,
        checkpoint=checkpoint,
        scheme=scheme,
        shards=tuple(_shard(header, to, recoded, rescaled, marks) for header in checkpoint.headers.values()),
        recoded=recoded,
        rescaled=rescaled,
        configs={
            name: json.dumps(_marked_config(read_json(checkpoint.folder / name), to, marks), indent=2) + "\n"
            for name in _CONFIGS
            if (checkpoint.folder / name).is_file()
        },
        kept=kept,
    )


def understood(checkpoint: Checkpoint, *, also: str = "") -> Scheme:
    """What a checkpoint with FP8 weights is, or with those of another scheme, where nothing about it is doubtful."""
    scheme = read_scheme(checkpoint)
    if scheme.problems:
        first, more = scheme.problems[0], len(scheme.problems) - 1
        others = f" (and {more:,} more such questions)" if more else ""
        raise BadData(checkpoint.folder / first.file, first.key, first.reason + others)
    if not any(weight.is_fp8 or weight.scheme == also for weight in scheme.weights):
        raise BadInput(f"{checkpoint.folder}: nothing to convert: {_without_fp8(scheme)}")
    _check_shapes(checkpoint, scheme)
    return scheme


def _check_shapes(checkpoint: Checkpoint, scheme: Scheme) -> None:
    """As many scales as there are blocks or fused matrices, and one for each input."""
    for weight in scheme.fp8_weights:
        shape = checkpoint[weight.name].shape
        # Experts are stacked; a fused projection has a scale for each of its parts.
        parts = math.prod(shape[:-2]) if len(shape) > 2 else 1
        most = parts * (_MOST_FUSED if _FUSED.search(weight.name) else 2 if len(shape) > 2 else 1)
        for name in (*weight.inputs, *(weight.scales if weight.scheme == "fp8-tensor" else ())):
            if checkpoint[name].elements > most:
                each = " an expert" if parts > 1 else ""
                reason = f"{checkpoint[name].elements:,} scales for {weight.name}, which has one{each}"
                raise BadData(checkpoint[name].file, name, reason)
    scales = {name for weight in scheme.fp8_weights for name in weight.scales}
    for problem in scale_problems(scheme, checkpoint):
        if problem.key in scales:
            raise BadData(checkpoint.folder / problem.file, problem.key, problem.reason)


def _without_fp8(scheme: Scheme) -> str:
    if any(weight.scheme == "nvfp4" for weight in scheme.weights):
        return "its E4M3 tensors are the block scales of NVFP4 weights, which engines decode in software as e4m3fn"
    return f"no weight is stored in E4M3 ({scheme.scheme})"


def _refuse_what_is_normalised(checkpoint: Checkpoint, scheme: Scheme) -> None:
    for weight in scheme.fp8_weights:
        unread = "no loader of this method was read, and it may convert itself" if scheme.method == "other" else None
        why = _LOADERS.get((scheme.method, weight.scheme), unread)
        if why is not None:
            raise BadInput(
                f"{checkpoint.folder}: {scheme.method} with {weight.scheme} weights: {why}, and would then read a "
                "converted checkpoint wrongly or less exactly. --even-if-normalised converts it for another loader."
            )


def _scales(checkpoint: Checkpoint, scheme: Scheme, keep_kv_scales: bool) -> tuple[frozenset[str], dict[str, str]]:
    """The scales that change, each once however many weights share it, and what is left alone."""
    activations = input_config(scheme.quantisation) or {}
    changed: set[str] = set()
    fixed: dict[str, str] = {}
    for weight in scheme.weights:
        if weight.is_fp8:
            changed |= {*weight.scales, *weight.inputs}
        else:
            fixed |= dict.fromkeys(weight.scales, weight.name)
            if weight.scheme in ("mxfp4", "int4") and is_fp8(activations):
                changed |= set(weight.inputs)
    if not keep_kv_scales and scheme.kv_format in ("", "fp8"):
        changed |= set(scheme.kv_scales)
    for name in sorted(changed & fixed.keys()):
        raise BadData(checkpoint[name].file, name, f"belongs to FP8 weights and to {fixed[name]}, which is not FP8")
    _check_types(checkpoint, changed, scheme)
    kept = {
        name: "block scales of NVFP4 weights, which are read as e4m3fn on every accelerator"
        for name in fixed
        if checkpoint[name].dtype == DTYPES["e4m3fn"]
    }
    if keep_kv_scales or scheme.kv_format not in ("", "fp8"):
        why = "KV scales are to be left alone" if keep_kv_scales else f"the KV cache is {scheme.kv_format}, not FP8"
        kept |= dict.fromkeys(scheme.kv_scales, why)
    return frozenset(changed), kept


def _check_types(checkpoint: Checkpoint, changed: set[str], scheme: Scheme) -> None:
    of_weights = {name for weight in scheme.weights for name in weight.scales}
    for name in sorted(changed):
        info = checkpoint[name]
        if info.dtype not in FLOATS and not (name in of_weights and info.dtype in EXPONENTS):
            raise BadData(info.file, name, f"a scale of type {info.dtype}, which is not known")
    if not scheme.kv_format:
        # Some models have learnt vectors of such names.
        for name in changed & set(scheme.kv_scales):
            if checkpoint[name].elements != 1:
                shape = list(checkpoint[name].shape)
                raise BadData(
                    checkpoint[name].file, name, f"is it a KV scale? {shape}, and the config names no FP8 cache"
                )


def _shard(
    header: Header, to: Dialect, recoded: frozenset[str], rescaled: frozenset[str], marks: Mapping[str, str]
) -> ShardPlan:
    steps: list[ByteRange] = []
    entries = []
    for name, info in header.tensors.items():
        change: Change = "codes" if name in recoded else ("scale" if name in rescaled else "none")
        stop = info.offset + info.nbytes
        if change == "none" and steps and steps[-1].change == "none":
            steps[-1] = msgspec.structs.replace(steps[-1], stop=stop)
        else:
            steps.append(ByteRange(change, name, info.dtype, info.offset, stop))
        entries.append((name, DTYPES[to] if change == "codes" else info.dtype, info.shape, info.nbytes))
    metadata = {key: value for key, value in header.metadata.items() if key not in (MARK, KV_MARK)}
    return ShardPlan(
        source=header.file,
        identity=identity_of(header.file),
        head=encode_header(entries, {**metadata, **marks}),
        data_start=header.data_start,
        steps=tuple(steps),
    )


def _marks(to: Dialect, keep_kv_scales: bool) -> dict[str, str]:
    """What says that a checkpoint was converted; e4m3fn is what its format expects, and needs no mark."""
    if to == "e4m3fn":
        return {}
    return {MARK: to, **({KV_MARK: OTHER[to]} if keep_kv_scales else {})}


def _marked_config(raw: dict[str, Any], to: Dialect, marks: Mapping[str, str]) -> dict[str, Any]:
    """With the dialect where it describes the quantisation."""
    made = {
        key: _marked_config(value, to, marks) if key == "text_config" and isinstance(value, dict) else value
        for key, value in raw.items()
    }
    for key in ("quantization_config", "compression_config", "quantization"):
        found = made.get(key)
        if not isinstance(found, dict):
            continue
        kept = {name: value for name, value in found.items() if name not in (MARK, KV_MARK)}
        spelt = kept.get("fmt")
        if isinstance(spelt, str) and spelt.removeprefix("float8_") == OTHER[to]:
            kept["fmt"] = spelt.removesuffix(OTHER[to]) + to
        made[key] = {**kept, **marks}
    return made


# ModelOpt's FP8 by tensor as compressed-tensors: the same bytes under a config whose loaders know both dialects. vLLM
# and SGLang convert compressed-tensors to e4m3fnuz when they load it on gfx942, and were not seen to do so for
# ModelOpt's FP8 by tensor (docs/convert.md). Both name and shape their scales alike, so that only the config changes.


def plan_repackaging(checkpoint: Checkpoint) -> Conversion:
    scheme = understood(checkpoint)
    _refuse_other_formats(checkpoint, scheme)
    config = with_quantisation(read_json(checkpoint.folder / CONFIG), described(scheme, BY_TENSOR, BY_TENSOR))
    return Conversion(
        to="e4m3fn",
        checkpoint=checkpoint,
        scheme=scheme,
        shards=tuple(_shard(header, "e4m3fn", frozenset(), frozenset(), {}) for header in checkpoint.headers.values()),
        recoded=frozenset(),
        rescaled=frozenset(),
        configs={CONFIG: json.dumps(config, indent=2) + "\n"},
        dropped=frozenset({MODELOPT_FILE}),
        kept={},
    )


def _refuse_other_formats(checkpoint: Checkpoint, scheme: Scheme) -> None:
    if scheme.method != "modelopt":
        raise BadInput(f"{checkpoint.folder}: {scheme.method}; only ModelOpt's FP8 becomes {FORMAT}")
    if scheme.dialect != "e4m3fn":
        raise BadInput(
            f"{checkpoint.folder}: its weights are {scheme.dialect}; {FORMAT} is e4m3fn: convert it back first"
        )
    for weight in scheme.weights:
        if weight.scheme not in ("fp8-tensor", "bf16", "fp16"):
            raise BadData(
                checkpoint[weight.name].file, weight.name, f"{weight.scheme}: only FP8 by tensor becomes {FORMAT}"
            )
        if weight.is_fp8 and len(checkpoint[weight.name].shape) != 2:
            why = f"stacked experts: no loader was found that reads them as {FORMAT} by tensor"
            raise BadData(checkpoint[weight.name].file, weight.name, why)
        if weight.is_fp8 and not weight.inputs:
            raise BadData(checkpoint[weight.name].file, weight.name, "static FP8 without an input_scale")


def with_quantisation(config: dict[str, Any], quantisation: Mapping[str, Any]) -> dict[str, Any]:
    """In the place where the config had it."""
    made = {key: value for key, value in config.items() if key != "compression_config"}
    text = made.get("text_config")
    if isinstance(text, dict) and "quantization_config" in text:
        return {**made, "text_config": {**text, "quantization_config": dict(quantisation)}}
    return {**made, "quantization_config": dict(quantisation)}


def described(scheme: Scheme, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What is not quantised is listed by module: the patterns of the two formats do not mean the same."""
    plain = {weight.name.removesuffix(".weight") for weight in scheme.weights if weight.scheme in ("bf16", "fp16")}
    found: dict[str, Any] = {
        "quant_method": FORMAT,
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": dict(weights), "input_activations": dict(inputs)}
        },
        "ignore": sorted(name for name in plain if "embed" not in name),
    }
    return {**found, "kv_cache_scheme": BY_TENSOR} if scheme.kv_format == "fp8" else found


def check_repackaged(plan: Conversion, made: Checkpoint) -> None:
    """What was written is read as the same weights with the same scales, under the other method."""
    scheme = read_scheme(made)
    if scheme.problems or scheme.method != FORMAT or scheme.weights != plan.scheme.weights:
        raise BadInput(f"{made.folder}: what was written is not read as {FORMAT} with the same weights")

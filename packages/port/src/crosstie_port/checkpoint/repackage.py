"""ModelOpt's FP8 by tensor as compressed-tensors: the same bytes under a config whose loaders know both dialects.

vLLM and SGLang convert compressed-tensors to e4m3fnuz when they load it on gfx942, and were not seen to do so for
ModelOpt's FP8 by tensor (docs/convert.md). Both name and shape their scales alike, so that only the config changes.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from crosstie.catalog.reading import read_json
from crosstie.core.errors import BadData, BadInput
from crosstie.port.checkpoint.formats import MODELOPT_FILE, Scheme, read_scheme
from crosstie.port.checkpoint.index import Checkpoint
from crosstie_port.checkpoint.conversion import Conversion, copied_shard, understood

FORMAT: Final = "compressed-tensors"
FP8_NUMBERS: Final = {"num_bits": 8, "type": "float", "symmetric": True}
BY_TENSOR: Final = {**FP8_NUMBERS, "strategy": "tensor", "dynamic": False}
CONFIG = "config.json"


def plan_repackaging(checkpoint: Checkpoint) -> Conversion:
    scheme = understood(checkpoint)
    _refuse_others(checkpoint, scheme)
    config = with_quantisation(read_json(checkpoint.folder / CONFIG), described(scheme, BY_TENSOR, BY_TENSOR))
    return Conversion(
        to="e4m3fn",
        checkpoint=checkpoint,
        scheme=scheme,
        shards=tuple(copied_shard(header) for header in checkpoint.headers.values()),
        recoded=frozenset(),
        rescaled=frozenset(),
        configs={CONFIG: json.dumps(config, indent=2) + "\n"},
        dropped=frozenset({MODELOPT_FILE}),
        kept={},
    )


def _refuse_others(checkpoint: Checkpoint, scheme: Scheme) -> None:
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

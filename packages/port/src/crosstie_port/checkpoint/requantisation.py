"""What becomes of each tensor when FP8 or MXFP4 weights get scales by tensor, channel or block; or why not.

Every quantised weight is stored in E4M3 afterwards, in the dialect that the checkpoint's FP8 has (e4m3fn for MXFP4),
with its scales beside it. DeepSeek's `fp8` stays what it is; all else becomes compressed-tensors, whose loaders know
all three.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import msgspec
import numpy as np

from crosstie.catalog.reading import read_json
from crosstie.core.errors import BadData, BadInput
from crosstie.port.checkpoint.formats import MARK, MODELOPT_FILE, Scheme, read_scheme, scale_problems
from crosstie.port.checkpoint.fp8 import DTYPES, Bytes, Codes, Dialect
from crosstie.port.checkpoint.headers import DTYPE_BITS, Header, TensorInfo, encode_header
from crosstie.port.checkpoint.index import Checkpoint
from crosstie.port.checkpoint.roles import FLOATS, QUANTISED, Weight
from crosstie_port.checkpoint.conversion import (
    BY_TENSOR,
    CONFIG,
    FORMAT,
    FP8_NUMBERS,
    Conversion,
    described,
    understood,
    with_quantisation,
)
from crosstie_port.checkpoint.matrix import Matrix, Opened, ReadRows, RoundingLoss
from crosstie_port.checkpoint.shard import NewFile, OpenFile, ShardPlan, identity_of, in_threads

Granularity = Literal["fp8-tensor", "fp8-channel", "fp8-block"]

_SIDE: Final = 128
_MX_GROUP: Final = 32
_FP4_DTYPES = ("U8", "I8", "F4")
_NAMES = (".weight", ".weight_packed")
_BY_BLOCK = {**FP8_NUMBERS, "strategy": "block", "block_structure": [_SIDE, _SIDE], "dynamic": False}
_BY_CHANNEL = {**FP8_NUMBERS, "strategy": "channel", "dynamic": False}
_BY_GROUP = {**FP8_NUMBERS, "strategy": "group", "group_size": _SIDE, "dynamic": True}
_BY_TOKEN = {**FP8_NUMBERS, "strategy": "token", "dynamic": True}
_WEIGHTS: dict[str, dict[str, Any]] = {"fp8-tensor": BY_TENSOR, "fp8-channel": _BY_CHANNEL, "fp8-block": _BY_BLOCK}


class NewTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of a new shard: another's bytes, or the codes or the scales of a matrix that is made anew."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Literal["copy", "codes", "scales"]
    # The tensor of the source that it comes from; of codes and scales, the weight.
    source: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class Requantisation(Conversion, frozen=True, kw_only=True):
    granularity: Granularity
    method: str
    # By the weight's name in the source.
    matrices: dict[str, Matrix]
    # By shard, in the order of their bytes.
    tensors: dict[str, tuple[NewTensor, ...]]
    # Whether values may change.
    inexact: bool

    def layout(self, shard: ShardPlan) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {made.name: (made.dtype, made.shape) for made in self.tensors[shard.name]}


def plan_requantisation(checkpoint: Checkpoint, to: Granularity, *, inexact: bool = False) -> Requantisation:
    scheme = understood(checkpoint, also="mxfp4")
    dialect = scheme.dialect or "e4m3fn"
    raw = read_json(checkpoint.folder / CONFIG)
    _refuse_others(checkpoint, scheme, raw, to)
    weights = {weight.name: weight for weight in scheme.weights if weight.scheme in QUANTISED}
    matrices = {name: _matrix(checkpoint, scheme, weight, dialect, to) for name, weight in weights.items()}
    if all(
        weight.scheme == to and matrices[name].block == matrices[name].new_block for name, weight in weights.items()
    ):
        raise BadInput(f"{checkpoint.folder}: nothing to convert: its weights are {to} already")
    keeps_method = scheme.method == "fp8" and to != "fp8-channel"
    # Loaders of block FP8 round inputs as they come; by channel no kernel was seen that takes static ones.
    static = to == "fp8-tensor" and all(weight.inputs for weight in weights.values())
    tensors = {
        name: _tensors(header, checkpoint, weights, matrices, _Names(scheme, to, keeps_method, static))
        for name, header in checkpoint.headers.items()
    }
    quantisation = _fp8(scheme, to, static) if keeps_method else _compressed(scheme, to, static)
    config = with_quantisation(raw, quantisation)
    if config.get("expert_dtype") == "fp4":
        # DeepSeek-V4 says so beside its quantisation.
        config["expert_dtype"] = "fp8"
    dropped_inputs = [] if static else [name for weight in weights.values() for name in weight.inputs]
    return Requantisation(
        to=dialect,
        checkpoint=checkpoint,
        scheme=scheme,
        shards=tuple(_shard(header, tensors[name]) for name, header in checkpoint.headers.items()),
        recoded=frozenset(weights),
        rescaled=frozenset(name for weight in weights.values() for name in weight.scales),
        configs={**_index(checkpoint, tensors), CONFIG: json.dumps(config, indent=2) + "\n"},
        dropped=frozenset({MODELOPT_FILE}),
        kept=dict.fromkeys(dropped_inputs, "static scales of inputs left out: inputs are rounded as they come"),
        granularity=to,
        method="fp8" if keeps_method else FORMAT,
        matrices=matrices,
        tensors=tensors,
        inexact=inexact,
    )


def check_requantised(plan: Requantisation, made: Checkpoint) -> None:
    """What was written is read as the same weights, each in the new scheme, with nothing doubtful about it."""
    scheme = read_scheme(made)
    found = {weight.name: weight.scheme for weight in scheme.weights if weight.scheme in QUANTISED}
    wanted = {_weight_name(name): plan.granularity for name in plan.matrices}
    if scheme.problems or scheme.method != plan.method or found != wanted or any(scale_problems(scheme, made)):
        raise BadInput(f"{made.folder}: what was written is not read as {plan.method} with {plan.granularity} weights")


def _refuse_others(checkpoint: Checkpoint, scheme: Scheme, raw: Mapping[str, Any], to: Granularity) -> None:
    for weight in scheme.weights:
        info = checkpoint[weight.name]
        if weight.scheme not in ("bf16", "fp16", "fp8-tensor", "fp8-channel", "fp8-block", "mxfp8", "mxfp4"):
            raise BadData(info.file, weight.name, f"{weight.scheme}: only FP8 and MXFP4 weights become {to}")
        if weight.scheme not in QUANTISED:
            continue
        if len(info.shape) != 2:
            why = f"{len(info.shape)} dimensions: no loader was found that reads stacked experts as {to}"
            raise BadData(info.file, weight.name, why)
        if not weight.name.endswith(_NAMES):
            raise BadData(info.file, weight.name, f"no name of a weight that loaders of {to} look for")
    if "expert_dtype" in raw and to != "fp8-block":
        raise BadInput(f"{checkpoint.folder}: loaders of a model with an expert_dtype read its FP8 by block alone")


def _matrix(checkpoint: Checkpoint, scheme: Scheme, weight: Weight, dialect: Dialect, to: Granularity) -> Matrix:
    info, scale = checkpoint[weight.name], checkpoint[weight.scales[0]]
    packed = weight.scheme == "mxfp4"
    if packed and info.dtype not in _FP4_DTYPES:
        raise BadData(info.file, weight.name, f"FP4 in {info.dtype}, a packing that is not known")
    rows, columns = info.shape[0], info.shape[1] * (2 if packed and info.dtype != "F4" else 1)
    new_block = {"fp8-tensor": (rows, columns), "fp8-channel": (1, columns), "fp8-block": (_SIDE, _SIDE)}[to]
    return Matrix(
        name=weight.name,
        rows=rows,
        columns=columns,
        dialect=None if packed else dialect,
        scale=weight.scales[0],
        scale_dtype=scale.dtype,
        block=_block(scheme, weight, (rows, columns), scale),
        new_dialect=dialect,
        new_scale_dtype=scale.dtype if scale.dtype in FLOATS else "F32",
        new_block=new_block,
    )


def _block(scheme: Scheme, weight: Weight, shape: tuple[int, int], scale: TensorInfo) -> tuple[int, int]:
    """How many rows and columns share a scale now."""
    rows, columns = shape
    sides = tuple(scale.shape[::2] if len(scale.shape) == 4 else scale.shape)
    if weight.scheme in ("mxfp4", "mxfp8"):
        possible = [(1, _MX_GROUP)]
    elif weight.scheme == "fp8-tensor":
        possible = [(rows, columns)]
    elif weight.scheme == "fp8-channel":
        possible = [(1, columns), (rows, 1)]
    else:
        said = scheme.block_sizes or {(_SIDE, _SIDE)}
        even = [(rows // sides[0], columns // sides[1])] if rows % sides[0] == 0 == columns % sides[1] else []
        possible = [*sorted(said), *even]
    for block in possible:
        grid = (-(-rows // block[0]), -(-columns // block[1]))
        if math.prod(grid) == scale.elements and (sides in (grid, (grid[0],)) or scale.elements == 1):
            return block
    reason = f"scales of shape {list(scale.shape)}: which part of {list(shape)} each of them is for is not known"
    raise BadData(scale.file, weight.scales[0], reason)


class _Names(msgspec.Struct, frozen=True):
    """How the tensors of a weight are called afterwards."""

    scheme: Scheme
    to: Granularity
    keeps_method: bool
    static: bool

    def scale(self, weight: Weight) -> str:
        ending = weight.scales[0].rpartition(".")[2]
        if not (self.keeps_method and self.to == "fp8-block"):
            ending = "weight_scale"
        elif ending not in ("scale", "weight_scale_inv"):
            ending = "weight_scale_inv"
        return f"{_module(weight.name)}.{ending}"


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _weight_name(name: str) -> str:
    return f"{_module(name)}.weight"


def _tensors(
    header: Header, checkpoint: Checkpoint, weights: Mapping[str, Weight], matrices: Mapping[str, Matrix], names: _Names
) -> tuple[NewTensor, ...]:
    replaced = {name for weight in weights.values() for name in (*weight.scales, *weight.inputs)}

    def made() -> Iterator[NewTensor]:
        for name, info in header.tensors.items():
            weight = weights.get(name)
            if weight is not None:
                matrix = matrices[name]
                shape = (matrix.rows, matrix.columns)
                scales = {"fp8-tensor": (1,), "fp8-channel": (matrix.rows, 1), "fp8-block": matrix.grid}[names.to]
                dtype = DTYPES[matrix.new_dialect]
                yield NewTensor(name=_weight_name(name), dtype=dtype, shape=shape, kind="codes", source=name)
                yield NewTensor(
                    name=names.scale(weight), dtype=matrix.new_scale_dtype, shape=scales, kind="scales", source=name
                )
                for scale in weight.inputs if names.static else ():
                    its = checkpoint[scale]
                    yield NewTensor(
                        name=f"{_module(name)}.input_scale", dtype=its.dtype, shape=its.shape, kind="copy", source=scale
                    )
            elif name not in replaced:
                yield NewTensor(name=name, dtype=info.dtype, shape=info.shape, kind="copy", source=name)

    # Long numbers first, as safetensors itself writes them: libraries refuse those that lie across their length.
    return tuple(sorted(made(), key=lambda tensor: -DTYPE_BITS[tensor.dtype]))


def _shard(header: Header, tensors: tuple[NewTensor, ...]) -> ShardPlan:
    entries = [(made.name, made.dtype, made.shape, made.nbytes) for made in tensors]
    return ShardPlan(
        source=header.file,
        identity=identity_of(header.file),
        head=encode_header(entries, header.metadata),
        data_start=header.data_start,
        steps=(),
        new_data_bytes=sum(made.nbytes for made in tensors),
    )


def _index(checkpoint: Checkpoint, tensors: Mapping[str, tuple[NewTensor, ...]]) -> dict[str, str]:
    if checkpoint.index is None:
        return {}
    raw = read_json(checkpoint.index)
    metadata = raw.get("metadata") if isinstance(raw.get("metadata"), dict) else {}
    total = sum(made.nbytes for shard in tensors.values() for made in shard)
    weight_map = {made.name: shard for shard, all_made in tensors.items() for made in all_made}
    made = {**raw, "metadata": {**(metadata or {}), "total_size": total}, "weight_map": weight_map}
    return {checkpoint.index.name: json.dumps(made, indent=2) + "\n"}


def _fp8(scheme: Scheme, to: Granularity, static: bool) -> dict[str, Any]:
    made = {**scheme.quantisation, "activation_scheme": "static" if static else "dynamic"}
    made.pop("weight_block_size", None)
    return {**made, "weight_block_size": [_SIDE, _SIDE]} if to == "fp8-block" else made


def _compressed(scheme: Scheme, to: Granularity, static: bool) -> dict[str, Any]:
    inputs = BY_TENSOR if static else (_BY_GROUP if to == "fp8-block" else _BY_TOKEN)
    made = described(scheme, _WEIGHTS[to], inputs)
    return {**made, MARK: scheme.quantisation[MARK]} if MARK in scheme.quantisation else made


# Carried out: each tensor of each shard made, read back, dequantised and compared


def make_shard(
    plan: Requantisation, shard: ShardPlan, target: NewFile, jobs: int, done: Callable[[int], None]
) -> tuple[Codes, dict[str, RoundingLoss]]:
    """Fills a file that has its header and its length, or compares one that is full: counts, and what it cost."""
    starts: dict[str, int] = {}
    at = len(shard.head)
    for made in plan.tensors[shard.name]:
        starts[made.name] = at
        at += made.nbytes

    def work(made: NewTensor) -> tuple[str, RoundingLoss] | None:
        source = plan.checkpoint[made.source]
        if made.kind == "copy":
            _copy(plan.checkpoint, made, target, starts[made.name])
            done(source.nbytes)
            return None
        matrix = plan.matrices[made.source]
        scales = next(m for m in plan.tensors[shard.name] if m.kind == "scales" and m.source == made.source)
        cost = _remake(plan.checkpoint, matrix, target, starts[made.name], starts[scales.name])
        if cost.changed and not plan.inexact:
            raise BadData(source.file, made.source, _refusal(plan, cost))
        done(source.nbytes + plan.checkpoint[matrix.scale].nbytes)
        return made.source, cost

    found = in_threads([work] * jobs, [made for made in plan.tensors[shard.name] if made.kind != "scales"])
    done(sum(plan.checkpoint[name].nbytes for name in plan.kept if plan.checkpoint[name].file == shard.source))
    costs: dict[str, RoundingLoss] = dict(one for one in found if one is not None)
    total = sum(cost.values for cost in costs.values())
    return Codes(total=total), {name: cost for name, cost in costs.items() if cost.changed}


def _refusal(plan: Requantisation, cost: RoundingLoss) -> str:
    return (
        f"not exact as {plan.granularity}: {cost.changed:,} of {cost.values:,} values change, at most by "
        f"{cost.max_relative:.2g} of their size, RMS {cost.rms_relative:.2g}; --inexact allows it, and reports each"
    )


def _bytes(file: OpenFile, at: int, count: int) -> Bytes:
    return file.get(at, np.empty(count, np.uint8))


def _rows(file: OpenFile, at: int, width: int) -> ReadRows:
    return lambda start, stop: _bytes(file, at + start * width, (stop - start) * width).reshape(-1, width)


def _remake(checkpoint: Checkpoint, matrix: Matrix, target: NewFile, codes_at: int, scales_at: int) -> RoundingLoss:
    info = checkpoint[matrix.name]
    scales = np.frombuffer(checkpoint.read(matrix.scale), np.uint8)
    with OpenFile(info.file) as source:
        opened = Opened(matrix, _rows(source, info.offset, info.nbytes // matrix.rows), scales, info.file)
        for start, slab in opened.slabs():
            target.put(slab.reshape(-1), codes_at + start * matrix.columns, matrix.name)
        new_scales = opened.new_scales.reshape(-1).view(np.uint8)
        target.put(new_scales, scales_at, matrix.scale)
        return opened.cost(_rows(target, codes_at, matrix.columns), _bytes(target, scales_at, new_scales.size))


def _copy(checkpoint: Checkpoint, made: NewTensor, target: NewFile, at: int) -> None:
    for piece in checkpoint.chunks(made.source):
        target.put(np.frombuffer(piece, np.uint8), at, made.name)
        at += len(piece)

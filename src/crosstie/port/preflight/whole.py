"""Whether a checkpoint is the model that its config describes: every tensor there, in its shape, and none too many.

What must be there is what `catalog` counts: `Model`, the parts of its layers and what stands outside of them. For
families of which every tensor is counted (families.toml) a difference is an error; for others it says only that the
check could not be made.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path

import msgspec

from crosstie.catalog.families import is_counted
from crosstie.catalog.quantisation import left_alone
from crosstie.core.finding import Finding, Location
from crosstie.core.model import Layer, Model, Tensor
from crosstie.port.checkpoint.formats import Scheme, read_scheme, scale_problems
from crosstie.port.checkpoint.gguf import gguf_name, in_usual_names
from crosstie.port.checkpoint.headers import DTYPE_BITS, TensorInfo
from crosstie.port.checkpoint.index import Checkpoint
from crosstie.port.checkpoint.names import (
    Covers,
    TensorPlace,
    covers,
    embeddings,
    is_after_layers,
    is_buffer,
    is_head,
    is_vector,
    place,
    prefixes,
    usual_name,
)
from crosstie.port.checkpoint.roles import Problem, Weight, module_of
from crosstie.port.preflight.phrases import told
from crosstie.port.preflight.stored import Stored

# Findings of one kind are told once; of different kinds, so many.
_MOST = 12
# The vectors that are biases, and the parts that they belong to.
_BIASES = {
    "qkv_bias": ("q", "k", "v", "q_a", "q_b", "kv_a"),
    "o_bias": ("o",),
    "mlp_bias": ("mlp_up", "mlp_down"),
    "expert_bias": ("experts_up", "experts_down"),
    "router_bias": ("router",),
    "ssm_conv_bias": ("ssm_conv",),
    "ssm_dt_bias": ("ssm_dt",),
    "ssm_in_bias": ("ssm_in",),
    "ssm_out_bias": ("ssm_out",),
    "conv_bias": ("conv_in", "conv", "conv_out"),
}
_REMEDY = (
    "take config.json and the weights from the same source again; where one was edited or converted, undo that: "
    "loaders stop at such a tensor, or leave it at whatever memory held"
)

_CONVERT_AGAIN = "download it again, all parts of it; or convert it again from the original with llama.cpp's converter"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor, what the config asks for and what is there."""

    # Differences of the same kind are told once.
    kind: str
    tensor: str
    expected: str
    found: str
    file: Path | None = None


def whole_findings(stored: Stored, model: Model | None) -> list[Finding]:
    checkpoint, scheme = stored.checkpoint, stored.scheme
    if stored.gguf is not None and (checkpoint := in_usual_names(stored.gguf)) is not None:
        scheme = read_scheme(checkpoint, {})
    if checkpoint is None or scheme is None:
        return []
    # Where the config and the tensors contradict each other as a whole, that has been said.
    found = [] if scheme.problems else _scale_findings(scheme, checkpoint)
    if model is None:
        return found
    differences = list(_differences(checkpoint, scheme, model, stored))
    return found + (_tensor_findings(stored, differences) if differences else [])


def _scale_findings(scheme: Scheme, checkpoint: Checkpoint) -> list[Finding]:
    alike: dict[str, list[Problem]] = defaultdict(list)
    for problem in scale_problems(scheme, checkpoint):
        alike[problem.reason.partition(" ")[0]].append(problem)
    return [
        told(
            "scales-unlike-config", Location(file=str(checkpoint.folder / first.file), name=first.key),
            tensor=first.key, reason=first.reason,
            more=f"; {len(problems) - 1:,} more like it" if len(problems) > 1 else "",
        )
        for problems in alike.values()
        for first in problems[:1]
    ]  # fmt: skip


def _tensor_findings(stored: Stored, differences: list[Difference]) -> list[Finding]:
    alike: dict[str, list[Difference]] = defaultdict(list)
    for difference in differences:
        alike[difference.kind].append(difference)
    if not is_counted(stored.family) or not _is_known_packing(stored):
        first = differences[0]
        return [
            told(
                "tensors-not-checked", Location(file=str(first.file or stored.config.file), name=first.tensor),
                family=stored.family or "a config without model_type", method=stored.method,
                count=f"{len(differences):,}", tensor=first.tensor, expected=first.expected, found=first.found,
            )
        ]  # fmt: skip
    return [_finding(stored, group) for group in list(alike.values())[:_MOST]]


# The formats of compressed-tensors whose shapes are known; sparse ones store something else than a matrix.
_FORMATS = (
    "dense", "float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision",
)  # fmt: skip


def _is_known_packing(stored: Stored) -> bool:
    """Whether it is known how the quantiser lays out its weights."""
    said = stored.scheme.quantisation if stored.scheme else {}
    sparse = said.get("sparsity_config")
    return (
        stored.method != "other"
        and said.get("checkpoint_format", "gptq") in ("gptq", "gptq_v2")
        and (stored.method != "compressed-tensors" or said.get("format", "dense") in _FORMATS)
        and (not isinstance(sparse, Mapping) or sparse.get("format", "dense") == "dense")
    )


def _finding(stored: Stored, alike: list[Difference]) -> Finding:
    first = alike[0]
    more = f", and {len(alike) - 1:,} more like it" if len(alike) > 1 else ""
    name, there, says, kind = first.tensor, first.found, "config.json", "safetensors"
    if stored.gguf is not None:
        name, there, says, kind = gguf_name(name), gguf_name(there), "its metadata", "GGUF"
    return told(
        "tensors", Location(file=str(first.file or stored.config.file), name=name), tensor=name, says=says,
        expected=first.expected, found=there, more=more, kind=first.kind, files=kind,
        remedy=_REMEDY if stored.gguf is None else _CONVERT_AGAIN,
    )  # fmt: skip


def _differences(checkpoint: Checkpoint, scheme: Scheme, model: Model, stored: Stored) -> Iterator[Difference]:
    tensors = checkpoint.tensors
    found = embeddings(tensors)
    by_depth = prefixes(tensors)
    if found:
        prefix, embedding = max(found, key=lambda pair: (by_depth.get(pair[0], 0), -len(pair[0])))
    else:
        prefix, embedding = max(by_depth, key=lambda one: (by_depth[one], -len(one)), default=""), ""
    yield from _outer_differences(tensors, scheme, model, stored, embedding)
    final = sum(tensor.parameters for tensor in model.outer if tensor.role == "small")
    there = [name for name in tensors if is_after_layers(name, prefix)]
    length = sum(tensors[name].elements for name in there)
    # More may be a tower's, or an adapter's; less is never the model.
    if length < final:
        yield Difference(
            kind="what follows the layers", tensor=f"{prefix}norm", expected=f"{final:,} elements",
            found=f"{length:,} ({', '.join(there) or 'nothing'})",
        )  # fmt: skip
    check = _Layers(checkpoint, scheme, stored)
    by_layer = check.sorted_in(prefix)
    lost = []
    for layer in model.layers:
        for number in layer.at:
            if number not in by_layer:
                lost.append(number)
                continue
            yield from check.compare(layer, number, by_layer[number])
    drafts = stored.config.get("num_nextn_predict_layers", "mtp_num_hidden_layers") or 0
    most = model.layer_count + (drafts if isinstance(drafts, int) else 0)
    beyond = sorted(
        number
        for number, inside in by_layer.items()
        if number >= most and not any(_DRAFT.match(at.path) for _, at in inside)
    )
    if beyond:
        first = by_layer[beyond[0]][0][0]
        yield Difference(
            kind="layers too many", tensor=first, expected=f"{model.layer_count} layers",
            found=f"tensors of layer {beyond[0]}", file=tensors[first].file,
        )  # fmt: skip
    # Where config and tensors contradict each other as a whole, that has been said.
    if not scheme.problems:
        yield from _unlike_said(scheme, checkpoint, stored)
    if lost:
        shown = f"{min(lost)} to {max(lost)}" if len(lost) > 1 else str(lost[0])
        yield Difference(
            kind="layers", tensor=f"{prefix}layers.{min(lost)}", expected=f"{model.layer_count} layers",
            found=f"no tensor of {len(lost)} of them ({shown})",
        )  # fmt: skip


# What only a layer that drafts tokens has (DeepSeek's MTP), also where the config does not count it.
_DRAFT = re.compile(r"(?:eh_proj|enorm|hnorm|shared_head)\b")
# Matrices that every quantiser takes unless it is told to leave them alone.
_PROJECTION = re.compile(r"(?:^|\.)layers\.\d+\.(?:self_attn|mlp)\.(?:experts\.\d+\.)?(?:[qkvo]|gate|up|down)_proj$")


def _unlike_said(scheme: Scheme, checkpoint: Checkpoint, stored: Stored) -> Iterator[Difference]:
    """Weights that are quantised though the config leaves them alone, or are not though it does not."""
    said = scheme.quantisation
    groups = said.get("config_groups")
    targets = [group.get("targets") for group in groups.values()] if isinstance(groups, Mapping) else []
    whole = scheme.method in ("fp8", "fbgemm_fp8", "modelopt") and said.get("quant_algo", "FP8") == "FP8"
    if scheme.method == "compressed-tensors":
        whole = targets == [["Linear"]]
    kept = left_alone(stored.config, said) if whole else []
    for weight in scheme.weights if whole else ():
        module, file = module_of(weight.name), checkpoint[weight.name].file
        ignored = any(pattern.search(module) for pattern in kept)
        if ignored and weight.is_fp8:
            yield Difference(
                kind="quantised, and left alone", tensor=weight.name, found=weight.scheme, file=file,
                expected="16 bits, as the quantization_config leaves it alone",
            )  # fmt: skip
        elif not ignored and weight.scheme in ("bf16", "fp16") and _PROJECTION.search(module):
            yield Difference(
                kind="not quantised", tensor=weight.name, found=checkpoint[weight.name].dtype, file=file,
                expected="FP8, as the quantization_config does not leave it alone",
            )  # fmt: skip


def _outer_differences(
    tensors: Mapping[str, TensorInfo], scheme: Scheme, model: Model, stored: Stored, embedding: str
) -> Iterator[Difference]:
    plain = (model.vocabulary, model.hidden)
    if not embedding:
        yield Difference(kind="embedding", tensor="model.embed_tokens.weight", expected=_shown(plain), found="nothing")
    heads = [name for name in tensors if is_head(name)]
    packed = {weight.name: weight for weight in scheme.weights}
    for name in filter(None, (embedding, *heads)):
        info, weight = tensors[name], packed.get(name)
        forms = _forms(*plain, weight, info, scheme)
        if forms and _squeezed(info.shape) not in forms:
            yield Difference(
                kind="vocabulary", tensor=name, expected=_shown(plain), found=_shown(info.shape), file=info.file
            )
    asked = any(tensor.role == "head" for tensor in model.outer)
    if asked and not heads and stored.unties:
        yield Difference(
            kind="head", tensor="lm_head.weight", expected=f"{_shown(plain)}, since tie_word_embeddings is false",
            found="nothing",
        )  # fmt: skip


class _Layers:
    """The tensors of each layer, held against the parts that the layer has."""

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme, stored: Stored):
        self._tensors, self._scheme = checkpoint.tensors, scheme
        self._weights = {weight.name: weight for weight in scheme.weights}
        self._companions = {name for w in scheme.weights for name in (*w.scales, *w.inputs, *w.globals)}
        self._companions.update(scheme.kv_scales)
        # Quantisers of integers write a bias of zeros beside every matrix.
        self._spare_biases = scheme.method in ("gptq", "awq")
        self._may_have = {"o"} if stored.config.get("attention_bias", "qkv_bias") else set()
        # By part: the modules that stored it in layers that had all of it.
        self._whole: dict[str, set[str]] = defaultdict(set)

    def sorted_in(self, prefix: str) -> dict[int, list[tuple[str, TensorPlace]]]:
        found: dict[int, list[tuple[str, TensorPlace]]] = defaultdict(list)
        for name, info in self._tensors.items():
            at = place(name, prefix)
            if at is None or name in self._companions or is_buffer(at.path) or _is_packing(at.path, info):
                continue
            found[at.layer].append((name, at))
        return found

    def compare(self, layer: Layer, number: int, stored: list[tuple[str, TensorPlace]]) -> Iterator[Difference]:
        parts = {tensor.name: tensor for tensor in layer.tensors if tensor.cols > 1}
        vectors = [tensor for tensor in layer.tensors if tensor.cols == 1]
        lengths = {tensor.name for tensor in vectors}
        biased = {part for name in lengths for part in _BIASES.get(name, ())}
        covered: dict[str, Fraction] = defaultdict(Fraction)
        modules: dict[str, tuple[str, ...]] = {}
        seen_biases: set[str] = set()
        small, uneven = 0, False
        for name, at in stored:
            info, module = self._tensors[name], module_of(at.path)
            biased_module = at.path.removesuffix("bias").rstrip("._")
            owner = _of_layer(covers(biased_module), layer) if at.path.endswith("bias") else None
            known = _of_layer(covers(module), layer)
            if owner is not None:
                seen_biases.update(owner.parts)
                if not biased.isdisjoint(owner.parts):
                    small += info.elements
                elif not self._may_have & set(owner.parts) and not self._spare_biases:
                    uneven = True
                    yield self._difference("a bias too many", name, "no bias", _shown(info.shape))
            elif is_vector(at.path) if known is None else lengths.issuperset(known.parts):
                small += info.elements
            elif known is None:
                uneven = True
                yield self._difference(f"{at.path} too many", name, "nothing of this name", _shown(info.shape))
            else:
                half = known.half or (known.half_if_gated and _is_gated(parts, known.parts[0]))
                copies = parts[known.parts[0]].copies if at.expert is None else 1
                for part in known.parts:
                    covered[part] += Fraction(copies, 2 if half else 1)
                modules[module] = known.parts
                yield from self._shape(name, module, [parts[part] for part in known.parts], copies, half)
        for tensor in parts.values():
            here = {module for module, own in modules.items() if tensor.name in own}
            if covered[tensor.name] >= tensor.copies:
                self._whole[tensor.name] |= here
                continue
            uneven = True
            yield self._missing(number, tensor, covered[tensor.name], here, stored)
        yield from self._vectors(stored, vectors, biased - seen_biases, modules, None if uneven else small)

    def _shape(
        self, name: str, module: str, parts: list[Tensor], copies: int, half: bool
    ) -> Iterator[Difference]:  # fmt: skip
        info, weight = self._tensors[name], self._weights.get(name)
        rows = sum(part.rows for part in parts) // (2 if half else 1)
        # A block-diagonal matrix keeps its blocks one under the other.
        cols = round(parts[0].cols * parts[0].density)
        forms = _forms(rows, cols, weight, info, self._scheme, copies=copies)
        if forms and _squeezed(info.shape) not in forms:
            asked = (rows, cols) if copies == 1 else (copies, rows, cols)
            yield self._difference(f"the shape of {module}", name, _shown(asked), _shown(info.shape))

    def _vectors(
        self, stored: list[tuple[str, TensorPlace]], vectors: list[Tensor], unbiased: set[str],
        modules: Mapping[str, tuple[str, ...]], small: int | None,
    ) -> Iterator[Difference]:  # fmt: skip
        """Biases by name, and all vectors together by their length."""
        start = _start(stored)
        for module, parts in modules.items():
            # What a router adds is a bias in some families and a correction in others.
            if any(part in unbiased and part != "router" for part in parts):
                small = None
                yield Difference(
                    kind="a bias that is missing", tensor=f"{start}{module}.bias", expected="a bias", found="nothing"
                )
        expected = sum(tensor.parameters for tensor in vectors)
        if small is None or small == expected:
            return
        lost = [tensor.name for tensor in vectors if tensor.parameters == expected - small]
        as_much = f", less by as much as {lost[0]}" if lost else ""
        names = ", ".join(tensor.name for tensor in vectors)
        yield Difference(
            kind="norms and other vectors", tensor=f"{start}*norm*", expected=f"{expected:,} elements ({names})",
            found=f"{small:,}{as_much}",
        )  # fmt: skip

    def _difference(self, kind: str, name: str, expected: str, found: str) -> Difference:
        return Difference(kind=kind, tensor=name, expected=expected, found=found, file=self._tensors[name].file)

    def _missing(
        self, number: int, part: Tensor, covered: Fraction, here: set[str], stored: list[tuple[str, TensorPlace]]
    ) -> Difference:  # fmt: skip
        lost = sorted(self._whole[part.name] - here) or [usual_name(part.name)]
        shown = _shown((part.rows, part.cols))
        if covered and part.copies > 1:
            found = f"{float(covered):g} of {part.copies} experts"
        else:
            found = f"{', '.join(sorted(here))} alone" if here else "nothing"
        asked = shown if part.copies == 1 else f"{part.copies} of {shown}"
        start = _start(stored) or f"layers.{number}."
        return Difference(
            kind=f"{part.name} missing", tensor=f"{start}{' and '.join(lost)}", expected=asked, found=found
        )


def _start(stored: list[tuple[str, TensorPlace]]) -> str:
    """What the names of a layer's tensors begin with."""
    return next((name.removesuffix(at.path) for name, at in stored if at.expert is None), "")


def _of_layer(possible: tuple[Covers, ...], layer: Layer) -> Covers | None:
    """The first meaning of a name whose parts the layer has."""
    own = {tensor.name for tensor in layer.tensors}
    return next((one for one in possible if own.issuperset(one.parts)), None)


def _is_gated(parts: Mapping[str, Tensor], up: str) -> bool:
    down = parts.get(up.replace("_up", "_down"))
    return down is None or parts[up].rows == 2 * down.cols


# Zero points, orders and states that quantisers keep beside their weights; what is called a scale is one too.
_PACKING = (
    "qzeros", "g_idx", "weight_shape", "weight_zero_point", "weight_g_idx", "zero_point", "SCB", "weight_format",
    "absmax", "quant_map", "perm",
)  # fmt: skip


def _is_packing(path: str, info: TensorInfo) -> bool:
    ending = path.rpartition(".")[2]
    if ending in _PACKING or ".quant_state" in path or ending.startswith("nested_"):
        return True
    return ("scale" in ending and not is_vector(path)) or info.dtype in ("I64", "U64", "BOOL")


def _squeezed(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(side for side in shape if side != 1)


def _forms(
    rows: int, cols: int, weight: Weight | None, info: TensorInfo, scheme: Scheme, *, copies: int = 1
) -> set[tuple[int, ...]]:  # fmt: skip
    """The shapes in which a matrix may be stored; none where that is not known."""
    sides: list[tuple[int, ...]] = [(rows, cols)]
    if weight is None or weight.scheme == "unknown":
        if info.dtype not in ("BF16", "F16", "F32"):
            return set()
    elif weight.scheme in ("nvfp4", "mxfp4") and info.dtype != "F4":
        sides = [(rows, cols // 32, 16), (rows, cols // 2)]
    elif weight.scheme == "bnb4":
        # Two numbers a byte, in a column of whatever type was chosen to hold them.
        return {_squeezed((rows * cols * copies * 4 // DTYPE_BITS[info.dtype],))}
    elif info.dtype == "I32":
        sides = [pair for bits in scheme.integer_bits or {4} for pair in _packed(rows, cols, bits)]
    if copies > 1:
        stacks = [(copies, *side) for side in sides]
        stacks += [(copies, side[1], side[0]) for side in sides if len(side) == 2]
        # DBRX writes the experts one under the other, as [experts x inner, hidden] whichever way they multiply.
        sides = [*stacks, (copies * rows, cols), (copies * cols, rows)]
    elif weight is not None and ".c_" in weight.name:
        # GPT-2 keeps its matrices turned.
        sides.append((cols, rows))
    return {_squeezed(side) for side in sides}


def _packed(rows: int, cols: int, bits: int) -> list[tuple[int, ...]]:
    """Integers in words of 32 bits: along the inputs (compressed-tensors, GPTQ turned) or the outputs (AWQ)."""
    words = -(-cols * bits // 32)
    return [(rows, words), (words, rows), (cols, -(-rows * bits // 32))]


def _shown(shape: Iterable[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"

"""The header of a GGUF file: its metadata and the type of each tensor, without the tensors.

The format (ggml-org/ggml docs/gguf.md): a magic word, a version, two counts, then keys with typed values, then for
each tensor its name, shape, type and offset, then the data. Strings and lists carry their lengths, none of which is
believed before it is known to lie inside the file; nor is a tensor's place.
"""

import math
import re
import struct
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from crosstie.core.errors import BadData
from crosstie.port.checkpoint.headers import Header, TensorInfo
from crosstie.port.checkpoint.index import Checkpoint

# Types of values by number; 8 is a string and 9 a list.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _LIST = 8, 9
# Types of tensors by number (ggml.h at llama.cpp b10586).
TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1", 10: "q2_k", 11: "q3_k",
    12: "q4_k", 13: "q5_k", 14: "q6_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s",
    20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64",
    29: "iq1_m", 30: "bf16", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4", 41: "q1_0", 42: "q2_0",
}  # fmt: skip
# Values and bytes of a block (gguf-py/gguf/constants.py at llama.cpp b21e4de7; q8_1 by ggml-common.h).
_BLOCKS = {
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "f64": (1, 8), "i8": (1, 1), "i16": (1, 2), "i32": (1, 4),
    "i64": (1, 8), "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34),
    "q8_1": (32, 36), "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176),
    "q6_k": (256, 210), "q8_k": (256, 292), "iq2_xxs": (256, 66), "iq2_xs": (256, 74), "iq3_xxs": (256, 98),
    "iq1_s": (256, 50), "iq4_nl": (32, 18), "iq3_s": (256, 110), "iq2_s": (256, 82), "iq4_xs": (256, 136),
    "iq1_m": (256, 56), "tq1_0": (256, 54), "tq2_0": (256, 66), "mxfp4": (32, 17), "nvfp4": (64, 36),
    "q1_0": (128, 18), "q2_0": (64, 18),
}  # fmt: skip
_ALIGNMENT = 32
_MOST_ENTRIES = 10_000_000
# Token lists are long and nothing here asks for them.
_KEPT_LIST = 4096


class Gguf(msgspec.Struct, frozen=True, kw_only=True):
    file: Path
    metadata: dict[str, Any]
    # Tensor -> (type, shape).
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    size: int

    @property
    def main_type(self) -> str:
        """What stores most of the elements of its matrices."""
        weighed: Counter[str] = Counter()
        for kind, shape in self.tensors.values():
            if len(shape) > 1:
                weighed[kind] += math.prod(shape)
        return weighed.most_common(1)[0][0] if weighed else "unknown"


# Names of llama.cpp and those that the model has elsewhere, for families whose tensors were compared one by one.
_CHECKED = ("llama", "qwen2", "qwen3")
_USUAL = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # fmt: skip
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Tables of the rotation, made again at load.
_PASSED = re.compile(r"(?:blk\.\d+\.)?(?:rope_freqs|rope_factors_\w+|attn_rot_embd)\.weight")


def in_usual_names(gguf: Gguf) -> Checkpoint | None:
    """The same tensors as another checkpoint would have them; None where a name or the family is not known so well."""
    architecture = str(gguf.metadata.get("general.architecture", ""))
    # Numbers by layer, and experts, which llama.cpp's llama may have as well.
    uneven = any(isinstance(value, list) for key, value in gguf.metadata.items() if key.startswith(f"{architecture}."))
    if architecture not in _CHECKED or uneven or gguf.metadata.get(f"{architecture}.expert_count"):
        return None
    tensors: dict[str, TensorInfo] = {}
    for name, (_, shape) in gguf.tensors.items():
        block = _BLOCK.fullmatch(name)
        if block is not None and block[2] in _USUAL:
            made = f"model.layers.{block[1]}.{_USUAL[block[2]]}.{block[3]}"
        elif name in _OUTSIDE:
            made = _OUTSIDE[name]
        elif _PASSED.fullmatch(name):
            continue
        else:
            return None
        # The fastest dimension is written first; what it is packed in does not matter to its shape.
        tensors[made] = TensorInfo(gguf.file, "BF16", shape[::-1], 0, 2 * math.prod(shape))
    header = Header(gguf.file, tensors, {}, 0, gguf.size)
    return Checkpoint(gguf.file.parent, {gguf.file.name: header}, None, is_remote=True)


def gguf_name(usual: str) -> str:
    """As the file calls it; also of several modules, "model.layers.0.mlp.gate_proj and mlp.up_proj"."""
    for own, made in (*_OUTSIDE.items(), *_USUAL.items()):
        usual = re.sub(rf"{re.escape(made)}(?!\w)", own, usual)
    return usual.replace("model.layers.", "blk.")


class _Reader:
    def __init__(self, file: Path, opened: BinaryIO, size: int):
        self.file, self.opened, self.size = file, opened, size

    def bytes(self, count: int) -> bytes:
        if count > self.size - self.opened.tell():
            raise BadData(self.file, f"byte {self.opened.tell()}", f"{count:,} bytes follow by its word: cut short")
        return self.opened.read(count)

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.bytes(struct.calcsize(layout)))[0]

    def text(self) -> str:
        return self.bytes(self.number("<Q")).decode("utf-8", errors="replace")

    def count(self, what: str) -> int:
        found = int(self.number("<Q"))
        if found > _MOST_ENTRIES:
            raise BadData(self.file, "header", f"{found:,} {what} are a slip")
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _LIST:
            inner, length = self.number("<I"), self.count("entries of a list")
            if inner == _LIST:
                raise BadData(self.file, "header", "has a list of lists")
            if inner in _SCALARS and length > _KEPT_LIST:
                self.bytes(length * struct.calcsize(_SCALARS[inner]))
                return None
            found = [self.value(inner) for _ in range(length)]
            return found if length <= _KEPT_LIST else None
        if kind not in _SCALARS:
            raise BadData(self.file, "header", f"value type {kind} is not known")
        return self.number(_SCALARS[kind])


def read_gguf(file: Path) -> Gguf:
    try:
        with file.open("rb") as opened:
            return _read(_Reader(file, opened, file.stat().st_size))
    except OSError as error:
        raise BadData(file, "", f"cannot be read: {error.strerror}") from None


def _read(reader: _Reader) -> Gguf:
    file = reader.file
    if reader.bytes(4) != b"GGUF":
        raise BadData(file, "", "not a GGUF file")
    version = reader.number("<I")
    if version not in (2, 3):
        raise BadData(file, "", f"GGUF version {version} is not 2 or 3")
    tensor_count, entry_count = reader.count("tensors"), reader.count("keys")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = reader.text()
        metadata[key] = reader.value(reader.number("<I"))
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    offsets: dict[str, int] = {}
    for _ in range(tensor_count):
        name = reader.text()
        if name in tensors:
            raise BadData(file, name, "this tensor stands in the header twice")
        dimensions = reader.number("<I")
        if dimensions > 8:
            raise BadData(file, name, f"{dimensions} dimensions are a slip")
        shape = tuple(reader.number("<Q") for _ in range(dimensions))
        kind = reader.number("<I")
        tensors[name] = (TYPES.get(kind, f"type {kind}"), shape)
        offsets[name] = reader.number("<Q")
    _check_places(reader, metadata.get("general.alignment", _ALIGNMENT), tensors, offsets)
    return Gguf(file=file, metadata=metadata, tensors=tensors, size=reader.size)


def _check_places(
    reader: _Reader, alignment: object, tensors: dict[str, tuple[str, tuple[int, ...]]], offsets: dict[str, int]
) -> None:
    """Each tensor's bytes lie inside of the file, where the alignment says, and in no other's."""
    if not isinstance(alignment, int) or alignment < 1:
        raise BadData(reader.file, "general.alignment", f"{alignment!r} is no alignment")
    start = -(-reader.opened.tell() // alignment) * alignment
    free, before = 0, ""
    for name in sorted(offsets, key=lambda one: offsets[one]):
        kind, shape = tensors[name]
        values, size = _BLOCKS.get(kind, (1, 0))
        if shape and shape[0] % values:
            raise BadData(reader.file, name, f"{kind} goes by {values} values, and its rows have {shape[0]:,}")
        offset, size = offsets[name], math.prod(shape) // values * size
        if offset % alignment:
            raise BadData(reader.file, name, f"its offset {offset:,} is no multiple of {alignment}")
        if size and offset < free:
            raise BadData(reader.file, name, f"its bytes begin inside of those of {before}")
        if (end := start + offset + size) > reader.size:
            raise BadData(reader.file, name, f"its data end at byte {end:,} of {reader.size:,}: cut short")
        free, before = max(free, offset + size), name

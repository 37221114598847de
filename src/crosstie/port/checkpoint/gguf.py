"""The header of a GGUF file: its metadata and the type of each tensor, without the tensors.

The format (ggml-org/ggml docs/gguf.md): a magic word, a version, two counts, then keys with typed values, then for
each tensor its name, shape, type and offset, then the data. Strings and lists carry their lengths, none of which is
believed before it is known to lie inside the file; nor is a tensor's place.
"""

import math
import re
import struct
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from crosstie.catalog.reading import read_table, read_toml
from crosstie.core.errors import BadData
from crosstie.port.checkpoint.headers import Header, TensorInfo
from crosstie.port.checkpoint.index import Checkpoint

# Types of values by number; 8 is a string and 9 a list.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _LIST = 8, 9
# By name: number (ggml.h at llama.cpp b10586), values and bytes of a block (gguf-py/gguf/constants.py at llama.cpp
# b21e4de7; q8_1 by ggml-common.h), and the precision of the catalog that takes as many bits or a few more: memory is
# rather over- than underestimated. Where none is given, it is called as the type is.
_TYPES_FILE = Path(__file__).parent / "data" / "gguf_types.csv"
_NAMES_FILE = Path(__file__).parent / "data" / "gguf.toml"
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

    @property
    def precision(self) -> str:
        """How memory arithmetic is to take it."""
        named = {one.name: one.precision for one in gguf_types().values()}
        return named.get(self.main_type) or self.main_type


class GgufType(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    # Of a block.
    values: int
    nbytes: int
    precision: str


@cache
def gguf_types() -> dict[int, GgufType]:
    return {
        int(row["number"]): GgufType(
            name=row["type"], values=int(row["values"]), nbytes=int(row["bytes"]), precision=row["precision"]
        )
        for _, row in read_table(_TYPES_FILE, ("type", "number", "values", "bytes", "precision"))
    }


class GgufNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What GGUF calls otherwise than Hugging Face: rows of data/gguf.toml."""

    families: dict[str, str]
    keys: dict[str, str]
    inside: dict[str, str]
    outside: dict[str, str]


@cache
def gguf_names() -> GgufNames:
    return msgspec.convert(read_toml(_NAMES_FILE), GgufNames)


# Families whose tensors were compared one by one.
_CHECKED = ("llama", "qwen2", "qwen3")
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
    names = gguf_names()
    tensors: dict[str, TensorInfo] = {}
    for name, (_, shape) in gguf.tensors.items():
        block = _BLOCK.fullmatch(name)
        if block is not None and block[2] in names.inside:
            made = f"model.layers.{block[1]}.{names.inside[block[2]]}.{block[3]}"
        elif name in names.outside:
            made = names.outside[name]
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
    for own, made in (*gguf_names().outside.items(), *gguf_names().inside.items()):
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
        known = gguf_types().get(kind)
        tensors[name] = (known.name if known else f"type {kind}", shape)
        offsets[name] = reader.number("<Q")
    _check_places(reader, metadata.get("general.alignment", _ALIGNMENT), tensors, offsets)
    return Gguf(file=file, metadata=metadata, tensors=tensors, size=reader.size)


def _check_places(
    reader: _Reader, alignment: object, tensors: dict[str, tuple[str, tuple[int, ...]]], offsets: dict[str, int]
) -> None:
    """Each tensor's bytes lie inside of the file, where the alignment says, and in no other's."""
    if not isinstance(alignment, int) or alignment < 1:
        raise BadData(reader.file, "general.alignment", f"{alignment!r} is no alignment")
    blocks = {one.name: (one.values, one.nbytes) for one in gguf_types().values()}
    start = -(-reader.opened.tell() // alignment) * alignment
    free, before = 0, ""
    for name in sorted(offsets, key=lambda one: offsets[one]):
        kind, shape = tensors[name]
        values, size = blocks.get(kind, (1, 0))
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

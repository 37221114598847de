"""The header of a GGUF file: its metadata and the type of each tensor, without the tensors.

The format (ggml-org/ggml docs/gguf.md): a magic word, a version, two counts, then keys with typed values, then for
each tensor its name, shape, type and offset. Strings and lists carry their lengths, none of which is believed
before it is known to lie inside the file.
"""

import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from crosstie.core.errors import BadData

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
    for _ in range(tensor_count):
        name = reader.text()
        dimensions = reader.number("<I")
        if dimensions > 8:
            raise BadData(file, name, f"{dimensions} dimensions are a slip")
        shape = tuple(reader.number("<Q") for _ in range(dimensions))
        kind = reader.number("<I")
        tensors[name] = (TYPES.get(kind, f"type {kind}"), shape)
        reader.number("<Q")
    return Gguf(file=file, metadata=metadata, tensors=tensors, size=reader.size)

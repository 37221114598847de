"""The header of a safetensors file, read strictly: what is wrong with it is said before a tensor is touched.

The format: eight bytes with the header's length, the header as JSON, then the tensors' bytes without gaps.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from crosstie.core.errors import BadData

DTYPE_BITS = {
    dtype: bits
    for bits, dtypes in (
        (4, "F4"),
        (6, "F6_E2M3 F6_E3M2"),
        (8, "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ"),
        (16, "I16 U16 F16 BF16"),
        (32, "I32 U32 F32"),
        (64, "C64 F64 I64 U64"),
    )
    for dtype in dtypes.split()
}
# The limit of the format's reference implementation; a longer header is damage or an attack on memory.
LONGEST_HEADER = 100_000_000
METADATA = "__metadata__"
_PREFIX = 8
# Headers are padded with spaces, so that the tensors begin on a multiple of this.
_ALIGNMENT = 8
# No tensor has more dimensions, and a product of a million of them would take minutes.
_MOST_DIMENSIONS = 64


class TensorInfo(msgspec.Struct, frozen=True):
    """Where a tensor lies: `offset` counts from the start of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Header(msgspec.Struct, frozen=True):
    file: Path
    # In the order of their bytes.
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    # Where the tensors' bytes begin, and where the file ends.
    data_start: int
    size: int


def read_header(file: Path) -> Header:
    try:
        # To open a pipe would wait for whoever writes into it.
        if file.exists() and not file.is_file():
            raise BadData(file, "", "not a file")
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            prefix = opened.read(_PREFIX)
            if len(prefix) < _PREFIX:
                raise BadData(file, "", f"not a safetensors file: {size:,} bytes, too short to have a header")
            length = int.from_bytes(prefix, "little")
            if prefix == b"version ":
                raise BadData(file, "", "a pointer of Git LFS in place of the file: git lfs pull brings it")
            if length > LONGEST_HEADER:
                raise BadData(file, "header", f"says that it is {length:,} bytes long; the limit is {LONGEST_HEADER:,}")
            if _PREFIX + length > size:
                raise BadData(file, "header", f"{length:,} bytes long in a file of {size:,}: the file is cut short")
            raw = opened.read(length)
    except FileNotFoundError:
        leads = "a symbolic link that leads nowhere" if file.is_symlink() else "no such file"
        raise BadData(file, "", leads) from None
    except OSError as error:
        raise BadData(file, "", f"cannot be read: {error.strerror}") from None
    entries = _entries(file, raw)
    return header_of(file, entries, entries.pop(METADATA, None), _PREFIX + length, size)


def header_of(
    file: Path, entries: Mapping[str, Any], metadata: object, start: int = 0, size: int | None = None
) -> Header:
    """From a header's JSON; without a size, the file is taken to end with its last tensor."""
    tensors = [(name, _tensor(file, name, entry, start)) for name, entry in entries.items()]
    # An empty tensor lies before the one that begins where it lies.
    tensors.sort(key=lambda pair: (pair[1].offset, pair[1].nbytes))
    end = max((info.offset + info.nbytes for _, info in tensors), default=start)
    size = end if size is None else size
    _check_layout(file, tensors, start, size)
    return Header(file, dict(tensors), _metadata(file, metadata), start, size)


def encode_header(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """The length and the header of a file with these (name, dtype, shape, bytes) one after the other."""
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape, nbytes in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_PREFIX, "little") + text


def _entries(file: Path, raw: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise BadData(file, "header", f"'{twice}' stands there twice")
        return made

    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
    except UnicodeDecodeError:
        raise BadData(file, "header", "not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise BadData(file, "header", f"not valid JSON: {error.msg} at character {error.pos:,}") from None
    except (RecursionError, ValueError):
        raise BadData(file, "header", "nested too deeply, or a number too long") from None
    if not isinstance(entries, dict):
        raise BadData(file, "header", "must hold one JSON object")
    if b"\\ud" in raw.lower():
        # JSON can spell half a character, which no text can hold: it could neither be shown nor written again.
        try:
            json.dumps(entries, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadData(file, "header", "a name or a text in it has half a character (a lone surrogate)") from None
    return entries


def _metadata(file: Path, found: object) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise BadData(file, METADATA, "must be an object of strings")
    return found


def _tensor(file: Path, name: str, entry: object, start: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadData(file, name, "must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise BadData(file, name, f"unknown dtype {dtype!r:.40}")
    if not _whole(shape) or len(shape) > _MOST_DIMENSIONS:
        raise BadData(file, name, f"shape must be a list of whole numbers, not {shape!r:.60}")
    if not _whole(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BadData(file, name, f"data_offsets must be a begin and an end after it, not {offsets!r:.60}")
    nbytes, bits = offsets[1] - offsets[0], math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * nbytes:
        # A product of many long sides is no number that can be shown.
        takes = f"{bits / 8:,.10g}" if bits < 2**80 else "far more"
        raise BadData(file, name, f"{dtype} of shape {shape!r:.60} takes {takes} bytes, its offsets {nbytes:,}")
    return TensorInfo(file, dtype, tuple(shape), start + offsets[0], nbytes)


def _whole(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_layout(file: Path, tensors: Sequence[tuple[str, TensorInfo]], start: int, size: int) -> None:
    """One after the other, from the header's end to the file's end."""
    at, before = start, "the header"
    for name, info in tensors:
        if info.offset + info.nbytes > size:
            missing = info.offset + info.nbytes - size
            raise BadData(file, name, f"ends {missing:,} bytes after the file does: the file is cut short")
        if info.offset < at:
            raise BadData(file, name, f"begins {at - info.offset:,} bytes before {before} ends: they overlap")
        if info.offset > at:
            raise BadData(file, name, f"begins {info.offset - at:,} bytes after {before} ends: a hole")
        at, before = info.offset + info.nbytes, f"'{name}'"
    if at != size:
        raise BadData(file, "", f"{size - at:,} bytes follow the last tensor")

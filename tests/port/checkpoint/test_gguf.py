"""GGUF headers: what they say, and what a damaged one says."""

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, strategies as st

from crosstie.core.errors import BadData
from crosstie.port.checkpoint.gguf import read_gguf


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


# Values and bytes of a block, of the types that are written here.
BLOCKS = {0: (1, 4), 8: (32, 34), 12: (256, 144)}


class Told(NamedTuple):
    """A tensor as the header tells of it, but for its offset."""

    name: str
    shape: tuple[int, ...]
    kind: int

    @property
    def size(self) -> int:
        values, size = BLOCKS[self.kind]
        return -(-math.prod(self.shape) // values * size // 32) * 32

    def at(self, offset: int) -> bytes:
        sides = b"".join(struct.pack("<Q", side) for side in self.shape)
        return text(self.name) + struct.pack("<I", len(self.shape)) + sides + struct.pack("<IQ", self.kind, offset)


def file_of(entries: Sequence[bytes], tensors: Sequence[Told], version: int = 3) -> bytes:
    """A whole file, with zeros for data."""
    found = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries)
    offset = 0
    for one in tensors:
        found, offset = found + one.at(offset), offset + one.size
    return found + bytes(-len(found) % 32 + offset)


ENTRIES = [
    entry("general.architecture", 8, text("llama")),
    entry("llama.block_count", 4, struct.pack("<I", 30)),
    entry("llama.scale", 6, struct.pack("<f", 0.5)),
    entry("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b")),
    entry("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 5000) + bytes(20000)),
]
TENSORS = [
    Told("token_embd.weight", (64, 100), 8),
    Told("blk.0.ffn_up.weight", (256, 128), 12),
    Told("n", (64,), 0),
]


def whole(version: int = 3) -> bytes:
    return file_of(ENTRIES, TENSORS, version)


def odd(entries: Sequence[bytes], *tensors: bytes, data: int = 4096) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join((*entries, *tensors)) + bytes(data)


def read(tmp_path: Path, content: bytes) -> object:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    return read_gguf(file)


def test_metadata_and_types(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(whole())
    found = read_gguf(file)
    assert found.metadata["general.architecture"] == "llama"
    assert found.metadata["llama.block_count"] == 30
    assert found.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    assert found.metadata["tokenizer.ggml.scores"] is None, "long lists are passed over"
    assert found.tensors["token_embd.weight"] == ("q8_0", (64, 100))
    assert found.size == len(whole())
    assert found.main_type == "q4_k", "by elements of matrices, not by number of tensors"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"GGML" + bytes(40), "not a GGUF file"),
        (whole(version=1), "version 1"),
        (whole()[:60], "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors are a slip"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62), "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry("k", 99, b""), "value type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry("k", 9, struct.pack("<IQ", 9, 1)), "list of lists"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("t") + struct.pack("<I", 99), "dimensions"),
        (whole()[:-1], "n: its data end at byte"),
        (whole()[:-5_000], "blk.0.ffn_up.weight: its data end at byte"),
        (odd([], Told("t", (64, 4), 12).at(0)), "q4_k goes by 256 values, and its rows have 64"),
        (odd([], Told("t", (8,), 0).at(8)), "its offset 8 is no multiple of 32"),
        (odd([], Told("t", (8,), 0).at(1 << 40)), "cut short"),
        (odd([], Told("t", (64,), 0).at(0), Told("u", (8,), 0).at(32)), "u: its bytes begin inside of those of t"),
        (odd([], Told("t", (8,), 0).at(0), Told("t", (8,), 0).at(32)), "twice"),
        (odd([entry("general.alignment", 4, struct.pack("<I", 0))]), "0 is no alignment"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(BadData, match=said):
        read(tmp_path, content)


@given(cut=st.integers(0, len(whole()) - 1))
def test_cut_anywhere_it_is_a_clear_error(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    with pytest.raises(BadData):
        read(tmp_path_factory.mktemp("cut"), whole()[:cut])


def test_a_gguf_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="No such file"):
        read_gguf(tmp_path / "none.gguf")

"""GGUF headers: what they say, and what a damaged one says."""

import struct
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from crosstie.core.errors import BadData
from crosstie.port.checkpoint.gguf import read_gguf


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int) -> bytes:
    sides = b"".join(struct.pack("<Q", side) for side in shape)
    return text(name) + struct.pack("<I", len(shape)) + sides + struct.pack("<IQ", kind, 0)


ENTRIES = [
    entry("general.architecture", 8, text("llama")),
    entry("llama.block_count", 4, struct.pack("<I", 30)),
    entry("llama.scale", 6, struct.pack("<f", 0.5)),
    entry("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b")),
    entry("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 5000) + bytes(20000)),
]
TENSORS = [
    tensor("token_embd.weight", (64, 100), 8),
    tensor("blk.0.ffn_up.weight", (64, 512), 12),
    tensor("n", (64,), 0),
]


def whole(version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(TENSORS), len(ENTRIES))
    return head + b"".join(ENTRIES) + b"".join(TENSORS)


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

"""GGUF files as models: which engine takes them, in one file or in parts."""

import struct
from pathlib import Path

import pytest
from tests.conftest import Command
from tests.port.checkpoint.test_gguf import entry, tensor, text

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie.port.preflight.stored import read_stored

NUMBERS = {
    "embedding_length": 512, "block_count": 2, "feed_forward_length": 1024, "context_length": 4096,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 128,
}  # fmt: skip
ENTRIES = [
    entry("general.architecture", 8, text("llama")),
    *(entry(f"llama.{key}", 4, struct.pack("<I", value)) for key, value in NUMBERS.items()),
]
EMBEDDING = tensor("token_embd.weight", (512, 100), 8)
MATRIX = tensor("blk.0.ffn_up.weight", (512, 1024), 12)


def write(file: Path, *tensors: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(ENTRIES))
    file.write_bytes(head + b"".join(ENTRIES) + b"".join(tensors))
    return file


@pytest.mark.parametrize(("engine", "status", "said"), [("llama.cpp", 0, "ready"), ("vllm", 1, "will not run")])
def test_engines_and_gguf(crosstie: Command, tmp_path: Path, engine: str, status: int, said: str) -> None:
    file = write(tmp_path / "model-Q4_K_M.gguf", EMBEDDING, MATRIX)
    for asked in (file, tmp_path):
        told = crosstie("preflight", str(asked), "--on", "mi300x", "--engine", engine)
        assert told.status == status
        assert said in told.out.splitlines()[1]


def test_parts_are_one_model(catalog: Catalog, tmp_path: Path) -> None:
    write(tmp_path / "m-00001-of-00002.gguf", EMBEDDING)
    write(tmp_path / "m-00002-of-00002.gguf", MATRIX)
    write(tmp_path / "mmproj-f16.gguf", EMBEDDING)
    assert read_stored(catalog, str(tmp_path)).linear[0].scheme == "q4_k"


def test_one_of_several_models_is_not_picked(catalog: Catalog, tmp_path: Path) -> None:
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf"):
        write(tmp_path / name, EMBEDDING, MATRIX)
    with pytest.raises(BadInput, match="2 models in GGUF"):
        read_stored(catalog, str(tmp_path))

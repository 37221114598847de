"""GGUF files as models: which engine takes them, in one file or in parts."""

import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.conftest import Command
from tests.port.checkpoint.test_gguf import Told, entry, file_of, text

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData, BadInput
from crosstie.core.finding import Finding
from crosstie.port.preflight.stored import read_stored
from crosstie.port.preflight.whole import whole_findings

NUMBERS = {
    "embedding_length": 512, "block_count": 2, "feed_forward_length": 1024, "context_length": 4096,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 128,
}  # fmt: skip
EMBEDDING = Told("token_embd.weight", (512, 100), 8)
MATRIX = Told("blk.0.ffn_up.weight", (512, 1024), 12)
# As llama.cpp writes them: the fastest dimension first.
LAYER = {
    "attn_norm": (512,), "ffn_norm": (512,), "attn_q": (512, 512), "attn_k": (512, 256), "attn_v": (512, 256),
    "attn_output": (512, 512), "ffn_gate": (512, 1024), "ffn_up": (512, 1024), "ffn_down": (1024, 512),
}  # fmt: skip
SHAPES = {
    "token_embd.weight": (512, 100), "output_norm.weight": (512,), "rope_freqs.weight": (64,),
    **{f"blk.{block}.{name}.weight": shape for block in range(2) for name, shape in LAYER.items()},
}  # fmt: skip


def tensors(shapes: Mapping[str, tuple[int, ...]]) -> list[Told]:
    return [Told(name, shape, 12 if len(shape) > 1 else 0) for name, shape in shapes.items()]


def write(file: Path, *tensors: Told, architecture: str = "llama") -> Path:
    entries = [
        entry("general.architecture", 8, text(architecture)),
        *(entry(f"{architecture}.{key}", 4, struct.pack("<I", value)) for key, value in NUMBERS.items()),
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(file_of(entries, tensors))
    return file


@pytest.mark.parametrize(("engine", "status", "said"), [("llama.cpp", 0, "ready"), ("vllm", 1, "will not run")])
def test_engines_and_gguf(crosstie: Command, tmp_path: Path, engine: str, status: int, said: str) -> None:
    file = write(tmp_path / "model-Q4_K_M.gguf", *tensors(SHAPES))
    for asked in (file, tmp_path):
        told = crosstie("preflight", str(asked), "--on", "mi300x", "--engine", engine)
        assert told.status == status
        assert said in told.out.splitlines()[1]


def test_memory_and_speed_of_a_gguf_file(crosstie: Command, tmp_path: Path) -> None:
    """`fit X.gguf` said that it is not UTF-8 text."""
    file = str(write(tmp_path / "model-Q4_K_M.gguf", *tensors(SHAPES)))
    told = crosstie("fit", file, "--on", "rx-7900-xtx", "--context", "2048")
    assert told.status == 0
    assert "q4_k_m: weights" in told.out
    compared = crosstie("compare", file, "--on", "rx-7900-xtx", "--input", "512", "--output", "128")
    assert compared.status == 0
    assert "q4_k_m on rx-7900-xtx TP1" in compared.out
    assert crosstie("fit", str(tmp_path / "none.gguf"), "--on", "rx-7900-xtx").status == 2


def test_parts_are_one_model(catalog: Catalog, tmp_path: Path) -> None:
    write(tmp_path / "m-00001-of-00002.gguf", EMBEDDING)
    write(tmp_path / "m-00002-of-00002.gguf", MATRIX)
    write(tmp_path / "mmproj-f16.gguf", EMBEDDING)
    assert read_stored(catalog, str(tmp_path)).linear[0].scheme == "q4_k"
    assert read_stored(catalog, str(tmp_path / "m-00002-of-00002.gguf")).gguf is not None, "by any of its parts"
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    for asked in (tmp_path, tmp_path / "m-00002-of-00002.gguf"):
        with pytest.raises(BadData, match=r"m-00001-of-00002\.gguf: a part of 2 that is not there"):
            read_stored(catalog, str(asked))


def test_one_of_several_models_is_not_picked(catalog: Catalog, tmp_path: Path) -> None:
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf"):
        write(tmp_path / name, EMBEDDING, MATRIX)
    with pytest.raises(BadInput, match="2 models in GGUF"):
        read_stored(catalog, str(tmp_path))


BIASES = {f"blk.{block}.attn_{one}.bias": LAYER[f"attn_{one}"][1:] for block in range(2) for one in "qkv"}
NORMS = {f"blk.{block}.attn_{one}_norm.weight": (128,) for block in range(2) for one in "qk"}


def found(
    catalog: Catalog, file: Path, shapes: Mapping[str, tuple[int, ...]], architecture: str = "llama"
) -> list[Finding]:
    write(file, *tensors(shapes), architecture=architecture)
    stored = read_stored(catalog, str(file))
    return whole_findings(stored, stored.model(catalog))


def test_a_whole_file_has_no_finding(catalog: Catalog, tmp_path: Path) -> None:
    assert found(catalog, tmp_path / "m.gguf", SHAPES) == []
    assert found(catalog, tmp_path / "m.gguf", {**SHAPES, **BIASES}) == []
    assert found(catalog, tmp_path / "m.gguf", {**SHAPES, **BIASES}, "qwen2") == []
    assert found(catalog, tmp_path / "m.gguf", {**SHAPES, **NORMS}, "qwen3") == []
    assert found(catalog, tmp_path / "m.gguf", SHAPES, "qwen2") != []
    assert found(catalog, tmp_path / "m.gguf", SHAPES, "qwen3") != []
    # A tensor that is not known: nothing is said of any.
    assert found(catalog, tmp_path / "m.gguf", {"blk.0.new.weight": (256, 3), "token_embd.weight": (512, 100)}) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"blk.1.attn_q.weight": None}, "blk.1.attn_q is not as its metadata says: expected [512, 512], found nothing"),
        ({"blk.1.attn_k.weight": (512, 512)}, "blk.1.attn_k.weight is not as its metadata says: expected [256, 512]"),
        ({"blk.0.ffn_gate.weight": None}, "expected [2048, 512], found ffn_up alone"),
        ({"output_norm.weight": None}, "expected 512 elements"),
        ({"blk.1.ffn_norm.weight": None}, "expected 1,024 elements"),
        ({"output.weight": (512, 90)}, "output.weight is not as its metadata says: expected [100, 512]"),
        ({name: None for name in SHAPES if name.startswith("blk.1.")}, "expected 2 layers, found no tensor of 1"),
    ],
)
def test_what_is_missing_or_has_another_shape_is_an_error(
    catalog: Catalog, tmp_path: Path, change: Mapping[str, tuple[int, ...] | None], said: str
) -> None:
    shapes = {name: shape for name, shape in {**SHAPES, **change}.items() if shape is not None}
    findings = found(catalog, tmp_path / "m.gguf", shapes)
    assert any(said in one.what for one in findings), [one.what for one in findings]
    assert {one.severity for one in findings} == {"error"}
    assert all("GGUF" in one.evidence and one.remedy for one in findings)

"""The document: read back as it was written, every fault named, and its rates beside the right peaks."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData, BadInput
from crosstie.prove.probe.device import guess_accelerator
from crosstie.prove.probe.document import Probe, default_name, probe_from, reached, read_probe
from crosstie.prove.probe.kernels import SHAPE_FIELDS, write_json

ATTENTION = {"sequences": 4, "context": 1000, "heads": 64, "kv_heads": 8, "head_dim": 128}
TIMED = {"backend": "any", "seconds": 1e-3, "samples": 9, "spread": 1.05, "graph": True}
ROWS: list[dict[str, Any]] = [
    {"kind": "copy", "format": "fp32", "bytes": 1 << 20, **TIMED},
    {"kind": "copy", "format": "fp32", "bytes": 2_000_000_000, **TIMED},
    {"kind": "gemm", "format": "bf16", "m": 4096, "n": 28672, "k": 8192, **TIMED, "seconds": 2.86e-3},
    {"kind": "gemm", "format": "bf16", "m": 64, "n": 28672, "k": 8192, **TIMED, "seconds": 1.25e-4},
    {"kind": "gemm", "format": "fp8", "m": 4096, "n": 28672, "k": 8192, **TIMED, "seconds": 1.48e-3},
    {"kind": "attention-prefill", "format": "bf16", **ATTENTION, **TIMED},
    {"kind": "attention-decode", "format": "bf16", **ATTENTION, **TIMED, "backend": "cudnn"},
    {"kind": "decode-step", "format": "bf16", "model": "llama-3.1-8b", "batch": 1, "context": 4096, **TIMED, "seconds": 4.65e-3},
    {"kind": "prefill-step", "format": "bf16", "model": "llama-3.1-8b", "batch": 1, "context": 8192, **TIMED, "seconds": 0.24},
    {"kind": "kernel-in-graph", "format": "fp32", "bytes": 4096, **TIMED, "seconds": 2e-6},
    {"kind": "kernel-eager", "format": "fp32", "bytes": 4096, **TIMED, "seconds": 5e-6},
    {"kind": "host-launch", "format": "fp32", "bytes": 4096, **TIMED, "seconds": 4e-6},
]  # fmt: skip


def document(**changes: Any) -> dict[str, Any]:
    provenance = {
        "device": "NVIDIA H200", "accelerator": "h200", "architecture": "sm_90", "memory_bytes": 150_100_000_000, "gpus": 8,
        "power_limit_w": 700.0, "driver": "580.1", "torch": "2.11.0", "cuda": "13.0", "hip": None, "python": "3.12.3",
        "host": "x86_64", "fp8_dialect": "e4m3fn", "date": "2026-11-20", "crosstie": "0.1.0", "parts": ["copy"], "quick": False,
        "partial": None, "wall_s": 12.5, "skipped": {},
        "failures": [{"kind": "gemm", "format": "fp8", "m": 1, "n": 2, "k": 3, "reason": "no kernel"}, {"kind": "fusion", "reason": "no compiler"}],
        **changes,
    }  # fmt: skip
    return {"format": 1, "provenance": provenance, "measurements": [dict(row) for row in ROWS]}


def parsed(raw: dict[str, Any]) -> Probe:
    return probe_from(json.dumps(raw).encode(), "run.json")


def test_a_document_comes_back_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    write_json(file, document())
    probe = read_probe(file)
    assert json.loads(msgspec.json.encode(probe)) == document()
    assert probe.measurements[2].n == 28672
    assert probe.provenance.failures[1].reason == "no compiler"
    # A line a measurement: two runs can be compared by eye.
    assert sum(line.lstrip().startswith('{"kind"') for line in file.read_text().splitlines()) == len(ROWS)


def test_every_kind_is_in_the_sample() -> None:
    assert {row["kind"] for row in ROWS} == set(SHAPE_FIELDS)


@pytest.mark.parametrize(
    ("path", "value", "key", "reason"),
    [
        (("format",), 2, "format", "is 2, and this Crosstie reads 1"),
        (("format",), "1", "format", "Expected `int`"),
        (("provenance", "torch"), 2, "provenance.torch", "Expected `str`"),
        (("provenance", "gpus"), 0, "provenance.gpus", ">= 1"),
        (("provenance", "colour"), "red", "provenance", "unknown field `colour`"),
        (("provenance", "failures"), [{"kind": "gemm"}], "provenance.failures[0]", "missing required field `reason`"),
        (("measurements", 0, "seconds"), 0, "measurements[0].seconds", "> 0"),
        (("measurements", 0, "seconds"), None, "measurements[0].seconds", "Expected `float`"),
        (("measurements", 0, "samples"), 0, "measurements[0].samples", ">= 1"),
        (("measurements", 0, "spread"), 0.9, "measurements[0].spread", ">= 1"),
        (("measurements", 0, "bytes"), -1, "measurements[0].bytes", ">= 1"),
        (("measurements", 0, "kind"), "copies", "measurements[0].kind", "'copies' is unknown; known: copy"),
        (("measurements", 0, "format"), "fp5", "measurements[0].format", "'fp5' is unknown; known: fp32"),
        (("measurements", 3, "k"), None, "measurements[3].k", "is missing from gemm"),
        (("measurements", 3, "batch"), 2, "measurements[3].batch", "is no field of gemm"),
        (("measurements", 3, "tflops"), 2, "measurements[3]", "unknown field `tflops`"),
    ],
)
def test_faults_name_the_file_and_the_key(path: tuple[Any, ...], value: Any, key: str, reason: str) -> None:
    raw = document()
    inner: Any = raw
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    with pytest.raises(BadData) as fault:
        parsed(raw)
    assert (fault.value.file, fault.value.key) == ("run.json", key)
    assert reason in fault.value.reason


def test_what_is_no_document(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_probe(tmp_path / "none.json")
    with pytest.raises(BadInput, match="cannot be read"):
        read_probe(tmp_path)
    for text, reason in (
        ("", "is not JSON"),
        ("[1, 2]", "Expected `object`"),
        ("{}", "missing required field `format`"),
    ):
        with pytest.raises(BadData, match=reason):
            probe_from(text.encode(), "run.json")


def test_fractions_are_of_the_datasheet(catalog: Catalog) -> None:
    lines = {line.what: line for line in reached(parsed(document()), catalog)}
    h200 = catalog.accelerator("h200")
    # The largest copy, though the small one is as quick: 2 x 2 GB in a millisecond of 4.8 TB/s.
    assert lines["copy"].value == pytest.approx(4e12)
    assert lines["copy"].fraction == pytest.approx(4 / 4.8)
    assert lines["GEMM bf16"].value == pytest.approx(2 * 4096 * 28672 * 8192 / 2.86e-3)
    assert lines["GEMM bf16"].fraction == pytest.approx(lines["GEMM bf16"].value / h200.dense["bf16"].si)
    assert lines["GEMM fp8"].peak == h200.dense["fp8"].si
    # Weights and rows at two bytes, and what is written.
    assert lines["GEMM bf16, few rows"].value == pytest.approx(2 * (28672 * 8192 + 64 * 8192 + 64 * 28672) / 1.25e-4)
    assert "GEMM fp8, few rows" not in lines
    # Causal: half of the scores, two products of two operations.
    assert lines["prefill attention"].value == pytest.approx(4 * 64 * 128 * 4 * 1000**2 / 2 / 1e-3)
    # Keys and values at two bytes.
    assert lines["decode attention"].value == pytest.approx(4 * 4 * 1000 * 8 * 128 / 1e-3)
    assert "cudnn" in lines["decode attention"].at
    # Fourteen eighths of the message cross the bus.
    assert lines["kernel in a graph"].fraction is None
    decode = lines["llama-3.1-8b bf16, decode step"]
    # 15 GB of weights that a token reads, and its cache, at 4.8 TB/s.
    assert decode.peak == pytest.approx((2 * 7.5e9 + 4096 * 131072) / 4.8e12, rel=0.02)
    assert decode.fraction == pytest.approx((decode.peak or 0) / 4.65e-3)
    prefill = lines["llama-3.1-8b bf16, prefill step"].fraction
    assert prefill is not None
    assert 0.5 < prefill < 0.8


def test_an_unknown_device_has_no_fractions(catalog: Catalog) -> None:
    lines = reached(parsed(document(device="Matrox", accelerator=None)), catalog)
    assert len(lines) == 11
    assert all(line.fraction is None for line in lines)


@pytest.mark.parametrize(
    ("name", "memory", "id"),
    [
        ("NVIDIA H200", 150.1e9, "h200"),
        ("NVIDIA H200 NVL", 150.1e9, None),
        ("NVIDIA H100 80GB HBM3", 85.0e9, "h100-sxm"),
        ("NVIDIA H100 PCIe", 85.0e9, None),
        ("NVIDIA H100 NVL", 99.9e9, "h100-nvl"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 42e9, None),
        ("NVIDIA A100-SXM4-80GB", 85.1e9, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 42.3e9, None),
        ("NVIDIA B200", 191.5e9, "b200"),
        ("NVIDIA GB200", 198e9, "gb200"),
        ("NVIDIA GH200 480GB", 101e9, None),
        ("NVIDIA L40S", 47.7e9, "l40s"),
        ("NVIDIA L4", 23e9, None),
        ("NVIDIA GeForce RTX 4090", 25.3e9, "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 D", 25.3e9, None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 102e9, "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 102e9, None),
        ("AMD Instinct MI300X", 206.1e9, "mi300x"),
        ("AMD Instinct MI300X VF", 206.1e9, "mi300x"),
        ("AMD Instinct MI308X", 206.1e9, None),
        ("AMD Instinct MI355X", 309.2e9, "mi355x"),
        ("AMD Radeon RX 7900 XTX", 25.7e9, "rx-7900-xtx"),
        ("AMD Radeon Graphics", 206.1e9, None),
    ],
)
def test_the_accelerator_is_guessed_or_left_open(catalog: Catalog, name: str, memory: float, id: str | None) -> None:
    """With a catalog that lacks some siblings: a card is never taken for another of its chip."""
    siblings = ("h200-nvl", "h100-pcie")
    known = {a.id: a.memory_bytes for a in catalog.accelerators.values() if a.id not in siblings}
    assert guess_accelerator(name, memory, known) == id


def test_siblings_are_told_apart() -> None:
    known = {"h200": 150.8e9, "h200-nvl": 150.8e9, "h100-sxm": 85.5e9, "h100-pcie": 85.9e9}
    for name, memory, id in (
        ("NVIDIA H200", 150.1e9, "h200"),
        ("NVIDIA H200 NVL", 150.1e9, "h200-nvl"),
        ("NVIDIA H100 80GB HBM3", 85.0e9, "h100-sxm"),
        ("NVIDIA H100 PCIe", 85.0e9, "h100-pcie"),
    ):
        assert guess_accelerator(name, memory, known) == id


def test_a_run_never_replaces_another(tmp_path: Path) -> None:
    first = default_name("NVIDIA H200", "h200", "2026-11-20", tmp_path)
    assert first.name == "probe-h200-2026-11-20.json"
    first.touch()
    second = default_name("NVIDIA H200", "h200", "2026-11-20", tmp_path)
    assert second.name == "probe-h200-2026-11-20-2.json"
    second.touch()
    assert default_name("NVIDIA H200", "h200", "2026-11-20", tmp_path).name == "probe-h200-2026-11-20-3.json"
    assert (
        default_name("AMD Radeon (TM) 9", None, "2026-11-20", tmp_path).name == "probe-amd-radeon-tm-9-2026-11-20.json"
    )

"""What the stored numbers of a checkpoint show, on small checkpoints with and without the fault."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.port.checkpoint import samples

from crosstie.catalog.library import Catalog
from crosstie.core.finding import Finding
from crosstie.core.progress import no_progress
from crosstie.port.preflight.numbers import stored_findings
from crosstie.port.preflight.stored import read_stored


def found(
    catalog: Catalog, folder: Path, tensors: Mapping[str, Any], quantisation: Mapping[str, Any] | None,
    on: str = "mi300x", scan: str = "all",
) -> list[Finding]:  # fmt: skip
    samples.write_model(folder, tensors, quantisation)
    return stored_findings(read_stored(catalog, str(folder)), [catalog.accelerator(on)], scan, no_progress)


def checks(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(finding.check, finding.severity) for finding in findings}


def test_bytes_on_which_the_dialects_differ_are_counted(catalog: Catalog, tmp_path: Path) -> None:
    tensors = samples.deepseek_block()
    stored = np.concatenate([t.view(np.uint8).ravel() for t in tensors.values() if t.dtype.name.startswith("float8")])
    (finding,) = found(catalog, tmp_path, tensors, samples.BLOCK_FP8)
    assert finding.check == "fp8-bytes"
    assert f"{int((stored == 0x80).sum()):,} bytes 0x80" in finding.evidence
    assert f"{int(((stored & 0x7F) > 0x77).sum()):,} beyond 240" in finding.evidence
    assert finding.target == "mi300x"


def test_a_chip_of_the_same_dialect_needs_no_word(catalog: Catalog, tmp_path: Path) -> None:
    assert found(catalog, tmp_path, samples.deepseek_block(), samples.BLOCK_FP8, on="mi355x") == []


def test_a_sample_says_so(catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosstie.port.preflight.numbers._SAMPLE_BYTES", 1)
    monkeypatch.setattr("crosstie.port.preflight.numbers._LEAST_PIECE", 100)
    (finding,) = found(catalog, tmp_path, samples.deepseek_block(), samples.BLOCK_FP8, scan="sample")
    assert "a sample of" in finding.evidence
    assert found(catalog, tmp_path, samples.deepseek_block(), samples.BLOCK_FP8, scan="none") == []


def test_nan_in_the_stored_dialect_is_an_error(catalog: Catalog, tmp_path: Path) -> None:
    tensors = samples.fp8_per_tensor()
    name = next(name for name, t in tensors.items() if t.dtype.name == "float8_e4m3fn")
    raw = tensors[name].view(np.uint8).copy()
    raw.ravel()[5] = 0x7F
    tensors[name] = raw.view(ml_dtypes.float8_e4m3fn)
    findings = found(catalog, tmp_path, tensors, samples.FP8)
    assert ("fp8-nan", "error") in checks(findings)
    assert [f.where.name for f in findings if f.check == "fp8-nan"] == [name]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_spoils_its_weights(catalog: Catalog, tmp_path: Path, value: float) -> None:
    tensors = samples.deepseek_block()
    name = next(name for name in tensors if name.endswith("weight_scale_inv"))
    tensors[name] = tensors[name].copy()
    tensors[name].ravel()[-1] = value
    findings = found(catalog, tmp_path, tensors, samples.BLOCK_FP8, on="h200")
    assert checks(findings) == {("fp8-scale", "error")}
    assert findings[0].where.name == name


def test_a_missing_scale_is_an_error(catalog: Catalog, tmp_path: Path) -> None:
    tensors = samples.deepseek_block()
    del tensors[next(name for name in tensors if name.endswith("weight_scale_inv"))]
    findings = found(catalog, tmp_path, tensors, samples.BLOCK_FP8)
    assert ("checkpoint", "error") in checks(findings)
    assert all(f.remedy for f in findings if f.severity == "error")


def test_a_config_that_contradicts_the_tensors_is_an_error(catalog: Catalog, tmp_path: Path) -> None:
    findings = found(catalog, tmp_path, samples.deepseek_block(), None)
    assert ("checkpoint", "error") in checks(findings)


def test_a_folder_without_weights_is_a_config_alone(catalog: Catalog, tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 256, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for asked in (tmp_path, tmp_path / "config.json"):
        (finding,) = stored_findings(read_stored(catalog, str(asked)), [], "all", no_progress)
        assert (finding.severity, finding.check) == ("note", "checkpoint")


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 0x7FC0), ("bfloat16", 0xFF81), ("float16", 0x7E00)])
def test_nan_in_plain_weights_is_an_error(catalog: Catalog, tmp_path: Path, dtype: str, bits: int) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    tensors = {name: values.astype(kind) for name, values in samples.dressed({}).items()}
    assert found(catalog, tmp_path / "well", tensors, None) == []
    name = next(iter(tensors))
    tensors[name].view(np.uint16).ravel()[3] = bits
    (finding,) = found(catalog, tmp_path / "ill", tensors, None)
    assert (finding.check, finding.severity, finding.where.name) == ("nan", "error", name)
    assert "1 values that are no numbers in all" in finding.evidence
    assert found(catalog, tmp_path / "ill", tensors, None, scan="none") == []


def test_infinity_is_a_number_and_a_sample_of_plain_weights_says_so(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: values.astype(ml_dtypes.bfloat16) for name, values in samples.dressed({}).items()}
    name = next(iter(tensors))
    tensors[name].view(np.uint16).ravel()[0] = 0x7F80
    assert found(catalog, tmp_path / "infinite", tensors, None) == []
    tensors[name].view(np.uint16).ravel()[0] = 0x7FC0
    monkeypatch.setattr("crosstie.port.preflight.numbers._SAMPLE_BYTES", 1)
    monkeypatch.setattr("crosstie.port.preflight.numbers._LEAST_PIECE", 4)
    (finding,) = found(catalog, tmp_path / "nan", tensors, None, scan="sample")
    assert "a sample of" in finding.evidence

"""The kernels themselves, small and on the CPU; only where PyTorch is installed."""

from typing import Any

import pytest

from crosstie.prove.probe import kernels as probe_kernels
from crosstie.prove.probe.device import HostTimer, ProbedDevice
from crosstie.prove.probe.kernels import KINDS, measure

HEADS = {"heads": 8, "kv_heads": 2, "head_dim": 32}
DENSE = {"layers": 2, "hidden": 256, "inner": 512, **HEADS, "vocabulary": 1000, "experts": 0, "experts_per_token": 0}
MIXTURE = {**DENSE, "inner": 64, "experts": 8, "experts_per_token": 2}


def cases() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [{"kind": "copy", "format": "fp32", "bytes": 1 << 16}]
    made += [{"kind": kind, "format": "fp32", "bytes": 4096} for kind in KINDS if "launch" in kind or "kernel" in kind]
    made += [{"kind": "gemm", "format": format, "m": 32, "n": 64, "k": 64} for format in ("bf16", "fp8")]
    for kind in ("attention-prefill", "attention-decode"):
        made.append({"kind": kind, "format": "bf16", "sequences": 1, "context": 48, **HEADS})
    for model, format in (("dense", "bf16"), ("dense", "fp8"), ("mixture", "bf16")):
        for kind, batch in (("prefill-step", 1), ("decode-step", 1), ("decode-step", 20)):
            made.append({"kind": kind, "format": format, "model": model, "batch": batch, "context": 32})
    return [{"part": "any", **case} for case in made]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ProbedDevice:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(probe_kernels, "COLD_BYTES", 1e5)
    monkeypatch.setattr(probe_kernels, "WARM_S", 0.0)
    return ProbedDevice(torch, "cpu", HostTimer(), torch.float8_e4m3fn, compiles=False)


def run(device: ProbedDevice, cases: list[dict[str, Any]]) -> probe_kernels.ProbeRun:
    plan = {"models": {"dense": DENSE, "mixture": MIXTURE}, "cases": cases}
    return measure(device, plan, lambda *_: None)


@pytest.mark.slow
def test_every_kind_runs(device: ProbedDevice) -> None:
    outcome = run(device, cases())
    assert outcome.failures == []
    assert outcome.partial is None
    assert {row["kind"] for row in outcome.measurements} == set(KINDS)
    assert {row["backend"] for row in outcome.measurements if "context" in row} == {"flash"}
    assert all(row["seconds"] > 0 and row["spread"] >= 1 for row in outcome.measurements)


def test_what_is_refused_says_why(device: ProbedDevice) -> None:
    step = {"part": "moe", "kind": "decode-step", "model": "mixture", "batch": 1, "context": 8}
    odd = {"part": "gemm", "kind": "gemm", "format": "fp8", "m": 32, "n": 64, "k": 64}
    outcome = run(device, [{**step, "format": "fp8"}, {**step, "format": "bf16"}])
    assert [row["reason"] for row in outcome.failures] == ["RuntimeError: 8-bit experts are not timed"]
    assert len(outcome.measurements) == 1
    device.fp8 = None
    assert run(device, [odd]).failures[0]["reason"] == "RuntimeError: PyTorch has no 8-bit type"


def test_a_model_that_does_not_fit(device: ProbedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda: 1e9, raising=False)
    step = {"part": "dense", "kind": "decode-step", "format": "bf16", "model": "dense", "batch": 1, "context": 8}
    assert "weights need 4.0 GB, 1.0 are free" in run(device, [step]).failures[0]["reason"]


@pytest.mark.slow
def test_where_nothing_compiles_the_steps_run_unfused(device: ProbedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Cannot find a working triton installation")

    device.compiles = True
    monkeypatch.setattr(device.torch, "compile", refuse)
    step = {"part": "dense", "kind": "decode-step", "format": "bf16", "model": "dense", "batch": 1, "context": 8}
    outcome = run(device, [step])
    assert len(outcome.measurements) == 1
    assert outcome.failures == [{"kind": "fusion", "reason": "RuntimeError: Cannot find a working triton installation"}]

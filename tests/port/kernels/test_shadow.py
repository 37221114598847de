"""Signatures that a library's own launch makes, on a device that is not there."""

from pathlib import Path

import pytest
from tests.port.kernels.running_kernels import check

from crosstie_port.kernels.running import TargetResult

pytestmark = pytest.mark.triton

KERNEL = """
    import torch

    @triton.jit
    def add(x, y, o, n, N: tl.constexpr):
        i = tl.program_id(0) * N + tl.arange(0, N)
        tl.store(o + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)
"""


def jobs(answer: TargetResult) -> list[dict[str, object]]:
    return [one.job for one in answer.compilations]


def test_a_wrapper_that_wants_a_gpu(tmp_path: Path) -> None:
    source = (
        KERNEL
        + """
    WARPS = 4 if torch.version.hip else 8

    def add_tensors(x, y):
        assert x.is_cuda and x.device.type == "cuda" and torch.cuda.is_available()
        out = torch.empty_like(x, device=x.device)
        units = torch.cuda.get_device_properties(x.device).multi_processor_count
        with torch.cuda.device(x.device):
            add[lambda meta: (triton.cdiv(x.numel(), meta["N"]),)](x, y, out, x.numel(), N=512, num_warps=WARPS)
        torch.cuda.synchronize()
        return out + units

    def crosstie_launch_add():
        x = torch.ones(4096, device="cuda", dtype=torch.float16)
        add_tensors(x, torch.zeros(4096, dtype=torch.float16).cuda())
        add_tensors(x, x.to("cuda:0"))
        print("done")
    """
    )
    found = check(tmp_path, source, ["gfx942", "h100-sxm"])
    assert found.findings == []
    hip, cuda = (jobs(answer) for answer in found.answers)
    # The second launch has the same types: nothing new.
    assert [(job["signature"], job["grid"]) for job in hip] == [
        ({"x": "*fp16", "y": "*fp16", "o": "*fp16", "n": "i32"}, [8])
    ]
    assert [job["options"]["num_warps"] for job in hip + cuda] == [4, 8]  # type: ignore[index]


def test_every_configuration_of_an_autotuner_is_heard(tmp_path: Path) -> None:
    source = """
    import torch
    from triton.runtime import driver

    HIP = driver.active.get_current_target().backend == "hip"

    @triton.autotune([triton.Config({"N": n}) for n in ((256, 512) if HIP else (1024,))], key=["n"])
    @triton.jit
    def scale(x, n, N: tl.constexpr):
        i = tl.program_id(0) * N + tl.arange(0, N)
        tl.store(x + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)

    def crosstie_launch():
        scale[lambda meta: (triton.cdiv(1000, meta["N"]),)](torch.empty(1000), 1000)
    """
    found = check(tmp_path, source, ["gfx942", "sm_90"])
    sizes = [[job["constexprs"]["N"] for job in jobs(answer)] for answer in found.answers]  # type: ignore[index]
    assert sizes == [[256, 512], [1024]]


def test_a_launcher_that_stops_keeps_what_it_had_launched(tmp_path: Path) -> None:
    source = (
        KERNEL
        + """
    @triton.jit
    def after(x, N: tl.constexpr):
        tl.store(x + tl.arange(0, N), 0.0)

    def crosstie_launch():
        x = torch.empty(64)
        add[(1,)](x, x, x, 64, N=256)
        raise RuntimeError("no such extension")
        after[(1,)](x, N=256)
    """
    )
    found = check(tmp_path, source, ["gfx942"])
    assert [job["kernel"] for job in jobs(found.answers[0])] == ["add"]
    stopped = next(f for f in found.findings if f.check == "launch-stopped")
    assert stopped.severity == "unknown"
    assert "no such extension" in stopped.evidence
    assert stopped.where.line == 18
    assert found.of("after", "gfx942")["not-compiled"].severity == "unknown"


def test_a_script_that_launches_when_it_is_imported(tmp_path: Path) -> None:
    """And compares, plots and goes wrong: what it launched until then counts."""
    source = (
        KERNEL
        + """
    torch.manual_seed(0)
    DEVICE = triton.runtime.driver.active.get_active_torch_device()
    x = torch.rand(1024, device=DEVICE)
    assert x.device == DEVICE and x.device == torch.device("cuda", 0)
    out = torch.empty_like(x)
    add[(4,)](x, x, out, 1024, N=256)
    assert torch.allclose(out, x + x)
    triton.testing.do_bench(lambda: add[(4,)](x.half(), x, out, 1024, N=256))
    raise SystemExit("plots follow")
    """
    )
    found = check(tmp_path, source, ["gfx942"])
    assert [job["signature"]["x"] for job in jobs(found.answers[0])] == ["*fp32", "*fp16"]  # type: ignore[index]
    assert [(f.check, f.where.line) for f in found.findings] == [("launch-stopped", 19)]


def test_a_launch_that_triton_refuses(tmp_path: Path) -> None:
    source = (
        KERNEL
        + """
    def crosstie_launch():
        x = torch.empty(64)
        add[(1,)](x, x, x, 64, N=256, maxnreg=64)
    """
    )
    found = check(tmp_path, source, ["gfx942", "sm_90"])
    assert found.of("add", "gfx942")["launch-option"].severity == "error"
    assert found.verdicts["sm_90"] == "ready"


def test_a_wrapper_that_reads_the_compiled_kernel(tmp_path: Path) -> None:
    """As persistent kernels do, to choose how many programs fit."""
    source = (
        KERNEL
        + """
    def crosstie_launch(device):
        x = torch.empty(64)
        kernel = add.warmup(x, x, x, 64, N=256, grid=(1,))
        kernel._init_handles()
        waves = 512 // kernel.n_regs
        room = device.lds_bytes // max(kernel.metadata.shared, 1)
        kernel[(min(waves, room), 1, 1)](x, x, x, 64)
    """
    )
    found = check(tmp_path, source, ["gfx942"])
    assert found.findings == []
    assert len(found.answers[0].compilations) == 1


def test_kernels_that_nobody_launches_are_told(tmp_path: Path) -> None:
    source = (
        KERNEL
        + """
    @triton.jit
    def twice(v):
        return v * 2

    @triton.jit
    def forgotten(x):
        tl.store(x, twice(tl.load(x)))

    def make():
        @triton.jit
        def hidden(x, N: tl.constexpr):
            tl.store(x + tl.arange(0, N), 1.0)

        @triton.jit
        def reached(x, N: tl.constexpr):
            tl.store(x + tl.arange(0, N), 1.0)

        return reached

    def crosstie_launch():
        x = torch.empty(64)
        add[(1,)](x, x, x, 64, N=256)
        make()[(1,)](x, N=256)
    """
    )
    found = check(tmp_path, source, ["gfx942"])
    assert {f.where.name for f in found.findings if f.check == "not-compiled"} == {"forgotten", "hidden"}

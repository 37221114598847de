"""Source that counts on 32 lanes a warp."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from crosstie.catalog.library import Catalog
from crosstie.core.finding import Finding
from crosstie_port.kernels.checks import deep_pipeline
from crosstie_port.kernels.compilation import Compilation
from crosstie_port.kernels.targets import target
from crosstie_port.kernels.wave_hints import wave_hints

KERNEL = """
import triton
import triton.language as tl
import triton.language.extra.cuda as cuda

IS_HIP = True

@triton.jit
def copy(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i))

"""
HEAD = KERNEL.count("\n")


def compiled(file: Path, on: str, constants: dict[str, Any] | None = None) -> Compilation:
    """As `running` makes one of a child's answer."""
    job = {"kernel": "copy", "file": str(file), "line": 9, "constexprs": constants or {}, "options": {}, "grid": []}
    result = {"status": "compiled", "num_warps": 4}
    return Compilation(job=job, result=result, target=target(Catalog([]), on))


def hints(folder: Path, more: str, on: str = "gfx942", constants: dict[str, Any] | None = None) -> list[Finding]:
    file = folder / "source.py"
    file.write_text(KERNEL + textwrap.dedent(more))
    return list(wave_hints([compiled(file, on, constants)]))


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("WARP_SIZE = 32\ndef launch(grid, x, o):\n    copy[grid](x, o, N=4 * WARP_SIZE)", 1),
        ("WARP = tl.constexpr(32)\nwarp_size: tl.constexpr = 32\ndef launch(x):\n    copy[1](x, x, N=warp_size)", 2),
        ("def launch(grid, x, o, num_warps):\n    copy[grid](x, o, N=num_warps * 32)", 2),
        ("def launch(grid, x, o, meta):\n    copy[grid](x, o, N=32 * meta['num_warps'])", 2),
        ("def launch(grid, x, o, threads):\n    copy[grid](x, o, N=512, num_warps=threads // 32)", 2),
        ("def launch(grid, x, o):\n    copy[grid](x, o, N=512, WARP_SIZE=32)", 2),
        ("def launch(grid, x, o, block):\n    copy[grid](x, o, N=512, num_warps=max(1, block // 32))", 2),
        ("def launch(x, block):\n    num_warps = block >> 5\n    copy[1](x, x, N=512, num_warps=num_warps)", 2),
        ("def launch(x, tid):\n    copy[1](x, x, N=512, lane=tid & 31)", 2),
    ],
)
def test_in_whatever_launches_the_kernel(tmp_path: Path, source: str, line: int) -> None:
    found = hints(tmp_path, source)
    assert [(one.where.line, one.check, one.grounds) for one in found] == [(HEAD + line, "wave64-assumption", "read")]
    assert found[0].severity == "slow"
    assert hints(tmp_path, source, "gfx1100") == []
    assert hints(tmp_path, source, "sm_90") == []


@pytest.mark.parametrize(
    "source",
    [
        "WARP_SIZE = 64 if IS_HIP else 32\ndef launch(grid, x, o):\n    copy[grid](x, o, N=4 * WARP_SIZE)",
        "def launch(grid, x, o, num_warps, warp_size):\n    copy[grid](x, o, N=num_warps * warp_size)",
        "def launch(grid, x, o, blocks):\n    copy[grid](x, o, N=blocks * 32)",
        "WARP_SIZE = 32\ndef elsewhere():\n    return WARP_SIZE",
        "def launch(x, threads):\n    if is_hip():\n        pass\n    else:\n        copy[1](x, x, threads // 32)",
        "def launch(x):\n    copy[1](x, x, N=32)",
        "def launch(x, block):\n    copy[1](x, x, N=512, num_warps=min(max(block // 256, 1), 8))",
        "def launch(x, flags):\n    copy[1](x, x, N=flags & 31)",
    ],
)
def test_not_where_the_platform_is_asked_or_nothing_is_counted(tmp_path: Path, source: str) -> None:
    assert hints(tmp_path, source) == []


def test_a_width_among_the_constants(tmp_path: Path) -> None:
    assert [one.severity for one in hints(tmp_path, "", constants={"WARP_SIZE": 32})] == ["slow"]
    assert hints(tmp_path, "", constants={"WARP_SIZE": 64, "BLOCK": 32}) == []


def test_cuda_counts_half_of_the_threads(tmp_path: Path) -> None:
    source = "@triton.jit\ndef helper():\n    return cuda.num_threads()\n\ndef launch(x):\n    copy[1](x, x, N=helper)"
    within = source + "\n\n@triton.jit\ndef copy(o):\n    tl.store(o, helper())"
    assert [(one.severity, one.where.line) for one in hints(tmp_path, within)] == [("error", HEAD + 3)]
    assert hints(tmp_path, within, "sm_90") == []


def test_a_pipeline_that_leaves_room_for_one_workgroup(tmp_path: Path) -> None:
    def told(on: str, stages: int, lds_bytes: int) -> list[str]:
        one = compiled(tmp_path / "source.py", on)
        result = {**one.result, "num_stages": stages, "lds_bytes": lds_bytes}
        return [found.severity for found in deep_pipeline(structs.replace(one, result=result))]

    assert told("gfx942", 3, 49152) == ["note"]
    assert told("gfx942", 2, 49152) == []
    assert told("gfx942", 3, 32768) == []
    # Over the limit: then it is another finding.
    assert told("gfx942", 3, 98304) == []
    assert told("sm_90", 3, 163840) == []

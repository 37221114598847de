"""Clang's second opinion: what it confirms, and what it must not be believed on."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.port.source.test_hipify import checked, write

from crosstie.core.errors import BadInput
from crosstie_port.source.clang import NAMES

pytestmark = pytest.mark.slow

INSTALLED = any(shutil.which(name) for name in NAMES)
needs_clang = pytest.mark.skipif(not INSTALLED, reason="needs clang (apt-get install clang-19)")
WITH: dict[str, Any] = {"use_clang": True, "jobs": 2}
HEADER = "#include <cuda_runtime.h>\n"


def compiled(folder: Path, text: str, on: str = "mi300x") -> list[tuple[str, int | None]]:
    report = checked(write(folder, HEADER + text), on, **WITH)
    return [
        (one.check, one.where.line) for one in report.findings if one.grounds == "compiled" and one.check != "clang"
    ]


@needs_clang
def test_what_it_confirms(tmp_path: Path) -> None:
    kernel = "__global__ void k(float* o, int n) {\n  float v = o[n];\n  %s\n  o[n] = v;\n}\n"
    assert compiled(tmp_path, kernel % "v = __shfl_xor_sync(0xffffffff, v, 1);") == [("mask-32-bit", 4)]
    assert compiled(tmp_path, kernel % "unsigned b = __ballot(n); v += b;") == [("ballot-truncated", 4)]
    assert compiled(tmp_path, kernel % 'asm volatile("mov.u32 %0, %laneid;" : "=r"(n));') == [("inline-ptx", 4)]
    assert compiled(tmp_path, kernel % 'asm volatile("membar.gl;" ::: "memory");') == [("inline-ptx", 4)]
    assert compiled(tmp_path, kernel % "constexpr int w = warpSize; v += w;") == [("warp-size-constant", 4)]
    assert compiled(tmp_path, kernel % "__shared__ float s[20000]; s[n] = v; __syncthreads(); v = s[n + 1];") == [
        ("shared-memory", 4)
    ]
    assert (
        compiled(tmp_path, kernel % "v = __shfl_xor_sync(~0ull, v, 1); unsigned long long b = __ballot(n); v += b;")
        == []
    )


@needs_clang
def test_what_it_cannot_judge(tmp_path: Path) -> None:
    for text, why in (
        ("#include <torch/extension.h>\nvoid f() {}\n", "needs the header torch/extension.h"),
        ("void f() { someApiOfHip(1); }\n", "someApiOfHip"),
    ):
        report = checked(write(tmp_path, HEADER + text), **WITH)
        assert report.opinion is not None
        assert why in report.opinion.not_judged["a.cu"]
        assert {one.severity for one in report.findings} == {"note"}
        assert report.opinion.judged == ()


@needs_clang
def test_a_target_that_it_does_not_know(tmp_path: Path) -> None:
    report = checked(write(tmp_path, HEADER + "__global__ void k() {}\n"), "mi300x,mi355x", **WITH)
    assert report.opinion is not None
    said = next(one for one in report.findings if one.check == "clang")
    for isa in ("gfx942", "gfx950"):
        assert (isa in report.opinion.targets) != (f"does not know {isa}" in said.what)


def test_a_compiler_that_is_none(tmp_path: Path) -> None:
    write(tmp_path, "int x;\n")
    with pytest.raises(BadInput, match="no such program"):
        checked(tmp_path, use_clang=True, clang="/nowhere/clang")
    with pytest.raises(BadInput, match="does not compile HIP"):
        checked(tmp_path, use_clang=True, clang="false")

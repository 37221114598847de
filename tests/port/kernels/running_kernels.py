"""Kernels written into a file and asked about, as the command does, without the cache."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from crosstie.catalog.library import Catalog
from crosstie.core.finding import Finding
from crosstie_port.kernels.report import find, verdicts
from crosstie_port.kernels.running import KernelOptions, TargetResult, compile_kernels
from crosstie_port.kernels.targets import target

HEADER = "import triton\nimport triton.language as tl\n"
# A product of two tiles in a loop; TYPE, BM, BN and BK decide what it needs.
MATMUL = """
@triton.jit
def matmul(a, b, c, K, stride_a, stride_b, stride_c, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows, columns, inner = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    left = a + rows[:, None] * stride_a + inner[None, :]
    right = b + inner[:, None] * stride_b + columns[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, tl.cdiv(K, BK)):
        total += tl.dot(tl.load(left), tl.load(right))
        left += BK
        right += BK * stride_b
    tl.store(c + rows[:, None] * stride_c + columns[None, :], total)
"""
# The same again under another name, so that a kernel and its safe twin are compiled by one child.
MATMULS = MATMUL + MATMUL.replace("def matmul", "def twin")
SIZES = dict.fromkeys(("K", "stride_a", "stride_b", "stride_c"), "i32")


class Checked(NamedTuple):
    findings: list[Finding]
    verdicts: dict[str, str]
    answers: list[TargetResult]

    def of(self, kernel: str, on: str) -> dict[str, Finding]:
        """What was said of one kernel on one target, by check."""
        return {f.check: f for f in self.findings if f.where.name == kernel and f.target == on}


def matmul(operands: str, tile: tuple[int, int, int], name: str = "matmul", **more: Any) -> dict[str, Any]:
    """An entry of a spec."""
    return {
        "name": name,
        "signature": {"a": operands, "b": operands, "c": "*fp32", **SIZES},
        "constexprs": dict(zip(("BM", "BN", "BK"), tile, strict=True)),
        **more,
    }


def check(
    folder: Path, source: str, on: Sequence[str], spec: list[dict[str, Any]] | None = None, **asked: Any
) -> Checked:  # fmt: skip
    file = folder / "kernels_under_test.py"
    written = f"\nCROSSTIE_KERNELS = {spec!r}\n" if spec else ""
    file.write_text(HEADER + textwrap.dedent(source) + written)
    catalog = Catalog([])
    answers = compile_kernels(KernelOptions(what=str(file), **asked), [target(catalog, name) for name in on])
    findings = find(answers)
    return Checked(findings, verdicts(answers, findings), answers)

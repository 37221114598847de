"""What is done with findings: known ones left out, files by work, a patch."""

import subprocess
from pathlib import Path

import pytest

from crosstie.core.errors import BadInput
from crosstie.core.finding import Finding
from crosstie_port.source.baseline import baseline_of, new_findings
from crosstie_port.source.check import preflight_source
from crosstie_port.source.effort import by_file
from crosstie_port.source.fix import patch

KERNEL = """#include "lanes.h"
__global__ void k(float* out, int n) {
  out[0] += __shfl_xor_sync(0xffffffff, out[0], 1);
  out[1] += __shfl_xor_sync(FULL, out[1], 1);
  out[1ull << n] = __popcll(1u << lane);
}
void run() {
  cudaFuncSetAttribute(k, cudaFuncAttributePreferredSharedMemoryCarveout, 50);
  k<<<8, 32>>>(nullptr, 1);
}
"""
DEFINES = "#define FULL 0xffffffff  // all lanes\n#define WARP_SIZE 32\n"


def found(folder: Path) -> list[Finding]:
    return preflight_source(folder, on="mi300x", hipify=False).findings


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "kernel.cu").write_text(DEFINES + KERNEL.replace('#include "lanes.h"\n', ""))
    return tmp_path


def test_a_baseline_knows_findings_wherever_their_lines_move(tree: Path, tmp_path: Path) -> None:
    file = tmp_path / "known.json"
    before = found(tree)
    file.write_bytes(baseline_of(before))
    assert new_findings(before, file) == []
    text = (tree / "kernel.cu").read_text()
    (tree / "kernel.cu").write_text("// a line\n\n" + text)
    assert new_findings(found(tree), file) == []
    # The same once more is new, and so is another.
    line = "  out[0] += __shfl_xor_sync(0xffffffff, out[0], 1);\n"
    (tree / "kernel.cu").write_text(text.replace(line, line + line + "  out[2] += __shfl_sync(0xffff, out[2], 1);\n"))
    assert sorted(one.where.line or 0 for one in new_findings(found(tree), file)) == [5, 6]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "--write-baseline makes one"), ("{", "no baseline"), ("[]", "no baseline"), ('{"format": 9, "findings": {}}', "format 9"),
        ('{"format": 1, "findings": {"a": "b"}}', "no baseline"),
    ],
)  # fmt: skip
def test_what_is_no_baseline_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "known.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BadInput, match=f"known.json.*{said}"):
        new_findings([], file)


def test_files_are_ranked_by_what_their_findings_ask_for(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("__global__ void k(int* o) { o[0] = __shfl_sync(0xffffffff, o[0], 1, 32); }\n")
    (tmp_path / "b.cu").write_text("#include <cutlass/cutlass.h>\n")
    (tmp_path / "c.cu").write_text('__global__ void k(int* o) { asm volatile("bar.sync 1, 64;"); }\n')
    ranked = by_file(found(tmp_path))
    assert [(one.file, one.rewrite, one.local, one.mechanical) for one in ranked] == [
        ("b.cu", 1, 0, 0), ("c.cu", 0, 1, 0), ("a.cu", 0, 0, 1),
    ]  # fmt: skip


def test_the_patch_applies_and_cures_what_it_says(tree: Path) -> None:
    before, text = found(tree), (tree / "kernel.cu").read_text()
    made, cured = patch(before, tree)
    assert (tree / "kernel.cu").read_text() == text
    subprocess.run(["git", "apply", "-"], input=made, text=True, cwd=tree, check=True)
    left = {one.check for one in found(tree)}
    cured_checks = {"mask-32-bit", "kernel-attribute", "lane-bit", "warp-size"}
    assert cured_checks <= {one.check for one in before}
    assert left.isdisjoint(cured_checks)
    assert cured == sum(one.check in cured_checks for one in before)
    patched = (tree / "kernel.cu").read_text()
    assert "#define FULL ROCM_FULL_LANE_MASK  // all lanes" in patched
    assert "reinterpret_cast<const void*>(k)" in patched


def test_what_one_line_does_not_cure_is_left_alone(tmp_path: Path) -> None:
    narrow = "__global__ void k(unsigned* o) {\n  unsigned bit = 1 << lane;\n  o[0] = __ballot(bit);\n}\n"
    (tmp_path / "a.cu").write_text(narrow)
    (tmp_path / "b.cu").write_bytes(KERNEL.replace("\n", "\r\n").encode())
    assert {"lane-bit", "mask-32-bit"} <= {one.check for one in found(tmp_path)}
    assert patch(found(tmp_path), tmp_path) == ("", 0)

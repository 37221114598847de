"""Where the work is: files by the kind of change that their findings ask for. Kinds are a judgement, not measured."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from crosstie.core.finding import Finding

# Another kernel or library has to take its place.
_REWRITE = frozenset({
    "cutlass", "wmma", "tensor-map", "cluster-launch", "tensorrt", "multicast", "nvshmem", "device-binary", "texture",
    "async-copy", "fp4-types",
})  # fmt: skip
# One line becomes another, the same way everywhere.
MECHANICAL = frozenset({
    "mask-32-bit", "mask-32-lanes", "lane-bit", "ballot-truncated", "kernel-attribute",
    "clang-strictness", "warp-size-constant", "nvcc-flag", "cuda-library", "hipify-header", "syncwarp", "half-flags",
    "hip-release",
})  # fmt: skip


class FileEffort(msgspec.Struct, frozen=True, kw_only=True):
    """How many findings, notes aside, of each kind a file has."""

    file: str
    rewrite: int
    local: int
    mechanical: int


def by_file(findings: Sequence[Finding]) -> list[FileEffort]:
    """Most work first: what is to be rewritten, then what needs thought, then what is mechanical."""
    counts: dict[str, Counter[str]] = {}
    for finding in findings:
        if finding.severity != "note":
            kind = "rewrite" if finding.check in _REWRITE else "mechanical" if finding.check in MECHANICAL else "local"
            counts.setdefault(str(finding.where.file), Counter())[kind] += 1
    made = [
        FileEffort(file=file, rewrite=kinds["rewrite"], local=kinds["local"], mechanical=kinds["mechanical"])
        for file, kinds in counts.items()
    ]
    return sorted(made, key=lambda effort: (-effort.rewrite, -effort.local, -effort.mechanical, effort.file))

"""Kernels as rows of a table: for people one a kernel and target, for programs one a compilation."""

from collections.abc import Sequence
from itertools import groupby

import msgspec

from crosstie.core.finding import Finding, verdict
from crosstie.port.kernels.compilation import Compilation
from crosstie.port.kernels.findings import shown
from crosstie.port.kernels.running import Answer


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The most of each figure over the configurations, the least of the waves."""

    kernel: str
    target: str
    configurations: int
    lds_bytes: int | None
    registers: int | None
    spills: int | None
    waves_per_simd: float | None
    matrix: str
    verdict: str


def rows_of(answers: Sequence[Answer], findings: Sequence[Finding]) -> list[Row]:
    rows = [
        _row(list(group), findings)
        for answer in answers
        for _, group in groupby(sorted(answer.compilations, key=_by), key=_by)
    ]
    return sorted(rows, key=lambda row: row.kernel)


def _by(one: Compilation) -> tuple[str, int]:
    return one.key


def _row(same: Sequence[Compilation], findings: Sequence[Finding]) -> Row:
    first = same[0]
    compiled = [one for one in same if one.compiled]
    waves = [one.waves_per_simd for one in compiled if one.waves_per_simd is not None]
    mine = [one for one in findings if one.target == first.target.name and one.where.name == first.kernel]
    return Row(
        kernel=first.kernel,
        target=first.target.name,
        configurations=len(same),
        lds_bytes=max((one.lds_bytes for one in compiled), default=None),
        registers=max((one.registers for one in compiled if one.registers is not None), default=None),
        spills=max((spilled for one in compiled if (spilled := _spills(one)) is not None), default=None),
        waves_per_simd=min(waves, default=None),
        matrix=_matrix(compiled),
        verdict=verdict(mine),
    )


def _spills(one: Compilation) -> int | None:
    return one.result.get("vgpr_spills" if one.target.backend == "hip" else "spill_bytes")


def _matrix(compiled: Sequence[Compilation]) -> str:
    names = sorted({name for one in compiled for name in one.matrix})
    if not names:
        return "-"
    counts = {name: sum(one.matrix.get(name, 0) for one in compiled) for name in names}
    commonest = max(names, key=lambda name: counts[name])
    return short(commonest) + (f" +{len(names) - 1}" if len(names) > 1 else "")


def short(name: str) -> str:
    """wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 as wgmma.m64n128k16.f32.f16.f16."""
    for part in (".mma_async", ".sync", ".aligned", ".row", ".col", ".satfinite", ".cta_group::1"):
        name = name.replace(part, "")
    return name


def row_json(one: Compilation) -> dict[str, object]:
    known = one.result
    return {
        "kernel": one.kernel,
        "file": shown(one.job["file"]),
        "line": one.job["line"],
        "target": one.target.name,
        "isa": one.target.isa,
        "status": known["status"],
        "cached": bool(known.get("cached")),
        "signature": one.job["signature"],
        "constexprs": one.job["constexprs"],
        "options": one.job["options"],
        "chosen_by_tuner": one.job["chosen_by_tuner"],
        "grid": one.job["grid"],
        "threads": one.threads,
        "lds_bytes": known.get("lds_bytes"),
        "lds_limit_bytes": one.target.lds_bytes,
        "registers": one.registers,
        "agprs": known.get("agprs"),
        "vgpr_spills": known.get("vgpr_spills"),
        "spill_bytes": known.get("spill_bytes"),
        "scratch_bytes": known.get("scratch_bytes"),
        "waves_per_simd": one.waves_per_simd,
        "matrix_instructions": known.get("matrix"),
    }

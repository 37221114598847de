"""What all compilations come to: each finding once over all configurations, verdicts, and the rows of a table."""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import msgspec
from msgspec.structs import replace

from crosstie.catalog.library import Catalog, names_in
from crosstie.core.errors import BadInput, BadParameter
from crosstie.core.finding import Finding, Location, rank, verdict
from crosstie.core.progress import OnProgress, no_progress
from crosstie_port.kernels.checks import CHECKS, failures, silent_errors
from crosstie_port.kernels.compilation import Compilation
from crosstie_port.kernels.running import KernelOptions, TargetResult, compile_kernels
from crosstie_port.kernels.targets import target
from crosstie_port.kernels.wave_hints import wave_hints

# Triton's autotuner takes these for "too slow" and goes on (triton/runtime/autotuner.py, Autotuner._bench).
_PASSED_OVER = ("lds-over-limit", "threads-over-limit", "tensor-memory-over-limit")
_PASSED_OVER_ERRORS = ("CompileTimeAssertionFailure", "PTXASError")

# Failures of the compiler that may have to do with its release rather than with the part.
_BY_RELEASE = ("compile-error", "compiler-crash", "launch-option")


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
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


class KernelReport(msgspec.Struct, frozen=True, kw_only=True):
    findings: list[Finding]
    # By target.
    verdicts: dict[str, str]
    # One a kernel and target.
    rows: list[KernelRow]
    # What was compiled, target by target, and with which Triton.
    results: list[TargetResult]

    @property
    def triton(self) -> str:
        return self.results[0].triton

    @property
    def compilations(self) -> list[Compilation]:
        return [compilation for result in self.results for compilation in result.compilations]


def preflight_kernels(
    what: str | Path | None = None, *, on: str | Sequence[str], spec: str | Path | None = None,
    launch: Sequence[str] = (), max_configs: int | None = None, jobs: int | None = None, timeout_s: float = 120.0,
    python: str = sys.executable, cached: bool = True, catalog: Catalog | None = None,
    on_progress: OnProgress = no_progress,
) -> KernelReport:  # fmt: skip
    """Compiles the Triton kernels of a file or module for each target, and says what a launch there would hit.

    `on`: accelerators of the catalog, or instruction sets such as gfx942. `spec`: how kernels are launched, the TOML
    file beside the file where it is None; `launch`: functions that launch kernels, [MODULE:]FUNCTION, called on a fake
    device. `python`: the interpreter whose Triton compiles; `cached`: whether results are kept for the next call. The
    code is imported and run, in processes of its own.
    """
    on_progress(0, 0, f"reading {what}")
    catalog = catalog or Catalog()
    targets = [target(catalog, name) for name in (names_in(on) if isinstance(on, str) else on)]
    if not targets:
        raise BadParameter("on", "names no accelerator")
    if what is None:
        raise BadInput("give a file or a module")
    options = KernelOptions(
        what=_file_or_module(str(what)),
        spec=str(spec) if spec else _spec_beside(str(what)),
        launch=tuple(map(_launcher, launch)),
        jobs=jobs or os.cpu_count() or 1,
        timeout_s=timeout_s,
        max_configs=max_configs,
        cache=_cache() if cached else None,
        python=python,
    )
    results = compile_kernels(options, targets, on_progress)
    _check_found(options.what, results)
    findings = find(results)
    return KernelReport(
        findings=findings, verdicts=verdicts(results, findings), rows=rows_of(results, findings), results=results
    )


def _file_or_module(name: str) -> str:
    if not name.endswith(".py") and os.sep not in name:
        return name
    file = Path(name)
    if file.is_dir():
        raise BadInput(f"{name}: is a folder; name a file, or a module as my_package.ops")
    if not file.is_file():
        raise BadInput(f"{name}: there is no such file")
    if file.suffix != ".py":
        raise BadInput(f"{name}: is no Python file")
    return str(file.resolve())


def _spec_beside(name: str) -> str | None:
    file = Path(name).with_suffix(".toml") if name.endswith(".py") else None
    return str(file) if file and file.is_file() else None


def _launcher(name: str) -> str:
    where, _, function = name.rpartition(":")
    return f"{_file_or_module(where)}:{function}" if where else function


def _cache() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "crosstie" / "kernels"
    except RuntimeError:
        # No home directory: then every run compiles.
        return None


def _check_found(what: str, results: Sequence[TargetResult]) -> None:
    for result in results:
        own = [kernel["name"] for kernel in result.found if not kernel["helper"] and not kernel["imported"]]
        if not result.compilations and not own and not result.failures:
            others = [kernel["name"] for kernel in result.found if kernel["imported"]]
            more = f"; it imports {', '.join(others)}: name their module, or launch them" if others else ""
            raise BadInput(f"{what}: no Triton kernel that can be launched{more}")


# A finding, and the compilation that has it.
_Seen = tuple[Finding, Compilation]


def find(answers: Sequence[TargetResult]) -> list[Finding]:
    found = [
        replace(one, where=replace(one.where, file=shown(one.where.file)))
        for answer in answers
        for one in _of_target(answer)
    ]
    return [_of_release(one, found, answers) for one in found]


def _of_release(one: Finding, found: Sequence[Finding], answers: Sequence[TargetResult]) -> Finding:
    """What fails at the same line on every target, of both vendors, is no matter of a part but of Triton's release."""
    if one.check not in _BY_RELEASE:
        return one
    failing = {other.target for other in found if (other.check, other.where) == (one.check, one.where)}
    asked = {answer.target.name: answer.target.backend for answer in answers}
    triton = answers[0].triton
    if failing == asked.keys() and len(set(asked.values())) > 1:
        return replace(
            one,
            what=f"{one.what}; so on every target: a matter of this code with Triton {triton}, not of the part",
            remedy=f"the Triton that the code was written for (--python with its environment; this one has {triton}), "
            "or the statement as this release wants it",
        )
    if len(set(asked.values())) == 1:
        other = "sm_90" if "hip" in asked.values() else "gfx942"
        return replace(
            one, remedy=f"{one.remedy}; with {other} in --on as well it shows whether Triton {triton} is to blame"
        )
    return one


def _of_target(answer: TargetResult) -> Iterator[Finding]:
    seen = [(finding, compilation) for compilation in answer.compilations for finding in _of(compilation)]
    yield from _merged(_as_tuned(seen, answer.compilations), answer.compilations)
    yield from wave_hints(answer.compilations)
    yield from _not_compiled(answer)
    yield from _stopped(answer)
    if answer.left_out:
        yield Finding(
            check="configurations-left-out", severity="unknown",
            where=Location(file=answer.compilations[0].job["file"]),
            what=f"{answer.left_out} configurations of autotuned kernels were left out",
            evidence="max_configs takes the first of each kernel alone; an autotuner stops where one does not compile",
            grounds="compiled", remedy="a run without max_configs; what was compiled is cached",
            target=answer.target.name,
        )  # fmt: skip


def _of(compilation: Compilation) -> Iterator[Finding]:
    yield from failures(compilation)
    if compilation.compiled:
        for check in CHECKS:
            yield from check(compilation)
        yield from silent_errors(compilation)


def _as_tuned(seen: Sequence[_Seen], compilations: Sequence[Compilation]) -> list[_Seen]:
    """An autotuner passes over what does not fit and takes the quickest: one good configuration is enough."""

    def softened(finding: Finding) -> Finding:
        return replace(finding, severity="note", what=f"{finding.what}; the autotuner has other configurations")

    grave = {id(compilation) for finding, compilation in seen if rank(finding.severity) >= rank("slow")}
    good = {one.job["group"] for one in compilations if one.job["chosen_by_tuner"] and id(one) not in grave}
    return [
        (softened(finding) if one.job["group"] in good and _is_passed_over(finding, one) else finding, one)
        for finding, one in seen
    ]


def _is_passed_over(finding: Finding, one: Compilation) -> bool:
    if finding.severity == "error":
        return finding.check in _PASSED_OVER or one.result.get("error", {}).get("type", "") in _PASSED_OVER_ERRORS
    return finding.severity == "slow"


def _merged(seen: Sequence[_Seen], compilations: Sequence[Compilation]) -> Iterator[Finding]:
    def key(entry: _Seen) -> tuple[str, str, str, int]:
        finding, compilation = entry
        # Of a note, one place is enough.
        line = 0 if finding.severity == "note" else finding.where.line or 0
        return finding.check, compilation.kernel, finding.where.file, line

    for _, entries in groupby(sorted(seen, key=key), key=key):
        same = list(entries)
        worst, of_it = max(same, key=lambda entry: (rank(entry[0].severity), entry[1].lds_bytes, entry[1].threads))
        evidence = worst.evidence
        lines = len({finding.where.line for finding, _ in same}) - 1
        if lines:
            evidence += f"; and at {lines} more line{'s' if lines > 1 else ''}"
        of = sum(compilation.key == of_it.key for compilation in compilations)
        if of > 1:
            evidence += f"; {len({id(compilation) for _, compilation in same})} of {of} configurations"
        yield replace(worst, evidence=evidence)


def _not_compiled(answer: TargetResult) -> Iterator[Finding]:
    compiled = {compilation.key for compilation in answer.compilations}
    for kernel in answer.found:
        if kernel["helper"] or kernel["imported"] or (kernel["file"], kernel["line"]) in compiled:
            continue
        yield Finding(
            check="not-compiled", severity="unknown", what=f"{kernel['name']} was not compiled: no signature",
            where=Location(file=kernel["file"], line=kernel["line"], name=kernel["name"]),
            evidence="the module has this kernel, and neither the spec nor a launch says how it is launched",
            remedy="a [[kernel]] in a spec beside the file, or --launch with a function that launches it",
            grounds="read", target=answer.target.name,
        )  # fmt: skip


def _stopped(answer: TargetResult) -> Iterator[Finding]:
    for failure in answer.failures:
        error, names = failure["type"], ", ".join(failure.get("missing", ()))
        check, why = "launch-stopped", error
        remedy = "a launcher that keeps to CPU tensors and to what the fake device answers; values are not computed"
        if names:
            sure = error in ("ImportError", "ModuleNotFoundError")
            check, why = "missing-import", f"{names} cannot be imported"
            why = why if sure else f"{error}, perhaps because {why}"
            remedy = f"{names} in the environment that compiles (--python), or a launcher that does without"
        yield Finding(
            check=check, severity="unknown", grounds="emulated", target=answer.target.name, remedy=remedy,
            what=f"{failure['launcher']} stopped before it had launched everything: {why}",
            where=Location(file=failure["file"], line=failure["line"] or None, name=failure["launcher"]),
            evidence=f"{error}: {failure['message']}",
        )  # fmt: skip


def shown(file: str) -> str:
    """As code-scanning pages want it: below the current folder where it is there."""
    here = Path.cwd()
    return os.path.relpath(file, here) if file and Path(file).is_relative_to(here) else file


def verdicts(answers: Iterable[TargetResult], findings: Sequence[Finding]) -> dict[str, str]:
    return {
        answer.target.name: verdict(finding for finding in findings if finding.target in ("", answer.target.name))
        for answer in answers
    }


def rows_of(answers: Sequence[TargetResult], findings: Sequence[Finding]) -> list[KernelRow]:
    by_kernel = attrgetter("key")
    rows = [
        _row(list(group), findings)
        for answer in answers
        for _, group in groupby(sorted(answer.compilations, key=by_kernel), key=by_kernel)
    ]
    return sorted(rows, key=lambda row: row.kernel)


def _row(same: Sequence[Compilation], findings: Sequence[Finding]) -> KernelRow:
    first = same[0]
    compiled = [compilation for compilation in same if compilation.compiled]
    mine = [one for one in findings if one.target == first.target.name and one.where.name == first.kernel]
    return KernelRow(
        kernel=first.kernel,
        target=first.target.name,
        configurations=len(same),
        lds_bytes=max((compilation.lds_bytes for compilation in compiled), default=None),
        registers=max((one.registers for one in compiled if one.registers is not None), default=None),
        spills=max((compilation.spills for compilation in compiled if compilation.spills is not None), default=None),
        waves_per_simd=min((one.waves_per_simd for one in compiled if one.waves_per_simd is not None), default=None),
        matrix=_matrix(compiled),
        verdict=verdict(mine),
    )


def _matrix(compiled: Sequence[Compilation]) -> str:
    counts: Counter[str] = Counter()
    for compilation in compiled:
        counts.update(compilation.matrix)
    if not counts:
        return "-"
    commonest = max(sorted(counts), key=lambda name: counts[name])
    return short(commonest) + (f" +{len(counts) - 1}" if len(counts) > 1 else "")


def short(name: str) -> str:
    """wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 as wgmma.m64n128k16.f32.f16.f16."""
    for part in (".mma_async", ".sync", ".aligned", ".row", ".col", ".satfinite", ".cta_group::1"):
        name = name.replace(part, "")
    return name


def compilation_json(compilation: Compilation) -> dict[str, object]:
    job, known = compilation.job, compilation.result
    return {
        "kernel": compilation.kernel,
        "file": shown(job["file"]),
        **{key: job[key] for key in ("line", "signature", "constexprs", "options", "chosen_by_tuner", "grid")},
        "target": compilation.target.name,
        "isa": compilation.target.isa,
        "status": known["status"],
        "cached": bool(known.get("cached")),
        "threads": compilation.threads,
        "lds_limit_bytes": compilation.target.lds_bytes,
        "registers": compilation.registers,
        **{key: known.get(key) for key in ("lds_bytes", "agprs", "vgpr_spills", "spill_bytes", "scratch_bytes")},
        "waves_per_simd": compilation.waves_per_simd,
        "matrix_instructions": known.get("matrix"),
    }

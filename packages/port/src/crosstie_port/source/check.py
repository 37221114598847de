"""A tree of CUDA and Python sources in, what a port to each accelerator trips over out."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from crosstie.catalog.library import Catalog
from crosstie.core.finding import Finding, Location, Severity, worst
from crosstie.core.progress import OnProgress, no_progress
from crosstie_port.source.builds import build_hazards, by_torch, left_out_by_lists, may_hipify
from crosstie_port.source.clang import Opinion, find_compiler, second_opinion
from crosstie_port.source.code import shorten, streams
from crosstie_port.source.cpp import hazards_in
from crosstie_port.source.files import Files, hip_builds, includes_twin, is_nvidia, read_files
from crosstie_port.source.hazard import SourceHazard, SourceTarget, findings_of, target_of
from crosstie_port.source.hipify import CudaNames, Hipified, collect, hipified, hipify_module, leftover_hazards
from crosstie_port.source.project import Project
from crosstie_port.source.python import python_hazards

VERDICTS = {
    "note": "no hazard found",
    "setting": "ports with settings",
    "slow": "ports, slower",
    "unknown": "not known",
    "error": "needs changes",
}
NOTHING_TO_PORT = "nothing to port"
# What an error becomes behind a switch of NVIDIA's; one that leaves such a thing out need only be set.
SEVERITY_BEHIND: dict[str, Severity] = {"library": "note", "refusal": "setting", "switch": "unknown"}
# Checks of which two or more, and more than 35%, of all judged errors were false at first sight
# (benchmarks/source_precision.py prints each check's record): on trees that run on AMD they ask for a look, no more.
OFTEN_FALSE = frozenset({
    "architecture-macro", "cluster-launch", "compute-capability", "cuda-build", "cuda-library", "cudnn",
    "device-binary", "fp8-range", "fp8-types", "hip-release", "hipify-header", "hipify-leftover", "libcudacxx",
    "nvcc-flag", "nvidia-tool", "nvml", "nvshmem", "overload", "texture", "warp-reduction", "warp-size-host",
})  # fmt: skip
_OTHER_BACK_ENDS = frozenset({"cpu", "xpu", "npu", "sycl", "musa", "metal", "vulkan", "opencl"})
_HALF = re.compile(
    r"^[^\n/*]*\b(?:__half2?|half2?)\s*[*&]?\s*\w+\s*[=;,)\[(]|\b(?:at|c10)::Half\b|\bkHalf\b|AND_HALF", re.MULTILINE
)
_FOR_ROCM = re.compile(r"\b(?:USE_ROCM|__HIP_PLATFORM_AMD__|\w+_(?:USE|WITH)_(?:HIP|ROCM))\b")
_HIP_HEADER = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<hip/hip_runtime", re.MULTILINE)
_CUDA_HEADERS = ("cuda_runtime.h", "cuda_runtime_api.h", "cuda.h", "cuda_fp16.h", "cuda_bf16.h")
_HALF_FLAGS = re.compile(r"(?:HIP|CUDA)_NO_HALF")
_HALF_SAYS = "kernels use half: PyTorch compiles them with __HIP_NO_HALF_OPERATORS__ and __HIP_NO_HALF_CONVERSIONS__"
_HALF_REMEDY = "where half does not compile, add -U__HIP_NO_HALF_OPERATORS__ and -U__HIP_NO_HALF_CONVERSIONS__ on ROCm"


class HipifyCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What HIPIFY did: names by file, names in all."""

    files: dict[str, dict[str, int]]
    names: dict[str, int]


class SourceReport(msgspec.Struct, frozen=True, kw_only=True):
    findings: list[Finding]
    verdicts: dict[str, str]
    cpp_files: int
    python_files: int
    build_files: int
    converted: HipifyCounts | None
    opinion: Opinion | None


def preflight_source(
    path: str | Path, *, on: str | Sequence[str], hipify: bool = True, clang: str | None = None, use_clang: bool = True,
    jobs: int | None = None, catalog: Catalog | None = None, on_progress: OnProgress = no_progress,
) -> SourceReport:  # fmt: skip
    """What CUDA C++ and Python sources in a folder or file trip over on these accelerators.

    `hipify`: whether to see what PyTorch's HIPIFY converts and leaves; `clang`: which one gives the second opinion,
    the first on the path where it is None; `jobs`: files that it compiles at once, one a core where it is None.
    """
    root, targets = Path(path), [target_of(one) for one in (catalog or Catalog()).accelerators_named(on)]
    files = read_files(root)
    hazards: list[SourceHazard] = []
    converted, opinion = None, None
    if any(target.is_amd for target in targets):
        hazards += files.hazards
        compiler = find_compiler(clang, targets) if use_clang and hipify else None
        on_progress(0, len(files.cpp), "reading preprocessor lines")
        names, left_out = CudaNames(), _left_out(files)
        project = Project(files.cpp, by_hipify=may_hipify(files), left_out=left_out)
        hazards += _read(files, project, names, on_progress)
        hazards += _unconverted(files, project, names)
        if hipify and files.cpp:
            on_progress(0, len(files.cpp), "loading HIPIFY")
            if (module := hipify_module()) is None:
                hazards.append(_without_hipify(names))
            else:
                with hipified(module, files.cpp, on_progress) as result:
                    hazards += leftover_hazards(project, names, result)
                    converted = _counts(result)
                    if compiler is not None:
                        jobs = jobs or os.cpu_count() or 1
                        opinion = second_opinion(compiler, result, files.cpp, jobs, on_progress)
        hazards = _beside_amd(hazards, project, files, left_out)
        if opinion is not None:
            hazards = [*_merged(hazards, opinion), _second(root, opinion, targets)]
    findings = findings_of(hazards, targets) + [_nothing(root, one) for one in targets if not one.is_amd]
    return SourceReport(
        findings=findings,
        verdicts={target.id: _verdict(target, findings) for target in targets},
        cpp_files=len(files.cpp),
        python_files=len(files.python),
        build_files=len(files.build),
        converted=converted,
        opinion=opinion,
    )


def _left_out(files: Files) -> dict[str, str]:
    """Files that a build for ROCm does not compile, each with the reason: its lists of sources, or the file's name."""
    folders, stems = files.folders, files.stems
    by_name = "the file is NVIDIA's by its name, and the tree has a side for AMD"
    by_list = {path: f"{place} leaves this file out on ROCm" for path, place in left_out_by_lists(files).items()}
    has_side = hip_builds(files.build) or files.asks_for_hip or any(map(_FOR_ROCM.search, files.cpp.values()))
    texts = files.cpp | files.build if has_side else {}
    named = (path for path in texts if is_nvidia(path, folders, stems) and not includes_twin(path, texts[path]))
    return dict.fromkeys(named, by_name) | by_list


def _read(files: Files, project: Project, names: CudaNames, on_progress: OnProgress) -> Iterator[SourceHazard]:
    """What the texts alone show; the names of CUDA that they use go into `names`."""
    for number, path in enumerate(files.cpp, 1):
        on_progress(number, len(files.cpp), f"reading {path}")
        codes = streams(path, project)
        if _OTHER_BACK_ENDS.isdisjoint(re.split("[/_.-]", path.rpartition("/")[0].lower())):
            # Their assembly and number formats are their own.
            yield from hazards_in(path, codes)
        collect(path, codes, names)
    uses_half = _uses_half(files)
    for number, (path, text) in enumerate(files.python.items(), 1):
        on_progress(number, len(files.python), f"reading {path}")
        hazards = python_hazards(path, text, files.packages)
        yield from hazards
        if uses_half and (extension := next((hazard for hazard in hazards if hazard.check == "extension"), None)):
            yield replace(extension, check="half-flags", severity="setting", what=_HALF_SAYS, remedy=_HALF_REMEDY)
    for_hip = hip_builds(files.build)
    for path, text in files.build.items():
        yield from build_hazards(path, text, for_hip)


def _unconverted(files: Files, project: Project, names: CudaNames) -> Iterator[SourceHazard]:
    """Of a tree that includes HIP's headers itself and asks for no HIPIFY: files that still speak of CUDA."""
    if by_torch(files) or not any(map(_HIP_HEADER.search, files.cpp.values())):
        return
    says = "nothing here converts this file, and the tree includes HIP's headers itself elsewhere"
    remedy = "include HIP's header under #ifdef USE_ROCM, and name HIP's functions there, or macros for both"
    for path, unit in project.units.items():
        headers = {one.line: one.header for one in unit.directives if one.header in _CUDA_HEADERS}
        used = {line: name for name, lines in names.used.get(path, {}).items() for line in lines}
        calls = {
            line: name
            for line, name in used.items()
            if re.match("(?:cuda|cu(?:fft|blas|rand|sparse|solver))[A-Z]", name) and name not in names.declared
        }
        spoken = {line: name for line, name in {**calls, **headers}.items() if not unit.is_dead(line)}
        for line in sorted(spoken)[:1]:
            evidence = shorten(unit.text.split("\n")[line - 1])
            yield SourceHazard("cuda-header", "unknown", says, path, evidence, remedy, line, name=spoken[line])


def _uses_half(files: Files) -> bool:
    """Whether kernels compute with half, and nothing says how a build for ROCm is to take its operators."""
    texts = (*files.python.values(), *files.build.values(), *files.cpp.values())
    return any(map(_HALF.search, files.cpp.values())) and not any(map(_HALF_FLAGS.search, texts))


def _beside_amd(
    hazards: list[SourceHazard], project: Project, files: Files, left_out: Mapping[str, str]
) -> list[SourceHazard]:
    """Where the tree has a side for AMD: notes for files and switches that are NVIDIA's by name or by the lists of its
    builds, which leave them out; and what Python does is not known where a caller in another file may ask first."""
    asks_for_hip = files.asks_for_hip
    if not (project.is_ported or hip_builds(files.build) or asks_for_hip):
        return hazards
    by_switch = "; a switch that asks for NVIDIA is in front of it, and the tree has a side for AMD"
    by_caller = "; Python of this tree asks for ROCm, so a caller may leave this out"
    by_record = "; on trees that run on AMD this check was false too often to be an error"
    by_fnuz = "; other files of the tree know e4m3fnuz, so the numbers may be right by the time they are here"
    knows_fnuz = any("fnuz" in text.lower() for text in (*files.cpp.values(), *files.python.values()))

    def judged(hazard: SourceHazard) -> tuple[Severity, str]:
        if hazard.severity != "note" and hazard.file in left_out:
            return "note", f"; {left_out[hazard.file]}"
        if hazard.severity != "error":
            return hazard.severity, ""
        if knows_fnuz and hazard.check == "fp8-dialect":
            return "unknown", by_fnuz
        if asked := project.asks_for_nvidia(hazard.file, hazard.line):
            # Whether a build for ROCm sets the project's own switch as well stands in no source.
            return SEVERITY_BEHIND[asked], by_switch
        if asks_for_hip and hazard.file in files.python:
            return "unknown", by_caller
        if hazard.check in OFTEN_FALSE:
            return "unknown", by_record
        return "error", ""

    return [replace(one, severity=severity, what=one.what + why) for one in hazards for severity, why in [judged(one)]]


def _counts(result: Hipified) -> HipifyCounts:
    total: Counter[str] = Counter()
    for names in result.converted.values():
        total.update(names)
    files = {path: names for path, names in result.converted.items() if names}
    return HipifyCounts(files=files, names=dict(total.most_common()))


def _merged(hazards: list[SourceHazard], opinion: Opinion) -> list[SourceHazard]:
    """Where clang says the same of the same line, one finding that rests on both."""
    left = list(opinion.hazards)
    merged: list[SourceHazard] = []
    for hazard in hazards:
        same = next((source_hazard for source_hazard in left if _agree(hazard, source_hazard)), None)
        if same is not None:
            left.remove(same)
            hazard = replace(hazard, evidence=same.evidence, grounds="compiled")
        merged.append(hazard)
    return merged + left


def _agree(read: SourceHazard, compiled: SourceHazard) -> bool:
    if (read.check, read.file) != (compiled.check, compiled.file):
        return False
    # The compiler names the kernel's line for its arrays.
    return read.line == compiled.line or (read.check == "shared-memory" and f"'{read.name}(" in compiled.evidence)


def _second(root: Path, opinion: Opinion, targets: Sequence[SourceTarget]) -> SourceHazard:
    isas = dict.fromkeys(target.isa for target in targets if target.is_amd)
    lacking = [isa for isa in isas if isa not in opinion.targets]
    instead = f"; it does not know {', '.join(lacking)}" if lacking else ""
    why = next(iter(opinion.not_judged.items()), None)
    example = f", such as {why[0]}: {why[1]}" if why else ""
    total = len(opinion.judged) + len(opinion.not_judged)
    what = f"clang compiled {len(opinion.judged)} of {total} files for {', '.join(opinion.targets)}{instead}"
    evidence = f"{opinion.version}; {len(opinion.not_judged)} could not be judged{example}"
    return SourceHazard("clang", "note", what, root.as_posix(), evidence, "", grounds="compiled")


def _without_hipify(names: CudaNames) -> SourceHazard:
    """Nothing is lost where the sources name nothing of CUDA; else what HIPIFY leaves is not known."""
    used = sorted({name for found in names.used.values() for name in found} - names.declared)
    path = next((path for path, found in names.used.items() if found), "")
    what, remedy = "what HIPIFY converts was not looked at: torch is not installed", "pip install torch"
    evidence = f"{len(used):,} names of CUDA are used: {', '.join(used[:5])}" if used else "no name of CUDA is used"
    return SourceHazard("hipify-missing", "unknown" if used else "note", what, path or ".", evidence, remedy)


def _nothing(root: Path, target: SourceTarget) -> Finding:
    return Finding(
        check="nothing-to-port",
        severity="note",
        what="CUDA sources are for NVIDIA GPUs: nothing to port",
        where=Location(file=root.as_posix()),
        evidence=f"{target.id} is {target.isa}",
        grounds="read",
        remedy="",
        target=target.id,
    )


def _verdict(target: SourceTarget, findings: Sequence[Finding]) -> str:
    if not target.is_amd:
        return NOTHING_TO_PORT
    mine = [finding for finding in findings if not finding.target or target.id in finding.target.split(",")]
    return VERDICTS[worst(mine)]

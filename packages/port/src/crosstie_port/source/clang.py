"""Clang's HIP front end as a second opinion on HIPIFY's output, with headers that stand in for ROCm's.

It is believed only where the stand-ins cannot be the cause: inline assembly, masks, ballots, local memory, warpSize
as a constant. A file that needs a header or a name that is not here is not judged, which is no verdict at all.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from crosstie.core.errors import BadParameter
from crosstie.core.progress import OnProgress
from crosstie_port.source.code import shorten
from crosstie_port.source.hazard import SourceHazard, SourceTarget
from crosstie_port.source.hipify import Hipified

STUBS = Path(__file__).parent / "data" / "hip_stubs"
NAMES = ("clang-19", "clang-20", "clang-21", "clang-18", "clang", "/opt/rocm/llvm/bin/clang")
TIMEOUT_S = 60.0
_UNITS = (".cu", ".hip")
_LINE = re.compile(
    r"^(?P<file>[^\s:][^:\n]*):(?P<line>\d+):\d+: (?P<kind>error|warning|note|fatal error): (?P<text>.*)$"
)
_MISSING = re.compile(r"'([^']+)' file not found")
_LDS = re.compile(r"local memory \((\d+)\) exceeds limit")
_BALLOT = re.compile(r"__ballot|__activemask|__match_")
# What is believed: (words of the diagnostic, check, what it means, remedy, targets).
_BELIEVED: tuple[tuple[re.Pattern[str], str, str, str, str], ...] = (
    (re.compile(r"crosstie: the mask must have 64 bits"), "mask-32-bit",
     "a 32-bit mask does not compile: HIP takes 64-bit masks only", "give 0xffffffffffffffffULL, or drop the mask",
     "rocm"),
    (re.compile(r"in inline assembly string|inline asm|asm constraint|constraint '.*' in asm"
                r"|couldn't allocate .*register|invalid instruction"), "inline-ptx",
     "this inline assembly does not compile for AMD", "write it in C++ or guard it with #ifndef USE_ROCM", "rocm"),
    (_LDS, "shared-memory", "static shared memory is over the limit of this target",
     "shrink the tiles or the number of stages until it fits", "rocm"),
    (re.compile(r"must be initialized by a constant expression|not an integral constant expression"
                r"|argument is not a constant expression"), "warp-size-constant",
     "warpSize is no constant expression in HIP since ROCm 7.0", "use a constant per target", "rocm"),
    (re.compile(r"implicit conversion loses integer precision"), "ballot-truncated",
     "the 64 bits of a ballot are kept in 32", "keep it in unsigned long long", "wave64"),
)  # fmt: skip


class Clang(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    version: str
    # Those of the targets' instruction sets that it can compile for.
    targets: tuple[str, ...]


class Opinion(msgspec.Struct, frozen=True):
    """What clang made of the files: those it judged, and why it did not judge the others."""

    version: str
    targets: tuple[str, ...]
    judged: tuple[str, ...]
    not_judged: dict[str, str]
    hazards: tuple[SourceHazard, ...]


def find_compiler(asked: str | None, targets: Sequence[SourceTarget]) -> Clang | None:
    """The clang that was asked for, or the first that there is; one that was asked for must work."""
    path = shutil.which(asked) if asked else next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        if asked:
            raise BadParameter("clang", f"{asked}: no such program")
        return None
    isas = dict.fromkeys(target.isa for target in targets if target.is_amd)
    with tempfile.TemporaryDirectory(prefix="crosstie-clang-") as folder:
        probe = Path(folder, "probe.hip")
        probe.write_text('#include "hip/hip_runtime.h"\n__global__ void probe(int* out) { *out = 1; }\n')
        usable = tuple(isa for isa in isas if _run(path, probe, isa, ()) == "")
        if asked and not usable and _run(path, probe, "gfx942", ()):
            raise BadParameter("clang", f"{asked}: it does not compile HIP for {', '.join(isas)} or gfx942")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return Clang(path=path, version=(version.splitlines() or ["clang"])[0], targets=usable or ("gfx942",))


def second_opinion(
    compiler: Clang, result: Hipified, texts: Mapping[str, str], jobs: int, on_progress: OnProgress
) -> Opinion:
    units = [path for path in result.paths if path.endswith(_UNITS)]
    not_judged: dict[str, str] = {}
    origin = {out.resolve(): path for path, out in result.paths.items()}
    folders = [result.folder, *sorted({out.parent for out in result.paths.values() if out.parent.name == "include"})]
    work = [(path, isa) for path in units for isa in compiler.targets]
    done = 0

    def compiled(task: tuple[str, str]) -> str:
        nonlocal done
        path, isa = task
        said = _run(compiler.path, result.paths[path], isa, folders)
        done += 1
        on_progress(done, len(work), f"clang {path}")
        return said

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        answers = list(pool.map(compiled, work))
    hazards: list[SourceHazard] = []
    for (path, isa), said in zip(work, answers, strict=True):
        source_hazards, why = _read(said, isa, origin, texts, result, compiler.version)
        hazards += source_hazards
        if why:
            not_judged[path] = why
    judged = tuple(path for path in units if path not in not_judged)
    return Opinion(compiler.version, compiler.targets, judged, not_judged, tuple(hazards))


def _run(clang: str, source: Path, isa: str, folders: Sequence[Path]) -> str:
    """What the compiler says, "" for nothing. It makes an object, since only then is assembly read, unlinked."""
    command = [
        clang, "-x", "hip", f"--offload-arch={isa}", "--cuda-device-only", "-nogpulib", "-nogpuinc",
        "-include", "__clang_hip_runtime_wrapper.h", "-isystem", str(STUBS), *(f"-I{folder}" for folder in folders),
        "-std=c++20", "-DUSE_ROCM", "-D__HIP_PLATFORM_AMD__=1", "-S", "-Xclang", "-emit-obj", "-o", "/dev/null",
        "-Wno-everything", "-Wshorten-64-to-32", "-ferror-limit=0", "-fno-color-diagnostics",
        "-fno-caret-diagnostics", str(source),
    ]  # fmt: skip
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{source}:1:1: fatal error: took more than {TIMEOUT_S:.0f} s"
    except OSError as error:
        return f"{source}:1:1: fatal error: {error.strerror}"
    if ended.returncode and not ended.stderr.strip():
        return f"{source}:1:1: fatal error: ended with {ended.returncode}"
    return ended.stderr if ended.returncode or "warning:" in ended.stderr else ""


def _read(
    said: str, isa: str, origin: Mapping[Path, str], texts: Mapping[str, str], result: Hipified, version: str
) -> tuple[list[SourceHazard], str]:
    """Diagnostics in the user's own files as hazards, and why the file was not judged ("" where it was)."""
    hazards: list[SourceHazard] = []
    why = ""
    messages = [match for line in said.splitlines() if (match := _LINE.match(line))]
    if said and not messages:
        return [], shorten(said.splitlines()[0])
    for index, match in enumerate(messages):
        if match["kind"] == "note":
            continue
        place = _place(match, messages[index + 1 :], origin, texts, result)
        believed = next((one for one in _BELIEVED if one[0].search(match["text"])), None)
        line = texts[place[0]].split("\n")[place[1] - 1] if place else ""
        said_of = believed[1] if believed else ""
        if said_of == "warp-size-constant" and "warpSize" not in line:
            believed = None
        if said_of == "ballot-truncated" and not _BALLOT.search(line):
            continue
        if believed is not None and place is not None:
            pattern, check, what, remedy, on = believed
            evidence = f"{shorten(line)} -- {version}: {shorten(match['text'])}"
            on = isa if pattern is _LDS else on
            hazards.append(
                SourceHazard(check, "error", what, place[0], evidence, remedy, place[1], on, grounds="compiled")
            )
        elif match["kind"] != "warning" and not why:
            missing = _MISSING.search(match["text"])
            why = f"needs the header {missing[1]}" if missing else shorten(match["text"])
    return hazards, why


def _place(
    found: re.Match[str], following: Sequence[re.Match[str]], origin: Mapping[Path, str], texts: Mapping[str, str],
    result: Hipified,
) -> tuple[str, int] | None:  # fmt: skip
    """The user's file and line: of the diagnostic itself, or of the first note that leads back to one."""
    for match in (found, *following):
        if match is not found and match["kind"] != "note":
            return None
        path = origin.get(Path(match["file"]).resolve())
        if path is not None:
            # HIPIFY adds lines at the top and changes others in place.
            added = result.outputs[path].count("\n") - texts[path].count("\n")
            line = int(match["line"]) - max(added, 0)
            return path, min(max(line, 1), texts[path].count("\n") + 1)
    return None

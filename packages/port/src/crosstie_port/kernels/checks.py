"""What a launch of a kernel would hit: compilations that failed, limits of the device, and code that is slow there."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from crosstie.core.finding import Finding, Location, Severity
from crosstie_port.kernels.compilation import Compilation
from crosstie_port.kernels.targets import MAX_THREADS, fp8_name

# Sides of the smallest matrix instructions of CDNA and RDNA that Triton uses.
_SMALLEST_SIDE = 16
# HIP counts a grid in threads, in 32 bits; CUDA counts blocks.
_HIP_GRID_THREADS = 2**32
_CUDA_GRID = (2**31 - 1, 65535, 65535)
_AMD_MNEMONIC = re.compile(r"(?:v|s|ds|buffer|tbuffer|global|flat|scratch|image|lds)_\w+")
_FP8_INSTRUCTION = re.compile(r"fp8|bf8|f8f6f4|e4m3|e5m2")
_SCALED_INSTRUCTION = re.compile(r"mfma_scale|kind::mx|block_scale")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# Of a message of Triton's: the check, and the cure with {isa} and {fp8} of the target.
_KNOWN = (
    (r"type (fp8\w+) not supported", "fp8-unsupported",
     "give the kernel one of {fp8} on {isa}; `crosstie convert` changes a checkpoint's dialect"),
    (r"num_ctas > 1|num_ctas.*not supported", "thread-block-clusters",
     "num_ctas=1 on {isa}, which has no clusters of workgroups"),
    (r"Keyword argument maxnreg", "launch-option",
     "pass maxnreg on NVIDIA alone; waves_per_eu is what limits registers on AMD"),
    (r"Keyword argument (\w+) was specified but unrecognised", "launch-option",
     "pass this option only on the backend that has it, by a condition on the platform"),
    (r"__nv_\w+|triton\.language\.extra\.cuda", "cuda-libdevice",
     "import libdevice from triton.language.extra, which has AMD's functions on AMD"),
    (r"input_precision must be one of", "input-precision",
     'choose input_precision by target: "ieee" runs everywhere, "tf32" on NVIDIA and gfx942'),
)  # fmt: skip
# This machine's fault, not the kernel's.
_TOOL_MISSING = re.compile(r"(?i)(linker|ld\.lld|ptxas|cuobjdump)\S* .*not found|cannot find (ptxas|ld)")
_STATEMENT_ERROR = re.compile(r"^(\S+\.py):(\d+):\d+: error: (.*)$", re.MULTILINE)


def _finding(
    compilation: Compilation, check: str, severity: Severity, what: str, evidence: str, remedy: str = "",
    where: Location | None = None,
) -> Finding:  # fmt: skip
    return Finding(
        check=check, severity=severity, what=what, where=where or compilation.place(),
        evidence=f"{evidence} ({compilation.configuration})" if compilation.configuration else evidence,
        grounds="compiled", remedy=remedy, target=compilation.target.name,
    )  # fmt: skip


def lds_over_limit(one: Compilation) -> Iterator[Finding]:
    used, limit = one.lds_bytes, one.target.lds_bytes
    if used <= limit:
        return
    fits = one.result.get("fits_with")
    if fits:
        remedy = f"num_stages={fits['num_stages']} compiles to {fits['lds_bytes']:,} bytes there"
    else:
        remedy = "smaller blocks" + (", or fewer num_stages" if (one.result.get("num_stages") or 1) > 1 else "")
    yield _finding(
        one, "lds-over-limit", "error",
        f"{one.kernel} needs {used:,} bytes of LDS or shared memory; a workgroup on {one.target.isa} has {limit:,}",
        f"metadata.shared = {used} with Triton's num_stages = {one.result.get('num_stages')}; limit {limit} bytes "
        f"({one.target.lds_source})",
        remedy,
    )  # fmt: skip


def too_many_threads(one: Compilation) -> Iterator[Finding]:
    if one.threads <= MAX_THREADS:
        return
    most = MAX_THREADS // one.wave_width
    yield _finding(
        one, "threads-over-limit", "error",
        f"{one.kernel} launches {one.threads:,} threads a workgroup; {MAX_THREADS:,} are the most",
        f"num_warps = {one.num_warps} x {one.wave_width} lanes on {one.target.isa}", f"num_warps={most} at most here",
    )  # fmt: skip


def unresolved(compilation: Compilation) -> Iterator[Finding]:
    """AMD's linker leaves them to the loader, which fails at the first launch; ptxas refuses them itself."""
    missing = compilation.result.get("unresolved")
    if missing:
        yield _finding(
            compilation, "unresolved-function", "error",
            f"{compilation.kernel} calls {missing[0]}, which nothing defines for {compilation.target.isa}",
            f"declared and not defined after AMD's libraries were linked: {', '.join(missing)}",
            "a function of triton.language.extra.libdevice, or a library for this target in extern_libs",
        )  # fmt: skip


def tensor_memory(one: Compilation) -> Iterator[Finding]:
    columns = int(one.result.get("tensor_memory") or 0)
    if columns > 512:
        yield _finding(
            one, "tensor-memory-over-limit", "error", f"{one.kernel} needs {columns} columns of tensor memory, of 512",
            f"metadata.tmem_size = {columns}", "smaller blocks, or accumulators that are not kept at once",
        )  # fmt: skip


def grid_limit(one: Compilation) -> Iterator[Finding]:
    grid = (one.job["grid"] + [1, 1, 1])[:3]
    if one.target.backend == "hip":
        over = grid[0] * one.threads >= _HIP_GRID_THREADS
        rule = f"HIP counts threads: {grid[0]:,} x {one.threads} is 2**32 or more"
    else:
        over = any(size > most for size, most in zip(grid, _CUDA_GRID, strict=True))
        rule = f"CUDA takes at most {_CUDA_GRID} blocks"
    if over:
        yield _finding(
            one, "grid-over-limit", "error", f"{one.kernel} is launched with a grid that {one.target.isa} refuses",
            f"grid {tuple(grid)}; {rule}", "a larger block a program, or a second axis of the grid",
        )  # fmt: skip


def spills(one: Compilation) -> Iterator[Finding]:
    scratch = int(one.result.get("scratch_bytes") or 0)
    if one.spills:
        unit = "VGPRs of each lane" if one.target.backend == "hip" else "bytes of stores and loads a thread"
        yield _finding(
            one, "register-spill", "slow", f"{one.kernel} spills registers to memory on {one.target.isa}",
            f"{one.spills} {unit} spilled, {scratch} bytes of scratch a lane, {one.registers} registers in use",
            _fewer_registers(one),
        )  # fmt: skip


def _fewer_registers(compilation: Compilation) -> str:
    for limit in ("waves_per_eu", "maxnreg"):
        if compilation.job["options"].get(limit):
            return f"no {limit}, which leaves a lane fewer registers; or smaller blocks"
    return "smaller blocks" + (", or more num_warps" if compilation.threads < MAX_THREADS else "")


def occupancy(compilation: Compilation) -> Iterator[Finding]:
    waves = compilation.waves_per_simd
    if waves is None:
        return
    groups = compilation.groups_by
    by = min(groups, key=lambda name: groups[name])
    unit = "compute unit" if compilation.target.backend == "hip" else "SM"
    held = f"{groups[by]} workgroup(s) of {compilation.num_warps} waves a {unit}, limited by {by}: "
    held += f"{compilation.lds_bytes:,} bytes of LDS and {compilation.registers} registers"
    if waves < 1:
        yield _finding(
            compilation, "low-occupancy", "slow",
            f"{compilation.kernel} leaves SIMDs without a wave on {compilation.target.isa}: {waves:g} of a wave each",
            held, "less LDS a workgroup (num_stages, block size), or more num_warps",
        )  # fmt: skip
    elif waves < 2 and not compilation.matrix:
        yield _finding(
            compilation, "low-occupancy", "note",
            f"{compilation.kernel} has {waves:g} wave a SIMD to hide memory latency on {compilation.target.isa}", held,
        )  # fmt: skip


def deep_pipeline(one: Compilation) -> Iterator[Finding]:
    """AMD's compute units have little LDS; a third stage often costs the second workgroup."""
    stages = int(one.result.get("num_stages") or 0)
    if one.target.backend == "hip" and stages > 2 and not one.is_out_of_resources and one.groups_by.get("LDS") == 1:
        yield _finding(
            one, "deep-pipeline", "note",
            f"{one.kernel} has LDS for one workgroup a compute unit of {one.target.isa} with num_stages={stages}",
            f"{one.lds_bytes:,} of {one.target.limits.unit_lds_bytes:,} bytes", "num_stages=2, to be timed there",
        )  # fmt: skip


def dots(compilation: Compilation) -> Iterator[Finding]:
    """By the line of each dot, where the assembly still knows lines; a kernel may have one good dot and one bad."""
    at: dict[str, dict[str, int]] = compilation.result.get("matrix_at") or {}
    seen: set[tuple[str, int, str]] = set()
    for dot in compilation.result["dots"]:
        line = f"{dot['file'].rsplit('/', 1)[-1]}:{dot['line']}"
        here = at.get(line, {})
        names = {**here, **at.get("", {})} or ({} if line in at or at else compilation.matrix)
        for finding in _dot(compilation, dot, names):
            if (key := (dot["file"], dot["line"], finding.check)) not in seen:
                seen.add(key)
                yield finding


def _dot(one: Compilation, dot: dict[str, Any], names: dict[str, int]) -> Iterator[Finding]:
    place, isa = one.place(dot["file"], dot["line"]), one.target.isa
    tile = " x ".join("[" + ", ".join(map(str, shape)) + "]" for shape in dot["shapes"])
    asked = f"{dot['kind']} of {' and '.join(dot['types'])}, {tile}"
    got = ", ".join(sorted(names)) or "no matrix instruction"
    narrow = [fp8_name(kind) for kind in dot["types"] if kind.startswith("f8")]
    if not names:
        remedy = "operands of one type that the matrix units take"
        if min(map(min, dot["shapes"])) < _SMALLEST_SIDE:
            remedy = f"tiles of at least {_SMALLEST_SIDE} on each side"
        if "f32" in dot["types"] and one.target.backend == "cuda":
            remedy = 'input_precision="tf32", or 16-bit operands'
        elif narrow:
            remedy = f"operands of one fp8 type that {isa} computes: {_fp8_of(one)}"
        yield _finding(
            one, "dot-without-matrix", "slow", f"a dot of {one.kernel} uses no matrix instruction on {isa}",
            f"{asked}; {got} at that line of the assembly", remedy, place,
        )  # fmt: skip
    elif dot["kind"] == "dot_scaled" and not any(map(_SCALED_INSTRUCTION.search, names)):
        yield _finding(
            one, "scaled-dot-emulated", "slow", f"a block-scaled dot of {one.kernel} is emulated on {isa}",
            f"{asked}; {got}", "gfx950 or Blackwell for MXFP4 and MXFP8, or 8-bit weights with scales applied outside",
            place,
        )  # fmt: skip
    elif dot["upcast_from"] or (narrow and not any(map(_FP8_INSTRUCTION.search, names))):
        kind = fp8_name(dot["upcast_from"]) if dot["upcast_from"] else narrow[0]
        yield _finding(
            one, "fp8-upcast", "slow", f"a dot of {one.kernel} in {kind} is computed in 16 bits on {isa}",
            f"{asked}{' cast from ' + kind if dot['upcast_from'] else ''}; {got}",
            _native_fp8(one, kind), place,
        )  # fmt: skip
    elif "f32" in dot["types"] and one.target.backend == "hip" and not any("xf32" in name for name in names):
        yield _finding(
            one, "fp32-dot", "note", f"a dot of {one.kernel} runs in full fp32 on {isa}, where NVIDIA takes tf32",
            f"{asked}; {got}", "", place,
        )  # fmt: skip


def _native_fp8(one: Compilation, kind: str) -> str:
    if kind in one.target.limits.fp8:
        return f"larger tiles: {one.target.isa} has instructions for {kind}, and this tile is too small for them"
    return f"{_fp8_of(one)}; scales change with the dialect (`crosstie convert`)"


def _fp8_of(one: Compilation) -> str:
    return " or ".join(one.target.limits.fp8) or f"none ({one.target.isa} has no fp8 matrix instructions)"


def mnemonics(text: str) -> list[str]:
    """The first word of each statement, without braces, labels and predicates."""
    found = []
    for statement in re.split(r"[;\n]", _COMMENT.sub(" ", text).replace("{", ";").replace("}", ";")):
        words = [word for word in statement.split() if not word.startswith(("@", "$")) and not word.endswith(":")]
        if words:
            found.append(words[0])
    return found


def is_foreign(text: str, backend: str) -> bool:
    """PTX on AMD, or AMD's instructions on NVIDIA."""
    words = mnemonics(text)
    amd = [bool(_AMD_MNEMONIC.fullmatch(word)) for word in words]
    return bool(words) and (not all(amd) if backend == "hip" else any(amd))


def foreign_assembly(one: Compilation) -> Iterator[Finding]:
    backend = one.target.backend
    seen: set[tuple[str, int]] = set()
    for block in one.result.get("inline_assembly", []):
        place = (block["file"], block["line"])
        if not is_foreign(block["text"], backend) or place in seen:
            continue
        seen.add(place)
        language, check = ("PTX", "inline-ptx") if backend == "hip" else ("AMD assembly", "inline-amdgcn")
        said = one.result.get("error", {}).get("message", "") or one.result.get("printed", "")
        if one.result["status"] == "crashed":
            said = f"nothing more: it ended by {one.result['ended']}"
        outcome = f"the compiler says: {' '.join(said.split())[:300]}" if said else "the compiler said nothing"
        first = " ".join(block["text"].split())
        yield _finding(
            one, check, "error", f"{one.kernel} has inline {language}, which {one.target.isa} cannot assemble",
            f'inline assembly "{first[:120]}" with constraints "{block["constraints"]}"; {outcome}',
            "write it with tl operations, or keep it from this backend by a constexpr condition", one.place(*place),
        )  # fmt: skip


def failures(compilation: Compilation) -> Iterator[Finding]:
    status = compilation.result["status"]
    if status == "refused":
        yield _failed(compilation, compilation.job["refused"], compilation.place(), "Triton refuses the launch")
    elif status in ("failed", "crashed") and (foreign := list(foreign_assembly(compilation))):
        # Assembly of another vendor explains what the assembler says; its own finding has all of it.
        yield from foreign
    elif status == "failed":
        yield _compile_error(compilation)
    elif status == "timeout":
        seconds = compilation.result["timeout_s"]
        yield _finding(
            compilation, "compile-timeout", "unknown", f"{compilation.kernel} was not compiled within {seconds:g} s",
            f"the compiler was stopped after {seconds:g} s",
            "a longer --timeout, or less unrolling: tl.static_range over a large constant is the usual cause",
        )  # fmt: skip
    elif status == "crashed":
        printed = compilation.result["printed"].strip().splitlines()
        last = f"; it printed: {printed[-1][:300]}" if printed else ""
        yield _finding(
            compilation, "compiler-crash", "error", f"the compiler crashes on {compilation.kernel}",
            f"the compiling process ended by {compilation.result['ended']}{last}",
            "another Triton version (use the container's), or a smaller tile; report it to triton-lang/triton",
        )  # fmt: skip


def _compile_error(compilation: Compilation) -> Finding:
    error = compilation.result["error"]
    message, place = error["message"], compilation.place(error["file"], error["line"])
    # Passes fail with an empty message; what they print has the statement.
    printed = _STATEMENT_ERROR.search(compilation.result["printed"])
    if printed and not error["line"]:
        place = compilation.place(printed.group(1), int(printed.group(2)))
        message = f"{printed.group(3)} ({message})"
    elif compilation.result["printed"] and not error["line"]:
        message = f"{message}: {' '.join(compilation.result['printed'].split())[:400]}"
    if error["type"] not in message and error["type"] not in ("CompilationError", "RuntimeError"):
        message = f"{error['type']}: {message}"
    return _failed(compilation, message, place, f"{compilation.kernel} does not compile")


def _failed(one: Compilation, message: str, place: Location, what: str) -> Finding:
    if _TOOL_MISSING.search(message):
        return _finding(
            one, "tool-missing", "unknown", f"{one.kernel} was not compiled to the end: {_short(message)}", message,
            "the tool that it names, or a Triton from 3.6 on, which brings its own (--python)",
        )  # fmt: skip
    check, remedy = "compile-error", (
        "change that statement for this target, or keep the kernel from it by a condition on the platform"
    )  # fmt: skip
    if known := next((row for row in _KNOWN if re.search(row[0], message)), None):
        fp8 = " or ".join(one.target.limits.fp8) or "no fp8 type: fp16 or bf16"
        check, remedy = known[1], known[2].format(isa=one.target.isa, fp8=fp8)
    return _finding(one, check, "error", f"{what}: {_short(message)}", message, remedy, place)


def _short(message: str) -> str:
    return message if len(message) <= 160 else message[:157] + "..."


def silent_errors(one: Compilation) -> Iterable[Finding]:
    """The compiler printed an error and went on: what it left out of the code, nobody knows."""
    printed = one.result.get("printed", "").strip()
    if one.compiled and printed and not list(foreign_assembly(one)):
        said = " ".join(printed.split())
        yield _finding(
            one, "silent-compile-error", "error", f"the compiler printed an error for {one.kernel} and went on",
            f"on its error stream: {said[:400]}",
            "rewrite the statement that it names; the code it made is not to be trusted",
        )  # fmt: skip


CHECKS: tuple[Callable[[Compilation], Iterable[Finding]], ...] = (
    foreign_assembly, lds_over_limit, too_many_threads, unresolved, tensor_memory, grid_limit, spills, occupancy,
    deep_pipeline, dots,
)  # fmt: skip

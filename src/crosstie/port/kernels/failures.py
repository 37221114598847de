"""Compilations that gave no kernel: each in the words of the compiler, with what is known to cure it."""

import re
from collections.abc import Iterable, Iterator

from crosstie.core.finding import Finding, Place, Severity
from crosstie.port.kernels.compilation import Compilation
from crosstie.port.kernels.inline_assembly import foreign_assembly

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


def failures(one: Compilation) -> Iterator[Finding]:
    status = one.result["status"]
    if status == "refused":
        yield _failed(one, one.job["refused"], one.where, "Triton refuses the launch")
    elif status == "failed":
        foreign = list(foreign_assembly(one))
        # Assembly of another vendor explains what the assembler says; its own finding has all of it.
        yield from foreign or [_compile_error(one)]
    elif status == "timeout":
        seconds = one.result["timeout_s"]
        yield _finding(
            one, "compile-timeout", "unknown", f"{one.kernel} was not compiled within {seconds:g} s",
            f"the compiler was stopped after {seconds:g} s ({one.configuration})",
            "a longer --timeout, or less unrolling: tl.static_range over a large constant is the usual cause",
        )  # fmt: skip
    elif status == "crashed" and (foreign := list(foreign_assembly(one))):
        yield from foreign
    elif status == "crashed":
        printed = one.result["printed"].strip().splitlines()
        last = f"; it printed: {printed[-1][:300]}" if printed else ""
        yield _finding(
            one, "compiler-crash", "error", f"the compiler crashes on {one.kernel}",
            f"the compiling process ended by {one.result['ended']} ({one.configuration}){last}",
            "another Triton version (use the container's), or a smaller tile; report it to triton-lang/triton",
        )  # fmt: skip


def _compile_error(one: Compilation) -> Finding:
    error = one.result["error"]
    message, place = error["message"], one.place(error["file"], error["line"])
    # Passes fail with an empty message; what they print has the statement.
    printed = _STATEMENT_ERROR.search(one.result["printed"])
    if printed and not error["line"]:
        place = one.place(printed.group(1), int(printed.group(2)))
        message = f"{printed.group(3)} ({message})"
    elif one.result["printed"] and not error["line"]:
        message = f"{message}: {' '.join(one.result['printed'].split())[:400]}"
    if error["type"] not in message and error["type"] not in ("CompilationError", "RuntimeError"):
        message = f"{error['type']}: {message}"
    return _failed(one, message, place, f"{one.kernel} does not compile")


def _failed(one: Compilation, message: str, place: Place, what: str) -> Finding:
    if _TOOL_MISSING.search(message):
        return _finding(
            one, "tool-missing", "unknown", f"{one.kernel} was not compiled to the end: {_short(message)}", message,
            "the tool that it names, or a Triton from 3.6 on, which brings its own (--python)",
        )  # fmt: skip
    check, remedy = "compile-error", (
        "change that statement for this target, or keep the kernel from it by a condition on the platform"
    )  # fmt: skip
    for pattern, name, cure in _KNOWN:
        if re.search(pattern, message):
            fp8 = " or ".join(one.target.limits.fp8) or "no fp8 type: fp16 or bf16"
            check, remedy = name, cure.format(isa=one.target.isa, fp8=fp8)
            break
    more = f" ({one.configuration})" if one.configuration else ""
    return Finding(
        check=check, severity="error", what=f"{what}: {_short(message)}", where=place, evidence=f"{message}{more}",
        grounds="compiled", remedy=remedy, target=one.target.name,
    )  # fmt: skip


def _short(message: str) -> str:
    return message if len(message) <= 160 else message[:157] + "..."


def _finding(one: Compilation, check: str, severity: Severity, what: str, evidence: str, remedy: str) -> Finding:
    return Finding(
        check=check, severity=severity, what=what, where=one.where, evidence=evidence, grounds="compiled",
        remedy=remedy, target=one.target.name,
    )  # fmt: skip


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

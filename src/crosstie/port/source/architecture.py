"""Conditions on NVIDIA's macros: where a build for ROCm takes another side than a build for NVIDIA, without a word."""

import re
from collections.abc import Iterator, Sequence

from crosstie.port.source.code import Code
from crosstie.port.source.guards import NVIDIA_ONLY, Branch, Macros, holds_under, rocm_defines
from crosstie.port.source.hazard import Hazard

# Ampere, Hopper and Blackwell: what is true on none of them is for GPUs that nobody ports from.
_ARCHITECTURES = (800, 900, 1000)
_NVIDIA = {
    "__NVCC__": 1, "__CUDACC__": 1, "__CUDACC_VER_MAJOR__": 13, "__CUDACC_VER_MINOR__": 0, "CUDART_VERSION": 13000,
    "CUDA_VERSION": 13000, "__clang__": 0, "__HIPCC__": 0, "USE_ROCM": 0,
}  # fmt: skip
_REFUSAL = re.compile(
    r"static_assert|assert\s*\(|#\s*error|__trap|abort\s*\(|TORCH_CHECK|printf|not_?implemented|unsupported"
    r"|not supported|no_device_code|__builtin_unreachable|\bthrow\b",
    re.IGNORECASE,
)
# Hints to a scheduler that other targets do without.
_HINT = re.compile(r"griddepcontrol|GridDependency|ProgrammaticLaunch|launch_dependents|pdl|setmaxnreg", re.IGNORECASE)
_OLDER = "other NVIDIA GPUs"
_VERSIONS = dict.fromkeys(("CUDART_VERSION", "__CUDACC_VER_MAJOR__", "__CUDACC_VER_MINOR__"), "older releases of CUDA")
_COMMENT = re.compile(r"//.*|/\*.*?\*/")
_LINES_OF_REST = 30


def architecture_hazards(code: Code) -> Iterator[Hazard]:
    unit = code.project.units[code.path]
    source = unit.text.split("\n")
    for side in unit.sides:
        names = {token.text for token in side.directive.tokens if token.kind == "name"}
        asked = names & NVIDIA_ONLY
        if not asked or side.directive.word == "else" or side.passed_over or unit.lines.dead(side.directive.line):
            continue
        if any(rocm_defines(name) for name in names) or any(
            code.project.definitions(name, code.path) for name in asked
        ):
            # The same condition speaks of ROCm, or the project sets the macro itself.
            continue
        found = _judge(code, side, "__CUDA_ARCH__" if "__CUDA_ARCH__" in asked else min(asked), source)
        if found is not None:
            yield found


def _on_nvidia(code: Code, side: Branch) -> list[bool | None]:
    """What the condition gives in device code of each architecture."""
    own = code.project.macros(code.path)

    def under(architecture: int) -> bool | None:
        def value(name: str) -> int | None:
            return architecture if name == "__CUDA_ARCH__" else _NVIDIA.get(name, own.value(name))

        def defined(name: str) -> bool | None:
            if name in _NVIDIA or name in NVIDIA_ONLY:
                return bool(_NVIDIA.get(name, 1))
            return own.defined(name)

        return holds_under(side.directive, Macros(defined, value))

    return [under(architecture) for architecture in _ARCHITECTURES]


def _judge(code: Code, side: Branch, name: str, source: list[str]) -> Hazard | None:
    inside = source[side.first - 1 : side.last]
    if not _has_code(inside):
        return None
    on_nvidia = _on_nvidia(code, side)
    if side.taken is not False:
        # `#ifndef __CUDA_ARCH__` is the host's side, and HIP's device code takes it too.
        if side.taken and all(held is False for held in on_nvidia) and name == "__CUDA_ARCH__":
            return _old_side(code, side) if _compares(side) else _host_side(code, side)
        return None
    if all(held is False for held in on_nvidia):
        return None
    if name == "__CUDA_ARCH__" and all(on_nvidia) and not _compares(side):
        return _host_side(code, side)
    if all(_HINT.search(line) or not _has_code([line]) for line in inside) and not side.has_else:
        return None
    rest = "\n".join(source[side.last : side.last + _LINES_OF_REST]) if side.has_else else ""
    if not side.has_else:
        severity = "error" if name not in _VERSIONS else "unknown"
        what = f"HIP does not define {name}: these {len(inside)} lines are left out, and nothing takes their place"
        remedy = "add a side for ROCm (#elif defined(USE_ROCM)), or ask for the feature that is meant"
    elif _REFUSAL.search(_COMMENT.sub("", rest.split("#endif", 1)[0])):
        severity = "error"
        what = f"HIP does not define {name}: the other side is compiled, which refuses to run"
        remedy = "add a side for ROCm (#elif defined(USE_ROCM)) before the #else"
    else:
        severity = "unknown" if name not in _VERSIONS else "note"
        what = (
            f"HIP does not define {name}: the other side is compiled, which is meant for {_VERSIONS.get(name, _OLDER)}"
        )
        remedy = "check that the #else side is right and fast enough, or add one for ROCm (#elif defined(USE_ROCM))"
    return _hazard(code, side, severity, what, remedy)


def _has_code(lines: Sequence[str]) -> bool:
    plain = (_COMMENT.sub("", line).strip() for line in lines)
    return any(line and not line.startswith("#") for line in plain)


def _compares(side: Branch) -> bool:
    return any(token.text in (">=", "<=", ">", "<", "==", "!=") for token in side.directive.tokens)


def _host_side(code: Code, side: Branch) -> Hazard:
    what = "HIP never defines __CUDA_ARCH__, so device code gets the host's side of this"
    remedy = "ask for __HIP_DEVICE_COMPILE__ too: #if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)"
    return _hazard(code, side, "error", what, remedy)


def _old_side(code: Code, side: Branch) -> Hazard:
    what = "HIP does not define __CUDA_ARCH__, which then counts as 0: the side for the oldest GPUs is compiled"
    remedy = "ask for defined(__CUDA_ARCH__) as well, or add a side for ROCm (#if defined(USE_ROCM)) before it"
    return _hazard(code, side, "error", what, remedy)


def _hazard(code: Code, side: Branch, severity: str, what: str, remedy: str) -> Hazard:
    return Hazard(
        check="architecture-macro",
        severity=severity,  # type: ignore[arg-type]
        what=what,
        file=code.path,
        line=side.directive.line,
        evidence=code.line_text(side.directive.line),
        remedy=remedy,
    )

"""Which lines a build for ROCm compiles: preprocessor conditions under the macros that such a build has.

A condition is true, false or open. Only what is certainly false is left out; both sides of an open one are read.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence

import msgspec

from crosstie.port.source.expressions import Value, evaluate
from crosstie.port.source.lexer import Directive

# Macros of NVIDIA's compiler and headers, which a build for ROCm lacks. __CUDACC__ is not among them: HIPIFY makes
# __HIPCC__ of it. Nor is CUDA_VERSION, which it turns into TORCH_HIP_VERSION.
NVIDIA_ONLY = frozenset({
    "__CUDA_ARCH__", "__NVCC__", "__CUDACC_VER_MAJOR__", "__CUDACC_VER_MINOR__", "CUDART_VERSION",
    "__HIP_PLATFORM_NVIDIA__", "__HIP_PLATFORM_NVCC__", "__CUDA_ARCH_FEAT_SM90_ALL", "__CUDA_ARCH_SPECIFIC__",
    "__CUDA_ARCH_FAMILY_SPECIFIC__", "__CUDA_ARCH_FEAT_SM100_ALL",
})  # fmt: skip
_ABSENT = NVIDIA_ONLY | {
    "__CUDA_ARCH_LIST__",
    "_WIN32",
    "_MSC_VER",
    "__APPLE__",
    "__MUSACC__",
    "GGML_USE_MUSA",
    "USE_XPU",
    "USE_MUSA",
}
_PRESENT = {"__clang__": 1, "__linux__": 1, "__GNUC__": 4, "__HIPCC__": 1, "__HIP__": 1, "USE_ROCM": 1}
_COMPILERS = {"__clang__", "__linux__", "__GNUC__"}
# Present in one pass of the compiler or on one chip only: open.
_OPEN = re.compile(r"(?i)^(__gfx.*|__hip_device_compile__|__amdgcn.*|__amdgpu.*)$")
# What projects call their own switch: VLLM_USE_ROCM, PADDLE_WITH_HIP, TORCH_HIP_VERSION, __HIP_PLATFORM_AMD__. A name
# that goes on with something else (HIP_LAUNCH_CHECKS, AMD_EPYC_TUNING) is a setting that may be on or off.
_SWITCH = re.compile(
    r"(?i)^_*(?:[a-z0-9]+_+)*?(?:rocm|hip|hipcc|amd|amdgpu)(?:_+(?:rocm|hip|amd|platform|version|major|minor|build"
    r"|enabled|enable|support|supported|available|gpu|backend|compiler|device|target))*_*$"
)
# Parts of a name that only AMD's side has: GGML_HIP_ROCWMMA_FATTN, AMD_MFMA_AVAILABLE, CDNA3.
_OF_AMD = re.compile(r"(?i)(?:^|_)(?:rocm|hip|hipcc|amd|amdgpu|amdgcn|rocwmma|mfma|[cr]dna\d?|gfx\w*)(?:_|$)")
_REFUSES = re.compile(r"(?i)(?:^|_)(?:no|not|disable|disabled|without|skip)(?:_|$)")

Asked = Callable[[str], bool | None]
Names = Callable[[str], Value]


class Macros(msgspec.Struct, frozen=True):
    """What is known of macros in one file: whether a name is defined (None: open), and its number."""

    defined: Asked
    value: Names


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a conditional: the lines between its directive and the next of the same conditional."""

    directive: Directive
    first: int
    last: int
    # True: compiled for ROCm. False: left out. None: open.
    taken: bool | None
    # Whether a later #else or #elif of the same conditional has lines of its own.
    has_else: bool
    # An earlier side of the same conditional is compiled for ROCm, so that this one was never asked.
    passed_over: bool
    # Compiled for ROCm alone: one of the conditions so far asks for it, or its own needs a macro of AMD's.
    for_rocm: bool


def rocm_defines(name: str) -> bool | None:
    """Whether a build for ROCm defines a macro that the project itself says nothing about."""
    if name in _ABSENT:
        return False
    if name in _PRESENT:
        return True
    if _OPEN.match(name) or _REFUSES.search(name):
        return None
    return True if _SWITCH.search(name) else None


def _for_amd_alone(directive: Directive) -> bool:
    """Whether a condition cannot hold where no macro of AMD's is set."""

    def defined(name: str) -> bool | None:
        return False if _OF_AMD.search(name) and not _REFUSES.search(name) else None

    return holds_under(directive, Macros(defined, lambda name: 0 if defined(name) is False else None)) is False


def asks_for_rocm(directive: Directive) -> bool:
    return any(
        token.kind == "name" and token.text not in _COMPILERS and rocm_defines(token.text) for token in directive.tokens
    )


def rocm_value(name: str) -> Value:
    if name in _ABSENT:
        return 0
    return _PRESENT.get(name)


class _Open(msgspec.Struct):
    """A conditional whose #endif has not come yet."""

    directive: Directive
    taken: bool | None
    # Whether an earlier side was certainly taken, certainly not, or perhaps.
    before: bool | None
    outer: bool | None
    asks: bool
    # Whether this side, or one around it, is for AMD alone by its own condition.
    for_amd: bool
    sides: list[Branch]
    passed_over: bool = False


def branches(directives: Sequence[Directive], macros: Macros, last_line: int) -> list[Branch]:
    """All sides of all conditionals, in the order in which they end."""
    found: list[Branch] = []
    stack: list[_Open] = []
    for index, directive in enumerate(directives):
        word = directive.word
        if word in ("if", "ifdef", "ifndef"):
            outer = stack[-1].taken if stack else True
            holds = _first_holds(directives, index, macros)
            asks = asks_for_rocm(directive) or (bool(stack) and stack[-1].asks)
            for_amd = _for_amd_alone(directive) or (bool(stack) and stack[-1].for_amd)
            stack.append(_Open(directive, both(outer, holds), holds, outer, asks, for_amd, []))
        elif word in ("elif", "else", "elifdef", "elifndef") and stack:
            top = stack[-1]
            _close(top, directive.line)
            holds = True if word == "else" else holds_under(directive, macros)
            top.passed_over = top.before is True
            top.taken = both(top.outer, both(negated(top.before), holds))
            top.before = either(top.before, holds)
            top.directive = directive
            top.asks = top.asks or asks_for_rocm(directive)
            around = len(stack) > 1 and stack[-2].for_amd
            top.for_amd = around or (word != "else" and _for_amd_alone(directive))
        elif word == "endif" and stack:
            top = stack.pop()
            _close(top, directive.line)
            found += _with_else(top.sides)
    for top in stack:
        _close(top, last_line + 1)
        found += _with_else(top.sides)
    return found


def _close(top: _Open, line: int) -> None:
    top.sides.append(
        Branch(
            directive=top.directive,
            first=top.directive.line + 1,
            last=line - 1,
            taken=top.taken,
            has_else=False,
            passed_over=top.passed_over,
            for_rocm=(top.asks and top.taken is True) or (top.for_amd and top.taken is not False),
        )
    )


def _with_else(sides: list[Branch]) -> list[Branch]:
    return [
        msgspec.structs.replace(side, has_else=any(other.last >= other.first for other in sides[index + 1 :]))
        for index, side in enumerate(sides)
    ]


def _first_holds(directives: Sequence[Directive], index: int, macros: Macros) -> bool | None:
    directive = directives[index]
    if directive.word == "ifndef" and directive.tokens and _guards_itself(directives, index):
        return directive.tokens[0].text not in _PRESENT
    return holds_under(directive, macros)


def holds_under(directive: Directive, macros: Macros) -> bool | None:
    """Whether the condition of an #if, #ifdef, #ifndef or #elif is met."""
    word, tokens = directive.word, directive.tokens
    if word in ("ifdef", "elifdef", "ifndef", "elifndef"):
        asked = macros.defined(tokens[0].text) if tokens else None
        return negated(asked) if word in ("ifndef", "elifndef") else asked
    value = evaluate(tokens, macros.value, macros.defined)
    return None if value is None else bool(value)


def _guards_itself(directives: Sequence[Directive], index: int) -> bool:
    """`#ifndef X` and `#define X` at once: a header read once, or a default that nobody else set."""
    name = directives[index].tokens[0].text
    following = directives[index + 1] if index + 1 < len(directives) else None
    return bool(following and following.word == "define" and following.tokens and following.tokens[0].text == name)


def negated(asked: bool | None) -> bool | None:
    return None if asked is None else not asked


def both(first: bool | None, second: bool | None) -> bool | None:
    if first is False or second is False:
        return False
    return None if first is None or second is None else True


def either(first: bool | None, second: bool | None) -> bool | None:
    if first or second:
        return True
    return None if first is None or second is None else False


class Lines:
    """How sure it is that a line is compiled for ROCm: True, None (open) or False."""

    def __init__(self, sides: Sequence[Branch], bottom: bool = True):
        """`bottom`: what holds outside of all conditionals."""
        # Inner sides end before outer ones, and know what is outside of them: the narrowest decides.
        self._starts: list[int] = []
        self._taken: list[bool | None] = []
        marks: dict[int, bool | None] = {1: bottom}
        ordered = sorted(sides, key=lambda side: (side.first, -side.last))
        stack: list[tuple[int, bool | None]] = []
        for side in ordered:
            if side.last < side.first:
                continue
            while stack and stack[-1][0] < side.first:
                end, _ = stack.pop()
                marks[end + 1] = stack[-1][1] if stack else bottom
            marks[side.first] = side.taken
            stack.append((side.last, side.taken))
        while stack:
            end, _ = stack.pop()
            marks[end + 1] = stack[-1][1] if stack else bottom
        for start in sorted(marks):
            self._starts.append(start)
            self._taken.append(marks[start])

    def taken(self, line: int) -> bool | None:
        return self._taken[bisect_right(self._starts, line) - 1]

    def dead(self, line: int) -> bool:
        return self.taken(line) is False

"""Caps for grids that may reach 2^32 threads, where the kernel goes on by a loop over the grid: as changes of lines.

Only where that is seen: the kernel is in the same file, every thread's place in the grid is the start of a loop that
steps by the whole grid, and nothing else depends on the number of blocks. A kernel that has a block for each part of
its work would leave parts out under a cap.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from crosstie_port.source.code import Code, Function, streams
from crosstie_port.source.launches import launches, may_overflow
from crosstie_port.source.lexer import CppToken, arguments, closing, until
from crosstie_port.source.project import Project

CAP = "ROCM_GRID_CAP"
# Blocks have at most 1024 threads, and 1024 x 4194303 is the last multiple below 2^32.
CAP_LINES = (
    "#if defined(USE_ROCM) || defined(__HIP_PLATFORM_AMD__)",
    "#include <algorithm>",
    "#include <cstdint>",
    f"#define {CAP}(...) std::min<int64_t>((__VA_ARGS__), 4194303)",
    "#else",
    f"#define {CAP}(...) (__VA_ARGS__)",
    "#endif",
)
_LOOP_MACROS = {"CUDA_KERNEL_LOOP", "CUDA_KERNEL_LOOP_TYPE", "CUDA_1D_KERNEL_LOOP"}
_WHOLE_GRID = {"this_grid", "grid_group", "grid_sync"}
# Where a name stands in the kernel.
Places = Callable[[str], list[int]]
_CHANGES = {"=", "++", "--", "+=", "-=", "?"}


class _Loop(msgspec.Struct, frozen=True):
    """From the bracket of its head to the end of its body; the head's end and where its step begins."""

    start: int
    step: int
    head_end: int
    end: int


def capped(path: str, text: str) -> tuple[dict[int, str], bool]:
    """Lines by number as they would be, and whether those are all the launches of the file that need a cap."""
    code = streams(path, Project({path: text}))[0]
    lines = text.split("\n")
    made: dict[int, str] = {}
    whole = True
    for at, given in launches(code):
        if not given or not may_overflow(code, given[0], at):
            continue
        change = _change(code, at, given[0], lines, made) if _is_looped(code, at) else None
        if change is None:
            whole = False
        else:
            made[change[0]] = change[1]
    return made, whole


def _is_looped(code: Code, at: int) -> bool:
    """Whether the kernel that is launched here goes over the whole grid."""
    name = _kernel(code, at)
    kernels = [function for function in code.functions if function.name == name]
    return len(kernels) == 1 and "__global__" in kernels[0].returns and _strides(code, kernels[0])


def _kernel(code: Code, at: int) -> str:
    """The name before <<<, or the first that a macro is given, without the arguments of a template."""
    if code.text(at) != "<<<":
        given = arguments(code.tokens[at + 2 : closing(code.tokens, at + 1)])
        words = [token.text for token in given[0]] if given else []
        upto = words.index("<") if "<" in words else len(words)
        return next((word for word in reversed(words[:upto]) if word not in "()"), "")
    before, depth = at - 1, 0
    while before > 0 and (depth or code.text(before) in (">", ">>")):
        text = code.text(before)
        depth += len(text) if text in (">", ">>") else -1 if text == "<" else 0
        if text in (";", "{", "}"):
            return ""
        before -= 1
    return code.text(before)


def _strides(code: Code, kernel: Function) -> bool:
    inside = range(kernel.start, kernel.end)

    def places(name: str) -> list[int]:
        return [one for one in code.names.get(name, ()) if one in inside]

    if any(places(name) for name in _WHOLE_GRID):
        return False
    loops = [loop for loop in _loops(code, places("for")) if _steps_by_grid(code, loop)]
    if not loops and not any(places(name) for name in _LOOP_MACROS):
        return False
    strides = {name for loop in loops for name in _names(code, loop.step, loop.head_end)}
    if not all(_is_stride(code, place, loops, strides) for place in places("gridDim")):
        return False
    return all(_starts_loop(code, place, loops, places) for place in places("blockIdx"))


def _loops(code: Code, places: Sequence[int]) -> Iterator[_Loop]:
    for at in places:
        head_end = closing(code.tokens, at + 1)
        marks = [one for one in range(at + 1, head_end) if code.text(one) == ";"]
        if code.text(at + 1) != "(" or len(marks) != 2:
            continue
        body = head_end + 1
        end = closing(code.tokens, body) if code.text(body) == "{" else body + len(until(code.tokens, body, (";",)))
        yield _Loop(at + 1, marks[1], head_end, end)


def _names(code: Code, start: int, end: int) -> list[str]:
    return [token.text for token in code.tokens[start:end] if token.kind == "name"]


def _steps_by_grid(code: Code, loop: _Loop) -> bool:
    """`i += blockDim.x * gridDim.x`, or by a variable that is that."""
    names = _names(code, loop.step, loop.head_end)
    values = [declared.value for name in names if (declared := code.declared(name, loop.start)) is not None]
    through = {token.text for value in values for token in value}
    return "+=" in {code.text(one) for one in range(loop.step, loop.head_end)} and "gridDim" in {*names, *through}


def _is_stride(code: Code, at: int, loops: Sequence[_Loop], strides: set[str]) -> bool:
    """In the step of a loop, or in the value of the variable that is one; along x."""
    if code.text(at + 2) != "x":
        return False
    return any(loop.step < at < loop.head_end for loop in loops) or _given_to(code, at) in strides


def _starts_loop(code: Code, at: int, loops: Sequence[_Loop], places: Places) -> bool:
    """In the start of a loop over the grid, or in the value of a variable that serves for nothing else."""
    if code.text(at + 2) != "x":
        return False
    if any(loop.start < at < loop.step for loop in loops):
        return True
    name = _given_to(code, at)
    uses = [place for place in places(name) if place > at] if name else []
    return bool(uses) and all(any(_is_own(code, one, name, loop) for loop in loops) for one in uses)


def _is_own(code: Code, at: int, name: str, loop: _Loop) -> bool:
    """In the loop's head; in its body too, where it is what the loop steps."""
    stepped = name in _names(code, loop.step, loop.head_end)
    return loop.start < at < (loop.end if stepped else loop.step)


def _given_to(code: Code, at: int) -> str:
    """The variable that is declared with this in its value."""
    for name, declarations in code.declarations.items():
        if any(one.at < at <= one.at + 1 + len(one.value) for one in declarations if one.value):
            return name
    return ""


def _change(
    code: Code, at: int, grid: Sequence[CppToken], lines: Sequence[str], made: Mapping[int, str]
) -> tuple[int, str] | None:
    """The line with the cap around the number of blocks; None where it is not seen to be one number on one line."""
    if grid[0].text == "dim3" and len(grid) > 3:
        inner, before, after = arguments(grid[2:-1]), r"dim3\s*[({]\s*", r"\s*[)}]"
        if len(inner) != 1:
            return None
        return _wrapped(inner[0], before, after, lines, made)
    if len(grid) == 1 and grid[0].kind == "name":
        name = grid[0].text
        declared = code.declared(name, at)
        if declared is None:
            return _at_declaration(code, at, name, lines, made)
        if any(token.text == "dim3" for token in declared.value):
            return None
    return _wrapped(grid, r"(?:^|<<<|,)\s*", r"\s*,", lines, made)


def _at_declaration(
    code: Code, at: int, name: str, lines: Sequence[str], made: Mapping[int, str]
) -> tuple[int, str] | None:
    """`dim3 grid(n / 256);`, used for this launch alone."""
    function = code.function(at)
    uses = [one for one in code.names.get(name, ()) if function is not None and function.start < one < function.end]
    if len(uses) != 2 or code.text(uses[0] - 1) != "dim3" or code.text(uses[0] + 1) not in ("(", "{"):
        return None
    inner = arguments(code.tokens[uses[0] + 2 : closing(code.tokens, uses[0] + 1)])
    return _wrapped(inner[0], rf"\b{name}\s*[({{]\s*", r"\s*[)}]", lines, made) if len(inner) == 1 else None


def _wrapped(
    tokens: Sequence[CppToken], before: str, after: str, lines: Sequence[str], made: Mapping[int, str]
) -> tuple[int, str] | None:
    numbers = {token.line for token in tokens}
    if len(numbers) != 1 or any(token.text in _CHANGES or token.text == "dim3" for token in tokens):
        return None
    number = min(numbers)
    line = made.get(number, lines[number - 1])
    matches = list(re.finditer(f"({before})({_spelt(tokens)})({after})", line))
    if len(matches) != 1:
        return None
    (match,) = matches
    return number, f"{line[: match.start()]}{match[1]}{CAP}({match[2]}){match[3]}{line[match.end() :]}"


def _spelt(tokens: Sequence[CppToken]) -> str:
    """As the line has them, with any blanks between."""
    words = [re.escape(token.text) for token in tokens]
    gaps = [r"\s+" if cpp_token.kind == two.kind == "name" else r"\s*" for cpp_token, two in pairwise(tokens)]
    return words[0] + "".join(gap + word for gap, word in zip(gaps, words[1:], strict=True))

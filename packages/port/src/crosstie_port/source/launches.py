"""Launches as HIP takes them: threads a grid, what stands between <<< and >>>, attributes of kernels."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from msgspec.structs import replace

from crosstie.core.finding import Severity
from crosstie_port.source.code import WIDE, Code, also
from crosstie_port.source.hazard import SourceHazard
from crosstie_port.source.lexer import CppToken, arguments

_LAUNCHES = re.compile(r"(?i)^\w*launch\w*kernel\w*$|^\w*kernel_?launch\w*$")
_CHECKS = re.compile(r"(?i)check|error")
_CAPS = re.compile(
    r"(?i)^f?min$|cap|clamp|limit|max_?grid|max_?block|maxgrid|multiprocessor|num_?sms?$|sm_?c(?:ou)?nt|occupancy"
)
_PARTS = re.compile(r"(?i)div|ceil|xblock|block_?count|get_?blocks|blocks_?for")
_THREADS = re.compile(r"(?i)block_?dims?|threads|block_?size")
_COUNTS = {"numel", "nbytes"}
# Calls that are templates of the kernel's type in CUDA and take const void* in HIP, with the kernel's place.
_OF_KERNELS = {
    "cudaFuncSetAttribute": 0, "cudaFuncSetCacheConfig": 0, "cudaFuncSetSharedMemConfig": 0, "hipFuncSetAttribute": 0,
    "hipFuncSetCacheConfig": 0, "cudaLaunchKernel": 0, "hipLaunchKernel": 0, "cudaFuncGetAttributes": 1,
    "hipFuncGetAttributes": 1,
}  # fmt: skip
_DEEPEST = 3
_GRID_FIX = "cap the blocks and let the kernel go on by gridDim.x * blockDim.x, or check blocks x threads against 2^32"


def launches(code: Code) -> Iterator[tuple[int, list[Sequence[CppToken]]]]:
    """Where a kernel is launched, with its grid, block and so on."""
    for at, token in enumerate(code.tokens):
        if token.text == "<<<":
            end = next((i for i in range(at, min(at + 300, len(code.tokens))) if code.tokens[i].text == ">>>"), at)
            yield at, arguments(code.tokens[at + 1 : end])
    for name in code.names:
        if _LAUNCHES.match(name) and not _CHECKS.search(name):
            yield from ((at, given[1:]) for at, given in code.calls(name) if len(given) > 2)


def _grids(code: Code) -> Iterator[SourceHazard]:
    """One finding a file: blocks times threads may reach 2^32, which CUDA allows."""
    lines = sorted({code.tokens[at].line for at, given in launches(code) if given and may_overflow(code, given[0], at)})
    if lines:
        what = "HIP launches fewer than 2^32 threads a grid, CUDA up to 2^31 blocks: this grid grows without a cap"
        hazard = code.line_hazard("grid-limit", "unknown", what, lines[0], _GRID_FIX)
        yield replace(hazard, evidence=hazard.evidence + also(lines[1:]))


def may_overflow(code: Code, grid: Sequence[CppToken], at: int) -> bool:
    """Whether a number of it is a quotient without a cap, of a count of 64 bits or beside another number,
    or a power of two."""
    dimensions = [dimension for dimension in _dimensions(code, grid, at) if code.value(dimension, at) is None]
    if not dimensions or _checks_product(code, at):
        return False
    return any(_is_open(code, list(_behind(code, dimension, at)), at, len(dimensions) > 1) for dimension in dimensions)


def _is_open(code: Code, tokens: Sequence[CppToken], at: int, beside: bool) -> bool:
    names = {token.text for token in tokens if token.kind == "name"}
    if any(map(_CAPS.search, names)):
        return False
    # `1 << n`: two to the power of a variable.
    power = any(sign.text == "<<" and token.kind == "name" for sign, token in pairwise(tokens))
    if not (power or any(token.text == "/" for token in tokens) or any(map(_PARTS.search, names))):
        return False
    sized = any(cpp_token.text == "size" and before.text == "." for before, cpp_token in pairwise(tokens))
    declared = (code.declared(name, at) for name in names)
    return beside or power or sized or bool(names & (_COUNTS | WIDE)) or any(one and one.bits == 64 for one in declared)


def _behind(code: Code, tokens: Sequence[CppToken], at: int, depth: int = 0) -> Iterator[CppToken]:
    """An expression's tokens, and those of the variables in it; threads a block say nothing about the grid."""
    yield from tokens
    if depth < _DEEPEST:
        for token in tokens:
            if token.kind == "name" and not _THREADS.search(token.text) and (made := code.made_of(token.text, at)):
                yield from _behind(code, made, at, depth + 1)


def _dimensions(code: Code, grid: Sequence[CppToken], at: int) -> list[Sequence[CppToken]]:
    made = code.made_of(grid[0].text, at) if len(grid) == 1 else grid
    inside = made[2:-1] if made and made[0].text == "dim3" else made or grid
    return arguments(inside)


def _checks_product(code: Code, at: int) -> bool:
    """A check against 2^32 somewhere before the launch."""
    function = code.function(at)
    before = code.tokens[function.start if function else max(0, at - 200) : at]
    return any(token.text == "<<" and two.text == "32" for token, two in pairwise(before))


def _attributes(code: Code) -> Iterator[SourceHazard]:
    """CUDA's functions are templates of the kernel's type, HIP's take a pointer to void."""
    for name, at, given in code.foreign_calls(tuple(_OF_KERNELS)):
        place = _OF_KERNELS[name]
        if len(given) < 2 or code.is_for_amd(at) or _is_void(code, given[place], at):
            continue
        what = f"{name} gets a kernel: HIP's takes const void*, to which no function converts by itself"
        # A member may be a pointer to void already.
        severity: Severity = "unknown" if any(token.text in (".", "->") for token in given[place]) else "error"
        yield code.hazard("kernel-attribute", severity, what, at, "write reinterpret_cast<const void*>(kernel)")


def _is_void(code: Code, given: Sequence[CppToken], at: int) -> bool:
    if any(token.text in ("void", "CUfunction") for token in given):
        return True
    if len(given) != 1:
        return False
    made = code.made_of(given[0].text, at)
    return any(token.text == "void" for token in made) or code.points_to(given[0].text, at) == "void"


LAUNCH_RULES = (_grids, _attributes)

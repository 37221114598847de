"""Launches as HIP takes them: threads a grid, attributes of kernels, and the local memory that a workgroup has."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from msgspec.structs import replace

from crosstie.core.finding import Severity
from crosstie_port.source.code import WIDE, Code, Function, also
from crosstie_port.source.hazard import SourceHazard
from crosstie_port.source.lexer import CppToken, Value, arguments, closing, size_of, until

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
_OPT_IN = "cudaFuncAttributeMaxDynamicSharedMemorySize"
_OPT_IN_NAMES = (
    _OPT_IN, "hipFuncAttributeMaxDynamicSharedMemorySize", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
)  # fmt: skip
_MEMORY_NAME = re.compile(r"(?i)smem|shmem|shared_?mem|shared_?(?:size|bytes|storage)|dyn_?shared|lds_?(?:size|bytes)")
_LEAST_LDS = 65_536
_MOST_PLAUSIBLE = 1_048_576
_MEMORY_FIX = (
    "shrink the tiles or the number of stages until it fits (65,536 bytes a workgroup on gfx942, 163,840 on gfx950, "
    "against up to 232,448 on Hopper), with a size of its own per target"
)


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


def _over(code: Code, what: str, size: int, at: int, severity: Severity = "error") -> Iterator[SourceHazard]:
    if size > _LEAST_LDS:
        said = f"{what}: {size:,} bytes of shared memory, more than a workgroup of this target can have"
        yield code.hazard("shared-memory", severity, said, at, _MEMORY_FIX, f"lds<{size}")


def _static(code: Code) -> Iterator[SourceHazard]:
    by_function: dict[Function | None, list[int]] = {}
    for at in code.names.get("__shared__", ()):
        if code.text(at - 1) != "extern":
            by_function.setdefault(code.function(at), []).append(at)
    for function, places in by_function.items():
        sizes = {at: _bytes(code, until(code.tokens, at + 1, (";", "{")), at) or 0 for at in places}
        name = function.name if function else "this file"
        yield from _over(code, f"the arrays of {name}", sum(sizes.values()), max(sizes, key=lambda at: sizes[at]))


def _bytes(code: Code, statement: Sequence[CppToken], at: int) -> Value:
    """The size of `float a[64][65], b[32]`; None where a type or a dimension is not known."""
    words: list[str] = []
    index = 0
    while index < len(statement):
        text = statement[index].text
        following = statement[index + 1].text if index + 1 < len(statement) else ""
        if text in ("alignas", "__align__", "__attribute__") and following == "(":
            index = closing(statement, index + 1) + 1
            continue
        if statement[index].kind == "name" and following in ("[", ",", "", "="):
            break
        words.append(text)
        index += 1
    element = size_of(words)
    counts = [_elements(code, declarator, at) for declarator in arguments(statement[index:])]
    known = [count for count in counts if count is not None]
    return element * sum(known) if element is not None and len(known) == len(counts) else None


def _elements(code: Code, declarator: Sequence[CppToken], at: int) -> Value:
    elements, index = 1, 1
    while index < len(declarator) and declarator[index].text == "[":
        end = closing(declarator, index)
        value = code.value(declarator[index + 1 : end], at)
        if value is None:
            return None
        elements *= value
        index = end + 1
    return elements


def _opt_ins(code: Code) -> Iterator[SourceHazard]:
    for name in _OPT_IN_NAMES:
        for at in code.names.get(name, ()):
            if code.text(at + 1) != ",":
                continue
            size = code.value(until(code.tokens, at + 2, (",",)), at, through_variables=True)
            if size is None and code.is_for_amd(at):
                continue
            if size is None:
                what = "more shared memory than the default is asked for, and how much is known only at run time"
                remedy = (
                    "compare the number with hipDeviceAttributeMaxSharedMemoryPerBlock before the launch; "
                    + _MEMORY_FIX
                )
                yield code.hazard("shared-memory", "unknown", what, at, remedy)
            else:
                yield from _over(code, "an opt-in", size, at)


def _of_launches(code: Code) -> Iterator[SourceHazard]:
    for at, given in launches(code):
        if code.text(at) == "<<<" and len(given) > 2:
            size = code.value(given[2], at, through_variables=True)
            yield from _over(code, "this launch", size or 0, at)


def _budgets(code: Code) -> Iterator[SourceHazard]:
    """`constexpr int kSmemBytes = 99 * 1024`: a budget made for NVIDIA."""
    for name, declarations in code.declarations.items():
        for declaration in declarations if _MEMORY_NAME.search(name) else ():
            size = code.value(declaration.value, declaration.at)
            constant = {"const", "constexpr"} & set(declaration.words)
            if constant and size is not None and _LEAST_LDS < size <= _MOST_PLAUSIBLE:
                yield from _over(code, f"{name} is a budget", size, declaration.at, "unknown")


LAUNCH_RULES = (_grids, _attributes, _static, _opt_ins, _of_launches, _budgets)

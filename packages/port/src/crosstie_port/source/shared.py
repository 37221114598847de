"""Shared memory: static arrays, opt-ins and launches against the local memory that a workgroup of the target has."""

import re
from collections.abc import Iterator, Sequence

from crosstie.core.finding import Severity
from crosstie_port.source.code import Code, Function
from crosstie_port.source.hazard import SourceHazard
from crosstie_port.source.launches import launches
from crosstie_port.source.lexer import CppToken, Value, arguments, closing, size_of, until

_OPT_IN = "cudaFuncAttributeMaxDynamicSharedMemorySize"
_OPT_IN_NAMES = (
    _OPT_IN, "hipFuncAttributeMaxDynamicSharedMemorySize", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
)  # fmt: skip
_SIZE_NAME = re.compile(r"(?i)smem|shmem|shared_?mem|shared_?(?:size|bytes|storage)|dyn_?shared|lds_?(?:size|bytes)")
_LEAST_LDS = 65_536
_MOST_PLAUSIBLE = 1_048_576
_FIX = (
    "shrink the tiles or the number of stages until it fits (65,536 bytes a workgroup on gfx942, 163,840 on gfx950, "
    "against up to 232,448 on Hopper), with a size of its own per target"
)


def _over(code: Code, what: str, size: int, at: int, severity: Severity = "error") -> Iterator[SourceHazard]:
    if size > _LEAST_LDS:
        said = f"{what}: {size:,} bytes of shared memory, more than a workgroup of this target can have"
        yield code.hazard("shared-memory", severity, said, at, _FIX, f"lds<{size}")


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
                remedy = "compare the number with hipDeviceAttributeMaxSharedMemoryPerBlock before the launch; " + _FIX
                yield code.hazard("shared-memory", "unknown", what, at, remedy)
            else:
                yield from _over(code, "an opt-in", size, at)


def _launches(code: Code) -> Iterator[SourceHazard]:
    for at, given in launches(code):
        if code.text(at) == "<<<" and len(given) > 2:
            size = code.value(given[2], at, through_variables=True)
            yield from _over(code, "this launch", size or 0, at)


def _constants(code: Code) -> Iterator[SourceHazard]:
    """`constexpr int kSmemBytes = 99 * 1024`: a budget made for NVIDIA."""
    for name, declarations in code.declarations.items():
        for declaration in declarations if _SIZE_NAME.search(name) else ():
            size = code.value(declaration.value, declaration.at)
            constant = {"const", "constexpr"} & set(declaration.words)
            if constant and size is not None and _LEAST_LDS < size <= _MOST_PLAUSIBLE:
                yield from _over(code, f"{name} is a budget", size, declaration.at, "unknown")


SHARED_RULES = (_static, _opt_ins, _launches, _constants)

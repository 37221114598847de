"""Shared memory: static arrays, opt-ins and launches against the local memory that a workgroup of the target has."""

import re
from collections.abc import Iterator, Mapping, Sequence

from crosstie.core.finding import Severity
from crosstie_port.source.code import Code, Function, skip_angles, template_of
from crosstie_port.source.hazard import SourceHazard
from crosstie_port.source.launches import launches
from crosstie_port.source.lexer import CppToken, Value, arguments, closing, size_of, statements, until

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
        best = max(sum(_sizes(code, places, binding).values()) for binding in _bindings(code, function))
        if best > _LEAST_LDS:
            plain = _sizes(code, places, {})
            name = function.name if function else "this file"
            yield from _over(code, f"the arrays of {name}", best, max(plain, key=lambda at: plain[at]))


def _sizes(code: Code, places: Sequence[int], binding: Mapping[str, int]) -> dict[int, int]:
    """Bytes of what is declared at each place, 0 where that is not known."""
    return {at: _bytes(code, until(code.tokens, at + 1, (";", "{")), at, binding) or 0 for at in places}


def _bytes(code: Code, statement: Sequence[CppToken], at: int, binding: Mapping[str, int]) -> Value:
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
        if following == "<" and (after := skip_angles(statement, index + 1)) > index + 1:
            words += [token.text for token in statement[index:after]]
            index = after
            continue
        words.append(text)
        index += 1
    element = binding.get(words[-1]) if words and words[-1] in binding else size_of(words)
    if element is None and words:
        element = _structure(code, statement[:index], at, binding)
    if element is None:
        return None
    total = 0
    for declarator in arguments(statement[index:]):
        elements = _elements(code, declarator, at, binding)
        if elements is None:
            return None
        total += elements * element
    return total


def _structure(code: Code, kind: Sequence[CppToken], at: int, binding: Mapping[str, int]) -> Value:
    """The bytes of a structure of plain members that the file defines, without padding: `Tile`, `Tile<float, 64>`."""
    tokens = code.tokens
    angle = next((index for index, token in enumerate(kind) if token.text == "<"), len(kind))
    name = kind[angle - 1].text if angle else ""
    for place in code.names.get(name, ()):
        if code.text(place - 1) not in ("struct", "union") or code.text(place + 1) != "{" or place >= at:
            continue
        end = closing(tokens, place + 1)
        bound = {**binding, **_given(code, template_of(tokens, place), kind[angle + 1 : -1], at, binding)}
        sizes = [_bytes(code, statement, place, bound) for statement in statements(tokens[place + 2 : end])[:-1]]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        return max(known, default=0) if tokens[place - 1].text == "union" else sum(known)
    return None


def _given(
    code: Code, template: Sequence[tuple[str, object]], kinds: Sequence[CppToken], at: int, binding: Mapping[str, int]
) -> dict[str, int]:
    """What the parameters of a template become between its angle brackets: numbers, and types by their bytes."""
    found: dict[str, int] = {}
    for (parameter, _), given in zip(template, arguments(kinds), strict=False):
        value = code.value(given, at, binding)
        size = size_of([token.text for token in given]) if value is None else value
        if size is not None:
            found[parameter] = size
    return found


def _elements(code: Code, declarator: Sequence[CppToken], at: int, binding: Mapping[str, int]) -> Value:
    elements, index = 1, 1
    while index < len(declarator) and declarator[index].text == "[":
        end = closing(declarator, index)
        inside = declarator[index + 1 : end]
        value = code.value(inside, at, binding)
        if value is None:
            return None
        elements *= value
        index = end + 1
    return elements


def _bindings(code: Code, function: Function | None) -> list[dict[str, int]]:
    """What a template's parameters may be: its defaults, and what the file instantiates it with."""
    if function is None or not function.template:
        return [{}]
    defaults: dict[str, int] = {}
    for name, default in function.template:
        value = code.value(default, function.start) if default else None
        if value is not None:
            defaults[name] = value
    found = [defaults]
    for at in code.names.get(function.name, ()):
        if code.text(at + 1) == "<":
            kinds = code.tokens[at + 2 : max(skip_angles(code.tokens, at + 1) - 1, at + 2)]
            found.append({**defaults, **_given(code, function.template, kinds, at, {})})
    return found


def _opt_ins(code: Code) -> Iterator[SourceHazard]:
    for name in _OPT_IN_NAMES:
        for at in code.names.get(name, ()):
            if code.text(at + 1) != ",":
                continue
            size = _run_time(code, until(code.tokens, at + 2, (",",)), at)
            if size is None and code.is_for_amd(at):
                continue
            if size is None:
                what = "more shared memory than the default is asked for, and how much is known only at run time"
                remedy = "compare the number with hipDeviceAttributeMaxSharedMemoryPerBlock before the launch; " + _FIX
                yield code.hazard("shared-memory", "unknown", what, at, remedy)
            else:
                yield from _over(code, "an opt-in", size, at)


def _run_time(code: Code, tokens: Sequence[CppToken], at: int) -> Value:
    return code.value(_with_sizes(code, tokens, at), at, through_variables=True)


def _with_sizes(code: Code, tokens: Sequence[CppToken], at: int) -> list[CppToken]:
    """The same with `sizeof(Storage)` as a number, where Storage is a structure of the file."""
    cpp_tokens: list[CppToken] = []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        if [cpp_token.text for cpp_token in tokens[index : index + 2]] == ["sizeof", "("]:
            end = closing(tokens, index + 1)
            size = _structure(code, tokens[index + 2 : end], at, {})
            if size is not None:
                token, index = CppToken("number", str(size), token.line), end
        cpp_tokens.append(token)
        index += 1
    return cpp_tokens


def _launches(code: Code) -> Iterator[SourceHazard]:
    for at, given in launches(code):
        size = _run_time(code, given[2], at) if code.text(at) == "<<<" and len(given) > 2 else None
        if size is not None:
            yield from _over(code, "this launch", size, at)


def _constants(code: Code) -> Iterator[SourceHazard]:
    """`constexpr int kSmemBytes = 99 * 1024`: a budget made for NVIDIA."""
    for name, declarations in code.declarations.items():
        for declaration in declarations if _SIZE_NAME.search(name) else ():
            size = code.value(declaration.value, declaration.at)
            constant = {"const", "constexpr"} & set(declaration.words)
            if constant and size is not None and _LEAST_LDS < size <= _MOST_PLAUSIBLE:
                yield from _over(code, f"{name} is a budget", size, declaration.at, "unknown")


SHARED_RULES = (_static, _opt_ins, _launches, _constants)

"""Shared memory: static arrays, opt-ins and launches against the local memory that a workgroup of the target has."""

import re
from collections.abc import Iterator, Mapping, Sequence

from crosstie.port.source.code import Code, Function, skip_angles, template_of
from crosstie.port.source.hazard import SourceHazard
from crosstie.port.source.lexer import CppToken, Value, arguments, closing, evaluate, size_of

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


def shared_hazards(code: Code) -> Iterator[SourceHazard]:
    yield from _static(code)
    yield from _opt_ins(code)
    yield from _launches(code)
    yield from _constants(code)


def _over(code: Code, what: str, size: int, at: int, severity: str = "error") -> Iterator[SourceHazard]:
    if size > _LEAST_LDS:
        said = f"{what}: {size:,} bytes of shared memory, more than a workgroup of this target can have"
        hazard = code.hazard("shared-memory", severity, said, at, _FIX, f"lds<{size}")
        yield hazard


def _static(code: Code) -> Iterator[SourceHazard]:
    by_function: dict[int, list[tuple[int, Sequence[CppToken]]]] = {}
    for at in code.names.get("__shared__", ()):
        if at and code.tokens[at - 1].text == "extern":
            continue
        function = code.function(at)
        by_function.setdefault(function.start if function else -1, []).append((at, _statement(code.tokens, at)))
    for start, statements in by_function.items():
        function = next((one for one in code.functions if one.start == start), None)
        best = max((_total(code, statements, binding) for binding in _bindings(code, function)), default=0)
        if best > _LEAST_LDS:
            at = max(statements, key=lambda one: _bytes(code, one[1], one[0], {}) or 0)[0]
            name = function.name if function else "this file"
            yield from _over(code, f"the arrays of {name}", best, at)


def _total(code: Code, statements: Sequence[tuple[int, Sequence[CppToken]]], binding: Mapping[str, int]) -> int:
    return sum(_bytes(code, statement, at, binding) or 0 for at, statement in statements)


def _statement(tokens: Sequence[CppToken], at: int) -> Sequence[CppToken]:
    for index in range(at + 1, min(len(tokens), at + 200)):
        if tokens[index].text in (";", "{") and tokens[index].kind == "sign":
            return tokens[at + 1 : index]
    return ()


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
        if place == 0 or tokens[place - 1].text not in ("struct", "union") or place + 1 >= len(tokens):
            continue
        if tokens[place + 1].text != "{" or place >= at:
            continue
        end = closing(tokens, place + 1)
        bound = dict(binding)
        for (parameter, _), given in zip(template_of(tokens, place), arguments(kind[angle + 1 : -1]), strict=False):
            value = _with(code, given, at, binding)
            size = size_of([token.text for token in given]) if value is None else value
            if size is not None:
                bound[parameter] = size
        sizes: list[int] = []
        start = place + 2
        for index in range(start, end):
            if tokens[index].text == ";":
                size = _bytes(code, tokens[start:index], place, bound)
                if size is None:
                    return None
                sizes.append(size)
                start = index + 1
        return max(sizes, default=0) if tokens[place - 1].text == "union" else sum(sizes)
    return None


def _elements(code: Code, declarator: Sequence[CppToken], at: int, binding: Mapping[str, int]) -> Value:
    elements, index = 1, 1
    while index < len(declarator) and declarator[index].text == "[":
        end = closing(declarator, index)
        inside = declarator[index + 1 : end]
        value = _with(code, inside, at, binding)
        if value is None:
            return None
        elements *= value
        index = end + 1
    return elements


def _with(code: Code, tokens: Sequence[CppToken], at: int, binding: Mapping[str, int]) -> Value:
    def named(name: str) -> Value:
        if name in binding:
            return binding[name]
        declaration = code.declared(name, at)
        if declaration is not None:
            constant = {"const", "constexpr"} & set(declaration.words)
            return _with(code, declaration.value, declaration.at, binding) if constant else None
        return code.project.constant(name, code.path)

    return evaluate(tokens, named)


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
        if at + 1 < len(code.tokens) and code.tokens[at + 1].text == "<":
            end = skip_angles(code.tokens, at + 1)
            bound = dict(defaults)
            for (name, _), given in zip(
                function.template, arguments(code.tokens[at + 2 : max(end - 1, at + 2)]), strict=False
            ):
                value = code.value(given, at)
                size = size_of([token.text for token in given]) if value is None else value
                if size is not None:
                    bound[name] = size
            found.append(bound)
    return found


def _opt_ins(code: Code) -> Iterator[SourceHazard]:
    for name in _OPT_IN_NAMES:
        for at in code.names.get(name, ()):
            if at + 1 >= len(code.tokens) or code.tokens[at + 1].text != ",":
                continue
            size = _given_after(code, at)
            if size is None and code.is_for_amd(at):
                continue
            if size is None:
                what = "more shared memory than the default is asked for, and how much is known only at run time"
                remedy = "compare the number with hipDeviceAttributeMaxSharedMemoryPerBlock before the launch; " + _FIX
                yield code.hazard("shared-memory", "unknown", what, at, remedy)
            else:
                yield from _over(code, "an opt-in", size, at)


def _given_after(code: Code, at: int) -> Value:
    """The argument behind the attribute's name."""
    tokens = code.tokens
    depth = 0
    for index in range(at + 2, min(len(tokens), at + 80)):
        text = tokens[index].text
        if text in ("(", "[", "{"):
            depth += 1
        elif text in (")", "]", "}"):
            depth -= 1
            if depth < 0:
                return _run_time(code, tokens[at + 2 : index], at)
        elif text == "," and depth == 0:
            return _run_time(code, tokens[at + 2 : index], at)
    return None


def _run_time(code: Code, tokens: Sequence[CppToken], at: int) -> Value:
    """Also through a variable that is set once where it is declared: `int smem = 96 * 1024;`."""

    def named(name: str) -> Value:
        declaration = code.declared(name, at)
        if declaration is not None:
            return code.value(declaration.value, declaration.at) if declaration.value else None
        return code.project.constant(name, code.path)

    return evaluate(_with_sizes(code, tokens, at), named)


def _with_sizes(code: Code, tokens: Sequence[CppToken], at: int) -> list[CppToken]:
    """The same with `sizeof(Storage)` as a number, where Storage is a structure of the file."""
    found: list[CppToken] = []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        following = tokens[index + 1].text if index + 1 < len(tokens) else ""
        if token.text == "sizeof" and following == "(":
            end = closing(tokens, index + 1)
            size = _structure(code, tokens[index + 2 : end], at, {})
            if size is not None:
                found.append(CppToken("number", str(size), token.line))
                index = end + 1
                continue
        found.append(token)
        index += 1
    return found


def _launches(code: Code) -> Iterator[SourceHazard]:
    tokens = code.tokens
    for at, token in enumerate(tokens):
        if token.text != "<<<":
            continue
        end = next((i for i in range(at, min(len(tokens), at + 200)) if tokens[i].text == ">>>"), None)
        if end is None:
            continue
        given = arguments(tokens[at + 1 : end])
        size = _run_time(code, given[2], at) if len(given) > 2 else None
        if size is not None:
            yield from _over(code, "this launch", size, at)


def _constants(code: Code) -> Iterator[SourceHazard]:
    """`constexpr int kSmemBytes = 99 * 1024`: a budget made for NVIDIA."""
    for name, found in code.declarations.items():
        if not _SIZE_NAME.search(name):
            continue
        for one in found:
            if not {"const", "constexpr"} & set(one.words) or not one.value:
                continue
            size = code.value(one.value, one.at)
            if size is not None and _LEAST_LDS < size <= _MOST_PLAUSIBLE:
                yield from _over(code, f"{name} is a budget", size, one.at, "unknown")

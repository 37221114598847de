"""What nvcc's headers and compiler take and HIP's refuse: overloads that are missing or there twice, clang's rules."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from crosstie_port.source.code import Code, Function
from crosstie_port.source.hazard import SourceHazard
from crosstie_port.source.lexer import CppToken, arguments, closing

_HALVES = ("half", "__half", "half2", "__half2", "__nv_bfloat16", "nv_bfloat16", "__nv_bfloat162", "nv_bfloat162")
_BFLOAT = re.compile(r"(?i)bf(?:loat)?_?(?:16|2)|bfloat|^bf")
_OWN_ADD = re.compile(r"\batomicAdd\s*\(\s*(?:__)?(?:half2?|nv_bfloat16\w*)\s*\*")
_DOUBLED = {"atomicAdd": ("double",), "atomicMax": ("float", "double"), "atomicMin": ("float", "double")}
_QUALIFIERS = frozenset({
    "__device__", "__host__", "__forceinline__", "__inline__", "__noinline__", "inline", "static", "constexpr",
    "extern", "const", "void", "friend", "virtual", "explicit", "template", "typename", ">", "<", ",", "::",
    "__global__",
})  # fmt: skip
_LEAVES = frozenset({
    "return", "throw", "asm", "__trap", "abort", "__builtin_unreachable", "__asm__", "goto", "assert", "static_assert",
})  # fmt: skip


def _missing(code: Code) -> Iterator[SourceHazard]:
    """atomicAdd of half and bfloat16, one or two of them."""
    for at, given in code.calls("atomicAdd"):
        kind = _kind(code, given[0], at) if given else ""
        if kind in _HALVES and not code.is_for_amd(at) and not code.project.sees(code.path, _OWN_ADD):
            what = f"HIP's headers have no atomicAdd of {kind} (looked up in ROCm 6.3)"
            remedy = (
                "use unsafeAtomicAdd where the target has it, or a loop of atomicCAS over 32 bits under #ifdef USE_ROCM"
            )
            yield code.hazard("overload", "error", what, at, remedy)


def _pairs(code: Code) -> Iterator[SourceHazard]:
    """__hmax2 and its like: of bfloat16 they are there."""
    for name, at, given in code.foreign_calls(("__hmax2", "__hmin2", "__hmax2_nan", "__hmin2_nan")):
        words = [token.text for one in given for token in one if token.kind == "name"]
        declared = [one for word in words for one in (code.type_of(word, at),) if one]
        if not any(_BFLOAT.search(word) for word in (*words, *declared)):
            what = f"HIP's headers have {name} for bfloat16 alone, not for half2 (looked up in ROCm 6.3)"
            remedy = "make it of __hmax or __hmin on __low2half and __high2half under #ifdef USE_ROCM"
            yield code.hazard("overload", "error", what, at, remedy)


def _kind(code: Code, pointer: Sequence[CppToken], at: int) -> str:
    """The type that a pointer points to: by a cast in it, or where its name was declared."""
    for token, star in pairwise(pointer):
        if token.text in _HALVES and star.text == "*":
            return token.text
    names = [token.text for token in pointer if token.kind == "name"]
    simple = all(token.kind != "sign" or token.text in ("+", "&", "[", "]") for token in pointer)
    return code.points_to(names[0], at) if names and simple else ""


def _doubled(code: Code) -> Iterator[SourceHazard]:
    """The project's own atomicMax of a float, which HIP has as well."""
    for function in code.functions:
        kinds = _DOUBLED.get(function.name, ())
        if not kinds or "__device__" not in function.returns or function.template or code.parameters:
            continue
        at = function.head
        given = arguments(code.tokens[at + 2 : closing(code.tokens, at + 1)]) if code.text(at + 1) == "(" else []
        words = [token.text for token in given[0]] if given else []
        kind = next((one for one in kinds if one in words), "")
        if kind and "*" in words and not code.is_side_for_amd(at) and _is_global(code.tokens, at):
            what = f"HIP has {function.name}({kind}*) itself, so this is there twice"
            yield code.hazard("overload", "error", what, at, "leave it out on ROCm: #ifndef USE_ROCM around it")


def _is_global(tokens: Sequence[CppToken], at: int) -> bool:
    """Outside of namespaces and classes, where it would hide HIP's."""
    depth = sum({"{": 1, "}": -1}.get(token.text, 0) for token in tokens[:at] if token.kind == "sign")
    return depth <= 0


def _dependent(code: Code) -> Iterator[SourceHazard]:
    """`Traits::BlockLoadT(storage).Load(...)` in a template of Traits."""
    tokens = code.tokens
    for at, token in enumerate(tokens):
        if token.text != "::" or code.text(at + 2) != "(" or code.text(at - 2) in ("typename", "::", "new"):
            continue
        function = code.function(at)
        if function is None or code.text(at - 1) not in {name for name, _ in function.template}:
            continue
        end = closing(tokens, at + 2)
        if code.text(end + 1) == "." and code.project.declares_type(code.text(at + 1)):
            what = f"{code.text(at - 1)}::{code.text(at + 1)} is a type of a template: clang must be told so"
            yield code.hazard("clang-strictness", "error", what, at, "write typename before it")


def _returns(code: Code) -> Iterator[SourceHazard]:
    """A device function with a result and no return: clang takes its end for unreachable and drops what follows."""
    for function in code.functions:
        if "__device__" in function.returns and _has_result(function) and not code.parameters:
            inside = {token.text for token in code.tokens[function.start : function.end]}
            if inside.isdisjoint(_LEAVES) and function.end > function.start + 1:
                what = f"{function.name} has a result and no return: clang takes its end for unreachable"
                yield code.hazard("clang-strictness", "error", what, function.head, "return a value, or make it void")


def _has_result(function: Function) -> bool:
    """By the word before its name: a type, where there is one."""
    before = function.returns[0] if function.returns else ""
    is_type = re.match(r"^[A-Za-z]\w*$", before) and before not in _QUALIFIERS
    return bool(is_type) and (not before.isupper() or len(before) == 1)


STRICT_RULES = (_missing, _pairs, _doubled, _dependent, _returns)

"""What nvcc's headers and compiler take and HIP's refuse: overloads that are missing or there twice, clang's rules."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from crosstie.core.finding import Severity
from crosstie_port.source.code import Code, Function
from crosstie_port.source.hazard import SourceHazard
from crosstie_port.source.lanes import in_constant
from crosstie_port.source.lexer import CppToken, arguments, closing

_HALVES = ("half", "__half", "half2", "__half2", "__nv_bfloat16", "nv_bfloat16", "__nv_bfloat162", "nv_bfloat162")
_BFLOAT = re.compile(r"(?i)bf(?:loat)?_?(?:16|2)|bfloat|^bf")
_OWN_ADD = re.compile(r"\batomicAdd\s*\(\s*(?:__)?(?:half2?|nv_bfloat16\w*)\s*\*")
_EXTREMES = ("min", "max")
# CUDA has none of these; HIP's headers do, of unsigned long also for the rest of the atomics.
_DOUBLED = {
    "atomicAdd": ("double", "unsigned long"), "atomicCAS": ("unsigned long",), "atomicExch": ("unsigned long",),
    "atomicMax": ("float", "double", "unsigned long"), "atomicMin": ("float", "double", "unsigned long"),
}  # fmt: skip
_QUALIFIERS = frozenset({
    "__device__", "__host__", "__forceinline__", "__inline__", "__noinline__", "inline", "static", "constexpr",
    "extern", "const", "void", "friend", "virtual", "explicit", "template", "typename", ">", "<", ",", "::",
    "__global__",
})  # fmt: skip
_LEAVES = frozenset({
    "return", "throw", "asm", "__trap", "abort", "__builtin_unreachable", "__asm__", "goto", "assert", "static_assert",
})  # fmt: skip
_VECTORS = frozenset(
    f"{kind}{width}" for kind in ("float", "double", "int", "uint", "short", "ushort", "char", "uchar", "long", "ulong")
    for width in (1, 2, 3, 4)
)  # fmt: skip
_SINCE_HCC = {"__HIP_PLATFORM_AMD__", "USE_ROCM", "__HIPCC__", "__HIP__"}
_DEVICE_WORD = re.compile(r"(?i)device|global__|kernel|(?:^|_)hd(?:_|$)")
_TAKES_LOCK = {"atomicCAS", "atomicExch"}
# One thread alone comes so far: `if (threadIdx.x == 0)`.
_ELECTS = re.compile(r"(?i)\b(?:threadIdx \. x|\w*(?:lane|tid|rank|thread)\w*(?: \( \))?) == 0")
_DEVICE_FILES = (".cu", ".cuh", ".hip", ".inl")


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


def _compute_types(code: Code) -> Iterator[SourceHazard]:
    """The next to last of what cublasGemmEx is given: cuBLAS takes a data type there as well."""
    for _, at, given in code.foreign_calls(("cublasGemmEx", "cublasGemmBatchedEx", "cublasGemmStridedBatchedEx")):
        names = [token.text for token in given[-2] if token.kind == "name"] if len(given) > 2 else []
        if any(name.startswith("CUDA_R_") or code.type_of(name, at).startswith("cudaDataType") for name in names):
            what = f"hipBLAS takes a hipblasComputeType_t where this gives {names[0]}, a type of data"
            yield code.hazard("overload", "error", what, at, "give a cublasComputeType_t, such as CUBLAS_COMPUTE_32F")


def _pairs(code: Code) -> Iterator[SourceHazard]:
    """__hmax2 and its like: of bfloat16 they are there."""
    for name, at, given in code.foreign_calls(("__hmax2", "__hmin2", "__hmax2_nan", "__hmin2_nan")):
        words = [token.text for tokens in given for token in tokens if token.kind == "name"]
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


def _own(code: Code) -> Iterator[SourceHazard]:
    """The project's own atomicMax of a float, which HIP has as well; its template `max(T, T)` beside HIP's."""
    for function in code.functions if not code.parameters else ():
        at = function.head
        given = arguments(code.tokens[at + 2 : closing(code.tokens, at + 1)]) if code.text(at + 1) == "(" else []
        words = [token.text for token in given[0] if token.text != "volatile"] if given else []
        pointed = " ".join(words[: words.index("*")]) if "*" in words else ""
        kind = pointed if pointed in _DOUBLED.get(function.name, ()) else ""
        is_twice, is_beside = bool(kind) and not function.template, function.name in _EXTREMES and function.template
        if "__device__" not in function.returns or not (is_twice or is_beside):
            continue
        if not code.is_side_for_amd(at) and _is_global(code.tokens, at):
            says = f"HIP has {function.name}({kind}*) itself, so this is there twice"
            beside = f"a {function.name} of the project's own stands beside HIP's, so a call of it may be ambiguous"
            severity: Severity = "error" if is_twice else "unknown"
            remedy = "leave it out on ROCm: #ifndef USE_ROCM around it"
            yield code.hazard("overload", severity, says if is_twice else beside, at, remedy)


def _loads(code: Code) -> Iterator[SourceHazard]:
    """`__ldg` of a template's type: HIP has it for numbers, vectors and half, not for every type of PyTorch."""
    for _, at, given in code.foreign_calls(("__ldg",)):
        function = code.function(at)
        kinds = {name for name, _ in function.template} if function else set()
        names = [token.text for token in given[0] if token.kind == "name"] if given else []
        if names and (names[0] in kinds or code.points_to(names[0], at) in kinds):
            what = f"__ldg of {names[0]}, of a template's type: HIP has none of at::Half, c10::BFloat16 and its like"
            yield code.hazard("overload", "unknown", what, at, "read it plainly on ROCm, where __ldg is no other load")


def _device_members(code: Code) -> Iterator[SourceHazard]:
    """A destructor or an iterator's ++ for the device alone: containers and thrust call them on the host as well."""
    tokens, told = code.tokens, set[str]()
    for at, token in enumerate(tokens):
        named = tokens[at - 1].text if token.text == "operator" and code.text(at + 1) == "++" else ""
        kind = code.text(at + 1) if token.text == "~" and code.text(at + 2) == "(" else code.text(at - 2)
        if token.text == "~" or named in ("&", "*"):
            words = [cpp_token.text for cpp_token in tokens[max(0, at - 5) : at]]
            alone = "__device__" in words and "__host__" not in words
            if alone and kind not in told and not code.is_side_for_amd(at):
                told.add(kind)
                made = (one for one in code.names.get(kind, ()) if code.text(one - 1) == "__device__")
                what = f"members of {kind} are for the device alone: clang refuses what uses them on the host"
                remedy = "declare them __host__ __device__"
                yield code.hazard("clang-strictness", "unknown", what, next(made, at), remedy)


def _is_global(tokens: Sequence[CppToken], at: int) -> bool:
    """Outside of namespaces and classes, where it would hide HIP's."""
    depth = sum({"{": 1, "}": -1}.get(token.text, 0) for token in tokens[:at] if token.kind == "sign")
    return depth <= 0


def _returns(code: Code) -> Iterator[SourceHazard]:
    """A device function with a result and no return: clang takes its end for unreachable and drops what follows."""
    for function in code.functions:
        if "__device__" in function.returns and _has_result(function) and not code.parameters:
            inside = {token.text for token in code.tokens[function.start : function.end]}
            if function.end > function.start + 1 and not _leaves(code, inside):
                what = f"{function.name} has a result and no return: clang takes its end for unreachable"
                yield code.hazard("clang-strictness", "error", what, function.head, "return a value, or make it void")


def _leaves(code: Code, inside: set[str]) -> bool:
    """Whether any word returns or ends the thread: itself, by its macro, or as a function that says noreturn."""
    bodies = (definition.body for word in inside for definition in code.project.definitions(word, code.path))
    words = inside.union(*({token.text for token in body} for body in bodies))
    if words & _LEAVES:
        return True
    called = "|".join(re.escape(word) for word in words if re.match(r"[A-Za-z_]\w*$", word))
    return code.project.sees(code.path, re.compile(rf"noreturn[^;{{}}]*\b(?:{called})\s*\("))


def _braced(code: Code) -> Iterator[SourceHazard]:
    """`float3 v = {x, y};`, `int4 a[4] = {0};`: HIP's vectors have constructors, an explicit one of a single value."""
    for kind in _VECTORS & code.names.keys():
        width = int(kind[-1])
        for at in code.names[kind] if width > 1 else ():
            behind = at + 2
            while code.text(behind) == "[":
                behind = closing(code.tokens, behind) + 1
            copied = code.text(behind) == "="
            if code.text(behind + copied) != "{" or code.tokens[at + 1].kind != "name":
                continue
            given = arguments(code.tokens[behind + copied + 1 : closing(code.tokens, behind + copied)])
            is_array, plain = behind > at + 2, [tokens for tokens in given if all(map(_is_plain, tokens))]
            if is_array and copied and plain and len(plain) == len(given):
                what = f"numbers in braces for an array of {kind}: HIP's constructor of one value is explicit"
                yield code.hazard("clang-strictness", "error", what, at, f"write make_{kind}(...) for each element")
            elif not is_array and 0 < len(given) < width and (plain or len(given) > 1):
                filled = len(given) == 1 and not copied
                says = "fills all of them in HIP" if filled else "HIP's constructors refuse"
                what = f"{len(given)} of {width} values in the braces of a {kind}, which {says}"
                severity: Severity = "unknown" if filled else "error"
                yield code.hazard("clang-strictness", severity, what, at, f"write all {width} values, or empty braces")


def _is_plain(token: CppToken) -> bool:
    """No call or element, which may be a vector itself."""
    return token.kind == "number" or token.text in ("-", "+")


def _pointers(code: Code) -> Iterator[SourceHazard]:
    """CUDA has these calls as templates of the pointer as well, HIP has them of void** alone."""
    for name, at, given in code.foreign_calls(("cudaHostGetDevicePointer", "cudaMallocPitch")):
        if len(given) > 1 and len(given[0]) == 2 and given[0][0].text == "&":
            kind = code.points_to(given[0][1].text, at)
            if kind != "void":
                sure: Severity = "error" if kind else "unknown"
                what = f"HIP's {name} takes void** alone, which a pointer to {kind or 'another type'} is not"
                remedy = f"write reinterpret_cast<void**>(&{given[0][1].text})"
                yield code.hazard("overload", sure, what, at, remedy)


def _standard(code: Code) -> Iterator[SourceHazard]:
    """What nvcc takes of the standard library in device code, by --expt-relaxed-constexpr or anyway."""
    arrays = code.project.arrays(code.path)
    for at in code.names.get("at", ()):
        array = code.text(at - 2)
        if code.text(at - 1) in (".", "->") and array in arrays and _on_device(code, at):
            what = f"{array}.at() throws where it is out of range, by a function of the host's"
            yield code.hazard("clang-strictness", "error", what, at, "index it with []")
    for at in _of_std(code, "array", "tuple", "pair"):
        named = code.tokens[at + 1].kind == "name"
        if code.text(at + 1 + named) in ("{", "(", "=") and _on_device(code, at):
            what = "arguments of a template are deduced: to clang before December 2025 the guide is the host's"
            yield code.hazard("clang-strictness", "unknown", what, at, "write them out: std::tuple<int, int>(a, b)")
    for at in _of_std(code, "clamp"):
        if code.text(at + 1) == "(" and _on_device(code, at):
            what = "std::clamp asserts its bounds by a function of the host's where libstdc++ does (GCC 14 and later)"
            yield code.hazard("clang-strictness", "unknown", what, at, "write a < lo ? lo : a > hi ? hi : a")
    for at in _of_std(code, "min", "max") if code.path.endswith(_DEVICE_FILES) else ():
        if in_constant(code.tokens, at):
            what = f"std::{code.text(at)} in a constant: HIP puts its own before the standard's, and ports wrote it out"
            yield code.hazard("clang-strictness", "unknown", what, at, "write a < b ? a : b, or a constexpr function")


def _of_std(code: Code, *names: str) -> Iterator[int]:
    for at in (at for name in names for at in code.names.get(name, ())):
        if code.text(at - 1) == "::" and code.text(at - 2) == "std" and at + 1 < len(code.tokens):
            yield at


def _on_device(code: Code, at: int) -> bool:
    function = code.function(at)
    return function is not None and any(_DEVICE_WORD.search(word) for word in function.returns)


def switched(code: Code) -> Iterator[SourceHazard]:
    """`#undef __CUDA_NO_HALF_OPERATORS__`, of which HIP's headers have their own; a macro that HIP no longer sets."""
    unit = code.project.units[code.path]
    for one in unit.directives:
        if unit.is_dead(one.line):
            continue
        names = {token.text for token in one.tokens}
        if one.word == "undef" and one.name.startswith("__CUDA_NO_HALF") and "__HIP_NO_HALF" not in unit.text:
            what = f"{one.name} is nvcc's: PyTorch's builds for ROCm set __HIP_NO_HALF_OPERATORS__ and _CONVERSIONS__"
            yield code.line_hazard("half-flags", "setting", what, one.line, "undefine those of HIP as well")
        elif one.word != "define" and "__HIP_PLATFORM_HCC__" in names and names.isdisjoint(_SINCE_HCC):
            what = (
                "HIP does not define __HIP_PLATFORM_HCC__ since ROCm 6: unless the build does, this takes NVIDIA's side"
            )
            yield code.line_hazard("architecture-macro", "unknown", what, one.line, "ask for __HIP_PLATFORM_AMD__")


def _spins(code: Code) -> Iterator[SourceHazard]:
    """`while (atomicCAS(lock, 0, 1));`, `if (lock.try_lock())`: the lane that holds the lock stands where its wavefront
    comes together again, and waits there for lanes that wait for the lock."""
    waits = [at for at, _ in code.calls("try_lock") if code.text(at - 1) in (".", "->")]
    for at in code.names.get("while", ()):
        if code.text(at + 1) != "(":
            # Prose of a template or a file that is no C++.
            continue
        end = closing(code.tokens, at + 1)
        asked = {token.text for token in code.tokens[at + 2 : end]}
        inside = code.tokens[end + 2 : closing(code.tokens, end + 1)] if code.text(end + 1) == "{" else []
        if not asked.isdisjoint(_TAKES_LOCK) and (inside or code.text(end + 1) in (";", "{")):
            waits += [at] if all(token.kind != "name" or token.text == "__nanosleep" for token in inside) else []
    for at in waits:
        function = code.function(at)
        if function is not None and _on_device(code, at) and not code.is_for_amd(at):
            before = " ".join(token.text for token in code.tokens[function.start : at])
            if not _ELECTS.search(before):
                what = "lanes of one wavefront may wait here for a lock that another holds: AMD's lanes step together"
                remedy = "let lanes take it in turns, by the bits of __ballot(true), or one lane of each wavefront"
                yield code.hazard("lane-spin", "unknown", what, at, remedy)


def _has_result(function: Function) -> bool:
    """By the word before its name: a type, where there is one."""
    before = function.returns[0] if function.returns else ""
    is_type = re.match(r"^[A-Za-z]\w*$", before) and before not in _QUALIFIERS
    return bool(is_type) and (not before.isupper() or len(before) == 1)


STRICT_RULES = (
    _missing, _compute_types, _pairs, _own, _loads, _device_members, _returns, _standard,
    _braced, _pointers, _spins,
)  # fmt: skip

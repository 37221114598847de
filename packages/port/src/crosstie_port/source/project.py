"""All C++ files of a tree together: macros and constants across includes, seen as a build for ROCm sees them.

Which lines such a build compiles: preprocessor conditions under the macros that it has. A condition is true, false or
open. Only what is certainly false is left out; both sides of an open one are read.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from pathlib import PurePosixPath

import msgspec

from crosstie_port.source.lexer import CppToken, Directive, Names, Value, evaluate, lex

# Macros of NVIDIA's compiler and headers, which a build for ROCm lacks. __CUDACC__ is not among them: HIPIFY makes
# __HIPCC__ of it.
NVIDIA_ONLY = frozenset({
    "__CUDA_ARCH__", "__NVCC__", "__CUDACC_VER_MAJOR__", "__CUDACC_VER_MINOR__", "CUDART_VERSION",
    "__HIP_PLATFORM_NVIDIA__", "__HIP_PLATFORM_NVCC__", "__CUDA_ARCH_FEAT_SM90_ALL", "__CUDA_ARCH_SPECIFIC__",
    "__CUDA_ARCH_FAMILY_SPECIFIC__", "__CUDA_ARCH_FEAT_SM100_ALL", "__CUDACC_RTC__",
})  # fmt: skip
# What programs set that read code and build none, other systems, and other makers' compilers.
_ELSEWHERE = re.compile(
    r"(?i)(?:^|_)(?:clion_ide|jetbrains_ide|intellisense|cdt_parser|eclipse|clang_analyzer|doxygen|win32|win64|msc_ver|apple"
    r"|musa|musacc|xpu|sycl|npu|ascend|cann|maca|metax|dtk|mlu|bang|iluvatar|corex|gcu|supa)(?:_|$)"
)
_PRESENT = {"__clang__": 1, "__linux__": 1, "__GNUC__": 4, "__HIPCC__": 1, "__HIP__": 1, "USE_ROCM": 1}
_COMPILERS = {"__clang__", "__linux__", "__GNUC__"}
# Of ROCm 7.2. HIPIFY makes TORCH_HIP_VERSION of CUDA_VERSION, which is less than any release of CUDA that is asked for.
_VALUES = {
    "CUDA_VERSION": 702, "TORCH_HIP_VERSION": 702, "HIP_VERSION": 70_200_000, "HIP_VERSION_MAJOR": 7,
    "HIP_VERSION_MINOR": 2, "ROCM_VERSION": 70_200, "ROCM_VERSION_MAJOR": 7, "ROCM_VERSION_MINOR": 2,
}  # fmt: skip
# Present in one pass of the compiler or on one chip only: open.
_OPEN = re.compile(r"(?i)^(__gfx.*|__hip_device_compile__|__amdgcn.*|__amdgpu.*)$")
_TARGET = re.compile(r"(?i)__(?:gfx|hip_device_compile__|amdgcn|amdgpu)")
# What the pass over device code has of them, by the targets that a hazard concerns.
_WAVE64 = {"__GFX9__": True, "__GFX10__": False, "__GFX11__": False, "__GFX12__": False}
_PASSES = {"wave64": _WAVE64, "fnuz": {**_WAVE64, "__gfx942__": True, "__gfx950__": False}}
# What projects call their own switch: VLLM_USE_ROCM, PADDLE_WITH_HIP, TORCH_HIP_VERSION, __HIP_PLATFORM_AMD__. A name
# that goes on with something else (HIP_LAUNCH_CHECKS, AMD_EPYC_TUNING) is a setting that may be on or off.
_SWITCH = re.compile(
    r"(?i)^_*(?:[a-z0-9]+_+)*?(?:rocm|hip|hipcc|amd|amdgpu)(?:_+(?:rocm|hip|amd|platform|version|major|minor|build"
    r"|enabled|enable|support|supported|available|gpu|backend|compiler|device|target|hcc))*_*$"
)
# Parts of a name that only AMD's side has: GGML_HIP_ROCWMMA_FATTN, AMD_MFMA_AVAILABLE, CDNA3.
_OF_AMD = re.compile(r"(?i)(?:^|_)(?:rocm|hip|hipcc|amd|amdgpu|amdgcn|rocwmma|mfma|[cr]dna\d?|gfx\w*)(?:_|$)")
_VERSION = re.compile(r"(?i)(?:^|_)(?:version|major|minor|build)(?:_|$)")
_REFUSES = re.compile(r"(?i)(?:^|_)(?:no|not|disable|disabled|without|skip)(?:_|$)")

# A project's own switch for NVIDIA, if it stands beside one for AMD: `defined(GOOGLE_CUDA) || defined(X_USE_ROCM)`.
_CUDA_SWITCH = re.compile(
    r"(?i)^_*(?:[a-z0-9]+_+)*?(?:cuda|nvidia|nvcc|cudacc)"
    r"(?:_+(?:platform|enabled|enable|support|supported|available|gpu|backend|compiler|device|target))*_*$"
)
_CUDA_WORD = re.compile(r"(?<=[A-Z]_)CUDA(?:DR|RT)?$")
_AMD_WORD = re.compile(r"(?<=[A-Z]_)(?:HIP|ROCM)$")
# HIPIFY makes AMD's names of these, so a build that uses it sets them.
_CONVERTED = frozenset({"USE_CUDA", "__CUDACC__"})
# Parts of a name that only NVIDIA's side has: USE_NVIDIA_CUVS, NVJPEG_FOUND, PADDLE_WITH_CUDNN; and those of libraries
# that HIP has under another name, so that a build for ROCm may set the switch all the same: CUSOLVER_AVAILABLE.
_OF_NVIDIA = re.compile(
    r"(?i)(?:^|_)(?:nvidia|nv(?:jpeg|cc|rtc|tx|shmem|comp|link|ml|cuvid|enc|dec)|cu(?:vs|dss|file|sparselt|tlass|tensor|pti)"
    r"|cudnn|tensorrt|trt)\w*|(?:^|_)sm_?(?:[789]\d|1[0-2]\d)a?(?:_|$)"
)
_LIKE_HIPS = re.compile(r"(?i)(?:^|_)(?:cu(?:blas|sparse|solver|fft|rand)|nccl)\w*")

Defined = Callable[[str], bool | None]
_CONSTANT = re.compile(r"\bconst(?:expr)?\b[^;=(){}]*?\b([A-Za-z_]\w*)\s*=\s*([^;{}=]+);")
_ENUM = re.compile(r"\benum\b[^;{}()]*\{([^{}]*)\}")
_MEMBER = re.compile(r"\b([A-Za-z_]\w*)\s*=\s*([^,{}]+)")
# Names that could stand for CUDA's own: `__device__ int __vsub4(int a) {`, `typedef X __nv_fp8_e4m3;`, `using X =`.
_MADE = re.compile(
    r"\b(?:__device__|__forceinline__|inline)\b[^;{}()=]*?\b((?:__|cu|nv)\w+)\s*\([^;{}]*\)\s*\{"
    r"|\btypedef\b[^;{}]*?\b((?:__|cu|nv)\w+)\s*;|\busing\s+((?:__|cu|nv)\w+)\s*="
)
# Its own arrangements for both widths: a target's macro, a matrix instruction, a width asked for, a constant of 64.
_KNOWS_WAVEFRONTS = re.compile(
    r"__GFX9__|__AMDGCN_WAVEFRONT_SIZE|__builtin_amdgcn_(?:mfma|wmma|wavefront|readlane|readfirstlane|update_dpp|mov_dpp"
    r"|ds_bpermute|mbcnt)|\bck_tile\b|physical_warp_size|\b(?i:warp|wave|wavefront)_?(?i:size)\w*\s*(?:=|==|,|\)|\s)\s*64\b"
)
# Code that was written for AMD alone knows its own wavefronts and launch bounds; code for both says so in guards.
_FOR_AMD = re.compile(r"__builtin_amdgcn_|#[ \t]*include[ \t]*[<\"]hip/|\brocwmma\b|\bck_tile\b")
_FOR_BOTH = re.compile(r"\b(?:USE_ROCM|__HIP_PLATFORM_\w+|__HIPCC__|__CUDA_ARCH__|__CUDACC__)\b|\w_USE_HIP\b")
_AMD_FOLDERS = {"rocm", "hip", "amd", "ck", "ck_tile"}
_ARRAY = re.compile(r"\bstd::array\s*<[^;{}()]*>\s*&?\s*([A-Za-z_]\w*)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
# Sources that a template engine makes (FBGEMM, PyTorch) have sides of their own: {% if is_rocm %}.
_JINJA = re.compile(r"^[ \t]*\{%-?\s*(if|elif|else|endif)\b(.*?)-?%\}[ \t]*$", re.MULTILINE)
_SPACE = re.compile(r"^[ \t]*namespace[ \t]+([A-Za-z_]\w*)[\w: \t]*\{", re.MULTILINE)
_JINJA_PART = re.compile(r"\s+(and|or)\s+")
_HEADERS = (".h", ".hpp", ".cuh", ".inl", ".hh", ".hxx", ".inc", ".in")
# Macros may be defined by macros whose own state changes; a chain longer than this stays open.
_ROUNDS = 4


class Macros(msgspec.Struct, frozen=True):
    """What is known of macros in one file: whether a name is defined (None: open), and its number."""

    defined: Defined
    value: Names


class Branch(msgspec.Struct, frozen=True):
    """One side of a conditional: the lines between its directive and the next of the same conditional."""

    directive: Directive
    first: int
    last: int
    # True: compiled for ROCm. False: left out. None: open.
    taken: bool | None
    # An earlier side of the same conditional is compiled for ROCm, so that this one was never asked.
    passed_over: bool
    # Compiled for ROCm alone: one of the conditions so far asks for it, or its own needs a macro of AMD's.
    for_rocm: bool
    # Whether a later #else or #elif of the same conditional has lines of its own.
    has_else: bool = False


def _is_absent(name: str) -> bool:
    return name in NVIDIA_ONLY or name == "__CUDA_ARCH_LIST__" or bool(_ELSEWHERE.search(name) and not refuses(name))


def refuses(name: str) -> bool:
    """Whether a switch leaves something out where it is set: DISABLE_SM90_FEATURES, NO_CUDNN."""
    return _REFUSES.search(name) is not None


def rocm_defines(name: str) -> bool | None:
    """Whether a build for ROCm defines a macro that the project itself says nothing about."""
    if _is_absent(name):
        return False
    if name in _PRESENT:
        return True
    is_switch = _SWITCH.search(name) and not _OPEN.match(name) and not refuses(name)
    return True if is_switch else None


def _needs(directive: Directive, wanted: Callable[[str], object]) -> bool:
    """Whether a condition cannot hold where none of the wanted names is set."""

    return directive.word != "else" and holds_under(directive, _without(wanted)) is False


def _without(wanted: Callable[[str], object], others: Defined = lambda name: None) -> Macros:
    """What holds where none of the wanted names is set, and switches that leave such things out are."""

    def defined(name: str) -> bool | None:
        return refuses(name) if wanted(name) else others(name)

    return Macros(defined, lambda name: 0 if defined(name) is False else None)


def asks_for_rocm(directive: Directive) -> bool:
    return any(
        token.kind == "name" and token.text not in _COMPILERS and rocm_defines(token.text) for token in directive.tokens
    )


def rocm_value(name: str) -> Value:
    if _is_absent(name):
        return 0
    known = _PRESENT.get(name, _VALUES.get(name))
    # A switch asked for its value, `#if PADDLE_WITH_HIP`; a version has one that is not known.
    is_switch = known is None and rocm_defines(name) and not _VERSION.search(name)
    return 1 if is_switch else known


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
    for directive, following in zip_longest(directives, directives[1:], fillvalue=Directive("", (), 0)):
        word = directive.word
        if word in ("if", "ifdef", "ifndef"):
            outer = stack[-1].taken if stack else True
            holds = holds_under(directive, macros)
            if (
                word == "ifndef"
                and (guard := directive.name)
                and following.word == "define"
                and following.name == guard
            ):
                # Defined at once: a header read once, or a default that nobody else set.
                holds = guard not in _PRESENT
            asks = asks_for_rocm(directive) or (bool(stack) and stack[-1].asks)
            for_amd = _needs(directive, _OF_AMD.search) or (bool(stack) and stack[-1].for_amd)
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
            top.for_amd = around or (word != "else" and _needs(directive, _OF_AMD.search))
        elif word == "endif" and stack:
            top = stack.pop()
            _close(top, directive.line)
            found += _with_else(top.sides)
    for top in reversed(stack):
        _close(top, last_line + 1)
        found += _with_else(top.sides)
    return found


def _close(top: _Open, line: int) -> None:
    for_rocm = (top.asks and top.taken is True) or (top.for_amd and top.taken is not False)
    first = top.directive.line + 1
    top.sides.append(Branch(top.directive, first, line - 1, top.taken, top.passed_over, for_rocm))


def _with_else(sides: list[Branch]) -> list[Branch]:
    return [
        msgspec.structs.replace(side, has_else=any(other.last >= other.first for other in sides[index + 1 :]))
        for index, side in enumerate(sides)
    ]


def _is_amd_switch(name: str) -> bool:
    return name == "__HIPCC__" or (bool(_SWITCH.search(name)) and rocm_defines(name) is True)


def _choices(directives: Sequence[Directive]) -> Iterator[list[frozenset[str]]]:
    """Names of what is chosen between: the parts of `a || b`, and the sides of #if ... #elif."""
    chains: list[list[frozenset[str]]] = []
    for directive in directives:
        names = frozenset(token.text for token in directive.tokens if token.kind == "name") - {"defined"}
        if directive.word in ("if", "elif"):
            yield _alternatives(directive.tokens)
        refuses = directive.word == "ifndef" or any(token.text == "!" for token in directive.tokens)
        if directive.word in ("if", "ifdef", "ifndef"):
            chains.append([frozenset() if refuses else names])
        elif directive.word in ("elif", "elifdef") and chains:
            chains[-1].append(frozenset() if refuses else names)
        elif directive.word == "endif" and chains:
            yield chains.pop()


def _alternatives(tokens: Sequence[CppToken]) -> list[frozenset[str]]:
    """Names in the parts of a condition that `||` joins outside of all parentheses."""
    parts: list[set[str]] = [set()]
    depth = 0
    for token in tokens:
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        if token.text == "||" and depth == 0:
            parts.append(set())
        elif token.text == "!":
            return []
        elif token.kind == "name" and token.text != "defined":
            parts[-1].add(token.text)
    return [frozenset(part) for part in parts]


def holds_under(directive: Directive, macros: Macros) -> bool | None:
    """Whether the condition of an #if, #ifdef, #ifndef or #elif is met."""
    word, tokens = directive.word, directive.tokens
    names = {token.text for token in tokens}
    if "__CUDACC__" in names and any(map(_is_amd_switch, names)) and macros.defined("__CUDACC__") is None:
        # Asked for together with AMD, it is what HIPIFY makes __HIPCC__ of.
        given = macros.defined
        macros = Macros(lambda name: True if name == "__CUDACC__" else given(name), macros.value)
    if word in ("ifdef", "elifdef", "ifndef", "elifndef"):
        asked = macros.defined(directive.name) if tokens else None
        return negated(asked) if word in ("ifndef", "elifndef") else asked
    value = evaluate(tokens, macros.value, macros.defined)
    return None if value is None else bool(value)


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


def taken_lines(sides: Sequence[Branch], line_count: int, outside: bool = True) -> list[bool | None]:
    """By line number, whether a build for ROCm compiles it: True, None (open) or False.

    `outside`: what holds outside of all conditionals.
    """
    taken: list[bool | None] = [outside] * (line_count + 2)
    # Inner sides end before outer ones, and know what is outside of them: the narrowest decides.
    for side in reversed(sides):
        taken[side.first : side.last + 1] = [side.taken] * (side.last + 1 - side.first)
    return taken


class Definition(msgspec.Struct, frozen=True):
    file: str
    directive: Directive

    @property
    def body(self) -> tuple[CppToken, ...]:
        return self.directive.tokens[1:]


class SourceFile(msgspec.Struct, kw_only=True, dict=True):
    """One file: its text, its preprocessor lines, its constants by name as (expression, line)."""

    path: str
    text: str
    directives: list[Directive]
    constants: dict[str, list[tuple[str, int]]]
    # Functions and types that it defines, each with its line.
    made: dict[str, int]
    # By line number, whether a build for ROCm compiles it.
    taken: list[bool | None]
    sides: list[Branch] = []

    @cached_property
    def line_count(self) -> int:
        return self.text.count("\n") + 1

    @cached_property
    def is_for_amd(self) -> bool:
        """Whether the whole file is for AMD alone, by its name or by what it uses."""
        if self.path.endswith(".hip") or not _AMD_FOLDERS.isdisjoint(self.path.lower().split("/")[:-1]):
            return True
        return _FOR_AMD.search(self.text) is not None and _FOR_BOTH.search(self.text) is None

    @cached_property
    def knows_wavefronts(self) -> bool:
        """Whether it shows, outside of comments, that it was written with AMD's 64 lanes in mind."""
        return _KNOWS_WAVEFRONTS.search(_COMMENT.sub("", self.text)) is not None

    @cached_property
    def arrays(self) -> frozenset[str]:
        return frozenset(_ARRAY.findall(self.text)) if "std::array" in self.text else frozenset()

    def around(self, line: int, and_before: bool = False) -> Iterator[Branch]:
        """Sides of conditionals that a line is in; `and_before`: with those before each of the same conditional."""
        before = {side.last + 1: side for side in self.sides} if and_before else {}
        for side in self.sides:
            found: Branch | None = side if side.first <= line <= side.last else None
            while found is not None:
                yield found
                found = before.get(found.directive.line)

    def is_dead(self, line: int) -> bool:
        return self.taken[line] is False


def without_jinja(text: str) -> str:
    """Conditions of a template as the preprocessor's: what is_rocm decides is decided, the rest is open."""
    return _JINJA.sub(_as_directive, text) if "{%" in text else text


def _as_directive(match: re.Match[str]) -> str:
    word, condition = match[1], match[2].strip()
    if word not in ("if", "elif"):
        return f"#{word}"
    signs = {"and": "&&", "or": "||"}
    return f"#{word} " + " ".join(signs.get(one) or _asked(one) for one in _JINJA_PART.split(condition))


def _asked(part: str) -> str:
    plain = part.strip("() ")
    is_rocm = plain.removeprefix("not ").strip() in ("is_rocm", "is_hip", "use_rocm")
    return ("!" if plain.startswith("not ") else "") + ("defined(USE_ROCM)" if is_rocm else "defined(OF_A_TEMPLATE)")


def read_unit(path: str, text: str) -> SourceFile:
    constants: dict[str, list[tuple[str, int]]] = {}
    newlines = [found.start() for found in re.finditer("\n", text)]
    for match in _CONSTANT.finditer(text):
        constants.setdefault(match[1], []).append((match[2], _line(newlines, match.start(1))))
    for body in _ENUM.finditer(text):
        for match in _MEMBER.finditer(body[1]):
            line = _line(newlines, body.start(1) + match.start())
            constants.setdefault(match[1], []).append((match[2], line))
    made = {
        found[1] or found[2] or found[3]: _line(newlines, found.start())
        for found in _MADE.finditer(text)
        if not (found[1] and _passes_on(text, found))
    }
    taken = taken_lines([], len(newlines) + 1)
    return SourceFile(
        path=path, text=text, directives=lex(text).directives, constants=constants, made=made, taken=taken
    )


def _passes_on(text: str, made: re.Match[str]) -> bool:
    """Whether a function calls another of its own name: it only adds a type to what CUDA has."""
    body = text[made.end() : text.find("}", made.end())]
    return re.search(rf"\b{made[1]}\s*\(", body) is not None


def _line(newlines: Sequence[int], offset: int) -> int:
    return bisect_left(newlines, offset) + 1


class Project:
    def __init__(
        self,
        texts: Mapping[str, str],
        by_hipify: bool = True,
        left_out: Collection[str] = (),
    ):
        """`by_hipify`: whether the tree, where it is built for ROCm, may be built from HIPIFY's output; `left_out`:
        files that such a build does not compile, by its lists of sources."""
        self._by_hipify, self._left_out = by_hipify, frozenset(left_out)
        self.units = {path: read_unit(path, without_jinja(text)) for path, text in texts.items()}
        self._definitions: dict[str, list[Definition]] = {}
        for unit in self.units.values():
            for directive in unit.directives:
                if directive.word == "define" and directive.name:
                    self._definitions.setdefault(directive.name, []).append(Definition(unit.path, directive))
        self._constants: dict[str, list[tuple[str, str, int]]] = {}
        for unit in self.units.values():
            for name, found in unit.constants.items():
                self._constants.setdefault(name, []).extend((unit.path, *one) for one in found)
        self._includes = _includes(self.units)
        self._reach, self.visible = _visibility(self._includes)
        self._numbers: dict[tuple[str, str], Value] = {}
        self._passes: dict[tuple[str, str], list[bool | None]] = {}
        self._settle()
        self._bury_unreached()

    def _settle(self) -> None:
        """Reads all conditions until no macro changes its state."""
        states: dict[tuple[str, int], bool | None] = {}
        for _ in range(_ROUNDS):
            self._numbers.clear()
            for unit in self.units.values():
                unit.sides = branches(unit.directives, self.macros(unit.path), unit.line_count)
            # Only now: all files of a round see the same state.
            for unit in self.units.values():
                unit.taken = taken_lines(unit.sides, unit.line_count)
            now = {
                (definition.file, definition.directive.line): self._taken(definition)
                for found in self._definitions.values()
                for definition in found
            }
            if now == states:
                return
            states = now

    def _bury_unreached(self) -> None:
        """Headers that only the side for NVIDIA includes are not compiled for ROCm."""
        included = [(unit, line, found) for unit in self.units.values() for line, found in self._includes[unit.path]]
        left_out = set(self._left_out)
        while True:
            reached = {
                found
                for unit, line, found in included
                if found != unit.path and unit.path not in left_out and not unit.is_dead(line)
            }
            unreached = {found for unit, _, found in included if found != unit.path and found.endswith(_HEADERS)}
            unreached |= self._beside_left_out(left_out)
            if unreached - reached <= left_out:
                break
            left_out |= unreached - reached
        for path in left_out - self._left_out:
            if path.endswith(_HEADERS):
                self.units[path].taken = taken_lines([], self.units[path].line_count, outside=False)
        self._numbers.clear()

    def _beside_left_out(self, left_out: Collection[str]) -> set[str]:
        """Headers in folders whose every source is left out: files that the build makes may include them."""
        folders: dict[str, bool] = {}
        for path in self.units:
            if not path.endswith(_HEADERS):
                folder = path.rpartition("/")[0]
                folders[folder] = folders.get(folder, True) and path in left_out
        return {path for path in self.units if path.endswith(_HEADERS) and folders.get(path.rpartition("/")[0], False)}

    def _taken(self, definition: Definition) -> bool | None:
        return self.units[definition.file].taken[definition.directive.line]

    def left_out_on(self, path: str, line: int, on: str) -> bool:
        """Whether a line is left out in the compiler's passes for such targets, or in that for the "host": the other
        side of `#if defined(__GFX9__)`."""
        asks = (on in _PASSES or on == "host") and _TARGET.search(self.units[path].text)
        return bool(asks) and self._taken_in(path, on)[line] is False

    def _taken_in(self, path: str, on: str) -> list[bool | None]:
        if (path, on) not in self._passes:
            unit, known = self.units[path], self.macros(path)

            def settled(name: str) -> bool | None:
                return (False if _OPEN.match(name) else None) if on == "host" else _PASSES[on].get(name)

            def defined(name: str) -> bool | None:
                return known.defined(name) if (held := settled(name)) is None else held

            def value(name: str) -> Value:
                return known.value(name) if (held := settled(name)) is None else int(held)

            sides = branches(unit.directives, Macros(defined, value), unit.line_count)
            self._passes[path, on] = taken_lines(sides, unit.line_count)
        return self._passes[path, on]

    def host_value(self, name: str, path: str) -> tuple[bool, Value]:
        """Whether a name has another value in device code, by macros of targets, and what it is on the host."""
        found = self._candidates(name, path)
        on_host = [body for file, body, line in found if not self.left_out_on(file, line, "host")]
        values = {evaluate(body, lambda other: self.constant(other, path)) for body in on_host}
        by_pass = len(on_host) < len(found)
        return by_pass, values.pop() if len(values) == 1 else None

    @cached_property
    def _nvidia_switches(self) -> frozenset[str]:
        """Switches that are the other choice beside one for AMD, and that no file sets.

        `#if defined(X_CUDA) ... #elif defined(X_HIP)` and `defined(X_CUDA) || defined(X_HIP)`: with X_CUDA set, nobody
        would ever ask for X_HIP. The same where two names differ in that word alone.
        """
        found: set[str] = set()
        for unit in self.units.values():
            for choices in _choices(unit.directives):
                if any(_is_amd_switch(name) for names in choices for name in names):
                    found |= {
                        name
                        for names in choices
                        if not any(map(_is_amd_switch, names))
                        for name in names
                        if _CUDA_SWITCH.search(name) and not _VERSION.search(name)
                    }
        asked = {
            token.text
            for unit in self.units.values()
            for directive in unit.directives
            if directive.word in ("if", "ifdef", "elif")
            for token in directive.tokens
            if token.kind == "name"
        }
        # Each asked for by itself, and named alike: X_WITH_CUDA and X_WITH_HIP.
        pairs = {_AMD_WORD.sub("", name) for name in asked if _is_amd_switch(name)}
        found |= {name for name in asked if _CUDA_WORD.search(name) and _CUDA_WORD.sub("", name) in pairs}
        converted = _CONVERTED if self._by_hipify else frozenset[str]()
        return frozenset(found - self._definitions.keys() - NVIDIA_ONLY - converted)

    def asks_for_nvidia(self, path: str, line: int | None) -> str:
        """What a condition around a line asks of NVIDIA: a "library" that ROCm lacks, one that HIP has under another
        name ("switch"), that a switch which leaves such a thing out is not set ("refusal"), or nothing."""
        if line is None or path not in self.units:
            return ""
        unit = self.units[path]
        around = [side.directive for side in unit.around(line)]
        # What is in front of an #else, by the line where it stands.
        before = {side.last + 1: side.directive for side in unit.sides}

        def asks(wanted: Callable[[str], object]) -> bool:
            instead = _without(wanted, lambda name: rocm_defines(name) or None)
            return any(
                (one.word == "else" and one.line in before and holds_under(before[one.line], instead) is True)
                or _needs(one, wanted)
                for one in around
            )

        if asks(lambda name: _OF_NVIDIA.search(name) and not refuses(name)):
            return "library"
        if asks(lambda name: _OF_NVIDIA.search(name) and refuses(name)):
            return "refusal"
        return "switch" if asks(_LIKE_HIPS.search) else ""

    def expands_for_nvidia(self, macro: str) -> bool:
        """Whether all places that use a macro are left out on ROCm, so that its body is compiled nowhere."""
        return self.is_ported and self._expanded.get(macro) is False

    @cached_property
    def _expanded(self) -> dict[str, bool]:
        """Of each macro with parameters that is used, whether a build for ROCm compiles any of the places."""
        names = {name for name, found in self._definitions.items() if any(one.directive.function_like for one in found)}
        places = {(one.file, one.directive.line) for name in names for one in self._definitions[name]}
        found: dict[str, bool] = {}
        for unit in self.units.values():
            plain = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), unit.text)
            for number, line in enumerate(plain.split("\n"), 1):
                if (unit.path, number) in places:
                    # Its own name; what its body uses counts.
                    line = line.partition("(")[2]
                for name in names.intersection(_NAME.findall(line)):
                    live = unit.path not in self._left_out and not unit.is_dead(number)
                    found[name] = found.get(name, False) or live
        return found

    def asks_for(self, name: str) -> bool:
        """Whether a condition that a build for ROCm reads asks for a macro."""
        return any(
            directive.word in ("if", "ifdef", "ifndef", "elif")
            and any(token.text == name for token in directive.tokens)
            and not unit.is_dead(directive.line)
            for unit in self.units.values()
            if name in unit.text
            for directive in unit.directives
        )

    def uses(self, name: str, path: str, but: Collection[int]) -> bool:
        """Whether any line that a build for ROCm compiles has a name, those lines of the file aside; True also where
        nobody calls it at all."""
        dead = False
        for unit in self.units.values():
            for match in re.finditer(rf"\b{re.escape(name)}\b", unit.text) if name in unit.text else ():
                line = unit.text.count("\n", 0, match.start()) + 1
                if unit.path != path or line not in but:
                    if unit.path not in self._left_out and not unit.is_dead(line):
                        return True
                    dead = True
        return not dead

    @cached_property
    def is_ported(self) -> bool:
        """Whether any file has a side for ROCm or includes HIP's headers: then 32 lanes and NVIDIA's macros may be
        there on purpose."""
        return any(
            any(side.for_rocm for side in unit.sides) or any(one.header.startswith("hip/") for one in unit.directives)
            for unit in self.units.values()
        )

    @cached_property
    def own_spaces(self) -> frozenset[str]:
        """Outermost namespaces that files of the tree itself open."""
        return frozenset(match[1] for unit in self.units.values() for match in _SPACE.finditer(unit.text))

    def includes(self, path: str, headers: tuple[str, ...]) -> bool:
        """Whether a file, or one around it, includes a header whose name begins so."""
        seen = (one.header for other in self.visible[path] for one in self.units[other].directives if one.header)
        return any(header.startswith(headers) for header in seen)

    def arrays(self, path: str) -> frozenset[str]:
        """Variables and members that the file, or one around it, declares as std::array."""
        return frozenset(name for other in self.visible[path] for name in self.units[other].arrays)

    def sees(self, path: str, pattern: re.Pattern[str]) -> bool:
        """Whether a line that a build for ROCm compiles, in this file or one around it, matches."""
        for unit in (self.units[other] for other in self.visible[path]):
            for match in pattern.finditer(unit.text):
                if not unit.is_dead(unit.text.count("\n", 0, match.start()) + 1):
                    return True
        return False

    def definitions(self, name: str, path: str) -> list[Definition]:
        """Those of a macro that the file may see and a build for ROCm does not leave out."""
        seen = self.visible[path]
        found = self._definitions.get(name, [])
        return [definition for definition in found if definition.file in seen and self._taken(definition) is not False]

    def macros(self, path: str) -> Macros:
        def defined(name: str) -> bool | None:
            found = self._definitions.get(name)
            if not found:
                return False if name in self._nvidia_switches else rocm_defines(name)
            if all(self._taken(definition) is False for definition in found):
                # Only the side for NVIDIA ever sets it.
                return False
            if any(self._taken(definition) for definition in found if definition.file in self.visible[path]):
                return True
            return None

        return Macros(defined, lambda name: self.constant(name, path))

    def provides(self, name: str, path: str) -> bool:
        """Whether the project brings its own macro of that name for ROCm, so that what it stood for is not used."""
        if any(not any(token.text == name for token in definition.body) for definition in self.definitions(name, path)):
            return True
        seen = (self.units[other] for other in self.visible[path])
        return any(name in unit.made and not unit.is_dead(unit.made[name]) for unit in seen)

    def constant(self, name: str, path: str) -> Value:
        """The number of a macro or constant as that file sees it; None where it is open or has several."""
        key = (path, name)
        if key not in self._numbers:
            # None while it is worked out, so that names that need each other end.
            self._numbers[key] = None
            self._numbers[key] = self._work_out(name, path)
        return self._numbers[key]

    def _work_out(self, name: str, path: str) -> Value:
        candidates = self._candidates(name, path)
        if not candidates:
            return 0 if name in self._nvidia_switches else rocm_value(name)
        # Its own definition before that of a header, a header's before that of whoever includes it.
        nearest = min(self._distance(path, file) for file, _, _ in candidates)
        values = {
            evaluate(body, lambda other: self.constant(other, path))
            for file, body, _ in candidates
            if self._distance(path, file) == nearest
        }
        return values.pop() if len(values) == 1 else None

    def _candidates(self, name: str, path: str) -> list[tuple[str, tuple[CppToken, ...], int]]:
        """File, expression and line of each macro and constant of that name that the file may see."""
        found = [
            (definition.file, definition.body, definition.directive.line)
            for definition in self.definitions(name, path)
            if definition.body and not definition.directive.function_like
        ]
        seen = self.visible[path]
        for file, expression, line in self._constants.get(name, ()):
            if file in seen and not self.units[file].is_dead(line):
                found.append((file, tuple(lex(expression).tokens), line))
        return found

    def _distance(self, path: str, file: str) -> int:
        return 0 if file == path else 1 if file in self._reach[path] else 2


def _includes(units: Mapping[str, SourceFile]) -> dict[str, list[tuple[int, str]]]:
    """Per file the lines that include, each with a file of the project that it may mean."""
    by_name: dict[str, list[str]] = {}
    for path in units:
        by_name.setdefault(PurePosixPath(path).name, []).append(path)
    return {
        path: [
            (one.line, found) for one in unit.directives if one.header for found in _resolve(path, one.header, by_name)
        ]
        for path, unit in units.items()
    }


def _visibility(
    includes: Mapping[str, Sequence[tuple[int, str]]],
) -> tuple[dict[str, set[str]], dict[str, frozenset[str]]]:
    """Per file what it includes; and the same with, for a header, what stands around it where it is included."""
    direct = {path: {found for _, found in lines} for path, lines in includes.items()}
    reach = {path: _closure(path, direct) for path in direct}
    around = {path: set(found) for path, found in reach.items()}
    for path, found in reach.items():
        for included in found:
            if included != path and included.endswith(_HEADERS):
                around[included] |= found
    return reach, {path: frozenset(found) for path, found in around.items()}


def _resolve(path: str, header: str, by_name: Mapping[str, Sequence[str]]) -> list[str]:
    """The file beside it where there is one, else all whose path ends so."""
    wanted = PurePosixPath(header)
    ending = [part for part in wanted.parts if part not in (".", "..")]
    found = [one for one in by_name.get(wanted.name, ()) if list(PurePosixPath(one).parts[-len(ending) :]) == ending]
    beside = [one for one in found if PurePosixPath(one).parent == (PurePosixPath(path).parent / wanted).parent]
    return beside or found


def _closure(path: str, direct: Mapping[str, set[str]]) -> set[str]:
    found, waiting = {path}, [path]
    while waiting:
        for other in direct[waiting.pop()]:
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found

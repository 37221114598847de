"""One C++ file as rules look at it: the tokens that a build for ROCm compiles, its functions and declarations."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise, takewhile

import msgspec

from crosstie.core.finding import Severity
from crosstie_port.source.hazard import SourceHazard
from crosstie_port.source.lexer import CppToken, Directive, Value, arguments, closing, evaluate, lex, opening, until
from crosstie_port.source.project import Project

LANE_CALLS = re.compile(
    r"\b(?:__shfl\w*|__ballot\w*|__syncwarp|__activemask|__any_sync|__all_sync|__match_\w+_sync|__reduce_\w+_sync"
    r"|__any|__all|SHFL\w*|VLLM_SHFL\w*|WARP_SHFL\w*|WARP_BALLOT|tiled_partition|coalesced_threads|WarpReduce"
    r"|[Ww]arp_?(?:[Rr]educe|[Ss]um|[Mm]ax|[Ss]can|[Ss]huffle)\w*)\b"
)
_EXCHANGE = re.compile(r"(?i)shfl|ballot|activemask|any_sync|all_sync|match_\w+_sync|reduce_\w+_sync|__(?:any|all)$")
_ON_DEVICE = re.compile(r"(?i)device|global|kernel|constexpr|gpu")
_DEVICE_WORDS = {"threadIdx", "blockIdx", "__syncthreads", "__device__", "__syncwarp", "GPU_LAMBDA", "C10_DEVICE"}
NARROW = {"int", "unsigned", "uint32_t", "int32_t", "uint", "uint_t", "u32", "unsigned_int"}
WIDE = {"uint64_t", "int64_t", "size_t", "long", "uintmax_t", "u64", "uint64", "int64", "uint64_cu"}
_TYPE_WORDS = (
    NARROW | WIDE | {"auto", "short", "char", "bool", "float", "double", "const", "constexpr", "static", "half"}
)
_CONTROL = {"if", "for", "while", "switch", "catch", "return", "sizeof", "constexpr", "alignas", "__launch_bounds__"}
_ENDS_DECLARATOR = {"=", ";", ",", ")", "{", ":", "["}
_AFTER_PARAMETERS = {"const", "noexcept", "override", "final", "mutable", "volatile"}
_CONSTANT = {"const", "constexpr"}
NOTHING_BOUND: Mapping[str, int] = {}
_LONGEST_EVIDENCE = 160
_MOST_LINES = 12


class Function(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    # Index of its name, and of the opening and closing brace.
    head: int
    start: int
    end: int
    returns: tuple[str, ...]
    # Parameters of the template before it, each with the tokens of its default.
    template: tuple[tuple[str, tuple[CppToken, ...]], ...]


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    at: int
    words: tuple[str, ...]
    value: tuple[CppToken, ...]

    @property
    def bits(self) -> int | None:
        return bits_of(self.words)


def bits_of(words: Collection[str]) -> int | None:
    """How wide a type is by its words, None where they do not tell."""
    return 64 if not WIDE.isdisjoint(words) else 32 if not NARROW.isdisjoint(words) else None


def _uses(macro: Directive, position: int) -> list[tuple[CppToken, CppToken]] | None:
    """Where the body of a macro uses what is given at that place, with the token before it; None: no parameters."""
    if not macro.function_like:
        return None
    end = closing(macro.tokens, 1)
    given = [cpp_token.text for cpp_token in macro.tokens[2:end] if cpp_token.kind == "name"]
    asked = given[position] if position < len(given) else "__VA_ARGS__"
    return [(before, token) for before, token in pairwise(macro.tokens[end:]) if token.text == asked]


class Code:
    """A stream of tokens: a file's code, or the body of one of its macros."""

    def __init__(
        self, path: str, tokens: list[CppToken], project: Project, lines: Sequence[str], macro: frozenset[str]
    ):
        self.path, self.tokens, self.project, self._source = path, tokens, project, lines
        # Parameters of the macro whose body this is.
        self.parameters = macro
        self.functions = list(_functions(tokens))
        self._starts = [function.start for function in self.functions]
        self._heads = [function.head for function in self.functions]
        self.declarations = _declarations(tokens, _aliases(tokens))
        self.names: dict[str, list[int]] = {}
        for index, token in enumerate(tokens):
            if token.kind == "name":
                self.names.setdefault(token.text, []).append(index)

    def function(self, at: int) -> Function | None:
        position = bisect_left(self._starts, at) - 1
        if position < 0:
            return None
        found = self.functions[position]
        return found if found.end > at else None

    def declared(self, name: str, at: int) -> Declaration | None:
        """The last declaration of a name before a place, in the same function or outside of all."""
        for declaration in reversed(self.declarations.get(name, ())):
            if declaration.at < at and ((around := self._around(declaration.at)) is None or around.end > at):
                return declaration
        return None

    def _around(self, at: int) -> Function | None:
        """The function in whose body or parameters a place is."""
        position = bisect_right(self._heads, at) - 1
        found = self.functions[position] if position >= 0 else None
        return found if found is not None and found.end > at else None

    def is_own(self, name: str, at: int) -> bool:
        """Whether a name is a variable or parameter that the function around a place declares, or is declared there."""
        position = bisect_left(self._starts, at) - 1
        # Parameters stand before the function's brace, behind the end of the one before it.
        behind = max((one.end for one in self.functions[: position + 1] if one.end < at), default=-1)
        if any(behind < declaration.at <= at for declaration in self.declarations.get(name, ())):
            return True
        # `const index_t name = ...`, of a type that is not known here.
        given = (one for one in self.names.get(name, ()) if behind < one <= at and self.text(one + 1) == "=")
        return any(one and self.tokens[one - 1].kind == "name" for one in given)

    def text(self, at: int) -> str:
        """Of the token at a place, "" before the first and behind the last."""
        return self.tokens[at].text if 0 <= at < len(self.tokens) else ""

    def value(
        self,
        tokens: Sequence[CppToken],
        at: int,
        bound: Mapping[str, int] = NOTHING_BOUND,
        through_variables: bool = False,
        depth: int = 0,
    ) -> Value:
        """A constant expression as it stands at a place; None where it is not constant or not known.

        `bound`: parameters of a template by name. `through_variables`: also as variables are set where they are
        declared, `int smem = 96 * 1024;`.
        """

        def named(name: str) -> Value:
            if name in bound:
                return bound[name]
            if name in self.parameters or depth > 8:
                return None
            declaration = self.declared(name, at)
            if declaration is None:
                return self.project.constant(name, self.path)
            if not through_variables and _CONSTANT.isdisjoint(declaration.words):
                return None
            return self.value(declaration.value, declaration.at, bound, depth=depth + 1)

        return evaluate(tokens, named)

    def calls(self, name: str) -> Iterator[tuple[int, list[Sequence[CppToken]]]]:
        """Where a name is called, and with what."""
        for at in self.names.get(name, ()):
            open_at = skip_angles(self.tokens, at + 1) if self.text(at + 1) == "<" else at + 1
            if self.text(open_at) == "(" and not self.is_dropped(at):
                yield at, arguments(self.tokens[open_at + 1 : closing(self.tokens, open_at)])

    def foreign_calls(self, names: Sequence[str]) -> Iterator[tuple[str, int, list[Sequence[CppToken]]]]:
        """Calls of those names that the project does not provide itself."""
        for name in names:
            if name in self.names and not self.provided(name):
                yield from ((name, at, given) for at, given in self.calls(name))

    def provided(self, name: str) -> bool:
        return self.project.provides(name, self.path)

    def is_dropped(self, at: int) -> bool:
        """Whether a name is an argument that a macro of the project, as a build for ROCm sees it, does not use."""
        made = self._given_to(at)
        return bool(made) and all(found == [] for found in made)

    def is_declared_by_macro(self, at: int) -> bool:
        """Whether a macro of the project declares what it is given there: `#define F(name) void name(int* x)`."""
        made = self._given_to(at)
        return any(before.text in _TYPE_WORDS | {"void"} for found in made for before, _ in found or ())

    def _given_to(self, at: int) -> list[list[tuple[CppToken, CppToken]] | None]:
        """For each definition of the macro that a name is an argument of, where it uses that."""
        depth = commas = 0
        for index in range(at - 1, max(0, at - 60), -1):
            text = self.tokens[index].text
            if text in (";", "{", "}"):
                return []
            depth += {")": 1, "]": 1, "(": -1, "[": -1}.get(text, 0)
            commas += text == "," and depth == 0
            if depth < 0:
                made = self.project.definitions(self.tokens[index - 1].text, self.path)
                return [_uses(definition.directive, commas) for definition in made]
        return []

    def matches(self, pattern: re.Pattern[str]) -> Iterator[int]:
        """Where a pattern begins in the tokens, joined by single spaces."""
        if self.parameters:
            return
        text, starts = self._joined
        for match in pattern.finditer(text):
            yield bisect_right(starts, match.start()) - 1

    @cached_property
    def _joined(self) -> tuple[str, list[int]]:
        # What a string says is no code.
        texts = ['""' if token.kind == "string" else token.text for token in self.tokens]
        return " ".join(texts), list(accumulate((len(text) + 1 for text in texts), initial=0))

    def line_text(self, line: int) -> str:
        return shorten(self._source[line - 1]) if 0 < line <= len(self._source) else ""

    def has_lane_calls(self, at: int) -> bool:
        """Whether the function around a place exchanges values between lanes; outside of one, whether the file does.

        Shuffles among 32 lanes by their width stay among them on a wider wavefront too, and do not count.
        """
        function = self.function(at)
        return any(
            LANE_CALLS.fullmatch(name) and any(not self.spans_32(name, place) for place in places)
            for name, within in self.names.items()
            if (places := [one for one in within if function is None or function.start < one < function.end])
        )

    def spans_32(self, name: str, at: int) -> bool:
        """Whether a name is a shuffle, and called here with a width of 32."""
        if "shfl" not in name.lower() or self.text(at + 1) != "(":
            return False
        given = arguments(self.tokens[at + 2 : closing(self.tokens, at + 1)])
        return len(given) > 2 and self.value(given[-1], at) == 32

    def is_on_host(self, at: int) -> bool:
        """Whether the function around a place runs on the host; one for both sides does not count."""
        function = self.function(at)
        return function is not None and function.start in self._host_starts

    @cached_property
    def _host_starts(self) -> frozenset[int]:
        on_device = sorted(at for word in _DEVICE_WORDS for at in self.names.get(word, ()))
        return frozenset(
            one.start
            for one in self.functions
            if not any(_ON_DEVICE.search(word) for word in one.returns)
            and bisect_left(on_device, one.start) == bisect_left(on_device, one.end)
        )

    def made_of(self, name: str, at: int) -> Sequence[CppToken]:
        """What a name was last given before a place, in the same function: `name = ...;` or `dim3 name(...)`."""
        function = self.function(at)
        for place in reversed(self.names.get(name, ())):
            if place >= at or (function is not None and place < function.start):
                continue
            following = place + (3 if self.text(place + 1) == "." else 1)
            if self.text(following) == "=":
                return until(self.tokens, following + 1, (";",))
            if self.text(following) in ("(", "{") and self.text(place - 1) == "dim3":
                return self.tokens[following + 1 : closing(self.tokens, following)]
        return ()

    def type_of(self, name: str, at: int) -> str:
        """The word before the nearest `T name` at or before a place, which is its type where that declares it."""
        for place in reversed([one for one in self.names.get(name, ()) if 0 < one < at]):
            behind = place - 1
            while behind and self.text(behind) in ("&", "*", "const", "__restrict__"):
                behind -= 1
            before = self.tokens[behind]
            if before.kind == "name" and before.text not in _CONTROL and before.text not in ("else", "do", "case"):
                return before.text
        return ""

    def points_to(self, name: str, at: int) -> str:
        """The type before the star of `T* name` or `T* __restrict__ name`; "" where that is not seen."""
        for place in reversed([one for one in self.names.get(name, ()) if one < at]):
            words = (token.text for token in self.tokens[max(0, place - 4) : place])
            before = [word for word in words if word not in ("__restrict__", "__restrict", "const")]
            if len(before) > 1 and before[-1] == "*":
                return before[-2]
        return ""

    @property
    def knows_wavefronts(self) -> bool:
        return self.project.units[self.path].knows_wavefronts

    @cached_property
    def leaves_lanes_to_headers(self) -> bool:
        """A header knows of both widths, and the file has no exchange of its own that spans the wavefront."""
        units, around = self.project.units, self.project.visible[self.path]
        return not self._has_bare_exchange and any(units[path].knows_wavefronts for path in around)

    @cached_property
    def _has_bare_exchange(self) -> bool:
        """A shuffle without a width, or a vote: both span the whole wavefront."""
        exchanges = (name for name in self.names if name.startswith("__") and _EXCHANGE.search(name))
        return any(
            not gives_width(name, given)
            for name in exchanges
            if not self.provided(name)
            for _, given in self.calls(name)
        )

    def is_for_amd(self, at: int) -> bool:
        """Whether a place is in a file, or behind a condition, for AMD alone."""
        return self.project.units[self.path].is_for_amd or self.is_side_for_amd(at)

    def is_side_for_amd(self, at: int) -> bool:
        line = self.tokens[at].line if at < len(self.tokens) else 0
        return any(side.for_rocm for side in self.project.units[self.path].around(line))

    def hazard(self, check: str, severity: Severity, what: str, at: int, remedy: str, on: str = "rocm") -> SourceHazard:
        function = self.function(at)
        name = function.name if function else ""
        return self.line_hazard(check, severity, what, self.tokens[at].line, remedy, on, name)

    def line_hazard(
        self, check: str, severity: Severity, what: str, line: int, remedy: str, on: str = "rocm", name: str = ""
    ) -> SourceHazard:
        evidence = self.line_text(line)
        return SourceHazard(check, severity, what, self.path, evidence, remedy, line, on, name)


def gives_width(name: str, given: Sequence[object]) -> bool:
    """Whether a call of a shuffle says among how many lanes, which is its last argument."""
    return len(given) >= (4 if name.endswith("_sync") else 3)


def shorten(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= _LONGEST_EVIDENCE else plain[: _LONGEST_EVIDENCE - 3] + "..."


def also(lines: Sequence[int]) -> str:
    """Where else, for the end of an evidence."""
    if not lines:
        return ""
    shown = ", ".join(map(str, lines[:_MOST_LINES])) + (", ..." if len(lines) > _MOST_LINES else "")
    return f" (and {len(lines)} more {'lines' if len(lines) > 1 else 'line'}: {shown})"


def streams(path: str, project: Project) -> list[Code]:
    """The code of a file, and the body of each macro that it defines, without what ROCm leaves out."""
    unit = project.units[path]
    source = unit.text.split("\n")
    lexed = lex(unit.text)
    live = [token for token in lexed.tokens if not unit.is_dead(token.line)]
    codes = [Code(path, live, project, source, frozenset())]
    for directive in lexed.directives:
        is_live = not unit.is_dead(directive.line) and not project.expands_for_nvidia(directive.name)
        if directive.word == "define" and len(directive.tokens) > 1 and is_live:
            start, parameters = 1, frozenset[str]()
            if directive.function_like:
                end = closing(directive.tokens, 1)
                parameters = frozenset(t.text for t in directive.tokens[2:end] if t.kind == "name")
                start = end + 1
            codes.append(Code(path, list(directive.tokens[start:]), project, source, parameters))
    return codes


def skip_angles(tokens: Sequence[CppToken], at: int) -> int:
    """Past `<...>` that opens at `at`, where it reads as template arguments; else `at` itself."""
    depth = 0
    for index in range(at, min(len(tokens), at + 200)):
        text = tokens[index].text
        if text == "<":
            depth += 1
        elif text in (">", ">>", ">>>"):
            depth -= len(text)
            if depth <= 0:
                return index + 1
        elif text in (";", "{", "}") or tokens[index].kind == "string":
            return at
    return at


def _functions(tokens: Sequence[CppToken]) -> Iterator[Function]:
    end = -1
    for index, token in enumerate(tokens):
        if index > end and token.text == "{" and token.kind == "sign" and (head := _head(tokens, index)) is not None:
            end = _end(tokens, index)
            name_at, returns = head
            template = template_of(tokens, name_at)
            name = tokens[name_at].text
            yield Function(name=name, head=name_at, start=index, end=end, returns=returns, template=template)


def _end(tokens: Sequence[CppToken], brace: int) -> int:
    """Its closing brace, or where the next function plainly begins: both sides of an open #if may open one brace."""
    end = closing(tokens, brace)
    for index in range(brace + 1, end):
        text = tokens[index].text
        begins = text in ("template", "__device__", "__host__", "class") and tokens[index - 1].text in (";", "}", ":")
        if begins or text == "__global__" or (text == "extern" and tokens[index + 1].kind == "string"):
            return index - 1
    return end


def _head(tokens: Sequence[CppToken], brace: int) -> tuple[int, tuple[str, ...]] | None:
    """The index of the function's name and the words of its type, where the brace opens a function."""
    at = brace - 1
    while at > 0 and tokens[at].text in _AFTER_PARAMETERS:
        at -= 1
    at = _before_members(tokens, at)
    if at < 1 or tokens[at].text != ")":
        return None
    at = opening(tokens, at) - 1
    if at < 0 or tokens[at].kind != "name" or tokens[at].text in _CONTROL:
        return None
    before = (token.text for token in reversed(tokens[max(0, at - 24) : at]))
    return at, tuple(takewhile(lambda word: word not in (";", "}", "{"), before))


def _before_members(tokens: Sequence[CppToken], at: int) -> int:
    """From the end of a constructor's `: a(b), c{d}` to the bracket before it; elsewhere the place itself."""
    behind = at
    while behind > 1 and tokens[behind].text in (")", "}"):
        name = opening(tokens, behind) - 1
        if name < 2 or tokens[name].kind != "name" or tokens[name - 1].text not in (",", ":"):
            return at
        behind = name - 2
        if tokens[name - 1].text == ":":
            return behind if tokens[behind].text == ")" else at
    return at


def template_of(tokens: Sequence[CppToken], name_at: int) -> tuple[tuple[str, tuple[CppToken, ...]], ...]:
    """The parameters of the template that a function or structure is, each with its default."""
    for at in range(name_at - 1, max(-1, name_at - 200), -1):
        if tokens[at].text in (";", "}", "{"):
            return ()
        if tokens[at].text == "template" and at + 1 < name_at and tokens[at + 1].text == "<":
            end = skip_angles(tokens, at + 1)
            return tuple(map(_parameter, arguments(tokens[at + 2 : end - 1])))
    return ()


def _parameter(tokens: Sequence[CppToken]) -> tuple[str, tuple[CppToken, ...]]:
    for index, token in enumerate(tokens):
        if token.text == "=":
            return (tokens[index - 1].text if index else ""), tuple(tokens[index + 1 :])
    return (tokens[-1].text if tokens else ""), ()


def _aliases(tokens: Sequence[CppToken]) -> dict[str, tuple[str, ...]]:
    """`using lanes = unsigned int;` and `typedef unsigned int lanes;` by name, with the words of the type."""
    found: dict[str, tuple[str, ...]] = {}
    for index, token in enumerate(tokens):
        if token.text not in ("using", "typedef"):
            continue
        end = next((i for i in range(index, min(index + 12, len(tokens))) if tokens[i].text == ";"), index)
        words = [cpp_token.text for cpp_token in tokens[index + 1 : end]]
        name, kind = (words[0], words[2:]) if words[1:2] == ["="] else (words[-1] if words else "", words[:-1])
        if kind and all(word in _TYPE_WORDS or word in ("std", "::") for word in kind):
            found[name] = tuple(kind)
    return found


def _declarations(tokens: Sequence[CppToken], aliases: Mapping[str, tuple[str, ...]]) -> dict[str, list[Declaration]]:
    """Names declared with a plain type: `const unsigned mask = ...`, `uint32_t a, b`, a parameter."""
    types = _TYPE_WORDS | set(aliases)
    found: dict[str, list[Declaration]] = {}
    index, end = 0, len(tokens)
    while index < end:
        if tokens[index].kind != "name" or tokens[index].text not in types:
            index += 1
            continue
        start = index
        while index < end and (tokens[index].text in types or tokens[index].text in ("&", "std", "::")):
            index += 1
        named = (token.text for token in tokens[start:index])
        words = tuple(word for name in named for word in aliases.get(name, (name,)))
        while index + 1 < end and tokens[index].kind == "name" and tokens[index + 1].text in _ENDS_DECLARATOR:
            name = tokens[index].text
            value = tuple(until(tokens, index + 2, (",", ";"))) if tokens[index + 1].text == "=" else ()
            found.setdefault(name, []).append(Declaration(name=name, at=index, words=words, value=value))
            after = index + 1 + (len(value) + 1 if value else 0)
            if after < end and tokens[after].text == "," and after + 1 < end and tokens[after + 1].text not in types:
                index = after + 1
                continue
            index += 1
            break
        else:
            index = max(index, start + 1)
    return found

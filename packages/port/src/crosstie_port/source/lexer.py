"""C and C++ text in, tokens and preprocessor lines out, each with its line: comments and strings raise no alarms.

Nothing is refused: what is no C++ (a stray quote, a byte of a binary file) becomes a token of its own, because a
file that one reader cannot lex still has hazards that its owner wants to know. Integer constant expressions of
tokens are numbers, or None where the text alone does not tell.
"""

import operator
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

_SPLICE = re.compile(r"\\[ \t]*\r?\n")
_TOKEN = re.compile(
    r"""
      (?P<space>[ \t\r\f\v]+)
    | (?P<newline>\n)
    | (?P<comment>//[^\n]*|/\*(?s:.*?)(?:\*/|\Z))
    | (?P<raw>(?:u8|[uUL])?R"(?P<fence>[^()\\\s]{0,16})\((?P<inside>(?s:.*?))(?:\)(?P=fence)"|\Z))
    | (?P<string>(?:u8|[uUL])?"(?P<content>(?:[^"\\\n]|\\.)*)(?:"|(?=\n)|\Z|\\\Z))
    | (?P<number>\.?[0-9](?:[eEpP][+-]|'(?=[0-9A-Za-z])|[0-9A-Za-z_.])*)
    | (?P<char>(?:u8|[uUL])?'(?:[^'\\\n]|\\.){1,8}')
    | (?P<name>[A-Za-z_$\x80-\U0010ffff][A-Za-z0-9_$\x80-\U0010ffff]*)
    | (?P<sign><<<|>>>|<<=|>>=|\.\.\.|->\*|<=>|\#\#|::|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.|(?s:.))
    """,
    re.VERBOSE,
)
_HEADER = re.compile(r"""[ \t]*(?:<([^>\n]*)>|"([^"\n]*)")""")
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "'": "'", "\\": "\\", "0": "\0"}
_ESCAPE = re.compile(r"\\(.)")
Value = int | None
Names = Callable[[str], Value]
# Binary operators by how tightly they bind, loosest first.
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"),
    ("*", "/", "%"),
)  # fmt: skip
COMPARES: Mapping[str, Callable[[int, int], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_SIGNS: Mapping[str, Callable[[int, int], int]] = {
    "|": operator.or_, "^": operator.xor, "&": operator.and_, "+": operator.add, "-": operator.sub, "*": operator.mul,
}  # fmt: skip
_MOST_BITS = 4096
_DEEPEST = 60
# Tokens: no declaration or argument that anybody writes is longer.
_FARTHEST = 400
SIZES: Mapping[str, int] = {
    "bool": 1, "char": 1, "int8_t": 1, "uint8_t": 1, "uchar": 1, "std::byte": 1, "byte": 1, "float_e4m3_t": 1,
    "__nv_fp8_e4m3": 1, "__nv_fp8_e5m2": 1, "__nv_fp8_storage_t": 1, "fp8_e4m3": 1, "c10::Float8_e4m3fn": 1,
    "short": 2, "int16_t": 2, "uint16_t": 2, "ushort": 2, "half": 2, "__half": 2, "bfloat16": 2, "__nv_bfloat16": 2,
    "nv_bfloat16": 2, "__bfloat16": 2, "half_t": 2, "bfloat16_t": 2, "c10::Half": 2, "c10::BFloat16": 2, "char2": 2,
    "uchar2": 2, "at::Half": 2, "at::BFloat16": 2,
    "int": 4, "unsigned": 4, "float": 4, "int32_t": 4, "uint32_t": 4, "uint": 4, "half2": 4, "__half2": 4,
    "__nv_bfloat162": 4, "nv_bfloat162": 4, "char4": 4, "uchar4": 4, "short2": 4, "ushort2": 4,
    "long": 8, "double": 8, "int64_t": 8, "uint64_t": 8, "size_t": 8, "float2": 8, "int2": 8, "uint2": 8, "long2": 16,
    "short4": 8, "ushort4": 8, "clock_t": 8, "ptrdiff_t": 8, "uintptr_t": 8, "std::size_t": 8, "float3": 12,
    "int3": 12, "uint3": 12, "float4": 16, "int4": 16, "uint4": 16, "double2": 16, "longlong2": 16, "ulonglong2": 16,
    "double4": 32, "longlong4": 32,
}  # fmt: skip
_QUALIFIERS = {"const", "volatile", "static", "constexpr", "signed", "typename", "struct", "inline", "mutable", "std"}
_CAST_WORDS = _QUALIFIERS | {"unsigned", "::"}


class CppToken(NamedTuple):
    # "name", "number", "string" (text without its quotes), "char" or "sign".
    kind: str
    text: str
    line: int


class Directive(msgspec.Struct, frozen=True):
    """A preprocessor line: `#define WARP 32` has the word define and the tokens WARP and 32."""

    word: str
    tokens: tuple[CppToken, ...]
    line: int
    # What stands between <> or "" after include; "" elsewhere.
    header: str = ""
    # `#define F(x)` has an opening bracket right after its name, `#define F (x)` has not.
    function_like: bool = False

    @property
    def name(self) -> str:
        """Of what it defines or asks for."""
        return self.tokens[0].text if self.tokens else ""


class Lexed(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[CppToken]
    directives: list[Directive]


class _Joined:
    """A text with its continued lines joined, and the line numbers of its offsets."""

    def __init__(self, text: str):
        parts = _SPLICE.split(text)
        self.text = "".join(parts)
        self._starts = [0, *(match.end() for match in re.finditer("\n", self.text))]
        self._splices = list(accumulate(map(len, parts[:-1])))

    def line(self, offset: int) -> int:
        return bisect_right(self._starts, offset) + bisect_right(self._splices, offset)


def lex(text: str) -> Lexed:
    joined = _Joined(text)
    tokens: list[CppToken] = []
    directives: list[Directive] = []
    offset, fresh = 0, True
    while match := _TOKEN.match(joined.text, offset):
        offset = match.end()
        if match.lastgroup == "newline":
            fresh = True
        elif match[0] == "#" and fresh:
            directive, offset = _directive(joined, offset)
            directives.append(directive)
        elif (token := _token(match, joined)) is not None:
            tokens.append(token)
            fresh = False
    return Lexed(tokens=tokens, directives=directives)


def _token(found: re.Match[str], joined: _Joined) -> CppToken | None:
    kind = found.lastgroup
    if kind is None or kind in ("space", "comment", "newline"):
        return None
    line = joined.line(found.start())
    if kind == "raw":
        return CppToken("string", found["inside"], line)
    if kind == "string":
        return CppToken("string", _ESCAPE.sub(lambda match: _ESCAPES.get(match[1], match[1]), found["content"]), line)
    return CppToken(kind, found[0], line)


def _directive(joined: _Joined, offset: int) -> tuple[Directive, int]:
    """Reads from behind the # to the end of the line; a block comment that it opens may carry it further."""
    line = joined.line(offset - 1)
    tokens: list[CppToken] = []
    word, header, function_like, name_end = "", "", False, -1
    while (match := _TOKEN.match(joined.text, offset)) and match.lastgroup != "newline":
        offset = match.end()
        token = _token(match, joined)
        if token is None:
            continue
        if not word:
            word = token.text
            if word in ("include", "include_next", "import") and (named := _HEADER.match(joined.text, offset)):
                header = named[1] or named[2] or ""
                offset = named.end()
        else:
            if len(tokens) == 1 and token.text == "(" and match.start() == name_end:
                function_like = word == "define"
            tokens.append(token)
            name_end = offset
    return Directive(word, tuple(tokens), line, header, function_like), offset


def size_of(words: Sequence[str]) -> Value:
    """Bytes of a type by its words, None for one that is not known here."""
    plain = [word for word in words if word not in _QUALIFIERS and word != "::"]
    if not plain:
        return None
    if any(word in ("*", "&") for word in plain):
        return 8
    if plain[0] in ("unsigned", "long") and len(plain) > 1:
        if "long" in plain:
            return 8
        return SIZES.get(plain[-1])
    return SIZES.get("::".join(plain)) or (SIZES.get(plain[-1]) if len(plain) > 1 else None)


def number(text: str) -> Value:
    """An integer literal, None for a floating-point one."""
    digits = text.replace("'", "").rstrip("uUlLzZ")
    try:
        # Base 0 knows 0x and 0b, and refuses C's octal numbers.
        return int(digits, 8 if digits[:1] == "0" and digits[1:].isdigit() else 0)
    except ValueError:
        return None


class _Stop(Exception):
    """No expression that this reader understands."""


class _Reader:
    def __init__(self, tokens: Sequence[CppToken], names: Names, defined: Callable[[str], bool | None]):
        self._tokens, self._names, self._defined = tokens, names, defined
        self._at, self._depth = 0, 0

    def whole(self) -> Value:
        value = self._ternary()
        if self._at != len(self._tokens):
            raise _Stop
        return value

    def _peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at].text if at < len(self._tokens) else ""

    def _take(self, wanted: str) -> None:
        if self._peek() != wanted:
            raise _Stop
        self._at += 1

    def _ternary(self) -> Value:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _Stop
        chosen = self._binary(0)
        if self._peek() == "?":
            self._at += 1
            first = self._ternary()
            self._take(":")
            second = self._ternary()
            chosen = (first if first == second else None) if chosen is None else first if chosen else second
        self._depth -= 1
        return chosen

    def _binary(self, level: int) -> Value:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while self._peek() in _LEVELS[level] and self._tokens[self._at].kind == "sign":
            sign = self._peek()
            self._at += 1
            left = _apply(sign, left, self._binary(level + 1))
        return left

    def _unary(self) -> Value:
        sign = self._peek()
        if sign in ("!", "~", "-", "+") and self._tokens[self._at].kind == "sign":
            self._at += 1
            value = self._unary()
            if value is None:
                return None
            return {"!": int(not value), "~": ~value, "-": -value, "+": value}[sign]
        return self._primary()

    def _primary(self) -> Value:
        if self._at >= len(self._tokens):
            raise _Stop
        token = self._tokens[self._at]
        if token.kind == "number":
            self._at += 1
            return number(token.text)
        if token.text == "(":
            return self._bracket()
        if token.kind == "name":
            return self._name()
        raise _Stop

    def _bracket(self) -> Value:
        """An expression in brackets, or a cast, which changes no value here."""
        if self._peek() != "(":
            raise _Stop
        end = closing(self._tokens, self._at)
        inside = [token.text for token in self._tokens[self._at + 1 : end]]
        if size_of(inside) is not None and all(word in _CAST_WORDS or word in SIZES for word in inside):
            self._at = end + 1
            return self._unary()
        self._at += 1
        value = self._ternary()
        self._take(")")
        return value

    def _name(self) -> Value:
        name = self._peek()
        if name == "defined":
            bracket = self._peek(1) == "("
            asked = self._defined(self._peek(2 if bracket else 1))
            self._at += 4 if bracket else 2
            return None if asked is None else int(asked)
        self._at += 1
        if name in ("true", "false"):
            return int(name == "true")
        while self._peek() == "::":
            name = self._peek(1)
            self._at += 2
        if name in ("static_cast", "reinterpret_cast") and self._peek() == "<":
            while self._peek() not in (">", ""):
                self._at += 1
            self._at += 1
            return self._bracket()
        if self._peek() == "(":
            return self._call(name)
        if self._peek() in (".", "->", "["):
            raise _Stop
        return self._names(name)

    def _call(self, name: str) -> Value:
        end = closing(self._tokens, self._at)
        inside = self._tokens[self._at + 1 : end]
        self._at = end + 1
        if name == "sizeof":
            return size_of([token.text for token in inside])
        values = [evaluate(part, self._names, self._defined) for part in arguments(inside)]
        known = [value for value in values if value is not None]
        if len(known) != len(values) or not known:
            return None
        if name in ("max", "min"):
            return (max if name == "max" else min)(known)
        return known[0] if name in SIZES and len(known) == 1 else None


def _apply(sign: str, left: Value, right: Value) -> Value:
    if sign == "&&":
        return 0 if left == 0 or right == 0 else None if left is None or right is None else 1
    if sign == "||":
        return 1 if left or right else None if left is None or right is None else 0
    if left is None or right is None:
        return None
    if sign in ("/", "%"):
        if right == 0:
            return None
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if sign == "/" else left - quotient * right
    if sign in ("<<", ">>"):
        if not 0 <= right < 128 or left.bit_length() > _MOST_BITS:
            return None
        return left << right if sign == "<<" else left >> right
    if sign == "*" and left.bit_length() + right.bit_length() > _MOST_BITS:
        return None
    return int((COMPARES.get(sign) or _SIGNS[sign])(left, right))


def closing(tokens: Sequence[CppToken], at: int) -> int:
    """The index of the bracket that closes the one at `at`; the last index where none does."""
    return _matching(tokens, range(at, len(tokens)), len(tokens) - 1)


def opening(tokens: Sequence[CppToken], at: int) -> int:
    """The index of the bracket that the one at `at` closes; -1 where none does."""
    return _matching(tokens, range(at, -1, -1), -1)


def _matching(tokens: Sequence[CppToken], places: range, missing: int) -> int:
    bracket = tokens[places[0]].text
    other = {"(": ")", "[": "]", "{": "}", ")": "(", "]": "[", "}": "{"}[bracket]
    depth = 0
    for index in places:
        if tokens[index].kind == "sign" and tokens[index].text in (bracket, other):
            depth += 1 if tokens[index].text == bracket else -1
            if depth == 0:
                return index
    return missing


def until(tokens: Sequence[CppToken], at: int, stops: Sequence[str]) -> Sequence[CppToken]:
    """From a place to the first of `stops`, or to the end of the bracket around it; nothing where neither is near."""
    depth = 0
    for index in range(at, min(len(tokens), at + _FARTHEST)):
        kind, text, _ = tokens[index]
        if kind == "sign":
            if depth == 0 and (text in stops or text in ")]}"):
                return tokens[at:index]
            depth += (text in "([{") - (text in ")]}")
    return ()


def statements(tokens: Sequence[CppToken]) -> list[Sequence[CppToken]]:
    """Parted at the semicolons."""
    ends = [index for index, token in enumerate(tokens) if token.text == ";"]
    return [tokens[start + 1 : end] for start, end in pairwise([-1, *ends, len(tokens)])]


def arguments(tokens: Sequence[CppToken]) -> list[Sequence[CppToken]]:
    """Parted at the commas outside brackets; nothing gives no argument."""
    parts: list[Sequence[CppToken]] = []
    depth = start = 0
    for index, token in enumerate(tokens):
        if token.kind != "sign":
            continue
        if token.text in "([{":
            depth += 1
        elif token.text in ")]}":
            depth -= 1
        elif token.text == "," and depth == 0:
            parts.append(tokens[start:index])
            start = index + 1
    return [*parts, tokens[start:]] if tokens else []


def evaluate(tokens: Sequence[CppToken], names: Names, defined: Callable[[str], bool | None] = lambda _: None) -> Value:
    try:
        return _Reader(tokens, names, defined).whole()
    except (_Stop, RecursionError):
        return None

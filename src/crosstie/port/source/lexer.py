"""C and C++ text in, tokens and preprocessor lines out, each with its line: comments and strings raise no alarms.

Nothing is refused: what is no C++ (a stray quote, a byte of a binary file) becomes a token of its own, because a
file that one reader cannot lex still has hazards that its owner wants to know.
"""

import re
from bisect import bisect_right
from typing import NamedTuple

import msgspec


class Token(NamedTuple):
    # "name", "number", "string" (text without its quotes), "char" or "sign".
    kind: str
    text: str
    line: int


class Directive(msgspec.Struct, frozen=True, kw_only=True):
    """A preprocessor line: `#define WARP 32` has the word define and the tokens WARP and 32."""

    word: str
    tokens: tuple[Token, ...]
    line: int
    # What stands between <> or "" after include; "" elsewhere.
    header: str = ""
    # `#define F(x)` has an opening bracket right after its name, `#define F (x)` has not.
    function_like: bool = False


class Lexed(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[Token]
    directives: list[Directive]


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
# For a reader of preprocessor lines alone: code between signs that could hide or make a # is passed over at once.
_OUTLINE = re.compile(
    r"""
      (?P<blank>[ \t\r\f\v]+|//[^\n]*|/\*(?s:.*?)(?:\*/|\Z))
    | (?P<newline>\n)
    | (?P<hash>\#)
    | (?P<code>(?:u8|[uUL])?R"(?P<fence>[^()\\\s]{0,16})\((?s:.*?)(?:\)(?P=fence)"|\Z)
        | (?:u8|[uUL])?"(?:[^"\\\n]|\\.)*(?:"|(?=\n)|\Z|\\\Z)
        | \.?[0-9](?:[eEpP][+-]|'(?=[0-9A-Za-z])|[0-9A-Za-z_.])*
        | (?:u8|[uUL])?'(?:[^'\\\n]|\\.){1,8}'
        | [A-Za-z_$\x80-\U0010ffff][A-Za-z0-9_$\x80-\U0010ffff]*
        | [-+*(){}\[\]<>=,;:.&|!?%^~@]+
        | (?s:.))
    """,
    re.VERBOSE,
)
_PLAIN = re.compile(r"""[^\n"'/\#R]*(?=\n)""")
_HEADER = re.compile(r"""[ \t]*(?:<([^>\n]*)>|"([^"\n]*)")""")
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "'": "'", "\\": "\\", "0": "\0"}
_ESCAPE = re.compile(r"\\(.)")


class _Lines:
    """Line numbers of offsets in a text whose continued lines were joined."""

    def __init__(self, joined: str, splices: list[int]):
        self._starts = [0, *(found.end() for found in re.finditer("\n", joined))]
        self._splices = splices

    def of(self, offset: int) -> int:
        return bisect_right(self._starts, offset) + bisect_right(self._splices, offset)


def _join(text: str) -> tuple[str, list[int]]:
    """The text with continued lines joined, and the offsets at which a line was joined on."""
    if "\\" not in text:
        return text, []
    parts: list[str] = []
    splices: list[int] = []
    start = length = 0
    for found in _SPLICE.finditer(text):
        parts.append(text[start : found.start()])
        length += found.start() - start
        splices.append(length)
        start = found.end()
    parts.append(text[start:])
    return "".join(parts), splices


def lex(text: str) -> Lexed:
    joined, splices = _join(text)
    lines = _Lines(joined, splices)
    tokens: list[Token] = []
    directives: list[Directive] = []
    offset, end, fresh = 0, len(joined), True
    while offset < end:
        found = _TOKEN.match(joined, offset)
        assert found is not None
        kind = found.lastgroup
        if kind == "newline":
            fresh = True
        elif kind == "sign" and found[0] == "#" and fresh:
            directive, offset = _directive(joined, found.end(), lines)
            directives.append(directive)
            continue
        elif (token := _token(found, lines)) is not None:
            tokens.append(token)
            fresh = False
        offset = found.end()
    return Lexed(tokens=tokens, directives=directives)


def outline(text: str) -> list[Directive]:
    """The preprocessor lines alone: what `lex` finds, sooner."""
    joined, splices = _join(text)
    lines = _Lines(joined, splices)
    directives: list[Directive] = []
    offset, end, fresh = 0, len(joined), True
    while offset < end:
        found = _OUTLINE.match(joined, offset)
        assert found is not None
        offset = found.end()
        kind = found.lastgroup
        if kind == "newline":
            fresh = True
        elif kind == "hash" and fresh:
            directive, offset = _directive(joined, offset, lines)
            directives.append(directive)
        elif kind != "blank":
            fresh = False
            # A line that begins as code has no directive: on to its end, or to what may reach beyond it.
            rest = _PLAIN.match(joined, offset)
            offset = rest.end() if rest else offset
    return directives


def _token(found: re.Match[str], lines: _Lines) -> Token | None:
    kind = found.lastgroup
    if kind in ("space", "comment", "newline"):
        return None
    line = lines.of(found.start())
    if kind == "raw":
        return Token("string", found["inside"], line)
    if kind == "string":
        return Token("string", _ESCAPE.sub(_unescape, found["content"]), line)
    assert kind is not None
    return Token(kind, found[0], line)


def _unescape(found: re.Match[str]) -> str:
    return _ESCAPES.get(found[1], found[1])


def _directive(joined: str, offset: int, lines: _Lines) -> tuple[Directive, int]:
    """Reads from behind the # to the end of the line; a block comment that it opens may carry it further."""
    line = lines.of(offset - 1)
    tokens: list[Token] = []
    word, header, function_like, name_end = "", "", False, -1
    while offset < len(joined):
        found = _TOKEN.match(joined, offset)
        assert found is not None
        if found.lastgroup == "newline":
            break
        token = _token(found, lines)
        if token is not None and not word:
            word = token.text
            if word in ("include", "include_next", "import") and (named := _HEADER.match(joined, found.end())):
                header = named[1] or named[2] or ""
                offset = named.end()
                continue
        elif token is not None:
            if len(tokens) == 1 and token.text == "(" and found.start() == name_end:
                function_like = word == "define"
            tokens.append(token)
            name_end = found.end()
        offset = found.end()
    made = Directive(word=word, tokens=tuple(tokens), line=line, header=header, function_like=function_like)
    return made, offset

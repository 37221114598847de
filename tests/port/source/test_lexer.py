"""The lexer: comments, strings, continued lines, and lines that are right whatever the text is."""

import pytest
from hypothesis import given, strategies as st

from crosstie_port.source.files import decoded
from crosstie_port.source.lexer import lex


def texts(source: str) -> list[str]:
    return [token.text for token in lex(source).tokens]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a // b\nc", ["a", "c"]),
        ("a /* b\n c */ d", ["a", "d"]),
        ("a /* never closed", ["a"]),
        ('"x // y" z', ["x // y", "z"]),
        (r'"a\"b" c', ['a"b', "c"]),
        ('"never closed\nnext', ["never closed", "next"]),
        ('R"(one "two" // three)" x', ['one "two" // three', "x"]),
        ('R"ptx(a)" b)ptx" c', ['a)" b', "c"]),
        ("1'000'000 + 0x1Fu", ["1'000'000", "+", "0x1Fu"]),
        ("k<<<1, 2>>>(x)", ["k", "<<<", "1", ",", "2", ">>>", "(", "x", ")"]),
        ("// a \\\n still a comment\nb", ["b"]),
        ("wa\\\nrp", ["warp"]),
        ("'\\''x", ["'\\''", "x"]),
        ("1.5e-3f", ["1.5e-3f"]),
    ],
)
def test_source_is_cut_into_its_tokens(source: str, expected: list[str]) -> None:
    assert texts(source) == expected


def test_lines_go_on_through_comments_strings_and_continuations() -> None:
    source = '/* 1\n2 */ a\n"s"\nR"(4\n5)" b\n#define X \\\n  y\nc'
    lexed = lex(source)
    assert [(token.text, token.line) for token in lexed.tokens] == [
        ("a", 2), ("s", 3), ("4\n5", 4), ("b", 5), ("c", 8),
    ]  # fmt: skip
    assert [(token.text, token.line) for token in lexed.directives[0].tokens] == [("X", 6), ("y", 7)]


def test_directives_are_read() -> None:
    found = lex('#include <a/b.h>\n  # include "c.h" // why\n#define F(x) x\n#define G (x)\n#if 0\n#endif').directives
    assert [one.word for one in found] == ["include", "include", "define", "define", "if", "endif"]
    assert [one.header for one in found[:2]] == ["a/b.h", "c.h"]
    assert [one.function_like for one in found[2:4]] == [True, False]


def test_a_sign_in_the_middle_of_a_line_is_no_directive() -> None:
    assert lex("a # b").directives == []
    assert lex('"#if 0"\n/*\n#if 1\n*/').directives == []


@given(st.binary(max_size=400))
def test_any_bytes_can_be_lexed(data: bytes) -> None:
    text = decoded(data)
    if text is None:
        return
    lexed = lex(text)
    last = text.count("\n") + 1
    lines = [token.line for token in lexed.tokens]
    assert lines == sorted(lines)
    assert all(1 <= line <= last for line in lines)


_PIECES = st.sampled_from(
    ["word", "12", '"text"', "// note", "/* a\nb */", "+", "\n", "\\\n", "#define A 1\n", "#if X\n", "#endif\n", 'R"(r\n)"', " ", "'c'", "'", '"']
)  # fmt: skip


@given(st.lists(_PIECES, max_size=40).map("".join))
def test_a_marked_word_is_found_on_its_line(before: str) -> None:
    """A word alone on a line, behind anything that ends, has that line's number."""
    closed = before + '\n*/"\n)"\n'
    source = closed + "crosstie_mark\n"
    found = [token.line for token in lex(source).tokens if token.text == "crosstie_mark"]
    assert found in ([], [closed.count("\n") + 1])

"""Values of a JSON text are counted right, wherever it is cut into pieces."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from crosstie.run.wire.values import ValueCounter

TEXTS = st.text(st.sampled_from('ab"\\{}[]\n é'), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def counted(text: bytes) -> tuple[int, int]:
    """Byte by byte: strings, objects and lists; and bytes that belong to none of them."""
    values = plain = 0
    in_string = escaped = False
    for byte in text:
        if in_string:
            in_string, escaped = escaped or byte != 34, not escaped and byte == 92
        elif byte in b'"[{':
            values += 1
            in_string = byte == 34
        else:
            plain += byte not in b"]}"
    return values, plain


@given(VALUES, st.data(), st.booleans())
def test_pieces_count_as_the_whole(value: Any, data: st.DataObject, plain: bool) -> None:
    text = json.dumps(value, ensure_ascii=plain).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    counter = ValueCounter(10**6, 10**6)
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        assert counter.feed(text[start:end])
    assert (counter.count, counter.plain) == counted(text)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (b"[" * 10, True),
        (b"[" * 11, False),
        (b"[" + b"1," * 20, True),
        (b"[" + b"null," * 9, False),
        (b'{},"",' * 6, False),
    ],
)
def test_no_more_than_may_be(text: bytes, fits: bool) -> None:
    assert ValueCounter(10, 40).feed(text) is fits


def test_a_string_without_an_end_is_one_value_and_gone_through_once() -> None:
    """Escaped quotes in it begin no other; each of them would be looked for to the end of the piece."""
    counter = ValueCounter(10, 40)
    for _ in range(4):
        assert counter.feed(b'"' + b'\\"' * 200_000 + b"\\")
        assert counter.feed(b'"' + b'\\"' * 200_000)
        assert counter.feed(b'x"')
    assert counter.count == 4

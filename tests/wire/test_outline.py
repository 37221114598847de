"""Values of a JSON text are counted right, and its outline is the text but for its long strings, wherever it is cut."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from crosstie_gateway.wire import outline as outlines
from crosstie_gateway.wire.outline import LONG, Outline, left_out, next_left_out

# Lengths on both sides of what is left out; a character of two bytes and an escape may lie on any cut.
REPEATED = st.sampled_from(["ab", "é", '\\"', "\\", "\n", "{[", "data:image/png;base64,AAAA", "data: é"])
LONG_TEXTS = st.builds(lambda text, size: (text * size)[:size], REPEATED, st.integers(LONG - 4, 2 * LONG + 4))
TEXTS = st.text(st.sampled_from('ab"\\{}[]\n é'), max_size=8) | LONG_TEXTS
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
    outline = Outline(10**6, 10**6)
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        assert outline.feed(text[start:end])
    assert (outline.count, outline.plain) == counted(text)
    assert outline.utf8
    assert len(outline.text) + left_out(outline.text) == len(text)
    assert restored(json.loads(outline.text), text) == value


def restored(value: Any, text: bytes) -> Any:
    """A value of the outline with what was left out put back, where that is longer than may be left out."""
    if isinstance(value, dict):
        return {restored(key, text): restored(one, text) for key, one in value.items()}
    if isinstance(value, list):
        return [restored(one, text) for one in value]
    missing = next_left_out(value.encode()) if isinstance(value, str) else None
    if missing is None:
        return value
    opening, start, length = missing
    assert opening + length > LONG
    return json.loads(b'"%b"' % text[start - opening : start + length])


@given(st.lists(TEXTS, max_size=6), st.booleans())
def test_what_is_made_of_an_outline_is_filled_and_has_an_outline_of_its_own(texts: list[str], plain: bool) -> None:
    """In another order, put together, and behind other words, as another API wants them."""
    text = json.dumps(texts, ensure_ascii=plain).encode()
    outline = Outline(10**6, 10**6)
    assert outline.feed(text)
    kept = json.loads(outline.text)
    made = json.dumps([[f"data:image/png;{one}" for one in reversed(kept)], "".join(kept)], ensure_ascii=plain)
    whole, own = outline.filled(made.encode(), text)
    assert json.loads(whole) == [[f"data:image/png;{one}" for one in reversed(texts)], "".join(texts)]
    assert len(own.text) + left_out(own.text) == len(whole)
    for one in own.text.split(b","):
        missing = next_left_out(one)
        if missing is not None:
            opening, start, length = missing
            assert one[:opening].endswith(whole[start - min(opening, 8) : start])
            assert length > 0


@given(st.binary(max_size=12), st.data())
def test_what_is_no_utf8_is_seen_wherever_it_is_cut(text: bytes, data: st.DataObject) -> None:
    text = b'"\xc3\xa9' + text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    outline = Outline(10**6, 10**6)
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        outline.feed(text[start:end])
    try:
        text.decode()
    except UnicodeDecodeError:
        assert not outline.utf8
    else:
        assert outline.utf8


def test_nobody_can_say_that_more_was_left_out() -> None:
    outline = Outline(10, 10**6)
    outline.feed(b'"%b"' % (b"x" * 1000))
    again = Outline(10, 10**6)
    again.feed(b'"~0123456789abcdef-000000000001-000000999999~"')
    assert left_out(outline.text) + len(outline.text) == 1002
    assert left_out(again.text) == 0


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
    assert Outline(10, 40).feed(text) is fits


def test_a_string_without_an_end_is_one_value_and_gone_through_once() -> None:
    """Escaped quotes in it begin no other; each of them would be looked for to the end of the piece."""
    counter = Outline(10, 40)
    for _ in range(4):
        assert counter.feed(b'"' + b'\\"' * 200_000 + b"\\")
        assert counter.feed(b'"' + b'\\"' * 200_000)
        assert counter.feed(b'x"')
    assert counter.count == 4


def test_long_strings_are_filled_in_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one of them, as of many short ones, no step copies more than so much and one string."""
    monkeypatch.setattr(outlines, "_STEP", 1000)
    for texts in (["a" * 50_000], ["a" * 200] * 250):
        text = json.dumps(texts).encode()
        outline = Outline(10**6, 10**6)
        assert outline.feed(text)
        *steps, last = outline.filling(outline.text, text)
        assert len(steps) >= 40
        assert set(steps) == {None}
        assert last is not None
        assert last[0] == text

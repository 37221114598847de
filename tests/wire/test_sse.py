from hypothesis import given, strategies as st

from crosstie.wire.sse import Events, event, payloads

EVENTS = st.lists(st.text('ab{}:" \u00e9', max_size=20).map(lambda t: event(t.encode())), max_size=8)


@given(EVENTS, st.data())
def test_events_come_out_whole_and_unchanged_however_they_are_cut(events: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(events)
    reader, out = Events(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        out.append(reader.whole(stream[:cut]))
        stream = stream[cut:]
    assert b"".join(out) == b"".join(events)
    assert all(piece.endswith(b"\n\n") for piece in out if piece)
    assert reader.held == b""


def test_the_beginning_of_an_event_is_held_back() -> None:
    reader = Events()
    assert reader.whole(b'data: {"a') == b""
    assert reader.whole(b'": 1}\n\ndata: {"b') == b'data: {"a": 1}\n\n'
    assert reader.held == b'data: {"b'


def test_events_that_end_in_carriage_returns() -> None:
    reader = Events()
    assert reader.whole(b"data: 1\r\n\r\ndata: 2\r\n") == b"data: 1\r\n\r\n"
    assert payloads(b"data: 1\r\n\r\nevent: x\r\ndata: 2\r\n\r\n: comment\r\n\r\n") == [b"1", b"2"]


def test_an_endless_event_is_not_held_for_ever() -> None:
    reader = Events()
    assert reader.whole(b"x" * (5 * 2**20)) == b"x" * (5 * 2**20)

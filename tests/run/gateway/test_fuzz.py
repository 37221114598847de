"""What the gateway parses, on whatever bytes may come: it refuses or reads, and changes nothing that it should not."""

import asyncio
import contextlib
import json
from math import isfinite

import pytest
from hypothesis import example, given, strategies as st

from crosstie.core.errors import BadInput
from crosstie.wire.sse import Events, payloads
from crosstie_gateway.gateway.backend import engine_load
from crosstie_gateway.gateway.body import read_body, usage_of, with_model, with_usage_requested
from crosstie_gateway.gateway.relay import StreamRelay
from crosstie_gateway.gateway.transcript import Transcript
from crosstie_gateway.wire.server import Reply, Server, ServerConnection

PIECES = st.sampled_from(
    [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u0041", b"\\ud800", b"\xff", b"\xc3\xa4", b"1", b"-9", b"e9",
     b"9" * 400, b"null", b"true", b'"model":"m"', b'"stream":true', b'"stream_options":', b'{"include_usage":false}',
     b'"max_tokens":', b'"messages":[{"content":"x"}]', b'"prompt":[1,2]', b'"stream\\u005foptions":null', b" ", b"\n"]
)  # fmt: skip
JSONISH = st.lists(PIECES, max_size=12).map(lambda made: b"{" + b"".join(made) + b"}") | st.binary(max_size=40)
VALUE = st.sampled_from(
    [b"1", b"9" * 400, b"-5", b"1.5", b"true", b"null", b'"m"', b'"\\ud800"', b'"\xff"', b"[1]", b"[[1],[2]]",
     b'{"include_usage":null,"x":"\xff"}', b'{"\xff":1}', b'{"include_usage":false,"x":[{}]}', b'{"include_usage":3}']
)  # fmt: skip
KEY = st.sampled_from(
    [b"model", b"stream", b"stream_options", b"stream\\u005foptions", b"max_tokens", b"messages", b"prompt", b"input",
     b"user", b"\xff", b"\\ud800", b"tools", b"x"]
)  # fmt: skip
OBJECT = st.lists(st.tuples(KEY, VALUE), max_size=6).map(
    lambda made: b'{"model":"m",' + b",".join(b'"%b":%b' % one for one in made) + b"}"
)


@given(JSONISH | OBJECT)
def test_whatever_is_read_of_a_body_can_be_changed_as_well(body: bytes) -> None:
    try:
        asked = read_body(body)
    except BadInput:
        return
    assert asked.most_output is None or 0 < asked.most_output <= 10**9
    with contextlib.suppress(ValueError):
        # Where Python reads it too, both read the same.
        said = json.loads(body)
        assert json.loads(with_model(body, "other")) == {**said, "model": "other"}
    with_model(body, "other")
    if asked.stream and not asked.wants_usage:
        assert read_body(with_usage_requested(body, asked.options_absent)).wants_usage


@pytest.mark.parametrize("deep", [b'{"model":"m","x":', b'{"model":"m","messages":[{"content":', b""])
def test_a_body_nested_too_deeply_is_refused(deep: bytes) -> None:
    with pytest.raises(BadInput):
        read_body(deep + b"[" * 200_000)


@given(JSONISH | st.integers().map(lambda n: b'{"usage":{"prompt_tokens":%d,"completion_tokens":%d}}' % (n, -n)))
def test_usage_is_a_number_of_tokens_or_none(answer: bytes) -> None:
    usage = usage_of(answer)
    assert usage is None or all(0 <= count <= 10**9 for count in usage)
    assert usage_of(b'{"usage":{"prompt_tokens":%b}}' % (b"9" * 400)) is None
    assert usage_of(b'{"usage":' + b"[" * 200_000) is None


NUMBER = st.sampled_from([b"1", b"1e999", b"-1e999", b"-3", b"1e308", b"+", b"e", b"1.2.3", b"NaN", b"0.5", b"+Inf"])
LINE = st.tuples(
    st.sampled_from([b"vllm:num_requests_running", b"sglang:num_queue_reqs", b"vllm:kv_cache_usage_perc", b"x"]),
    st.sampled_from([b"", b'{a="b"}', b"{", b"{}{}"]),
    NUMBER | st.floats().map(lambda value: str(value).encode()) | st.binary(max_size=5),
).map(lambda made: b"%b%b %b\n" % made)


@given(st.lists(LINE, max_size=6).map(b"".join) | st.binary(max_size=60))
def test_an_engine_s_load_is_finite(page: bytes) -> None:
    load = engine_load(page)
    if load is not None:
        assert all(isfinite(value) and value >= 0.0 for value in load if value is not None)


class Written(asyncio.Transport):
    """A client's side that keeps what it is sent. The rest is real: compiled modules take no other."""

    def __init__(self) -> None:
        super().__init__()
        self.all = b""
        connection = ServerConnection(SERVER)
        connection.transport = self
        # Without chunks.
        connection.http11 = connection.keep_alive = False
        self.reply = connection.current = Reply(connection)

    @property
    def data(self) -> bytes:
        return self.all.partition(b"\r\n\r\n")[2]

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.all += data

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False


LOOP = asyncio.new_event_loop()
LOOP.close()
SERVER = Server(LOOP, lambda request, reply: None)
TOKEN = b'data: {"choices":[{"delta":{"content":"%b"},"finish_reason":null}]}'
OPENING = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}'
FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}'
WORDS = st.sampled_from(
    [b"a", b"[DONE]", b"event: error", b'data: {\\"error\\": 1}', b'\\"usage\\":', b"\\n\\n", b"\\r\\n\\r\\n", b"x" * 9]
)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[bytes], list[bytes], int]:
    """Events with their ends, the reads that they come in, and which of them is the usage."""
    ends = draw(st.sampled_from([(b"\n\n",), (b"\r\n\r\n",), (b"\n\n", b"\r\n\r\n")]))
    said = [OPENING] if draw(st.booleans()) else []
    said += [TOKEN % word for word in draw(st.lists(WORDS, min_size=1, max_size=4))]
    if draw(st.booleans()):
        said.insert(draw(st.integers(0, len(said))), b": still there")
    said.append(FINISH)
    said.append(USAGE)
    at = len(said) - 1
    if draw(st.booleans()):
        said.append(b"data: [DONE]")
    events = [one + draw(st.sampled_from(ends)) for one in said]
    whole = b"".join(events)
    cuts = sorted(draw(st.sets(st.integers(1, len(whole) - 1), max_size=12)))
    reads = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    if draw(st.booleans()):
        reads = [whole[i : i + 1] for i in range(len(whole))]
    return events, reads, at


@given(streams(), st.booleans())
@pytest.mark.slow
def test_a_stream_is_relayed_byte_for_byte_but_for_the_usage_however_it_is_cut(
    stream: tuple[list[bytes], list[bytes], int], hide: bool
) -> None:
    events, reads, at = stream
    written = Written()
    relay = StreamRelay(written.reply, 200, b"", hide_usage=hide)
    for read in reads:
        relay.body(read)
        # Never half an event.
        assert not written.data or written.data.endswith((b"\n\n", b"\r\n\r\n"))
    assert relay.complete
    assert not relay.has_error
    relay.end()
    wanted = [event for index, event in enumerate(events) if not (hide and index == at)]
    assert written.data == b"".join(wanted)
    assert relay.usage == (3, 4, 0)


@given(streams(), st.data())
def test_a_stream_that_is_cut_anywhere_before_its_finish_is_not_complete(
    stream: tuple[list[bytes], list[bytes], int], data: st.DataObject
) -> None:
    events, _, at = stream
    before = b"".join(events[: at - 1])
    written = Written()
    relay = StreamRelay(written.reply, 200, b"", hide_usage=True)
    relay.body(before[: data.draw(st.integers(0, len(before)))])
    assert not relay.complete
    assert b"".join(events).startswith(written.data)


# What comes of a text and may look like something else, or end the string; and counts, as vLLM writes them, and others.
TEXTS = st.sampled_from(
    [
        b"a",
        b" word",
        b'\\"',
        b'\\"usage\\":{',
        b"\\n",
        b"\\",
        b'"',
        b'"}}],"x":"',
        b"\n\nevent: error\ndata: x",
        b'"},"finish_reason":"abort"',
        b"error",
    ]
)
COUNT = b',"usage":{"prompt_tokens":3,"completion_tokens":4}'
COUNTS = st.sampled_from(
    [
        b"",
        b"",
        COUNT,
        b',"usage":{"prompt_tokens":3,"d":{"c":1}}',
        b',"usage":{"prompt_tokens":3},"x":{"y":1}',
        b',"usage":null',
        b',"usage":{"completion_tokens":9}}\n\ndata: {"x":{}',
    ]
)


@given(st.lists(st.tuples(TEXTS, COUNTS) | st.just(None), max_size=9), st.booleans(), st.booleans())
@example([(b"a", b""), (b"\n\nevent: error\ndata: x", b"")], False, False)
@example([(b"a", COUNT), (b"b", b',"usage":{"prompt_tokens":3},"x":{"y":1}')], True, False)
@example([(b"a", b',"usage":null'), (b"a", COUNT), (b"b", b',"usage":null')], True, False)
@example([(b"a", COUNT), (b"b", b',"usage":{"completion_tokens":9}}\n\ndata: {"x":{}')], True, False)
def test_events_that_are_like_those_before_are_told_as_if_they_were_looked_through(
    said: list[tuple[bytes, bytes] | None], hide: bool, small: bool
) -> None:
    told: list[tuple[object, ...]] = []
    for learns in (True, False):
        written, transcript = Written(), Transcript()
        relay = StreamRelay(written.reply, 200, b"", hide_usage=hide, hide_continuous=hide, transcript=transcript)
        for one in [*said[:1] * 2, *said]:
            content = (b'{"content":"%b"}' % one[0], one[1]) if one is not None else (b'{"tool_calls":[]}', b"")
            relay._learns = relay._learns and learns
            relay.body(CHUNK % content)
            if small:
                # As if there were many.
                transcript._compress()
        assert learns or not relay._begin
        transcript.read()
        told.append((written.data, relay.events, relay.unsaid, relay.counted, transcript.why_not, transcript.texts))
        told[-1] += (transcript.tokens, transcript.seen_tokens, transcript.missed)
    assert told[0] == told[1]


@pytest.mark.parametrize("usage", [b"", b',"usage":null', COUNT])
@pytest.mark.parametrize("field", [b"content", b"reasoning_content"])
def test_most_events_of_a_stream_are_compared_with_one_before(usage: bytes, field: bytes) -> None:
    written, transcript = Written(), Transcript()
    relay = StreamRelay(written.reply, 200, b"", hide_usage=True, hide_continuous=True, transcript=transcript)
    for word in (b"a", b"b", b'\\"', b"c"):
        assert relay.body(CHUNK % (b'{"%b":"%b"}' % (field, word), usage))
    assert relay._begin.endswith(b'"%b":"' % field)
    assert relay._learns
    said = CHUNK % (b'{"content":"d","tool_calls":[{}]}', b"")
    assert relay.body(said)
    assert relay.body(said.replace(b"data", b"event: x\ndata", 1))
    assert not relay._learns


def test_what_begins_like_an_event_that_was_shortened_is_no_part_of_an_answer() -> None:
    transcript = Transcript()
    transcript.add_usual(b'data: {"choices":[{"text":"', b'data: {"choices":[{"text":"a"}]}\n\n')
    transcript.add(b'data: {"choices":[]}\n\n"b"}]}\n\n')
    transcript.read()
    assert transcript.why_not == "unreadable"


CHUNK = b'data: {"id":"c-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":%b}]%b}\n\n'


@pytest.mark.parametrize("before", [1, 2, 5])
@pytest.mark.parametrize(
    "trouble", [b'data: {"error":{"message":"no"}}\n\n', CHUNK % (b'{},"finish_reason":"abort"', b"")]
)
def test_what_begins_like_all_events_before_is_looked_through_to_its_end(before: int, trouble: bytes) -> None:
    written = Written()
    relay = StreamRelay(written.reply, 200, b"", hide_usage=True, hide_continuous=True, transcript=Transcript())
    words = [CHUNK % (b'{"content":"%d"}' % number, b"") for number in range(before)]
    for word in words:
        # Its usage, which nobody but the gateway has asked for, is taken out of each.
        assert relay.body(word.replace(b"]}\n", b'],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n'))
    assert written.data == b"".join(words)
    assert not relay.body(trouble)
    assert written.data == b"".join(words)
    assert relay.unsaid == trouble
    assert relay.counted == (3, 4, 0)
    assert relay.events == before


@given(st.lists(st.binary(max_size=6) | st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n", b"data: x"]), max_size=20))
def test_events_come_out_as_they_went_in(reads: list[bytes]) -> None:
    events, out = Events(), b""
    for read in reads:
        out += events.whole(read)
        payloads(out)
    assert out + events.held == b"".join(reads)
    assert not out or out.endswith((b"\n\n", b"\r\n\r\n"))

"""gRPC by frames: what a client may send, what it gets, and what ends its connection."""

import asyncio
import struct
from typing import Any, cast

import hpack
import pytest

from crosstie_gateway.wire.grpc import NOT_FOUND, OK, Call, GrpcConnection
from crosstie_gateway.wire.request import RequestLimits
from crosstie_gateway.wire.server import Server, ServerConnection

DATA, HEADERS, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END, END_HEADERS, PADDED, PRIORITISED = 1, 4, 8, 0x20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PROTOCOL, FLOW, SIZE, COMPRESSION, CALM = 1, 3, 6, 9, 11
Frames = list[tuple[int, int, int, bytes]]


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, number) + payload


def message(data: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(data)) + data


class Wire:
    """In the place of a socket."""

    def __init__(self) -> None:
        self.written, self.closed = bytearray(), False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def set_protocol(self, protocol: object) -> None:
        self.protocol = protocol

    def get_extra_info(self, name: str) -> Any:
        return ("10.1.2.3", 5) if name == "peername" else None


class Echo:
    """Says each message again; "end" ends it, "fail" fails, and "gone" counts who went."""

    gone = 0

    def __init__(self, call: Call):
        self.call = call

    def take(self, said: bytes) -> None:
        if said == b"fail":
            raise ValueError("of its own")
        if said == b"end":
            self.call.end(NOT_FOUND, "100% gone")
        else:
            self.call.say(said)

    def on_end(self) -> None:
        self.call.end(OK)

    def on_lost(self) -> None:
        Echo.gone += 1

    def prepare(self) -> None: ...

    def busy(self) -> bool:
        return True


class Client:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.server = Server(self.loop, cast(Any, None), RequestLimits(body_bytes=1000))
        self.wire, self.encoder = Wire(), hpack.Encoder()
        before = ServerConnection(self.server)
        before.transport = cast(Any, self.wire)
        self.on = GrpcConnection(self.server, {b"/echo": Echo})
        Echo.gone = 0
        self.on.begin(before, PREFACE + frame(SETTINGS, 0, 0))
        self.got()

    def head(self, path: bytes = b"/echo") -> bytes:
        fields = [(b":method", b"POST"), (b":path", path), (b"content-type", b"application/grpc"), (b"x-own", b"1")]
        return bytes(self.encoder.encode(fields))

    def send(self, *frames: bytes) -> Frames:
        self.on.data_received(b"".join(frames))
        return self.got()

    def got(self) -> Frames:
        data, found = bytes(self.wire.written), []
        self.wire.written.clear()
        while data:
            size = int.from_bytes(data[:3], "big")
            found.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]))
            data = data[9 + size :]
        return found

    def call(self, number: int = 1) -> None:
        self.send(frame(HEADERS, END_HEADERS, number, self.head()))

    def settled(self) -> Frames:
        """After what was put off for a moment."""
        self.loop.run_until_complete(asyncio.sleep(0))
        return self.got()


@pytest.fixture
def client() -> Any:
    made = Client()
    yield made
    made.loop.close()


def fields(block: bytes) -> dict[bytes, bytes]:
    return dict(hpack.Decoder().decode(block, raw=True))


def test_a_call_is_answered_message_by_message_and_ends(client: Client) -> None:
    first = client.send(
        frame(HEADERS, END_HEADERS, 1, client.head()), frame(DATA, 0, 1, message(b"a") + message(b"bc"))
    )
    assert [(kind, flags) for kind, flags, _, _ in first] == [(HEADERS, END_HEADERS), (DATA, 0)]
    assert fields(first[0][3]) == {b":status": b"200", b"content-type": b"application/grpc"}
    assert first[1][3] == message(b"a") + message(b"bc")
    assert client.on.busy() == 1
    [last] = client.send(frame(DATA, END, 1))
    assert (last[0], last[1]) == (HEADERS, END_HEADERS | END)
    assert fields(last[3]) == {b"grpc-status": b"0"}
    assert (client.on.busy(), Echo.gone) == (0, 1)


def test_messages_may_come_in_any_pieces(client: Client) -> None:
    client.call()
    whole = message(b"abc") + message(b"") + message(b"de")
    got = b"".join(
        payload
        for at in range(len(whole))
        for kind, _, _, payload in client.send(frame(DATA, 0, 1, whole[at : at + 1]))
        if kind == DATA
    )
    assert got == whole


def test_frames_may_come_in_any_pieces(client: Client) -> None:
    sent = frame(HEADERS, END_HEADERS, 1, client.head()) + frame(DATA, END, 1, message(b"abc"))
    found = [one for at in range(len(sent)) for one in client.send(sent[at : at + 1])]
    assert [kind for kind, _, _, _ in found] == [HEADERS, DATA, HEADERS]


def test_heads_are_understood_padded_prioritised_and_in_parts(client: Client) -> None:
    block = client.head()
    padded = bytes((3,)) + b"\0\0\0\0\x10" + block[:4] + b"\0\0\0"
    got = client.send(
        frame(HEADERS, PADDED | PRIORITISED, 1, padded), frame(CONTINUATION, 0, 1, block[4:7]),
        frame(CONTINUATION, END_HEADERS, 1, block[7:]), frame(DATA, PADDED, 1, b"\x02" + message(b"x") + b"\0\0"),
    )  # fmt: skip
    assert got[1][3] == message(b"x")
    # The same head again is places in the table and nothing else; another comes between.
    for number, path, status in ((3, b"/echo", b""), (5, b"/other", b"12"), (7, b"/echo", b""), (9, b"/echo", b"")):
        got = client.send(frame(HEADERS, END_HEADERS, number, client.head(path)), frame(DATA, 0, number, message(b"y")))
        assert fields(got[0][3]).get(b"grpc-status", b"") == status


def test_a_head_that_comes_again_means_what_the_table_says_then(client: Client) -> None:
    # POST, a path that is not to be kept, as Envoy writes it; one that is, and then the newest of the table.
    literal, kept, other = b"\x83\x04\x05/echo", b"\x83\x44\x05/echo", b"\x83\x44\x06/other"
    newest = b"\x83\xbe"
    heads = (literal, literal, kept, newest, newest, other, newest, literal, newest, b"\x20", literal)
    said = []
    for at, block in enumerate(heads):
        got = client.send(frame(HEADERS, END_HEADERS, 2 * at + 1, block), frame(DATA, 0, 2 * at + 1, message(b"y")))
        said.append(fields(got[0][3]).get(b"grpc-status", b"echo"))
    assert said == [b"echo"] * 5 + [b"12", b"12", b"echo", b"12", b"12", b"echo"]


def test_what_nobody_answers_and_what_fails_is_told_in_the_status(client: Client) -> None:
    for number, data, status in (
        (1, message(b"end"), b"5"), (3, message(b"x", flag=1), b"12"), (5, struct.pack(">BI", 0, 2**22), b"8"),
        (7, message(b"fail"), b"13"),
    ):  # fmt: skip
        client.loop.set_exception_handler(lambda *_: None)
        client.call(number)
        [trailers, reset] = client.send(frame(DATA, 0, number, data))
        assert fields(trailers[3])[b"grpc-status"] == status
        # It has not ended its side: nothing more is wanted of it.
        assert (reset[0], reset[2], reset[3]) == (RESET, number, b"\0\0\0\0")
        # What was on its way does no harm.
        assert client.send(frame(DATA, 0, number, message(b"late"))) == []
    assert Echo.gone == 4


def test_nothing_leaves_that_its_client_has_no_room_for(client: Client) -> None:
    client.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 10)))
    client.call()
    got = client.send(frame(DATA, 0, 1, message(b"x" * 20)))
    assert [payload for kind, _, _, payload in got if kind == DATA] == [message(b"x" * 20)[:10]]
    got = client.send(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 5)), frame(DATA, END, 1))
    assert [payload for kind, _, _, payload in got if kind == DATA] == [b"x" * 5]
    # The first room of calls grows for those that are under way.
    got = client.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 100)))
    assert [kind for kind, _, _, _ in got] == [SETTINGS, DATA, HEADERS]
    client.call(3)
    got = client.send(frame(DATA, 0, 3, message(b"y" * 900)))
    assert sum(len(payload) for kind, _, _, payload in got if kind == DATA) == 100


def test_room_is_given_back_for_what_has_come(client: Client) -> None:
    client.call()
    granted = 0
    for _ in range(80):
        got = client.send(*(frame(DATA, 0, 1, message(b"z" * 500)) for _ in range(20)))
        granted += sum(int.from_bytes(more, "big") for kind, _, number, more in got if kind == WINDOW_UPDATE and number)
        client.send(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 10_100)), frame(WINDOW_UPDATE, 0, 0, b"\0\0\x27\x74"))
    assert granted >= 2**19


def test_who_reads_slowly_is_waited_for(client: Client) -> None:
    client.call()
    client.on.pause_writing()
    # Pings are still answered.
    got = client.send(frame(DATA, 0, 1, message(b"x")), frame(PING, 0, 0, b"12345678"))
    assert [(kind, flags) for kind, flags, _, _ in got] == [(PING, 1)]
    client.on.resume_writing()
    assert [kind for kind, _, _, _ in client.settled()] == [HEADERS, DATA]


def test_a_call_that_is_reset_and_a_connection_that_goes_are_told(client: Client) -> None:
    client.call()
    client.call(3)
    assert client.send(frame(RESET, 0, 1, b"\0\0\0\x08")) == []
    assert (Echo.gone, client.on.busy()) == (1, 1)
    client.on.connection_lost(None)
    assert (Echo.gone, client.on.busy()) == (2, 0)


def test_leaving_lets_calls_end_and_then_closes(client: Client) -> None:
    client.call()
    client.on.leave()
    [goodbye] = client.settled()
    assert (goodbye[0], goodbye[3]) == (GOAWAY, struct.pack(">II", 2**31 - 1, 0))
    # One that was on its way.
    client.call(3)
    client.send(frame(DATA, END, 1), frame(DATA, END, 3))
    client.settled()
    assert client.wire.closed


@pytest.mark.parametrize(
    ("code", "frames"),
    [
        (PROTOCOL, [frame(DATA, 0, 0, b"x")]),
        (PROTOCOL, [frame(DATA, 0, 9, b"x")]),
        (PROTOCOL, [frame(HEADERS, END_HEADERS, 2, b"\x82")]),
        (PROTOCOL, [frame(HEADERS, 0, 3, b"\x82"), frame(PING, 0, 0, b"12345678")]),
        (PROTOCOL, [frame(CONTINUATION, END_HEADERS, 3, b"\x82")]),
        (PROTOCOL, [frame(HEADERS, END_HEADERS, 1, b"\x82")]),
        (PROTOCOL, [frame(PUSH, 0, 1, b"\0\0\0\x02")]),
        (PROTOCOL, [frame(DATA, PADDED, 1, b"\x05x")]),
        (PROTOCOL, [frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\0")]),
        (PROTOCOL, [frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 1))]),
        (FLOW, [frame(WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff")]),
        (FLOW, [frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31))]),
        (SIZE, [frame(PING, 0, 0, b"1")]),
        (SIZE, [frame(SETTINGS, 0, 0, b"1")]),
        (SIZE, [frame(WINDOW_UPDATE, 0, 0, b"1")]),
        (SIZE, [struct.pack(">I", 2**15)[1:] + b"\0\0\0\0\0\x01"]),
        (COMPRESSION, [frame(HEADERS, END_HEADERS, 3, b"\xff\xff\xff\xff\x0f")]),
        (CALM, [frame(PING, 0, 0, b"12345678")] * 11_000),
        (CALM, [frame(DATA, 0, 1)] * 11_000),
        (CALM, [frame(HEADERS, 0, 3, b"\x82" * 16_000), *[frame(CONTINUATION, 0, 3, b"\x82" * 16_000)] * 20]),
    ],
)
def test_what_may_not_be_sent_ends_the_connection_with_the_reason(
    client: Client, code: int, frames: list[bytes]
) -> None:
    client.call()
    got = client.send(*frames)
    assert (got[-1][0], struct.unpack(">II", got[-1][3])[1]) == (GOAWAY, code)
    assert client.wire.closed
    assert (Echo.gone, client.on.busy()) == (1, 0)
    # Whatever follows.
    assert client.send(frame(PING, 0, 0, b"12345678")) == []


def test_more_calls_than_may_be_end_it(client: Client) -> None:
    for number in range(1, 2 * 1024, 2):
        client.call(number)
    assert client.on.busy() == 1024
    [goodbye] = client.send(frame(HEADERS, END_HEADERS, 2051, client.head()))
    assert (goodbye[0], goodbye[3][4:]) == (GOAWAY, struct.pack(">I", CALM))


def test_what_does_not_begin_with_http2_is_refused() -> None:
    loop = asyncio.new_event_loop()
    wire = Wire()
    before = ServerConnection(Server(loop, cast(Any, None)))
    before.transport = cast(Any, wire)
    on = GrpcConnection(before.server, {})
    on.begin(before, PREFACE[:10])
    assert not wire.closed
    on.data_received(b"nonsense that is long enough")
    assert wire.closed
    loop.close()

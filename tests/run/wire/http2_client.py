"""A client of HTTP/2 that says what a test tells it to, and notes what comes."""

import asyncio
import ssl
import struct
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import h2.config
import h2.connection
import h2.events
from tests.waiting import until


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        config = h2.config.H2Configuration(client_side=True, header_encoding=None, validate_outbound_headers=False)
        self.h2 = h2.connection.H2Connection(config)
        self.heads: dict[int, list[dict[bytes, bytes]]] = defaultdict(list)
        self.bodies: dict[int, bytes] = defaultdict(bytes)
        self.ended: set[int] = set()
        self.reset: dict[int, int] = {}
        # Codes of goodbyes, and the last stream of each.
        self.goodbyes: list[tuple[int, int]] = []
        self.over = False
        # Whether windows are opened again as data comes.
        self.takes = True
        # Goodbyes are read by hand: to the library the first is the end.
        self._rest = b""

    def begin(self, **settings: int) -> None:
        self.h2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def ask(
        self, path: str = "/a", body: bytes | None = None, *, method: str = "GET", end: bool = True,
        more: tuple[tuple[str, str], ...] = (),
    ) -> int:  # fmt: skip
        number = self.h2.get_next_available_stream_id()
        fields = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "x"), *more]
        self.h2.send_headers(number, fields, end_stream=body is None and end)
        if body is not None:
            self.h2.send_data(number, body, end_stream=end)
        self.flush()
        return number

    async def read(self) -> None:
        with suppress(ConnectionError):
            while data := await self.reader.read(65536):
                self._take(data)
        self.over = True

    def _take(self, data: bytes) -> None:
        self._rest += data
        while len(self._rest) >= 9:
            size, kind = int.from_bytes(self._rest[:3], "big"), self._rest[3]
            if len(self._rest) < 9 + size:
                return
            frame, self._rest = self._rest[: 9 + size], self._rest[9 + size :]
            if kind == 7:
                last, code = struct.unpack(">II", frame[9:17])
                self.goodbyes.append((code, last))
            else:
                for event in self.h2.receive_data(frame):
                    self._note(event)
        self.flush()

    def _note(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ResponseReceived | h2.events.InformationalResponseReceived):
            self.heads[event.stream_id].append(dict(event.headers))
        elif isinstance(event, h2.events.DataReceived):
            self.bodies[event.stream_id] += event.data
            if self.takes and event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            self.ended.add(event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            self.reset[event.stream_id] = int(event.error_code)

    def status(self, number: int) -> bytes:
        return self.heads[number][-1][b":status"] if self.heads[number] else b""

    async def answered(self, number: int) -> tuple[bytes, bytes]:
        await until(lambda: number in self.ended or number in self.reset or self.over)
        return self.status(number), self.bodies[number]


@asynccontextmanager
async def connected(port: int, context: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    client = Client(reader, writer)
    client.begin()
    reading = asyncio.create_task(client.read())
    try:
        yield client
    finally:
        writer.transport.abort()
        await reading

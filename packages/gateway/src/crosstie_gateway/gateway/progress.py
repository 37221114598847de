"""The reply to a streamed request that is held: comments keep it alive before anything is decided for it."""

from typing import Final

from crosstie_gateway.wire.server import Reply

_STREAM: Final = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"


class ProgressReply(Reply):
    """Replaces the reply that it is made of. The head leaves with the first comment, so whatever follows, errors too,
    is an event; to the gateway it has not begun until then."""

    def __init__(self, reply: Reply, lines: bytes):
        super().__init__(reply.connection)
        self.lines, self.watcher = reply.lines + lines, reply.watcher
        reply.connection.current = self
        self._commented = False
        # Whether what comes now is an answer in one piece.
        self._whole = False
        self._pieces: list[bytes] = []

    def comment(self, text: bytes) -> None:
        if not self._commented:
            self._commented = True
            super().start(200, _STREAM, None)
            self.started = False
        super().write(b": %b\n\n" % text)
        self.flush()

    def send(self, status: int, body: bytes, headers: bytes = b"", content_type: bytes = b"application/json") -> None:
        if not self._commented:
            super().send(status, body, headers, content_type)
            return
        self.start(status, headers, len(body))
        self.write(body)
        self.end()

    def start(self, status: int, headers: bytes, length: int | None) -> None:
        if not self._commented:
            super().start(status, headers, length)
            return
        self.started, self._whole = True, length is not None

    def write(self, data: bytes) -> None:
        if self._whole:
            self._pieces.append(data)
        else:
            super().write(data)

    def end(self) -> None:
        if self._whole and not self.done:
            # JSON has no line ends but between values.
            body = b"".join(self._pieces).replace(b"\n", b" ").replace(b"\r", b" ")
            self._whole = False
            super().write(b"data: %b\n\ndata: [DONE]\n\n" % body)
        super().end()

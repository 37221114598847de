"""Answers of HTTP/1.1 as they come in, for clients that have little time: a head, and a body by length or in chunks."""


class Malformed(Exception):
    pass


class Answer:
    """One answer; `feed` takes bytes and gives back those that belong to the next."""

    __slots__ = ("_chunked", "_held", "_left", "closes", "complete", "head", "pieces", "received", "status")

    def __init__(self) -> None:
        self.status = 0
        self.head = b""
        self.pieces: list[bytes] = []
        self.complete = self.closes = self._chunked = False
        self.received = 0
        self._held = b""
        # Bytes that are still to come of the body, or of the present chunk with its line end.
        self._left = -1

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def header(self, name: bytes) -> bytes:
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.lower() == name:
                return value.strip()
        return b""

    def feed(self, data: bytes) -> bytes:
        self.received += len(data)
        data = self._held + data if self._held else data
        self._held = b""
        if not self.head:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._held = data
                return b""
            self._read_head(data[:end])
            data = data[end + 4 :]
        return self._read_chunks(data) if self._chunked else self._read_plain(data)

    def _read_head(self, head: bytes) -> None:
        if not head.startswith(b"HTTP/1.1 "):
            raise Malformed(f"an answer begins with {head[:40]!r}")
        self.head = head
        self.status = int(head[9:12])
        self.closes = self.header(b"connection").lower() == b"close"
        self._chunked = self.header(b"transfer-encoding") == b"chunked"
        if not self._chunked:
            self._left = int(self.header(b"content-length"))

    def _read_plain(self, data: bytes) -> bytes:
        piece, rest = data[: self._left], data[self._left :]
        if piece:
            self.pieces.append(piece)
        self._left -= len(piece)
        self.complete = self._left == 0
        return rest

    def _read_chunks(self, data: bytes) -> bytes:
        while data:
            if self._left < 0:
                end = data.find(b"\r\n")
                if end < 0:
                    break
                self._left = int(data[:end], 16) + 2
                data = data[end + 2 :]
                if len(data) >= self._left == 2:
                    self.complete = True
                    return data[2:]
            if len(data) < self._left:
                break
            if self._left == 2:
                self.complete = True
                return data[2:]
            if data[self._left - 2 : self._left] != b"\r\n":
                raise Malformed("a chunk has another length than it says")
            self.pieces.append(data[: self._left - 2])
            data, self._left = data[self._left :], -1
        self._held = data
        return b""

"""A request as it came, what clients may do, and what is said to those who do something else."""


class Request:
    __slots__ = ("body", "headers", "method", "path", "query")

    def __init__(self, method: str, path: str, query: str, headers: dict[bytes, bytes], body: bytes):
        self.method, self.path, self.query, self.headers, self.body = method, path, query, headers, body


class BadRequest(Exception):
    """A request that is not taken: the status and the reason, which quotes nothing of what was sent."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status, self.why = status, why


class Limits:
    """What a client may do; seconds and bytes."""

    __slots__ = (
        "arriving_bytes", "body_bytes", "body_bytes_per_s", "chunk_line_bytes", "connections",
        "connections_per_address", "framing_bytes", "head_bytes", "head_s", "header_bytes", "headers", "idle_s",
        "pipelined_bytes", "request_s", "target_bytes", "trailer_bytes",
    )  # fmt: skip

    def __init__(
        self,
        body_bytes: int = 64 * 2**20,
        request_s: float = 60.0,
        idle_s: float = 75.0,
        *,
        head_s: float = 10.0,
        body_bytes_per_s: float = 1024.0,
        target_bytes: int = 8 * 1024,
        header_bytes: int = 16 * 1024,
        headers: int = 100,
        head_bytes: int = 64 * 1024,
        chunk_line_bytes: int = 1024,
        framing_bytes: int = 16 * 1024,
        trailer_bytes: int = 8 * 1024,
        pipelined_bytes: int = 64 * 1024,
        arriving_bytes: int = 2**30,
        connections: int = 16_384,
        connections_per_address: int = 0,
    ):
        # How large a body may be; and those of all clients together that have arrived in part.
        self.body_bytes, self.arriving_bytes = body_bytes, arriving_bytes
        # How long a head may take to arrive, how long a connection may lie idle; and how long a request may take in
        # all, to which every byte of its body adds the time that it takes at the least rate.
        self.head_s, self.idle_s = head_s, idle_s
        self.request_s, self.body_bytes_per_s = request_s, body_bytes_per_s
        # The target of a request, one line of its headers, their number, and all of its head.
        self.target_bytes, self.header_bytes, self.headers, self.head_bytes = (
            target_bytes, header_bytes, headers, head_bytes,
        )  # fmt: skip
        # The line before a chunk, with its extensions; how many bytes the frames of all chunks may have more than
        # what they frame; and the lines after the last one.
        self.chunk_line_bytes, self.framing_bytes, self.trailer_bytes = chunk_line_bytes, framing_bytes, trailer_bytes
        # What may have come behind the request that is being answered before no more is read.
        self.pipelined_bytes = pipelined_bytes
        # Connections at once, in all and from one address; 0: as many as there are.
        self.connections, self.connections_per_address = connections, connections_per_address

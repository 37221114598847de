"""A request as it came, and what clients may do."""


class Request:
    __slots__ = ("body", "headers", "method", "path", "query")

    def __init__(self, method: str, path: str, query: str, headers: dict[bytes, bytes], body: bytes):
        self.method, self.path, self.query, self.headers, self.body = method, path, query, headers, body


class Limits:
    """What a client may do; seconds and bytes."""

    __slots__ = ("body_bytes", "idle_s", "request_s")

    def __init__(self, body_bytes: int = 64 * 2**20, request_s: float = 60.0, idle_s: float = 75.0):
        # How large a body may be, how long a request may take to arrive, how long a connection may lie idle.
        self.body_bytes, self.request_s, self.idle_s = body_bytes, request_s, idle_s

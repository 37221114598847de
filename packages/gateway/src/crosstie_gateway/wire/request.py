"""A request as it came, what clients may do, and what is said to those who do something else."""

from dataclasses import dataclass

from crosstie_gateway.wire.multipart import Boundaries
from crosstie_gateway.wire.outline import Outline


class Head:
    """A head that a client repeats but for the body's length: what is before that length and after it, up to the body,
    what it says, and what was made of it."""

    def __init__(
        self, before: bytes, after: bytes, method: str, path: str, query: str, fields: dict[bytes, bytes], http11: bool,
        keep_alive: bool,
    ):  # fmt: skip
        self.before, self.after = before, after
        self.method, self.path, self.query = method, path, query
        self.fields, self.http11, self.keep_alive = fields, http11, keep_alive
        # The lines that go on to a backend, once somebody has put them together.
        self.forwarded: bytes | None = None
        # Whether there are hints to the router among its fields, once somebody has looked.
        self.hinted: bool | None = None
        # What it says of who asks, once the guard has read it: what that is worth is asked at every request.
        self.credential: tuple[bytes, bytes, bytes] | None = None


class Request:
    def __init__(self, method: str, path: str, query: str, headers: dict[bytes, bytes], body: bytes):
        self.method, self.path, self.query, self.headers, self.body = method, path, query, headers, body
        # The model that its path names; None: as of most, its body does.
        self.model: str | None = None
        # The outline of a body that came in pieces, where it may be JSON.
        self.outline: Outline | None = None
        # Where the boundaries of a form are that came in pieces.
        self.boundaries: Boundaries | None = None
        # What its answer is kept with, where it is.
        self.turn: object = None
        # The address that it came from, where somebody wants to know.
        self.peer = ""
        # What it has in common with others of its connection; None: nothing that is known.
        self.head: Head | None = None


class BadRequest(Exception):
    """A request that is not taken: status and reason, which quotes nothing; or the answer's whole body, and lines of
    its head."""

    def __init__(self, status: int, why: str, body: bytes = b"", headers: bytes = b""):
        super().__init__(why)
        self.status, self.why, self.body, self.headers = status, why, body, headers


@dataclass
class RequestLimits:
    """What a client may do; seconds and bytes."""

    # How large a body may be; and in parts, its strings, objects and lists, and bytes of numbers and the like: more
    # than any context's token ids.
    body_bytes: int = 32 * 2**20
    body_values: int = 100_000
    # Where bodies are never read as JSON, whatever they say they are, so that these are not counted.
    form_paths: frozenset[str] = frozenset()
    body_plain_bytes: int = 8 * 2**20
    # Seconds for a request, which a body extends by its bytes at the least rate; for an idle connection; and for a
    # head.
    request_s: float = 60.0
    idle_s: float = 75.0
    head_s: float = 10.0
    body_bytes_per_s: float = 1024.0
    # The target of a request, one line of its headers, their number, and all of its head.
    target_bytes: int = 8 * 1024
    header_bytes: int = 16 * 1024
    headers: int = 100
    head_bytes: int = 64 * 1024
    # The line before a chunk, with extensions; bytes of all chunks' frames beyond their contents; the lines after the
    # last.
    chunk_line_bytes: int = 1024
    framing_bytes: int = 4 * 1024
    trailer_bytes: int = 8 * 1024
    # What may have come behind the request that is being answered before no more is read.
    pipelined_bytes: int = 64 * 1024
    # Of all clients' bodies together that have arrived in part, and of those of one account.
    arriving_bytes: int = 2**30
    arriving_bytes_of_one: int = 2**28
    # Connections at once, in all and from one address; 0: as many as there are.
    connections: int = 16_384
    connections_per_address: int = 0

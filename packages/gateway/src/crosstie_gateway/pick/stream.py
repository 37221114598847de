"""One request on its way through Envoy and back, in messages of its external processing.

To the gateway it is a connection with one request. The gateway's own answers leave as immediate responses; for others
Envoy is told the endpoint, and what it has from there reaches the attempt as if from a connection. Nothing waits:
messages go in, and others are `taken`.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol, cast

from crosstie_gateway.pick import messages
from crosstie_gateway.wire.request import BadRequest, Request
from crosstie_gateway.wire.server import Reply, Server, ServerConnection

# Of an answer's head, what is Envoy's and not the engine's or the gateway's to say.
_ENVOYS = frozenset(b"connection keep-alive transfer-encoding upgrade date server content-length".split())
_MODES = "set request_body_mode and response_body_mode of Envoy's ext_proc filter to FULL_DUPLEX_STREAMED"
# The name of the InferenceObjective that a request is of, as it was and as llm-d calls it now.
_OBJECTIVE, _LLMD_OBJECTIVE = b"x-gateway-inference-objective", b"x-llm-d-inference-objective"
Fields = list[tuple[bytes, bytes]]


class PickOutcome(Protocol):
    """Is told what an endpoint answers."""

    def on_served(self, endpoint: str, details: str) -> None:
        """The endpoint, and how Envoy came by the answer; "": it does not say."""

    def on_head(self, status: int, headers: Fields) -> None: ...
    def on_body(self, data: bytes) -> None: ...
    def on_end(self) -> None: ...


class PickSettings:
    """`fallbacks`: how many endpoints may be named after the first. `objectives`: priorities by InferenceObjective:
    below 0 is dropped first, 0 is usual."""

    def __init__(self, fallbacks: int = 2, objectives: Mapping[str, int] | None = None):
        self.fallbacks, self.objectives = fallbacks, dict(objectives or {})

    def hint(self, headers: dict[bytes, bytes]) -> None:
        """A request's objective as a hint of the gateway's, unless it has such a hint; an unknown objective says
        nothing."""
        named = headers.get(_OBJECTIVE) or headers.get(_LLMD_OBJECTIVE)
        if named is not None:
            priority = self.objectives.get(named.decode("latin-1"), 0)
            if priority:
                headers.setdefault(b"x-crosstie-priority", b"high" if priority > 0 else b"low")


class PickStream(ServerConnection):
    """`wake` is called when something has been said; `peer`: where Envoy is."""

    def __init__(self, server: Server, wake: Callable[[], None], settings: PickSettings, peer: str = ""):
        super().__init__(server)
        self.settings = settings
        self._socket = _NoTransport()
        self.transport = cast(asyncio.Transport, self._socket)
        self._wake, self._peer = wake, peer
        # Messages for Envoy in their order, pieces of the answer after them, and whether the call fails then.
        self._said: list[bytes] = []
        self._open: list[bytes] = []
        self.failed = False
        # Endpoints that the data plane has left; None: all.
        self.subset: tuple[str, ...] | None = None
        # The request as it came: its target, its headers' names, and its body so far.
        self.target = b""
        self.names: frozenset[bytes] = frozenset()
        self._request: Request | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        # Whether trailers followed the body, which then does not end it.
        self._request_trailed = self._response_trailed = False
        self._answering: PickOutcome | None = None
        # Of the answer, whether Envoy's own passes as it is, and its head.
        self._passes = False
        self._status = 0
        self._came: Fields = []

    def peer(self) -> str:
        return self._peer

    # What Envoy says

    def take(self, data: bytes) -> None:
        """Raises Malformed."""
        message = messages.Said(data)
        kind = message.kind
        if kind == messages.RESPONSE_BODY:
            self._take_answer(message)
        elif kind == messages.REQUEST_BODY:
            self._take_body(message)
        elif kind == messages.REQUEST_HEADERS:
            self._begin(message)
        elif kind == messages.RESPONSE_HEADERS:
            self._begin_answer(message)
        elif kind == messages.REQUEST_TRAILERS:
            self._request_trailed = True
            self._ask()
        elif kind == messages.RESPONSE_TRAILERS:
            self._response_trailed = True
            self._end_answer()

    def lost(self) -> None:
        """The call has ended: the client or Envoy has gone, or all was said."""
        if not self.closed:
            self.closed = self._socket.closed = True
            self._request = None
            self.tell_gone()

    def _begin(self, message: messages.Said) -> None:
        fields = message.fields
        headers = {name: value for name, value in fields if not name.startswith(b":")}
        named = dict(fields)
        self.target, self.names = named.get(b":path", b"/"), frozenset(headers)
        self.settings.hint(headers)
        path, _, query = self.target.decode("latin-1").partition("?")
        request = Request(named.get(b":method", b"GET").decode("latin-1"), path, query, headers, b"")
        self._request, self.subset = request, message.subset
        if message.ends:
            self._ask()
            return
        wanted = messages.FULL_DUPLEX_STREAMED
        if message.modes is not None and message.modes != (wanted, wanted):
            self._refuse_early(BadRequest(500, f"the picker is not sent what it needs: {_MODES}"))
            return
        if self.server.opens is not None:
            try:
                # Nobody who may not ask gets to send a body.
                self._account = self.server.opens(request)
            except BadRequest as refused:
                self._refuse_early(refused)

    def _take_body(self, message: messages.Said) -> None:
        request, limits = self._request, self.server.limits
        if request is None:
            # It has been answered.
            return
        self._pieces.append(message.body)
        self._size += len(message.body)
        self._hold(self._size)
        if self._size > limits.body_bytes:
            self._refuse_early(BadRequest(413, f"the body is longer than {limits.body_bytes} bytes"))
        elif self.server.arriving > limits.arriving_bytes:
            self._refuse_early(BadRequest(503, "more is arriving than there is room for; try again later"))
        elif message.ends:
            self._ask()

    def _ask(self) -> None:
        """All of the request is here."""
        request, self._request = self._request, None
        if request is not None:
            request.body, self._pieces = b"".join(self._pieces), []
            self._hold(0)
            self._answer(request)

    def _refuse_early(self, refused: BadRequest) -> None:
        self._request, self._pieces = None, []
        self._hold(0)
        if not refused.body:
            self.server.count(f"http_{refused.status}")
        self.current = reply = Reply(self)
        reply.send(refused.status, refused.body or self.server.refusal(refused.status, refused.why), refused.headers)

    def _begin_answer(self, message: messages.Said) -> None:
        fields = message.fields
        if self._answering is None:
            # Envoy answers by itself, before anything was picked: nothing here is waited for any more.
            self._say(messages.headed((), ()))
            self._passes = True
            self._request = None
            self.tell_gone()
            return
        self._status = int(dict(fields).get(b":status", b"0"))
        self._came = [(name, value) for name, value in fields if not name.startswith(b":")]
        self._answering.on_served(message.served, message.details)
        self._answering.on_head(self._status, self._came)
        if message.ends:
            self._end_answer()

    def _take_answer(self, message: messages.Said) -> None:
        if self._passes:
            self._say(*messages.pieces(messages.RESPONSE_BODY, message.body, ends=message.ends))
        elif self._answering is not None:
            if message.body:
                self._answering.on_body(message.body)
            if message.ends:
                self._end_answer()

    def _end_answer(self) -> None:
        answering, self._answering = self._answering, None
        if self._passes:
            self._say(messages.trailed(messages.RESPONSE_TRAILERS))
        elif answering is not None:
            answering.on_end()

    # What Envoy is told

    def taken(self) -> list[bytes]:
        """What is to be written now."""
        self._close_piece(ends=False)
        said, self._said = self._said, []
        return said

    def _say(self, *told: bytes) -> None:
        self._close_piece(ends=False)
        self._said += told
        self._wake()

    def _close_piece(self, *, ends: bool) -> None:
        if self._open or ends:
            data, self._open = b"".join(self._open), []
            self._said += messages.pieces(messages.RESPONSE_BODY, data, ends=ends)

    def pick(self, endpoints: str, given: Fields, removed: list[bytes], body: bytes, answering: PickOutcome) -> None:
        """The request goes to the first of these that takes it, so changed."""
        self._answering = answering
        self._say(messages.picked(endpoints, given, removed))
        self._say(*messages.pieces(messages.REQUEST_BODY, body, ends=not self._request_trailed))
        if self._request_trailed:
            self._say(messages.trailed(messages.REQUEST_TRAILERS))

    def send_whole(self, status: int, content_type: bytes, lines: bytes, body: bytes) -> None:
        self._answering = None
        given = [(b"content-type", content_type), *_fields(lines)]
        self._say(messages.answered(status, given, b"" if self.head_only else body))

    def send_head(self, status: int, lines: bytes, length: int | None) -> None:
        given = _fields(lines)
        names = {name for name, _ in given}
        removed = {name for name, _ in self._came if name not in names and name not in _ENVOYS}
        if length is None:
            # It is not as long as it was.
            removed.add(b"content-length")
        came = set(self._came)
        changed = [field for field in given if field not in came]
        if status != self._status:
            changed.append((b":status", b"%d" % status))
        self._say(messages.headed(changed, sorted(removed)))

    def send_piece(self, data: bytes) -> None:
        self._open.append(data)
        self._wake()

    def send_now(self) -> None:
        """Everything leaves as it comes."""

    def send_end(self) -> None:
        if self._response_trailed:
            self._say(messages.trailed(messages.RESPONSE_TRAILERS))
        else:
            self._close_piece(ends=True)
            self._wake()

    def next_request(self) -> None:
        self.current = None

    def abort(self, after_written: bool = False) -> None:
        self.failed = True
        self._wake()

    def close(self) -> None:
        self.abort()


def _fields(lines: bytes) -> Fields:
    fields = []
    for line in lines.split(b"\r\n"):
        if line:
            name, _, value = line.partition(b":")
            fields.append((name.strip().lower(), value.strip()))
    return fields


class _NoTransport:
    """In the place of a socket: Envoy reads at its own pace."""

    def __init__(self) -> None:
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

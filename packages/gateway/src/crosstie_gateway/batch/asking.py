"""A line of a batch asked of the gateway like a client's request, and what its answer means to the batch."""

import asyncio
from typing import NamedTuple

import msgspec

from crosstie_gateway.batch.index import Batch
from crosstie_gateway.batch.lines import BatchLine
from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply, Server

# What may be otherwise the next time; and what says that others come first.
_AGAIN = frozenset((408, 425, 429, 500, 502, 503, 504))
_FULL = frozenset((429, 503))
# What is about the key, not the request.
_KEYS_OWN = frozenset(("rate_limit_exceeded", "insufficient_quota", "too_many_open_requests", "subject_unknown"))
_KEY_GONE = frozenset(("api_key_revoked", "api_key_expired", "invalid_api_key"))
_CUT = b'{"error":{"message":"the answer was cut off, or longer than a batch may have"}}'


class _Error(msgspec.Struct):
    code: str | int | None = None
    message: str | None = None


class _Refusal(msgspec.Struct):
    error: _Error


class LineAnswer(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def request_id(self) -> str:
        return self.headers.get(b"x-request-id", b"").decode("latin-1")

    @property
    def again_after_s(self) -> float:
        after = self.headers.get(b"retry-after", b"")
        return float(after) if after.isdigit() else 0.0

    @property
    def said(self) -> tuple[str, str]:
        """Code and message of a refusal."""
        try:
            error = msgspec.json.decode(self.body, type=_Refusal).error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return "", ""
        return str(error.code or ""), error.message or ""

    @property
    def is_final(self) -> bool:
        """Whether asking again would be in vain."""
        return self.status not in _AGAIN or (self._is_in_vain and not self.again_after_s)

    @property
    def is_full(self) -> bool:
        return self.status in _FULL

    @property
    def is_about_key(self) -> bool:
        return self.is_full and self.said[0] in _KEYS_OWN

    def ends_batch(self, left_s: float) -> bool:
        """Whether no further request of its key can be answered in the time that is left."""
        if self.status == 401:
            return self.said[0] in _KEY_GONE
        spent = self._is_in_vain and self.status == 429 and self.said[0] == "insufficient_quota"
        return spent and self.again_after_s >= left_s

    @property
    def _is_in_vain(self) -> bool:
        return self.headers.get(b"x-should-retry") == b"false"


class _Kept:
    """Stands in for a connection's socket. The answer is complete when it is closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.answer: asyncio.Future[bytes] = loop.create_future()
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        self._pieces.append(data)

    def close(self) -> None:
        if not self.answer.done():
            self.answer.set_result(b"".join(self._pieces))

    abort = close

    def is_closing(self) -> bool:
        return self.answer.done()

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Nothing more is asked here."""

    resume_reading = pause_reading


async def ask(gateway: Gateway, server: Server, batch: Batch, line: BatchLine) -> LineAnswer:
    """Cancelling it is what a client does that goes."""
    kept = _Kept(gateway.loop)
    connection = server.accept()
    connection.transport = kept  # type: ignore[assignment]
    connection.keep_alive = False
    connection.current = reply = Reply(connection)
    headers = {b"content-type": b"application/json"}
    if batch.class_name:
        headers[b"x-crosstie-class"] = batch.class_name.encode("latin-1")
    request = Request("POST", line.url, "", headers, line.body)
    request.outline = line.outline
    try:
        gateway.serve_batched(request, reply, batch.key_id)
        answer = await kept.answer
    except asyncio.CancelledError:
        if reply.watcher is not None:
            reply.watcher.on_client_gone()
        raise
    except Exception as error:  # noqa: BLE001 (one request's failure is not the batch's)
        gateway.loop.call_exception_handler({"message": f"{batch.id}: a request failed", "exception": error})
        return LineAnswer(500, {}, b'{"error":{"message":"internal error"}}')
    return _parsed(answer)


def _parsed(answer: bytes) -> LineAnswer:
    """An answer that was cut off counts as 502."""
    head, blank, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    if not blank or headers.get(b"content-length") != b"%d" % len(body):
        return LineAnswer(502, {}, _CUT)
    return LineAnswer(int(first[9:12]), headers, body)

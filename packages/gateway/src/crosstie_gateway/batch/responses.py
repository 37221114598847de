"""OpenAI's responses with state (`store`, `previous_response_id`), kept by the gateway: any replica can go on from one.

A response is stored with its input and its predecessor's id. A request that goes on from it carries the whole
conversation and no id.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import time
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from crosstie.core.histogram import Family
from crosstie.wire.sse import payloads
from crosstie_gateway.batch.database import Database
from crosstie_gateway.batch.desk import Desk
from crosstie_gateway.batch.lines import outlined
from crosstie_gateway.gateway.errors import RequestRejected, error_body
from crosstie_gateway.gateway.fields import decode_parts
from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.gateway.relay import StreamRelay, WholeRelay
from crosstie_gateway.gateway.responses import PATH, KeptResponses
from crosstie_gateway.wire.outline import Outline
from crosstie_gateway.wire.request import Request, RequestLimits
from crosstie_gateway.wire.server import Reply

# The latest first, each with the one before it.
_CHAIN = """
WITH RECURSIVE chain (place, number, bytes, previous) AS (
  SELECT 1, rowid, bytes, previous FROM responses WHERE key_id = :key AND id = :id AND created_at >= :since
  UNION ALL
  SELECT place + 1, responses.rowid, responses.bytes, responses.previous FROM chain JOIN responses
  ON key_id = :key AND id = chain.previous AND created_at >= :since WHERE place < :most)
SELECT number, bytes, previous FROM chain ORDER BY place
"""
_MOST_LINKS = 1000
_LONGEST_ID = 256
# Deleted at once for their age.
_MOST_OLD = 100
# Another worker may still be writing what its client has already read.
_LOOK_AGAIN_S = (0.02, 0.1, 0.3)
_KEPT_STATES = (b'"completed"', b'"incomplete"')
_encode = msgspec.json.Encoder().encode
_decode_text = msgspec.json.Decoder(str | None).decode


class ResponseQuota(NamedTuple):
    """What one key may keep, and all together; older than `keep_s` is nothing."""

    number: int
    bytes: int
    bytes_of_all: int
    keep_s: float


class Turn(NamedTuple):
    """What a response goes back to: the items of its own input, without brackets, and the response before it."""

    input: bytes
    previous: str


class _Ready(NamedTuple):
    """A request as its engine gets it. `turn` None: do not keep its response."""

    body: bytes
    outline: Outline | None
    turn: Turn | None


class _Event(msgspec.Struct):
    response: msgspec.Raw = msgspec.Raw()


_decode_event = msgspec.json.Decoder(_Event).decode


class ResponseStore(Database):
    what = "the file of responses"
    schema = "responses.sql"

    def add(self, key_id: int, name: str, turn: Turn, record: bytes, quota: ResponseQuota) -> bool:
        """Whether it is kept. The oldest of its key, or of the key that keeps most, make room."""
        size, now = len(record) + len(turn.input), int(time())
        if size > min(quota.bytes, quota.bytes_of_all):
            return False
        with self.session() as connection:
            old = "SELECT rowid FROM responses WHERE created_at < ? LIMIT ?"
            connection.execute(f"DELETE FROM responses WHERE rowid IN ({old})", (now - quota.keep_s, _MOST_OLD))
            connection.execute("DELETE FROM responses WHERE key_id = ? AND id = ?", (key_id, name))
            values = (key_id, name, now, size, turn.previous, turn.input, record)
            connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            whose = "SELECT key_id FROM held WHERE key_id = ? AND (number > ? OR bytes > ?)"
            while connection.execute(whose, (key_id, quota.number, quota.bytes)).fetchone():
                connection.execute(_DELETE_OLDEST, (key_id,))
            while connection.execute("SELECT sum(bytes) FROM held").fetchone()[0] > quota.bytes_of_all:
                (most,) = connection.execute("SELECT key_id FROM held ORDER BY bytes DESC LIMIT 1").fetchone()
                connection.execute(_DELETE_OLDEST, (most,))
        return True

    def conversation(self, key_id: int, name: str, since: float, most_bytes: int) -> bytes:
        """The items up to a response, its own included. Raises RequestRejected."""
        asked = {"key": key_id, "id": name, "since": since, "most": _MOST_LINKS}
        with self.session("BEGIN") as connection:
            links = connection.execute(_CHAIN, asked).fetchall()
            if not links or (links[-1][2] and len(links) < _MOST_LINKS):
                missing = links[-1][2] if links else name
                why = f"Previous response with id '{missing}' not found."
                raise RequestRejected(400, why, "previous_response_not_found", param="previous_response_id")
            if links[-1][2] or sum(size for _, size, _ in links) > most_bytes:
                why = f"the conversation has more than {_MOST_LINKS:,} responses, or than serve.max_body_mib"
                raise RequestRejected(413, why, "conversation_too_long")
            look = "SELECT input, record FROM responses WHERE rowid = ?"
            kept = [connection.execute(look, (number,)).fetchone() for number, _, _ in reversed(links)]
        return b",".join(part for said, record in kept for part in (said, _items(decode_parts(record))) if part)

    def record(self, key_id: int, name: str, since: float) -> bytes | None:
        """The response as its client gets it."""
        look = "SELECT previous, record FROM responses WHERE key_id = ? AND id = ? AND created_at >= ?"
        rows = self.rows(look, key_id, name, since)
        if not rows:
            return None
        previous, record = rows[0]
        return _encode(decode_parts(record) | {"store": True, "previous_response_id": previous or None})

    def delete(self, key_id: int, name: str) -> bool:
        with self.session() as connection:
            gone = connection.execute("DELETE FROM responses WHERE key_id = ? AND id = ?", (key_id, name))
            return gone.rowcount > 0


_DELETE_OLDEST = (
    "DELETE FROM responses WHERE rowid ="
    " (SELECT rowid FROM responses WHERE key_id = ? ORDER BY created_at, rowid LIMIT 1)"
)


def _own_items(said: bytes) -> bytes | None:
    """An input's items without brackets; a text is one."""
    if said.startswith(b'"'):
        return b'{"role":"user","content":%b}' % said
    return said[1:-1].strip() if said.startswith(b"[") else None


def _items(record: dict[str, msgspec.Raw]) -> bytes:
    """What a response has said, as items of an input."""
    return _own_items(bytes(record["output"])) or b"" if "output" in record else b""


class StoredResponses(Desk, KeptResponses):
    what = "responses"
    # In order: what a key goes on from has been written before.
    of_one = 1
    is_stored = True

    def __init__(self, file: Path, gateway: Gateway, limits: RequestLimits):
        KeptResponses.__init__(self)
        Desk.__init__(self, gateway)
        self.store, self._limits = ResponseStore(file), limits
        self._counts = {"kept": 0, "lost": 0}
        gateway.metrics.sources.append(self._families)

    def _families(self) -> list[Family]:
        counts = [({"outcome": name}, float(count)) for name, count in self._counts.items()]
        return [("crosstie_responses_total", "counter", "Responses that were to be kept.", counts)]

    @property
    def _since(self) -> float:
        return time() - self._gateway.serving.response_keep_days * 86400.0

    def _quota(self) -> ResponseQuota:
        serving = self._gateway.serving
        of_key, of_all = serving.max_response_mib_per_key * 2**20, serving.max_responses_gib * 2**30
        keep_s = serving.response_keep_days * 86400.0
        return ResponseQuota(serving.max_responses_per_key, int(of_key), int(of_all), keep_s)

    # A request, before it is read

    def prepare(
        self, request: Request, reply: Reply, key_id: int, go_on: Callable[[RequestRejected | None], None]
    ) -> None:
        try:
            size = self._sized(key_id, len(request.body))
        except RequestRejected as refused:
            go_on(refused)
            return
        self._waiting[key_id] += size
        self._tasks.spawn(self._prepare(request, reply, key_id, size, go_on))

    async def _prepare(
        self, request: Request, reply: Reply, key_id: int, size: int, go_on: Callable[[RequestRejected | None], None]
    ) -> None:
        refused: RequestRejected | None = None
        try:
            async with self._counted(key_id, size) as door, door:
                ready = await self._patiently(partial(self._ready, request.body, key_id))
            request.body, request.outline, request.turn = ready.body, ready.outline, ready.turn
        except RequestRejected as error:
            refused = error
        except OSError as error:
            refused = self._failed(error)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # Refused when it is read next, in better words.
            pass
        except Exception as error:  # noqa: BLE001 (one request's failure is answered)
            self._gateway.loop.call_exception_handler({"message": "a response's request", "exception": error})
            refused = RequestRejected(500, "internal error", "internal_error")
        try:
            go_on(refused)
        except Exception as error:  # noqa: BLE001 (as where it is served at once)
            self._gateway.loop.call_exception_handler({"message": "serving a request failed", "exception": error})
            if not reply.started:
                reply.send(500, error_body(500, "internal error"))
            elif not reply.done:
                reply.cut()

    async def _patiently(self, work: Callable[[], _Ready]) -> _Ready:
        for pause_s in _LOOK_AGAIN_S if self._gateway.context.workers is not None else ():
            try:
                return await self._in_thread(work)  # type: ignore[no-any-return]
            except RequestRejected as refused:
                if refused.code != "previous_response_not_found":
                    raise
            await asyncio.sleep(pause_s)
        return await self._in_thread(work)  # type: ignore[no-any-return]

    def _ready(self, body: bytes, key_id: int) -> _Ready:
        """Runs in a thread. Raises RequestRejected and JSON errors."""
        parts, most, previous = decode_parts(body), self._limits.body_bytes, ""
        if bytes(parts.get("background", b"")) == b"true":
            raise RequestRejected(400, "background: responses are answered at once here", "bad_request")
        own, wished = _own_items(bytes(parts.pop("input", b""))), bytes(parts.pop("store", b""))
        if own is None:
            # No input, or none that anybody knows: for its engine to refuse.
            return _Ready(body, outlined(body, self._limits), None)
        if "previous_response_id" in parts:
            previous = _decode_text(parts.pop("previous_response_id")) or ""
        items = [self.store.conversation(key_id, previous, self._since, most)] if previous else []
        listed = b",".join(part for part in (*items, own) if part)
        # Put together once: each copy of a long one holds all others up.
        body = b"".join((_encode(parts | {"store": False})[:-1], b',"input":[', listed, b"]}"))
        if len(body) > most:
            raise RequestRejected(413, "the conversation is longer than serve.max_body_mib", "conversation_too_long")
        outline = outlined(body, self._limits)
        if outline is not None and outline.is_dear:
            raise RequestRejected(413, "the conversation has too many values", "conversation_too_long")
        return _Ready(body, outline, None if wished == b"false" else Turn(own, previous))

    # Its answer

    def keep(self, request: Request, key_id: int, relay: StreamRelay | WholeRelay | None, home: str) -> None:
        turn = request.turn
        if not isinstance(turn, Turn) or relay is None:
            return
        said = bytes(relay.content if isinstance(relay, WholeRelay) else relay.latest)
        try:
            size = self._sized(key_id, len(said) + len(turn.input))
        except RequestRejected:
            self._counts["lost"] += 1
            return
        self._waiting[key_id] += size
        self._tasks.spawn(self._keep(key_id, turn, partial(_record_in, said, isinstance(relay, StreamRelay)), size))

    async def _keep(self, key_id: int, turn: Turn, record: Callable[[], bytes], size: int) -> None:
        quota = self._quota()
        try:
            async with self._counted(key_id, size) as door, door:
                kept = await self._in_thread(lambda: self._add(key_id, turn, record(), quota))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            kept = False
        self._counts["kept" if kept else "lost"] += 1

    def _add(self, key_id: int, turn: Turn, record: bytes, quota: ResponseQuota) -> bool:
        parts = decode_parts(record)
        name = _decode_text(parts.get("id", b"null")) or ""
        is_whole = bytes(parts.get("status", b"")) in _KEPT_STATES and 0 < len(name) <= _LONGEST_ID
        return is_whole and self.store.add(key_id, name, turn, record, quota)

    # What a client asks of its own

    def road(self, request: Request, key_id: int) -> Callable[[], bytes]:
        name = unquote(request.path.removeprefix(f"{PATH}/"))
        if "/" in name or request.method not in ("GET", "DELETE"):
            raise RequestRejected(404, f"there is no {request.method} {request.path}", "not_found")
        return partial(self._shown if request.method == "GET" else self._deleted, key_id, name)

    def _shown(self, key_id: int, name: str) -> bytes:
        record = self.store.record(key_id, name, self._since)
        if record is None:
            raise RequestRejected(404, f"there is no response '{name[:_LONGEST_ID]}' of yours", "response_not_found")
        return record

    def _deleted(self, key_id: int, name: str) -> bytes:
        if not self.store.delete(key_id, name):
            raise RequestRejected(404, f"there is no response '{name[:_LONGEST_ID]}' of yours", "response_not_found")
        return _encode({"id": name, "object": "response", "deleted": True})


def _record_in(said: bytes, is_stream: bool) -> bytes:
    """A whole response: the last event of a stream has one."""
    if not is_stream:
        return said
    told = [bytes(_decode_event(payload).response) for payload in payloads(said) if payload.startswith(b"{")]
    return next((record for record in reversed(told) if record), b"{}")

"""OpenAI's files and batches: what a client may ask of the store, and only of its own part of it."""

import asyncio
import re
import secrets
from collections.abc import Callable, Coroutine
from pathlib import Path
from time import time
from typing import Any
from urllib.parse import parse_qs

import msgspec

from crosstie.core.errors import BadInput
from crosstie.run.batch.lines import ENDPOINTS
from crosstie.run.batch.store import ENDED, Batch, BatchStore, StoredFile
from crosstie.run.gateway.errors import RequestRejected, error_body, retry_after
from crosstie.run.gateway.gateway import Gateway
from crosstie.run.gateway.interfaces import Batches
from crosstie.run.wire.multipart import read_form
from crosstie.run.wire.request import Request
from crosstie.run.wire.server import Reply

_encode = msgspec.json.Encoder().encode
_WINDOW = re.compile(r"(\d{1,4})([mhd])")
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}
_MOST_WINDOW_S = 30 * 86400
_PIECE = 2**18


class _Asked(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


class BatchApi(Batches):
    def __init__(self, store: BatchStore, gateway: Gateway):
        self._store, self._gateway = store, gateway
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, request: Request, reply: Reply) -> None:
        task = self._gateway.loop.create_task(self._answer(request, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, request: Request, reply: Reply) -> None:
        try:
            guard = self._gateway.context.guard
            key_id = guard.known(request) if guard is not None else 0
            found = await self._found(request, key_id)
            if isinstance(found, Path):
                await _send_file(reply, found)
            else:
                reply.send(200, _encode(found))
        except RequestRejected as refused:
            self._gateway.metrics.refused[refused.code] += 1
            lines = refused.headers + retry_after(refused.retry_after_s)
            reply.send(refused.status, error_body(refused.status, str(refused), refused.code), lines)
        except BadInput as error:
            reply.send(400, error_body(400, str(error), "bad_request"))
        except OSError as error:
            reply.send(503, error_body(503, f"the store of batches: {error.strerror or error}", "store_failed"))

    async def _found(self, request: Request, key_id: int) -> Any:
        path = request.path.rstrip("/")
        kind, _, rest = path.removeprefix("/v1/").partition("/")
        name, _, what = rest.partition("/")
        method = request.method
        roads: dict[tuple[str, str, bool, str], Callable[[], Coroutine[Any, Any, Any]]] = {
            ("POST", "files", False, ""): lambda: self._upload(request, key_id),
            ("GET", "files", False, ""): lambda: self._listed(request, self._store.files, key_id),
            ("GET", "files", True, ""): lambda: self._file(key_id, name),
            ("GET", "files", True, "content"): lambda: self._content(key_id, name),
            ("DELETE", "files", True, ""): lambda: self._delete(key_id, name),
            ("POST", "batches", False, ""): lambda: self._create(request, key_id),
            ("GET", "batches", False, ""): lambda: self._listed(request, self._store.batches, key_id),
            ("GET", "batches", True, ""): lambda: self._batch(key_id, name),
            ("POST", "batches", True, "cancel"): lambda: self._cancel(key_id, name),
        }
        road = roads.get((method, kind, bool(name), what))
        if road is None:
            raise RequestRejected(404, f"there is no {method} {path}", "not_found")
        return await road()

    # Files

    async def _upload(self, request: Request, key_id: int) -> Any:
        form = read_form(request.headers.get(b"content-type", b""), request.body, once=("file", "purpose"))
        if "file" not in form:
            raise BadInput("the form has no field 'file'")
        purpose = form["purpose"].content(request.body).decode(errors="replace") if "purpose" in form else ""
        if purpose != "batch":
            raise BadInput(f"purpose '{purpose}': only batch is served here")
        name, content = form["file"].file or "file", form["file"].content(request.body)
        return (await asyncio.to_thread(self._store.add, key_id, name, purpose, content)).shown()

    def _owned(self, key_id: int, name: str) -> StoredFile:
        file = self._store.file(key_id, name)
        if file is None:
            raise RequestRejected(404, f"there is no file '{name}' of yours", "file_not_found")
        return file

    async def _file(self, key_id: int, name: str) -> Any:
        return self._owned(key_id, name).shown()

    async def _content(self, key_id: int, name: str) -> Path:
        return self._store.content_of(self._owned(key_id, name).id)

    async def _delete(self, key_id: int, name: str) -> Any:
        file = self._owned(key_id, name)
        if any(one.input_file_id == file.id for one in await asyncio.to_thread(self._store.unfinished)):
            raise RequestRejected(409, f"'{name}' is the input of a batch that has not ended", "file_in_use")
        await asyncio.to_thread(self._store.delete, file)
        return {"id": file.id, "object": "file", "deleted": True}

    async def _listed(self, request: Request, among: Callable[[int], Any], key_id: int) -> Any:
        asked = parse_qs(request.query)
        given = asked.get("limit", ["20"])[0]
        if not given.isdigit() or not 1 <= int(given) <= 10_000:
            raise BadInput(f"limit '{given}': a whole number from 1 to 10000 is expected")
        limit, after = int(given), asked.get("after", [""])[0]
        found = await asyncio.to_thread(among, key_id)
        if after:
            places = [at for at, one in enumerate(found) if one.id == after]
            found = found[places[0] + 1 :] if places else []
        page = [one.shown() for one in found[:limit]]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return {"object": "list", "data": page, **ends, "has_more": len(found) > limit}

    # Batches

    async def _create(self, request: Request, key_id: int) -> Any:
        try:
            asked = msgspec.json.decode(request.body, type=_Asked)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadInput(f"the body is not as expected: {error}") from None
        if asked.endpoint not in ENDPOINTS:
            raise BadInput(f"endpoint '{asked.endpoint}': {', '.join(ENDPOINTS)} are served in batches")
        window = _WINDOW.fullmatch(asked.completion_window)
        seconds = int(window[1]) * _UNIT_S[window[2]] if window else 0
        if not 0 < seconds <= _MOST_WINDOW_S:
            raise BadInput(f"completion_window '{asked.completion_window}': such as 90m, 24h or 7d, at most 30d")
        self._owned(key_id, asked.input_file_id)
        wished = request.headers.get(b"x-crosstie-class", b"").decode("latin-1").strip()
        if wished and wished not in self._gateway.live.classes:
            raise BadInput(f"x-crosstie-class: '{wished}' is no class of this fleet")
        now = int(time())
        batch = Batch(
            id=f"batch-{secrets.token_hex(12)}", key_id=key_id, endpoint=asked.endpoint,
            input_file_id=asked.input_file_id, completion_window=asked.completion_window, created_at=now,
            expires_at=now + seconds, metadata=asked.metadata, class_name=wished,
        )  # fmt: skip
        await asyncio.to_thread(self._store.save, batch)
        return batch.shown()

    def _owned_batch(self, key_id: int, name: str) -> Batch:
        batch = self._store.batch(key_id, name)
        if batch is None:
            raise RequestRejected(404, f"there is no batch '{name}' of yours", "batch_not_found")
        if batch.status not in ENDED and self._store.is_cancelled(batch):
            batch.status = "cancelling"
        return batch

    async def _batch(self, key_id: int, name: str) -> Any:
        return self._owned_batch(key_id, name).shown()

    async def _cancel(self, key_id: int, name: str) -> Any:
        batch = self._owned_batch(key_id, name)
        if batch.status in ENDED:
            raise RequestRejected(409, f"'{name}' has ended: {batch.status}", "batch_ended")
        await asyncio.to_thread(self._store.cancel, batch)
        return self._owned_batch(key_id, name).shown()


class _Reader:
    """Waits for a client to read."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.ready.set()
        self.gone = False

    def on_client_gone(self) -> None:
        self.gone = True
        self.ready.set()

    def on_client_slow(self) -> None:
        self.ready.clear()

    def on_client_ready(self) -> None:
        self.ready.set()


async def _send_file(reply: Reply, path: Path) -> None:
    """Piece by piece, as fast as it is read."""
    reader = _Reader()
    with path.open("rb") as file:
        reply.watcher = reader
        reply.start(200, b"content-type: application/octet-stream\r\n", path.stat().st_size)
        while piece := await asyncio.to_thread(file.read, _PIECE):
            await reader.ready.wait()
            if reader.gone:
                return
            reply.write(piece)
    reply.end()

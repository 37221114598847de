"""OpenAI's files and batches: what a client may ask of the store, and only of its own part of it."""

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import time
from typing import Any
from urllib.parse import parse_qs

import msgspec

from crosstie.core.errors import BadInput
from crosstie_gateway.batch.index import NoRoom, Quota, QuotaExceeded
from crosstie_gateway.batch.lines import ENDPOINTS
from crosstie_gateway.batch.records import ENDED, Batch
from crosstie_gateway.batch.store import BatchStore
from crosstie_gateway.gateway.errors import RequestRejected, error_body, retry_after
from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.gateway.interfaces import Batches
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.wire.multipart import read_form
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

_encode = msgspec.json.Encoder().encode
_WINDOW = re.compile(r"(\d{1,4})([mhd])")
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}
_MOST_WINDOW_S = 30 * 86400
_PIECE = 2**18
_IN_VAIN = b"x-should-retry: false\r\n"
# Calls to the store at once, in all and of one key; and bytes of a key's requests that wait for their turn, for each of
# which so many count at least.
_THREADS, _OF_ONE = 4, 2
_WAITING_BYTES, _LEAST_BYTES = 2**26, 2**12
_MOST_LISTED = 1000
# As OpenAI has it; and names of files.
_MOST_PAIRS, _MOST_NAME, _MOST_VALUE = 16, 64, 512
_MOST_FILENAME = 255
_MOST_CREATE_BYTES = 2**16


class _Asked(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


class BatchApi(Batches):
    def __init__(self, store: BatchStore, gateway: Gateway):
        self._store, self._gateway = store, gateway
        self._tasks: set[asyncio.Task[None]] = set()
        self._pool = ThreadPoolExecutor(_THREADS, "batch-api")
        # Of each key that asks just now: bytes that wait, and who may go.
        self._waiting: Counter[int] = Counter()
        self._doors: dict[int, asyncio.Semaphore] = {}

    def handle(self, request: Request, reply: Reply) -> None:
        guard, record = self._gateway.context.guard, RequestRecord(b"", request.path, time(), "told", 200)
        try:
            if guard is not None:
                record.key_id = guard.known(request)
            size = max(len(request.body), _LEAST_BYTES)
            if self._waiting[record.key_id] and self._waiting[record.key_id] + size > _WAITING_BYTES:
                raise RequestRejected(429, "too much of yours is waiting for files", "too_many_open_requests", 1.0)
            if guard is not None:
                most = self._gateway.serving.max_open_per_key
                spends = request.method == "POST" and not request.path.rstrip("/").endswith("/cancel")
                record.grant = guard.admit_page(record.key_id, most, spends)
        except RequestRejected as refused:
            self._refuse(reply, refused)
            return
        self._waiting[record.key_id] += size
        task = self._gateway.loop.create_task(self._serve(request, reply, record, size))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._pool.shutdown)

    async def _serve(self, request: Request, reply: Reply, record: RequestRecord, size: int) -> None:
        key_id, guard = record.key_id, self._gateway.context.guard
        headers = record.grant.headers if record.grant is not None else b""
        try:
            async with self._doors.setdefault(key_id, asyncio.Semaphore(_OF_ONE)):
                answer = await self._in_thread(self._road(request, key_id))
            if isinstance(answer, Path):
                await self._send_file(reply, answer, headers)
            else:
                reply.send(200, answer, headers)
        except RequestRejected as refused:
            self._refuse(reply, refused, headers)
        except BadInput as error:
            reply.send(400, error_body(400, str(error), "bad_request"), headers)
        except QuotaExceeded as error:
            self._refuse(reply, RequestRejected(429, str(error), "quota_exceeded", headers=_IN_VAIN), headers)
        except NoRoom:
            why = "there is no room for more files here now"
            self._refuse(reply, RequestRejected(503, why, "store_full", 60.0), headers)
        except OSError as error:
            self._refuse(reply, RequestRejected(503, f"files: {error.strerror}", "store_failed", 5.0), headers)
        finally:
            self._waiting[key_id] -= size
            if not self._waiting[key_id]:
                del self._waiting[key_id], self._doors[key_id]
            if guard is not None:
                guard.settle(record)

    def _refuse(self, reply: Reply, refused: RequestRejected, headers: bytes = b"") -> None:
        self._gateway.metrics.refused[refused.code] += 1
        lines = headers + refused.headers + retry_after(refused.retry_after_s)
        reply.send(refused.status, error_body(refused.status, str(refused), refused.code), lines)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await self._gateway.loop.run_in_executor(self._pool, work)

    def _road(self, request: Request, key_id: int) -> Callable[[], bytes | Path]:
        """What answers it, in a thread: nothing of it changes but the store."""
        path, method = request.path.rstrip("/"), request.method
        kind, _, rest = path.removeprefix("/v1/").partition("/")
        name, _, part = rest.partition("/")
        roads: dict[tuple[str, str, bool, str], Callable[[], bytes | Path]] = {
            ("POST", "files", False, ""): lambda: self._upload(request, key_id),
            ("GET", "files", False, ""): lambda: self._listed(request, key_id, kind),
            ("GET", "files", True, ""): lambda: self._file(key_id, name),
            ("GET", "files", True, "content"): lambda: self._content(key_id, name),
            ("DELETE", "files", True, ""): lambda: self._delete(key_id, name),
            ("POST", "batches", False, ""): lambda: self._create(request, key_id),
            ("GET", "batches", False, ""): lambda: self._listed(request, key_id, kind),
            ("GET", "batches", True, ""): lambda: _encode(self._owned_batch(key_id, name).shown()),
            ("POST", "batches", True, "cancel"): lambda: self._cancel(key_id, name),
        }
        road = roads.get((method, kind, bool(name), part))
        if road is None:
            raise RequestRejected(404, f"there is no {method} {path}", "not_found")
        return road

    def _quota(self) -> Quota:
        serving = self._gateway.serving
        size = int(serving.max_file_gib_per_key * 2**30)
        return Quota(serving.max_files_per_key, size, serving.max_batches_per_key)

    @property
    def _keep_s(self) -> float:
        return self._gateway.serving.batch_keep_days * 86400.0

    # Files

    def _upload(self, request: Request, key_id: int) -> bytes:
        form = read_form(request.headers.get(b"content-type", b""), request.body, once=("file", "purpose"))
        if "file" not in form:
            raise BadInput("the form has no field 'file'")
        purpose = form["purpose"].content(request.body)[:99].decode(errors="replace") if "purpose" in form else ""
        if purpose != "batch":
            raise BadInput(f"purpose '{purpose}': only batch is served here")
        name, content = form["file"].file or "file", form["file"].content(request.body)
        return _encode(self._store.add(key_id, name[:_MOST_FILENAME], content, self._quota()).shown(self._keep_s))

    def _file(self, key_id: int, name: str) -> bytes:
        file = self._store.index.file(key_id, name)
        if file is None:
            raise _no_file(name)
        return _encode(file.shown(self._keep_s))

    def _content(self, key_id: int, name: str) -> Path:
        place = self._store.content_of(name)
        if self._store.index.file(key_id, name) is None or not place.exists():
            raise _no_file(name)
        return place

    def _delete(self, key_id: int, name: str) -> bytes:
        if self._store.index.file(key_id, name) is None:
            raise _no_file(name)
        if not self._store.delete(key_id, name):
            raise RequestRejected(409, f"'{name}' is the input of a batch that has not ended", "file_in_use")
        return _encode({"id": name, "object": "file", "deleted": True})

    def _listed(self, request: Request, key_id: int, kind: str) -> bytes:
        asked = parse_qs(request.query)
        given = asked.get("limit", ["20"])[0]
        if not given.isdigit() or not 1 <= int(given[:6]) <= 10_000:
            raise BadInput(f"limit '{given[:20]}': a whole number from 1 to 10000 is expected")
        limit, after = min(int(given), _MOST_LISTED), asked.get("after", [""])[0]
        index, page = self._store.index, list[dict[str, Any]]()
        if kind == "files":
            page = [file.shown(self._keep_s) for file in index.files(key_id, after, limit + 1)]
        else:
            page = [batch.shown() for batch in index.batches(key_id, after, limit + 1)]
        more, page = len(page) > limit, page[:limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return _encode({"object": "list", "data": page, **ends, "has_more": more})

    # Batches

    def _create(self, request: Request, key_id: int) -> bytes:
        if len(request.body) > _MOST_CREATE_BYTES:
            raise BadInput(f"the body has more than {_MOST_CREATE_BYTES} bytes")
        try:
            asked = msgspec.json.decode(request.body, type=_Asked)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadInput(f"the body is not as expected: {error}") from None
        pairs = (asked.metadata or {}).items()
        if len(pairs) > _MOST_PAIRS or any(len(n) > _MOST_NAME or len(value) > _MOST_VALUE for n, value in pairs):
            raise BadInput(f"metadata: at most {_MOST_PAIRS} names of {_MOST_NAME} and values of {_MOST_VALUE} letters")
        if asked.endpoint not in ENDPOINTS:
            raise BadInput(f"endpoint '{asked.endpoint}': {', '.join(ENDPOINTS)} are served in batches")
        window = _WINDOW.fullmatch(asked.completion_window)
        seconds = int(window[1]) * _UNIT_S[window[2]] if window else 0
        if not 0 < seconds <= _MOST_WINDOW_S:
            raise BadInput(f"completion_window '{asked.completion_window}': such as 90m, 24h or 7d, at most 30d")
        wished = request.headers.get(b"x-crosstie-class", b"").decode("latin-1").strip()
        if wished and wished not in self._gateway.live.classes:
            raise BadInput(f"x-crosstie-class: '{wished}' is no class of this fleet")
        now = int(time())
        batch = Batch(
            id=f"batch-{secrets.token_hex(12)}", key_id=key_id, endpoint=asked.endpoint,
            input_file_id=asked.input_file_id, completion_window=asked.completion_window, created_at=now,
            expires_at=now + seconds, metadata=asked.metadata, class_name=wished,
        )  # fmt: skip
        if not self._store.index.add_batch(batch, self._quota()):
            raise _no_file(asked.input_file_id)
        return _encode(batch.shown())

    def _owned_batch(self, key_id: int, name: str) -> Batch:
        batch = self._store.index.batch(key_id, name)
        if batch is None:
            raise RequestRejected(404, f"there is no batch '{name}' of yours", "batch_not_found")
        return batch

    def _cancel(self, key_id: int, name: str) -> bytes:
        batch = self._owned_batch(key_id, name)
        if batch.status in ENDED:
            raise RequestRejected(409, f"'{name}' has ended: {batch.status}", "batch_ended")
        self._store.index.cancel(key_id, name)
        return _encode(self._owned_batch(key_id, name).shown())

    async def _send_file(self, reply: Reply, path: Path, headers: bytes) -> None:
        """Piece by piece, as fast as it is read."""
        reader = _Reader()
        with await self._in_thread(lambda: path.open("rb")) as file:
            reply.watcher = reader
            kind = b"content-type: application/octet-stream\r\n"
            reply.start(200, kind + headers, path.stat().st_size)
            while piece := await self._in_thread(lambda: file.read(_PIECE)):
                await reader.ready.wait()
                if reader.gone:
                    return
                reply.write(piece)
        reply.end()


def _no_file(name: str) -> RequestRejected:
    return RequestRejected(404, f"there is no file '{name}' of yours", "file_not_found")


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

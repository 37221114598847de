"""Requests about what is kept on disk: let in by their keys, answered by threads in fair turns, refused in words."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from time import time
from typing import Any

from crosstie.core.errors import BadInput
from crosstie_gateway.batch.index import NoRoom, QuotaExceeded
from crosstie_gateway.gateway.errors import RequestRejected, error_body, retry_after
from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply
from crosstie_gateway.wire.tasks import Tasks

_PIECE = 2**18
_IN_VAIN = b"x-should-retry: false\r\n"
_THREADS = 4
# Bytes of a key's requests that wait for their turn, for each of which so many count at least.
_WAITING_BYTES, _LEAST_BYTES = 2**26, 2**12


class Desk:
    # What it keeps; and how much of it is done for one key at once.
    what = ""
    of_one = 2

    def __init__(self, gateway: Gateway):
        self._gateway = gateway
        self._tasks = Tasks()
        self._pool = ThreadPoolExecutor(_THREADS, f"{self.what}-api")
        # Of each key that asks just now: bytes that wait, and who may go.
        self._waiting: Counter[int] = Counter()
        self._doors: dict[int, asyncio.Semaphore] = {}

    def road(self, request: Request, key_id: int) -> Callable[[], bytes | Path]:
        """The function that answers it, to be called in a thread. Raises RequestRejected."""
        raise NotImplementedError

    def handle(self, request: Request, reply: Reply) -> None:
        guard, record = self._gateway.context.guard, RequestRecord(b"", request.path, time(), "told", 200)
        try:
            if guard is not None:
                record.key_id = guard.known(request)
            size = self._sized(record.key_id, len(request.body))
            if guard is not None:
                most = self._gateway.serving.max_open_per_key
                spends = request.method == "POST" and not request.path.rstrip("/").endswith("/cancel")
                record.grant = guard.admit_page(record.key_id, most, spends)
        except RequestRejected as refused:
            self._refuse(reply, refused)
            return
        self._waiting[record.key_id] += size
        self._tasks.spawn(self._serve(request, reply, record, size))

    async def stop(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._pool.shutdown)

    def _sized(self, key_id: int, size: int) -> int:
        """The bytes that such a request counts for while it waits. Raises RequestRejected where that is too much."""
        size = max(size, _LEAST_BYTES)
        if self._waiting[key_id] and self._waiting[key_id] + size > _WAITING_BYTES:
            raise RequestRejected(429, f"too much of yours is waiting for {self.what}", "too_many_open_requests", 1.0)
        return size

    @asynccontextmanager
    async def _counted(self, key_id: int, size: int) -> AsyncIterator[asyncio.Semaphore]:
        """Gives the door of its key, and stops counting the request at the end."""
        try:
            yield self._doors.setdefault(key_id, asyncio.Semaphore(self.of_one))
        finally:
            self._waiting[key_id] -= size
            if not self._waiting[key_id]:
                del self._waiting[key_id], self._doors[key_id]

    async def _serve(self, request: Request, reply: Reply, record: RequestRecord, size: int) -> None:
        guard, headers = self._gateway.context.guard, record.grant.headers if record.grant is not None else b""
        try:
            async with self._counted(record.key_id, size) as door:
                async with door:
                    answer = await self._in_thread(self.road(request, record.key_id))
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
            why = f"there is no room for more {self.what} here now"
            self._refuse(reply, RequestRejected(503, why, "store_full", 60.0), headers)
        except OSError as error:
            self._refuse(reply, self._failed(error), headers)
        finally:
            if guard is not None:
                guard.settle(record)

    def _failed(self, error: OSError) -> RequestRejected:
        return RequestRejected(503, f"{self.what}: {error.strerror}", "store_failed", 5.0)

    def _refuse(self, reply: Reply, refused: RequestRejected, headers: bytes = b"") -> None:
        self._gateway.metrics.refused[refused.code] += 1
        lines = headers + refused.headers + retry_after(refused.retry_after_s)
        reply.send(refused.status, error_body(refused.status, str(refused), refused.code), lines)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await self._gateway.loop.run_in_executor(self._pool, work)

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

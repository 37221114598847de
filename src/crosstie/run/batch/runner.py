"""Runs batches: each request like a client's, at low priority, without targets, on whatever is cheapest.

Of several processes over one folder one runs them, whoever holds a lock. Whoever comes after it goes on from the lines
that were answered; a request that was under way then is asked once more.
"""

import asyncio
import contextlib
import fcntl
import os
from time import time

from crosstie.run.batch.lines import BatchLine, answer_line, check_lines, expired_line, read_lines
from crosstie.run.batch.store import Batch, BatchStore
from crosstie.run.gateway.gateway import Gateway
from crosstie.run.gateway.notices import Notice
from crosstie.run.wire.request import Request
from crosstie.run.wire.server import Reply, Server

_LOOK_S = 0.5
# Batches that go on at once: a small one does not wait for a large one's end.
_AT_ONCE = 4
# What may be otherwise the next time, how often it is asked again, and how long after.
_AGAIN = frozenset((408, 425, 429, 500, 502, 503, 504))
_FULL = frozenset((429, 503))
_ATTEMPTS = 6
_SOONEST_S, _LATEST_S = 1.0, 60.0


class _Kept:
    """What a connection writes to, in the place of a socket. The answer is there when it is closed."""

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


class BatchRunner:
    def __init__(self, store: BatchStore, gateway: Gateway, server: Server, in_flight: int):
        self._store, self._gateway, self._server = store, gateway, server
        self._room = asyncio.Semaphore(in_flight)
        self._lock: int | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self.task: asyncio.Task[None] | None = None
        # How long to wait after a refusal at least; tests are not that patient.
        self.soonest_s = _SOONEST_S

    def start(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        tasks = [*self._running.values(), *([self.task] if self.task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _run(self) -> None:
        while True:
            if self._has_lock() and not self._gateway.draining:
                for batch in self._store.unfinished():
                    if batch.id not in self._running and len(self._running) < _AT_ONCE:
                        self._running[batch.id] = asyncio.get_running_loop().create_task(self._follow(batch))
            await asyncio.sleep(_LOOK_S)

    def _has_lock(self) -> bool:
        """The kernel's, which falls with its holder."""
        if self._lock is None:
            opened = os.open(self._store.folder / ".runner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(opened)
                return False
            self._lock = opened
        return True

    async def _follow(self, batch: Batch) -> None:
        try:
            await self._one_batch(batch)
        except OSError as error:
            sentence = f"batch {batch.id} stands still: {error.strerror or error}"
            self._gateway.notify(Notice("batch_stopped", "error", sentence, batch=batch.id))
            # A full disk may have room later.
            await asyncio.sleep(_LATEST_S)
        finally:
            self._running.pop(batch.id, None)

    async def _one_batch(self, batch: Batch) -> None:
        store, source = self._store, self._store.content_of(batch.input_file_id)
        if batch.status == "validating":
            batch.total, batch.errors = await asyncio.to_thread(check_lines, source, batch.endpoint)
            batch.become("failed" if batch.errors else "in_progress")
            store.save(batch)
            if batch.errors:
                return
        if batch.status != "finalizing":
            answered, failed = await asyncio.to_thread(store.answered, batch)
            batch.completed, batch.failed = len(answered), len(failed)
            await self._requests(batch, answered | failed)
        await asyncio.to_thread(self._finalise, batch)

    async def _requests(self, batch: Batch, done: set[str]) -> None:
        """All that are left, until they have ended, the time is over, or somebody wants no more of it."""
        store, tasks = self._store, set[asyncio.Task[None]]()
        saved = time()
        try:
            for line in read_lines(store.content_of(batch.input_file_id)):
                if line.custom_id in done:
                    continue
                if not await self._has_room(batch):
                    break
                task = asyncio.get_running_loop().create_task(self._request(batch, line))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                if time() - saved > 1.0:
                    saved = time()
                    await asyncio.to_thread(store.save, batch)
            while tasks and not store.is_cancelled(batch):
                await asyncio.wait(tasks, timeout=_LOOK_S)
                await asyncio.to_thread(store.save, batch)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._gateway.draining:
            # Whoever comes next goes on with it.
            raise asyncio.CancelledError

    async def _has_room(self, batch: Batch) -> bool:
        """Once another request may run; whether one of this batch still should."""
        while not (self._store.is_cancelled(batch) or time() >= batch.expires_at or self._gateway.draining):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._room.acquire()
                    return True
        return False

    async def _request(self, batch: Batch, line: BatchLine) -> None:
        try:
            attempts, waits = 1, 0
            while True:
                left_s = batch.expires_at - time()
                if left_s <= 0:
                    return
                status, headers, body = await self._ask(batch, line)
                if status not in _AGAIN or attempts == _ATTEMPTS:
                    break
                # Who was only turned away, because others come first, waits for as long as the batch has.
                attempts += status not in _FULL
                told = headers.get(b"retry-after", b"")
                wished = float(told) if told.isdigit() else 0.0
                await asyncio.sleep(min(max(wished, self.soonest_s * 2.0**waits), _LATEST_S, max(left_s, 0.0)))
                waits = min(waits + 1, 6)
            request_id = headers.get(b"x-request-id", b"").decode("latin-1")
            kind = "output" if status < 400 else "error"
            self._append(batch, kind, answer_line(batch.id, line.custom_id, request_id, status, body))
            if kind == "output":
                batch.completed += 1
            else:
                batch.failed += 1
        finally:
            self._room.release()

    async def _ask(self, batch: Batch, line: BatchLine) -> tuple[int, dict[bytes, bytes], bytes]:
        kept = _Kept(self._gateway.loop)
        connection = self._server.accept()
        connection.transport = kept  # type: ignore[assignment]
        connection.keep_alive = False
        connection.current = reply = Reply(connection)
        headers = {b"content-type": b"application/json"}
        if batch.class_name:
            headers[b"x-crosstie-class"] = batch.class_name.encode("latin-1")
        request = Request("POST", line.url, "", headers, bytes(line.body))
        self._gateway.serve_batched(request, reply, batch.key_id)
        try:
            answer = await kept.answer
        except asyncio.CancelledError:
            if reply.watcher is not None:
                reply.watcher.on_client_gone()
            raise
        return _parsed(answer)

    def _append(self, batch: Batch, kind: str, line: bytes) -> None:
        with self._store.answers_of(batch, kind).open("ab") as file:
            file.write(line)

    def _finalise(self, batch: Batch) -> None:
        store = self._store
        if batch.status != "finalizing":
            # Decided once, and written down before anything is moved: from then on the lines are counted no more.
            is_whole = batch.completed + batch.failed == batch.total
            batch.outcome = "cancelled" if store.is_cancelled(batch) else "completed" if is_whole else "expired"
            if batch.outcome == "expired":
                self._tell_expired(batch)
            batch.become("finalizing")
            store.save(batch)
        batch.output_file_id, batch.error_file_id = store.adopt(batch, "output"), store.adopt(batch, "error")
        batch.become(batch.outcome)
        store.save(batch)

    def _tell_expired(self, batch: Batch) -> None:
        store = self._store
        answered, failed = store.answered(batch)
        for line in read_lines(store.content_of(batch.input_file_id)):
            if line.custom_id not in answered and line.custom_id not in failed:
                self._append(batch, "error", expired_line(batch.id, line.custom_id))


def _parsed(answer: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of a whole answer; one that was cut off is the gateway's failure."""
    head, found, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    if not found or headers.get(b"content-length") != b"%d" % len(body):
        return 502, {}, b'{"error":{"message":"the answer was cut off, or longer than a batch may have"}}'
    return int(first[9:12]), headers, body

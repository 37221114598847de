"""Runs batches: each request like a client's, at low priority, without targets, on whatever is cheapest.

Of several processes over a folder the one that holds a lock runs them. Its successor goes on after the answered lines,
and asks once more what was under way.
"""

import asyncio
import contextlib
import errno
import fcntl
import heapq
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import time
from typing import TypeVar

from crosstie_gateway.batch.asking import LineAnswer, ask
from crosstie_gateway.batch.index import Batch
from crosstie_gateway.batch.lines import BatchLine, LineReader
from crosstie_gateway.batch.store import BatchStore
from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.wire.server import Server

# Lines that are left when more are read.
_FEW = 8


class KeyRuns:
    """A key with batches that run."""

    def __init__(self, key_id: int):
        self.key_id = key_id
        self.runs: deque[BatchRun] = deque()
        self.in_flight = 0
        # By the loop's clock.
        self.rests_until = 0.0


class BatchRun:
    """A batch that runs, and what is left of it."""

    def __init__(self, batch: Batch):
        self.batch = batch
        # Its key's runs, once it has joined them.
        self.of_key = KeyRuns(batch.key_id)
        self.reader: LineReader | None = None
        self.read: deque[BatchLine] = deque()
        # Those that are asked again, and when.
        self.again: list[tuple[float, int, BatchLine]] = []
        # Requests under way; of these, those that have their answer and have yet to write it down.
        self.tasks: set[asyncio.Task[None]] = set()
        self.answered: set[asyncio.Task[None]] = set()
        self.reading: asyncio.Task[None] | None = None
        self.rests_until = 0.0
        self.waits = 0
        # Whether somebody wants it to stop.
        self.cancelled = False
        # Something of this may be otherwise now.
        self.changed = asyncio.Event()

    @property
    def stops(self) -> bool:
        return self.cancelled or bool(self.batch.errors) or time() >= self.batch.expires_at

    @property
    def is_over(self) -> bool:
        if self.tasks or self.reading is not None:
            return False
        return self.stops or (self.reader is not None and self.reader.at_end and not self.read and not self.again)

    @property
    def outcome(self) -> str:
        """When it is over."""
        if self.cancelled:
            return "cancelled"
        if self.batch.errors:
            return "failed"
        return "completed" if self.batch.completed + self.batch.failed >= self.batch.total else "expired"

    def wants_more(self) -> bool:
        more = self.reader is not None and not self.reader.at_end and self.reading is None
        return more and len(self.read) < _FEW and not self.stops

    def next(self, now: float, most_again: int) -> BatchLine | None:
        if self.rests_until > now or self.stops:
            return None
        if self.again and self.again[0][0] <= now:
            return heapq.heappop(self.again)[2]
        # Where many are to be asked again, something is wrong: those first.
        return self.read.popleft() if self.read and len(self.again) < most_again else None

    def ask_again(self, line: BatchLine, at: float) -> None:
        heapq.heappush(self.again, (at, line.number, line))


class Turns:
    """Whose request is next: keys take turns, and a key's batches take turns. A refused request goes back to its batch;
    the batch, or all of its key's, then rest for as long as the refusal said. `in_flight`: requests at once."""

    def __init__(self, in_flight: int):
        # In all, and of one key.
        self.most = self.most_of_one = in_flight
        self.in_flight = 0
        self._keys: deque[KeyRuns] = deque()
        self._by_key: dict[int, KeyRuns] = {}

    def join(self, run: BatchRun) -> None:
        of_key = self._by_key.get(run.batch.key_id)
        if of_key is None:
            of_key = self._by_key[run.batch.key_id] = run.of_key
            self._keys.append(of_key)
        run.of_key = of_key
        of_key.runs.append(run)

    def leave(self, run: BatchRun) -> None:
        run.of_key.runs.remove(run)
        if not run.of_key.runs:
            self._keys.remove(run.of_key)
            del self._by_key[run.of_key.key_id]

    def count(self, run: BatchRun, more: int) -> None:
        self.in_flight += more
        run.of_key.in_flight += more

    def next(self, now: float) -> tuple[BatchRun, BatchLine] | None:
        if self.in_flight >= self.most:
            return None
        for _ in range(len(self._keys)):
            of_key = self._keys[0]
            self._keys.rotate(-1)
            if of_key.in_flight >= self.most_of_one or of_key.rests_until > now:
                continue
            for _ in range(len(of_key.runs)):
                run = of_key.runs[0]
                of_key.runs.rotate(-1)
                line = run.next(now, self.most)
                if line is not None:
                    return run, line
        return None


_LOOK_S = 0.5
# Batches that go on at once, of one key and in all: a small one does not wait for a large one's end.
_AT_ONCE, _IN_ALL = 4, 1024
# How often a request that failed is asked again, and how long after.
_ATTEMPTS = 6
_SOONEST_S, _LATEST_S = 1.0, 60.0
# How often a disk that was full is tried again; and room for the answers under way, below which nothing is asked.
_STILL_S = 1.0
_ANSWER_BYTES = 2**16
# How often what is old is deleted, and what nobody knows of.
_SWEEP_S, _ORPHANS_S = 60.0, 3600.0
R = TypeVar("R")


class BatchRunner:
    def __init__(self, store: BatchStore, gateway: Gateway, server: Server, in_flight: int):
        self._store, self._gateway, self._server = store, gateway, server
        self._turns = Turns(in_flight)
        self._lock: int | None = None
        self._running: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._wake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        # Answers and the index; lines; and whole files. Each waits for the disk, and none for another.
        names = ("writes", "lines", "files")
        self._writes, self._lines, self._files = (ThreadPoolExecutor(1, f"batch-{name}") for name in names)
        # How long to wait after a refusal at least; tests are not that patient.
        self.soonest_s = _SOONEST_S
        # Nothing is asked until then, as there is no room for answers; and what was said of it.
        self._still_until, self._still_for, self._has_room = 0.0, "", True
        self._looked = self._swept = self._orphans = -_ORPHANS_S

    def start(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def drain(self, within_s: float) -> None:
        """Waits for requests under way; a gateway that leaves asks nothing new."""
        tasks = [task for run, _ in self._running.values() for task in run.tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)

    async def stop(self) -> None:
        tasks = [follower for _, follower in self._running.values()]
        tasks += [task for run, _ in self._running.values() for task in (*run.tasks, run.reading) if task is not None]
        tasks += [self.task] if self.task is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool in (self._writes, self._lines, self._files):
            await asyncio.to_thread(pool.shutdown)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[..., R], *given: object) -> R:
        return await self._gateway.loop.run_in_executor(pool, work, *given)

    # Which batches

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except OSError as error:
                self._stand_still(error)
            except Exception as error:  # noqa: BLE001 (whatever it was, it is no reason to run no batch any more)
                self._gateway.loop.call_exception_handler({"message": "batches", "exception": error})
            if await self._hand_out():
                continue
            self._wake.clear()
            # Not by `wait_for`: before Python 3.12 that forgets that it was cancelled where it is woken as well.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._wake.wait()

    async def _look(self) -> None:
        now = self._gateway.loop.time()
        if now - self._looked < _LOOK_S or self._gateway.draining or not self._has_lock():
            return
        self._looked = now
        # A key leaves others a quarter, so that nobody waits for the end of another's longest answers.
        most, guard = self._turns.most, self._gateway.context.guard
        self._turns.most_of_one = most if guard is None else max(most * 3 // 4, 1)
        self._has_room = await self._in(self._writes, self._store.free_bytes) >= _ANSWER_BYTES * most
        if not self._has_room:
            # Before any batch begins, which would ask for answers at once; until a look finds room.
            self._stand_still(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        index = self._store.index
        for name, cancelled in await self._in(self._writes, index.turns, time(), _AT_ONCE, _IN_ALL):
            if name not in self._running:
                batch = await self._in(self._writes, index.record, name)
                if batch is not None:
                    run = BatchRun(batch)
                    self._running[name] = run, self._gateway.loop.create_task(self._follow(run))
            if name in self._running:
                self._running[name][0].cancelled = cancelled
        for run, _ in self._running.values():
            run.changed.set()
        await self._sweep(now)
        asked = [run.batch for run, _ in self._running.values() if run.tasks]
        if asked:
            await self._in(self._writes, index.save, asked)

    async def _sweep(self, now: float) -> None:
        if now - self._swept >= _SWEEP_S:
            self._swept = now
            await self._in(self._writes, self._store.delete_old, self._gateway.serving.batch_keep_days * 86400.0)
        if now - self._orphans >= _ORPHANS_S:
            self._orphans = now
            await self._in(self._writes, self._store.delete_orphans)

    def _has_lock(self) -> bool:
        """The kernel releases it when its holder ends."""
        if self._lock is None:
            opened = os.open(self._store.folder / ".runner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(opened)
                return False
            self._lock = opened
        return True

    def _stand_still(self, error: OSError) -> None:
        """A full disk may have room later."""
        self._still_until = self._gateway.loop.time() + _STILL_S
        why = error.strerror or str(error)
        if why != self._still_for:
            self._still_for = why
            self._gateway.notify(Notice("batches_stopped", "error", f"batches stand still: {why}", why=why))

    async def _wait_for_room(self, error: OSError) -> None:
        self._stand_still(error)
        await asyncio.sleep(_STILL_S)

    # One batch

    async def _follow(self, run: BatchRun) -> None:
        batch = run.batch
        try:
            await self._work_off(run)
        except FileNotFoundError as error:
            _tell_missing(run, error)
            await self._end(run, "failed")
        except OSError as error:
            await self._wait_for_room(error)
        except Exception as error:  # noqa: BLE001 (a batch that nobody foresaw ends as well)
            self._gateway.loop.call_exception_handler({"message": batch.id, "exception": error})
            batch.fail("internal_error", "the gateway failed at this batch")
            await self._end(run, "failed")
        finally:
            self._running.pop(batch.id, None)
            # At once: the next one of its key need not wait.
            self._looked = -_LOOK_S
            self._wake.set()

    async def _end(self, run: BatchRun, outcome: str) -> None:
        batch = run.batch
        try:
            try:
                await self._in(self._files, self._store.finalise, batch, outcome, self._server.limits)
            except (ValueError, LookupError) as error:
                # Its input is another than the one that was checked.
                batch.fail("file_changed", f"the batch's input has changed: {error}")
                batch.become("failed")
                await self._in(self._writes, self._store.index.save, [batch])
        except OSError as error:
            # The next look tries it again.
            await self._wait_for_room(error)

    async def _work_off(self, run: BatchRun) -> None:
        batch, store, limits = run.batch, self._store, self._server.limits
        if batch.status == "validating" and not run.cancelled:
            most_lines = self._gateway.serving.max_batch_lines
            await self._in(self._files, store.check, batch, most_lines, limits)
            if batch.errors:
                return
        if batch.status == "in_progress":
            done = await self._in(self._files, store.resume, batch, limits)
            run.reader = LineReader(store.content_of(batch.input_file_id), done, limits)
            self._turns.join(run)
            try:
                await self._until_over(run)
            finally:
                self._turns.leave(run)
        await self._end(run, run.outcome)

    async def _until_over(self, run: BatchRun) -> None:
        while not run.is_over:
            if run.cancelled:
                for task in run.tasks - run.answered:
                    task.cancel()
            if run.wants_more():
                run.reading = self._gateway.loop.create_task(self._read(run))
            run.changed.clear()
            await run.changed.wait()

    async def _read(self, run: BatchRun) -> None:
        try:
            if run.reader is not None:
                run.read.extend(await self._in(self._lines, run.reader.more))
        except FileNotFoundError as error:
            _tell_missing(run, error)
        except OSError as error:
            await self._wait_for_room(error)
        except (ValueError, LookupError) as error:
            run.batch.fail("file_changed", f"the batch's input has changed: {error}")
        finally:
            run.reading = None
            run.changed.set()
            self._wake.set()

    # One request

    async def _hand_out(self) -> bool:
        """Starts requests in turn while there is room; whether there may be more to start."""
        loop = self._gateway.loop
        for _ in range(self._turns.most):
            stands = self._gateway.draining or not self._has_room or loop.time() < self._still_until
            turn = None if stands else self._turns.next(loop.time())
            if turn is None:
                return False
            run, line = turn
            self._turns.count(run, 1)
            task = loop.create_task(self._request(run, line))
            run.tasks.add(task)
            task.add_done_callback(partial(self._ended, run))
            if run.wants_more():
                run.changed.set()
            # One in a turn of the loop; and a refusal is heard before the next is asked.
            await asyncio.sleep(0)
        return True

    def _ended(self, run: BatchRun, task: asyncio.Task[None]) -> None:
        run.tasks.discard(task)
        run.answered.discard(task)
        self._turns.count(run, -1)
        run.changed.set()
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._gateway.loop.call_exception_handler({"message": run.batch.id, "exception": error})
            run.batch.fail("internal_error", "the gateway failed at a request of this batch")

    async def _request(self, run: BatchRun, line: BatchLine) -> None:
        answer = await ask(self._gateway, self._server, run.batch, line)
        if self._goes_on_waiting(run, line, answer):
            return
        run.waits = 0
        task = asyncio.current_task()
        assert task is not None
        run.answered.add(task)
        kind = await self._keep(run, line, answer)
        if kind == "output":
            run.batch.completed += 1
        else:
            run.batch.failed += 1

    def _goes_on_waiting(self, run: BatchRun, line: BatchLine, answer: LineAnswer) -> bool:
        """Whether this is no answer yet: the line is asked again, or the batch ends."""
        if answer.ends_batch(run.batch.expires_at - time()):
            run.batch.fail(*answer.said)
            return True
        if answer.is_final:
            return False
        now = self._gateway.loop.time()
        line.attempts += not answer.is_full
        if line.attempts == _ATTEMPTS:
            return False
        tries = line.attempts if not answer.is_full else 0 if answer.is_about_key else run.waits
        after_s = min(max(answer.again_after_s, self.soonest_s * 2.0 ** min(tries, 6)), _LATEST_S)
        if answer.is_about_key:
            run.of_key.rests_until = now + after_s
        elif answer.is_full:
            run.waits += 1
            run.rests_until = now + after_s
        run.ask_again(line, now + after_s)
        return True

    async def _keep(self, run: BatchRun, line: BatchLine, answer: LineAnswer) -> str:
        """Waits for room on a full disk: the answer was paid for."""
        while True:
            given = (run.batch, line, answer.status, answer.request_id, answer.body)
            try:
                kind = await self._in(self._writes, self._store.keep, *given)
            except OSError as error:
                await self._wait_for_room(error)
            else:
                self._still_for = ""
                return kind


def _tell_missing(run: BatchRun, error: FileNotFoundError) -> None:
    run.batch.fail("file_missing", f"a file of this batch is no more: {os.path.basename(error.filename or '')}")

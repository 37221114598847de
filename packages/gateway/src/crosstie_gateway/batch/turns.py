"""Whose request is next: keys take turns, and a key's batches take turns.

A refused request goes back to its batch; the batch, or all of its key's, then rest for as long as the refusal said.
"""

import asyncio
import heapq
from collections import deque
from time import time

from crosstie_gateway.batch.lines import BatchLine, LineReader
from crosstie_gateway.batch.records import Batch

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
    """`in_flight`: requests at once."""

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

"""Numbers that the processes of one machine share: each writes its own row of a place and reads everybody's.

Anonymous memory, made before the fork. Numbers are eight aligned bytes, written at once, so requests need no lock.
Giving out places takes the kernel's, which falls with its holder. One row beyond the processes' is for peers.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from hashlib import blake2b
from time import monotonic

from crosstie.route.load import LOAD_FIELDS, SharedLoad, combined

# Places for replicas and for keys: memory that nobody has written to costs nothing.
REPLICAS, KEYS = 4096, 32768
# Of a place for a replica: its name, then what all write (the latest counts), then each field's rows.
_NAME, _COMMON = 0, 1
COMMON = (
    "probe_began_at", "probed_at", "health", "read_began_at", "reported_at", "running", "waiting", "kv_used",
    "busy_until", "open_until",
)  # fmt: skip
_BUSY = COMMON.index("busy_until")
OWN = ("changed", "used", *LOAD_FIELDS)
# The first of them, and the place among these of the rate.
_IN_FLIGHT, _RATE = OWN.index("in_flight"), LOAD_FIELDS.index("prompt_rate")
# Clients that a process may have more than another and still take the next; and more than any has.
_MORE, _MANY = 2, 10**9
# How long peers' numbers are believed without news of peers.
SILENT_S = 3.0


def name_of(text: str) -> int:
    """Eight bytes for a name of any length, never 0, which is nobody's."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") | 1


class Board:
    def __init__(self, workers: int, replicas: int = REPLICAS, keys: int = KEYS):
        # Of its machine; None: the system's.
        self.clock: Callable[[], float] | None = None
        self.workers, self.rows = workers, workers + 1
        self.replicas, self.keys = replicas, keys
        # First three numbers for each row, and when peers were last heard of.
        self._heard_at = 3 * self.rows
        self._replicas_at = self._heard_at + 1
        self.stride = _COMMON + len(COMMON) + len(OWN) * self.rows
        self.keys_at = self._replicas_at + replicas * self.stride
        # Of a key: its name; by row two minutes with number, requests and tokens; then by row dollars in flight, as
        # announced and how much more at worst.
        self.held_at = 1 + 6 * self.rows
        self.key_stride = self.held_at + 2 * self.rows
        # A byte for each replica and each key: set by a change, cleared when peers are told.
        self._marks_at = 8 * (self.keys_at + keys * self.key_stride)
        # In whole numbers, as it is read.
        self.memory = mmap.mmap(-1, -(-(self._marks_at + replicas + keys) // 8) * 8)
        whole = memoryview(self.memory)
        self.numbers: memoryview[float] = whole.cast("d")
        self.words: memoryview[int] = whole.cast("Q")
        # By row, how many requests wait there for room, how many clients are connected, and when its loop last turned.
        self.queued, self.clients, self.turned_at = (
            self.numbers[n * self.rows : (n + 1) * self.rows] for n in range(3)
        )
        self._lock = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as this is)
        # By row, what wakes that process: somebody has made room that it may be waiting for.
        self.bells = [os.pipe() for _ in range(workers)]
        for ends in self.bells:
            for end in ends:
                os.set_blocking(end, False)
        for row in range(self.rows):
            # Until it serves, nobody waits for it at the door.
            self.clients[row] = _MANY
        # The same for all processes of this machine, later ones too.
        self.identity = os.urandom(8).hex()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        for end in (end for ends in self.bells for end in ends):
            os.close(end)
        self._lock.close()

    # Replicas

    def cells(self, keys: list[str], row: int) -> "dict[str, Cell]":
        """Gives each of these replicas a place that this row uses, as far as there are any, and frees others."""
        cells: dict[str, Cell] = {}
        with self.locked():
            places = [self._replicas_at + n * self.stride for n in range(self.replicas)]
            taken = {self.words[at + _NAME]: at for at in places if self.words[at + _NAME]}
            wanted = {name_of(key): key for key in keys}
            for name, at in taken.items():
                if name not in wanted:
                    self.numbers[self._own(at, "used") + row] = 0.0
            kept = {name: at for name, at in taken.items() if name in wanted}
            staying = set(kept.values())
            free = (at for at in places if not self.words[at + _NAME] or (at not in staying and self._unused(at)))
            for name, key in wanted.items():
                at = kept.get(name) or next(free, 0)
                if not at:
                    continue
                if self.words[at + _NAME] != name:
                    self.memory[8 * at : 8 * (at + self.stride)] = bytes(8 * self.stride)
                    self.words[at + _NAME] = name
                self.numbers[self._own(at, "used") + row] = 1.0
                cells[key] = Cell(self, at, row)
        return cells

    def _own(self, at: int, field: str) -> int:
        return at + _COMMON + len(COMMON) + OWN.index(field) * self.rows

    def _unused(self, at: int) -> bool:
        fields = (self._own(at, "used"), self._own(at, "in_flight"))
        return not any(self.numbers[first + row] for first in fields for row in range(self.rows))

    def clear(self, row: int) -> None:
        """A process has ended: clears what it has in flight and waiting, not what keys have used."""
        self.queued[row], self.clients[row] = 0.0, _MANY
        for at in range(self._replicas_at, self.keys_at, self.stride):
            if self.words[at + _NAME]:
                for field in OWN:
                    self.numbers[self._own(at, field) + row] = 0.0
                # The row's next process counts upwards from its own start.
                self.numbers[self._own(at, "changed") + row] = -monotonic()
        for at in range(self.keys_at, self.keys_at + self.keys * self.key_stride, self.key_stride):
            if self.words[at]:
                held = at + self.held_at + 2 * row
                self.numbers[held] = self.numbers[held + 1] = 0.0

    # Clients, and who waits

    def goes_first(self, row: int, connected: int) -> bool:
        """Whether a process with so many clients takes the next: no other has many fewer."""
        self.clients[row] = connected
        fewest: float = min(list(self.clients[: self.workers]))
        return connected < fewest + _MORE

    def ring(self, row: int) -> None:
        """Wakes those others who have requests waiting for room."""
        for other, waiting in enumerate(self.queued[: self.workers]):
            if waiting and other != row:
                with contextlib.suppress(BlockingIOError):
                    # Full of rings that nobody has heard yet: one more would say nothing new.
                    os.write(self.bells[other][1], b"!")

    # Peers

    def mark_of_replica(self, at: int) -> int:
        return self._marks_at + (at - self._replicas_at) // self.stride

    def mark_of_key(self, at: int) -> int:
        return self._marks_at + self.replicas + (at - self.keys_at) // self.key_stride

    def changed_replicas(self) -> list[int]:
        """Where something has changed since this was last asked."""
        return [self._replicas_at + n * self.stride for n in self._marked(0, self.replicas)]

    def changed_keys(self) -> list[int]:
        return [self.keys_at + n * self.key_stride for n in self._marked(self.replicas, self.keys)]

    def _marked(self, first: int, number: int) -> list[int]:
        start = at = self._marks_at + first
        marked = []
        while (at := self.memory.find(b"\1", at, start + number)) >= 0:
            # Before it is read: what changes from now on is marked again.
            self.memory[at] = 0
            marked.append(at - start)
        return marked

    def _now(self) -> float:
        return monotonic() if self.clock is None else self.clock()

    def heard(self) -> None:
        self.numbers[self._heard_at] = self._now()

    @property
    def hears(self) -> bool:
        """Whether what peers have is known."""
        at = self.numbers[self._heard_at]
        return at > 0.0 and self._now() - at < SILENT_S


class Cell:
    """One replica, as one process writes of it and reads what the others wrote."""

    __slots__ = (
        "_board", "_common", "_count", "_first", "_first_byte", "_heard", "_in_flight_byte", "_mark", "_memory",
        "_numbers", "_others", "_row", "_row_of", "_rows", "_rows_of", "_seen", "at",
    )  # fmt: skip

    def __init__(self, board: Board, at: int, row: int):
        self._board, self._memory, self._numbers = board, board.memory, board.numbers
        self._row, self._rows = row, board.rows
        # What came from peers is not told to them again.
        self._mark = board.mark_of_replica(at) if row < board.workers else 0
        self.at = at
        self._common = at + _COMMON
        self._first = self._common + len(COMMON)
        self._first_byte = 8 * self._first
        self._in_flight_byte = 8 * (self._first + _IN_FLIGHT * board.rows)
        # A field of all rows, and all fields of all rows.
        self._row_of, self._rows_of = struct.Struct(f"={board.rows}d"), struct.Struct(f"={len(OWN) * board.rows}d")
        self._others = [other for other in range(board.rows) if other != row]
        self._count = monotonic()
        # As they were when it was last read: each row's stamp, and whether what peers have was known.
        self._seen: tuple[float, ...] = ()
        self._heard = False

    def write(self, load: SharedLoad) -> None:
        at = self._first + _IN_FLIGHT * self._rows + self._row
        for number in load:
            self._numbers[at] = number
            at += self._rows
        self._stamp()

    def _stamp(self) -> None:
        # After the numbers: who sees the stamp sees them too.
        self._count += 1.0
        self._numbers[self._first + self._row] = self._count
        if self._mark:
            self._memory[self._mark] = 1

    @property
    def changed(self) -> bool:
        """Whether anyone else has written since `read`."""
        seen = self._seen
        if not seen or self._board.hears != self._heard:
            return True
        stamps = self._row_of.unpack_from(self._memory, self._first_byte)
        return any(stamps[other] != seen[other] for other in self._others)

    def in_flight_elsewhere(self) -> int:
        values = self._row_of.unpack_from(self._memory, self._in_flight_byte)
        count: float = sum(values) - values[self._row]
        return int(count if self._board.hears else count - values[-1])

    def read(self) -> list[SharedLoad]:
        """The numbers of each other row that has or lately had something in flight."""
        # Stamps before the numbers, since others may write meanwhile.
        self._seen = self._row_of.unpack_from(self._memory, self._first_byte)
        self._heard = self._board.hears
        return self._loads(self._others if self._heard else self._others[:-1])

    def _loads(self, of: list[int]) -> list[SharedLoad]:
        rows, values = self._rows, self._rows_of.unpack_from(self._memory, self._first_byte)
        loads = [values[_IN_FLIGHT * rows + row :: rows] for row in of]
        return [load for load in loads if load[0] or load[_RATE]]

    def of_this_machine(self, now: float) -> SharedLoad:
        """What all processes have together, as peers are told it."""
        return combined(self._loads(list(range(self._rows - 1))), now)

    # What holds for all

    def tell(self, **common: float) -> None:
        for name, value in common.items():
            self._numbers[self._common + COMMON.index(name)] = value
        self._stamp()

    @property
    def busy_until(self) -> float:
        return self._numbers[self._common + _BUSY]

    def shared(self) -> dict[str, float]:
        return dict(zip(COMMON, self._numbers[self._common : self._common + len(COMMON)], strict=True))

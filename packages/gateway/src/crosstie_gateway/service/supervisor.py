"""`--workers N`: a supervisor that forks workers, which accept from one socket, and keeps N of them alive.

It reads the fleet file, tells workers to read it again and to end, and passes on what they say. It holds the socket, so
no connection is lost when a worker dies. It runs no loop; when it is killed, workers find their lines closed, and
drain.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from crosstie.core.errors import BadInput, CrosstieError
from crosstie_gateway.gateway.notices import Field, Level, Notice
from crosstie_gateway.service.process import file_stamp, tell_systemd, watchdog_s
from crosstie_gateway.share.board import Board

# A worker that dies is replaced at once, one that dies soon after its start after a while that doubles.
_FIRST_WAIT_S, _LONGEST_WAIT_S, _SOON_S = 0.1, 30.0, 10.0
_CHECK_S = 1.0
# A worker whose loop has not turned for so long answers nobody.
_HUNG_S = 30.0
# What workers say within this time is taken for the same.
_SAME_S = 10.0
_MOST_SAID, _MOST_LINES = 8192, 1000
# What the supervisor tells its workers.
STOP, LEAVE, STOP_NOW, READ_AGAIN = b"s", b"l", b"n", b"r"
# Addresses of sockets are short, folders for temporary files are not always.
_LONGEST_FOLDER = 80


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A worker serves."""


class Reloaded(msgspec.Struct, frozen=True, tag=True):
    """It has read the fleet file again, as it was told to."""


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    text: str


class WorkerNotice(msgspec.Struct, frozen=True, tag=True):
    text: str
    # Of a notice that knows more than its sentence.
    event: str = ""
    level: Level = "info"
    fields: dict[str, Field] = {}


# What a worker tells its supervisor.
Report = Ready | Reloaded | StartFailed | WorkerNotice
_decode = msgspec.json.Decoder(Report).decode


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """What a worker is given: its number, its line to the supervisor, and what all share."""

    row: int
    workers: int
    board: Board
    folder: Path
    sockets: Sequence[socket.socket]
    line: socket.socket

    def notice(self, line: str) -> None:
        known = (line.event, line.level, line.fields) if isinstance(line, Notice) else ()
        self.say(WorkerNotice(line[:_MOST_SAID], *known))

    def say(self, report: Report) -> None:
        said = msgspec.json.encode(report) + b"\n"
        try:
            sent = self.line.send(said)
            if sent < len(said):
                self.line.setblocking(True)
                self.line.sendall(said[sent:])
                self.line.setblocking(False)
        except OSError:
            # The supervisor has gone, or hears nothing: then people shall.
            if isinstance(report, WorkerNotice | StartFailed):
                sys.stderr.write(f"{report.text}\n")


class _WorkerProcess:
    def __init__(self, row: int):
        self.row = row
        self.pid = 0
        self.line: socket.socket | None = None
        self.heard = b""
        self.ready = False
        self.began = self.due = 0.0
        self.wait_s = _FIRST_WAIT_S
        self.status: int | None = None


class _Repeated:
    """How often each worker has said a line lately, and how often people were told."""

    def __init__(self) -> None:
        self.last = 0.0
        self.times: Counter[int] = Counter()
        self.passed_on = 0


class Supervisor:
    """`run` is what a worker does, in a process of its own; it returns the exit status."""

    def __init__(self, number: int, run: Callable[[WorkerSlot], int], notify: Callable[[str], None]):
        self._run, self._notify = run, notify
        self.board = Board(number)
        self.workers = [_WorkerProcess(row) for row in range(number)]
        self.file: Path | None = None
        # Asked before workers are told to read the file again; raises CrosstieError. Called once they have.
        self.read: Callable[[], Callable[[], None]] = lambda: lambda: None
        # Where all of them accept.
        self.sockets: Sequence[socket.socket] = ()
        self._pending: Callable[[], None] | None = None
        self._signals: list[int] = []
        self._stopping = 0
        self._failed: str | None = None
        self._announced = False
        self._repeated: dict[str, _Repeated] = {}

    def serve(self, announce: Callable[[], None], *, with_parent: bool = False) -> bool:
        """Until it is told to stop; whether every request was answered. Raises BadInput if no worker can start."""
        folder = tempfile.mkdtemp(prefix="crosstie-")
        if len(folder) > _LONGEST_FOLDER:
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="crosstie-", dir="/tmp")
        self._folder = Path(folder)
        try:
            with self._hearing_signals() as woken:
                return self._serve(announce, [woken, sys.stdin.fileno()] if with_parent else [woken])
        finally:
            for worker in self.workers:
                if worker.pid:
                    os.kill(worker.pid, signal.SIGKILL)
                    os.waitpid(worker.pid, 0)
            shutil.rmtree(self._folder, ignore_errors=True)
            self.board.close()

    def _serve(self, announce: Callable[[], None], inputs: list[int]) -> bool:
        self._seen, check_at = file_stamp(self.file), time.monotonic() + _CHECK_S
        for worker in self.workers:
            self._start(worker)
        while any(worker.pid for worker in self.workers) or not self._stopping:
            self._hear(inputs)
            self._heed()
            self._reap()
            if self._failed is not None and not self._stopping:
                self._stop()
            if not self._announced and not self._stopping and all(worker.ready for worker in self.workers):
                self._announced = True
                announce()
                tell_systemd(f"READY=1\nSTATUS={len(self.workers)} workers")
            now = time.monotonic()
            if watchdog_s():
                tell_systemd("WATCHDOG=1")
            if now >= check_at:
                check_at = now + _CHECK_S
                if file_stamp(self.file) != self._seen and not self._stopping:
                    self._read_again()
                self._end_the_hung(now)
            for worker in self.workers:
                if not worker.pid and not self._stopping and now >= worker.due:
                    self._start(worker)
        if self._failed is not None:
            raise BadInput(self._failed)
        return all(not worker.status for worker in self.workers)

    # Processes

    def _start(self, worker: _WorkerProcess) -> None:
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        worker.began, worker.ready, worker.heard, worker.status = time.monotonic(), False, b"", None
        pid = os.fork()
        if not pid:
            ours.close()
            theirs.setblocking(False)
            self._run_worker(WorkerSlot(worker.row, len(self.workers), self.board, self._folder, self.sockets, theirs))
        theirs.close()
        ours.setblocking(False)
        worker.pid, worker.line = pid, ours

    def _run_worker(self, slot: WorkerSlot) -> NoReturn:
        """In the child, without the supervisor's signals and lines to other workers."""
        status = 3
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                # They may be sent to the whole group of processes: what is to be done, the supervisor says once.
                signal.signal(number, signal.SIG_IGN)
            for other in self.workers:
                if other.line is not None:
                    other.line.close()
            status = self._run(slot)
        except CrosstieError as error:
            slot.say(StartFailed(str(error)[:_MOST_SAID]))
            status = 2
        except BaseException:  # noqa: BLE001 (told here, as nobody is above)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Not by way of whatever the supervisor has still to clean up.
            os._exit(status)

    def _reap(self) -> None:
        for worker in self.workers:
            if not worker.pid:
                continue
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if not pid:
                continue
            # Its last words.
            self._listen(worker)
            self.board.clear(worker.row)
            code = os.waitstatus_to_exitcode(status)
            self._ended(worker, pid, code)
            if worker.line is not None:
                worker.line.close()
            worker.pid, worker.line = 0, None

    def _ended(self, worker: _WorkerProcess, pid: int, code: int) -> None:
        worker.status = code
        if code > 0 and not self._announced and self._failed is None:
            self._failed = f"worker {worker.row} could not start: it ended with status {code}"
        if self._stopping or self._failed is not None:
            return
        # Told below; whether the end was in order is not its to say any more.
        worker.status = None
        now = time.monotonic()
        worker.wait_s = min(2.0 * worker.wait_s, _LONGEST_WAIT_S) if now - worker.began < _SOON_S else _FIRST_WAIT_S
        worker.due = now + worker.wait_s
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        sentence = f"worker {worker.row} (process {pid}) {how}; another takes its place in {worker.wait_s:g} s"
        self._notify(Notice("worker_ended", "error", sentence, worker=worker.row, status=code))

    def _end_the_hung(self, now: float) -> None:
        for worker in self.workers:
            if worker.pid and worker.ready and now - max(self.board.turned_at[worker.row], worker.began) > _HUNG_S:
                sentence = f"worker {worker.row} (process {worker.pid}) has stood still for {_HUNG_S:g} s and is ended"
                self._notify(Notice("worker_hung", "error", sentence, worker=worker.row))
                os.kill(worker.pid, signal.SIGKILL)

    def _tell(self, order: bytes) -> None:
        for worker in self.workers:
            if worker.line is not None:
                with contextlib.suppress(OSError):
                    worker.line.send(order)

    # What is heard

    @contextlib.contextmanager
    def _hearing_signals(self) -> Iterator[int]:
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        os.set_blocking(theirs, False)
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
        before = {number: signal.signal(number, lambda number, _: self._signals.append(number)) for number in numbers}
        old = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(old)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(ours)
            os.close(theirs)

    def _hear(self, inputs: list[int]) -> None:
        now = time.monotonic()
        due = min((worker.due - now for worker in self.workers if not worker.pid), default=_CHECK_S)
        lines = {worker.line.fileno(): worker for worker in self.workers if worker.line is not None}
        ready, _, _ = select.select([*inputs, *lines], [], [], 0.02 if self._stopping else max(min(due, _CHECK_S), 0.0))
        for number in ready:
            if number in lines:
                self._listen(lines[number])
            elif not os.read(number, 4096) and number != inputs[0]:
                # Standard input has closed: the parent has gone.
                inputs.remove(number)
                self._signals.append(signal.SIGINT)

    def _heed(self) -> None:
        signals, self._signals = self._signals, []
        for number in signals:
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stop(LEAVE if number == signal.SIGTERM else STOP)
            elif number == signal.SIGHUP and not self._stopping:
                self._read_again()

    def _stop(self, order: bytes = STOP) -> None:
        self._stopping += 1
        tell_systemd("STOPPING=1\nSTATUS=draining")
        self._tell(order if self._stopping == 1 else STOP_NOW)
        # Workers let in who has knocked, and close theirs; a socket that stays open here would let clients wait.
        for listening in self.sockets:
            listening.close()

    def _read_again(self) -> None:
        if self.file is None:
            return
        self._seen = file_stamp(self.file)
        try:
            self._pending = self.read()
        except CrosstieError as error:
            sentence = f"fleet file refused, the old one goes on: {error}"
            self._notify(Notice("fleet_refused", "error", sentence, why=str(error)))
            return
        self._tell(READ_AGAIN)

    def _listen(self, worker: _WorkerProcess) -> None:
        if worker.line is None:
            return
        with contextlib.suppress(OSError):
            while piece := worker.line.recv(65536):
                worker.heard += piece
        *lines, worker.heard = worker.heard.split(b"\n")
        for line in lines:
            try:
                report: Report = _decode(line)
            except msgspec.DecodeError:
                # A worker in trouble must not be the end of those that are not.
                report = WorkerNotice(f"worker {worker.row}: {line[:_MOST_SAID].decode(errors='replace')}")
            self._take(worker, report)

    def _take(self, worker: _WorkerProcess, report: Report) -> None:
        match report:
            case Ready():
                worker.ready = True
            case StartFailed(why) if self._announced:
                self._notify(f"worker {worker.row} cannot start: {why}")
            case StartFailed(why):
                self._failed = why
            case Reloaded() if self._pending is not None:
                self._pending()
                self._pending = None
            case WorkerNotice():
                self._pass_on(worker.row, report)

    def _pass_on(self, row: int, said: WorkerNotice) -> None:
        """All workers notice the same things: a line is printed as often as the worker that repeats it most."""
        now = time.monotonic()
        if len(self._repeated) > _MOST_LINES:
            self._repeated = {text: was for text, was in self._repeated.items() if now - was.last < _SAME_S}
        lately = self._repeated.get(said.text)
        if lately is None or now - lately.last > _SAME_S:
            lately = self._repeated[said.text] = _Repeated()
        lately.last = now
        lately.times[row] += 1
        if lately.times[row] > lately.passed_on:
            lately.passed_on += 1
            self._notify(Notice(said.event, said.level, said.text, **said.fields) if said.event else said.text)

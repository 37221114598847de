"""The gateway as a process: it listens, follows its fleet file, and leaves without losing a request."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.writing import in_words
from crosstie.core.errors import BadInput, CrosstieError
from crosstie.core.fleet import Fleet, Serving
from crosstie.core.histogram import Family
from crosstie.wire.files import fitting_connections, most_files
from crosstie_gateway.gateway.errors import error_body
from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.gateway.pages import handler
from crosstie_gateway.gateway.roads import FORMS
from crosstie_gateway.service.worker_link import Handlers, WorkerAnswer, WorkerLink, WorkerRequest
from crosstie_gateway.share.board import Board
from crosstie_gateway.wire.request import RequestLimits
from crosstie_gateway.wire.server import Server


class BackgroundThread:
    """A thread beside the event loop: calls `step` every `every_s` and whenever it is woken; `first` and `last` before
    and after all of that."""

    def __init__(
        self, name: str, step: Callable[[], object], every_s: float, *, first: Callable[[], object] = lambda: None,
        last: Callable[[], object] = lambda: None,
    ):  # fmt: skip
        self._step, self._every_s, self._first, self._last = step, every_s, first, last
        self._name = name
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        # What is under way need not be tried again.
        self.stopping = False

    def start(self) -> None:
        """To be called after the fork: a thread from before it would be dead in a worker."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread is not None

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wake(self) -> None:
        self._wake.set()

    def stop(self, patience_s: float) -> None:
        """Waits for its end so long at most; as a daemon it keeps no process from ending."""
        self.stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(patience_s)

    def _run(self) -> None:
        self._first()
        while not self.stopping:
            self._wake.wait(self._every_s)
            self._wake.clear()
            self._step()
        self._step()
        self._last()


Notify = Callable[[str], None]
_CHECK_FILE_S = 1.0
# Clients at once that nobody would call many.
_FEW = 1000
R = TypeVar("R", bound=WorkerRequest)
A = TypeVar("A", bound=WorkerAnswer)


def file_stamp(file: Path | None) -> tuple[int, int, int] | None:
    """Differs after every change of the file."""
    try:
        stat = file.stat() if file is not None else None
    except OSError:
        # Being replaced just now, perhaps; reading it will tell.
        return None
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat else None


def check_places(served: Fleet, fleet: Fleet) -> None:
    """Raises BadInput where a fleet that is read again keeps keys, usage or load elsewhere: these are opened at the
    start, and workers started since would go by another store."""
    for key in ("store", "redis"):
        if getattr(served.state, key) != getattr(fleet.state, key):
            raise BadInput(f"state.{key}: is another now, which takes a new start of the gateway")


@contextlib.contextmanager
def listening_on(host: str, port: int, whom: str = "") -> Iterator[None]:
    """Raises BadInput where that cannot be done."""
    with in_words(f"cannot listen on {host}:{port}{whom}"):
        yield


class Component:
    """A part beside a gateway: a ledger, a recording, a log, an administrator's door."""

    async def start(self, process: "GatewayProcess") -> None:
        """Before the first request; `process.gateway` is there. Raises CrosstieError."""
        raise NotImplementedError

    def families(self) -> list[Family]:
        """What it adds to the page of metrics, once it has started."""
        return []

    def check(self, fleet: Fleet) -> None:
        """Raises CrosstieError where this fleet, which was read again, cannot be served; nothing has changed yet."""

    def reloaded(self, fleet: Fleet) -> None:
        """The gateway has begun to serve this fleet. Nothing, where it does not matter."""

    async def drain(self, within_s: float) -> None:
        """The gateway leaves: waits for requests of its own that are being answered."""

    async def stop(self) -> None:
        """After the last request."""


class GatewayProcess:
    """A gateway behind its socket, with its components: the whole service, or one worker of it. `file` is followed;
    `fleet` is what it said at first."""

    def __init__(
        self, catalog: Catalog, fleet: Fleet, *, file: Path | None = None, speed: float = 1.0,
        notify: Notify = lambda line: None, prepared: Callable[[Fleet], Fleet] = lambda fleet: fleet,
        components: Sequence[Component] = (), board: Board | None = None, row: int = 0,
        sockets: Sequence[socket.socket] = (), opened: Callable[[], Sequence[socket.socket]] | None = None,
    ):  # fmt: skip
        self.components, self._started = components, list[Component]()
        self.catalog, self.fleet, self.file, self.speed, self.notify = catalog, fleet, file, speed, notify
        # What the file said when it was last served, before anything was done to it.
        self.read = fleet
        # What is done to a fleet that was read again, such as putting its emulated addresses in.
        self.prepared = prepared
        # What it shares with the other workers, which of them it is, and where they all accept; None: it is alone.
        self.board, self.row, self._sockets = board, row, sockets
        # Where it listens if alone, and not only at the address that it is told.
        self._opened = opened
        # What else is read again when the fleet file is.
        self.before_reload: list[Callable[[], None]] = []
        # What other workers may ask of this one, and how it asks them; None: there are none.
        self.handlers: Handlers = {}
        self.link: WorkerLink | None = None
        self.stopping = asyncio.Event()
        # Whether balancers are told first, and whether that may take no longer.
        self._is_leaving, self._hurried = False, asyncio.Event()
        self.port = 0
        self._limits = RequestLimits(form_paths=FORMS)

    async def start(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self.gateway = Gateway(loop, self.catalog, self.fleet, speed=self.speed, notify=self.notify)
        self.server = Server(
            loop, handler(self.gateway), self._limits, lambda status, why: error_body(status, why),
            refused=self.gateway.metrics.refused, opens=self.gateway.opens,
        )  # fmt: skip
        self.server.on_exhausted = self.gateway.exhausted
        self._seen = file_stamp(self.file)
        self._limit(self.fleet)
        try:
            for component in self.components:
                await component.start(self)
                self._started.append(component)
                self.gateway.metrics.sources.append(component.families)
            await self.gateway.probe_all()
            with listening_on(host, port):
                self.port = await self._listen(host, port)
        except BaseException:
            await self._close()
            raise

    async def _listen(self, host: str, port: int) -> int:
        board, row, connections = self.board, self.row, self.server.connections
        if board is None or not self._sockets:
            if self._opened is not None:
                return self.server.join(self._opened())
            return await self.server.listen(host, port)
        # From now on others leave clients to it.
        board.clients[row] = 0
        return self.server.join(self._sockets, lambda: board.goes_first(row, len(connections)))

    def heed_signals(self) -> None:
        """SIGTERM and SIGINT end it, twice at once; SIGHUP has the fleet file read again."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.leave)
        loop.add_signal_handler(signal.SIGINT, self.end)
        loop.add_signal_handler(signal.SIGHUP, self.reload)

    async def until_stopped(self) -> bool:
        """Serves until it is told to stop; whether every request was answered before it left."""
        follower = asyncio.get_running_loop().create_task(self._follow_file())
        await self.stopping.wait()
        follower.cancel()
        return await self.stop()

    def leave(self) -> None:
        """As service managers want it: balancers are told first."""
        self._is_leaving = True
        self.end()

    def end(self) -> None:
        if self.stopping.is_set():
            # Asked twice: not to wait any longer.
            self._hurried.set()
            self.server.close()
        self.stopping.set()

    async def stop(self) -> bool:
        self.gateway.draining = True
        busy = len(self.gateway.exchanges)
        if busy:
            self.notify(Notice("draining", "info", f"draining: {busy} requests are being answered", requests=busy))
        if self._is_leaving:
            with contextlib.suppress(TimeoutError):
                # Meanwhile it serves as ever.
                async with asyncio.timeout(self.gateway.serving.lame_duck_s):
                    await self._hurried.wait()
        within_s = self.gateway.serving.drain_s
        own = asyncio.gather(*(component.drain(within_s) for component in self._started))
        whole = await self.server.drain(within_s, give_up=self.gateway.give_up)
        hurried = asyncio.ensure_future(self._hurried.wait())
        await asyncio.wait((own, hurried), return_when=asyncio.FIRST_COMPLETED)
        for waiting in (own, hurried):
            waiting.cancel()
        await self._close()
        return whole

    async def _close(self) -> None:
        self.gateway.close()
        while self._started:
            await self._started.pop().stop()

    def notify_from_thread(self, notice: str) -> None:
        # At the very end the loop may be gone, and nobody listens any more.
        with contextlib.suppress(RuntimeError):
            self.gateway.loop.call_soon_threadsafe(self.gateway.notify, notice)

    def on(self, kind: type[R], handler: Callable[[R], WorkerAnswer]) -> None:
        """Sets what answers this kind of request, of this or another worker."""
        self.handlers[kind] = handler

    async def ask_all(self, request: WorkerRequest, kind: type[A]) -> list[A]:
        """What workers answer that is of this kind: this one, which is the first, and the others."""
        answers = [self.handlers[type(request)](request), *await self.ask_others(request)]
        return [answer for answer in answers if isinstance(answer, kind)]

    async def ask_others(self, request: WorkerRequest) -> list[WorkerAnswer]:
        """The answers of the other workers; empty where there are none."""
        return await self.link.ask(request) if self.link is not None else []

    # The fleet file

    async def _follow_file(self) -> None:
        # Workers are told by their supervisor.
        while self.file is not None and not self._sockets:
            await asyncio.sleep(_CHECK_FILE_S)
            if file_stamp(self.file) != self._seen:
                self.reload()

    def reload(self) -> bool:
        """Serves what the file says now; a file that cannot be served changes nothing."""
        for also in self.before_reload:
            also()
        if self.file is None:
            return False
        try:
            self.read_again(self.file)
            return True
        except CrosstieError as error:
            # Where it was the file's reader who refused, it has named the file itself.
            named = "" if str(error).startswith(f"{self.file}: ") else f"{self.file}: "
            sentence = f"fleet file refused, the old one goes on: {named}{error}"
            self.notify(Notice("fleet_refused", "error", sentence, why=str(error)))
            return False

    def read_again(self, file: Path) -> None:
        """Raises CrosstieError, and the old fleet goes on."""
        self._seen = file_stamp(file)
        read = read_fleet(self.catalog, file)
        fleet = self.prepared(read)
        self.load(fleet)
        self.read = read
        pools, backends = len(fleet.pools), len(self.gateway.backends)
        sentence = f"fleet file read again: {pools} pools, {backends} backends"
        self.notify(Notice("fleet_reloaded", "info", sentence, pools=pools, backends=backends))

    def load(self, fleet: Fleet) -> None:
        """Serves this fleet from now on. Raises CrosstieError before anything has changed."""
        check_places(self.fleet, fleet)
        for component in self._started:
            component.check(fleet)
        self.gateway.load(fleet)
        self._limit(fleet)
        for component in self._started:
            component.reloaded(fleet)

    def _limit(self, fleet: Fleet) -> None:
        """Limits connections to what open files allow, beside those to backends."""
        self._limits.body_bytes = int(fleet.serving.max_body_mib * 2**20)
        self._limits.connections_per_address = fleet.serving.max_connections_per_address
        asked, files = fleet.serving.max_connections, most_files()
        to_backends = sum(part.max_in_flight * len(part.backends) for pool in fleet.pools for part in pool.by_model())
        chosen = int(min(asked, fitting_connections(files, to_backends)))
        said, self._limits.connections = self._limits.connections, chosen
        # The default is meant as "many"; what somebody has written is a wish.
        if chosen < asked and chosen != said and (asked != Serving().max_connections or chosen < _FEW):
            sentence = f"serve.max_connections is {chosen}, not {asked}: this process may open {files:g} files, and "
            sentence += f"backends may take {to_backends} of them; raise that (ulimit -n, LimitNOFILE)"
            self.notify(Notice("connections_limited", "warning", sentence, chosen=chosen, asked=asked, files=files))


# Readiness, liveness and leaving for systemd (sd_notify), by datagrams to $NOTIFY_SOCKET


class Systemd(Component):
    async def start(self, process: GatewayProcess) -> None:
        self._loop, self._process = asyncio.get_running_loop(), process
        self._alive: asyncio.TimerHandle | None = None
        self._leaving = self._loop.create_task(self._tell_of_leaving())

    def ready(self) -> None:
        """It listens."""
        tell_systemd(f"READY=1\nSTATUS={self._status()}")
        self._watched()

    def reloaded(self, fleet: Fleet) -> None:
        tell_systemd(f"STATUS={self._status()}")

    async def stop(self) -> None:
        self._leaving.cancel()
        if self._alive is not None:
            self._alive.cancel()

    async def _tell_of_leaving(self) -> None:
        await self._process.stopping.wait()
        tell_systemd("STOPPING=1\nSTATUS=draining")

    def _watched(self) -> None:
        """From the loop itself: a gateway whose loop stands still is to be ended."""
        limit_s = watchdog_s()
        if limit_s:
            tell_systemd("WATCHDOG=1")
            self._alive = self._loop.call_later(limit_s / 3.0, self._watched)

    def _status(self) -> str:
        gateway = self._process.gateway
        return f"{len(gateway.live.pools)} pools, {len(gateway.backends)} backends on port {self._process.port}"


def watchdog_s() -> float:
    """How long it may be silent; 0: as long as it likes."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    given = os.environ.get("WATCHDOG_USEC", "")
    return int(given) / 1e6 if given.isascii() and given.isdigit() else 0.0


def tell_systemd(message: str) -> None:
    where = os.environ.get("NOTIFY_SOCKET", "")
    if not where:
        return
    # An at sign stands for the zero byte of addresses that are no files.
    address = "\0" + where[1:] if where.startswith("@") else where
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(message.encode(), address)

"""The gateway as a process: it listens, follows its fleet file, and leaves without losing a request."""

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput, CrosstieError
from crosstie.core.fleet import Fleet
from crosstie.run.gateway.errors import error_body
from crosstie.run.gateway.gateway import Gateway
from crosstie.run.gateway.notices import Notice
from crosstie.run.gateway.pages import handler
from crosstie.run.service.follow import stamp
from crosstie.run.share.board import Board
from crosstie.run.wire.request import Limits
from crosstie.run.wire.server import Server

Notify = Callable[[str], None]
# What one gateway process may be asked by another, or by an administrator: plain data in, plain data out.
Verb = Callable[[dict[str, Any]], dict[str, Any]]
_LOOK_AT_FILE_S = 1.0


def check_places(served: Fleet, fleet: Fleet) -> None:
    """Raises BadInput where a fleet that is read again keeps its keys, usage or load elsewhere.

    These are opened at the start. To go on without would mean to let in whom the file does not, or to have two
    workers, one of them started since, go by the keys of two stores.
    """
    for key, before, now in (
        ("store", served.state.store, fleet.state.store),
        ("redis", served.state.redis, fleet.state.redis),
    ):
        if before != now:
            raise BadInput(f"state.{key}: is another now, which takes a new start of the gateway")


class Siblings(Protocol):
    """The other processes that serve the same fleet on this machine."""

    # Theirs alone, as long as they live.
    folder: Path

    async def ask(self, verb: str, what: dict[str, Any]) -> list[dict[str, Any]]:
        """What each of them answers; those that do not are left out."""

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Only one of the processes at a time has it. Raises BadInput where another keeps it for too long."""


class Part(Protocol):
    """Something that goes with a gateway: a ledger, a recording, a log, an administrator's door."""

    async def start(self, serve: "Serve") -> None:
        """Before the first request; `serve.gateway` is there. Raises CrosstieError."""

    def reloaded(self, fleet: Fleet) -> None:
        """The gateway has begun to serve this fleet."""

    async def stop(self) -> None:
        """After the last request."""


class Serve:
    """A gateway behind its socket. `file` is followed where there is one; `fleet` is what it said at first."""

    def __init__(
        self, catalog: Catalog, fleet: Fleet, *, file: Path | None = None, speed: float = 1.0,
        notice: Notify = lambda line: None, prepared: Callable[[Fleet], Fleet] = lambda fleet: fleet,
        parts: Sequence[Part] = (), board: Board | None = None, row: int = 0, sockets: Sequence[socket.socket] = (),
    ):  # fmt: skip
        self.parts, self._started = parts, list[Part]()
        self.catalog, self.fleet, self.file, self.speed, self.notice = catalog, fleet, file, speed, notice
        # What is done to a fleet that was read again, such as putting its emulated addresses in.
        self.prepared = prepared
        self.verbs: dict[str, Verb] = {}
        # What it shares with the other workers, which of them it is, and where they all accept; None: it is alone.
        self.board, self.row, self._sockets = board, row, sockets
        self.siblings: Siblings | None = None
        self.stopping = asyncio.Event()
        self.port = 0
        self._limits = Limits()
        self._limit(fleet)

    async def start(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self.gateway = Gateway(loop, self.catalog, self.fleet, speed=self.speed, notify=self.notice)
        self.server = Server(
            loop, handler(self.gateway), self._limits, lambda status, why: error_body(status, why),
            refused=self.gateway.metrics.refused,
        )  # fmt: skip
        self._seen = stamp(self.file)
        try:
            for part in self.parts:
                await part.start(self)
                self._started.append(part)
        except BaseException:
            await self._close()
            raise
        await self.gateway.probe_all()
        try:
            self.port = await self._listen(host, port)
        except OSError as error:
            await self._close()
            raise BadInput(f"cannot listen on {host}:{port}: {error.strerror or error}") from None

    async def _listen(self, host: str, port: int) -> int:
        board, row, connections = self.board, self.row, self.server.connections
        if board is None or not self._sockets:
            return await self.server.listen(host, port)
        # From now on others leave clients to it.
        board.clients(row, 0)
        return self.server.join(self._sockets, lambda: board.goes_first(row, len(connections)))

    def heed_signals(self) -> None:
        """SIGTERM and SIGINT end it, twice at once; SIGHUP has the fleet file read again."""
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self.end)
        loop.add_signal_handler(signal.SIGHUP, self.reload)

    async def until_stopped(self) -> bool:
        """Serves until it is told to stop; whether every request was answered before it left."""
        follower = asyncio.get_running_loop().create_task(self._follow_file())
        await self.stopping.wait()
        follower.cancel()
        return await self.stop()

    def end(self) -> None:
        if self.stopping.is_set():
            # Asked twice: not to wait any longer.
            self.server.close()
        self.stopping.set()

    async def stop(self) -> bool:
        self.gateway.draining = True
        busy = len(self.gateway.exchanges)
        if busy:
            self.notice(Notice("draining", "info", f"draining: {busy} requests are being answered", requests=busy))
        whole = await self.server.drain(self.gateway.serving.drain_s, give_up=self.gateway.give_up)
        await self._close()
        return whole

    async def _close(self) -> None:
        self.gateway.close()
        while self._started:
            await self._started.pop().stop()

    async def everywhere(self, verb: str, what: dict[str, Any]) -> list[dict[str, Any]]:
        """Done here and by all siblings; this process answers first."""
        own = self.verbs[verb](what)
        return [own, *(await self.siblings.ask(verb, what) if self.siblings is not None else [])]

    # The fleet file

    async def _follow_file(self) -> None:
        # Workers are told by whoever follows it for all of them.
        while self.file is not None and not self._sockets:
            await asyncio.sleep(_LOOK_AT_FILE_S)
            if stamp(self.file) != self._seen:
                self.reload()

    def reload(self) -> bool:
        """Serves what the file says now; a file that cannot be served changes nothing."""
        if self.file is None:
            return False
        try:
            self.read_again(self.file)
            return True
        except CrosstieError as error:
            # Where it was the file's reader who refused, it has named the file itself.
            named = "" if str(error).startswith(f"{self.file}: ") else f"{self.file}: "
            sentence = f"fleet file refused, the old one goes on: {named}{error}"
            self.notice(Notice("fleet_refused", "error", sentence, why=str(error)))
            return False

    def read_again(self, file: Path) -> None:
        """Raises CrosstieError, and the old fleet goes on."""
        self._seen = stamp(file)
        fleet = self.prepared(read_fleet(self.catalog, file))
        self.load(fleet)
        pools, backends = len(fleet.pools), len(self.gateway.backends)
        sentence = f"fleet file read again: {pools} pools, {backends} backends"
        self.notice(Notice("fleet_reloaded", "info", sentence, pools=pools, backends=backends))

    def load(self, fleet: Fleet) -> None:
        """Serves this fleet from now on. Raises CrosstieError before anything has changed."""
        check_places(self.fleet, fleet)
        self.gateway.load(fleet)
        self._limit(fleet)
        for part in self._started:
            part.reloaded(fleet)

    def _limit(self, fleet: Fleet) -> None:
        serving, limits = fleet.serving, self._limits
        limits.body_bytes = int(serving.max_body_mib * 2**20)
        limits.connections, limits.connections_per_address = (
            serving.max_connections, serving.max_connections_per_address,
        )  # fmt: skip

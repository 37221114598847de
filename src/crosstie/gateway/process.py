"""The gateway as a process: it listens, follows its fleet file, and leaves without losing a request."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput, CrosstieError
from crosstie.core.fleet import Fleet
from crosstie.gateway.errors import error_body
from crosstie.gateway.gateway import Gateway
from crosstie.gateway.pages import handler
from crosstie.wire.request import Limits
from crosstie.wire.server import Server

Notice = Callable[[str], None]
_LOOK_AT_FILE_S = 1.0


class Serve:
    """A gateway behind its socket. `file` is followed where there is one; `fleet` is what it said at first."""

    def __init__(
        self, catalog: Catalog, fleet: Fleet, *, file: Path | None = None, speed: float = 1.0,
        notice: Notice = lambda line: None, prepared: Callable[[Fleet], Fleet] = lambda fleet: fleet,
    ):  # fmt: skip
        self.catalog, self.fleet, self.file, self.speed, self.notice = catalog, fleet, file, speed, notice
        # What is done to a fleet that was read again, such as putting its emulated addresses in.
        self.prepared = prepared
        self.stopping = asyncio.Event()
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self.gateway = Gateway(loop, self.catalog, self.fleet, speed=self.speed, notice=self.notice)
        self._seen = _stamp(self.file)
        await self.gateway.first_look()
        limits = Limits(body_bytes=int(self.fleet.serving.max_body_mib * 2**20))
        self.server = Server(loop, handler(self.gateway), limits, lambda status, why: error_body(status, why))
        try:
            self.port = await self.server.listen(host, port)
        except OSError as error:
            self.gateway.close()
            raise BadInput(f"cannot listen on {host}:{port}: {error.strerror or error}") from None

    def heed_signals(self) -> None:
        """SIGTERM and SIGINT end it, twice at once; SIGHUP has the fleet file read again."""
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self.reload)

    async def until_stopped(self) -> bool:
        """Serves until it is told to stop; whether every request was answered before it left."""
        follower = asyncio.get_running_loop().create_task(self._follow_file())
        await self.stopping.wait()
        follower.cancel()
        return await self.stop()

    def _stop(self) -> None:
        if self.stopping.is_set():
            # Asked twice: not to wait any longer.
            self.server.close()
        self.stopping.set()

    async def stop(self) -> bool:
        self.gateway.draining = True
        busy = len(self.gateway.exchanges)
        if busy:
            self.notice(f"draining: {busy} requests are being answered")
        whole = await self.server.drain(self.gateway.serving.drain_s, give_up=self.gateway.give_up)
        self.gateway.close()
        return whole

    # The fleet file

    async def _follow_file(self) -> None:
        while self.file is not None:
            await asyncio.sleep(_LOOK_AT_FILE_S)
            if _stamp(self.file) != self._seen:
                self.reload()

    def reload(self) -> None:
        """Serves what the file says now; a file that cannot be served changes nothing."""
        if self.file is None:
            return
        self._seen = _stamp(self.file)
        try:
            fleet = self.prepared(read_fleet(self.catalog, self.file))
            self.gateway.load(fleet)
        except CrosstieError as error:
            # Where it was the file's reader who refused, it has named the file itself.
            named = "" if str(error).startswith(f"{self.file}: ") else f"{self.file}: "
            self.notice(f"fleet file refused, the old one goes on: {named}{error}")
            return
        self.server.limits.body_bytes = int(fleet.serving.max_body_mib * 2**20)
        self.notice(f"fleet file read again: {len(fleet.pools)} pools, {len(self.gateway.backends)} backends")


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    try:
        found = file.stat() if file is not None else None
    except OSError:
        # Being replaced just now, perhaps; reading it will tell.
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found else None

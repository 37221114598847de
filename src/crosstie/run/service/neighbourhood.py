"""A gateway's place among its other workers: it shares load, health and counts with them, and heeds the supervisor.

Load is told and read at every decision (`route.router`); the rest within a tenth of a second. A backend is probed and
its metrics are read by whichever worker comes first, for all of them.
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable
from math import isnan, nan
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from crosstie.core.fleet import Fleet
from crosstie.run.gateway.backend import Backend, EngineLoad
from crosstie.run.gateway.interfaces import OtherWorkers
from crosstie.run.gateway.metrics import Family
from crosstie.run.service.siblings import Siblings
from crosstie.run.service.summing import counters, summed
from crosstie.run.service.workers import READ_AGAIN, STOP, STOP_NOW, Place
from crosstie.run.share.board import Board, Cell

if TYPE_CHECKING:
    from crosstie.run.service.process import Serve

_TICK_S, _KEEP_S = 0.1, 1.0
# What another has found out is taken for one's own until it is nearly due again.
_FRESH = 0.75
_WELL, _FAULTY, _REFUSES = 0.0, 1.0, 2.0
_FAULTS = {_FAULTY: "its health check failed, as another worker found", _REFUSES: "it refuses connections"}


class SharedLoad:
    """What is on replicas, shared by way of a board: with other workers, with other machines, or with both."""

    def __init__(self, board: Board, row: int):
        self._board, self._row = board, row
        self._cells: dict[str, Cell] = {}

    async def start(self, serve: "Serve") -> None:
        self._serve, self._gateway = serve, serve.gateway
        self._gateway.listeners.append(lambda record: self._board.ring(self._row))
        self._settle()
        self._bell = self._board.bells[self._row][0]
        asyncio.get_running_loop().add_reader(self._bell, self._rung)

    def reloaded(self, fleet: Fleet) -> None:
        self._settle()

    async def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._bell)

    def _settle(self) -> None:
        """After the fleet has changed: a place on the board for every replica, and a router that minds it."""
        gateway = self._gateway
        self._cells = self._board.cells([replica.key for replica in gateway.live.replicas()], self._row)
        gateway.router.share(dict(self._cells))
        if len(self._cells) < len(gateway.backends):
            missing = len(gateway.backends) - len(self._cells)
            gateway.notify(f"{missing} backends are more than can be shared: each process counts its own on them")

    def _rung(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell, 4096)
        self._gateway.room_made()


class Neighbourhood(SharedLoad, OtherWorkers):
    def __init__(self, place: Place):
        super().__init__(place.board, place.row)
        self.place = place
        # By backend, which finding of others was last taken over.
        self._seen: dict[str, float] = {}
        self._adopting = self._orphaned = False
        self._inherited = ""
        self._tasks: set[asyncio.Task[None]] = set()

    def _settle(self) -> None:
        super()._settle()
        self._gateway.waiting.most = -(-self._gateway.serving.max_queued // self.place.workers)

    # As a part of the gateway

    async def start(self, serve: "Serve") -> None:
        await super().start(serve)
        loop = asyncio.get_running_loop()
        self._siblings = Siblings(self.place.folder, self._row, self.place.workers, serve.verbs)
        await self._siblings.open()
        serve.siblings = self._siblings
        serve.verbs["metrics"] = lambda what: {"row": self._row, "page": self._own_page()}
        with contextlib.suppress(FileNotFoundError):
            self._inherited = self._kept_at(self._row).read_text()
        self._gateway.metrics.sources.append(self._figures)
        self._gateway.context.workers = self
        loop.add_reader(self.place.line.fileno(), self._commanded)
        # A worker that is killed before anyone has asked has been started all the same.
        self._own_page()
        self._ticking = loop.call_later(_TICK_S, self._tick)

    async def stop(self) -> None:
        await super().stop()
        self._ticking.cancel()
        asyncio.get_running_loop().remove_reader(self.place.line.fileno())
        self._own_page()
        self._siblings.close()
        if self._orphaned and not any(self.place.folder.glob("worker-*")):
            # The folder is the supervisor's, who is no more: the last one takes it away.
            shutil.rmtree(self.place.folder, ignore_errors=True)

    def _commanded(self) -> None:
        try:
            told = self.place.line.recv(64)
        except BlockingIOError:
            return
        except OSError:
            told = b""
        if READ_AGAIN in told and self._serve.reload():
            self.place.say("loaded")
        if not told:
            # The supervisor has gone: nobody would replace this one, and nobody can tell it to end.
            self._orphaned = True
            asyncio.get_running_loop().remove_reader(self.place.line.fileno())
        if not told or STOP in told:
            self._serve.stopping.set()
        if STOP_NOW in told:
            self._serve.end()

    def _tick(self) -> None:
        self._ticking = self._gateway.loop.call_later(_TICK_S, self._tick)
        self._board.turned(self._row)
        self._board.queue(self._row, len(self._gateway.waiting))
        self._board.clients(self._row, len(self._serve.server.connections))
        for key, backend in self._gateway.backends.items():
            cell = self._cells.get(key)
            if cell is not None:
                self._adopt(key, backend, cell.told())
        if monotonic() - self._kept > _KEEP_S:
            self._own_page()

    # How backends are

    def _adopt(self, key: str, backend: Backend, told: dict[str, float]) -> None:
        now, was = self._gateway.now(), backend.replica.up
        if told["probed_at"] > self._seen.get(key, 0.0):
            self._seen[key] = told["probed_at"]
            backend.probed(_FAULTS.get(told["health"]), now, refused=told["health"] == _REFUSES)
        if told["open_until"] > now and backend.breaker.state == "closed":
            backend.breaker.open_too(told["open_until"])
            backend.judge(now)
        if backend.replica.up != was:
            self._adopting = True
            self._gateway.backend_changed(backend)
            self._adopting = False

    def changed(self, backend: Backend) -> None:
        """This worker has found a backend up or down."""
        cell = self._cells.get(backend.replica.key)
        if cell is None or self._adopting:
            return
        if backend.breaker.state == "open":
            cell.tell(open_until=backend.breaker.until)
        if backend.healthy is False:
            self._told_health(backend, cell, _REFUSES)

    def probed(self, backend: Backend, fault: str | None, *, refused: bool) -> None:
        cell = self._cells.get(backend.replica.key)
        if cell is not None:
            self._told_health(backend, cell, _WELL if fault is None else _REFUSES if refused else _FAULTY)

    def _told_health(self, backend: Backend, cell: Cell, health: float) -> None:
        now = monotonic()
        self._seen[backend.replica.key] = now
        cell.tell(health=health, probed_at=now)

    def knows_health(self, backend: Backend) -> bool:
        """Whether someone has asked the backend lately."""
        cell = self._cells.get(backend.replica.key)
        fresh_s = _FRESH * self._gateway.serving.health_every_s
        return cell is not None and monotonic() - cell.told()["probed_at"] < fresh_s

    def reported(self, backend: Backend, load: EngineLoad) -> None:
        cell = self._cells.get(backend.replica.key)
        if cell is not None:
            kv_used = nan if load.kv_used_fraction is None else load.kv_used_fraction
            cell.tell(running=load.running, waiting=load.waiting, kv_used=kv_used, reported_at=monotonic())

    def knows_load(self, backend: Backend) -> bool:
        """Whether someone has read its metrics lately; then they are this worker's as well."""
        cell = self._cells.get(backend.replica.key)
        if cell is None:
            return False
        told = cell.told()
        if monotonic() - told["reported_at"] > _FRESH * self._gateway.serving.metrics_every_s:
            return False
        kv_used = None if isnan(told["kv_used"]) else told["kv_used"]
        backend.replica.report(told["running"], told["waiting"], kv_used, self._gateway.now())
        return True

    # Metrics

    def _figures(self) -> list[Family]:
        return [("crosstie_worker_starts_total", "counter", "Worker processes that were started.", [({}, 1.0)])]

    def _own_page(self) -> str:
        """Of this worker, and of those whose place it has taken."""
        own = self._gateway.metrics_page()
        page = summed([(self._row, own), (self._row, self._inherited)]) if self._inherited else own
        self._keep(page)
        return page

    def _kept_at(self, row: int) -> Path:
        return self.place.folder / f"counters-{row}"

    def _keep(self, page: str) -> None:
        """Before anyone is shown it: a counter that has been seen must not be seen smaller after a crash."""
        self._kept = monotonic()
        fresh = self.place.folder / f"counters-{self._row}.new"
        with contextlib.suppress(OSError):
            fresh.write_text(counters(page))
            fresh.replace(self._kept_at(self._row))

    def metrics_to(self, send: Callable[[str], None]) -> None:
        task = self._gateway.loop.create_task(self._gather_metrics(send))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _gather_metrics(self, send: Callable[[str], None]) -> None:
        answers: list[dict[str, Any]] = await self._serve.everywhere("metrics", {})
        pages = [(int(one["row"]), str(one["page"])) for one in answers if "page" in one]
        there = {row for row, _ in pages}
        for row in range(self.place.workers):
            if row not in there:
                # Dead, or too busy: what it has counted so far still counts.
                with contextlib.suppress(OSError):
                    pages.append((row, self._kept_at(row).read_text()))
        head = "# HELP crosstie_workers Workers that answer.\n# TYPE crosstie_workers gauge\n"
        send(f"{summed(pages)}{head}crosstie_workers {len(there)}\n")

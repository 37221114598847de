"""One worker among several: it shares load, health and counts with the others, and obeys the supervisor.

Load is shared at every decision (`route.router`), the rest within a tenth of a second. One worker probes a backend and
reads its metrics for all.
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from math import isnan, nan
from pathlib import Path
from time import monotonic

from crosstie.core.fleet import Fleet
from crosstie.core.histogram import Family
from crosstie.route.load import EngineLoad
from crosstie_gateway.gateway.backend import Backend
from crosstie_gateway.gateway.health import REFUSES
from crosstie_gateway.gateway.interfaces import OtherWorkers
from crosstie_gateway.service.process import Component, GatewayProcess
from crosstie_gateway.service.supervisor import LEAVE, READ_AGAIN, STOP, STOP_NOW, Ready, Reloaded, WorkerSlot
from crosstie_gateway.service.worker_link import Done, MetricsPage, MetricsRequest, ResponseKept, WorkerLink
from crosstie_gateway.share.board import Board, Cell
from crosstie_gateway.wire.tasks import Tasks

_TICK_S, _KEEP_S = 0.1, 1.0
# What another has found out is taken for one's own until it is nearly due again.
_FRESH = 0.75
_WELL, _FAULTY, _REFUSES, _UNTRUSTED = 0.0, 1.0, 2.0, 3.0
_FAULTS = {
    _FAULTY: "its health check failed, as another worker found",
    _REFUSES: REFUSES,
    _UNTRUSTED: "there is no TLS with it, as another worker found",
}


class SharedLoad(Component):
    """Shares the load on replicas by a board, with other workers and peers."""

    def __init__(self, board: Board, row: int):
        self._board, self._row = board, row
        self._cells: dict[str, Cell] = {}

    async def start(self, process: GatewayProcess) -> None:
        self._process, self._gateway = process, process.gateway
        self._gateway.listeners.append(lambda record: self._board.ring(self._row))
        self._settle()
        self._bell = self._board.bells[self._row][0]
        asyncio.get_running_loop().add_reader(self._bell, self._on_bell)

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

    def _on_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell, 4096)
        self._gateway.room_made()


class Worker(SharedLoad, OtherWorkers):
    def __init__(self, slot: WorkerSlot):
        super().__init__(slot.board, slot.row)
        self.slot = slot
        # By backend, which finding of others was last taken over.
        self._seen: dict[str, float] = {}
        self._adopting = self._orphaned = False
        self._inherited, self._kept = "", monotonic()
        self._tasks = Tasks()

    def _settle(self) -> None:
        super()._settle()
        self._gateway.waiting.most = -(-self._gateway.serving.max_queued // self.slot.workers)

    async def start(self, process: GatewayProcess) -> None:
        await super().start(process)
        loop = asyncio.get_running_loop()
        self._link = WorkerLink(self.slot.folder, self._row, self.slot.workers, process.handlers)
        await self._link.open()
        process.link = self._link
        process.on(ResponseKept, self._learn)
        self._gateway.context.responses.on_kept = self._tell_kept
        process.on(MetricsRequest, lambda _: MetricsPage(self._row, self._own_page()))
        with contextlib.suppress(FileNotFoundError):
            self._inherited = self._kept_at(self._row).read_text()
        self._gateway.context.workers = self
        loop.add_reader(self.slot.line.fileno(), self._on_order)
        self._ticking = loop.call_later(_TICK_S, self._tick)

    def ready(self) -> None:
        """All components have started. A worker that is killed before anyone has asked counts as started, too."""
        self._own_page()
        self.slot.say(Ready())

    def families(self) -> list[Family]:
        return [("crosstie_worker_starts_total", "counter", "Worker processes that were started.", [({}, 1.0)])]

    async def stop(self) -> None:
        await super().stop()
        self._ticking.cancel()
        asyncio.get_running_loop().remove_reader(self.slot.line.fileno())
        self._own_page()
        self._link.close()
        if self._orphaned and not any(self.slot.folder.glob("worker-*")):
            # The folder is the supervisor's, who is no more: the last one takes it away.
            shutil.rmtree(self.slot.folder, ignore_errors=True)

    def _on_order(self) -> None:
        try:
            orders = self.slot.line.recv(64)
        except BlockingIOError:
            return
        except OSError:
            orders = b""
        if READ_AGAIN in orders and self._process.reload():
            self.slot.say(Reloaded())
        if not orders:
            # The supervisor has gone: nobody would replace this one, and nobody can tell it to end.
            self._orphaned = True
            asyncio.get_running_loop().remove_reader(self.slot.line.fileno())
        if not orders or STOP in orders:
            self._process.stopping.set()
        if LEAVE in orders:
            self._process.leave()
        if STOP_NOW in orders:
            self._process.end()

    def _tick(self) -> None:
        self._ticking = self._gateway.loop.call_later(_TICK_S, self._tick)
        self._board.turned_at[self._row] = monotonic()
        self._board.queued[self._row] = len(self._gateway.waiting)
        self._board.clients[self._row] = len(self._process.server.connections)
        for key, backend in self._gateway.backends.items():
            cell = self._cells.get(key)
            if cell is not None:
                self._adopt(key, backend, cell.shared())
        if monotonic() - self._kept > _KEEP_S:
            self._own_page()

    # How backends are

    def _adopt(self, key: str, backend: Backend, shared: dict[str, float]) -> None:
        now, was = self._gateway.now(), backend.replica.up
        if shared["probed_at"] > self._seen.get(key, 0.0):
            self._seen[key] = shared["probed_at"]
            backend.probed(_FAULTS.get(shared["health"]), now, refused=shared["health"] >= _REFUSES)
        if shared["open_until"] > now and backend.breaker.state == "closed":
            backend.breaker.open_too(shared["open_until"])
            backend.judge(now)
        if backend.replica.up != was:
            self._adopting = True
            self._gateway.backend_changed(backend)
            self._adopting = False

    def changed(self, backend: Backend) -> None:
        cell = self._cells.get(backend.replica.key)
        if cell is None or self._adopting:
            return
        if backend.breaker.state == "open":
            cell.tell(open_until=backend.breaker.until)
        if backend.healthy is False:
            self._share_health(backend, cell, _REFUSES)

    def probed(self, backend: Backend, fault: str | None, *, refused: bool) -> None:
        cell = self._cells.get(backend.replica.key)
        if cell is not None:
            self._share_health(backend, cell, _health(fault, refused=refused))

    def _share_health(self, backend: Backend, cell: Cell, health: float) -> None:
        now = monotonic()
        self._seen[backend.replica.key] = now
        cell.tell(health=health, probed_at=now)

    def takes_probe(self, backend: Backend) -> bool:
        cell = self._cells.get(backend.replica.key)
        if cell is None:
            return True
        now, shared = monotonic(), cell.shared()
        if now - max(shared["probed_at"], shared["probe_began_at"]) < _FRESH * self._gateway.serving.health_every_s:
            return False
        # Before the answer: workers that were started together are due together.
        cell.tell(probe_began_at=now)
        return True

    def reported(self, backend: Backend, load: EngineLoad) -> None:
        cell = self._cells.get(backend.replica.key)
        if cell is not None:
            kv_used = nan if load.kv_used_fraction is None else load.kv_used_fraction
            cell.tell(running=load.running, waiting=load.waiting, kv_used=kv_used, reported_at=monotonic())

    def takes_load(self, backend: Backend) -> bool:
        cell = self._cells.get(backend.replica.key)
        if cell is None:
            return True
        now, shared = monotonic(), cell.shared()
        fresh_s = _FRESH * self._gateway.serving.metrics_every_s
        if now - shared["reported_at"] < fresh_s:
            kv_used = None if isnan(shared["kv_used"]) else shared["kv_used"]
            lasts_s = self._gateway.serving.metrics_last_s
            backend.replica.report(shared["running"], shared["waiting"], kv_used, self._gateway.now(), lasts_s)
            return False
        if now - shared["read_began_at"] < fresh_s:
            return False
        cell.tell(read_began_at=now)
        return True

    # Responses

    def _tell_kept(self, key_id: int, response: str, home: str) -> None:
        """Tells the others: a request that goes on from it may come to any worker."""
        self._tasks.spawn(self._process.ask_others(ResponseKept(key_id, response, home)))

    def _learn(self, kept: ResponseKept) -> Done:
        self._gateway.context.responses.learn(kept.key_id, kept.response, kept.home)
        return Done()

    # Metrics

    def _own_page(self) -> str:
        """Of this worker, and of those whose place it has taken."""
        own = self._gateway.metrics_page()
        page = merged_pages([(self._row, own), (self._row, self._inherited)]) if self._inherited else own
        # Kept before anyone is shown it: a counter that has been seen must not be seen smaller after a crash.
        self._kept = monotonic()
        fresh = self.slot.folder / f"counters-{self._row}.new"
        with contextlib.suppress(OSError):
            fresh.write_text(counters(page))
            fresh.replace(self._kept_at(self._row))
        return page

    def _kept_at(self, row: int) -> Path:
        return self.slot.folder / f"counters-{row}"

    def metrics_to(self, send: Callable[[str], None]) -> None:
        self._tasks.spawn(self._gather_metrics(send))

    async def _gather_metrics(self, send: Callable[[str], None]) -> None:
        pages = [(told.row, told.page) for told in await self._process.ask_all(MetricsRequest(), MetricsPage)]
        there = {row for row, _ in pages}
        for row in range(self.slot.workers):
            if row not in there:
                # Dead, or too busy: what it has counted so far still counts.
                with contextlib.suppress(OSError):
                    pages.append((row, self._kept_at(row).read_text()))
        head = "# HELP crosstie_workers Workers that answer.\n# TYPE crosstie_workers gauge\n"
        send(f"{merged_pages(pages)}{head}crosstie_workers {len(there)}\n")


def _health(fault: str | None, *, refused: bool) -> float:
    if fault is None:
        return _WELL
    return _FAULTY if not refused else _REFUSES if fault == REFUSES else _UNTRUSTED


# Metrics pages of several workers as one: counters and histograms add up, and gauges unless they say how something is.

# Gauges of which all workers speak about the same thing: what the one says who takes it for the worst.
_OF_ALL: dict[str, Callable[[float, float], float]] = {
    "crosstie_backend_up": min,
    "crosstie_breaker_open": max,
    "crosstie_engine_running": max,
    "crosstie_engine_waiting": max,
    "crosstie_target_promised": max,
    "crosstie_provider_max_usd": max,
    "crosstie_jwks_keys": min,
    "crosstie_share_up": max,
    "crosstie_record_failed": max,
    "crosstie_telemetry_failed": max,
    "crosstie_discovered_addresses": min,
    "crosstie_cluster_endpoints": min,
    # Only the worker that compares knows more than 0; a canary that has ended makes any of them say -1.
    "crosstie_trial_ready": lambda a, b: min(a, b) if min(a, b) < 0 else max(a, b),
    "crosstie_canary_stopped": max,
    "crosstie_kv_blocks": min,
    "crosstie_kv_known": min,
    "crosstie_plugin_up": min,
}
# What each has learnt by itself.
_EACH = ("crosstie_ttft_correction", "crosstie_tpot_correction")


def _families(page: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """Of each family its name, its kind, its head and the lines of its samples."""
    for family in page.split("# HELP ")[1:]:
        helped, typed, *lines = family.splitlines()
        _, _, name, kind = typed.split()
        yield name, kind, f"# HELP {helped}\n{typed}\n", lines


def merged_pages(pages: Sequence[tuple[int, str]]) -> str:
    """Pages by the number of their worker; families in the order in which they first come."""
    heads: dict[str, str] = {}
    samples: dict[str, dict[str, float]] = {}
    for worker, page in pages:
        for name, kind, head, lines in _families(page):
            heads.setdefault(name, head)
            merged = samples.setdefault(name, {})
            for line in lines:
                _add(merged, name, kind, line, worker)
    return "".join(
        head + "".join(f"{sample} {_number(value)}\n" for sample, value in samples[name].items())
        for name, head in heads.items()
    )


def _add(merged: dict[str, float], family: str, kind: str, line: str, worker: int) -> None:
    name, _, text = line.rpartition(" ")
    value = float(text)
    if family in _EACH and 'worker="' not in name:
        name = f'{name[:-1]},worker="{worker}"}}' if name.endswith("}") else f'{name}{{worker="{worker}"}}'
    if name not in merged:
        merged[name] = value
    elif kind == "gauge" and family in _OF_ALL:
        merged[name] = _OF_ALL[family](merged[name], value)
    else:
        merged[name] += value


def counters(page: str) -> str:
    """A page's counters and histograms, which a worker leaves to its successor."""
    grows = [(head, lines) for _, kind, head, lines in _families(page) if kind in ("counter", "histogram")]
    return "".join(head + "".join(f"{line}\n" for line in lines) for head, lines in grows)


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)

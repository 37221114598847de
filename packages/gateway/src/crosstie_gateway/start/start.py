"""Starts a gateway: `serve` as a child process that ends with this one, `run` here, until it is told to stop."""

import asyncio
import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.writing import in_words
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Policy, Pool, Serving
from crosstie.wire.files import allow_many_connections
from crosstie.wire.loops import run_on_loop, settle_memory
from crosstie_gateway.batch.api import BatchApi
from crosstie_gateway.batch.responses import StoredResponses
from crosstie_gateway.batch.runner import BatchRunner
from crosstie_gateway.batch.store import BatchStore
from crosstie_gateway.emulate.fleet import EmulatedChild, start_emulated
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.hosting.hosting import Hosting
from crosstie_gateway.ledger.places import open_store
from crosstie_gateway.service.admin_door import AdminDoor
from crosstie_gateway.service.discovery import ClusterDiscovery, NameDiscovery
from crosstie_gateway.service.edge import Edge, OpsDoor
from crosstie_gateway.service.kv_events import KvEvents
from crosstie_gateway.service.ledger import Ledger
from crosstie_gateway.service.logs import Log, Style
from crosstie_gateway.service.peers import LearntSharing, PeerSharing, ProviderSpending
from crosstie_gateway.service.plugins import PluginProcesses
from crosstie_gateway.service.process import Component, GatewayProcess, Systemd, check_places
from crosstie_gateway.service.record import TrafficRecorder
from crosstie_gateway.service.supervisor import Supervisor, WorkerSlot
from crosstie_gateway.service.telemetry import Telemetry, wanted
from crosstie_gateway.service.token_keys import TokenKeys
from crosstie_gateway.service.tokenizing import TokenizerFiles
from crosstie_gateway.service.trials import TrialsService
from crosstie_gateway.service.worker import SharedLoad, Worker
from crosstie_gateway.share.board import Board
from crosstie_gateway.start.local import CONTEXT, LocalEngine, start_local
from crosstie_gateway.wire.child import Child, start_crosstie, when_orphaned

# What is kept for clients: --batches FOLDER, --responses FILE


class BatchService(Component):
    """Every worker answers for the folder; one of them runs what is in it."""

    def __init__(self, folder: Path, *, in_flight: int, most_gib: float):
        self._in_flight = in_flight
        self._store = BatchStore(folder, int(most_gib * 2**30))

    async def start(self, process: GatewayProcess) -> None:
        with in_words(f"--batches {self._store.folder}"):
            await asyncio.to_thread(self._store.index.known)
        self._api = BatchApi(self._store, process.gateway)
        self.runner = BatchRunner(self._store, process.gateway, process.server, self._in_flight)
        process.gateway.context.batches = self._api
        self.runner.start()

    async def drain(self, within_s: float) -> None:
        await self.runner.drain(within_s)

    async def stop(self) -> None:
        await self.runner.stop()
        await self._api.stop()
        await asyncio.to_thread(self._store.index.close)


class ResponseService(Component):
    """Every worker reads and writes the file."""

    def __init__(self, file: Path):
        self._file = file

    async def start(self, process: GatewayProcess) -> None:
        self._kept = StoredResponses(self._file, process.gateway, process.server.limits)
        with in_words(f"--responses {self._file}"):
            await asyncio.to_thread(self._kept.store.rows, "SELECT 1 FROM held")
        process.gateway.context.responses = self._kept

    async def stop(self) -> None:
        await self._kept.stop()
        await asyncio.to_thread(self._kept.store.close)


# How long a gateway that is told to stop may take: `serve.drain_s` is 60 where its file says nothing.
_STOP_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `crosstie serve`, whose help explains them. `file` None: llama.cpp and a small model here."""

    file: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    unix: Path | None = None
    unix_mode: int | None = None
    no_tcp: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    # Clients agree on HTTP/2 by TLS, for gRPC: those of `pick`.
    grpc: bool = False
    policy: Policy | None = None
    emulate: bool = False
    speed: float = 1.0
    workers: int = 1
    admin_port: int | None = None
    admin_host: str = "127.0.0.1"
    admin_anywhere: bool = False
    dashboard: bool = False
    ops_port: int | None = None
    ops_host: str = "127.0.0.1"
    batches: Path | None = None
    batch_in_flight: int = 32
    batch_max_gib: float = 10.0
    responses: Path | None = None
    plugins: tuple[str, ...] = ()
    record: Path | None = None
    record_max_mib: int | None = None
    record_keep: int | None = None
    log_format: Style = "text"
    log_requests: bool = False
    log_prompts: bool = False
    otel: bool | None = None
    with_parent: bool = False


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway that is ready. `url` ends with /v1; None: it would be, but was not started."""

    fleet: Fleet
    url: str | None
    options: ServeOptions
    admin_url: str | None = None
    ops_url: str | None = None
    # Where the administrator's key was made up.
    admin_key_file: Path | None = None


def _any(fleet: Fleet) -> None:
    """Takes every fleet."""


def run(
    options: ServeOptions, on_ready: Callable[[Served], None],
    made: Callable[..., GatewayProcess] = GatewayProcess, check: Callable[[Fleet], None] = _any,
) -> bool:  # fmt: skip
    """Serves here until a signal ends it; whether every request was answered. `made`: what serves; `check` refuses
    fleets. Raises CrosstieError."""
    with contextlib.ExitStack() as stack:
        start = _Start(options, check, stack)
        start.made = made
        is_whole = run_on_loop(start.alone(on_ready)) if options.workers == 1 else start.with_workers(on_ready)
        if not is_whole:
            sentence = "some requests were cut off: they took longer than serve.drain_s, or it was told to end twice"
            start.log.notice(Notice("requests_cut_off", "error", sentence))
        return is_whole


def would_serve(options: ServeOptions, check: Callable[[Fleet], None] = _any) -> Served:
    """What would be served; nothing is started. Raises CrosstieError where it could not be."""
    if options.file is None:
        raise BadInput("--dry-run needs a fleet file")
    with contextlib.ExitStack() as stack:
        return Served(_Start(options, check, stack, starts_engines=False).fleet, None, options)


def _check_together(options: ServeOptions) -> None:
    """Raises BadInput for options that others must go with."""
    for is_wrong, why in (
        (options.emulate and options.file is None,
         "--emulate needs a fleet file; `crosstie serve --example > fleet.toml` makes one"),
        (options.speed != 1.0 and not options.emulate, "--speed goes with --emulate: real engines run at their own"),
        (options.record is None and (options.record_max_mib, options.record_keep) != (None, None),
         "--record-max-mib and --record-keep go with --record"),
        (options.log_prompts and not options.log_requests,
         "--log-prompts goes with --log-requests: a prompt is a part of its request's line"),
    ):  # fmt: skip
        if is_wrong:
            raise BadInput(why)


def _local_fleet(engine: LocalEngine) -> Fleet:
    """One pool, known by its address alone: its speed is learnt. No balancer is before it."""
    pool = Pool(
        name="local", model=engine.model, accelerator=None, parallelism=Parallelism(), precision=None,
        kv_format="bf16", stack=None, replicas=1, usd_per_gpu_hour=0.0, max_in_flight=64, max_context=CONTEXT,
        backends=(engine.url,),
    )  # fmt: skip
    return Fleet(
        name="local",
        planned="",
        policy="cheapest-meeting-target",
        pools=(pool,),
        classes=(),
        serving=Serving(lame_duck_s=0.0),
    )


class _Start:
    """Composes the service, be it one process or several; what it opens, `stack` closes."""

    made: Callable[..., GatewayProcess] = GatewayProcess

    def __init__(
        self, options: ServeOptions, check: Callable[[Fleet], None], stack: contextlib.ExitStack, *,
        starts_engines: bool = True,
    ):  # fmt: skip
        _check_together(options)
        self.options, self.check = options, check
        self.log = Log(options.log_format, requests=options.log_requests, prompts=options.log_prompts)
        stack.callback(self.log.close)
        self.edge = Edge(
            options.host, options.port, unix=options.unix, unix_mode=options.unix_mode, no_tcp=options.no_tcp,
            tls_cert=options.tls_cert, tls_key=options.tls_key, tls_client_ca=options.tls_client_ca,
            grpc=options.grpc,
        )  # fmt: skip
        self.door: AdminDoor | None = None
        self.ops: OpsDoor | None = None
        if options.admin_port is not None or options.dashboard:
            self.door = AdminDoor(
                options.admin_host, options.admin_port or 0, anywhere=options.admin_anywhere, shown=options.dashboard
            )
        if options.ops_port is not None:
            self.ops = OpsDoor(options.ops_host, options.ops_port)
        for opened in (self.edge, self.door, self.ops):
            if opened is not None:
                stack.callback(opened.close)
        self.catalog = Catalog()
        self.emulated: EmulatedChild | None = None
        if options.file is None:
            fleet = _local_fleet(stack.enter_context(start_local()))
        else:
            fleet = read_fleet(self.catalog, options.file)
            if options.emulate and starts_engines:
                self.emulated = stack.enter_context(start_emulated(options.file, speed=options.speed))
        self.fleet = self.prepare(fleet)

    def prepare(self, read: Fleet) -> Fleet:
        """What is done to every fleet that is read."""
        placed = read if self.emulated is None else self.emulated.placed(read)
        self.check(placed)
        policy = self.options.policy
        return placed if policy is None else msgspec.structs.replace(placed, policy=policy)

    def _observers(self, log: Log) -> list[Component]:
        options, parts = self.options, list[Component]((log,))
        if options.record is not None:
            limits = {"most_mib": options.record_max_mib, "keep": options.record_keep}
            given = {name: value for name, value in limits.items() if value is not None}
            parts.append(TrafficRecorder(options.record, **given))
        if options.otel or (options.otel is None and wanted()):
            try:
                parts.append(Telemetry())
            except BadInput as error:
                if options.otel:
                    raise
                # The environment may be that of every program on the machine; this one serves without.
                log.notice(Notice("telemetry_off", "warning", f"no traces are exported: {error}"))
        return parts

    def _process(
        self, log: Log, ledger: Ledger, before: Sequence[Component], after: Sequence[Component] = (),
        **shared: Any,
    ) -> GatewayProcess:  # fmt: skip
        plugins: list[Component] = [PluginProcesses(self.options.plugins)] if self.options.plugins else []
        doors: list[Component] = [door for door in (self.edge, self.door, self.ops) if door is not None]
        options, batches = self.options, list[Component]()
        if options.batches is not None:
            limits: dict[str, Any] = {"in_flight": options.batch_in_flight, "most_gib": options.batch_max_gib}
            batches.append(BatchService(options.batches, **limits))
        if options.responses is not None:
            batches.append(ResponseService(options.responses))
        return self.made(
            self.catalog, self.fleet, file=self.options.file, speed=self.options.speed, prepared=self.prepare,
            components=[
                NameDiscovery(), ClusterDiscovery(), *before, ledger, TokenKeys(), Hosting(), ProviderSpending(),
                TokenizerFiles(), KvEvents(), TrialsService(), *self._observers(log), *plugins, *batches,
                *doors, *after,
            ],
            **shared,
        )  # fmt: skip

    def _served(self) -> Served:
        door = self.door
        key_file = door.key.file if door is not None else None
        admin_url, ops_url = (place.url if place is not None else None for place in (door, self.ops))
        return Served(self.fleet, self.edge.url, self.options, admin_url, ops_url, key_file)

    async def alone(self, on_ready: Callable[[Served], None]) -> bool:
        systemd = Systemd()
        board = Board(1) if self.fleet.state.redis is not None else None
        shared: list[Component] = (
            [SharedLoad(board, 0), PeerSharing(board), LearntSharing()] if board is not None else []
        )
        process = self._process(
            self.log, Ledger(), shared, [systemd], notify=self.log.notice, board=board,
            opened=self.edge.listen,
        )  # fmt: skip
        allow_many_connections()
        await process.start(self.options.host, self.options.port)
        self.edge.port = process.port
        settle_memory()
        # Before anyone is told that it is ready, who may then want it to end.
        process.heed_signals()
        if self.options.with_parent:
            when_orphaned(asyncio.get_running_loop(), process.stopping.set)
        on_ready(self._served())
        systemd.ready()
        return await process.until_stopped()

    def with_workers(self, on_ready: Callable[[Served], None]) -> bool:
        allow_many_connections()
        if self.fleet.state.store is not None:
            open_store(self.fleet.state.store, create=True).close()
        supervisor = Supervisor(self.options.workers, self._run_worker, self.log.notice)
        supervisor.file, supervisor.read = self.options.file, self._read
        supervisor.sockets = self.edge.listen()
        for door in (self.door, self.ops):
            if door is not None:
                door.listen()
        return supervisor.serve(lambda: on_ready(self._served()), with_parent=self.options.with_parent)

    def _run_worker(self, slot: WorkerSlot) -> int:
        """In a process of its own, with a log of its own, since a thread writes it."""
        own = self.log
        with contextlib.closing(Log(own.style, requests=own.requests, prompts=own.prompts, notices=slot.notice)) as log:
            return 0 if run_on_loop(self._worker(slot, log)) else 1

    async def _worker(self, slot: WorkerSlot, log: Log) -> bool:
        worker = Worker(slot)
        shared: list[Component] = [worker]
        if self.fleet.state.redis is not None and slot.row == 0:
            # One speaks for all of them.
            shared.append(PeerSharing(slot.board))
        if self.fleet.state.redis is not None:
            shared.append(LearntSharing())
        # One that comes later must not find an empty store where the others have lost theirs.
        ledger = Ledger(create=False)
        process = self._process(
            log, ledger, shared, notify=slot.notice, board=slot.board, row=slot.row, sockets=slot.sockets
        )
        await process.start(self.options.host, self.options.port)
        settle_memory()
        worker.ready()
        return await process.until_stopped()

    def _read(self) -> Callable[[], None]:
        """Reads the file; later workers serve it once the running ones have taken it."""
        if self.options.file is None:
            return lambda: None
        fleet = self.prepare(read_fleet(self.catalog, self.options.file))
        check_places(self.fleet, fleet)

        def taken() -> None:
            self.fleet = fleet

        return taken


class RunningGateway(Child):
    """A gateway in a child process. Leaving a `with` block, `stop`, or the end of this process ends it."""

    def __init__(self, process: subprocess.Popen[bytes], said: dict[str, Any], folder: contextlib.ExitStack):
        super().__init__(process)
        self._folder = folder
        # Of OpenAI's API, for a client's `base_url`; and the server's own, for /metrics, /health and the like.
        self.api_url: str = said["url"]
        self.url = self.api_url.removesuffix("/v1")
        self.admin_url: str | None = said.get("admin_url")
        self.ops_url: str | None = said.get("ops_url")
        # Addresses of the replicas, by pool.
        self.backends: dict[str, list[str]] = {name: pool["backends"] for name, pool in said["pools"].items()}

    def stop(self, grace_s: float = _STOP_S) -> int:
        """Answers what has come, and ends: 0 where no request had to be cut off."""
        with self._folder:
            return super().stop(grace_s)


def serve(
    fleet: Fleet | Path | str | None = None, *, host: str = "127.0.0.1", port: int = 0, emulate: bool = False,
    speed: float = 1.0, policy: Policy | None = None, workers: int = 1, options: Sequence[str] = (),
) -> RunningGateway:  # fmt: skip
    """A gateway that answers already, over a fleet, or a fleet file that it follows; None: a small local engine.

    `emulate`: without GPUs, `speed` times as fast as real time. `options`: more of `crosstie serve`, such as
    ("--log-requests",). It is a child process, whatever this one does meanwhile. Raises BadInput where it cannot be
    started.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(fleet, Fleet):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crosstie-serve-")))
            file: Path | str | None = folder / "fleet.toml"
            (folder / "fleet.toml").write_text(fleet_text(fleet))
        else:
            file = fleet
        arguments = ["serve", *([str(file)] if file is not None else []), "--host", host, "--port", str(port)]
        arguments += ["--emulate", "--speed", str(speed)] if emulate else []
        arguments += ["--policy", policy] if policy is not None else []
        arguments += ["--workers", str(workers), *options]
        process, said = start_crosstie(arguments, "the gateway could not be started")
        return RunningGateway(process, said, stack.pop_all())

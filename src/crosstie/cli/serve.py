"""`crosstie serve`: one OpenAI-compatible endpoint over the pools of a fleet file."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import click
import msgspec

from crosstie.catalog.fleet_text import example_fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.cli.observing import Observers, observed
from crosstie.cli.show import console, json_option, print_json, print_table, table
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Policy, Pool
from crosstie.run.emulate.child import start_emulated
from crosstie.run.gateway.notices import Notice
from crosstie.run.ledger.places import open_store
from crosstie.run.service.admin_door import AdminDoor
from crosstie.run.service.far import OtherMachines
from crosstie.run.service.hosting import Hosting
from crosstie.run.service.ledger import Ledger
from crosstie.run.service.local import CONTEXT, LocalEngine, start_local
from crosstie.run.service.neighbourhood import Neighbourhood, SharedLoad
from crosstie.run.service.process import Part, Serve, check_places
from crosstie.run.service.systemd import Systemd
from crosstie.run.service.workers import Place, Workers
from crosstie.run.share.board import Board
from crosstie.run.wire.child import when_orphaned
from crosstie.run.wire.loops import allow_many_connections, run_on_loop, settle_memory


@click.command("serve")
@click.argument("file", required=False, metavar="[FLEET.toml]", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0 for everyone.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@click.option("--policy", type=click.Choice(get_args(Policy)), help="Instead of the file's.")
@click.option("--emulate", is_flag=True, help="No GPUs at hand: emulate every pool's replicas.")
@click.option(
    "--speed", type=click.FloatRange(0.01, 1000), default=1.0, show_default=True,
    help="With --emulate: so many times as fast as real time.",
)  # fmt: skip
@click.option(
    "--admin-port", type=click.IntRange(0, 65535), help="A second port for `crosstie admin`, with its own key."
)
@click.option("--admin-host", default="127.0.0.1", show_default=True, help="Where administrators are listened to.")
@click.option("--admin-anywhere", is_flag=True, help="--admin-host may be other than loopback.")
@click.option("--check", is_flag=True, help="Read the file, say what would be served, and end.")
@click.option("--example", is_flag=True, help="Print a fleet file to start from.")
@click.option(
    "--workers", type=click.IntRange(1, 256), default=1, show_default=True,
    help="Processes that serve together; one for each core that the gateway may use.",
)  # fmt: skip
@click.option("--with-parent", is_flag=True, hidden=True, help="End when standard input closes.")
@observed
@json_option
def command(
    file: Path | None, host: str, port: int, policy: Policy | None, emulate: bool, speed: float,
    admin_port: int | None, admin_host: str, admin_anywhere: bool, check: bool, example: bool, workers: int,
    with_parent: bool, as_json: bool, observers: Observers,
) -> int:  # fmt: skip
    """One OpenAI-compatible endpoint over the pools of FLEET.toml; each request to the cheapest that is fast enough.

    \b
    crosstie plan workload.toml --fleet fleet.toml    # then add each pool's backends, and
    crosstie serve fleet.toml --port 8080
    crosstie serve fleet.toml --emulate --speed 20    # the same fleet without a GPU
    crosstie serve                                    # llama.cpp and a small model on this machine

    /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/responses, /v1/models; /health, /ready, /metrics.
    Hints by header: x-crosstie-class, -ttft-ms, -tpot-ms, -priority, -pool, -session. The file is read again on
    SIGHUP and when it changes; SIGTERM answers what has come and ends. docs/gateway.md has the rest.

    Exit status 0 after a drain that lost nothing, 1 when requests had to be cut off, 2 when it could not serve.
    """
    if example:
        click.echo(example_fleet_text(), nl=False)
        return 0
    if emulate and file is None:
        raise BadInput("--emulate needs a fleet file; `crosstie serve --example > fleet.toml` makes one")
    if speed != 1.0 and not emulate:
        raise BadInput("--speed goes with --emulate: real engines run at their own")
    door = None if admin_port is None else AdminDoor(admin_host, admin_port, anywhere=admin_anywhere)
    catalog = Catalog()
    log = observers.log
    with contextlib.ExitStack() as stack:
        stack.callback(log.close)
        if door is not None:
            stack.callback(door.close)
        kept: Callable[[Fleet], Fleet] = lambda fleet: fleet  # noqa: E731
        if file is None:
            if check:
                raise BadInput("--check needs a fleet file")
            fleet = _local_fleet(stack.enter_context(start_local()))
        else:
            fleet = read_fleet(catalog, file)
            if emulate and not check:
                child = stack.enter_context(start_emulated(file, speed=speed))
                fleet, kept = child.placed(fleet), child.placed
        fleet = _with_policy(fleet, policy)
        if check:
            _tell(fleet, None, as_json, emulated=emulate)
            return 0
        start = _Start(
            catalog, fleet, file, host, port, speed, observers, door,
            prepared=lambda again: _with_policy(kept(again), policy),
            tell=lambda fleet, url: _tell(fleet, url, as_json, emulated=emulate, workers=workers, door=door),
        )  # fmt: skip
        whole = start.alone(with_parent) if workers == 1 else start.together(workers, with_parent)
        if not whole:
            sentence = "some requests were cut off: they took longer than serve.drain_s, or it was told to end twice"
            log.notice(Notice("requests_cut_off", "error", sentence))
    return 0 if whole else 1


class _Start:
    """What a gateway is started with, be it one process or several."""

    def __init__(
        self, catalog: Catalog, fleet: Fleet, file: Path | None, host: str, port: int, speed: float,
        observers: Observers, door: AdminDoor | None, *, prepared: Callable[[Fleet], Fleet],
        tell: Callable[[Fleet, str], None],
    ):  # fmt: skip
        self.catalog, self.fleet, self.file, self.host, self.port, self.speed = catalog, fleet, file, host, port, speed
        self.observers, self.door, self.prepared, self.tell = observers, door, prepared, tell

    def _parts(self, observers: Observers, ledger: Ledger) -> list[Part]:
        return [ledger, Hosting(), *observers.parts(), *([self.door] if self.door is not None else [])]

    def _announce(self, port: int) -> None:
        named = f"[{self.host}]" if ":" in self.host else self.host
        self.tell(self.fleet, f"http://{named}:{port}/v1")

    def alone(self, with_parent: bool) -> bool:
        return run_on_loop(self._alone(with_parent))

    async def _alone(self, with_parent: bool) -> bool:
        systemd = Systemd()
        board = Board(1) if self.fleet.state.redis is not None else None
        shared: list[Part] = [SharedLoad(board, 0), OtherMachines(board)] if board is not None else []
        serve = Serve(
            self.catalog, self.fleet, file=self.file, speed=self.speed, notice=self.observers.log.notice,
            prepared=self.prepared, parts=[*shared, *self._parts(self.observers, Ledger()), systemd],
            board=board,
        )  # fmt: skip
        allow_many_connections()
        await serve.start(self.host, self.port)
        settle_memory()
        # Before anyone is told that it is ready: whoever has been told may want it to end.
        serve.heed_signals()
        if with_parent:
            when_orphaned(asyncio.get_running_loop(), serve.stopping.set)
        self._announce(serve.port)
        systemd.ready()
        return await serve.until_stopped()

    def together(self, number: int, with_parent: bool) -> bool:
        allow_many_connections()
        if self.fleet.state.store is not None:
            open_store(self.fleet.state.store, create=True).close()
        workers = Workers(number, self._work, self.observers.log.notice)
        workers.file, workers.read = self.file, self._read
        port = workers.listen(self.host, self.port)
        if self.door is not None:
            self.door.listen()
        return workers.serve(lambda: self._announce(port), with_parent=with_parent)

    def _work(self, place: Place) -> int:
        """In a process of its own, with a log of its own, since a thread writes it."""
        observers = self.observers.of_worker(place.notice)
        with contextlib.closing(observers.log):
            return 0 if run_on_loop(self._worker(place, observers)) else 1

    async def _worker(self, place: Place, observers: Observers) -> bool:
        shared: list[Part] = [Neighbourhood(place)]
        if self.fleet.state.redis is not None and place.row == 0:
            # One speaks for all of them.
            shared.append(OtherMachines(place.board))
        serve = Serve(
            self.catalog, self.fleet, file=self.file, speed=self.speed, notice=place.notice, prepared=self.prepared,
            # One that comes later must not find an empty store where the others have lost theirs.
            parts=[*shared, *self._parts(observers, Ledger(create=False))], board=place.board, row=place.row,
            sockets=place.sockets,
        )  # fmt: skip
        await serve.start(self.host, self.port)
        settle_memory()
        place.say("ready")
        return await serve.until_stopped()

    def _read(self) -> Callable[[], None]:
        """The file as it is now; workers that start later serve it once those that run have taken it."""
        if self.file is None:
            return lambda: None
        fleet = self.prepared(read_fleet(self.catalog, self.file))
        check_places(self.fleet, fleet)

        def taken() -> None:
            self.fleet = fleet

        return taken


def _with_policy(fleet: Fleet, policy: Policy | None) -> Fleet:
    return fleet if policy is None else msgspec.structs.replace(fleet, policy=policy)


def _local_fleet(engine: LocalEngine) -> Fleet:
    """One pool of which nothing is known but its address: its speed is learnt."""
    pool = Pool(
        name="local", model=engine.model, accelerator=None, parallelism=Parallelism(), precision=None,
        kv_format="bf16", stack=None, replicas=1, usd_per_gpu_hour=0.0, max_in_flight=64, max_context=CONTEXT,
        backends=(engine.url,),
    )  # fmt: skip
    return Fleet(name="local", planned="", policy="cheapest-meeting-target", pools=(pool,), classes=())


def _tell(
    fleet: Fleet, url: str | None, as_json: bool, *, emulated: bool, workers: int = 1, door: AdminDoor | None = None
) -> None:
    if as_json:
        pools = {
            pool.name: {
                "model": None if pool.hosts else pool.model,
                **({"hosts": [one.model for one in pool.hosts], "loading": pool.loading} if pool.hosts else {}),
                "accelerator": pool.accelerator,
                "backends": _addresses(pool),
            }
            for pool in fleet.pools
        }
        said = {"url": url, "fleet": fleet.name, "policy": fleet.policy, "emulated": emulated, "workers": workers}
        key_file = str(door.key.file) if door is not None and door.key.file is not None else None
        admin = {"admin_url": door.url, "admin_key_file": key_file} if door is not None else {}
        print_json({**said, "pools": pools, **admin})
        return
    out = console()
    what = "EMULATED, no GPU runs: " if emulated else ""
    out.print(f"{what}{fleet.name}: {len(fleet.pools)} pools, ${fleet.usd_per_hour:,.2f} an hour, {fleet.policy}")
    rows = [
        [
            pool.name,
            f"{len(pool.hosts)} models, some at a time" if pool.hosts else pool.model,
            f"{pool.parallelism.gpus} x {pool.accelerator} {pool.parallelism}" if pool.accelerator else "any",
            str(pool.replicas),
            f"{pool.max_in_flight:,}",
            f"{max(one.max_context for one in pool.by_model()):,}",
            _shown(_addresses(pool)),
        ]
        for pool in fleet.pools
    ]
    columns = [
        ("pool", "left"), ("model", "left"), ("each", "left"), ("replicas", "right"), ("in flight", "right"),
        ("context", "right"), ("backends", "left"),
    ]  # fmt: skip
    print_table(out, table("", columns, rows))
    if url is not None:
        out.print(f"serving at {url}" + (f", {workers} workers" if workers > 1 else ""))
        out.print(f"try: crosstie explain --url {url.removesuffix('/v1')} --model {fleet.pools[0].model}")


def _addresses(pool: Pool) -> list[str]:
    return list(pool.backends) or [address for one in pool.hosts for address in one.backends]


def _shown(addresses: list[str]) -> str:
    more = f" and {len(addresses) - 1} more" if len(addresses) > 1 else ""
    return f"{addresses[0]}{more}" if addresses else "no backends yet"

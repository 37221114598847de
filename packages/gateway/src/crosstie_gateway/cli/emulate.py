"""`crosstie emulate`: a fleet without its accelerators, for tests, demonstrations and rehearsals of failure."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import click

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.writing import write_text
from crosstie.cli.options import FILE, json_option
from crosstie.cli.show import console, say, show_table
from crosstie.core.errors import BadInput
from crosstie.core.figures import significant
from crosstie.wire.address import Address
from crosstie.wire.files import allow_many_connections
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.emulate.faults import read_script
from crosstie_gateway.emulate.fleet import EmulatedFleet, start
from crosstie_gateway.wire.child import when_orphaned

_NOTE = "emulated: the time that the performance model predicts for each accelerator, and no model behind it"


@click.command("emulate")
@click.argument("file", metavar="FLEET.toml", type=FILE)
@click.option("--port", "first_port", type=int, default=0, metavar="FIRST", help="First port. [default: any free ones]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--speed", type=float, default=1.0, show_default=True, metavar="X", help="Emulated seconds a second.")
@click.option(
    "--fault", "faults", multiple=True, metavar="POOL[/I]:KIND[@S][+S]", help="A fault, by itself and in time."
)
@click.option("--write", type=FILE, metavar="FILE", help="Write the fleet with its addresses.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="For the lengths of answers.")
@click.option("--with-parent", is_flag=True, hidden=True, help="End when standard input closes.")
@json_option
def command(
    file: Path, first_port: int, host: str, speed: float, faults: tuple[str, ...], write: Path | None, seed: int,
    with_parent: bool, as_json: bool,
) -> int:  # fmt: skip
    """Answers as the replicas of a fleet would, in the time that they would take, without any accelerator.

    \b
    crosstie emulate fleet.toml --speed 20 --write emulated.toml
    crosstie emulate fleet.toml --fault chat-mi300x/0:crash@30+60
    crosstie emulate fleet.toml --fault chat-b200:slow@10+60,factor=3

    FLEET.toml is what `crosstie plan --fleet` writes. Every replica gets a port and speaks OpenAI's API as vLLM
    does, with vLLM's metrics. Prints `ready` and serves until it is interrupted; docs/emulate.md has the faults.
    """
    script = [read_script(line) for line in faults]
    if not 0 <= first_port <= 65535:
        raise BadInput(f"--port {first_port}: must be from 0 to 65535")
    catalog = Catalog()
    fleet = read_fleet(catalog, file)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        allow_many_connections()
        running = await start(catalog, fleet, host=host, first_port=first_port, speed=speed, seed=seed, faults=script)
        try:
            if first_port and not any(Address(replica.url).port == first_port for replica in running.replicas):
                raise BadInput(f"--port {first_port}: {file} has addresses of this machine for all, which are kept")
            if write:
                write_text(write, fleet_text(running.fleet))
                click.echo(f"fleet written to {write}", err=True)
            if as_json:
                # One line, so that the parent can read it and go on while this serves.
                click.echo(json.dumps(_document(running, speed)))
            else:
                _show(running, speed)
            sys.stdout.flush()
            if with_parent:
                when_orphaned(loop, stop.set)
            await stop.wait()
        finally:
            await running.close()

    run_on_loop(serve())
    return 0


def _show(running: EmulatedFleet, speed: float) -> None:
    out = console()
    say(out, f"{running.fleet.name}  {_NOTE}")
    if speed != 1.0:
        say(out, f"  {significant(speed)} emulated seconds to each second")
    rows = [
        (
            replica.replica.emulated.pool,
            replica.name.partition("/")[2] if replica.role else str(replica.index),
            replica.url,
            replica.replica.emulated.label,
        )
        for replica in running.replicas
    ]
    show_table(out, ["pool", ">replica", "URL", "~emulates"], rows)
    out.print("ready")


def _document(running: EmulatedFleet, speed: float) -> dict[str, Any]:
    return {
        "ready": True,
        "emulated": _NOTE,
        "fleet": running.fleet.name,
        "speed": speed,
        "replicas": [
            {
                "pool": replica.replica.emulated.pool,
                "replica": replica.index,
                "url": replica.url,
                "model": replica.model,
                "hosted": replica.hosted,
                "role": replica.role or None,
                "kv_events": replica.replica.publisher.events if replica.replica.publisher else None,
                "kv_replay": replica.replica.publisher.replay if replica.replica.publisher else None,
                "emulates": replica.replica.emulated.label,
            }
            for replica in running.replicas
        ],
    }

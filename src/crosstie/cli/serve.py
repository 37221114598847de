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
from crosstie.cli.show import console, json_option, print_json, print_table, table
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Policy, Pool
from crosstie.emulate.child import start_emulated
from crosstie.gateway.local import CONTEXT, LocalEngine, start_local
from crosstie.gateway.process import Serve
from crosstie.wire.loops import allow_many_connections, run_on_loop, settle_memory
from crosstie.wire.parent import when_orphaned


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
@click.option("--check", is_flag=True, help="Read the file, say what would be served, and end.")
@click.option("--example", is_flag=True, help="Print a fleet file to start from.")
@click.option("--with-parent", is_flag=True, hidden=True, help="End when standard input closes.")
@json_option
def command(
    file: Path | None, host: str, port: int, policy: Policy | None, emulate: bool, speed: float, check: bool,
    example: bool, with_parent: bool, as_json: bool,
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
    catalog = Catalog()
    with contextlib.ExitStack() as stack:
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
        serve = Serve(
            catalog, fleet, file=file, speed=speed, notice=lambda line: click.echo(line, err=True),
            prepared=lambda again: _with_policy(kept(again), policy),
        )  # fmt: skip
        whole = run_on_loop(_serve(serve, host, port, as_json, emulate, with_parent))
    if not whole:
        click.echo(
            "some requests were cut off: they took longer than serve.drain_s, or it was told to end twice", err=True
        )
    return 0 if whole else 1


async def _serve(serve: Serve, host: str, port: int, as_json: bool, emulated: bool, with_parent: bool) -> bool:
    allow_many_connections()
    await serve.start(host, port)
    settle_memory()
    # Before anyone is told that it is ready: whoever has been told may want it to end.
    serve.heed_signals()
    if with_parent:
        when_orphaned(asyncio.get_running_loop(), serve.stopping.set)
    named = f"[{host}]" if ":" in host else host
    _tell(serve.fleet, f"http://{named}:{serve.port}/v1", as_json, emulated=emulated)
    return await serve.until_stopped()


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


def _tell(fleet: Fleet, url: str | None, as_json: bool, *, emulated: bool) -> None:
    if as_json:
        pools = {
            pool.name: {"model": pool.model, "accelerator": pool.accelerator, "backends": list(pool.backends)}
            for pool in fleet.pools
        }
        print_json({"url": url, "fleet": fleet.name, "policy": fleet.policy, "emulated": emulated, "pools": pools})
        return
    out = console()
    what = "EMULATED, no GPU runs: " if emulated else ""
    out.print(f"{what}{fleet.name}: {len(fleet.pools)} pools, ${fleet.usd_per_hour:,.2f} an hour, {fleet.policy}")
    rows = [
        [
            pool.name,
            pool.model,
            f"{pool.parallelism.gpus} x {pool.accelerator} {pool.parallelism}" if pool.accelerator else "any",
            str(len(pool.backends) or pool.replicas),
            f"{pool.max_in_flight:,}",
            f"{pool.max_context:,}",
            pool.backends[0] + (f" and {len(pool.backends) - 1} more" if len(pool.backends) > 1 else "")
            if pool.backends
            else "no backends yet",
        ]
        for pool in fleet.pools
    ]
    columns = [
        ("pool", "left"), ("model", "left"), ("each", "left"), ("replicas", "right"), ("in flight", "right"),
        ("context", "right"), ("backends", "left"),
    ]  # fmt: skip
    print_table(out, table("", columns, rows))
    if url is not None:
        out.print(f"serving at {url}")
        out.print(f"try: crosstie explain --url {url.removesuffix('/v1')} --model {fleet.pools[0].model}")

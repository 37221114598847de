"""`crosstie serve`: one OpenAI-compatible endpoint over the pools of a fleet file."""

import re
from typing import Any

import click

from crosstie.catalog.fleet_text import example_fleet_text
from crosstie.cli.lazy import GroupedCommand
from crosstie.cli.options import FILE, json_option, real_option, whole_option
from crosstie.cli.show import console, print_json, say, show_table
from crosstie.core.fleet import Pool
from crosstie_gateway.cli import observing
from crosstie_gateway.start.start import Served, ServeOptions, run, would_serve


def _mode(context: click.Context, option: click.Parameter, given: str | None) -> int | None:
    """Rights of a file in octal digits."""
    if given is not None and not re.fullmatch("0?[0-7]{3}", given):
        raise click.BadParameter(f"'{given}' is no mode of three octal digits, such as 660")
    return None if given is None else int(given, 8)


@click.command(
    "serve",
    cls=GroupedCommand,
    groups={
        **observing.GROUPS,
        "Clients": "--unix --unix-mode --no-tcp --tls-cert --tls-key --tls-client-ca",
        "Batches and responses": "--batches --batch-in-flight --batch-max-gib --responses",
        "Administration": "--dashboard --admin-port --admin-host --admin-anywhere --ops-port --ops-host",
    },
)
@click.argument("file", required=False, metavar="[FLEET.toml]", type=FILE)
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="A",
    help="Where to listen; 0.0.0.0 for everyone, :: also by IPv6.",
)  # fmt: skip
@whole_option("--port", 0, 65535, "0 takes a free one.", default=8080)
@click.option("--unix", type=FILE, metavar="PATH", help="Listen on this unix socket as well; it is always plain.")
@click.option(
    "--unix-mode", callback=_mode, metavar="660", help="Who may connect to it, as chmod has it; else as the umask says."
)
@click.option("--no-tcp", is_flag=True, help="With --unix: nowhere else.")
@click.option("--tls-cert", type=FILE, metavar="PEM", help="Speak TLS at --port: the certificate, with those above it.")
@click.option("--tls-key", type=FILE, metavar="PEM", help="Its key. Both are read again when they change.")
@click.option("--tls-client-ca", type=FILE, metavar="PEM", help="Only clients with a certificate of one of these.")
@observing.policy_option
@observing.emulate_options
@click.option(
    "--dashboard", is_flag=True,
    help="A page for operators at /crosstie/ of --port; it is at --admin-port in any case.",
)  # fmt: skip
@whole_option("--admin-port", 0, 65535, "A second port, for `crosstie admin` and the page.")
@click.option(
    "--admin-host", default="127.0.0.1", show_default=True, metavar="A", help="Where administrators are listened to."
)
@click.option("--admin-anywhere", is_flag=True, help="--admin-host may be other than loopback.")
@whole_option("--ops-port", 0, 65535, "/health, /ready and /metrics at a port of their own, and no more at --port.")
@observing.ops_host_option
@click.option("--batches", type=FILE, metavar="DIR", help="Keep /v1/files and /v1/batches there, and run them.")
@whole_option("--batch-in-flight", 1, 10_000, "Requests of batches that run at once.", default=32)
@real_option("--batch-max-gib", 0.001, None, "What all files may take.", metavar="G", default=10.0)
@click.option("--responses", type=FILE, metavar="FILE", help="Keep /v1/responses there, for any replica to go on from.")
@click.option(
    "--plugin", "plugins", multiple=True, metavar="NAME",
    help="A guard, filter or policy of another package: docs/plugins.md. May be repeated.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Read the file, say what would be served, and end.")
@click.option("--example", is_flag=True, help="Print a fleet file to start from.")
@whole_option(
    "--workers", 1, 256, "Processes that serve together; one for each core that the gateway may use.", default=1
)
@observing.with_parent_option
@observing.observing_options
@json_option
def command(dry_run: bool, example: bool, as_json: bool, **given: Any) -> int:
    """One OpenAI-compatible endpoint over the pools of FLEET.toml; each request to the cheapest that is fast enough.

    \b
    crosstie plan workload.toml --fleet fleet.toml
    crosstie recipe --fleet fleet.toml              # starts its engines
    crosstie serve fleet.toml --port 8080
    crosstie serve fleet.toml --emulate --speed 20  # the same without a GPU
    crosstie serve                                  # a small model, here

    /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/responses, /v1/messages (Anthropic's), /v1/models;
    /health, /ready, /metrics.
    Hints by header: x-crosstie-class, -ttft-ms, -tpot-ms, -priority, -pool, -session. The file is read again on
    SIGHUP and when it changes; SIGTERM answers what has come and ends. docs/gateway.md has the rest.

    Exit status 0 after a drain that lost nothing, 1 when requests had to be cut off, 2 when it could not serve.
    """
    if example:
        click.echo(example_fleet_text(), nl=False)
        return 0
    options = ServeOptions(**given)
    if dry_run:
        _show(would_serve(options), as_json)
        return 0
    return 0 if run(options, lambda served: _show(served, as_json)) else 1


def _show(served: Served, as_json: bool) -> None:
    fleet, url, options = served.fleet, served.url, served.options
    if as_json:
        pools = {
            pool.name: {
                "model": None if pool.hosts else pool.model,
                **({"hosts": [host.model for host in pool.hosts], "loading": pool.loading} if pool.hosts else {}),
                "accelerator": pool.accelerator,
                "stack": pool.stack,
                "release": pool.release,
                "backends": _addresses(pool),
            }
            for pool in fleet.pools
        }
        said = {
            "url": url, "fleet": fleet.name, "policy": fleet.policy, "emulated": options.emulate,
            "workers": options.workers if url is not None else 1, "pools": pools,
        }  # fmt: skip
        if options.unix is not None and url is not None:
            said["unix"] = str(options.unix)
        if served.ops_url is not None:
            said["ops_url"] = served.ops_url
        if served.admin_url is not None:
            key_file = str(served.admin_key_file) if served.admin_key_file is not None else None
            said |= {"admin_url": served.admin_url, "admin_key_file": key_file}
        print_json(said)
        return
    out = console()
    warning = "EMULATED, no GPU runs: " if options.emulate else ""
    say(out, f"{warning}{fleet.name}: {len(fleet.pools)} pools, ${fleet.usd_per_hour:,.2f} an hour, {fleet.policy}")
    rows = [
        [
            pool.name,
            f"{len(pool.hosts)} models, some at a time" if pool.hosts else pool.model,
            f"{pool.accelerator} {pool.layout}" if pool.accelerator else "any",
            " ".join(filter(None, (pool.stack, pool.release))) or "any",
            str(pool.replicas),
            f"{pool.max_in_flight:,}",
            f"{max(part.max_context for part in pool.by_model()):,}",
            _shown(_addresses(pool)),
        ]
        for pool in fleet.pools
    ]
    columns = ["pool", "model", "replica", "engine", ">replicas", ">in flight", ">context", "~backends"]
    show_table(out, columns, rows)
    if url is not None:
        places = [str(place) for place in (None if options.no_tcp else url, options.unix) if place is not None]
        workers = f", {options.workers} workers" if options.workers > 1 else ""
        say(out, f"serving at {' and '.join(places)}{workers}")
        if served.admin_url is not None:
            page = f"{url.removesuffix('/v1')}" if options.dashboard else served.admin_url
            where = f"in {served.admin_key_file}" if served.admin_key_file is not None else "CROSSTIE_ADMIN_KEY"
            say(out, f"operators at {page}/crosstie/; the administrator's key is {where}")
        if served.ops_url is not None:
            say(out, f"/health, /ready and /metrics at {served.ops_url}")
        say(out, f"try: crosstie explain --url {url.removesuffix('/v1')} --model {fleet.pools[0].model}")


def _addresses(pool: Pool) -> list[str]:
    return [*pool.backends, *pool.led_backends] or [address for host in pool.hosts for address in host.backends]


def _shown(addresses: list[str]) -> str:
    more = f" and {len(addresses) - 1} more" if len(addresses) > 1 else ""
    return f"{addresses[0]}{more}" if addresses else "no backends yet"

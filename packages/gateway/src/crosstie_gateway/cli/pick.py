"""`crosstie pick`: tells Envoy where requests go, by the Gateway API Inference Extension's protocol."""

from typing import Any

import click

from crosstie.cli.lazy import GroupedCommand
from crosstie.cli.options import FILE, json_option, whole_option
from crosstie.cli.show import console, print_json, say
from crosstie.core.errors import BadInput
from crosstie.core.figures import plural
from crosstie_gateway.cli import observing
from crosstie_gateway.pick.process import run_picker, would_pick
from crosstie_gateway.pick.stream import PickSettings
from crosstie_gateway.start.start import Served, ServeOptions


@click.command(
    "pick",
    cls=GroupedCommand,
    groups={
        **observing.GROUPS,
        "TLS": "--tls-cert --tls-key --tls-client-ca",
    },
)
@click.argument("file", metavar="FLEET.toml", type=FILE)
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="A",
    help="Where Envoy is listened to; 0.0.0.0 for everyone, :: also by IPv6.",
)  # fmt: skip
@whole_option("--port", 0, 65535, "0 takes a free one.", default=9002)
@whole_option(
    "--fallbacks",
    0,
    9,
    "Endpoints named after the first, in order, for Envoy's retries. 0 for clusters that take one only.",
    default=2,
)
@whole_option("--workers", 1, 64, "Processes that pick together, for more than one core: docs/scaling.md.", default=1)
@click.option(
    "--objective", "objectives", multiple=True, metavar="NAME=N",
    help="The priority of an InferenceObjective that requests may name (x-gateway-inference-objective): above 0 goes "
    "before others, below 0 after them. May be repeated.",
)  # fmt: skip
@click.option("--tls-cert", type=FILE, metavar="PEM", help="Speak TLS: the certificate, with those above it.")
@click.option("--tls-key", type=FILE, metavar="PEM", help="Its key. Both are read again when they change.")
@click.option("--tls-client-ca", type=FILE, metavar="PEM", help="Only Envoys with a certificate of one of these.")
@observing.policy_option
@observing.emulate_options
@whole_option("--ops-port", 0, 65535, "/health, /ready and /metrics by HTTP, there.")
@observing.ops_host_option
@click.option("--dry-run", is_flag=True, help="Read the file, say what would be picked from, and end.")
@observing.with_parent_option
@observing.observing_options
@json_option
def command(dry_run: bool, fallbacks: int, objectives: tuple[str, ...], as_json: bool, **given: Any) -> int:
    """Tell Envoy where each request goes: the cheapest pool of FLEET.toml that is fast enough.

    \b
    crosstie pick fleet.toml --host 0.0.0.0 --port 9002
    crosstie pick fleet.toml --emulate --speed 20   # no GPU: emulated engines
    crosstie pick fleet.toml --tls-cert c.pem --tls-key k.pem --ops-port 9003

    Envoy asks by its external processing filter (ext_proc), as the Gateway API Inference Extension's endpoint pickers
    are asked: bodies FULL_DUPLEX_STREAMED both ways, the endpoint in the header x-gateway-destination-endpoint and in
    the metadata envoy.lb. The fleet file, its policies, queues, keys and reloads are those of `crosstie serve`.
    docs/pick.md has Envoy's configuration.

    Exit status 0 after a drain that lost nothing, 1 when requests had to be cut off, 2 when it could not listen.
    """
    options, settings = ServeOptions(grpc=True, **given), PickSettings(fallbacks, dict(map(_objective, objectives)))
    if dry_run:
        _show(would_pick(options), as_json)
        return 0
    return 0 if run_picker(options, lambda served: _show(served, as_json), settings) else 1


def _objective(said: str) -> tuple[str, int]:
    name, _, priority = said.rpartition("=")
    try:
        if name:
            return name, int(priority)
    except ValueError:
        pass
    raise BadInput(f"--objective: '{said}' is no NAME=N with a whole number, such as batch=-1")


def _show(served: Served, as_json: bool) -> None:
    fleet, options, url = served.fleet, served.options, served.url
    at = None if url is None else url.removesuffix("/v1").partition("://")[2]
    pools = {pool.name: [url for model_pool in pool.by_model() for url in model_pool.backends] for pool in fleet.pools}
    if as_json:
        said = {"address": at, "tls": options.tls_cert is not None, "fleet": fleet.name, "policy": fleet.policy}
        print_json({**said, "emulated": options.emulate, "ops_url": served.ops_url, "pools": pools})
        return
    out, warning = console(), "EMULATED, no GPU runs: " if options.emulate else ""
    say(out, f"{warning}{fleet.name}: {plural(len(fleet.pools), 'pool')}, {fleet.policy}")
    for pool in fleet.pools:
        backends = pools[pool.name]
        more = f", {backends[0]}{' ...' if backends[1:] else ''}" if backends else ", no address yet"
        say(out, f"  {pool.name}: {plural(len(backends) or pool.replicas, 'endpoint')}{more}")
    if at is not None:
        say(out, f"picking for Envoy at {at}{', by TLS' if options.tls_cert is not None else ''}")
        if served.ops_url is not None:
            say(out, f"/health, /ready and /metrics at {served.ops_url}")

"""Options that `serve` and `pick` share: policy, emulation, operators' port, records, logs and traces."""

from typing import get_args

import click

from crosstie.cli.options import FILE, option_group, real_option, whole_option
from crosstie.core.fleet import Policy
from crosstie_gateway.service.logs import STYLES

GROUPS = {
    "Without GPUs": "--emulate --speed",
    "Records, logs and traces": "--record --record-max-mib --record-keep --log-format --log-requests "
    "--log-prompts --otel",
}
policy_option = click.option(
    "--policy", type=click.Choice(get_args(Policy)), metavar="P",
    help=f"Not the file's, but one of {', '.join(get_args(Policy))}.",
)  # fmt: skip
emulate_options = option_group(
    click.option("--emulate", is_flag=True, help="No GPUs at hand: emulate every pool's replicas."),
    real_option("--speed", 0.01, 1000, "With --emulate: so many times as fast as real time.", default=1.0),
)
ops_host_option = click.option("--ops-host", default="127.0.0.1", show_default=True, metavar="A", help="Where that is.")
with_parent_option = click.option("--with-parent", is_flag=True, hidden=True, help="End when standard input closes.")

observing_options = option_group(
    click.option(
        "--record", type=FILE, metavar="FILE",
        help="Append a trace of what is served, without any text: docs/recording.md.",
    ),
    whole_option("--record-max-mib", 1, 256, "Begin a new file at N MiB. [default: 64]"),
    whole_option("--record-keep", 0, 1000, "Keep N full files. [default: 8]"),
    click.option(
        "--log-format", type=click.Choice(STYLES), default="text", show_default=True,
        help="Of what is written to stderr.",
    ),
    click.option("--log-requests", is_flag=True, help="A line for each request that has ended."),
    click.option("--log-prompts", is_flag=True, help="With its body: users' own words, in your log."),
    click.option(
        "--otel/--no-otel", default=None,
        help="Export traces by OpenTelemetry. [default: where OTEL_EXPORTER_OTLP_ENDPOINT is set]",
    ),
)  # fmt: skip

"""Options of `serve` that say what is kept of its work: records, logs and traces."""

import functools
from collections.abc import Callable
from typing import Any

import click

from crosstie.cli.options import FILE, together, whole_option
from crosstie.run.service.logs import STYLES
from crosstie.run.service.start import Observers

_options = together(
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
_NAMES = ("record", "record_max_mib", "record_keep", "log_format", "log_requests", "log_prompts", "otel")


def observed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options, and their `observers` in the place of them."""

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:
        observers = Observers(**{name: given.pop(name) for name in _NAMES})
        return function(observers=observers, **given)

    return _options(wrapped)

"""Options of `serve` that say what is kept of its work: records, logs and traces; and the parts that keep it."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from crosstie.core.errors import BadInput
from crosstie.run.gateway.notices import Notice
from crosstie.run.service.logs import STYLES, Log
from crosstie.run.service.process import Part
from crosstie.run.service.record import Recorder
from crosstie.run.service.telemetry import Telemetry, wanted


class Observers:
    """The log, which is told of everything from the beginning, and the other parts."""

    def __init__(
        self, *, record: Path | None, record_max_mib: int | None, record_keep: int | None, log_format: str,
        log_requests: bool, log_prompts: bool, otel: bool | None,
    ):  # fmt: skip
        if record is None and (record_max_mib is not None or record_keep is not None):
            raise BadInput("--record-max-mib and --record-keep go with --record")
        if log_prompts and not log_requests:
            raise BadInput("--log-prompts goes with --log-requests: a prompt is a part of its request's line")
        style = next(one for one in STYLES if one == log_format)
        self._recorder = None
        if record is not None:
            self._recorder = Recorder(
                record,
                most_mib=64 if record_max_mib is None else record_max_mib,
                keep=8 if record_keep is None else record_keep,
            )
        self._otel = otel
        self.log = Log(style, requests=log_requests, prompts=log_prompts)

    def of_worker(self, notice: Callable[[str], None]) -> "Observers":
        """The same for a process that was forked: its notices go where the others' go, its lines straight to stderr."""
        own = copy.copy(self)
        own.log = Log(self.log.style, requests=self.log.requests, prompts=self.log.prompts, notices=notice)
        return own

    def parts(self) -> list[Part]:
        parts: list[Part] = [self.log]
        if self._recorder is not None:
            parts.append(self._recorder)
        if self._otel or (self._otel is None and wanted()):
            try:
                parts.append(Telemetry())
            except BadInput as error:
                if self._otel:
                    raise
                # The environment may be that of every program on the machine; this one serves without.
                self.log.notice(Notice("telemetry_off", "warning", f"no traces are exported: {error}"))
        return parts


def observed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options, and their `observers` in the place of them."""

    @functools.wraps(function)
    def with_observers(
        *, record: Path | None, record_max_mib: int | None, record_keep: int | None, log_format: str,
        log_requests: bool, log_prompts: bool, otel: bool | None, **others: Any,
    ) -> Any:  # fmt: skip
        observers = Observers(
            record=record, record_max_mib=record_max_mib, record_keep=record_keep, log_format=log_format,
            log_requests=log_requests, log_prompts=log_prompts, otel=otel,
        )  # fmt: skip
        return function(observers=observers, **others)

    wrapped: Callable[..., Any] = with_observers
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


_OPTIONS = (
    click.option(
        "--record", type=click.Path(path_type=Path), metavar="FILE",
        help="Append a trace of what is served, without any text: docs/recording.md.",
    ),
    click.option(
        "--record-max-mib", type=click.IntRange(1, 256), metavar="N", help="Begin a new file at N MiB. [default: 64]"
    ),
    click.option(
        "--record-keep", type=click.IntRange(0, 1000), metavar="N", help="Keep N full files. [default: 8]"
    ),
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

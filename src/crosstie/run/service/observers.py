"""What is kept of a gateway's work: its log, recordings and traces, and the components that keep it."""

import copy
from collections.abc import Callable
from pathlib import Path

from crosstie.core.errors import BadInput
from crosstie.run.gateway.notices import Notice
from crosstie.run.service.logs import Log, Style
from crosstie.run.service.process import Component
from crosstie.run.service.record import Recorder
from crosstie.run.service.telemetry import Telemetry, wanted


class Observers:
    """The log, which is told of everything from the beginning, and the others. `otel` None: as the environment says."""

    def __init__(
        self, *, record: Path | None = None, record_max_mib: int | None = None, record_keep: int | None = None,
        log_format: Style = "text", log_requests: bool = False, log_prompts: bool = False, otel: bool | None = None,
    ):  # fmt: skip
        if record is None and (record_max_mib is not None or record_keep is not None):
            raise BadInput("--record-max-mib and --record-keep go with --record")
        if log_prompts and not log_requests:
            raise BadInput("--log-prompts goes with --log-requests: a prompt is a part of its request's line")
        self._recorder = None
        if record is not None:
            self._recorder = Recorder(
                record,
                most_mib=64 if record_max_mib is None else record_max_mib,
                keep=8 if record_keep is None else record_keep,
            )
        self._otel = otel
        self.log = Log(log_format, requests=log_requests, prompts=log_prompts)

    def of_worker(self, notify: Callable[[str], None]) -> "Observers":
        """The same for a process that was forked: its notices go where the others' go, its lines straight to stderr."""
        own = copy.copy(self)
        own.log = Log(self.log.style, requests=self.log.requests, prompts=self.log.prompts, notices=notify)
        return own

    def components(self) -> list[Component]:
        found: list[Component] = [self.log]
        if self._recorder is not None:
            found.append(self._recorder)
        if self._otel or (self._otel is None and wanted()):
            try:
                found.append(Telemetry())
            except BadInput as error:
                if self._otel:
                    raise
                # The environment may be that of every program on the machine; this one serves without.
                self.log.notice(Notice("telemetry_off", "warning", f"no traces are exported: {error}"))
        return found

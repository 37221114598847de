"""How far a long command is, on a terminal's error stream: a bar where the total is known, else a turning sign."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from crosstie.core.progress import OnProgress, no_progress

_REST_OF_LINE = 56


class _Count(ProgressColumn):
    """How many of how many; nothing while the total is not known."""

    def __init__(self, counts: DownloadColumn | MofNCompleteColumn) -> None:
        super().__init__()
        self._counts = counts

    def render(self, task: Task) -> Text:
        return self._counts.render(task) if task.total else Text()


class Caller:
    """Who calls a command from this process, in the place of a terminal: is given its document, and hears how far it
    is. `workload`: the text of a workload file that is not there."""

    def __init__(self, on_progress: OnProgress = no_progress, workload: str | None = None):
        self.on_progress, self.workload = on_progress, workload
        self.document: Any = None


def caller() -> Caller | None:
    context = click.get_current_context(silent=True)
    return context.find_object(Caller) if context else None


@contextmanager
def progress(what: str = "", *, in_bytes: bool = False) -> Iterator[OnProgress]:
    """What long calls take as `on_progress`. Silent in pipes, on terminals that cannot move the cursor, and where the
    command was asked for --json."""
    if asking := caller():
        yield asking.on_progress
        return
    stream = Console(stderr=True, highlight=False, markup=False)
    context = click.get_current_context(silent=True)
    as_json = context is not None and context.params.get("as_json")
    if not stream.is_terminal or stream.is_dumb_terminal or as_json:
        yield no_progress
        return
    # A line that wraps could not be erased.
    room = max(stream.width - _REST_OF_LINE, 12)
    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
        _Count(DownloadColumn() if in_bytes else MofNCompleteColumn()), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=stream, transient=True) as bars:
        task = bars.add_task(what, total=None)

        def on_progress(done: int, total: int, what: str) -> None:
            shown = what if len(what) <= room else f"{what[: room - 3]}..."
            # Of an update that says None, the total of what was done before would stay.
            bars.tasks[0].total = total or None
            bars.update(task, completed=done, description=shown)

        yield on_progress

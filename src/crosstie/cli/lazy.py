"""Groups that know their commands without importing them, and find those of other packages by their entry points; and
commands that list their options under headings."""

from collections.abc import Mapping, Set
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

import click
from click.shell_completion import CompletionItem

from crosstie.core.errors import MissingPackage, did_you_mean, near_names

COMMANDS = "crosstie.commands"
# Sources of what a command of this package can read where another is installed.
SOURCES = "crosstie.sources"


class LazyGroup(click.Group):
    """`sections`: heading -> command -> its help line; `home`: what the name of a command's module begins with.

    `first`: commands that the help describes, the others being named; without it all are described.
    `others`: commands that another package brings, and that package; their entry points' names begin with `prefix`.
    """

    def __init__(
        self,
        *args: Any,
        sections: dict[str, dict[str, str]],
        home: str,
        first: Set[str] = frozenset(),
        others: Mapping[str, str] = MappingProxyType({}),
        prefix: str = "",
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.sections, self.home, self.others, self.prefix = sections, home, others, prefix
        self.first = first or {name for listed in sections.values() for name in listed}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for listed in self.sections.values() for name in listed]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command
        if (package := self.others.get(cmd_name)) is not None:
            called = f"`crosstie {self.prefix.replace('.', ' ')}{cmd_name}`"
            command = brought(COMMANDS, self.prefix + cmd_name, called, package)
        else:
            command = import_module(self.home + cmd_name).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = near_names(args[0], self.list_commands(ctx))
            raise click.UsageError(f"{error.message.rstrip('.')}.{did_you_mean(near)}", ctx) from None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Without importing every command for its help line, as click would."""
        listed = [pair for commands in self.sections.values() for pair in commands.items()]
        completion_items = [CompletionItem(name, help=text) for name, text in listed if name.startswith(incomplete)]
        return completion_items + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.describe(formatter, self.first)

    def describe(self, formatter: click.HelpFormatter, described: Set[str]) -> None:
        there = brought_commands()
        for heading, listed in self.sections.items():
            rows = [(name, self._help_line(name, text, there)) for name, text in listed.items() if name in described]
            named = ", ".join(name for name in listed if name not in described)
            with formatter.section(heading):
                formatter.write_dl([*rows, *([("also", named)] if named else [])])

    def _help_line(self, name: str, text: str, there: Set[str]) -> str:
        package = self.others.get(name)
        return text if package is None or self.prefix + name in there else f"{text} (needs {package})"


class GroupedCommand(click.Command):
    """`groups`: heading -> names of options, as they are given; the others come first."""

    def __init__(self, *args: Any, groups: dict[str, str], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.groups = {name: heading for heading, names in groups.items() for name in names.split()}
        unknown = set(self.groups) - {name for parameter in self.params for name in parameter.opts}
        if unknown:
            raise ValueError(f"no such options: {', '.join(sorted(unknown))}")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                heading = self.groups.get(parameter.opts[0], "Options")
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def brought(group: str, name: str, what: str, package: str) -> Any:
    """What `package` brings by this name; `what` says to the user who wants it. Raises MissingPackage."""
    for point in entry_points(group=group, name=name):
        return point.load()
    raise MissingPackage(what, package)


def brought_commands() -> set[str]:
    """By their names, of all packages that are installed; of a group's, `group.command`."""
    return set(entry_points(group=COMMANDS).names)

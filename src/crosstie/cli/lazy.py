"""Groups of commands that know their names and help lines without importing a command to print them."""

from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """`listed`: command -> its help line; `home`: what the name of a command's module begins with."""

    def __init__(self, *args: Any, listed: dict[str, str], home: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.listed, self.home = listed, home

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.listed)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.listed:
            return None
        command: click.Command = import_module(self.home + cmd_name).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.listed.items()))

"""What the packages beside this one bring to the command line, found by their entry points."""

from importlib.metadata import entry_points
from typing import Any

from crosstie.core.errors import MissingPackage

COMMANDS = "crosstie.commands"
# Sources of what a command of this package can read where another is installed.
SOURCES = "crosstie.sources"


def brought(group: str, name: str, what: str, package: str) -> Any:
    """What `package` brings by this name; `what` says to the user who wants it. Raises MissingPackage."""
    for point in entry_points(group=group, name=name):
        return point.load()
    raise MissingPackage(what, package)


def brought_commands() -> set[str]:
    """By their names, of all packages that are installed; of a group's, `group.command`."""
    return set(entry_points(group=COMMANDS).names)

"""What can go wrong for a user, as one tree.

CrosstieError
├── UnknownName    a name that the catalog does not hold; carries near names
├── BadData        a data file that cannot be trusted; carries file and key
├── BadInput       an argument that makes no sense; carries its reason
│   └── BadParameter   the same of one parameter, which the command line calls by its option
├── DoesNotFit     a model that the GPUs asked for cannot hold
├── UnknownModel   a model that no pool of the fleet serves
├── StoreFailed    keys and usage could not be read or written; may be tried again
└── MissingPackage what another package of Crosstie brings, which is not installed
"""

from collections.abc import Iterable
from difflib import get_close_matches


class CrosstieError(Exception):
    """A mistake in the input. The command line prints it as one line and exits with 2."""


class UnknownName(CrosstieError):
    def __init__(self, kind: str, name: str, known: Iterable[str], listing: str | None = None):
        self.kind, self.name = kind, name
        self.near = near_names(name, known)
        hint = did_you_mean(self.near)
        command = f"crosstie catalog list {listing or kind + 's'}"
        super().__init__(f"unknown {kind} '{name}'.{hint} `{command}` lists them all.")


class BadData(CrosstieError):
    def __init__(self, file: object, key: str, reason: str):
        self.file, self.key, self.reason = str(file), key, reason
        where = f"{file}: {key}" if key else f"{file}"
        super().__init__(f"{where}: {reason}")


class BadInput(CrosstieError):
    pass


class BadParameter(BadInput):
    """`rest`: what follows the parameter's name in the sentence."""

    def __init__(self, parameter: str, rest: str):
        self.parameter, self.rest = parameter, rest
        super().__init__(f"{parameter} {rest}")


class DoesNotFit(CrosstieError):
    pass


class UnknownModel(CrosstieError):
    pass


class StoreFailed(CrosstieError):
    pass


def to_install(package: str, extra: str = "") -> str:
    """The command that brings a package of ours, or one with an extra. No index has them yet, so it is a checkout's."""
    folder = "." if package == "crosstie" else f"./packages/{package.removeprefix('crosstie-')}"
    return f"pip install '{folder}[{extra}]' in a checkout" if extra else f"`pip install {folder}` in a checkout"


class MissingPackage(CrosstieError):
    """`what` is wanted, and `package` brings it."""

    def __init__(self, what: str, package: str):
        super().__init__(f"{what} needs {package}, which is not installed: {to_install(package)} of Crosstie")


class MissingExtra(BadInput):
    """A library is not installed; `extra` of `package` brings it. `needs`: what was asked for, and what that needs."""

    def __init__(self, needs: str, extra: str, package: str = "crosstie"):
        super().__init__(f"{needs}: {to_install(package, extra)}")


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names that look like `name`; containing it counts as looking like it."""
    folded = {candidate.casefold(): candidate for candidate in known}
    wanted = name.casefold()
    close = get_close_matches(wanted, folded, n=3, cutoff=0.6)
    inside = [key for key in folded if wanted and wanted in key and key not in close]
    return [folded[key] for key in (close + sorted(inside, key=len))[:3]]


def did_you_mean(near: Iterable[str]) -> str:
    """The hint behind a refusal, with a space before it; "" without names."""
    names = " or ".join(near)
    return f" Did you mean {names}?" if names else ""

"""Options of the form NAME=VALUE, and numbers as people write them: 14%, 22000, 22_000."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from crosstie.core.errors import BadInput

T = TypeVar("T")


def fraction(text: str) -> float:
    """14% or 0.14."""
    if text.endswith("%"):
        return amount(text[:-1]) / 100
    return amount(text)


def amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise BadInput(f"'{text}' is not a number") from None
    if not math.isfinite(value):
        raise BadInput(f"'{text}' is not a finite number")
    return value


def read_option(typed: str, value: str, read: Callable[[str], T]) -> T:
    """`typed`: the option as it was given, which a fault names."""
    try:
        return read(value)
    except BadInput as error:
        raise BadInput(f"{typed}: {error}") from None


def assigned(option: str, texts: Sequence[str], read: Callable[[str], T]) -> dict[str, T]:
    """NAME=VALUE, each name once."""
    values: dict[str, T] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name or not value.strip():
            raise BadInput(f"{option} {text}: write NAME=VALUE")
        if name in values:
            raise BadInput(f"{option}: {name} is given twice")
        values[name] = read_option(f"{option} {text}", value.strip(), read)
    return values


def assigned_or_common(
    option: str, texts: Sequence[str], read: Callable[[str], float]
) -> tuple[dict[str, float], float | None]:
    """NAME=VALUE for one, a bare VALUE for all."""
    bare = [text for text in texts if "=" not in text]
    if len(bare) > 1:
        raise BadInput(f"{option} is given twice without a name")
    common = read_option(f"{option} {bare[0]}", bare[0], read) if bare else None
    return assigned(option, [text for text in texts if "=" in text], read), common

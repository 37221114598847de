"""Documents of `--json`: fields of an answer by their names, as plain values."""

from typing import Any

import msgspec


def picked(of: object, fields: str) -> dict[str, Any]:
    """`fields`: names in the order of the document, `key=path.to.it` where it calls one otherwise. What a path meets
    that is None, is None."""
    made = {}
    for field in fields.split():
        key, _, path = field.partition("=")
        value: Any = of
        for step in (path or key).split("."):
            value = None if value is None else getattr(value, step)
        made[key] = value if isinstance(value, str | float | int | None) else plain(value)
    return made


def plain(value: object) -> Any:
    """Structs, dataclasses and what holds them; numbers of numpy are numbers."""
    return msgspec.to_builtins(value, enc_hook=float)

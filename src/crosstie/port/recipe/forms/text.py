"""What forms share: quoting, YAML, and the reasons as comments."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any

from crosstie.port.recipe.recipe import OWN_ADDRESS, Recipe, Runner

# Words that YAML's readers take for something else than text.
_TAKEN = {"", "y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "~"}
_PLAIN = re.compile(r"(?:--?)?[A-Za-z_/.][\w/.@%+-]*(?::[\w/.@%+-]+)*")
_WIDTH = 100


def yaml_text(value: Any, indent: int = 0) -> str:
    """Mappings, lists and scalars in block style; what is no plain word is quoted as JSON quotes it."""
    pad = "  " * indent
    if isinstance(value, Mapping) and value:
        return "".join(f"{pad}{_scalar(str(key))}:{_inner(one, indent)}" for key, one in value.items())
    if isinstance(value, list | tuple) and value:
        return "".join(f"{pad}-{_item(one, indent)}" for one in value)
    return f"{pad}{_scalar(value)}\n"


def _inner(value: Any, indent: int) -> str:
    if isinstance(value, str) and "\n" in value:
        lines = "".join(f"{'  ' * (indent + 1)}{line}\n" if line else "\n" for line in value.rstrip("\n").split("\n"))
        return f" |\n{lines}"
    if isinstance(value, Mapping | list | tuple) and value:
        return f"\n{yaml_text(value, indent + 1)}"
    return f" {_scalar(value)}\n"


def _item(value: Any, indent: int) -> str:
    if isinstance(value, Mapping) and value:
        # The first key stands behind the dash.
        return " " + yaml_text(value, indent + 1).lstrip(" ")
    return _inner(value, indent)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _TAKEN
        # JSON's way to escape what is beyond 16 bits is not YAML's.
        return value if plain else json.dumps(value, ensure_ascii=not value.isprintable())
    return json.dumps(value if value not in ((), {}) else [] if value == () else {})


def comments(recipe: Recipe, *more: str, by: Runner = "docker") -> list[str]:
    """What the file is, and why everything in it is set."""
    title = (
        f"{recipe.name}: {recipe.model} in {recipe.precision} on {recipe.gpus} x {recipe.accelerator}, "
        f"{recipe.layout}, {recipe.engine} {recipe.release}; preflight: {recipe.verdict}. "
        "Written by `crosstie recipe`, run on no GPU."
    )
    said = [title, *filter(None, more), *recipe.notes, *(f"{what}: {why}" for what, why in recipe.reasons(by))]
    return [line for one in said for line in comment(one)]


def comment(said: str) -> list[str]:
    first, *rest = wrap(said, _WIDTH, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"# {first}", *(f"#   {line}" for line in rest)]


def shell_line(words: Iterable[Sequence[str]], *, indent: str = "  ") -> str:
    """Words that belong together on one line each; a word with a $ in it is the shell's to fill in."""
    lines = [" ".join(map(quoted, some)) for some in words]
    return f" \\\n{indent}".join(lines)


def quoted(word: str) -> str:
    if "$" in word:
        return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return shlex.quote(word)


def pairs(words: Sequence[str]) -> list[tuple[str, ...]]:
    """A flag with what follows it; what comes before the first flag together."""
    found: list[list[str]] = [[]]
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-[\d.]+", word) and found[-1]:
            found.append([])
        found[-1].append(word)
    return [tuple(some) for some in found]


def filled(value: str, address: str) -> str:
    return value.replace(OWN_ADDRESS, address)

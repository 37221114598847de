"""Flags that an engine's server knows, as its own parser or documentation has them (`tools/engine_flags.py`)."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec
from packaging.version import Version

from crosstie.catalog.reading import Sources, only_keys, read_table, read_toml, table, text
from crosstie.core.errors import BadData, BadInput, near_names
from crosstie.port.recipe.recipe import Setting

_DATA = Path(__file__).parent / "data"
_FOLLOWS = ("nothing", "one", "maybe", "many")


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    follows: str
    # "int", "float", or the words that may follow; empty: anything.
    choices: tuple[str, ...]


class FlagTable(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    release: Version
    source: str
    date: str
    # By every spelling.
    flags: dict[str, Flag]

    def canonical(self, name: str) -> str:
        """The spelling that the table has first."""
        known = self._find(name)
        return known.name if known else name

    def _find(self, name: str) -> Flag | None:
        found = self.flags.get(name)
        # vLLM takes both.
        return found or (self.flags.get(name.replace("_", "-")) if self.engine == "vllm" else None)

    def fault(self, setting: Setting) -> str:
        """What the engine's parser would say against a flag, or nothing."""
        known = self._find(setting.name)
        if known is None:
            near = near_names(setting.name, self.flags)
            hint = f"; {near[0]} is" if near else ""
            return f"{setting.name} is no flag of {self.engine} {self.release}{hint}"
        values = setting.words[1:]
        if not values and known.follows == "one":
            return f"{setting.name} of {self.engine} {self.release} takes a value"
        if values and known.follows == "nothing":
            return f"{setting.name} of {self.engine} {self.release} takes no value"
        wrong = next((one for one in values if not _fits(one, known.choices)), None)
        if wrong is not None:
            expected = {"int": "a whole number", "float": "a number"}.get(
                known.choices[0], f"one of {', '.join(known.choices)}"
            )
            return f"{setting.name} of {self.engine} {self.release} takes {expected}, not '{wrong}'"
        return ""


def _fits(value: str, choices: tuple[str, ...]) -> bool:
    if choices in (("int",), ("float",)):
        try:
            int(value) if choices == ("int",) else float(value)
        except ValueError:
            return False
        return True
    return not choices or value in choices


@cache
def flag_table(engine: str) -> FlagTable:
    file = _DATA / "flags.toml"
    raw = read_toml(file)
    sources = Sources(file, raw.get("sources"))
    entry = table(file, f"engine.{engine}", table(file, "engine", raw.get("engine")).get(engine))
    only_keys(file, f"engine.{engine}", entry, {"release", "source"})
    reference, day = sources.cite(f"engine.{engine}", entry.get("source"))
    flags: dict[str, Flag] = {}
    listed = _DATA / "flags" / f"{engine}.csv"
    for where, row in read_table(listed, ("flag", "also", "follows", "choices")):
        if row["follows"] not in _FOLLOWS:
            raise BadData(listed, where, f"follows '{row['follows']}' is none of {', '.join(_FOLLOWS)}")
        choices = tuple(row["choices"].split("|")) if row["choices"] else ()
        one = Flag(name=row["flag"], follows=row["follows"], choices=choices)
        flags |= dict.fromkeys((row["flag"], *row["also"].split()), one)
    release = Version(text(file, f"engine.{engine}.release", entry.get("release")))
    return FlagTable(engine=engine, release=release, source=reference, date=day, flags=flags)


def parse_settings(where: str, said: Sequence[str], why: str) -> list[Setting]:
    """NAME=VALUE and --name value, as preflight and fleet files write them."""
    found = []
    for one in said:
        if one.startswith("-"):
            name, _, value = one.partition(" ")
            if "=" in name:
                name, _, value = one.partition("=")
            found.append(Setting(name=name, value=value.strip() or None, why=why))
        elif "=" in one:
            name, _, value = one.partition("=")
            found.append(Setting(name=name.strip(), value=value, why=why))
        else:
            raise BadInput(f"{where}: '{one}' is neither NAME=VALUE nor --flag value")
    return found

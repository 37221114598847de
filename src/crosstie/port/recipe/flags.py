"""Flags that an engine's server knows, as its own parser or documentation has them (`tools/engine_flags.py`)."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

from crosstie.catalog.reading import Sources, only_keys, read_table, read_toml, table, text
from crosstie.core.errors import BadData, BadInput, near_names
from crosstie.port.recipe.recipe import Setting

_DATA = Path(__file__).parent / "data"
_FOLLOWS = ("nothing", "one", "maybe", "many")
_JSON = ("json",)
_WORDS = {"int": "a whole number", "float": "a number", "json": "JSON"}


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    follows: str
    # "int", "float", "json", or the words that may follow; empty: anything.
    choices: tuple[str, ...]
    # Of JSON: the keys that it may have; empty where they were not read.
    keys: tuple[str, ...] = ()

    @property
    def is_json(self) -> bool:
        return self.choices == _JSON


class FlagTable(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    release: Version
    source: str
    date: str
    # By every spelling.
    flags: dict[str, Flag]

    def canonical(self, name: str) -> str:
        """The spelling that the table has first."""
        stem, dot, key = name.partition(".")
        known = self._find(stem)
        return f"{known.name}{dot}{key}" if known else name

    def _find(self, name: str) -> Flag | None:
        flag = self.flags.get(name)
        # vLLM takes both.
        return flag or (self.flags.get(name.replace("_", "-")) if self.engine == "vllm" else None)

    def find(self, name: str) -> Flag | None:
        """Also `--flag.key`, which sets one key of a flag that takes JSON; only vLLM's parser has that."""
        stem, dot, key = name.partition(".")
        known = self._find(stem)
        if not dot:
            return known
        return known if key and known and known.is_json and self.engine == "vllm" else None

    def fault(self, setting: Setting) -> str:
        """What the engine's parser would say against a flag, or nothing."""
        known = self.find(setting.name)
        if known is None:
            near = near_names(setting.name, self.flags)
            hint = f"; {near[0]} is" if near else ""
            return f"{setting.name} is no flag of {self.engine} {self.release}{hint}"
        if wrong_key := _wrong_key(known, setting):
            return f"{setting.name} of {self.engine} {self.release} has no key '{wrong_key}'"
        values = setting.words[1:]
        said = f"{setting.name} of {self.engine} {self.release}"
        if not values and known.follows == "one":
            return f"{said} takes a value"
        if values and known.follows == "nothing":
            return f"{said} takes no value"
        # What stands behind a key may be any word.
        choices = () if "." in setting.name else known.choices
        wrong = next((value for value in values if not _fits(value, choices)), None)
        if wrong is not None:
            expected = _WORDS.get(choices[0], f"one of {', '.join(choices)}")
            return f"{said} takes {expected}, not '{wrong}'"
        return ""


def _wrong_key(flag: Flag, setting: Setting) -> str:
    """The first key that the engine would refuse, or nothing."""
    if not flag.keys:
        return ""
    if key := setting.name.partition(".")[2]:
        asked = [key.partition(".")[0].removesuffix("+")]
    else:
        whole = typed(str(setting.value))
        asked = list(whole) if isinstance(whole, dict) else []
    return next((key for key in asked if key not in flag.keys), "")


_READ_AS: dict[tuple[str, ...], Callable[[str], object]] = {("int",): int, ("float",): float, _JSON: json.loads}


def _fits(value: str, choices: tuple[str, ...]) -> bool:
    if choices not in _READ_AS:
        return not choices or value in choices
    try:
        _READ_AS[choices](value)
    except ValueError:
        return False
    return True


@cache
def flag_table(engine: str) -> FlagTable:
    file = _DATA / "flags.toml"
    raw = read_toml(file)
    sources = Sources(file, raw.get("sources"))
    entry = table(file, f"engine.{engine}", table(file, "engine", raw.get("engine")).get(engine))
    only_keys(file, f"engine.{engine}", entry, {"release", "source"})
    reference, day = sources.cite(f"engine.{engine}", entry.get("source"))
    flags: dict[str, Flag] = {}
    keys = _keys(engine)
    listed = _DATA / "flags" / f"{engine}.csv"
    for where, row in read_table(listed, ("flag", "also", "follows", "choices")):
        if row["follows"] not in _FOLLOWS:
            raise BadData(listed, where, f"follows '{row['follows']}' is none of {', '.join(_FOLLOWS)}")
        choices = tuple(row["choices"].split("|")) if row["choices"] else ()
        flag = Flag(name=row["flag"], follows=row["follows"], choices=choices, keys=keys.get(row["flag"], ()))
        flags |= dict.fromkeys((row["flag"], *row["also"].split()), flag)
    release = Version(text(file, f"engine.{engine}.release", entry.get("release")))
    return FlagTable(engine=engine, release=release, source=reference, date=day, flags=flags)


def _keys(engine: str) -> dict[str, tuple[str, ...]]:
    file = _DATA / "flags" / f"{engine}-keys.csv"
    if not file.is_file():
        return {}
    return {row["flag"]: tuple(row["keys"].split("|")) for _, row in read_table(file, ("flag", "keys"))}


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


def nested(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """`--flag.key value` put into the JSON of `--flag` where both are set: the parser would keep only one of them."""
    found = dict(settings)
    for name, one in settings.items():
        stem, dot, path = name.partition(".")
        if one.is_variable or not dot:
            continue
        if stem not in found:
            found[name] = msgspec.structs.replace(one, name=name)
            continue
        *outer, last = path.split(".")
        whole = json.loads(str(found[stem].value))
        inner = whole
        for key in outer:
            inner = inner.setdefault(key, {})
        if last not in inner:
            inner[last] = typed(str(one.value))
            why = f"{found[stem].why}; {path}: {one.why}"
            found[stem] = Setting(name=stem, value=json.dumps(whole, separators=(",", ":")), why=why)
        del found[name]
    return found


def typed(value: str) -> Any:
    """As vLLM reads what stands behind a key: JSON, or else a word."""
    try:
        return json.loads(value)
    except ValueError:
        return value

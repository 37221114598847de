"""Which engine, and which release of it: `vllm`, `vllm==0.28.0`, `sglang`, `llama.cpp==b6000`."""

import csv
import re
from functools import cache
from pathlib import Path

import msgspec
from packaging.version import InvalidVersion, Version

from crosstie.catalog.reading import Sources, only_keys, read_toml, table, text
from crosstie.core.errors import BadInput

DATA = Path(__file__).parent / "data"


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: Version
    # The stack of the catalog that stands for it in memory arithmetic.
    stack: str
    newest: Version
    # Whether the user named the release.
    named: bool

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def engine_from(said: str) -> Engine:
    name, _, release = said.strip().partition("==")
    known = _engines()
    if name not in known:
        raise BadInput(f"unknown engine '{name}': one of {', '.join(known)}, with a release as in vllm==0.28.0")
    newest, stack = known[name]
    try:
        # llama.cpp numbers its builds: b6000.
        version = Version(re.sub(r"^b(?=\d+$)", "", release)) if release else newest
    except InvalidVersion:
        raise BadInput(f"'{release}' is no release of {name}: write {name}=={newest}") from None
    return Engine(name=name, version=version, stack=stack, newest=newest, named=bool(release))


@cache
def _engines() -> dict[str, tuple[Version, str]]:
    file = DATA / "engines.toml"
    raw = read_toml(file)
    sources = Sources(file, raw.get("sources"))
    found = {}
    for name, entry in table(file, "engine", raw.get("engine")).items():
        only_keys(file, name, entry, {"newest", "stack", "source"})
        sources.cite(name, entry.get("source"))
        found[name] = (Version(text(file, f"{name}.newest", entry.get("newest"))), entry["stack"])
    return found


class Support(msgspec.Struct, frozen=True, kw_only=True):
    """Since which release an engine has an architecture of its own, and until which."""

    since: Version
    until: Version | None
    source: str


@cache
def architectures(engine: str) -> dict[str, Support]:
    """By the name that config.json gives in `architectures`."""
    file = DATA / "architectures" / f"{engine}.csv"
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8") as rows:
        return {
            row["architecture"]: Support(
                since=Version(row["since"]),
                until=Version(row["until"]) if row["until"] else None,
                source=row["source"],
            )
            for row in csv.DictReader(rows)
        }

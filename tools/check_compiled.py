"""Whether an installed gateway runs the modules that its setup.py compiles as compiled: the test of a wheel.

check_compiled.py packages/gateway/setup.py
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
                folders: dict[str, dict[str, list[str]]] = ast.literal_eval(said)
                return [
                    f"{Path(folder).name}.{room}.{name}"
                    for folder, rooms in folders.items()
                    for room, names in rooms.items()
                    for name in names
                ]
    raise SystemExit(f"{setup}: no COMPILED")


def main() -> None:
    names = compiled_modules(Path(sys.argv[1]))
    plain = [name for name in names if not (import_module(name).__file__ or "").endswith(tuple(EXTENSION_SUFFIXES))]
    if plain:
        raise SystemExit(f"not compiled: {', '.join(plain)}")
    print(f"{len(names)} compiled modules")


if __name__ == "__main__":
    main()

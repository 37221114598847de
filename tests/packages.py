"""The three packages: where each lies, and which tests are its own.

`python -m tests.packages gateway` prints the tests of one package, for `make test PKG=gateway`.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# By the name that is imported.
SOURCES = {
    "crosstie": ROOT / "src" / "crosstie",
    "crosstie_gateway": ROOT / "packages" / "gateway" / "src" / "crosstie_gateway",
    "crosstie_port": ROOT / "packages" / "port" / "src" / "crosstie_port",
}
# By the name that `make test PKG=` takes: folders and files beneath tests/. What no row names is of `base`.
TESTS = {
    # Its server and the client of `crosstie` are tried on each other.
    "gateway": ["run", "operate", "demo", "deploy", "engines", "wire"],
    "port": [
        "port/capture", "port/conversion", "port/divergence", "port/kernels", "port/porting", "port/source", "port/test_entry_points.py",
        "prove/profile",
    ],
}  # fmt: skip


def paths_of(package: str) -> list[str]:
    """What pytest is given to run the tests of one package."""
    if package in TESTS:
        return [f"tests/{path}" for path in TESTS[package]]
    if package != "base":
        raise SystemExit(f"no package '{package}': base, {', '.join(TESTS)}")
    return ["tests", *(f"--ignore=tests/{path}" for paths in TESTS.values() for path in paths)]


if __name__ == "__main__":
    print(*paths_of(sys.argv[1]))

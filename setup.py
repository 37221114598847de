"""Builds the modules on a request's way with mypyc, so that an installed gateway and simulator run compiled code.

They are plain Python and run as such wherever they could not be compiled: without a C compiler, or with
CROSSTIE_PURE=1, which is also what `make` sets, since compiled modules would hide later edits of their sources.
CROSSTIE_OPTIMIZE=0 compiles in half the time, for whoever wants to know whether it works and not how fast (`make
compiled`).
"""

import os
import sys
import tempfile
from pathlib import Path

from setuptools import setup

COMPILED = {
    "core": ["histogram"],
    "perf": ["tabulated"],
    "route": [
        "adapters", "admission", "apart", "ask", "cheapest", "corrections", "decision", "filters", "held", "learnt",
        "lengths", "live", "load", "modelled", "observed", "overflow", "plain", "policy", "prefix", "router",
        "shortlist", "slots", "speed", "spending",
    ],
    "sim": ["engine", "prefix_cache"],
    "wire": ["client", "parser", "request", "server", "sse"],
    "run/wire": ["grpc", "unpack"],
    "run/gateway": [
        "answers", "apart", "asks", "attempt", "backend", "body", "context", "errors", "exchange", "exchange_state",
        "gateway", "guard", "identity", "limits", "messages_reply", "metrics", "passed", "record", "relay",
        "transcript",
    ],
    "run/pick": ["messages", "picked", "server", "stream"],
    "run/share": ["board"],
}  # fmt: skip
# The package's front page names everything for its users: read, it brings every room, and torch, into the build.
SETTINGS = """
[mypy]
ignore_missing_imports = True
[mypy-crosstie]
follow_imports = skip
"""


def extensions() -> list[object]:
    if os.environ.get("CROSSTIE_PURE"):
        return []
    if sys.argv[1:2] in (["egg_info"], ["dist_info"]):
        # Names and versions alone: pip asks twice for them before it builds.
        return []
    try:
        from mypyc.build import mypycify
    except ImportError:
        return []
    files = [f"src/crosstie/{room}/{module}.py" for room, modules in COMPILED.items() for module in modules]
    os.environ["MYPYPATH"] = "src"
    level = os.environ.get("CROSSTIE_OPTIMIZE", "2")
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings = Path(folder, "mypy.ini")
            settings.write_text(SETTINGS)
            made = mypycify([f"--config-file={settings}", *files], opt_level=level, debug_level="0")
    except SystemExit:
        sys.stderr.write("crosstie: not compiled, runs as plain Python\n")
        return []
    for extension in made:
        # A missing or broken C compiler is no reason not to install.
        extension.optional = True
        if sys.platform == "linux":
            # Nobody puts other functions in the place of these, so that calls of them need no table, or are no calls.
            extension.extra_compile_args.append("-fno-semantic-interposition")
    return list(made)


setup(ext_modules=extensions())

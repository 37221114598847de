"""With CROSSTIE_COMPILE=1, builds the modules on a request's way with mypyc: those of this package and those of
`crosstie` that they call all the time, as one unit.

mypyc's classes know the layout of each other's only within a unit, and inherit from each other only there; so this
package carries the compiled twins of modules of `crosstie`, which itself is plain Python. They stand beside its
sources, and Python prefers them. Without the variable everything is plain Python. CROSSTIE_OPTIMIZE=0 compiles in half
the time, for whoever wants to know whether it works and not how fast (`make compiled`).
"""

import os
import sys
import tempfile
from pathlib import Path

from setuptools import setup

# Folders of sources, seen from here; rooms; modules.
COMPILED = {
    "../../src/crosstie": {
        "core": ["histogram"],
        "perf": ["tabulated"],
        "route": [
            "adapters", "admission", "ask", "cheapest", "corrections", "decision", "disaggregated", "filters", "held",
            "learnt", "lengths", "live", "load", "modelled", "overflow", "plain", "policy", "prefix",
            "router", "session", "sessions", "shortlist", "speed", "spending",
        ],
        "sim": ["engine", "prefix_cache"],
        "wire": ["client", "sse"],
    },
    "src/crosstie_gateway": {
        "wire": ["grpc", "parser", "request", "server", "unpack"],
        "gateway": [
            "answers", "asks", "attempt", "backend", "body", "call", "context", "disaggregated", "errors", "exchange",
            "exchange_state", "gateway", "guard", "identity", "limits", "messages_reply", "metrics", "passed",
            "progress", "record", "relay", "transcript",
        ],
        "pick": ["messages", "picked", "server", "stream"],
        "share": ["board"],
    },
}  # fmt: skip
# mypy must see the types of what the modules import.
NEEDED = ["mypy>=2.4,<3", "httptools>=0.6", "msgspec>=0.18", "numpy>=1.26"]
# The package's front page names everything for its users: read, it brings every room, and torch, into the build.
SETTINGS = """
[mypy]
ignore_missing_imports = True
[mypy-crosstie]
follow_imports = skip
follow_imports_for_stubs = True
"""


def extensions() -> list[object]:
    from mypyc.build import mypycify

    files = [
        f"{folder}/{room}/{module}.py"
        for folder, rooms in COMPILED.items()
        for room, modules in rooms.items()
        for module in modules
    ]
    if missing := [file for file in files if not Path(file).exists()]:
        raise SystemExit(f"CROSSTIE_COMPILE=1 needs a checkout of Crosstie: there is no {missing[0]}")
    os.environ["MYPYPATH"] = os.pathsep.join(str(Path(folder).parent) for folder in COMPILED)
    level = os.environ.get("CROSSTIE_OPTIMIZE", "2")
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "mypy.ini")
        settings.write_text(SETTINGS)
        made = mypycify([f"--config-file={settings}", *files], opt_level=level, debug_level="0")
    for extension in made:
        if sys.platform == "linux":
            # Nobody puts other functions in the place of these, so that calls of them need no table, or are no calls.
            extension.extra_compile_args.append("-fno-semantic-interposition")
    return list(made)


if os.environ.get("CROSSTIE_COMPILE", "0") in ("", "0"):
    setup()
elif "bdist_wheel" not in sys.argv[1:]:
    # pip asks for names and needs before it builds.
    setup(setup_requires=NEEDED)
else:
    setup(ext_modules=extensions())

"""llama.cpp's server with settings of a test: `python llama_server.py FILE '{"rope_freq_scale": 0.25}'`."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from crosstie_gateway.start import llamacpp_child
from crosstie_gateway.wire.child import Child, start_child, wait_until_orphaned


@contextmanager
def llama(file: Path, **settings: Any) -> Iterator[str]:
    """Its address, while it runs."""
    command = [sys.executable, "-P", str(Path(__file__)), str(file), json.dumps(settings)]
    # Several at once on busy cores.
    process, said = start_child(command, 180)
    with Child(process):
        yield str(said["url"])


def main() -> None:
    parent = os.getppid()
    engine: Any = import_module("xllamacpp")
    settings = json.loads(sys.argv[2])

    def chosen() -> Any:
        """As Crosstie starts it, but for these."""
        made = made_plain()
        for name, value in settings.items():
            setattr(made, name, value)
        return made

    made_plain, engine.CommonParams = engine.CommonParams, chosen
    words = ["--file", sys.argv[1], "--model", "tested", "--context", "1024"]
    server = llamacpp_child.serve(llamacpp_child.asked(words))
    print(json.dumps({"url": server.listening_address}), flush=True)
    wait_until_orphaned(parent)
    os._exit(0)


if __name__ == "__main__":
    main()

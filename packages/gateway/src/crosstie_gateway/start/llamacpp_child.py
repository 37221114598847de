"""llama.cpp's server as a process of its own: its address in JSON on stdout, and an end when its parent ends."""

import argparse
import json
import os
import sys
from importlib import import_module
from typing import Any

from crosstie_gateway.wire.child import wait_until_orphaned

# Errors and warnings; one more and every request writes ten lines.
WARNINGS = 2
# Prompts kept outside the slots. llama.cpp would take 8 GiB for them.
KEPT_PROMPTS_MIB = 256
# Each open stream holds a thread, waiting ones too. With llama.cpp's own few, a dozen streams leave none for /health.
CONNECTIONS = 256


def asked(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="llamacpp_child", description=__doc__)
    parser.add_argument("--file", required=True, help="weights, as GGUF")
    parser.add_argument("--model", required=True, help="the name that requests ask for")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slots", type=int, default=4, help="requests at a time; more wait")
    parser.add_argument("--context", type=int, default=4096, help="tokens a request may have, prompt and answer")
    return parser.parse_args(arguments)


def serve(options: argparse.Namespace) -> Any:
    """A server that answers already: the model is loaded when this returns."""
    engine = import_module("xllamacpp")
    chosen = engine.CommonParams()
    chosen.model.path = options.file
    chosen.model_alias = {options.model}
    chosen.hostnames = ["127.0.0.1"]
    # Any that is free.
    chosen.port = 0
    chosen.n_parallel = options.slots
    chosen.n_ctx = options.slots * options.context
    chosen.cpuparams.n_threads = options.threads
    chosen.cpuparams_batch.n_threads = options.threads
    chosen.endpoint_metrics = True
    chosen.n_threads_http = CONNECTIONS
    chosen.cache_ram_mib = KEPT_PROMPTS_MIB
    chosen.verbosity = WARNINGS
    chosen.ui = False
    # It has no key, so pages of other origins must not talk to it through the user's browser.
    chosen.cors_origins = "http://127.0.0.1"
    return engine.Server(chosen)


def main() -> None:
    parent = os.getppid()
    try:
        server = serve(asked())
    except RuntimeError as error:
        sys.exit(str(error))
    print(json.dumps({"url": server.listening_address}), flush=True)
    wait_until_orphaned(parent)
    # At once: destructors would wait for requests that nobody reads any more.
    os._exit(0)


if __name__ == "__main__":
    main()

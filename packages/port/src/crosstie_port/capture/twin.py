"""A copy of this process that makes plain calls while this one captures and replays."""

import io
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from crosstie.core.errors import BadInput


@contextmanager
def without_onednn() -> Iterator[None]:
    """On Arm processors oneDNN waits for threads that it had before a fork, for ever, however many PyTorch may use."""
    # Not by its `flags`, which warns of settings for other devices.
    backend: Any = torch.backends.mkldnn
    before = backend.enabled
    backend.enabled = False
    try:
        yield
    finally:
        backend.enabled = before


class EndedProcess(BadInput):
    """Without an answer: a crash, or an exit that nothing catches."""


class Twin:
    """Forked when it is made; `result` waits for what `work` gives there, which must be plain data and host tensors."""

    def __init__(self, work: Callable[[], Any], heard: bool = False):
        """`heard`: what it prints is part of the output of this process."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._read, write = os.pipe()
        with warnings.catch_warnings():
            # Newer Pythons warn of threads; the twin uses none, and one thread in PyTorch.
            warnings.simplefilter("ignore")
            self._child = os.fork()
        if self._child == 0:
            os.close(self._read)
            _work_and_leave(work, write, heard)
        os.close(write)
        self._reaped = False

    def result(self) -> Any:
        with os.fdopen(self._read, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(self._child, 0)
        self._reaped = True
        if not said:
            raise EndedProcess(f"ended its process (status {os.waitstatus_to_exitcode(status)})")
        return torch.load(io.BytesIO(said), weights_only=False)

    def __enter__(self) -> "Twin":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._reaped:
            os.close(self._read)
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)


def _work_and_leave(work: Callable[[], Any], write: int, heard: bool) -> None:
    """Whatever happens, this process ends here, without its parent's exit handlers."""
    try:
        if not heard:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            sys.stdout = sys.stderr = io.StringIO()
        said = io.BytesIO()
        torch.set_num_threads(1)
        with without_onednn():
            torch.save(work(), said, pickle_module=pickle)
        with os.fdopen(write, "wb") as pipe:
            pipe.write(said.getvalue())
        if heard:
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(0)

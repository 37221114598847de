"""Children that never outlive their parent: a pipe that it holds open closes when it ends, however it ends."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable


def when_orphaned(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Calls once standard input has closed, which whoever started this process holds open as long as it lives."""
    threading.Thread(target=_wait, args=(loop, call), daemon=True).start()


def _wait(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    # Not through Python's own buffer: who ends for another reason would find it held by this thread, and abort.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    loop.call_soon_threadsafe(call)

"""Children that never outlive their parent: a pipe that it holds open closes when it ends, however it ends."""

import asyncio
import sys
import threading
from collections.abc import Callable


def when_orphaned(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Calls once standard input has closed, which whoever started this process holds open as long as it lives."""
    threading.Thread(target=_wait, args=(loop, call), daemon=True).start()


def _wait(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    while sys.stdin.buffer.read1(4096):  # type: ignore[union-attr]
        pass
    loop.call_soon_threadsafe(call)

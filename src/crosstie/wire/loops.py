"""The event loop that servers run on: uvloop where it is installed."""

import asyncio
import ctypes
import gc
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
# Objects made before the collector looks: those of some hundred requests, nearly all gone by themselves.
_YOUNG = 20_000
# Of glibc's `mallopt`: from which size on what is allocated gets pages of its own. Left to itself glibc raises that to
# 32 MiB, and then copies all of a long body now and then as it grows, where pages would only be moved.
_M_MMAP_THRESHOLD, _OWN_PAGES = -3, 2**20


def new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        # Not on every system; everything works on asyncio's own, only slower.
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def run_on_loop(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


def settle_memory() -> None:
    """What a server has built before its first request stays; the collector need not walk it again and again. Long
    bodies grow in place."""
    with suppress(AttributeError):
        # Other libraries have no such call, nor such a habit.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES)
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 20)

"""Waiting for what must come about: on the condition, never for a time. The one limit is reached by defects only."""

import asyncio
import time
from collections.abc import Callable

# A machine with many busy processes beside the tests is slower than a quiet one by a factor of ten and more.
LIMIT_S = 120.0


async def until(true: Callable[[], object], within_s: float = LIMIT_S) -> None:
    """Returns once the condition holds; the loop runs on meanwhile."""
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.01)


def comes_true(condition: Callable[[], object], within_s: float = LIMIT_S) -> bool:
    """Whether the condition holds in the end, for tests of other processes."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True

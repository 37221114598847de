"""Tasks that run beside others until they end or their owner does."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks(set[asyncio.Task[Any]]):
    """The loop keeps no task alive by itself: this does."""

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task

    async def cancel(self) -> None:
        for task in self:
            task.cancel()
        await asyncio.gather(*self, return_exceptions=True)

"""Who stops does stop, whatever the library below makes of being told to; no Redis is needed for it."""

import asyncio
from time import monotonic
from typing import Any

from tests.waiting import until

from crosstie_gateway.share.board import Board
from crosstie_gateway.share.peers import Peers
from crosstie_gateway.share.redis_share import RedisShare


class TakesItForAnAnswer:
    """A client that answers the first cancellation, as `wait_for` of Python 3.11 does where both come together."""

    def __init__(self) -> None:
        self.asked = 0
        self.swallowed = 0

    async def ping(self) -> None:
        self.asked += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.swallowed += 1
            if self.swallowed > 1:
                raise

    def pubsub(self, **_options: Any) -> Any:
        raise ConnectionError

    async def aclose(self) -> None:
        pass


def test_a_cancellation_that_is_swallowed_is_said_again() -> None:
    async def scenario() -> None:
        client, board = TakesItForAnAnswer(), Board(1)
        share = RedisShare(client, Peers(board, "s", monotonic, monotonic), lambda _why: None)
        share.start()
        await until(lambda: client.asked)
        stopping = asyncio.create_task(share.stop())
        # Not by a limit that cancels: that would be the second cancellation.
        await until(lambda: client.swallowed and (stopping.done() or client.asked > 1))
        assert stopping.done(), "it talks on"
        board.close()

    asyncio.run(scenario())

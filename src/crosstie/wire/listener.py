"""A listening socket that, when it closes, lets in everyone who has knocked before.

The kernel completes connections by itself and queues them. Closing the socket resets those in its queue: clients that
were connected, and may have sent their request, as far as they could tell.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

# Connections that the kernel completes on its own before it turns clients away.
_BACKLOG = 4096


class Listener:
    """`made` gives each connection its protocol."""

    def __init__(self, loop: asyncio.AbstractEventLoop, made: Callable[[], Any]):
        self.loop, self._made = loop, made
        # Its sockets are a tuple by the documentation and a list by uvloop, so no type says what it is.
        self._server: Any = None

    async def open(self, host: str, port: int) -> int:
        """Port 0 takes a free one; returns the port. Raises OSError."""
        self._server = await self.loop.create_server(self._made, host, port, backlog=_BACKLOG)
        return int(self._server.sockets[0].getsockname()[1])

    async def close_after_queue(self) -> None:
        """Refuses connections from now on; those that are complete become connections like any other."""
        if self._server is None:
            return
        # The loop lets go of its sockets; ours keep them listening for the moment that it takes to empty their queues.
        own = [socket.socket(fileno=os.dup(one.fileno())) for one in self._server.sockets]
        self.close()
        await asyncio.sleep(0)
        for one in own:
            one.setblocking(False)
            for accepted in _queued(one):
                await self.loop.connect_accepted_socket(self._made, accepted)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def _queued(listening: socket.socket) -> list[socket.socket]:
    """Those in its queue; it is closed right after the last of them, before another can join."""
    found: list[socket.socket] = []
    with listening:
        while True:
            try:
                accepted, _ = listening.accept()
            except OSError:
                # The queue is empty, or its next client has gone already.
                return found
            accepted.setblocking(False)
            found.append(accepted)

"""A listening socket that, when it closes, lets in everyone who has knocked before; and what the kernel knows of those.

The kernel completes connections by itself and queues them. Closing the socket resets those in its queue: clients that
were connected, and may have sent their request, as far as they could tell. So first nobody new may knock, then those
who are at the door are let in, and then it closes.
"""

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

# Connections that the kernel completes on its own before it turns clients away.
BACKLOG = 4096
# Of a connection that is no more, in the kernel's words.
_TCP_CLOSE = 7
# A peer that has vanished without a word is found out after a minute or so, by asking it; connections inherit these.
_ASKS_AFTER_S, _ASKS_EVERY_S, _ASKS = 30, 10, 3
_SO_ATTACH_FILTER = 26
# A filter of the kernel's classic kind, on TCP's header: load the flags; without SYN go on; with it drop the packet.
_NO_SYN = b"".join(
    struct.pack("=HBBI", *step)
    for step in ((0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
)


class Listener:
    """`made` gives each connection its protocol."""

    def __init__(self, loop: asyncio.AbstractEventLoop, made: Callable[[], Any]):
        self.loop, self._made = loop, made
        # Its sockets are a tuple by the documentation and a list by uvloop, so no type says what it is.
        self._server: Any = None

    async def open(self, host: str, port: int) -> int:
        """Port 0 takes a free one; returns the port. Raises OSError."""
        self._server = await self.loop.create_server(self._made, host, port, backlog=BACKLOG)
        for one in self._server.sockets:
            ask_the_silent(one)
        return int(self._server.sockets[0].getsockname()[1])

    async def close_after_queue(self, handshake_s: float) -> None:
        """Refuses connections from now on; those that are complete, or nearly, become connections like any other."""
        if self._server is None:
            return
        # The loop lets go of its sockets; ours keep them listening for the moment that it takes to empty their queues.
        own = [socket.socket(fileno=os.dup(one.fileno())) for one in self._server.sockets]
        for one in own:
            hear_no_more(one)
        # Those whom the kernel has answered already.
        await asyncio.sleep(handshake_s)
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


def hear_no_more(listening: socket.socket) -> None:
    """Nobody new can begin to connect, and who tries finds the port closed when it tries again, a second later.

    For all who share the socket. Linux alone can do it; elsewhere a client that comes in the very moment is reset.
    """
    if sys.platform == "linux":
        code = ctypes.create_string_buffer(_NO_SYN, len(_NO_SYN))
        with contextlib.suppress(OSError):
            program = struct.pack("HP", len(_NO_SYN) // 8, ctypes.addressof(code))
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def ask_the_silent(listening: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASKS_AFTER_S)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASKS_EVERY_S)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASKS)


def was_reset(transport: asyncio.BaseTransport) -> bool:
    """Whether the other side has refused what was sent to it: a socket that nobody reads from does not say so."""
    raw = transport.get_extra_info("socket")
    if raw is None or raw.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return True
    info = getattr(socket, "TCP_INFO", None)
    # The first byte is the connection's state.
    return info is not None and raw.getsockopt(socket.IPPROTO_TCP, info, 1)[0] == _TCP_CLOSE

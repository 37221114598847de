"""A listening socket that, when it closes, lets in everyone who has knocked before; and what the kernel knows of those.

The kernel completes connections by itself and queues them. Closing the socket resets those in its queue: clients that
were connected, and may have sent their request, as far as they could tell. So first nobody new may knock, then those
who are at the door are let in, and then it closes.

Several processes may accept from one socket, so that no client is lost when one of them dies. The kernel wakes all of
them for each client, and the one that is quickest would soon have most: a process that has more than others lets them
go first.
"""

import asyncio
import contextlib
import ctypes
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

from crosstie.run.wire.files import EXHAUSTED

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

# How long one that has more than the others stays away from the door, and how often before it goes itself.
_STEP_ASIDE_S, _STEPS = 0.002, 4
_EXHAUSTED_S = 0.5


def listening(host: str, port: int) -> list[socket.socket]:
    """One for each address of the host, all at one port; 0 takes a free one. Raises OSError."""
    found: list[socket.socket] = []
    try:
        for family, kind, number, _, address in socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            one = socket.socket(family, kind, number)
            found.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], port, *address[2:]))
            one.listen(BACKLOG)
            ask_the_silent(one)
            one.setblocking(False)
            port = one.getsockname()[1]
    except OSError:
        for one in found:
            one.close()
        raise
    return found


class Listener:
    """`made` gives each connection its protocol; `goes_first` says whether this process may take the next client, None:
    nobody else would. `exhausted` is told that it can take none, with clients at the door."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, made: Callable[[], Any], sockets: Sequence[socket.socket],
        goes_first: Callable[[], bool] | None, exhausted: Callable[[], None],
    ):  # fmt: skip
        self.loop, self._made, self._sockets, self._goes_first = loop, made, list(sockets), goes_first
        self._exhausted = exhausted
        self._accepting: set[asyncio.Task[Any]] = set()
        self._steps = 0
        self._stepped_at = 0.0

    def open(self) -> int:
        for one in self._sockets:
            self.loop.add_reader(one.fileno(), self._knocked, one)
        return int(self._sockets[0].getsockname()[1])

    def _knocked(self, one: socket.socket) -> None:
        if self._steps_aside():
            self._pause(one, _STEP_ASIDE_S)
            return
        try:
            accepted, _ = one.accept()
        except OSError as error:
            # Another was quicker, or its client has gone already; or this process can hold no more, and whoever knocks
            # waits in the kernel's queue until it can.
            if error.errno in EXHAUSTED:
                self._pause(one, _EXHAUSTED_S)
                self._exhausted()
            return
        accepted.setblocking(False)
        task = self.loop.create_task(self.loop.connect_accepted_socket(self._made, accepted))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    def _steps_aside(self) -> bool:
        if self._goes_first is None or self._goes_first():
            self._steps = 0
            return False
        now = self.loop.time()
        if now - self._stepped_at > 2.0 * _STEP_ASIDE_S:
            self._steps = 0
        self._stepped_at = now
        self._steps += 1
        # The others do not come: they are busy, or hang.
        return self._steps <= _STEPS

    def _pause(self, one: socket.socket, for_s: float) -> None:
        self.loop.remove_reader(one.fileno())
        self.loop.call_later(for_s, self._resume, one)

    def _resume(self, one: socket.socket) -> None:
        if one in self._sockets:
            self.loop.add_reader(one.fileno(), self._knocked, one)

    async def close_after_queue(self, handshake_s: float) -> None:
        """Lets in whoever has knocked, like the other processes, which all close at the same time, and leaves."""
        for one in self._sockets:
            hear_no_more(one)
        await asyncio.sleep(handshake_s)
        while self._sockets:
            one = self._sockets.pop()
            self.loop.remove_reader(one.fileno())
            for accepted in _queued(one):
                await self.loop.connect_accepted_socket(self._made, accepted)

    def close(self) -> None:
        while self._sockets:
            one = self._sockets.pop()
            self.loop.remove_reader(one.fileno())
            one.close()


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

"""Listening sockets that several processes accept from, so that none of their clients is lost when one of them dies.

The kernel wakes all of them for each client, and the one that is quickest would soon have most: a process that has
more than others lets them go first.
"""

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from typing import Any

from crosstie.run.wire.listener import BACKLOG, ask_the_silent, hear_no_more

# How long one that has more than the others stays away from the door, and how often before it goes itself.
_STEP_ASIDE_S, _STEPS = 0.002, 4
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
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


class SharedListener:
    """`made` gives each connection its protocol; `goes_first` says whether this process may take the next client."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, made: Callable[[], Any], sockets: Sequence[socket.socket],
        goes_first: Callable[[], bool],
    ):  # fmt: skip
        self.loop, self._made, self._sockets, self._goes_first = loop, made, list(sockets), goes_first
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
            # Another was quicker, or its client has gone already; or this process can hold no more.
            if error.errno in _EXHAUSTED:
                self._pause(one, _EXHAUSTED_S)
            return
        accepted.setblocking(False)
        task = self.loop.create_task(self.loop.connect_accepted_socket(self._made, accepted))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    def _steps_aside(self) -> bool:
        if self._goes_first():
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
            with one:
                while True:
                    try:
                        accepted, _ = one.accept()
                    except OSError:
                        # Nobody is left, or the next has gone already.
                        break
                    accepted.setblocking(False)
                    await self.loop.connect_accepted_socket(self._made, accepted)

    def close(self) -> None:
        while self._sockets:
            one = self._sockets.pop()
            self.loop.remove_reader(one.fileno())
            one.close()

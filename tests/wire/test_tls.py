"""TLS: which certificates are served, who is let in, and that connections end as plain ones do."""

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from tests.waiting import until
from tests.wire.certificates import CA, OTHER_CA, client_tls, pair, server_tls
from tests.wire.test_server import Watcher, echo

from crosstie.core.errors import BadInput
from crosstie.wire.loops import new_loop
from crosstie_gateway.wire.request import Request, RequestLimits
from crosstie_gateway.wire.server import Reply, Server
from crosstie_gateway.wire.tls import ServerTls

ASK = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
LAST = ASK.replace(b"host: x", b"host: x\r\nconnection: close")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(params=["uvloop", "asyncio"])
def runner(request: pytest.FixtureRequest) -> object:
    """Both, since each has a TLS of its own."""
    with asyncio.Runner(loop_factory=new_loop if request.param == "uvloop" else asyncio.new_event_loop) as runner:
        yield runner


@asynccontextmanager
async def secured(
    tls: ServerTls, handler: Callable[[Request, Reply], None] = echo, limits: RequestLimits | None = None
) -> AsyncIterator[tuple[Server, int]]:
    server = Server(asyncio.get_running_loop(), handler, limits)
    server.tls = tls
    port = await server.listen("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        server.close()
        await until(lambda: not server.connections)


async def opened(port: int, context: ssl.SSLContext | None = None) -> Streams:
    return await asyncio.open_connection("127.0.0.1", port, ssl=context or client_tls())


async def said(port: int, data: bytes, context: ssl.SSLContext | None = None) -> bytes:
    reader, writer = await opened(port, context)
    writer.write(data)
    got = await reader.read(-1)
    writer.close()
    return got


def common_name(writer: asyncio.StreamWriter) -> str:
    found = writer.get_extra_info("peercert")["subject"]
    return next(str(value) for part in found for name, value in part if name == "commonName")


# Files


def test_a_good_pair_says_when_it_expires(tmp_path: Path) -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", server_tls(tmp_path).expires_on)


def _missing(folder: Path) -> tuple[Path, Path]:
    return folder / "none.pem", pair(folder)[1]


def _no_pem(folder: Path) -> tuple[Path, Path]:
    cert, key = pair(folder)
    key.write_text("nothing")
    return cert, key


def _cut(folder: Path) -> tuple[Path, Path]:
    cert, key = pair(folder)
    cert.write_bytes(cert.read_bytes()[:200])
    return cert, key


def _swapped(folder: Path) -> tuple[Path, Path]:
    return pair(folder, "one")[0], pair(folder, "two")[1]


def _expired(folder: Path) -> tuple[Path, Path]:
    return pair(folder, days=-1.0)


def _encrypted(folder: Path) -> tuple[Path, Path]:
    cert, key = pair(folder)
    plain = load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    return cert, key


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (_missing, r"none\.pem: No such file"),
        (_no_pem, r"server\.key: has no private key"),
        (_cut, r"server\.pem"),
        (_swapped, r"two\.key: is not the key of the certificate in .*one\.pem"),
        (_expired, r"server\.pem: the certificate has expired"),
        (_encrypted, r"server\.key: is encrypted"),
    ],
)
def test_what_no_client_would_take_is_refused(
    files: Callable[[Path], tuple[Path, Path]], why: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=why) as found:
        ServerTls(*files(tmp_path), None)
    assert "\n" not in str(found.value)


def test_authorities_of_clients_must_be_certificates(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none: No such file"):
        server_tls(tmp_path, client_ca=tmp_path / "none")
    (tmp_path / "ca").write_text("-----BEGIN CERTIFICATE-----\nno\n")
    with pytest.raises(BadInput, match=r"ca: "):
        server_tls(tmp_path, client_ca=tmp_path / "ca")


def test_files_are_read_again_once_both_lie_still(tmp_path: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        tls = server_tls(tmp_path)
        assert not tls.changed()
        async with secured(tls) as (_, port):
            reader, writer = await opened(port)
            assert common_name(writer) == "server"
            cert, key = pair(tmp_path, "fresh")
            cert.replace(tls.cert)
            assert not tls.changed()
            # Only half of it is there.
            assert tls.changed()
            with pytest.raises(BadInput, match="is not the key"):
                tls.reload()
            assert not tls.changed()
            _, second = await opened(port)
            assert common_name(second) == "server"
            key.replace(tls.key)
            assert [tls.changed(), tls.changed()] == [False, True]
            tls.reload()
            _, third = await opened(port)
            assert common_name(third) == "fresh"
            # Who was there before stays.
            writer.write(LAST)
            assert b" 200 OK" in await reader.read(-1)
            for one in (writer, second, third):
                one.close()

    runner.run(test())


# Handshakes


def test_requests_are_answered_by_tls_1_2_and_later(tmp_path: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        tls = server_tls(tmp_path)
        # Python's own client will not be told to speak anything older.
        assert tls.context.minimum_version == ssl.TLSVersion.TLSv1_2
        async with secured(tls) as (_, port):
            for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
                context = client_tls()
                context.minimum_version = context.maximum_version = version
                context.set_alpn_protocols(["http/1.1"])
                got = await said(port, ASK + LAST, context)
                assert got.count(b" 200 OK") == got.count(b"POST /a? 5") == 2

    runner.run(test())


def test_who_speaks_no_tls_is_turned_out_and_counted(tmp_path: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        async with secured(server_tls(tmp_path)) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASK)
            assert b"200 OK" not in await reader.read(-1)
            await until(lambda: server.refused == {"tls": 1})
            assert not server.connections
            writer.close()

    runner.run(test())


def test_a_client_must_show_a_certificate_where_one_is_asked_for(tmp_path: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        ca = tmp_path / "clients.pem"
        OTHER_CA.cert_pem.write_to_path(ca)
        async with secured(server_tls(tmp_path, client_ca=ca)) as (server, port):
            known = client_tls(pair(tmp_path, "alice", ca=OTHER_CA))
            assert b" 200 OK" in await said(port, LAST, known)
            for stranger in (None, client_tls(pair(tmp_path, "mallory", ca=CA))):
                # By TLS 1.3 it learns so with the first that it reads.
                with contextlib.suppress(OSError):
                    assert await said(port, LAST, stranger) == b""
            await until(lambda: server.refused == {"tls": 2})

    runner.run(test())


def test_handshakes_count_as_connections_and_are_given_up(tmp_path: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        for limits in (RequestLimits(connections=2), RequestLimits(connections_per_address=2)):
            tls = server_tls(tmp_path)
            async with secured(tls, limits=limits) as (server, port):
                silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
                await until(lambda: len(server.connections) == 2)
                with pytest.raises((ConnectionError, ssl.SSLError)):
                    await opened(port)
                assert server.refused == {"connections": 1}
                for one in server.connections:
                    one.check(server.clock + 1e6)
                silent.pop().close()
                await until(lambda: len(server.connections) == 1)
                assert b" 200 OK" in await said(port, LAST)
                await until(lambda: len(server.connections) == 1)
                tls.handshake_s = 0.2
                silent.append(socket.create_connection(("127.0.0.1", port)))
                await until(lambda: server.refused["tls"] == 2)
                assert len(server.connections) == 1
                for left in silent:
                    left.close()
                await until(lambda: not server.connections)
                assert not server._of_address

    runner.run(test())


# Connections


def test_who_goes_while_it_is_answered_is_missed(tmp_path: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        watcher, replies = Watcher(), list[Reply]()

        def keep(request: Request, reply: Reply) -> None:
            reply.watcher = watcher
            replies.append(reply)

        async with secured(server_tls(tmp_path), keep) as (server, port):
            goings: list[Callable[[asyncio.StreamWriter], None]] = [
                lambda one: one.close(),
                lambda one: one.transport.abort(),
            ]
            for go in goings:
                _, writer = await opened(port)
                writer.write(ASK)
                await until(lambda: replies)
                go(writer)
                await until(lambda: watcher.told == ["gone"])
                await until(lambda: not server.connections)
                watcher.told.clear()
                replies.clear()

    runner.run(test())


def test_who_is_refused_while_it_sends_gets_its_answer(tmp_path: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        async with secured(server_tls(tmp_path), limits=RequestLimits(body_bytes=1000)) as (server, port):
            reader, writer = await opened(port)
            writer.write(ASK.replace(b"5", b"5000000") + b"x" * 4_000_000)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 413 ")
            writer.close()
            await until(lambda: not server.connections)
            # One that neither reads on nor closes is left.
            reader, writer = await opened(port)
            writer.write(ASK.replace(b"5", b"5000000"))
            await reader.readuntil(b"\r\n\r\n")
            await until(lambda: not server.connections)
            writer.transport.abort()

    runner.run(test())


def test_a_long_last_answer_is_read_slowly_to_its_end(tmp_path: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        size = 30_000_000

        def long(request: Request, reply: Reply) -> None:
            reply.send(200, b"x" * size)

        tls = server_tls(tmp_path)
        # As if the client took longer than any patience with goodbyes.
        tls.goodbye_s = 0.05
        async with secured(tls, long) as (server, port):
            reader, writer = await opened(port)
            writer.write(LAST)
            await reader.readuntil(b"\r\n\r\n")
            (connection,) = server.connections
            assert connection._closes
            left = size
            while left:
                piece = await reader.read(1_000_000)
                assert piece, f"cut off with {left} bytes to come"
                left -= len(piece)
            writer.close()
            await until(lambda: not server.connections)

    runner.run(test())


def test_a_drain_answers_what_has_come_and_waits_for_nobody_who_is_idle(tmp_path: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        replies: list[Reply] = []

        def keep(request: Request, reply: Reply) -> None:
            if request.path == "/a":
                replies.append(reply)
            else:
                echo(request, reply)

        async with secured(server_tls(tmp_path), keep) as (server, port):
            # One that never reads, and so never says goodbye; one that shakes no hands; one that waits.
            with socket.create_connection(("127.0.0.1", port)) as raw, socket.create_connection(("127.0.0.1", port)):
                idle = client_tls().wrap_socket(raw, server_hostname="localhost", do_handshake_on_connect=False)
                await asyncio.to_thread(idle.do_handshake)
                idle.sendall(ASK.replace(b"/a", b"/b"))
                await asyncio.to_thread(idle.recv, 65536)
                reader, writer = await opened(port)
                writer.write(ASK)
                await until(lambda: replies and len(server.connections) == 3)
                draining = asyncio.create_task(server.drain(600.0, grace_s=0.05))
                await until(lambda: len(server.connections) == 1)
                replies[0].send(200, b"at last")
                assert b"connection: close" in (got := await reader.read(-1))
                assert got.endswith(b"at last")
                assert await draining
                writer.close()
                idle.close()

    runner.run(test())

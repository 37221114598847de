"""A server of one handler on loopback, and raw sockets to talk to it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tests.waiting import LIMIT_S

from crosstie.wire.address import Address
from crosstie.wire.client import Origin
from crosstie_gateway.wire.request import Request, RequestLimits
from crosstie_gateway.wire.server import Reply, Server


@asynccontextmanager
async def serving(
    handler: Callable[[Request, Reply], None], limits: RequestLimits | None = None
) -> AsyncIterator[tuple[Server, int]]:
    server = Server(asyncio.get_running_loop(), handler, limits)
    port = await server.listen("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        server.close()


@asynccontextmanager
async def scripted(*answers: bytes, then_close: bool = True) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that answers each request on a connection with the next of these bytes, whatever was asked."""
    heard: list[bytes] = []
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while left:
                data = await reader.read(65536)
                if not data:
                    break
                heard.append(data)
                writer.write(left.pop(0))
                await writer.drain()
            while not then_close and await reader.read(65536):
                pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], heard
    finally:
        server.close()


@asynccontextmanager
async def origin_of(port: int) -> AsyncIterator[Origin]:
    origin = Origin(asyncio.get_running_loop(), Address(f"http://127.0.0.1:{port}/v1"))
    try:
        yield origin
    finally:
        origin.close()


async def said(port: int, data: bytes, *, until: bytes | None = None, within_s: float = LIMIT_S) -> bytes:
    """What a server answers to raw bytes, until it closes or the answer ends with `until`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    got = b""
    async with asyncio.timeout(within_s):
        while not (until and got.endswith(until)):
            piece = await reader.read(65536)
            if not piece:
                break
            got += piece
    writer.close()
    return got

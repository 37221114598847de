"""What may stand between a gateway and its backends: TLS, with certificates of the test's own."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trustme

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]


@asynccontextmanager
async def listening(serve: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Its port. What is open when it is left is cut."""
    writers: list[asyncio.StreamWriter] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await serve(reader, writer)  # type: ignore[misc]
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, first: bytes = b"") -> None:
    """Both ways, to a port of this machine, until either side ends."""
    back, on = await asyncio.open_connection("127.0.0.1", port)

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            sink.write(data)
            await sink.drain()

    on.write(first)
    ways = [asyncio.ensure_future(copy(reader, on)), asyncio.ensure_future(copy(back, writer))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        on.close()


class Certificates:
    """An authority, with files that it has signed."""

    def __init__(self, folder: Path):
        self.folder, self.authority = folder, trustme.CA()
        self.ca = str(folder / "ca.pem")
        self.authority.cert_pem.write_to_path(self.ca)

    def issued(self, name: str) -> tuple[str, str]:
        """The files of a certificate for that name and of its key."""
        made = self.authority.issue_cert(name)
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        made.private_key_pem.write_to_path(str(key))
        cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        return str(cert), str(key)

    def server(self, name: str = "localhost", *, asks: bool = False) -> ssl.SSLContext:
        """For a server of that name; `asks`: for a certificate of the same authority."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.load_cert_chain(*self.issued(name))
        if asks:
            made.verify_mode = ssl.CERT_REQUIRED
            made.load_verify_locations(self.ca)
        return made


@asynccontextmanager
async def tls_before(port: int, tls: ssl.SSLContext, host: str = "localhost") -> AsyncIterator[str]:
    """The https address of a server that speaks http on that port."""
    async with listening(lambda reader, writer: pipe(reader, writer, port), tls) as front:
        yield f"https://{host}:{front}/v1"

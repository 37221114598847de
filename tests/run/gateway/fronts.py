"""What may stand between a gateway and its backends: TLS, with certificates of the test's own, and proxies."""

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import trustme

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


@asynccontextmanager
async def listening(serve: Handler, tls: ssl.SSLContext | None = None, file: Path | None = None) -> AsyncIterator[int]:
    """Its port; `file`: of a socket, in the place of one. What is open when it is left is cut."""
    under_way: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            await serve(reader, writer)
            await writer.drain()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(handle(reader, writer))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
        # Also where it is cancelled before it has begun.
        task.add_done_callback(lambda _: writer.close())

    if file is None:
        server = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=tls)
    else:
        server = await asyncio.start_unix_server(accepted, file)
    try:
        yield server.sockets[0].getsockname()[1] if file is None else 0
    finally:
        server.close()
        for task in list(under_way):
            task.cancel()
        for found in await asyncio.gather(*under_way, return_exceptions=True):
            if isinstance(found, Exception):
                raise found


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
        on.transport.abort()


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


class Proxy:
    """A small one that passes on what it is asked to, with a password if it has one. `mode`: how it takes the next."""

    def __init__(self, password: str | None = None):
        self.password, self.mode = password, "ok"
        # What it was sent before anything was passed on.
        self.heads: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        if self.mode == "hang":
            await reader.read()
            return
        said = b"proxy-authorization: basic " + base64.b64encode((self.password or "").encode()).lower()
        if self.password is not None and said not in head.lower():
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
            return
        if self.mode != "ok":
            writer.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\n\r\n" % self.mode.encode())
            await writer.drain()
            return
        method, target, _ = head.split(b"\r\n")[0].split(b" ")
        if method == b"CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await pipe(reader, writer, int(target.rpartition(b":")[2]))
        else:
            parts = urlsplit(target.decode())
            lines = [line for line in head.split(b"\r\n")[1:-2] if not line.lower().startswith(b"proxy-")]
            first = b"%b %b HTTP/1.1\r\n%b\r\nconnection: close\r\n\r\n" % (
                method, parts.path.encode(), b"\r\n".join(lines),
            )  # fmt: skip
            await pipe(reader, writer, parts.port or 80, first)


@asynccontextmanager
async def proxying(password: str | None = None) -> AsyncIterator[tuple[Proxy, int]]:
    proxy = Proxy(password)
    async with listening(proxy.serve) as port:
        yield proxy, port


@asynccontextmanager
async def on_socket(port: int, file: Path) -> AsyncIterator[str]:
    """The address of a socket that leads to a port of this machine."""
    async with listening(lambda reader, writer: pipe(reader, writer, port), file=file):
        yield f"unix:{file}"

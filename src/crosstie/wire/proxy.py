"""Proxies between the gateway and its backends: a tunnel for https (CONNECT), the whole address in the request for
http."""

import asyncio
import base64
import os
from collections.abc import Callable, Iterable
from typing import Any, cast
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

from crosstie.core.errors import BadInput
from crosstie.wire.address import Address
from crosstie.wire.variables import filled

# What a pool says whose proxies are those of HTTP_PROXY, HTTPS_PROXY and NO_PROXY.
ENVIRONMENT = "environment"
_MOST_HEAD = 16 * 1024


class ProxyFailed(ConnectionError):
    """It was the proxy that could not be reached, or that would not; nothing is known of what is behind it."""

    def __init__(self, proxy: "Proxy", what: str):
        super().__init__(f"the proxy '{proxy.name}' {what}")


class Proxy:
    def __init__(self, url: str):
        """Raises BadInput, which does not repeat it: there may be a password in it."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            raise BadInput("is no address of a proxy, such as http://proxy:3128") from None
        if parts.scheme != "http" or not host or not port or parts.path.strip("/") or parts.query or parts.fragment:
            raise BadInput("is no proxy that is spoken to in http, such as http://proxy:3128, with its port")
        self.host, self.port = host, port
        # What may be told of it.
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.authorization = b""
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self.authorization = b"proxy-authorization: Basic %b\r\n" % base64.b64encode(pair.encode())

    async def reach(self, loop: asyncio.AbstractEventLoop, make: Callable[[], Any]) -> tuple[asyncio.Transport, Any]:
        try:
            made = await loop.create_connection(make, self.host, self.port)
        except OSError as error:
            raise ProxyFailed(self, f"cannot be reached: {error.strerror or error}") from None
        return made

    async def tunnel(self, loop: asyncio.AbstractEventLoop, at: Address) -> asyncio.Transport:
        """A connection through it, over which nothing has been said yet."""
        transport, opening = await self.reach(loop, lambda: _Opening(loop, self, at))
        try:
            await opening.done
        except BaseException:
            transport.abort()
            raise
        return transport


class _Opening(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop, proxy: Proxy, at: Address):
        self.proxy, self.at = proxy, at
        self.done: asyncio.Future[None] = loop.create_future()
        self._head = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        to = f"[{self.at.host}]:{self.at.port}" if ":" in self.at.host else f"{self.at.host}:{self.at.port}"
        lines = f"CONNECT {to} HTTP/1.1\r\nhost: {to}\r\n".encode() + self.proxy.authorization + b"\r\n"
        cast(asyncio.Transport, transport).write(lines)

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        seen = max(len(self._head) - 3, 0)
        self._head += data
        if self._head.find(b"\r\n\r\n", seen) < 0:
            if len(self._head) > _MOST_HEAD:
                self._fail("answers without an end")
            return
        head, _, rest = bytes(self._head).partition(b"\r\n\r\n")
        words = head.split(b"\r\n")[0].split(None, 2)
        status = int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/1.") and words[1].isdigit() else 0
        if status == 407:
            self._fail("wants other credentials (407)")
        elif not 200 <= status < 300:
            self._fail(f"would not connect ({status})" if status else "answers something that is no HTTP")
        elif rest:
            self._fail("says more than it was asked")
        else:
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("ended the connection before it was through")

    def _fail(self, what: str) -> None:
        if not self.done.done():
            self.done.set_exception(ProxyFailed(self.proxy, what))


def proxies_for(said: str | None, addresses: Iterable[Address]) -> dict[str, Proxy]:
    """By the address's URL, the proxy that it is reached through; those without are reached directly. Raises
    BadInput."""
    if said is None:
        return {}
    if said != ENVIRONMENT:
        proxy = Proxy(filled(said))
        return {at.url: proxy for at in addresses}
    given, proxies = getproxies_environment(), dict[str, Proxy]()
    for at in addresses:
        url = given.get("https" if at.secure else "http")
        if url and not proxy_bypass_environment(f"{at.host}:{at.port}", given):
            try:
                proxies[at.url] = Proxy(url)
            except BadInput as error:
                name = "HTTPS_PROXY" if at.secure else "HTTP_PROXY"
                raise BadInput(f"{name if name in os.environ else name.lower()} {error}") from None
    return proxies

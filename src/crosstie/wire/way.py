"""How connections to the servers of a pool are made: with which certificates, through which proxy. One for all of them,
and not for each."""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from crosstie.core.errors import BadInput
from crosstie.core.fleet import BackendAccess, Pool
from crosstie.wire.address import Address
from crosstie.wire.proxy import Proxy, proxies_for


class TlsRefused(ConnectionError):
    """No TLS with a server, whatever it is asked: one of the two does not take the other's certificate, or it speaks
    something else."""


def tls_refusal(error: ssl.SSLError) -> TlsRefused:
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsRefused(f"its certificate does not verify: {error.verify_message.rstrip('.')}")
    reason = (error.reason or "no reason given").replace("_", " ").lower()
    if "alert" in reason:
        return TlsRefused(f"it does not take the gateway's TLS or certificate: {reason}")
    return TlsRefused(f"no TLS with it: {reason}")


class Way:
    def __init__(
        self, tls: ssl.SSLContext | None, server_name: str | None = None, proxies: dict[str, Proxy] | None = None,
        made_of: bytes = b"",
    ):  # fmt: skip
        self._tls, self._server_name, self._proxies = tls, server_name, proxies or {}
        # The same for two that would do the same.
        self.made_of = made_of

    async def connect(self, loop: asyncio.AbstractEventLoop, at: Address, make: Callable[[], Any]) -> Any:
        """The protocol that `make` makes, connected. Raises OSError, of which SSLError is one."""
        if at.socket:
            _, made = await loop.create_unix_connection(make, at.socket)
            return made
        tls = self._tls if at.secure else None
        name = (self._server_name or at.host) if tls is not None else None
        proxy = self._proxies.get(at.url)
        if proxy is not None and tls is None:
            _, made = await proxy.reach(loop, make)
            return made
        try:
            if proxy is not None and tls is not None:
                return await _through(loop, await proxy.tunnel(loop, at), make(), tls, name)
            _, made = await loop.create_connection(make, at.dials, at.port, ssl=tls, server_hostname=name)
        except ConnectionResetError as error:
            # asyncio's own, without a word.
            raise (
                error if str(error) else ConnectionResetError("it ended the connection before TLS was agreed")
            ) from None
        return made

    def form(self, at: Address) -> tuple[bytes, bytes]:
        """What stands before the path in a request to this server, and further lines of its head: for the eyes of a
        proxy that passes requests on."""
        proxy = self._proxies.get(at.url)
        if proxy is None or at.secure:
            return b"", b""
        return b"http://" + at.authority, proxy.authorization

    def where(self, at: Address) -> str:
        """For logs."""
        proxy = self._proxies.get(at.url)
        return at.url if proxy is None else f"{at.url} (through the proxy {proxy.name})"


async def _through(
    loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, made: Any, tls: ssl.SSLContext, name: str | None
) -> Any:
    try:
        secured = await loop.start_tls(transport, made, tls, server_hostname=name)
    except BaseException:
        transport.abort()
        raise
    if secured is None:
        raise ConnectionResetError("")
    made.connection_made(secured)
    return made


def way_to(at: Address) -> Way:
    """As the system has it, to one server."""
    return Way(ssl.create_default_context() if at.secure else None)


def way_of(pool: Pool, addresses: Sequence[Address], previous: Way | None) -> Way:
    """To the backends of a pool; the same as before where nothing has changed, in its files neither. Raises
    BadInput."""
    reach, seen = pool.reach, blake2b(digest_size=32)
    secure = any(at.secure for at in addresses)
    seen.update(repr((secure, reach)).encode())
    read = {key: _content(pool, key, getattr(reach, key)) for key in ("tls_ca", "tls_cert", "tls_key")}
    try:
        proxies = proxies_for(reach.proxy, addresses)
    except BadInput as error:
        raise BadInput(f"pool {pool.name}: proxy: {error}") from None
    seen.update(repr(sorted((url, proxy.name, proxy.authorization) for url, proxy in proxies.items())).encode())
    for content in read.values():
        # Each with its length, so that no two sets of files look the same.
        seen.update(b"%d:%b" % (len(content), content))
    if previous is not None and previous.made_of == seen.digest():
        return previous
    tls = _context(pool, reach, read["tls_ca"]) if secure else None
    return Way(tls, reach.tls_server_name, proxies, seen.digest())


def _content(pool: Pool, key: str, file: str | None) -> bytes:
    try:
        return Path(file).read_bytes() if file is not None else b""
    except OSError as error:
        raise BadInput(f"pool {pool.name}: {key}: {file}: cannot be read: {error.strerror or error}") from None


def _context(pool: Pool, reach: BackendAccess, authorities: bytes) -> ssl.SSLContext:
    try:
        # With authorities of its own it does not load the system's.
        made = ssl.create_default_context(cadata=authorities.decode("ascii") if reach.tls_ca else None)
    except (ssl.SSLError, ValueError):
        raise BadInput(f"pool {pool.name}: tls_ca: {reach.tls_ca}: has no certificates in PEM") from None
    if reach.tls_cert is not None:
        _show(pool, made, reach.tls_cert, reach.tls_key or reach.tls_cert)
    return made


def _show(pool: Pool, context: ssl.SSLContext, cert: str, key: str) -> None:
    asked: list[bool] = []

    def password() -> bytes:
        # Without this, OpenSSL would ask the terminal.
        asked.append(True)
        return b"none"

    try:
        context.load_cert_chain(cert, key, password=password)
    except (OSError, ValueError) as error:
        why = "they are no certificate and its key in PEM"
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            why = "the key is not that of the certificate"
        elif asked:
            why = "the key is encrypted: give one that is not, and that only the gateway can read"
        raise BadInput(f"pool {pool.name}: tls_cert, tls_key: {cert}, {key}: {why}") from None

"""Certificates for tests, made anew: authorities, servers and clients."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from crosstie_gateway.wire.tls import ServerTls

CA = trustme.CA()
OTHER_CA = trustme.CA()


def pair(folder: Path, name: str = "server", *, ca: trustme.CA = CA, days: float = 365.0) -> tuple[Path, Path]:
    """Its certificate and its key, in files."""
    now = datetime.now(UTC)
    issued = ca.issue_cert("localhost", "127.0.0.1", common_name=name, not_after=now + timedelta(days=days))
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    issued.private_key_pem.write_to_path(key)
    cert.write_bytes(b"".join(one.bytes() for one in issued.cert_chain_pems))
    return cert, key


def server_tls(folder: Path, **more: Path | None) -> ServerTls:
    return ServerTls(*pair(folder), more.get("client_ca"))


def client_tls(shows: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    """A client that trusts `CA` alone, and has a certificate to show."""
    context = ssl.create_default_context(cadata=CA.cert_pem.bytes().decode())
    if shows is not None:
        context.load_cert_chain(*shows)
    return context

"""The certificate that a server shows: tried before anybody sees it, and read again when its files change.

It shakes hands with itself in memory, which finds another's key, an expired certificate, or an algorithm that OpenSSL
refuses.
"""

import ssl
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from crosstie.core.errors import BadInput

# How long a client may take to be let in, and to say goodbye, which also bounds an answer's unread last bytes.
_HANDSHAKE_S = 10.0
_GOODBYE_S = 10.0
_EXPIRED, _NOT_YET = 10, 9
Stamp = tuple[tuple[int, int, int] | None, ...]


class ServerTls:
    """`client_ca`: whose certificates a client must show one of; None: it need not. Raises BadInput."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None, protocols: Sequence[str] = ("http/1.1",)):
        self.cert, self.key, self.client_ca, self._protocols = cert, key, client_ca, list(protocols)
        self.expires = 0.0
        self.handshake_s, self.goodbye_s = _HANDSHAKE_S, _GOODBYE_S
        self._loaded = self._seen = self._stamp()
        self.context = self._load()

    def changed(self) -> bool:
        """Whether the files have changed and were so the last time too: who replaces one has the time to replace the
        other."""
        stamp, seen = self._stamp(), self._seen
        self._seen = stamp
        return stamp == seen and stamp != self._loaded

    def differs(self) -> bool:
        return self._stamp() != self._loaded

    def reload(self) -> None:
        """For clients that come from now on. Raises BadInput, and the old certificate goes on."""
        self._loaded = self._seen = self._stamp()
        self.context = self._load()

    @property
    def expires_on(self) -> str:
        return datetime.fromtimestamp(self.expires, UTC).strftime("%Y-%m-%d %H:%M UTC")

    def _stamp(self) -> Stamp:
        stamps: list[tuple[int, int, int] | None] = []
        for file in filter(None, (self.cert, self.key, self.client_ca)):
            try:
                stat = file.stat()
                stamps.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
            except OSError:
                stamps.append(None)
        return tuple(stamps)

    def _load(self) -> ssl.SSLContext:
        chain = _readable(self.cert, b"-----BEGIN CERTIFICATE-----", "certificate")
        _readable(self.key, b"PRIVATE KEY-----", "private key")
        context = self._with_pair()
        self.expires = _tried(context, chain, self.cert)
        if self.client_ca is not None:
            _readable(self.client_ca, b"-----BEGIN CERTIFICATE-----", "certificate")
            try:
                context.load_verify_locations(self.client_ca)
            except (ssl.SSLError, OSError) as error:
                raise BadInput(f"{self.client_ca}: {_reason(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols(self._protocols)
        return context

    def _with_pair(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # A client that begins anew within a connection makes work for nothing.
        context.options |= ssl.OP_NO_RENEGOTIATION

        def asked() -> str:
            # Nobody is there to be asked.
            raise BadInput(f"{self.key}: is encrypted; it is read without anybody there to say the password")

        try:
            context.load_cert_chain(self.cert, self.key, password=asked)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise BadInput(f"{self.key}: is not the key of the certificate in {self.cert}") from None
            raise BadInput(f"{self.cert} and {self.key}: {_reason(error)}") from None
        except OSError as error:
            raise BadInput(f"{self.cert} and {self.key}: {_reason(error)}") from None
        return context


def _readable(file: Path, holds: bytes, kind: str) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise BadInput(f"{file}: {_reason(error)}") from None
    if holds not in content:
        raise BadInput(f"{file}: has no {kind} in PEM form")
    return content.decode("latin-1")


def _reason(error: OSError) -> str:
    said = error.reason if isinstance(error, ssl.SSLError) else None
    return said.replace("_", " ").lower() if said else error.strerror or str(error)


def _tried(context: ssl.SSLContext, chain: str, file: Path) -> float:
    """When the certificate expires, once a client has taken it that trusts nothing else. Raises BadInput."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    # The first is the server's own; a client that trusts that one asks for none of those above it.
    own = begin + chain.partition(begin)[2].partition(end)[0] + end
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        trusting.load_verify_locations(cadata=own)
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trusting.wrap_bio(to_client, to_server)
        server = context.wrap_bio(to_server, to_client, server_side=True)
        left = [client, server]
        while left:
            side = left.pop(0)
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                left.append(side)
        shown = client.getpeercert() or {}
        return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in (_EXPIRED, _NOT_YET):
            why = "has expired" if error.verify_code == _EXPIRED else "is not valid yet"
            raise BadInput(f"{file}: the certificate {why}") from None
        raise BadInput(f"{file}: no client would take it: {error.verify_message}") from None
    except (ssl.SSLError, KeyError, ValueError) as error:
        why = _reason(error) if isinstance(error, OSError) else str(error)
        raise BadInput(f"{file}: cannot be served: {why}") from None

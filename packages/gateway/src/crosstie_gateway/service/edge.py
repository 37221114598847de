"""Where clients come in: addresses and a unix socket, plain or by TLS; and further ports, for operators. In one process
or in several that accept together."""

import asyncio
import socket
from collections.abc import Awaitable
from pathlib import Path
from time import time
from typing import Any

import msgspec

from crosstie.core.errors import BadInput, CrosstieError
from crosstie_gateway.gateway.errors import RequestRejected, error_body
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.gateway.pages import ops_handler
from crosstie_gateway.service.process import Component, GatewayProcess, listening_on
from crosstie_gateway.wire.listener import UnixSocket, listening
from crosstie_gateway.wire.request import Request, RequestLimits
from crosstie_gateway.wire.server import Server
from crosstie_gateway.wire.tls import ServerTls

_CHECK_S = 1.0
_SOON_S = 14 * 86_400.0


class Edge(Component):
    """Raises BadInput for certificates that cannot be served; nothing listens before `listen`."""

    def __init__(
        self, host: str, port: int, *, unix: Path | None = None, unix_mode: int | None = None, no_tcp: bool = False,
        tls_cert: Path | None = None, tls_key: Path | None = None, tls_client_ca: Path | None = None,
        grpc: bool = False,
    ):  # fmt: skip
        if unix is None and (no_tcp or unix_mode is not None):
            raise BadInput("--no-tcp and --unix-mode go with --unix")
        if (tls_cert is None) != (tls_key is None):
            raise BadInput("--tls-cert and --tls-key go together")
        if tls_client_ca is not None and tls_cert is None:
            raise BadInput("--tls-client-ca goes with --tls-cert and --tls-key")
        if no_tcp and tls_cert is not None:
            raise BadInput("--tls-cert is for addresses, and with --no-tcp there are none")
        self.host, self.port, self.unix = host, port, unix
        self._unix_mode, self._no_tcp = unix_mode, no_tcp
        self._tls: ServerTls | None = None
        if tls_cert is not None and tls_key is not None:
            self._tls = ServerTls(tls_cert, tls_key, tls_client_ca, ("h2",) if grpc else ("http/1.1",))
        self._sockets: list[socket.socket] = []
        self._following: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The API's address; with a socket alone, the URL for clients that are told its path."""
        if self._no_tcp:
            return "http://localhost/v1"
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/v1"

    def listen(self) -> list[socket.socket]:
        """All that clients may come to. Raises BadInput."""
        if not self._no_tcp:
            with listening_on(self.host, self.port):
                self._sockets += listening(self.host, self.port)
            self.port = int(self._sockets[0].getsockname()[1])
        if self.unix is not None:
            try:
                self._sockets.append(UnixSocket(self.unix, self._unix_mode))
            except OSError as error:
                self.close()
                raise BadInput(f"{self.unix}: cannot listen there: {error.strerror or error}") from None
        return self._sockets

    def close(self) -> None:
        """To be called by the process that listened, when the last server has ended."""
        for listens in self._sockets:
            if isinstance(listens, UnixSocket):
                listens.leave()
            listens.close()

    # Certificates, in each process that serves

    async def start(self, process: GatewayProcess) -> None:
        self._process, process.server.tls = process, self._tls
        if self._tls is not None:
            process.before_reload.append(lambda: self._read_again(force=True))
            if self._tls.differs():
                # A worker that was started later has what the first one read.
                self._read_again(force=True)
            self._following = asyncio.get_running_loop().create_task(self._follow(self._tls))

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()

    async def _follow(self, tls: ServerTls) -> None:
        warned = ""
        while True:
            if tls.expires - time() < _SOON_S and warned != tls.expires_on:
                warned = tls.expires_on
                sentence = f"{tls.cert}: the certificate expires on {tls.expires_on}"
                self._process.notify(Notice("certificate_expires", "warning", sentence))
            await asyncio.sleep(_CHECK_S)
            self._read_again()

    def _read_again(self, *, force: bool = False) -> None:
        tls = self._tls
        if tls is None or not (tls.changed() or force):
            return
        try:
            tls.reload()
        except BadInput as error:
            sentence = f"certificate refused, the old one goes on: {error}"
            self._process.notify(Notice("certificate_refused", "error", sentence, why=str(error)))
        else:
            sentence = f"certificate read again: it expires on {tls.expires_on}"
            self._process.notify(Notice("certificate_reloaded", "info", sentence))


# Further ports, not for clients


class Door(Component):
    """`whom`: for whom it is, in an error."""

    def __init__(self, host: str, port: int, whom: str):
        self.host, self.port, self._whom = host, port, whom
        self._sockets: list[socket.socket] = []

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def listen(self) -> None:
        """Before the fork, for all processes: any of them may take the next visitor."""
        with listening_on(self.host, self.port, self._whom):
            self._sockets = listening(self.host, self.port)
        self.port = int(self._sockets[0].getsockname()[1])

    def open(self, server: Server) -> None:
        if not self._sockets:
            self.listen()
        server.join(self._sockets)

    def close(self) -> None:
        """To be called when the last process behind it has ended."""
        for listens in self._sockets:
            listens.close()


class OpsDoor(Door):
    """Health, readiness and metrics on a port of their own, in place of the clients' port."""

    def __init__(self, host: str, port: int):
        super().__init__(host, port, " for health and metrics")

    async def start(self, process: GatewayProcess) -> None:
        gateway = process.gateway
        gateway.ops_apart = True
        limits = RequestLimits(body_bytes=0, request_s=10.0)
        self._server = Server(gateway.loop, ops_handler(gateway), limits, lambda status, why: error_body(status, why))
        self.open(self._server)

    async def stop(self) -> None:
        self._server.close()


async def outcome(loop: asyncio.AbstractEventLoop, doing: str, work: Awaitable[Any]) -> Any:
    """What some work for a visitor comes to. Raises RequestRejected, with what the visitor is told."""
    try:
        return await work
    except RequestRejected:
        raise
    except CrosstieError as error:
        raise RequestRejected(400, str(error), "refused") from None
    except Exception as error:  # noqa: BLE001 (the visitor must hear of it, and so must the log)
        loop.call_exception_handler({"message": f"{doing} failed", "exception": error})
        raise RequestRejected(500, "internal error", "internal_error") from None


def json_object(request: Request) -> dict[str, Any]:
    """The JSON object of a change. Raises RequestRejected."""
    kind = request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise RequestRejected(415, "the body must be sent as content-type: application/json", "not_json")
    try:
        body = msgspec.json.decode(request.body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRejected(400, f"the body is no JSON: {error}", "not_json") from None
    if not isinstance(body, dict):
        raise RequestRejected(400, "the body must be a JSON object", "not_json")
    return body

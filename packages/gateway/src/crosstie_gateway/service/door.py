"""A further port of the gateway, not for its clients: in one process, or in several that accept together."""

import socket
from typing import Any

import msgspec

from crosstie_gateway.gateway.errors import RequestRejected, error_body
from crosstie_gateway.gateway.pages import ops_handler
from crosstie_gateway.service.process import Component, GatewayProcess, listening_on
from crosstie_gateway.wire.listener import listening
from crosstie_gateway.wire.request import Request, RequestLimits
from crosstie_gateway.wire.server import Server


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

"""The picker as a process: a gateway whose requests come from Envoy, and go to backends through it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from crosstie.core.fleet import Fleet
from crosstie_gateway.gateway.errors import error_body
from crosstie_gateway.pick.picked import PickedExchange, check_endpoints
from crosstie_gateway.pick.server import PickCalls
from crosstie_gateway.pick.stream import PickSettings, PickStream
from crosstie_gateway.service.process import GatewayProcess
from crosstie_gateway.start.start import Served, ServeOptions, run, would_serve
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

_NOT_HERE = "this port is for Envoy's ext_proc, by gRPC; /health, /ready and /metrics are at --ops-port"


class PickProcess(GatewayProcess):
    def __init__(self, *given: Any, settings: PickSettings | None = None, **more: Any):
        super().__init__(*given, **more)
        self._settings = settings or PickSettings()

    async def _listen(self, host: str, port: int) -> int:
        gateway, server = self.gateway, self.server
        gateway.exchange, gateway.ops_apart = PickedExchange, True
        server.tells_peers = True
        server.speaker = PickCalls(server, lambda: gateway.ready, self._settings).speak
        server.handler = partial(_handle, server.handler)
        return await super()._listen(host, port)

    def load(self, fleet: Fleet) -> None:
        check_endpoints(fleet)
        super().load(fleet)


def _handle(handler: Callable[[Request, Reply], None], request: Request, reply: Reply) -> None:
    if isinstance(reply.connection, PickStream):
        handler(request, reply)
    else:
        reply.send(404, error_body(404, _NOT_HERE))


def run_picker(options: ServeOptions, on_ready: Callable[[Served], None], settings: PickSettings) -> bool:
    """Picks until a signal ends it; whether every request was answered. Raises CrosstieError."""
    return run(options, on_ready, partial(PickProcess, settings=settings), check_endpoints)


def would_pick(options: ServeOptions) -> Served:
    """What would be picked from; nothing is started. Raises CrosstieError where it could not be."""
    return would_serve(options, check_endpoints)

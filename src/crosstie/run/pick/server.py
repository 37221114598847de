"""The picker's gRPC server: Envoy's external processing, and gRPC's own health checks.

Each call is one request of a client. What Envoy says is handed to its stream one message at a time; what the stream
says is written in order, by whoever gets to it first: the call itself, or a task where something came about later.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any

from crosstie.core.errors import BadInput
from crosstie.run.pick.messages import HealthCheckRequest, HealthCheckResponse, ProcessingRequest
from crosstie.run.pick.stream import PickStream
from crosstie.run.wire.tls import ServerTls

# Nothing is forked once it runs, and what it says of that is for its own developers.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
try:
    import grpc
    import grpc.aio
except ImportError:
    raise BadInput("the picker needs grpcio and protobuf: pip install 'crosstie[kubernetes]'") from None

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
_HEALTH = "grpc.health.v1.Health"
# By the standard: whether it lives, and twice whether it may be asked.
_LIVENESS = "liveness"
_CHECKED = ("", "readiness", EXT_PROC)
_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3
# How often those who watch its health are told of a change.
_WATCH_S = 0.2
_OPTIONS = (
    # Two pickers on one port would each get some of the requests, and nobody would notice.
    ("grpc.so_reuseport", 0),
    # Pieces of bodies are short; a whole one may come at once where buffers are large.
    ("grpc.max_receive_message_length", 64 * 2**20),
    # Envoy keeps its connections alive as it likes.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
)
Opener = Callable[[Callable[[], None], str], PickStream]


class PickServer:
    """`opens` makes the stream of a call; `ready` says whether requests may come."""

    def __init__(self, loop: asyncio.AbstractEventLoop, opens: Opener, ready: Callable[[], bool]):
        self._loop, self._opens, self._ready = loop, opens, ready
        self._server = grpc.aio.server(options=_OPTIONS)
        process = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, lambda message: message.SerializeToString()
        )
        asked = {"request_deserializer": HealthCheckRequest.FromString, "response_serializer": _serialized}
        health = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, **asked),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **asked),
        }
        handlers = {EXT_PROC: {"Process": process}, _HEALTH: health}
        made = grpc.method_handlers_generic_handler
        self._server.add_generic_rpc_handlers(tuple(made(name, methods) for name, methods in handlers.items()))

    async def start(self, host: str, port: int, tls: ServerTls | None) -> int:
        """The port that it listens on. Raises OSError."""
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                found = self._server.add_insecure_port(at)
            else:
                found = self._server.add_secure_port(at, _credentials(tls))
        except RuntimeError:
            # gRPC says why on stderr at most.
            raise OSError("in use, or no address of this machine") from None
        await self._server.start()
        return int(found)

    async def stop(self, within_s: float | None) -> None:
        """Takes no more calls, and waits so long for those that go on."""
        await self._server.stop(within_s)

    async def _process(self, _: Any, context: Any) -> None:
        call = _Call(self._loop, context)
        call.stream = stream = self._opens(call.wake, _peer(context))
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                call.reading = False
                stream.take(message)
                if stream.said or stream.failed:
                    await call.flush()
                call.reading = True
            # Envoy says no more; what is still to be said to it leaves first.
            await call.flush()
        finally:
            stream.lost()

    # Health

    def _status(self, service: str) -> int:
        if service == _LIVENESS:
            return _SERVING
        if service in _CHECKED:
            return _SERVING if self._ready() else _NOT_SERVING
        return _UNKNOWN

    async def _check(self, request: Any, context: Any) -> Any:
        status = self._status(request.service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service '{request.service}'")
        return HealthCheckResponse(status=status)

    async def _watch(self, request: Any, context: Any) -> None:
        told = None
        while True:
            status = self._status(request.service)
            if status != told:
                told = status
                await context.write(HealthCheckResponse(status=status))
            await asyncio.sleep(_WATCH_S)


class _Call:
    """Who writes what a stream has said: one at a time."""

    stream: PickStream

    def __init__(self, loop: asyncio.AbstractEventLoop, context: Any):
        self._loop, self._context = loop, context
        self._writing: asyncio.Future[None] | None = None
        # Whether the call waits for Envoy, so that nobody writes unless somebody is set to it.
        self.reading = True

    def wake(self) -> None:
        if self.reading and self._writing is None:
            self._writing = self._loop.create_task(self._write())

    async def flush(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self._write()

    async def _write(self) -> None:
        stream, context = self.stream, self._context
        try:
            while stream.said and not stream.closed:
                await context.write(stream.said.pop(0))
        except (grpc.aio.UsageError, grpc.aio.InternalError, grpc.RpcError):
            # It ended in the meantime, which the call itself is told.
            stream.said.clear()
        finally:
            self._writing = None
        if stream.failed and not stream.closed:
            await context.abort(grpc.StatusCode.INTERNAL, "the answer cannot be completed")


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _peer(context: Any) -> str:
    """`ipv4:10.0.0.1:5555` as an address."""
    kind, _, rest = str(context.peer()).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""


def _credentials(tls: ServerTls) -> Any:
    """Those of the files, read again once whoever follows them has found others that can be served."""
    seen = tls.context

    def configuration() -> Any:
        ca = tls.client_ca.read_bytes() if tls.client_ca is not None else None
        pair = [(tls.key.read_bytes(), tls.cert.read_bytes())]
        return grpc.ssl_server_certificate_configuration(pair, root_certificates=ca)

    def changed() -> Any:
        nonlocal seen
        if tls.context is seen:
            return None
        seen = tls.context
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), changed, tls.client_ca is not None)

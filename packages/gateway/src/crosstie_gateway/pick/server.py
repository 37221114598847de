"""The picker's calls: Envoy's external processing, and gRPC's own health checks."""

from collections.abc import Callable

from crosstie_gateway.pick.messages import Malformed, health, service_of
from crosstie_gateway.pick.stream import PickSettings, PickStream
from crosstie_gateway.wire.grpc import INTERNAL, NOT_FOUND, OK, Call, GrpcConnection, Methods
from crosstie_gateway.wire.server import Server

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
_HEALTH = "grpc.health.v1.Health"
# By the standard: whether it lives, and twice whether it may be asked.
_LIVENESS = "liveness"
_CHECKED = ("", "readiness", EXT_PROC)
_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3


class PickCalls:
    """What a connection of Envoy's may call. `ready` says whether requests may come."""

    def __init__(self, server: Server, ready: Callable[[], bool], settings: PickSettings):
        self.server, self._ready, self.settings = server, ready, settings
        self._methods: Methods = {
            b"/%b/Process" % EXT_PROC.encode(): lambda call: _Processing(call, self),
            b"/%b/Check" % _HEALTH.encode(): lambda call: _Check(call, self),
        }

    def speak(self, server: Server) -> GrpcConnection:
        return GrpcConnection(server, self._methods)

    def status(self, service: str) -> int:
        if service == _LIVENESS:
            return _SERVING
        if service in _CHECKED:
            return _SERVING if self._ready() else _NOT_SERVING
        return _UNKNOWN


class _Processing:
    """One request of a client of Envoy's."""

    def __init__(self, call: Call, calls: PickCalls):
        self._call = call
        self._stream = PickStream(calls.server, call.wake, calls.settings, call.on.peer())

    def take(self, message: bytes) -> None:
        try:
            self._stream.take(message)
        except Malformed:
            self._call.end(INTERNAL, "not a message of ext_proc")

    def prepare(self) -> None:
        stream = self._stream
        for message in stream.taken():
            self._call.say(message)
        if stream.failed:
            self._call.end(INTERNAL, "the answer cannot be completed")

    def on_end(self) -> None:
        # Envoy says no more; what is still to be said to it leaves first.
        self._call.end(OK)

    def on_lost(self) -> None:
        self._stream.lost()

    def busy(self) -> bool:
        return True


class _Check:
    def __init__(self, call: Call, calls: PickCalls):
        self._call, self._calls = call, calls
        self._service: str | None = None

    def take(self, message: bytes) -> None:
        try:
            self._service = service_of(message)
        except Malformed:
            self._call.end(INTERNAL, "not a health check")

    def on_end(self) -> None:
        service = self._service
        status = self._calls.status(service) if service is not None else _UNKNOWN
        if status == _UNKNOWN:
            self._call.end(NOT_FOUND, f"no service '{service}'")
        else:
            self._call.say(health(status))
            self._call.end(OK)

    def on_lost(self) -> None: ...
    def prepare(self) -> None: ...
    def busy(self) -> bool:
        return False

"""Somebody who speaks as Envoy does, message by message, so that a test sees each."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from tests.run.gateway.fakes import MODEL
from tests.run.pick.declared import HealthCheckRequest, HealthCheckResponse, ProcessingRequest, ProcessingResponse
from tests.waiting import LIMIT_S

from crosstie_gateway.pick import messages
from crosstie_gateway.pick.messages import FULL_DUPLEX_STREAMED
from crosstie_gateway.pick.server import EXT_PROC

HEALTH = "grpc.health.v1.Health"
NAMESPACE, SERVED = messages.NAMESPACE.decode(), messages.SERVED.decode()
SUBSET_NAMESPACE, SUBSET = messages.SUBSET_NAMESPACE.decode(), messages.SUBSET.decode()


def asked(**more: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **more}).encode()


class Proxy:
    """Of one channel to a picker."""

    def __init__(self, channel: grpc.aio.Channel):
        self.channel = channel

    async def health(self, service: str) -> int:
        check = self.channel.unary_unary(
            f"/{HEALTH}/Check", lambda message: message.SerializeToString(), HealthCheckResponse.FromString
        )
        return int((await check(HealthCheckRequest(service=service), timeout=LIMIT_S)).status)

    def call(self) -> "Call":
        process = self.channel.stream_stream(
            f"/{EXT_PROC}/Process", lambda message: message.SerializeToString(), ProcessingResponse.FromString
        )
        return Call(process(timeout=LIMIT_S))


class Call:
    """One request of a client."""

    def __init__(self, call: Any):
        self._call = call

    async def head(
        self, path: str = "/v1/chat/completions", *, method: str = "POST", ends: bool = False,
        subset: list[str] | None = None, modes: tuple[int, int] = (FULL_DUPLEX_STREAMED, FULL_DUPLEX_STREAMED),
        **headers: str,
    ) -> None:  # fmt: skip
        message = ProcessingRequest()
        message.request_headers.end_of_stream = ends
        fields = {":method": method, ":path": path, "content-type": "application/json"}
        for name, value in {**fields, **{name.replace("_", "-"): value for name, value in headers.items()}}.items():
            message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
        if subset is not None:
            hint = message.metadata_context.filter_metadata.add(key=SUBSET_NAMESPACE)
            values = hint.value.fields[SUBSET].list_value
            values.SetInParent()
            for one in subset:
                values.values.add(string_value=one)
        await self._call.write(message)

    async def body(self, data: bytes, *, ends: bool = True) -> None:
        message = ProcessingRequest()
        message.request_body.body, message.request_body.end_of_stream = data, ends
        await self._call.write(message)

    async def trailers(self, side: str = "request_trailers") -> None:
        message = ProcessingRequest()
        getattr(message, side).SetInParent()
        await self._call.write(message)

    async def answer_head(self, status: int = 200, *, served: str = "", ends: bool = False, **headers: str) -> None:
        message = ProcessingRequest()
        message.response_headers.end_of_stream = ends
        fields = {":status": str(status), "content-type": "application/json"}
        for name, value in {**fields, **{name.replace("_", "-"): value for name, value in headers.items()}}.items():
            message.response_headers.headers.headers.add(key=name, raw_value=value.encode())
        if served:
            entry = message.metadata_context.filter_metadata.add(key=NAMESPACE)
            entry.value.fields[SERVED].string_value = served
        await self._call.write(message)

    async def answer_body(self, data: bytes, *, ends: bool = True) -> None:
        message = ProcessingRequest()
        message.response_body.body, message.response_body.end_of_stream = data, ends
        await self._call.write(message)

    async def says(self) -> Any:
        """The picker's next message; None: it has ended the call."""
        message = await self._call.read()
        return None if message is grpc.aio.EOF else message

    async def done(self) -> None:
        await self._call.done_writing()

    def gone(self) -> None:
        self._call.cancel()

    async def status(self) -> Any:
        return await self._call.code()


@asynccontextmanager
async def proxy(port: int, credentials: Any = None) -> AsyncIterator[Proxy]:
    at = f"localhost:{port}" if credentials is not None else f"127.0.0.1:{port}"
    made = grpc.aio.secure_channel(at, credentials) if credentials is not None else grpc.aio.insecure_channel(at)
    async with made as channel:
        yield Proxy(channel)


def changed(mutation: Any) -> dict[str, str]:
    return {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}

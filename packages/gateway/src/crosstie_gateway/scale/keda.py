"""KEDA's external scaler over gRPC: each supply is a ScaledObject whose metric is the number of replicas to have.

Messages are described here as in KEDA's externalscaler.proto, so that nothing is generated. The target is 1: the
autoscaler behind KEDA asks for as many replicas as the metric says, but ignores steps below a tenth (docs/scaling.md).
"""

from collections.abc import AsyncIterator
from typing import Any

from crosstie.core.errors import BadInput, MissingExtra
from crosstie_gateway.scale.service import ScaleService
from crosstie_gateway.scaler.scaler import ScaleDecision

SERVICE = "externalscaler.ExternalScaler"
METRIC = "crosstie-replicas"
_ENTRY = "ScaledObjectRef.ScalerMetadataEntry*"
_STRING, _BOOL, _INT64, _DOUBLE, _MESSAGE = 9, 8, 3, 1, 11
_ONE, _MANY = 1, 3
# By message: its fields, numbered in this order, each with its type, or the message that it is; *: there are many.
_MESSAGES: dict[str, dict[str, int | str]] = {
    "ScaledObjectRef": {"name": _STRING, "namespace": _STRING, "scalerMetadata": _ENTRY},
    "IsActiveResponse": {"result": _BOOL},
    "MetricSpec": {"metricName": _STRING, "targetSize": _INT64, "targetSizeFloat": _DOUBLE},
    "GetMetricSpecResponse": {"metricSpecs": "MetricSpec*"},
    "GetMetricsRequest": {"scaledObjectRef": "ScaledObjectRef", "metricName": _STRING},
    "MetricValue": {"metricName": _STRING, "metricValue": _INT64, "metricValueFloat": _DOUBLE},
    "GetMetricsResponse": {"metricValues": "MetricValue*"},
}


def messages() -> dict[str, Any]:
    """The classes of the protocol's messages."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise MissingExtra("--keda needs gRPC", "kubernetes", "crosstie-gateway") from None
    file = descriptor_pb2.FileDescriptorProto(name="externalscaler.proto", package="externalscaler", syntax="proto3")
    for name, fields in _MESSAGES.items():
        made = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields.items(), 1):
            if isinstance(kind, int):
                made.field.add(name=field, number=number, type=kind, label=_ONE)
            else:
                label, other = _MANY if kind.endswith("*") else _ONE, f".externalscaler.{kind.removesuffix('*')}"
                made.field.add(name=field, number=number, type=_MESSAGE, label=label, type_name=other)
        if name == "ScaledObjectRef":
            entry = made.nested_type.add(name="ScalerMetadataEntry")
            entry.options.map_entry = True
            for field, number in (("key", 1), ("value", 2)):
                entry.field.add(name=field, number=number, type=_STRING, label=_ONE)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"externalscaler.{name}")) for name in _MESSAGES}


class ExternalScaler:
    """A ScaledObject's supply is the `supply` of its trigger's metadata, or has the ScaledObject's own name."""

    def __init__(self, service: ScaleService):
        self.service, self.messages = service, messages()
        self.supplies = [supply.name for supply in service.scaler.rules.supplies]

    async def _supply(self, ref: Any, context: Any) -> str:
        import grpc

        name = ref.scalerMetadata.get("supply") or ref.name
        if name not in self.supplies:
            said = f"no supply '{name}': there are {', '.join(self.supplies)}; set `supply` in the trigger's metadata"
            await context.abort(grpc.StatusCode.NOT_FOUND, said)
        return str(name)

    async def _decision(self, context: Any) -> ScaleDecision:
        import grpc

        made = self.service.current()
        if made is None:
            # KEDA then keeps what there is, or what its `fallback` says.
            why = self.service.trouble or "nothing was decided yet"
            await context.abort(grpc.StatusCode.UNAVAILABLE, why)
        assert made is not None
        return made

    async def is_active(self, request: Any, context: Any) -> Any:
        supply = await self._supply(request, context)
        decision = await self._decision(context)
        return self.messages["IsActiveResponse"](result=decision.orders[supply].replicas > 0)

    async def stream_is_active(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """For `external-push`: told again with each decision, so that a first replica need not wait for a poll."""
        supply = await self._supply(request, context)
        made = self.service.current()
        while True:
            if made is not None:
                yield self.messages["IsActiveResponse"](result=made.orders[supply].replicas > 0)
            async with self.service.decided:
                await self.service.decided.wait()
            made = self.service.current()

    async def get_metric_spec(self, request: Any, context: Any) -> Any:
        await self._supply(request, context)
        spec = self.messages["MetricSpec"](metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
        return self.messages["GetMetricSpecResponse"](metricSpecs=[spec])

    async def get_metrics(self, request: Any, context: Any) -> Any:
        supply = await self._supply(request.scaledObjectRef, context)
        count = (await self._decision(context)).orders[supply].replicas
        value = self.messages["MetricValue"](metricName=METRIC, metricValue=count, metricValueFloat=float(count))
        return self.messages["GetMetricsResponse"](metricValues=[value])


async def serve_keda(service: ScaleService, address: str) -> tuple[Any, int]:
    """The server, to be stopped by the caller, and its port."""
    scaler = ExternalScaler(service)
    try:
        import grpc
    except ImportError:
        raise MissingExtra("--keda needs gRPC", "kubernetes", "crosstie-gateway") from None

    def method(handler: Any, asked: str, make: Any = grpc.unary_unary_rpc_method_handler) -> Any:
        return make(
            handler,
            request_deserializer=scaler.messages[asked].FromString,
            response_serializer=lambda answer: answer.SerializeToString(),
        )

    handlers = {
        "IsActive": method(scaler.is_active, "ScaledObjectRef"),
        "StreamIsActive": method(scaler.stream_is_active, "ScaledObjectRef", grpc.unary_stream_rpc_method_handler),
        "GetMetricSpec": method(scaler.get_metric_spec, "ScaledObjectRef"),
        "GetMetrics": method(scaler.get_metrics, "GetMetricsRequest"),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        raise BadInput(f"--keda {address}: cannot be listened on") from None
    await server.start()
    return server, port

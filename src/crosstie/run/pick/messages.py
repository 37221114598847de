"""Envoy's external processing protocol, as much of it as an endpoint picker needs: the messages, and how replies are
made.

The messages are declared here and not taken from Envoy's published files: those are 21 MB of modules, and install a
package called `test` beside everybody's own. On the wire names do not matter, only numbers and types, and what is not
declared is skipped. They live in a pool of their own, so that a process which has Envoy's files as well has no clash.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from crosstie.core.errors import BadInput

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
    from google.protobuf.message import DecodeError as DecodeError
except ImportError:
    raise BadInput("the picker needs the library protobuf: pip install 'crosstie[kubernetes]'") from None

# The standard's own names: gateway-api-inference-extension, docs/proposals/004-endpoint-picker-protocol, v1.0.0.
DESTINATION = b"x-gateway-destination-endpoint"
NAMESPACE = "envoy.lb"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
# How bodies are sent (BodySendMode).
FULL_DUPLEX_STREAMED = 4
# Some proxies take no longer pieces of a body than 64 KiB.
_MOST_PIECE = 60_000
_OVERWRITE = 2
_PACKAGE = "crosstie.pick"

# Type, name and number. *: any number of them; |: one of these at a time, the message's kind.
_DECLARED = {
    "HeaderValue": ("string key 1", "string value 2", "bytes raw_value 3"),
    "HeaderMap": ("HeaderValue* headers 1",),
    "HeaderValueOption": ("HeaderValue header 1", "int32 append_action 3"),
    "HeaderMutation": ("HeaderValueOption* set_headers 1", "string* remove_headers 2"),
    "HttpHeaders": ("HeaderMap headers 1", "bool end_of_stream 3"),
    "HttpBody": ("bytes body 1", "bool end_of_stream 2"),
    "HttpTrailers": ("HeaderMap trailers 1",),
    "NamedStruct": ("string key 1", "Struct value 2"),
    "Metadata": ("NamedStruct* filter_metadata 1",),
    "ProtocolConfiguration": ("int32 request_body_mode 1", "int32 response_body_mode 2"),
    "ProcessingRequest": (
        "|HttpHeaders request_headers 2", "|HttpHeaders response_headers 3", "|HttpBody request_body 4",
        "|HttpBody response_body 5", "|HttpTrailers request_trailers 6", "|HttpTrailers response_trailers 7",
        "Metadata metadata_context 8", "NamedStruct* attributes 9", "ProtocolConfiguration protocol_config 11",
    ),
    "StreamedBodyResponse": ("bytes body 1", "bool end_of_stream 2"),
    "BodyMutation": ("StreamedBodyResponse streamed_response 3",),
    "CommonResponse": ("HeaderMutation header_mutation 2", "BodyMutation body_mutation 3", "bool clear_route_cache 5"),
    "HeadersResponse": ("CommonResponse response 1",),
    "BodyResponse": ("CommonResponse response 1",),
    "TrailersResponse": ("HeaderMutation header_mutation 1",),
    "HttpStatus": ("int32 code 1",),
    "ImmediateResponse": ("HttpStatus status 1", "HeaderMutation headers 2", "bytes body 3", "string details 5"),
    "ProcessingResponse": (
        "HeadersResponse request_headers 1", "HeadersResponse response_headers 2", "BodyResponse request_body 3",
        "BodyResponse response_body 4", "TrailersResponse request_trailers 5", "TrailersResponse response_trailers 6",
        "ImmediateResponse immediate_response 7", "Struct dynamic_metadata 8",
    ),
    # Of gRPC's own health checks.
    "HealthCheckRequest": ("string service 1",),
    "HealthCheckResponse": ("int32 status 1",),
}  # fmt: skip


def _declared() -> dict[str, Any]:
    file, field = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FieldDescriptorProto
    plain = {name: getattr(field, f"TYPE_{name.upper()}") for name in ("string", "bytes", "bool", "int32")}
    file.name, file.package, file.syntax = "crosstie/pick.proto", _PACKAGE, "proto3"
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in _DECLARED.items():
        message = file.message_type.add(name=name)
        for one in fields:
            kind, called, number = one.split()
            of, repeated = kind.strip("*|"), kind.endswith("*")
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            made = message.field.add(name=called, number=int(number), label=label)
            made.type = plain.get(of, field.TYPE_MESSAGE)
            if of not in plain:
                made.type_name = ".google.protobuf.Struct" if of == "Struct" else f".{_PACKAGE}.{of}"
            if kind.startswith("|"):
                made.oneof_index = 0
        if fields[0].startswith("|"):
            message.oneof_decl.add(name="kind")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    find, made_of = pool.FindMessageTypeByName, message_factory.GetMessageClass
    return {name: made_of(find(f"{_PACKAGE}.{name}")) for name in _DECLARED}


_CLASSES = _declared()
ProcessingRequest = _CLASSES["ProcessingRequest"]
ProcessingResponse = _CLASSES["ProcessingResponse"]
HealthCheckRequest = _CLASSES["HealthCheckRequest"]
HealthCheckResponse = _CLASSES["HealthCheckResponse"]
Fields = Sequence[tuple[bytes, bytes]]


# What Envoy says


def fields_of(headers: Any) -> list[tuple[bytes, bytes]]:
    """Names and values of a header map. Envoy writes values as bytes; those who write text are understood too."""
    return [(one.key.encode("latin-1", "replace"), one.raw_value or one.value.encode()) for one in headers.headers]


def _found(entries: Iterable[Any], namespace: str, key: str) -> Any:
    """The value under a key of a namespace; None: there is none."""
    for entry in entries:
        if entry.key == namespace and key in entry.value.fields:
            return entry.value.fields[key]
    return None


def subset_of(message: Any) -> tuple[str, ...] | None:
    """The endpoints that it may go to, as the data plane says; None: it says nothing."""
    value = _found(message.metadata_context.filter_metadata, SUBSET_NAMESPACE, SUBSET)
    if value is None:
        return None
    # A list by the standard; some write what they also write into headers.
    said = [one.string_value for one in value.list_value.values] or value.string_value.split(",")
    return tuple(one.strip() for one in said if one.strip())


def served_by(message: Any) -> str:
    """The endpoint that has answered, as the data plane says; empty: it does not."""
    value = _found(message.metadata_context.filter_metadata, NAMESPACE, SERVED)
    return (value.string_value if value is not None else "") or attribute(message, "upstream.address")


def attribute(message: Any, name: str) -> str:
    """Of a request, where Envoy was told to send it (`response_attributes`)."""
    for entry in message.attributes:
        if name in entry.value.fields:
            return str(entry.value.fields[name].string_value)
    return ""


# What Envoy is told


def _mutate(mutation: Any, given: Fields, removed: Iterable[bytes] = ()) -> None:
    for name, value in given:
        option = mutation.set_headers.add()
        option.append_action = _OVERWRITE
        option.header.key, option.header.raw_value = name.decode("latin-1"), value
    mutation.remove_headers.extend(name.decode("latin-1") for name in removed)


def picked(endpoints: str, given: Fields, removed: Iterable[bytes]) -> Any:
    """The head of the request goes on, to the first of these endpoints, or the next where that fails. Header and
    metadata have the same value: which of them a proxy goes by is not laid down."""
    message = ProcessingResponse()
    common = message.request_headers.response
    common.clear_route_cache = True
    _mutate(common.header_mutation, [(DESTINATION, endpoints.encode()), *given], removed)
    metadata = message.dynamic_metadata.fields[NAMESPACE].struct_value
    metadata.fields[DESTINATION.decode()].string_value = endpoints
    return message


def headed(given: Fields, removed: Iterable[bytes]) -> Any:
    """The head of the answer goes on, with these changes."""
    message = ProcessingResponse()
    message.response_headers.SetInParent()
    if given or removed:
        _mutate(message.response_headers.response.header_mutation, given, removed)
    return message


def pieces(side: str, body: bytes, *, ends: bool) -> list[Any]:
    """A body, or the next of it; `side`: "request_body" or "response_body"; `ends`: nothing follows."""
    made = []
    for at in range(0, max(len(body), 1), _MOST_PIECE):
        message = ProcessingResponse()
        streamed = getattr(message, side).response.body_mutation.streamed_response
        streamed.body = body[at : at + _MOST_PIECE]
        streamed.end_of_stream = ends and at + _MOST_PIECE >= len(body)
        made.append(message)
    return made


def trailed(side: str) -> Any:
    """The trailers go on as they are; `side`: "request_trailers" or "response_trailers"."""
    message = ProcessingResponse()
    getattr(message, side).SetInParent()
    return message


def answered(status: int, given: Fields, body: bytes) -> Any:
    """An answer of the picker's own, in the place of any other."""
    message = ProcessingResponse()
    immediate = message.immediate_response
    immediate.status.code, immediate.body, immediate.details = status, body, "crosstie_pick"
    _mutate(immediate.headers, given)
    return message

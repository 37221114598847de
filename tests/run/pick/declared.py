"""Envoy's messages by protobuf itself: the second opinion on what the picker reads and writes by hand.

Declared here and not taken from Envoy's published files: those are 21 MB of modules, and install a package called `test`
beside everybody's own. They live in a pool of their own, so that a process which has Envoy's files as well has no clash.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

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

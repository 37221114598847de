"""Messages of Envoy's as they are read and written by hand, beside protobuf's own reading of the same."""

import contextlib
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tests.run.pick.declared import HealthCheckRequest, HealthCheckResponse, ProcessingRequest, ProcessingResponse

from crosstie_gateway.pick import messages
from crosstie_gateway.pick.messages import Malformed, Said

# Written by Envoy's own files (xds-protos 1.85.0): a request's head with a subset, the modes and an attribute, and a
# piece of an answer with the endpoint that served it.
HEAD = bytes.fromhex(
    "12580a560a0f0a073a6d6574686f641a04504f53540a210a053a706174681a182f76312f636861742f636f6d706c6574696f6e733f613d310a"
    "200a0c636f6e74656e742d747970651a106170706c69636174696f6e2f6a736f6e42690a670a14656e766f792e6c622e7375627365745f6869"
    "6e74124f0a4d0a25782d676174657761792d64657374696e6174696f6e2d656e64706f696e742d737562736574122432220a0f1a0d31302e30"
    "2e302e313a383030300a0f1a0d31302e302e302e323a383030304a440a1b656e766f792e66696c746572732e687474702e6578745f70726f63"
    "12250a230a10757073747265616d2e61646472657373120f1a0d31302e302e302e313a383030305a0408041004"
)
PIECE = bytes.fromhex(
    "2a050a0178100142480a460a08656e766f792e6c62123a0a380a25782d676174657761792d64657374696e6174696f6e2d656e64706f696e74"
    "2d736572766564120f1a0d31302e302e302e323a38303030"
)


def test_messages_are_read_as_envoys_own_files_write_them() -> None:
    head = Said(HEAD)
    assert head.kind == messages.REQUEST_HEADERS
    assert dict(head.fields)[b":path"] == b"/v1/chat/completions?a=1"
    assert head.subset == ("10.0.0.1:8000", "10.0.0.2:8000")
    assert head.served == "10.0.0.1:8000"
    assert head.modes == (messages.FULL_DUPLEX_STREAMED, messages.FULL_DUPLEX_STREAMED)
    piece = Said(PIECE)
    assert (piece.kind, piece.body, piece.ends) == (messages.RESPONSE_BODY, b"x", True)
    assert piece.served == "10.0.0.2:8000"
    assert piece.subset is None


text, name = st.text(max_size=300), st.sampled_from(["", "a", "upstream.address", "response.code_details"])
headers = st.lists(st.tuples(st.text(st.characters(max_codepoint=126), max_size=200), st.binary(max_size=200)))
namespaces = st.sampled_from([messages.NAMESPACE.decode(), messages.SUBSET_NAMESPACE.decode(), "other"])
keys = st.sampled_from([messages.SERVED.decode(), messages.SUBSET.decode(), "other"])
values = st.one_of(text, st.floats(), st.booleans(), st.lists(text, max_size=3))


def put(value: Any, said: Any) -> None:
    """A value into protobuf's own kind of value."""
    if isinstance(said, str):
        value.string_value = said
    elif isinstance(said, bool):
        value.bool_value = said
    elif isinstance(said, float):
        value.number_value = said
    else:
        value.list_value.SetInParent()
        for one in said:
            value.list_value.values.add(string_value=one)


@given(st.sampled_from(["request_headers", "response_headers"]), headers, st.booleans(), st.none() | st.integers(0, 9))
def test_heads_are_read_as_protobuf_writes_them(
    kind: str, fields: list[tuple[str, bytes]], ends: bool, mode: int | None
) -> None:
    message = ProcessingRequest()
    head = getattr(message, kind)
    head.end_of_stream = ends
    for key, value in fields:
        head.headers.headers.add(key=key, raw_value=value)
    if mode is not None:
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = mode, 4
    said = Said(message.SerializeToString())
    assert (said.kind, said.ends) == (2 if kind == "request_headers" else 3, ends)
    assert said.fields == [(key.encode(), value) for key, value in fields]
    assert said.modes == (None if mode is None else (mode, 4))


def test_a_header_in_text_is_understood() -> None:
    message = ProcessingRequest()
    message.request_headers.headers.headers.add(key="a", value="b")
    assert Said(message.SerializeToString()).fields == [(b"a", b"b")]


@given(st.sampled_from(["request_body", "response_body"]), st.binary(max_size=70_000), st.booleans())
def test_bodies_are_read_and_written_as_protobuf_does(kind: str, body: bytes, ends: bool) -> None:
    message = ProcessingRequest()
    getattr(message, kind).body, getattr(message, kind).end_of_stream = body, ends
    said = Said(message.SerializeToString())
    assert (said.body, said.ends) == (body, ends)
    made = [ProcessingResponse.FromString(one) for one in messages.pieces(said.kind, body, ends=ends)]
    streamed = [getattr(one, kind).response.body_mutation.streamed_response for one in made]
    assert b"".join(one.body for one in streamed) == body
    assert [one.end_of_stream for one in streamed] == [False] * (len(streamed) - 1) + [ends]


@given(st.dictionaries(namespaces, st.dictionaries(keys, values)), st.dictionaries(name, values))
def test_metadata_and_attributes_are_read_as_protobuf_writes_them(
    metadata: dict[str, dict[str, Any]], attributes: dict[str, Any]
) -> None:
    message = ProcessingRequest()
    message.response_trailers.SetInParent()
    for namespace, fields in metadata.items():
        entry = message.metadata_context.filter_metadata.add(key=namespace)
        for key, value in fields.items():
            put(entry.value.fields[key], value)
    entry = message.attributes.add(key="envoy.filters.http.ext_proc")
    for key, value in attributes.items():
        put(entry.value.fields[key], value)
    said = Said(message.SerializeToString())

    def told(fields: dict[str, Any], key: str) -> str:
        return fields[key] if isinstance(fields.get(key), str) else ""

    of_lb = metadata.get(messages.NAMESPACE.decode(), {})
    assert said.kind == messages.RESPONSE_TRAILERS
    assert said.served == told(of_lb, messages.SERVED.decode()) or told(attributes, "upstream.address")
    assert said.details == told(attributes, "response.code_details")
    hint = metadata.get(messages.SUBSET_NAMESPACE.decode(), {}).get(messages.SUBSET.decode())
    if hint is None:
        assert said.subset is None
    else:
        found = hint if isinstance(hint, list) else hint.split(",") if isinstance(hint, str) else []
        assert said.subset == tuple(one.strip() for one in found if one.strip())


FIELDS = [(b"a", b"b" * 200), (b"content-type", b"text/plain")]


def shown(mutation: Any) -> Any:
    options = [(one.header.key.encode(), one.header.raw_value) for one in mutation.set_headers]
    assert {one.append_action for one in mutation.set_headers} <= {2}
    return options, list(mutation.remove_headers)


def test_replies_are_what_protobuf_reads() -> None:
    picked = ProcessingResponse.FromString(messages.picked("1.2.3.4:5,1.2.3.4:6", FIELDS, [b"gone"]))
    common = picked.request_headers.response
    assert shown(common.header_mutation) == ([(messages.DESTINATION, b"1.2.3.4:5,1.2.3.4:6"), *FIELDS], ["gone"])
    assert common.clear_route_cache
    within = picked.dynamic_metadata.fields[messages.NAMESPACE.decode()].struct_value
    assert within.fields[messages.DESTINATION.decode()].string_value == "1.2.3.4:5,1.2.3.4:6"
    headed = ProcessingResponse.FromString(messages.headed(FIELDS, [b"gone"]))
    assert shown(headed.response_headers.response.header_mutation) == (FIELDS, ["gone"])
    assert ProcessingResponse.FromString(messages.headed((), ())).HasField("response_headers")
    for kind, field in (
        (messages.REQUEST_TRAILERS, "request_trailers"),
        (messages.RESPONSE_TRAILERS, "response_trailers"),
    ):
        assert ProcessingResponse.FromString(messages.trailed(kind)).HasField(field)
    immediate = ProcessingResponse.FromString(messages.answered(503, FIELDS, b"x" * 300)).immediate_response
    assert (immediate.status.code, immediate.body, immediate.details) == (503, b"x" * 300, "crosstie_pick")
    assert shown(immediate.headers) == (FIELDS, [])


def test_health_checks_are_read_and_answered() -> None:
    assert messages.service_of(HealthCheckRequest(service="readiness").SerializeToString()) == "readiness"
    assert messages.service_of(b"") == ""
    assert HealthCheckResponse.FromString(messages.health(2)).status == 2


@given(st.binary(max_size=60))
def test_what_is_no_message_is_refused_or_says_nothing(data: bytes) -> None:
    with contextlib.suppress(Malformed):
        assert Said(data).kind in range(8)


@pytest.mark.parametrize(
    "data", [b"\x12", b"\x12\x05a", b"\xff" * 11, b"\x02\x00", b"\x13", b"\x09ab", b"\x12\x02\x0a\x05"]
)
def test_what_is_cut_off_or_of_no_known_kind_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        Said(data)


def test_cut_anywhere_it_is_refused_or_says_less() -> None:
    for end in range(len(HEAD)):
        try:
            assert Said(HEAD[:end]).fields in ([], Said(HEAD).fields)
        except Malformed:
            continue


def test_fields_that_are_not_known_are_skipped() -> None:
    unknown = b"\xfa\x01\x02ab" + b"\x70\x96\x01" + b"\x79" + b"8" * 8 + b"\x7d" + b"4" * 4
    assert Said(unknown + PIECE + unknown).body == b"x"

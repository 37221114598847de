"""The fields of bodies that the gateway decodes: as msgspec takes them, in a module of their own.

Compiled modules lose the annotations that msgspec reads, so this one stays as it is.
"""

import msgspec


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()


class Fields(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | msgspec.UnsetType | None = msgspec.UNSET
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    tools: msgspec.Raw = msgspec.Raw()
    messages: list[Message] = []
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


class FewFields(msgspec.Struct):
    """What is still read of a body that has a field of the wrong kind."""

    model: str | None = None
    messages: msgspec.Raw = msgspec.Raw()


class UsageFields(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class ResponseFields(msgspec.Struct):
    usage: UsageFields | None = None


class AnswerFields(msgspec.Struct):
    usage: UsageFields | None = None
    # The last event of a streamed response carries the whole response.
    response: ResponseFields | None = None


decode = msgspec.json.Decoder(Fields).decode
decode_few = msgspec.json.Decoder(FewFields).decode
decode_parts = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
decode_answer = msgspec.json.Decoder(AnswerFields).decode

"""The fields of bodies that the gateway decodes. Not compiled: compiled modules lose the annotations that msgspec
reads."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

# One for all of them, so that what is not there is known by its being this one.
ABSENT = msgspec.Raw()


class StreamOptionFields(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Fields(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptionFields | msgspec.UnsetType | None = msgspec.UNSET
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    # Of whatever kind: some engines do not look at them.
    user: Any = None
    prompt_cache_key: Any = None
    previous_response_id: Any = None
    # What a model reads, in the bytes in which it came: of whichever API, since an engine may have all of them.
    messages: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    input: msgspec.Raw = ABSENT
    suffix: msgspec.Raw = ABSENT
    instructions: msgspec.Raw = ABSENT
    system: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    functions: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    query: msgspec.Raw = ABSENT
    text_1: msgspec.Raw = ABSENT
    text_2: msgspec.Raw = ABSENT
    # What it may be given to read, or only be held to.
    chat_template: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT
    response_format: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT
    structured_outputs: msgspec.Raw = ABSENT
    guided_json: msgspec.Raw = ABSENT
    guided_grammar: msgspec.Raw = ABSENT
    json_schema: msgspec.Raw = ABSENT
    grammar: msgspec.Raw = ABSENT


# Fields that are kept as bytes: where they begin, and those that a model may only be held to.
_NAMES = Fields.__struct_fields__
READ_AT, HELD_TO_AT = _NAMES.index("messages"), _NAMES.index("chat_template")


class UsageFields(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    # What is wrong in them makes no count wrong.
    prompt_tokens_details: Any = None
    input_tokens_details: Any = None


class PrefilledFields(msgspec.Struct):
    """What a prefill engine answers: where to fetch the prompt's cache, and how much of it was there before."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    usage: UsageFields | None = None


class ResponseFields(msgspec.Struct):
    # Of whatever kind: an odd name makes no count wrong.
    id: Any = ""
    usage: UsageFields | None = None


class AnswerFields(msgspec.Struct):
    id: Any = ""
    usage: UsageFields | None = None
    # The last event of a streamed response carries the whole response.
    response: ResponseFields | None = None
    # Whether they are there, and whether there is anything in it.
    choices: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT


class DeltaFields(msgspec.Struct):
    """What an event adds to a chat's answer. Whatever is not its text cannot be given to another engine."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()
    audio: msgspec.Raw = msgspec.Raw()


class ChoiceFields(msgspec.Struct):
    index: int = 0
    delta: DeltaFields | None = None
    # Of a completion.
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class ChunkFields(msgspec.Struct):
    """An event of a streamed chat or completion; what names the answer stays as it was written."""

    id: msgspec.Raw = msgspec.Raw()
    created: msgspec.Raw = msgspec.Raw()
    model: msgspec.Raw = msgspec.Raw()
    system_fingerprint: msgspec.Raw = msgspec.Raw()
    object: str = ""
    choices: list[ChoiceFields] = []
    usage: UsageFields | None = None


class EndFields(msgspec.Struct):
    """How a choice of a whole answer ended; who says nothing of it, such as a list of vectors, has none."""

    finish_reason: str | None = ""


class EndsFields(msgspec.Struct):
    choices: list[EndFields] = []


class ModelFields(msgspec.Struct):
    id: str = ""
    owned_by: str = ""


class ModelsFields(msgspec.Struct):
    data: list[ModelFields] = []


# Engines take "16" and 16.0 for 16: such requests are counted like others. What neither reads so is refused here.
decode = msgspec.json.Decoder(Fields, strict=False).decode
decode_any = msgspec.json.Decoder().decode
decode_parts = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
decode_prefilled = msgspec.json.Decoder(PrefilledFields).decode
decode_answer = msgspec.json.Decoder(AnswerFields).decode
decode_chunk = msgspec.json.Decoder(ChunkFields).decode
decode_ends = msgspec.json.Decoder(EndsFields).decode
decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
decode_models = msgspec.json.Decoder(ModelsFields).decode
decode_chunks = msgspec.json.Decoder(list[ChunkFields]).decode

T = TypeVar("T")


def readable(decode: Callable[[bytes], T], data: bytes) -> T | None:
    """What it says; None: it cannot be read."""
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None

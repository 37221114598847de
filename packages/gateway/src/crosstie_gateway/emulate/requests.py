"""Bodies of requests as what an engine needs to know: the prompt's bytes, its tokens, and how long the answer gets."""

import json
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import msgspec

from crosstie.core.errors import BadInput
from crosstie.core.images import ImageRule, size_of_data_url
from crosstie_gateway.emulate.kv_events import BLOCK_BYTES
from crosstie_gateway.emulate.schemas import example
from crosstie_gateway.emulate.tokens import (
    AUDIO_TOKENS,
    BYTES_PER_TOKEN,
    IMAGE_TOKENS,
    begun,
    count,
    drawn_length,
    pieces,
)


class EngineError(Exception):
    """A request that an engine would not take."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None):
        self.status, self.kind, self.param = status, kind, param
        super().__init__(message)


def bad_request(message: str, param: str | None = None) -> EngineError:
    return EngineError(400, "BadRequestError", message, param)


class ContentPart(msgspec.Struct):
    type: str = "text"
    text: str = ""
    image_url: msgspec.Raw = msgspec.Raw()
    input_audio: msgspec.Raw = msgspec.Raw()
    audio_url: msgspec.Raw = msgspec.Raw()


class Message(msgspec.Struct):
    """A message of a chat, or an item of the Responses API, which without a role is a tool's call or result."""

    role: str = "tool"
    content: str | list[ContentPart] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()
    arguments: str = ""
    output: str | list[ContentPart] = ""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Function(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | bool | None = None


class _Tool(msgspec.Struct):
    function: _Function | None = None


class _Schema(msgspec.Struct):
    schema: dict[str, Any] | bool | None = None


class _Format(msgspec.Struct):
    """Of an answer: Chat's, or the Responses API's, which has the schema in it."""

    type: str = "text"
    json_schema: _Schema | None = None
    schema: dict[str, Any] | bool | None = None


class _TextOptions(msgspec.Struct):
    format: _Format | None = None


class _Body(msgspec.Struct):
    """What all ways of generating share; `model` None: the one that is there."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    seed: int | None = None
    min_tokens: int | None = 0
    ignore_eos: bool | None = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    tools: msgspec.Raw = msgspec.Raw()
    # How prefill and decode replicas are told of each other.
    kv_transfer_params: dict[str, Any] | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    session_id: str | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """The longest answer, and the key that says so."""
        for key in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
            value = getattr(self, key)
            if value is not None:
                return key, value
        return "max_tokens", None


class ChatBody(_Body, kw_only=True):
    messages: list[Message]
    add_generation_prompt: bool | None = None
    # The last message is the beginning of the answer.
    continue_final_message: bool | None = False
    tool_choice: str | _Tool | None = None
    response_format: _Format | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0


# Text, several texts, or tokens as numbers.
Prompt: TypeAlias = str | list[str | int | list[int]]


class CompletionBody(_Body, kw_only=True):
    prompt: Prompt
    response_format: _Format | None = None
    echo: bool | None = False
    logprobs: int | None = None


class ResponseBody(_Body, kw_only=True):
    input: str | list[Message]
    instructions: str | None = None
    previous_response_id: str | None = None
    text: _TextOptions | None = None


class Session(msgspec.Struct):
    session_id: str


class EmbeddingBody(msgspec.Struct, kw_only=True):
    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """What is to be in an answer beside filler."""

    # All that the answer says, where a format or a tool prescribes it: plain ASCII.
    text: str | None = None
    # The tool that is called, whose arguments the text is.
    calls: str = ""
    # Alternatives to each token; None: nothing is told of tokens.
    logprobs: int | None = None
    # The prompt as it is repeated before the answer, and its tokens.
    echo: str = ""
    echoed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What an engine is to do."""

    prompt: bytes
    prompt_tokens: int
    output_tokens: int = 1
    ending: Literal["stop", "length"] = "stop"
    streams: bool = False
    include_usage: bool = False
    # Whether every event has the count so far.
    continuous: bool = False
    # Tokens of the answer that the prompt ends with, and those that are still to be written.
    begun: int = 0
    written: int = 0
    # Of a disaggregated service: what the request says of the cache that is handed over.
    handover: dict[str, Any] | None = None
    # The same of SGLang: host, port and room.
    meeting: tuple[str | None, int | None, int] | None = None
    # Of the blocks that the prompt is cut into for the cache.
    block_bytes: int = BLOCK_BYTES
    told: Told = Told()
    session: str | None = None


def decode(body: bytes, type: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.DecodeError as error:
        raise bad_request(str(error)) from None
    except UnicodeDecodeError:
        raise bad_request("the body is not UTF-8") from None


class PromptText:
    """A prompt that grows: bytes for the prefix cache, tokens for the engine. Roles and marks of pictures tell prompts
    apart and count no tokens. `images`: how the model cuts pictures up, where that is known."""

    __slots__ = ("images", "pieces", "tokens")

    def __init__(self, images: ImageRule | None = None) -> None:
        self.images = images
        self.pieces: list[bytes] = []
        self.tokens = 0

    def mark(self, text: str) -> None:
        self.pieces.append(text.encode())

    def add(self, text: str | bytes) -> None:
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        self.pieces.append(raw)
        self.tokens += count(len(raw))

    def json(self, raw: msgspec.Raw) -> None:
        """What templates write into a prompt as it is, such as definitions of tools."""
        said = bytes(raw)
        if said not in (b"", b"null", b"[]"):
            self.add(said)

    def messages(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.mark(message.role + "\n")
            for content in (message.content, message.arguments, message.output):
                if isinstance(content, str):
                    self.add(content)
                elif content is not None:
                    for part in content:
                        self.part(part)
            self.json(message.tool_calls)
            self.mark("\n")

    def part(self, part: ContentPart) -> None:
        kind = part.type
        if kind in ("text", "input_text", "output_text", "refusal"):
            self.add(part.text)
            return
        if "image" in kind:
            seen, tokens = part.image_url, self._picture(bytes(part.image_url))
        elif "audio" in kind:
            seen, tokens = part.input_audio or part.audio_url, AUDIO_TOKENS
        else:
            raise bad_request(f"a part of type '{kind}' is not known", "messages")
        self.mark(f"<{kind} {zlib.crc32(bytes(seen)):08x}>")
        self.tokens += tokens

    def _picture(self, said: bytes) -> int:
        rule, start = self.images, said.find(b'"data:image')
        if rule is None:
            return IMAGE_TOKENS
        size = size_of_data_url(said[start + 1 : said.find(b'"', start + 1)]) if start >= 0 else None
        seen = rule.seen(*size) if size is not None else rule.unknown
        return IMAGE_TOKENS if seen is None else seen.tokens


def chat_text(body: ChatBody, images: ImageRule | None = None) -> PromptText:
    if not body.messages:
        raise bad_request("messages is empty", "messages")
    text, messages = PromptText(images), body.messages
    text.json(body.tools)
    if not body.continue_final_message:
        text.messages(messages)
        text.mark("assistant\n")
        return text
    if body.add_generation_prompt is not False:
        raise bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    if messages[-1].role != "assistant" or not isinstance(messages[-1].content, str):
        raise bad_request("Cannot set `continue_final_message` when the last message is not from the assistant.")
    text.messages(messages[:-1])
    text.mark("assistant\n")
    text.add(messages[-1].content)
    return text


def response_text(body: ResponseBody, images: ImageRule | None = None) -> PromptText:
    if body.previous_response_id is not None:
        message = f"Response with id '{body.previous_response_id}' not found: emulated responses are not kept"
        raise EngineError(404, "NotFoundError", message, "previous_response_id")
    if not body.input:
        raise bad_request("input is empty", "input")
    text = PromptText(images)
    given = [Message(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    text.json(body.tools)
    if body.instructions:
        text.messages([Message(role="system", content=body.instructions)])
    text.messages(given)
    text.mark("assistant\n")
    return text


def completion_text(body: CompletionBody, images: ImageRule | None = None) -> PromptText:
    texts = prompts(body.prompt, "prompt")
    if len(texts) > 1:
        raise bad_request(f"{len(texts)} prompts: an emulated replica takes one a request", "prompt")
    return texts[0]


def prompts(given: Prompt, param: str) -> list[PromptText]:
    """One for each text or list of token numbers."""
    if not given:
        raise bad_request(f"{param} is empty", param)
    if isinstance(given, str):
        several: list[Any] = [given]
    else:
        several = [given] if isinstance(given[0], int) else given
    texts = []
    for prompt in several:
        text = PromptText()
        if isinstance(prompt, str):
            text.add(prompt)
        elif isinstance(prompt, list) and all(isinstance(token, int) and 0 <= token < 2**31 for token in prompt):
            # Four bytes a token, as text has.
            text.add(array("i", prompt).tobytes())
        else:
            raise bad_request(f"{param} mixes texts and numbers of tokens, or has numbers that are none", param)
        texts.append(text)
    return texts


_MOST_LOGPROBS = 20


def _told(body: _Body) -> Told:
    """Refused as vLLM refuses it."""
    if isinstance(body, CompletionBody):
        return _told_of_completion(body)
    if isinstance(body, ResponseBody):
        return Told(text=_prescribed(body.text.format if body.text else None, "text.format"))
    if not isinstance(body, ChatBody):
        return Told()
    if body.top_logprobs and not body.logprobs:
        raise bad_request("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    logprobs = _logprobs(body.top_logprobs or 0, "top_logprobs") if body.logprobs else None
    tool = _called(body)
    if tool is None:
        text = _prescribed(body.response_format, "response_format")
    else:
        text = _instance({"type": "object"} if tool.parameters is None else tool.parameters, "tools")
    if text is not None and body.continue_final_message and isinstance(body.messages[-1].content, str):
        text = text.removeprefix(body.messages[-1].content)
    return Told(text=text, calls=tool.name if tool else "", logprobs=logprobs)


def _told_of_completion(body: CompletionBody) -> Told:
    prompt: Any = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        echo, tokens = prompt, pieces(prompt)
    else:
        tokens = tuple(f"token_id:{token}" for token in prompt)
        echo = "".join(tokens)
    logprobs = None if body.logprobs is None else _logprobs(body.logprobs, "logprobs")
    said = Told(text=_prescribed(body.response_format, "response_format"), logprobs=logprobs)
    return replace(said, echo=echo, echoed=tokens) if body.echo else said


def _logprobs(count: int, param: str) -> int:
    if not 0 <= count <= _MOST_LOGPROBS:
        raise bad_request(f"{param} is {count}: from 0 to {_MOST_LOGPROBS}", param)
    return count


def _called(body: ChatBody) -> _Function | None:
    """The tool that must be called: the named or the first one; None: an answer in words."""
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    try:
        tools = msgspec.json.decode(bytes(body.tools) or b"[]", type=list[_Tool] | None) or []
    except msgspec.DecodeError as error:
        raise bad_request(f"tools: {error}", "tools") from None
    functions = [tool.function for tool in tools if tool.function is not None]
    if not functions:
        raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if choice == "required":
        return functions[0]
    name = choice.function.name if isinstance(choice, _Tool) and choice.function else choice
    named = next((function for function in functions if function.name == name), None)
    if named is None:
        why = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise bad_request(why, "tool_choice")
    return named


def _prescribed(format: _Format | None, param: str) -> str | None:
    """The text of an answer of that format; None: any."""
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return _instance({"type": "object", "properties": {"answer": {"type": "string"}}}, param)
    schema = format.json_schema.schema if format.json_schema is not None else format.schema
    if format.type != "json_schema" or schema is None:
        raise bad_request(f"{param} is of type '{format.type}': json_schema needs its schema", param)
    return _instance(schema, param)


def _instance(schema: Any, param: str) -> str:
    try:
        return json.dumps(example(schema))
    except (BadInput, TypeError, ValueError, AttributeError) as error:
        raise bad_request(f"{param}: the schema is not one that can be followed here: {error}", param) from None


def generation_of(body: _Body, text: PromptText, max_context: int, mean_output: float, seed: int) -> GenerationRequest:
    """How much is asked for, refused as vLLM refuses it."""
    if body.n not in (None, 1):
        raise bad_request(f"n is {body.n}: an emulated replica gives one choice", "n")
    key, limit = body.limit
    least, told = body.min_tokens or 0, _told(body)
    if limit == 0 and told.echo:
        # Only the prompt is asked back: nothing of an answer is shown.
        limit, told = 1, replace(told, text="")
    if limit is not None and limit < 1:
        raise bad_request(f"{key} must be at least 1, got {limit}.", key)
    if limit is not None and least > limit:
        raise bad_request(f"min_tokens must be less than or equal to {key}={limit}, got {least}.", "min_tokens")
    tokens = max(text.tokens, 1)
    if tokens + (limit or 1) > max_context:
        raise bad_request(
            f"This model's maximum context length is {max_context} tokens. However, your request has {tokens} input "
            f"tokens and asks for {limit or 1} output tokens. Please reduce the length of either.",
            "messages" if isinstance(body, ChatBody) else "prompt",
        )
    prompt = b"".join(text.pieces)
    most = max_context - tokens if limit is None else limit
    there = begun(prompt)
    if told.text is not None:
        wanted, there = count(len(told.text)), 0
    elif body.ignore_eos:
        wanted = most
    else:
        given = 0 if body.seed is None else body.seed
        # As long as it would have been from its beginning.
        drawn = drawn_length(prompt[: len(prompt) - there * BYTES_PER_TOKEN], seed ^ given, mean_output)
        wanted = max(drawn - there, least)
    options = body.stream_options or StreamOptions()
    return GenerationRequest(
        prompt=prompt,
        prompt_tokens=tokens,
        # An engine that has nothing to add finds that out in one step.
        output_tokens=max(min(wanted, most), 1),
        # What is prescribed may be just as long as it may be.
        ending="stop" if wanted < most or (told.text is not None and wanted == most) else "length",
        streams=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous=bool(options.include_usage and options.continuous_usage_stats),
        begun=there,
        told=told,
        session=body.session_id,
        written=max(min(wanted, most), 0),
        handover=body.kv_transfer_params,
        meeting=None
        if body.bootstrap_room is None
        else (body.bootstrap_host, body.bootstrap_port, body.bootstrap_room),
    )

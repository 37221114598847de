"""Anthropic's Messages as chat completions: a request on its way in, and the names of what goes out.

Engines differ in whether they have `/v1/messages`, and in which release; all of them chat. So a request is turned into
a chat at the door, and everything behind it (routing, limits, failover, going on with a broken stream) stays as it is.
`messages_reply` turns the answer back. What a chat cannot say is refused here, by its name.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from crosstie.core.errors import BadInput
from crosstie_gateway.gateway.errors import RequestRejected
from crosstie_gateway.gateway.fields import CachedFields
from crosstie_gateway.gateway.roads import MESSAGES
from crosstie_gateway.wire.outline import Outline, left_out
from crosstie_gateway.wire.request import Request

Json = dict[str, Any]
Filled = Callable[[bytes], bytes]
CHAT = "/v1/chat/completions"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"
# Why an answer ended, in the other API's words; what is not here is the end of a turn.
# To encode this much takes some 30 ms.
_MOST_TOOL_INPUT = 8 * 2**20
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
# What both APIs call the same.
_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
_THINKING = {"enabled": True, "disabled": False}
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class FunctionFields(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class CallFields(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: FunctionFields | None = None


class SaidFields(msgspec.Struct):
    """What a chat's answer, or an event of it, says."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[CallFields] | None = None


class ChatChoice(msgspec.Struct):
    delta: SaidFields | None = None
    message: SaidFields | None = None
    finish_reason: str | None = None
    # vLLM's: the stop sequence that it met, or the id of a token.
    stop_reason: str | int | None = None


class ChatUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: CachedFields | None = None


class ChatAnswer(msgspec.Struct):
    id: str = ""
    model: str = ""
    choices: list[ChatChoice] = []
    usage: ChatUsage | None = None
    error: msgspec.Raw = msgspec.Raw()


decode_chat = msgspec.json.Decoder(ChatAnswer).decode
_encode = msgspec.json.Encoder().encode


def chat_for(request: Request, *, counting: bool = False) -> tuple[Request, Json]:
    """What a request of Messages asks for, as a chat; and that as it was read, without its long strings. Raises
    RequestRejected. `counting`: it is only to be counted."""
    body, outline = request.body, request.outline
    try:
        if outline is None:
            chat = chat_of(body, counting=counting)
        else:
            # Long strings go over as they are: to decode and encode thirty megabytes would keep everybody waiting.
            chat = chat_of(outline.text, counting=counting, filled=_ToolInputs(outline, body).filled)
    except BadInput as error:
        raise RequestRejected(400, str(error), "bad_request") from None
    made = Request(request.method, CHAT, request.query, request.headers, _encode(chat))
    if outline is not None:
        made.body, made.outline = outline.filled(made.body, body)
    made.model, made.peer = request.model, request.peer
    return made, chat


class _ToolInputs:
    """The inputs of tools are JSON that becomes a string: their long strings alone are encoded once more, and so there
    may not be as much of them as of other text."""

    def __init__(self, outline: Outline, body: bytes):
        self._outline, self._body, self._left = outline, body, _MOST_TOOL_INPUT

    def filled(self, text: bytes) -> bytes:
        self._left -= len(text) + left_out(text)
        if self._left < 0:
            raise BadInput(f"messages: the inputs of tools have more than {_MOST_TOOL_INPUT >> 20} MiB")
        return self._outline.filled(text, self._body)[0]


def chat_of(body: bytes, *, counting: bool = False, filled: Filled = bytes) -> Json:
    """The chat that a body of Messages asks for. Raises BadInput. `filled`: gives JSON the long strings that the body
    lacks, before it becomes a string itself."""
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"the body is no JSON: {error}") from None
    if not isinstance(asked, dict):
        raise BadInput("the body is no JSON object")
    if not counting and not isinstance(asked.get("max_tokens"), int):
        raise BadInput("max_tokens: a whole number is required")
    chat: Json = {name: asked[name] for name in _SAME if asked.get(name) is not None}
    chat["messages"] = [*_system(asked.get("system")), *_messages(asked.get("messages"), filled)]
    if asked.get("stream") is True:
        chat["stream_options"] = {"include_usage": True}
    if asked.get("stop_sequences"):
        chat["stop"] = asked["stop_sequences"]
    if asked.get("tools"):
        chat["tools"] = [_tool(tool, f"tools.{at}") for at, tool in enumerate(_list(asked["tools"], "tools"))]
    chat.update(_tool_choice(asked.get("tool_choice")))
    thinking = _object(asked.get("thinking") or {}, "thinking").get("type")
    if thinking in _THINKING:
        # The name that the chat templates of most models with such a switch have for it; others do not look.
        chat["chat_template_kwargs"] = {"enable_thinking": _THINKING[thinking]}
    chat.update(_output(_object(asked.get("output_config") or {}, "output_config")))
    user = _object(asked.get("metadata") or {}, "metadata").get("user_id")
    if isinstance(user, str):
        chat["user"] = user
    return chat


def _object(value: Any, where: str) -> Json:
    if not isinstance(value, dict):
        raise BadInput(f"{where}: an object is expected")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadInput(f"{where}: a list is expected")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadInput(f"{where}: a text is expected")
    return value


def _system(system: Any) -> list[Json]:
    if system is None or system == "":
        return []
    if isinstance(system, list):
        blocks = [_object(block, f"system.{at}") for at, block in enumerate(system)]
        system = "\n".join(_text(block.get("text"), f"system.{at}.text") for at, block in enumerate(blocks))
    return [{"role": "system", "content": _text(system, "system")}]


def _messages(messages: Any, filled: Filled) -> list[Json]:
    chat: list[Json] = []
    for at, given in enumerate(_list(messages, "messages")):
        where = f"messages.{at}"
        message = _object(given, where)
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise BadInput(f"{where}.role: user or assistant is expected")
        if isinstance(content, str):
            chat.append({"role": role, "content": content})
            continue
        blocks = [_object(block, f"{where}.content.{n}") for n, block in enumerate(_list(content, f"{where}.content"))]
        chat += _assistant(blocks, where, filled) if role == "assistant" else _others(role, blocks, where)
    return chat


def _assistant(blocks: list[Json], where: str, filled: Filled) -> list[Json]:
    said: Json = {"role": "assistant", "content": None}
    for at, block in enumerate(blocks):
        place = f"{where}.content.{at}"
        match block.get("type"):
            case "text":
                said["content"] = (said["content"] or "") + _text(block.get("text"), f"{place}.text")
            case "thinking":
                thought = _text(block.get("thinking"), f"{place}.thinking")
                said["reasoning_content"] = said.get("reasoning_content", "") + thought
            case "redacted_thinking":
                # Nobody but its maker can read it.
                continue
            case "tool_use":
                function = {
                    "name": _text(block.get("name"), f"{place}.name"),
                    "arguments": filled(_encode(block.get("input") or {})).decode(),
                }
                call = {"id": _text(block.get("id"), f"{place}.id"), "type": "function", "function": function}
                said.setdefault("tool_calls", []).append(call)
            case kind:
                raise BadInput(f"{place}.type: an assistant's '{kind}' cannot be given to the fleet's engines")
    return [said]


def _others(role: str, blocks: list[Json], where: str) -> list[Json]:
    """A user's message; results of tools are messages of their own, before the rest."""
    results: list[Json] = []
    parts: list[Json] = []
    for at, block in enumerate(blocks):
        place = f"{where}.content.{at}"
        if block.get("type") != "tool_result":
            parts.append(_part(block, place))
            continue
        content = block.get("content", "")
        if isinstance(content, list):
            inner = [
                _part(_object(block, f"{place}.content.{n}"), f"{place}.content.{n}") for n, block in enumerate(content)
            ]
            # A tool's message is text; its pictures are shown as the user's.
            content = "\n".join(part["text"] for part in inner if part["type"] == "text")
            parts += [part for part in inner if part["type"] != "text"]
        called = _text(block.get("tool_use_id"), f"{place}.tool_use_id")
        results.append({"role": "tool", "tool_call_id": called, "content": _text(content, f"{place}.content")})
    if parts and all(part["type"] == "text" for part in parts):
        return [*results, {"role": role, "content": "\n".join(part["text"] for part in parts)}]
    return [*results, {"role": role, "content": parts}] if parts or not results else results


def _part(given: Any, where: str) -> Json:
    block = _object(given, where)
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": _text(block.get("text"), f"{where}.text")}
    source = _object(block.get("source"), f"{where}.source") if kind in ("image", "document") else {}
    match kind, source.get("type"):
        case "image", "url":
            return {"type": "image_url", "image_url": {"url": _text(source.get("url"), f"{where}.source.url")}}
        case "image", "base64":
            media = _text(source.get("media_type"), f"{where}.source.media_type")
            data = _text(source.get("data"), f"{where}.source.data")
            return {"type": "image_url", "image_url": {"url": f"data:{media};base64,{data}"}}
        case "document", "text":
            return {"type": "text", "text": _text(source.get("data"), f"{where}.source.data")}
        case "image" | "document", other:
            raise BadInput(f"{where}.source.type: '{other}' of a {kind} cannot be given to the fleet's engines")
    raise BadInput(f"{where}.type: '{kind}' cannot be given to the fleet's engines")


def _tool(tool: Any, where: str) -> Json:
    given = _object(tool, where)
    if given.get("type", "custom") != "custom" or "input_schema" not in given:
        raise BadInput(f"{where}: '{given.get('type')}' is a tool of Anthropic's own; give name and input_schema")
    function = {"name": _text(given.get("name"), f"{where}.name"), "parameters": given["input_schema"]}
    if given.get("description"):
        function["description"] = given["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Json:
    if choice is None:
        return {}
    given = _object(choice, "tool_choice")
    kind = given.get("type")
    if kind == "tool":
        name = _text(given.get("name"), "tool_choice.name")
        chosen: Json = {"tool_choice": {"type": "function", "function": {"name": name}}}
    elif kind in _CHOICES:
        chosen = {"tool_choice": _CHOICES[kind]}
    else:
        raise BadInput("tool_choice.type: auto, any, tool or none is expected")
    if given.get("disable_parallel_tool_use"):
        chosen["parallel_tool_calls"] = False
    return chosen


def _output(config: Json) -> Json:
    said: Json = {}
    if config.get("format") is not None:
        form = _object(config["format"], "output_config.format")
        if form.get("type") != "json_schema":
            raise BadInput("output_config.format.type: json_schema is expected")
        schema = _object(form.get("schema"), "output_config.format.schema")
        said["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if config.get("effort") is not None:
        effort = _EFFORTS.get(_text(config["effort"], "output_config.effort"))
        if effort is None:
            raise BadInput(f"output_config.effort: {', '.join(_EFFORTS)} are known")
        said["reasoning_effort"] = effort
    return said


def usage_fields(usage: ChatUsage | None) -> Json:
    """Cached tokens are not among the input tokens there."""
    if usage is None:
        return {"input_tokens": 0, "output_tokens": 0}
    details = usage.prompt_tokens_details
    cached = min((details.cached_tokens or 0) if details else 0, usage.prompt_tokens)
    said = {"input_tokens": usage.prompt_tokens - cached, "output_tokens": usage.completion_tokens or 0}
    return {**said, "cache_read_input_tokens": cached} if cached else said


def stopped(choice: ChatChoice) -> Json:
    """`stop_reason` and `stop_sequence` of an answer that ended as this choice did."""
    if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": _STOP_REASONS.get(choice.finish_reason or "", "end_turn"), "stop_sequence": None}


def message_of(answer: ChatAnswer) -> bytes:
    """A whole answer."""
    choice = answer.choices[0] if answer.choices else ChatChoice()
    said = choice.message or SaidFields()
    content: list[Json] = []
    thought = said.reasoning_content or said.reasoning
    if thought:
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if said.content or said.refusal:
        content.append({"type": "text", "text": said.content or said.refusal})
    for call in said.tool_calls or []:
        function = call.function or FunctionFields()
        content.append({"type": "tool_use", "id": call.id, "name": function.name, "input": _arguments(function)})
    return _encode({**message_head(answer), "content": content, **stopped(choice), "usage": usage_fields(answer.usage)})


def message_head(answer: ChatAnswer) -> Json:
    name = answer.id if answer.id.startswith("msg_") else f"msg_{answer.id}"
    return {"id": name, "type": "message", "role": "assistant", "model": answer.model}


def _arguments(function: FunctionFields) -> Any:
    try:
        return msgspec.json.decode(function.arguments or "{}")
    except msgspec.DecodeError:
        # A model's own words, which it did not finish or got wrong: the client sees them rather than nothing.
        return {"arguments": function.arguments}


def error_message(status: int, answer: bytes) -> bytes:
    """An engine's or the gateway's error, as the other API's clients know it."""
    said = ""
    try:
        error = msgspec.json.decode(answer)
        if isinstance(error, dict):
            inner = error.get("error", error)
            said = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = answer.decode(errors="replace")
    kind = _ERRORS.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    return _encode({"type": "error", "error": {"type": kind, "message": said}})

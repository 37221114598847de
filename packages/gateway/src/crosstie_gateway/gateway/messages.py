"""Anthropic's Messages as chat completions: a request on its way in, and the names of what goes out.

Not every engine has `/v1/messages`; all of them chat. So requests become chats at the door, and routing, limits,
failover and resuming stay as they are. `messages_reply` turns answers back. What a chat cannot say is refused here, by
its name.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from crosstie.core.errors import BadInput
from crosstie_gateway.gateway.body import usage_of_fields
from crosstie_gateway.gateway.errors import RequestRejected
from crosstie_gateway.gateway.fields import UsageFields, decode_any, readable
from crosstie_gateway.gateway.roads import MESSAGES
from crosstie_gateway.wire.outline import left_out
from crosstie_gateway.wire.request import Request

Json = dict[str, Any]
Filled = Callable[[bytes], bytes]
CHAT = "/v1/chat/completions"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"
# To encode this much takes some 30 ms.
_MOST_TOOL_INPUT = 8 * 2**20
# Why an answer ended, in the other API's words; what is not here is the end of a turn.
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


class ChatAnswer(msgspec.Struct):
    id: str = ""
    model: str = ""
    choices: list[ChatChoice] = []
    usage: UsageFields | None = None
    error: msgspec.Raw = msgspec.Raw()


decode_chat = msgspec.json.Decoder(ChatAnswer).decode
_encode = msgspec.json.Encoder().encode


def chat_for(request: Request, *, counting: bool = False) -> tuple[Request, Json]:
    """A request of Messages as a chat, and that chat without its long strings. `counting`: it is only counted; else
    they have yet to be filled into the request too. Raises RequestRejected."""
    body, outline, left = request.body, request.outline, _MOST_TOOL_INPUT

    def filled(text: bytes) -> bytes:
        """A tool's input, JSON that becomes a string: its long strings are encoded again, so its size is limited."""
        nonlocal left
        left -= len(text) + left_out(text)
        if left < 0:
            raise BadInput(f"messages: the inputs of tools have more than {_MOST_TOOL_INPUT >> 20} MiB")
        return text if outline is None else outline.filled(text, body)[0]

    try:
        # Long strings go over as they are: to decode and encode thirty megabytes would keep everybody waiting.
        chat = chat_of(body if outline is None else outline.text, counting=counting, filled=filled)
    except BadInput as error:
        raise RequestRejected(400, str(error), "bad_request") from None
    made = Request(request.method, CHAT, request.query, request.headers, _encode(chat))
    if outline is not None and counting:
        made.body, made.outline = outline.filled(made.body, body)
    made.model, made.peer = request.model, request.peer
    return made, chat


class BodyPart:
    """A part of a Messages body, and where it stands there. Raises BadInput where it is of another kind than asked
    for."""

    def __init__(self, value: Any, where: str = ""):
        self.value, self.where = value, where

    def _is_expected(self, kind: type, name: str) -> Any:
        if not isinstance(self.value, kind):
            raise BadInput(f"{self.where}: {name} is expected")
        return self.value

    @property
    def fields(self) -> Json:
        fields: Json = self._is_expected(dict, "an object")
        return fields

    @property
    def text(self) -> str:
        return str(self._is_expected(str, "a text"))

    def __iter__(self) -> "Iterator[BodyPart]":
        for at, value in enumerate(self._is_expected(list, "a list")):
            yield BodyPart(value, f"{self.where}.{at}")

    def __getitem__(self, name: str) -> "BodyPart":
        return BodyPart(self.fields.get(name), f"{self.where}.{name}" if self.where else name)

    def option(self, name: str) -> "BodyPart":
        """The same, and an object without fields where it is not there."""
        part = self[name]
        return part if part.value else BodyPart({}, part.where)


def chat_of(body: bytes, *, counting: bool = False, filled: Filled = bytes) -> Json:
    """The chat that a Messages body asks for. `filled`: gives JSON the body's long strings before it becomes a string.
    Raises BadInput."""
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"the body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadInput("the body is no JSON object")
    if not counting and not isinstance(given.get("max_tokens"), int):
        raise BadInput("max_tokens: a whole number is required")
    asked = BodyPart(given)
    chat: Json = {name: given[name] for name in _SAME if given.get(name) is not None}
    chat["messages"] = _system(asked["system"]) + [said for part in asked["messages"] for said in _said(part, filled)]
    if given.get("stream") is True:
        chat["stream_options"] = {"include_usage": True}
    if given.get("stop_sequences"):
        chat["stop"] = given["stop_sequences"]
    if given.get("tools"):
        chat["tools"] = [_tool(tool) for tool in asked["tools"]]
    if given.get("tool_choice") is not None:
        chat.update(_tool_choice(asked["tool_choice"]))
    thinking = asked.option("thinking")["type"].value
    if thinking in _THINKING:
        # The name that the chat templates of most models with such a switch have for it; others do not look.
        chat["chat_template_kwargs"] = {"enable_thinking": _THINKING[thinking]}
    chat.update(_output(asked.option("output_config")))
    user = asked.option("metadata")["user_id"].value
    if isinstance(user, str):
        chat["user"] = user
    return chat


def _system(system: BodyPart) -> list[Json]:
    if system.value is None or system.value == "":
        return []
    is_list = isinstance(system.value, list)
    text = "\n".join(block["text"].text for block in system) if is_list else system.text
    return [{"role": "system", "content": text}]


def _said(message: BodyPart, filled: Filled) -> list[Json]:
    role, content = message["role"], message["content"]
    if role.value not in ("user", "assistant", "system"):
        raise BadInput(f"{role.where}: user or assistant is expected")
    if isinstance(content.value, str):
        return [{"role": role.value, "content": content.value}]
    return [_assistant(content, filled)] if role.value == "assistant" else _others(role.value, content)


def _assistant(blocks: BodyPart, filled: Filled) -> Json:
    said: Json = {"role": "assistant", "content": None}
    for block in blocks:
        match block["type"].value:
            case "text":
                said["content"] = (said["content"] or "") + block["text"].text
            case "thinking":
                said["reasoning_content"] = said.get("reasoning_content", "") + block["thinking"].text
            case "redacted_thinking":
                # Nobody but its maker can read it.
                continue
            case "tool_use":
                arguments = filled(_encode(block["input"].value or {})).decode()
                function = {"name": block["name"].text, "arguments": arguments}
                call = {"id": block["id"].text, "type": "function", "function": function}
                said.setdefault("tool_calls", []).append(call)
            case kind:
                where = block["type"].where
                raise BadInput(f"{where}: an assistant's '{kind}' cannot be given to the fleet's engines")
    return said


def _others(role: str, blocks: BodyPart) -> list[Json]:
    """A user's message; results of tools are messages of their own, before the rest."""
    results: list[Json] = []
    parts: list[Json] = []
    for block in blocks:
        if block["type"].value != "tool_result":
            parts.append(_shown(block))
            continue
        content = block["content"] if "content" in block.fields else BodyPart("")
        if isinstance(content.value, list):
            inner = [_shown(part) for part in content]
            # A tool's message is text; its pictures are shown as the user's.
            text = "\n".join(part["text"] for part in inner if part["type"] == "text")
            parts += [part for part in inner if part["type"] != "text"]
        else:
            text = content.text
        results.append({"role": "tool", "tool_call_id": block["tool_use_id"].text, "content": text})
    if parts and all(part["type"] == "text" for part in parts):
        return [*results, {"role": role, "content": "\n".join(part["text"] for part in parts)}]
    return [*results, {"role": role, "content": parts}] if parts or not results else results


def _shown(block: BodyPart) -> Json:
    kind = block["type"].value
    if kind == "text":
        return {"type": "text", "text": block["text"].text}
    source = block["source"] if kind in ("image", "document") else BodyPart({})
    match kind, source["type"].value:
        case "image", "url":
            return {"type": "image_url", "image_url": {"url": source["url"].text}}
        case "image", "base64":
            url = f"data:{source['media_type'].text};base64,{source['data'].text}"
            return {"type": "image_url", "image_url": {"url": url}}
        case "document", "text":
            return {"type": "text", "text": source["data"].text}
        case "image" | "document", other:
            where = source["type"].where
            raise BadInput(f"{where}: '{other}' of a {kind} cannot be given to the fleet's engines")
    raise BadInput(f"{block['type'].where}: '{kind}' cannot be given to the fleet's engines")


def _tool(tool: BodyPart) -> Json:
    given = tool.fields
    if given.get("type", "custom") != "custom" or "input_schema" not in given:
        raise BadInput(f"{tool.where}: '{given.get('type')}' is a tool of Anthropic's own; give name and input_schema")
    function = {"name": tool["name"].text, "parameters": given["input_schema"]}
    if given.get("description"):
        function["description"] = given["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: BodyPart) -> Json:
    kind = choice["type"].value
    if kind == "tool":
        chosen: Json = {"tool_choice": {"type": "function", "function": {"name": choice["name"].text}}}
    elif kind in _CHOICES:
        chosen = {"tool_choice": _CHOICES[kind]}
    else:
        raise BadInput("tool_choice.type: auto, any, tool or none is expected")
    if choice["disable_parallel_tool_use"].value:
        chosen["parallel_tool_calls"] = False
    return chosen


def _output(config: BodyPart) -> Json:
    said: Json = {}
    form, effort = config["format"], config["effort"]
    if form.value is not None:
        if form["type"].value != "json_schema":
            raise BadInput("output_config.format.type: json_schema is expected")
        schema = form["schema"].fields
        said["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if effort.value is not None:
        if effort.text not in _EFFORTS:
            raise BadInput(f"output_config.effort: {', '.join(_EFFORTS)} are known")
        said["reasoning_effort"] = _EFFORTS[effort.text]
    return said


def usage_fields(usage: UsageFields | None) -> Json:
    """Cached tokens are not among the input tokens there."""
    given, made, cached = (usage_of_fields(usage) if usage is not None else None) or (0, 0, 0)
    said = {"input_tokens": given - cached, "output_tokens": made}
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
    error, said = readable(decode_any, answer), ""
    if isinstance(error, dict):
        inner = error.get("error", error)
        said = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    elif error is None:
        said = answer.decode(errors="replace")
    kind = _ERRORS.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    return _encode({"type": "error", "error": {"type": kind, "message": said}})

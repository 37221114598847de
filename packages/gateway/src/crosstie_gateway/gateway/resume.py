"""How an answer that broke off goes on elsewhere: whether the request allows it, and what the next engine is asked.

The next engine gets the client's text as the beginning of its answer, and goes on the same if greedy and if it sees the
same tokens. Text does not promise that: a line end made as two tokens may be read as one. So llama.cpp is given tokens,
each event's text cut up by itself.
"""

from typing import Any, NamedTuple

import msgspec

from crosstie_gateway.gateway.backend import Backend
from crosstie_gateway.gateway.body import RequestBody
from crosstie_gateway.gateway.fields import decode_any, decode_parts
from crosstie_gateway.gateway.transcript import Transcript

Parts = dict[str, msgspec.Raw]
Json = dict[str, Any]
# What another engine cannot continue, unless its value is one of these: choices, calls, grammars and probabilities that
# began elsewhere.
_OFF: tuple[Any, ...] = (None, False, [], "")
_EXCEPTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tools", "functions", "echo", "suffix", "use_beam_search", "audio", "grammar"), _OFF),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), _OFF),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag", "prompt_embeds", "return_hidden_states"), _OFF),
    **dict.fromkeys(("truncate_prompt_tokens", "kv_transfer_params", "web_search_options"), _OFF),
    # Zero of them is a wish for the one that was chosen.
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "n_probs": (None, 0),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "best_of": (None, 1),
}
_LIMITS = ("max_tokens", "max_completion_tokens", "n_predict", "min_tokens")
# How long completions get at these engines where the request sets no limit.
_USUAL_COMPLETION = {"vllm": 16, "sglang": 16}
_CHAT_ONLY = (
    "messages", "max_completion_tokens", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "reasoning_format", "reasoning_effort", "tools", "functions", "tool_choice", "function_call", "response_format",
    "parallel_tool_calls", "modalities", "top_logprobs",
)  # fmt: skip
# What a model that reasons in its text writes around it; templates take that out of the messages they are given.
_REASONING = ("<think>", "</think>")

_encode = msgspec.json.Encoder().encode


class CannotResume(Exception):
    """In a word, which the metrics count by."""


class Prepared(NamedTuple):
    """What the next engine is asked; `made`: tokens of the answer so far; `left`: those that it may still have."""

    path: str
    body: bytes
    made: int
    left: int | None
    # Whether a chat goes on as a completion.
    raw: bool


class Continuation:
    """A request, what its client has of the answer, and the engine that began it. Raises CannotResume."""

    def __init__(self, path: str, body: bytes, parsed: RequestBody, transcript: Transcript, began_on: str = ""):
        transcript.read()
        if transcript.why_not:
            raise CannotResume(transcript.why_not)
        self.path, self.parsed, self.transcript = path, parsed, transcript
        self.chat = path.endswith("/chat/completions")
        self.text = transcript.text
        self.parts: Parts = decode_parts(body)
        for key, allowed in _EXCEPTED.items():
            # By its kind too: one is not True here.
            if key in self.parts and not any(
                type(value) is type(self._value(key)) and value == self._value(key) for value in allowed
            ):
                raise CannotResume(key)
        self._check_seam()
        self._check_limits()
        # None, where the answer is longer already.
        usual = 0 if self.chat else _USUAL_COMPLETION.get(began_on, 0)
        self._usual = usual if usual >= transcript.tokens else 0
        self._messages: list[msgspec.Raw] = []
        # Of a completion: its text, or the ids of its tokens.
        self._prompt: str | list[int] = ""
        if self.chat:
            self._read_messages()
        else:
            self._prompt = _one_prompt(self._value("prompt"))

    def _value(self, key: str) -> Any:
        return decode_any(self.parts[key]) if key in self.parts else None

    def _check_seam(self) -> None:
        if self.text.endswith("\ufffd"):
            # Half a character, of an engine that does not wait for the other half.
            raise CannotResume("character")
        if any(mark in self.text for mark in _REASONING):
            raise CannotResume("reasoning")
        for stop in self._stops():
            # The next engine would not see that the rest of it makes a whole.
            if any(self.text.endswith(stop[:size]) for size in range(1, len(stop))):
                raise CannotResume("stop")

    def _stops(self) -> list[str]:
        given = self._value("stop")
        stops = [given] if isinstance(given, str) else given or []
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            # What one engine has made of it, the next may not.
            raise CannotResume("stop")
        return stops

    def _check_limits(self) -> None:
        for key in _LIMITS:
            if type(self._value(key)) not in (int, type(None)):
                # Engines may read more into it than can be lowered here: a whole number with a point, or in quotes.
                raise CannotResume(key)

    def _read_messages(self) -> None:
        self._messages = msgspec.json.decode(self.parts.get("messages", b"[]"), type=list[msgspec.Raw])
        last = self._last_message()
        if last.get("role") == "assistant":
            # The client has begun the answer itself: it can be made longer where it is meant to go on.
            if self._value("continue_final_message") is not True or not isinstance(last.get("content"), str):
                raise CannotResume("messages")
        elif self._value("add_generation_prompt") is False:
            raise CannotResume("messages")

    def _last_message(self) -> Json:
        last = decode_any(self._messages[-1]) if self._messages else {}
        if not isinstance(last, dict):
            raise CannotResume("messages")
        return last

    def possible_on(self, engine: str) -> bool:
        """Any engine completes a text; who speaks in a chat, or what a token's number is, not all agree on."""
        return bool(engine) or not (self.chat or (isinstance(self._prompt, list) and self._ids() is None))

    def _ids(self) -> list[int] | None:
        # With stop strings an engine tells ids whose text it still holds back: the client would never get that.
        return None if self._stops() else self.transcript.token_ids

    def trimmed_by(self, engine: str, prepared: "Prepared") -> str:
        """White space at the end of the text that the engine's template may take off; vLLM's are Hugging Face's."""
        if engine != "vllm" or not self.chat or prepared.raw:
            return ""
        return self.text[len(self.text.rstrip()) :]

    # What the next engine is asked

    async def prepared(self, backend: Backend, timeout_s: float) -> Prepared:
        """Raises CannotResume where the engine does not help."""
        if backend.engine == "llama.cpp" and not self.parsed.attached.number:
            try:
                return await self._in_tokens(backend, timeout_s)
            except (OSError, ValueError, LookupError, TypeError, msgspec.DecodeError):
                # An older one, or one that hides these pages: then by its text.
                pass
        parts, made = self._shortened(self.transcript.tokens)
        if not self.text:
            return self._as(self.path, parts, made)
        if self.chat:
            last = self._last_message()
            earlier, begun = self._messages, ""
            if last.get("role") == "assistant":
                earlier, begun = self._messages[:-1], last["content"]
            message = {"role": "assistant", "content": begun + self.text}
            parts["messages"] = msgspec.Raw(_encode([*earlier, message]))
            parts["continue_final_message"], parts["add_generation_prompt"] = (
                msgspec.Raw(b"true"),
                msgspec.Raw(b"false"),
            )
        elif isinstance(self._prompt, str):
            parts["prompt"] = msgspec.Raw(_encode(self._prompt + self.text))
        else:
            ids = self._ids()
            if ids is None:
                ids = await self._tokenised(backend, timeout_s)
            parts["prompt"] = msgspec.Raw(_encode([*self._prompt, *ids]))
        return self._as(self.path, parts, made)

    async def _in_tokens(self, backend: Backend, timeout_s: float) -> Prepared:
        """llama.cpp's own means: the prompt as its template has it, and the answer's tokens after it."""
        asked = {"model": backend.model, "content": self.transcript.texts, "parse_special": False}
        ids = _whole_numbers((await _post(backend, timeout_s, "/tokenize", asked))["tokens"])
        prompt: list[Any] = [self._prompt] if isinstance(self._prompt, str) else list(self._prompt)
        parts, made = self._shortened(len(ids))
        if self.chat:
            shown = {**self.parts, "model": msgspec.Raw(_encode(backend.model)), "stream": msgspec.Raw(b"false")}
            rendered = (await _post(backend, timeout_s, "/apply-template", shown))["prompt"]
            if not isinstance(rendered, str):
                raise ValueError("no prompt")
            prompt = [rendered]
            limit = parts.get("max_completion_tokens")
            parts = {key: raw for key, raw in parts.items() if key not in _CHAT_ONLY}
            if limit is not None:
                parts["max_tokens"] = limit
        parts["prompt"] = msgspec.Raw(_encode([*prompt, *ids] if ids else prompt[0]))
        return self._as("/v1/completions", parts, made, raw=self.chat)

    async def _tokenised(self, backend: Backend, timeout_s: float) -> list[int]:
        asked = {"model": backend.model, "prompt": self.text, "add_special_tokens": False}
        try:
            return _whole_numbers((await _post(backend, timeout_s, "/tokenize", asked))["tokens"])
        except (OSError, ValueError, LookupError, TypeError, msgspec.DecodeError):
            raise CannotResume("tokens") from None

    def _shortened(self, made: int) -> tuple[Parts, int]:
        """The request with what is left of its limits."""
        parts = dict(self.parts)
        for key in _LIMITS:
            limit = self._value(key)
            if limit is not None and limit > 0:
                parts[key] = msgspec.Raw(b"%d" % max(limit - made, 0))
        if self._usual and self._most() == self._usual:
            parts["max_tokens"] = msgspec.Raw(b"%d" % max(self._usual - made, 0))
        return parts, made

    def _most(self) -> int | None:
        """The longest that the whole answer may get, if anybody says so."""
        return self.parsed.most_output or max(self._value("n_predict") or 0, 0) or self._usual or None

    def _as(self, path: str, parts: Parts, made: int, *, raw: bool = False) -> Prepared:
        most = self._most()
        return Prepared(path, _encode(parts), made, None if most is None else max(most - made, 0), raw)


def _one_prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    try:
        return _whole_numbers(prompt)
    except TypeError:
        raise CannotResume("prompt") from None


def _whole_numbers(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise TypeError("no list of tokens")
    return value


async def _post(backend: Backend, timeout_s: float, path: str, asked: Json | Parts) -> Json:
    answer = await backend.ask("POST", backend.root.decode() + path, timeout_s, asked)
    if answer.status != 200:
        raise ValueError(f"{path} answered {answer.status}")
    said: Json = msgspec.json.decode(answer.body, type=dict[str, Any])
    return said

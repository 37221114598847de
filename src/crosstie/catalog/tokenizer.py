"""A model's tokenizer and chat template from the files that come with its weights: requests in, ids of tokens out.

As engines do it, so that prompts can be counted, and cut into blocks, before they are sent to one. What an engine might
read otherwise is left alone: pictures, templates of the request's own, beginnings of answers, several prompts.
"""

import json
import re
from collections import OrderedDict
from datetime import datetime
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from crosstie.catalog.reading import text_of
from crosstie.core.errors import BadInput, MissingExtra

# Characters of the pieces whose tokens are kept: of an answer's many turns, all but the last have been read before.
_KEPT = 8_000_000
# A piece shorter than this is read again sooner than found.
_WORTH_KEEPING = 256
# A template that goes through the parts of a message itself is given them; others are given their texts as one.
_TAKES_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+(?:\w+(?:\.|\[['\"]))?content\b")
_decode = msgspec.json.Decoder().decode


class Tokenizer:
    """May be asked from several threads at once."""

    def __init__(self, file: Path, template: Path | None = None):
        """Raises BadInput."""
        try:
            library: Any = import_module("tokenizers")
        except ImportError:
            raise MissingExtra(f"{file}: a tokenizer needs the package tokenizers", "tokenizer") from None
        said = text_of(file)
        try:
            self._words: Any = library.Tokenizer.from_str(said)
        except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
            raise BadInput(f"{file}: is no tokenizer.json: {error}") from None
        # Engines cut nothing off and fill nothing up.
        self._words.no_truncation()
        self._words.no_padding()
        config_file = file.parent / "tokenizer_config.json"
        config: dict[str, Any] = _object(config_file) if config_file.exists() else {}
        self._template = _compiled(file, template, config)
        self._marks = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        self._cuts = _cuts(_decode(said.encode()).get("added_tokens", []))
        self._kept: OrderedDict[str, list[int]] = OrderedDict()
        self._kept_size = 0
        self._lock = Lock()

    @property
    def chats(self) -> bool:
        return self._template is not None

    def read(self, body: bytes, path: str = "") -> "tuple[list[int], bool] | None":
        """Ids of the tokens of a request's prompt, and whether they alone say which blocks of a cache are its own.

        None where only its engine knows: it is then for others to estimate, or to refuse. A body that could be a chat
        or a completion is what its path says.
        """
        try:
            given = _decode(body)
            ids = self._ids(given, path) if isinstance(given, dict) else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        # A salt is a part of every block's key in the engine.
        return None if ids is None else (ids, not given.get("cache_salt"))

    def _ids(self, given: dict[str, Any], path: str) -> list[int] | None:
        chats = path.endswith("/chat/completions") or not path.endswith("/completions")
        if given.get("truncate_prompt_tokens") is not None or (chats and "messages" in given and "prompt" in given):
            return None
        if chats and "messages" in given:
            rendered = self.render(given)
            special = given.get("add_special_tokens") is True
            return None if rendered is None else self.encode(rendered, special=special)
        prompt = given.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, list):
            is_ids = all(type(number) is int and 0 <= number < 2**31 for number in prompt)
            return prompt if prompt and is_ids else None
        if not isinstance(prompt, str):
            return None
        return self.encode(prompt, special=given.get("add_special_tokens") is not False)

    def render(self, given: dict[str, Any]) -> str | None:
        """A chat as the text that its model reads."""
        options = given.get("chat_template_kwargs") or {}
        messages = given.get("messages")
        if (
            self._template is None
            or not isinstance(messages, list)
            or not isinstance(options, dict)
            or given.get("chat_template") is not None
            or given.get("continue_final_message")
        ):
            return None
        compiled, takes_parts = self._template
        read = [_message(message, takes_parts) for message in messages]
        if any(file is None for file in read):
            return None
        said: dict[str, Any] = {
            **self._marks,
            "messages": read,
            "tools": given.get("tools") or None,
            "documents": given.get("documents") or None,
            "add_generation_prompt": given.get("add_generation_prompt") is not False,
        }
        try:
            return str(compiled.render({**said, **options}))
        except Exception:  # noqa: BLE001 (a template may raise anything; its engine will say what it did not like)
            return None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """What stands between two special tokens is cut into tokens by itself, so that pieces which begin with one are
        looked up by themselves: the turns of a conversation that have come before."""
        if special or self._cuts is None or len(text) < _WORTH_KEEPING:
            whole: list[int] = self._words.encode(text, add_special_tokens=special).ids
            return whole
        ids: list[int] = []
        at = 0
        for cut in [*(match.start() for match in self._cuts.finditer(text)), len(text)]:
            if cut > at:
                ids += self._piece(text[at:cut])
            at = cut
        return ids

    def _piece(self, text: str) -> list[int]:
        if len(text) < _WORTH_KEEPING:
            short: list[int] = self._words.encode(text, add_special_tokens=False).ids
            return short
        with self._lock:
            known = self._kept.get(text)
            if known is not None:
                self._kept.move_to_end(text)
                return known
        # Others go on meanwhile: the library lets go of the interpreter.
        ids: list[int] = self._words.encode(text, add_special_tokens=False).ids
        with self._lock:
            if text not in self._kept and len(text) <= _KEPT:
                self._kept[text] = ids
                self._kept_size += len(text)
                while self._kept_size > _KEPT:
                    self._kept_size -= len(self._kept.popitem(last=False)[0])
        return ids


def _object(file: Path) -> dict[str, Any]:
    try:
        said = _decode(text_of(file).encode())
    except msgspec.DecodeError as error:
        raise BadInput(f"{file}: is no JSON: {error}") from None
    if not isinstance(said, dict):
        raise BadInput(f"{file}: is no object")
    return said


def _content(token: object) -> str:
    """A special token by its text, or by what else its config says of it."""
    said = token.get("content") if isinstance(token, dict) else token
    return said if isinstance(said, str) else ""


def _compiled(file: Path, given: Path | None, config: dict[str, Any]) -> tuple[Any, bool] | None:
    """The template that was given, or the one beside the tokenizer; whether it takes the parts of messages."""
    beside = file.parent / "chat_template.jinja"
    place = given or (beside if beside.exists() else None)
    said = text_of(place) if place is not None else config.get("chat_template")
    if isinstance(said, list):
        named = {entry.get("name"): entry.get("template") for entry in said if isinstance(entry, dict)}
        said = named.get("default")
    if not isinstance(said, str):
        return None
    sandbox: Any = import_module("jinja2.sandbox")
    jinja: Any = import_module("jinja2")
    # As transformers sets it up, whose templates these are.
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.filters["tojson"] = _tojson
    try:
        return environment.from_string(said), _TAKES_PARTS.search(said) is not None
    except jinja.TemplateError as error:
        raise BadInput(f"{place or file}: is no chat template: {error}") from None


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Without the escapes that jinja2's own makes for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _message(given: Any, takes_parts: bool) -> dict[str, Any] | None:
    """As engines give it to a template; None: it has more than text in it."""
    if not isinstance(given, dict):
        return None
    said = dict(given)
    content = given.get("content")
    if isinstance(content, list):
        texts = [part if isinstance(part, str) else part.get("text") if _is_text(part) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            return None
        said["content"] = (
            [{"type": "text", "text": text} for text in texts] if takes_parts else "\n".join(map(str, texts))
        )
    elif content is None:
        said["content"] = [] if takes_parts else ""
    elif takes_parts and isinstance(content, str):
        said["content"] = [{"type": "text", "text": content}]
    calls = given.get("tool_calls")
    if isinstance(calls, list):
        said["tool_calls"] = [_call(call) for call in calls]
    return said


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text")


def _call(given: Any) -> Any:
    """With its arguments as an object, which templates expect and clients send as a text."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return given
    try:
        read = _decode(arguments.encode()) if arguments else {}
    except msgspec.DecodeError:
        return given
    return {**given, "function": {**function, "arguments": read}}


def _cuts(added: list[dict[str, Any]]) -> re.Pattern[str] | None:
    """Where special tokens begin, those that take the spaces before them excepted."""
    special = [token for token in added if token.get("special")]
    if any(token.get("lstrip") or token.get("normalized") or token.get("single_word") for token in special):
        return None
    known = sorted((token["content"] for token in special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, known))) if known else None

"""Answers in OpenAI's shapes, whole or event by event."""

import base64
import math
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from crosstie.core.deployment import Deployment
from crosstie.core.emulated import FINGERPRINT
from crosstie_gateway.emulate.requests import GenerationRequest
from crosstie_gateway.emulate.tokens import logprob, pieces

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"
# Deterministic vectors are for plumbing, not for meaning.
EMBEDDING_DIMENSIONS = 16


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    prompt: int
    completion: int
    cached: int

    def fields(self) -> Json:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class AnswerShape:
    """One answer in the making. Of a stream: `begun`, `piece`, and `ending` with the last text."""

    def begun(self) -> bytes:
        return b""

    def piece(self, text: str, usage: AnswerUsage | None = None) -> bytes:
        raise NotImplementedError

    def ending(self, text: str, whole: str, usage: AnswerUsage) -> bytes:
        raise NotImplementedError

    def whole(self, text: str, usage: AnswerUsage) -> bytes:
        raise NotImplementedError


class _Choices(AnswerShape):
    """Completions with one choice."""

    id_prefix = kind = chunk_kind = ""

    def __init__(self, id: str, created: int, model: str, wanted: GenerationRequest):
        self._ending: str = wanted.ending
        self._include_usage = wanted.include_usage
        self._told, self._place = wanted.told, 0
        head = {"id": f"{self.id_prefix}-{id}", "object": self.chunk_kind, "created": created, "model": model}
        self._head: Json = {**head, "system_fingerprint": FINGERPRINT}

    def piece(self, text: str, usage: AnswerUsage | None = None) -> bytes:
        return self._event([self._choice(self._chunk_of(text), text, None)], usage)

    def ending(self, text: str, whole: str, usage: AnswerUsage) -> bytes:
        last = self._event([self._choice(self._chunk_of(text), text, self._ending)])
        return last + (self._event([], usage) if self._include_usage else b"") + _DONE

    def whole(self, text: str, usage: AnswerUsage) -> bytes:
        choice = self._choice(self._whole_of(text), text, self._ending)
        return _encode({**self._head, "object": self.kind, "choices": [choice], "usage": usage.fields()})

    def _event(self, choices: list[Json], usage: AnswerUsage | None = None) -> bytes:
        counted = {} if usage is None else {"usage": usage.fields()}
        return b"data: %b\n\n" % _encode({**self._head, "choices": choices, **counted})

    def _choice(self, said: Json, text: str, finish: str | None) -> Json:
        return {"index": 0, **said, "logprobs": self._logprobs(text), "finish_reason": finish}

    def _chunk_of(self, text: str) -> Json:
        raise NotImplementedError

    def _whole_of(self, text: str) -> Json:
        raise NotImplementedError

    def _logprobs(self, text: str, before: tuple[str, ...] = ()) -> Json | None:
        """Of the tokens of a piece, and of those `before` it: None, unless they are asked for."""
        if self._told.logprobs is None:
            return None
        tokens = (*before, *pieces(text))
        place, self._place = self._place, self._place + len(tokens)
        return self._logprobs_of(tokens, place, self._told.logprobs)

    def _logprobs_of(self, tokens: tuple[str, ...], place: int, most: int) -> Json:
        raise NotImplementedError


def _alternatives(token: str, place: int, most: int) -> list[tuple[str, float]]:
    """The likeliest tokens there: the chosen one, and made-up others."""
    chosen = logprob(token, place)
    rest = math.log1p(-math.exp(chosen)) if chosen < 0.0 else -20.0
    others = [(f" {n}", rest - 0.7 * n) for n in range(1, most)]
    return [(token, chosen), *others][:most]


class Chat(_Choices):
    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, id: str, created: int, model: str, wanted: GenerationRequest):
        super().__init__(id, created, model, wanted)
        self._tool, self._call_id = wanted.told.calls, f"call_{id}"
        if self._tool and self._ending == "stop":
            self._ending = "tool_calls"

    def _call(self, arguments: str) -> Json:
        return {"id": self._call_id, "type": "function", "function": {"name": self._tool, "arguments": arguments}}

    def begun(self) -> bytes:
        delta: Json = {"role": "assistant", "content": "" if not self._tool else None}
        if self._tool:
            delta["tool_calls"] = [{"index": 0, **self._call("")}]
        return self._event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _chunk_of(self, text: str) -> Json:
        if not self._tool:
            return {"delta": {"content": text}}
        return {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}}

    def _whole_of(self, text: str) -> Json:
        if not self._tool:
            return {"message": {"role": "assistant", "content": text}}
        return {"message": {"role": "assistant", "content": None, "tool_calls": [self._call(text)]}}

    def _logprobs_of(self, tokens: tuple[str, ...], place: int, most: int) -> Json:
        def told(token: str, value: float) -> Json:
            return {"token": token, "logprob": value, "bytes": list(token.encode())}

        content = []
        for n, token in enumerate(tokens, place):
            top = [told(*other) for other in _alternatives(token, n, most)]
            content.append({**told(token, logprob(token, n)), "top_logprobs": top})
        return {"content": content, "refusal": None}


class Completion(_Choices):
    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, id: str, created: int, model: str, wanted: GenerationRequest):
        super().__init__(id, created, model, wanted)
        self._offset, self._unsaid = 0, wanted.told.echo

    def begun(self) -> bytes:
        """The prompt, where it is asked back."""
        return self.piece("") if self._unsaid else b""

    def _choice(self, said: Json, text: str, finish: str | None) -> Json:
        echo, self._unsaid = self._unsaid, ""
        logprobs = self._logprobs(text, self._told.echoed if echo else ())
        return {"index": 0, "text": echo + text, "logprobs": logprobs, "finish_reason": finish}

    def _chunk_of(self, text: str) -> Json:
        return {}

    _whole_of = _chunk_of

    def _logprobs_of(self, tokens: tuple[str, ...], place: int, most: int) -> Json:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        # Nothing comes before the first token of a prompt that would make it likely.
        first = 1 if self._told.echoed and place == 0 else 0
        chosen = [None if n < first else logprob(token, n) for n, token in enumerate(tokens, place)]
        top = [None if n < first else dict(_alternatives(token, n, most)) for n, token in enumerate(tokens, place)]
        return {
            "tokens": list(tokens), "token_logprobs": chosen, "top_logprobs": top if most else None,
            "text_offset": offsets,
        }  # fmt: skip


class Response(AnswerShape):
    """The Responses API: events are numbered, and the last one carries the whole response."""

    def __init__(self, id: str, created: int, model: str, wanted: GenerationRequest):
        self._id, self._item, self._created, self._model = f"resp_{id}", f"msg_{id}", created, model
        self._place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        self._status = "completed" if wanted.ending == "stop" else "incomplete"
        self._number = -1

    def _event(self, kind: str, **more: object) -> bytes:
        self._number += 1
        data = _encode({"type": kind, "sequence_number": self._number, **more})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _part(self, text: str) -> Json:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _message(self, status: str, text: str | None) -> Json:
        content = [] if text is None else [self._part(text)]
        return {"id": self._item, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, text: str | None = None, usage: AnswerUsage | None = None) -> Json:
        counted = usage and {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.completion,
        }
        return {
            "id": self._id, "object": "response", "created_at": self._created, "model": self._model, "status": status,
            "error": None, "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None, "metadata": {"emulated_by": "crosstie"}, "parallel_tool_calls": True,
            "temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "tools": [],
            "output": [] if text is None else [self._message(status, text)],
            "usage": counted,
        }  # fmt: skip

    def begun(self) -> bytes:
        return b"".join((
            self._event("response.created", response=self._response("in_progress")),
            self._event("response.in_progress", response=self._response("in_progress")),
            self._event("response.output_item.added", output_index=0, item=self._message("in_progress", None)),
            self._event("response.content_part.added", **self._place, part=self._part("")),
        ))  # fmt: skip

    def piece(self, text: str, usage: AnswerUsage | None = None) -> bytes:
        return self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def ending(self, text: str, whole: str, usage: AnswerUsage) -> bytes:
        return b"".join((
            self.piece(text),
            self._event("response.output_text.done", **self._place, text=whole, logprobs=[]),
            self._event("response.content_part.done", **self._place, part=self._part(whole)),
            self._event("response.output_item.done", output_index=0, item=self._message(self._status, whole)),
            self._event(f"response.{self._status}", response=self._response(self._status, whole, usage)),
        ))  # fmt: skip

    def whole(self, text: str, usage: AnswerUsage) -> bytes:
        return _encode(self._response(self._status, text, usage))


class Embeddings(AnswerShape):
    """A vector for each text, of length one, the same for the same text."""

    def __init__(self, model: str, texts: list[bytes], dimensions: int, as_base64: bool):
        self._model, self._texts, self._dimensions, self._as_base64 = model, texts, dimensions, as_base64

    def whole(self, text: str, usage: AnswerUsage) -> bytes:
        data = []
        for index, text_bytes in enumerate(self._texts):
            vector = _vector(text_bytes, self._dimensions)
            value = base64.b64encode(vector.tobytes()).decode() if self._as_base64 else vector.tolist()
            data.append({"object": "embedding", "index": index, "embedding": value})
        counted = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}
        return _encode({"object": "list", "data": data, "model": self._model, "usage": counted})


def _vector(text: bytes, dimensions: int) -> "array[float]":
    state, raw = zlib.crc32(text), []
    for _ in range(dimensions):
        state = (1664525 * state + 1013904223) % 2**32
        raw.append(state / 2**31 - 1.0)
    length = sum(x * x for x in raw) ** 0.5 or 1.0
    return array("f", [x / length for x in raw])


def failure(status: int, kind: str, message: str, param: str | None = None) -> bytes:
    """As vLLM words it."""
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def models(
    model: str, deployment: Deployment, created: int, max_context: int, adapters: Mapping[str, str]
) -> bytes:  # fmt: skip
    """`adapters`: by name, where each was loaded from."""
    entry = {
        "id": model, "object": "model", "created": created, "owned_by": FINGERPRINT, "root": deployment.model.id,
        "parent": None, "max_model_len": max_context, "emulates": _conditions(deployment),
    }  # fmt: skip
    loaded = [{**entry, "id": name, "root": path, "parent": model} for name, path in adapters.items()]
    return _encode({"object": "list", "data": [entry, *loaded]})


def _conditions(deployment: Deployment) -> dict[str, str]:
    """By the names of result columns, so that a benchmark need not be told."""
    split = deployment.parallelism
    said = {
        "accelerator": deployment.accelerator.id, "precision": deployment.precision.id, "engine": deployment.stack.id
    }  # fmt: skip
    return {**said, "tp": str(split.tp)} if split.gpus == split.tp else said

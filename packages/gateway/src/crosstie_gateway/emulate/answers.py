"""Answers in OpenAI's shapes. A piece of a stream is three strings joined."""

import base64
import json
import math
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from crosstie.core.deployment import Deployment
from crosstie.core.emulated import FINGERPRINT
from crosstie_gateway.emulate.requests import GenerationRequest
from crosstie_gateway.emulate.tokens import logprob, pieces

_DONE = b"data: [DONE]\n\n"
# Deterministic vectors are for plumbing, not for meaning.
EMBEDDING_DIMENSIONS = 16


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    prompt: int
    completion: int
    cached: int

    def json(self) -> str:
        return (
            f'{{"prompt_tokens":{self.prompt},"completion_tokens":{self.completion},'
            f'"total_tokens":{self.prompt + self.completion},'
            f'"prompt_tokens_details":{{"cached_tokens":{self.cached}}}}}'
        )


class AnswerShape:
    """One answer in the making; `begun` and `piece` are of a stream, `ending` is its last text and what follows."""

    def begun(self) -> bytes:
        return b""

    def piece(self, text: str, usage: AnswerUsage | None = None) -> bytes:
        raise NotImplementedError

    def ending(self, text: str, whole: str, usage: AnswerUsage) -> bytes:
        raise NotImplementedError

    def whole(self, text: str, usage: AnswerUsage) -> bytes:
        raise NotImplementedError


class _Choices(AnswerShape):
    """Completions with one choice; how a piece of text stands in a chunk, and all of it in a whole answer."""

    id_prefix = kind = chunk_kind = ""
    chunk_text = whole_text = ("", "")

    def __init__(self, id: str, created: int, model: str, wanted: GenerationRequest):
        self._ending: str = wanted.ending
        self._include_usage = wanted.include_usage
        self._told, self._place = wanted.told, 0

        def head(kind: str) -> str:
            return (
                f'{{"id":"{self.id_prefix}-{id}","object":"{kind}","created":{created},"model":{json.dumps(model)},'
                f'"system_fingerprint":"{FINGERPRINT}","choices":['
            )

        self._whole, self._chunk = head(self.kind), f"data: {head(self.chunk_kind)}"
        opening, self._closing = self.chunk_text
        self._piece = f'{self._chunk}{{"index":0,{opening}'

    def piece(self, text: str, usage: AnswerUsage | None = None) -> bytes:
        so_far = f',"usage":{usage.json()}' if usage is not None else ""
        ending = f'{self._closing},"logprobs":{self._logprobs(text)},"finish_reason":null}}]{so_far}}}\n\n'
        return f"{self._piece}{_escaped(text)}{ending}".encode()

    def ending(self, text: str, whole: str, usage: AnswerUsage) -> bytes:
        last = (
            f'{self._piece}{_escaped(text)}{self._closing},"logprobs":{self._logprobs(text)},'
            f'"finish_reason":"{self._ending}"}}]}}\n\n'
        )
        if self._include_usage:
            last += f'{self._chunk}],"usage":{usage.json()}}}\n\n'
        return last.encode() + _DONE

    def whole(self, text: str, usage: AnswerUsage) -> bytes:
        opening, closing = self.whole_text
        choice = (
            f'{{"index":0,{opening}{_escaped(text)}{closing},"logprobs":{self._logprobs(text)},'
            f'"finish_reason":"{self._ending}"}}'
        )
        return f'{self._whole}{choice}],"usage":{usage.json()}}}'.encode()

    def _logprobs(self, text: str) -> str:
        """Of the tokens of a piece: null, unless they are asked for."""
        if self._told.logprobs is None:
            return "null"
        tokens = pieces(text)
        place, self._place = self._place, self._place + len(tokens)
        return json.dumps(self._logprobs_of(tokens, place, self._told.logprobs))

    def _logprobs_of(self, tokens: tuple[str, ...], place: int, most: int) -> dict[str, object]:
        raise NotImplementedError


def _escaped(text: str) -> str:
    return json.dumps(text)[1:-1]


def _alternatives(token: str, place: int, most: int) -> list[tuple[str, float]]:
    """The likeliest tokens there, as many as are asked for: what was chosen, and what nobody would have."""
    chosen = logprob(token, place)
    rest = math.log1p(-math.exp(chosen)) if chosen < 0.0 else -20.0
    others = [(f" {n}", rest - 0.7 * n) for n in range(1, most)]
    return [(token, chosen), *others][:most]


class Chat(_Choices):
    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    chunk_text = ('"delta":{"content":"', '"}')
    whole_text = ('"message":{"role":"assistant","content":"', '"}')

    def __init__(self, id: str, created: int, model: str, wanted: GenerationRequest):
        self._begins = '{"role":"assistant","content":""}'
        if name := wanted.told.calls:
            call = f'"id":"call_{id}","type":"function","function":{{"name":{json.dumps(name)},"arguments":"'
            self._begins = f'{{"role":"assistant","content":null,"tool_calls":[{{"index":0,{call}"}}}}]}}'
            self.chunk_text = ('"delta":{"tool_calls":[{"index":0,"function":{"arguments":"', '"}}]}')
            self.whole_text = (f'"message":{{"role":"assistant","content":null,"tool_calls":[{{{call}', '"}}]}')
        super().__init__(id, created, model, wanted)
        if name and self._ending == "stop":
            self._ending = "tool_calls"

    def begun(self) -> bytes:
        return f'{self._chunk}{{"index":0,"delta":{self._begins},"logprobs":null,"finish_reason":null}}]}}\n\n'.encode()

    def _logprobs_of(self, tokens: tuple[str, ...], place: int, most: int) -> dict[str, object]:
        def told(token: str, value: float) -> dict[str, object]:
            return {"token": token, "logprob": value, "bytes": list(token.encode())}

        content = []
        for n, token in enumerate(tokens, place):
            top = [told(*other) for other in _alternatives(token, n, most)]
            content.append({**told(token, logprob(token, n)), "top_logprobs": top})
        return {"content": content, "refusal": None}


class Completion(_Choices):
    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    chunk_text = whole_text = ('"text":"', '"')

    def __init__(self, id: str, created: int, model: str, wanted: GenerationRequest):
        super().__init__(id, created, model, wanted)
        self._offset, self._unsaid = 0, wanted.told.echo

    def begun(self) -> bytes:
        """The prompt, where it is asked back."""
        return self.piece("") if self._unsaid else b""

    def piece(self, text: str, usage: AnswerUsage | None = None) -> bytes:
        return super().piece(self._with_prompt(text), usage)

    def ending(self, text: str, whole: str, usage: AnswerUsage) -> bytes:
        return super().ending(self._with_prompt(text), whole, usage)

    def whole(self, text: str, usage: AnswerUsage) -> bytes:
        return super().whole(self._with_prompt(text), usage)

    def _with_prompt(self, text: str) -> str:
        return self._unsaid + text

    def _logprobs(self, text: str) -> str:
        said, self._unsaid = self._unsaid, ""
        if self._told.logprobs is None:
            return "null"
        tokens = (*(self._told.echoed if said else ()), *pieces(text.removeprefix(said)))
        place, self._place = self._place, self._place + len(tokens)
        return json.dumps(self._logprobs_of(tokens, place, self._told.logprobs))

    def _logprobs_of(self, tokens: tuple[str, ...], place: int, most: int) -> dict[str, object]:
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
        data = json.dumps({"type": kind, "sequence_number": self._number, **more}, separators=(",", ":"))
        return f"event: {kind}\ndata: {data}\n\n".encode()

    def _part(self, text: str) -> dict[str, object]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _message(self, status: str, text: str | None) -> dict[str, object]:
        content = [] if text is None else [self._part(text)]
        return {"id": self._item, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, text: str | None = None, usage: AnswerUsage | None = None) -> dict[str, object]:
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
        self._number += 1
        return (
            f'event: response.output_text.delta\ndata: {{"type":"response.output_text.delta",'
            f'"sequence_number":{self._number},"item_id":"{self._item}","output_index":0,"content_index":0,'
            f'"delta":"{_escaped(text)}","logprobs":[]}}\n\n'
        ).encode()

    def ending(self, text: str, whole: str, usage: AnswerUsage) -> bytes:
        return b"".join((
            self.piece(text),
            self._event("response.output_text.done", **self._place, text=whole, logprobs=[]),
            self._event("response.content_part.done", **self._place, part=self._part(whole)),
            self._event("response.output_item.done", output_index=0, item=self._message(self._status, whole)),
            self._event(f"response.{self._status}", response=self._response(self._status, whole, usage)),
        ))  # fmt: skip

    def whole(self, text: str, usage: AnswerUsage) -> bytes:
        return json.dumps(self._response(self._status, text, usage)).encode()


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
        return json.dumps({"object": "list", "data": data, "model": self._model, "usage": counted}).encode()


def _vector(text: bytes, dimensions: int) -> "array[float]":
    state, raw = zlib.crc32(text), []
    for _ in range(dimensions):
        state = (1664525 * state + 1013904223) % 2**32
        raw.append(state / 2**31 - 1.0)
    length = sum(x * x for x in raw) ** 0.5 or 1.0
    return array("f", [x / length for x in raw])


def failure(status: int, kind: str, message: str, param: str | None = None) -> bytes:
    """As vLLM words it."""
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}}).encode()


def models(
    model: str, deployment: Deployment, created: int, max_context: int, adapters: Mapping[str, str]
) -> bytes:  # fmt: skip
    """`adapters`: by name, where each was loaded from."""
    entry = {
        "id": model, "object": "model", "created": created, "owned_by": FINGERPRINT, "root": deployment.model.id,
        "parent": None, "max_model_len": max_context, "emulates": _conditions(deployment),
    }  # fmt: skip
    loaded = [{**entry, "id": name, "root": path, "parent": model} for name, path in adapters.items()]
    return json.dumps({"object": "list", "data": [entry, *loaded]}).encode()


def _conditions(deployment: Deployment) -> dict[str, str]:
    """As columns of results name them, so that a benchmark of it need not be told."""
    split = deployment.parallelism
    said = {
        "accelerator": deployment.accelerator.id, "precision": deployment.precision.id, "engine": deployment.stack.id
    }  # fmt: skip
    return {**said, "tp": str(split.tp)} if split.gpus == split.tp else said

"""Backends that tell one story, and go on with it from wherever they are told that it stands."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from tests.run.gateway.fakes import Fake

from crosstie.wire.fetch import Answer
from crosstie.wire.sse import payloads
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

WORDS = [f"w{at} " for at in range(8)]
STORY = "".join(WORDS)
PROMPT_TOKENS = 7


class Teller(Fake):
    """`cut_after`: words of its own after which it breaks off, in the way that `mode` says. It counts all along if it
    is asked to, as vLLM does, unless it is another engine."""

    owner = "vllm"

    def __init__(self, name: str, story: list[str] | None = None):
        super().__init__(name)
        self.story = WORDS if story is None else story
        self.cut_after = 3
        # Whether its template takes white space off the end of messages.
        self.trims = False
        self.finish = "stop"

    def _handle(self, request: Request, reply: Reply) -> None:
        if request.path == "/v1/models":
            reply.send(200, json.dumps({"data": [{"id": "m", "owned_by": self.owner}]}).encode())
        elif request.path == "/tokenize":
            asked = json.loads(request.body)
            self.tokenised = asked
            tokens = [self.story.index(word) for word in self._split(asked["prompt"])]
            reply.send(200, json.dumps({"tokens": tokens}).encode())
        else:
            super()._handle(request, reply)

    def _split(self, text: str) -> list[str]:
        """The words of the story that a text ends with."""
        for at in range(len(self.story), 0, -1):
            if text.endswith("".join(self.story[:at])):
                return self.story[:at]
        return []

    def begun(self, body: dict[str, Any]) -> int:
        if "messages" in body and "prompt" not in body:
            last = body["messages"][-1]
            assert (last["role"] == "assistant") == bool(body.get("continue_final_message"))
            if last["role"] != "assistant":
                return 0
            assert body["add_generation_prompt"] is False
            text = last["content"]
            if self.trims:
                text = text.rstrip()
                return next(at for at in range(len(self.story) + 1) if "".join(self.story[:at]).rstrip() == text)
            return len(self._split(text))
        if isinstance(body["prompt"], list):
            return len(body["prompt"]) - 2
        return len(self._split(body["prompt"]))

    def _stream(
        self, body: dict[str, Any], reply: Reply, until: int, *, at: int = 0, then: Sequence[Callable[[], None]] = ()
    ) -> None:
        """`until` is what the ways of failing pass: here it is the number of words after which they fail."""
        start = self.begun(body)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or len(self.story)
        end = min(len(self.story), start + limit)
        stop = end if self.mode == "ok" else min(start + self.cut_after, end)
        if not reply.started:
            reply.start(200, b"content-type: text/event-stream\r\n", None)
            self._say(reply, body, {"role": "assistant", "content": ""}, start, start)
        self._tell(body, reply, start, start, stop, end, then)

    def _tell(
        self, body: dict[str, Any], reply: Reply, start: int, at: int, stop: int, end: int,
        then: Sequence[Callable[[], None]],
    ) -> None:  # fmt: skip
        if at < stop:
            text = self.story[at]
            if self.trims and at == start and start:
                # What the template took off is made again.
                before = self.story[start - 1]
                text = before[len(before.rstrip()) :] + text
            self._say(reply, body, {"content": text}, start, at + 1)
            self.loop.call_later(self.pause_s, self._tell, body, reply, start, at + 1, stop, end, then)
        elif self.mode == "ok":
            finish = "length" if end < len(self.story) else self.finish
            self._say(reply, body, {}, start, end, finish=finish)
            if self._options(body).get("include_usage"):
                self._write(reply, {**self._about(body), "choices": [], "usage": self._usage(start, end)})
            reply.write(b"data: [DONE]\n\n")
            reply.end()
        else:
            self._break_off(then)

    def _options(self, body: dict[str, Any]) -> dict[str, Any]:
        return body.get("stream_options") or {}

    def _usage(self, start: int, at: int) -> dict[str, int]:
        given, made = PROMPT_TOKENS + start, at - start
        return {"prompt_tokens": given, "total_tokens": given + made, "completion_tokens": made}

    def _about(self, body: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if "messages" in body and "prompt" not in body else "text_completion"
        return {"id": f"cmpl-{self.name}", "object": kind, "created": 17 + self.port, "model": body["model"]}

    def _say(
        self, reply: Reply, body: dict[str, Any], delta: dict[str, Any], start: int, at: int, finish: str | None = None
    ) -> None:
        chat = "messages" in body and "prompt" not in body
        if not chat and "role" in delta:
            return
        said: dict[str, Any] = {"index": 0, "delta": delta} if chat else {"index": 0, "text": delta.get("content", "")}
        event = {**self._about(body), "choices": [{**said, "logprobs": None, "finish_reason": finish}]}
        if self.owner == "vllm" and self._options(body).get("continuous_usage_stats"):
            event["usage"] = self._usage(start, at)
        self._write(reply, event)

    def _write(self, reply: Reply, event: dict[str, Any]) -> None:
        reply.write(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")

    def _reasons(self, body: dict[str, Any], reply: Reply) -> None:
        reply.start(200, b"content-type: text/event-stream\r\n", None)
        self._say(reply, body, {"reasoning_content": "hm"}, 0, 1)
        self.loop.call_later(0.02, reply.cut)

    def _loses_its_end(self, body: dict[str, Any], reply: Reply, *after: bytes) -> None:
        """All is said, and how it ended; then the connection breaks."""
        mode, self.mode = self.mode, "polite-cut"
        self.cut_after = end = len(self.story)
        told = [partial(self._say, reply, body, {}, 0, end, "stop"), *(partial(reply.write, more) for more in after)]
        self._stream(body, reply, 0, then=[*told, reply.cut])
        self.mode = mode

    def _loses_its_connection(self, body: dict[str, Any], reply: Reply) -> None:
        """Even its last event is out; what breaks is what would have said that no more follows."""
        self._loses_its_end(body, reply, b"data: [DONE]\n\n")


@asynccontextmanager
async def tellers(count: int = 2, story: list[str] | None = None) -> AsyncIterator[list[Teller]]:
    made = [Teller(f"t{at}", story) for at in range(count)]
    for teller in made:
        await teller.start()
    try:
        yield made
    finally:
        for teller in made:
            teller.crash()


class Heard:
    """A stream as a client reads it, and whether it is one stream."""

    def __init__(self, answer: Answer):
        self.status, self.body = answer.status, answer.body
        said = payloads(answer.body)
        self.done = said.count(b"[DONE]")
        self.ends_in_done = bool(said) and said[-1] == b"[DONE]"
        self.events = [json.loads(one) for one in said if one != b"[DONE]"]
        self.errors = [event["error"] for event in self.events if "error" in event]
        self.comments = [line for line in answer.body.decode().splitlines() if line.startswith(":")]
        self.choices = [choice for event in self.events for choice in event.get("choices", [])]
        self.usages = [event["usage"] for event in self.events if event.get("usage")]
        deltas = [choice.get("delta", {}) for choice in self.choices]
        self.roles = [delta["role"] for delta in deltas if "role" in delta]
        self.text = "".join(
            (choice["delta"].get("content") or "") if "delta" in choice else choice["text"] for choice in self.choices
        )
        self.finishes = [choice["finish_reason"] for choice in self.choices if choice["finish_reason"]]

    @property
    def names(self) -> set[tuple[object, ...]]:
        """Of the answer, as its events say them: one, if they are of one answer."""
        keys = ("id", "created", "model", "object")
        return {tuple(event.get(key) for key in keys) for event in self.events if "error" not in event}

"""An emulated replica behind a port: OpenAI's API as vLLM serves it, and a way to make it fail."""

import asyncio
import json
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from crosstie.catalog.vision import image_rule
from crosstie.core.emulated import FINGERPRINT
from crosstie.core.errors import BadInput
from crosstie_gateway.emulate import requests
from crosstie_gateway.emulate.adapters import LOAD, UNLOAD, EmulatedAdapters
from crosstie_gateway.emulate.answers import (
    EMBEDDING_DIMENSIONS,
    AnswerShape,
    AnswerUsage,
    Chat,
    Completion,
    Embeddings,
    Response,
    failure,
    models,
)
from crosstie_gateway.emulate.faults import KINDS, POISON, Fault, Faults, Kind, read_fault
from crosstie_gateway.emulate.replica import EmulatedReplica, Sequence
from crosstie_gateway.emulate.requests import (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    EngineError,
    GenerationRequest,
    PromptText,
    ResponseBody,
    Session,
    decode,
)
from crosstie_gateway.emulate.tokens import BYTES_PER_TOKEN, filler
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply, Server

_STREAM = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
_MOST_DIMENSIONS = 8192
# By path: the body, its prompt as text, and the answer's shape.
_GENERATE: dict[str, tuple[Any, Callable[..., PromptText], Callable[..., AnswerShape]]] = {
    "/v1/chat/completions": (ChatBody, requests.chat_text, Chat),
    "/v1/completions": (CompletionBody, requests.completion_text, Completion),
    "/v1/responses": (ResponseBody, requests.response_text, Response),
}
_LOADS = b"# TYPE crosstie_emulated_lora_loads_total counter\ncrosstie_emulated_lora_loads_total %d\n"
Handler = Callable[[Request, Reply], None]
# How often a port that could not be taken again after a crash is tried.
_AGAIN_S = 0.05
# Between two keep-alives of a stream in which nothing else comes.
_PING_S = 0.05
_LOGIN = b"<!doctype html><title>Sign in</title><form><input name=user><input type=password></form>"
_POISON = POISON.encode()
# How long the answer to a request for a crash has to leave.
_ANSWER_S = 0.005


class Generating(Sequence):
    """A request that is being answered."""

    __slots__ = ("cut", "replica", "reply", "sent", "server", "shape")

    def __init__(
        self, server: "EmulatedServer", reply: Reply, shape: AnswerShape, wanted: GenerationRequest,
        waits: bool = False,
    ):  # fmt: skip
        """`waits`: the prompt's cache comes from another replica, which `arrive` tells of."""
        super().__init__(wanted)
        self.server, self.replica, self.reply, self.shape = server, server.replica, reply, shape
        self.sent = 0
        self.cut: Fault | None = server.faults.hits("cut") if wanted.streams else None
        reply.watcher = self
        if not waits:
            self._start()
            self.replica.submit(self)

    def _start(self) -> None:
        if self.wanted.streams:
            self.reply.start(200, _STREAM + self.server.headers, None)
            # Long before the first token, as engines do.
            self.reply.flush()

    def arrive(self, after_s: float) -> None:
        self.server.loop.call_later(after_s / self.replica.speed, self._submit)

    def fail(self, error: EngineError) -> None:
        """Its cache will not come."""
        if not self.reply.gone:
            self.reply.send(error.status, failure(error.status, error.kind, str(error)), self.server.headers)

    def _submit(self) -> None:
        if not self.reply.gone:
            self._start()
            self.replica.submit(self, handed_over=True)

    @property
    def slow(self) -> bool:
        return self.reply.slow

    def on_tokens(self, tokens: int, finished: bool) -> None:
        reply = self.reply
        if not self.wanted.streams:
            reply.send(200, self.shape.whole(self._text(0, tokens), self._usage(tokens)), self.server.headers)
            return
        if self.cut is not None and tokens >= (self.cut.after_tokens or 0):
            self._cut(self.cut)
            return
        data = self.shape.begun() if self.sent == 0 else b""
        text = self._text(self.sent, tokens)
        self.sent = tokens
        if finished:
            reply.write(data + self.shape.ending(text, self._text(0, tokens), self._usage(tokens)))
            reply.end()
        else:
            reply.write(data + self._piece(text, tokens))

    def _piece(self, text: str, tokens: int) -> bytes:
        return self.shape.piece(text, self._usage(tokens) if self.wanted.continuous else None)

    def _text(self, start: int, end: int) -> str:
        """What the answer has there, after what it began with."""
        begun, end, text = self.wanted.begun, min(end, self.wanted.written), self.wanted.told.text
        if text is not None:
            return text[start * BYTES_PER_TOKEN : end * BYTES_PER_TOKEN]
        return filler(begun + start, begun + end) if start < end else ""

    def _usage(self, tokens: int) -> AnswerUsage:
        return AnswerUsage(self.wanted.prompt_tokens, tokens, self.cached_tokens)

    def _cut(self, fault: Fault) -> None:
        """Ends the connection after so many tokens, as an engine does that is stopped."""
        after = fault.after_tokens or 0
        data = self.shape.begun() if self.sent == 0 and after else b""
        if after > self.sent:
            data += self._piece(self._text(self.sent, after), after)
        if fault.mid_event:
            event = self._piece(self._text(after, after + 1), after + 1)
            data += event[: len(event) // 2]
        self.reply.write(data)
        self.reply.cut(after_written=True)
        self.replica.cancel(self)

    def cut_off(self) -> None:
        self.reply.cut()

    def on_client_gone(self) -> None:
        self.replica.cancel(self)

    def on_client_slow(self) -> None:
        """The replica asks before it tells."""

    on_client_ready = on_client_slow


class EmulatedServer:
    """`index`: which replica of its pool it is."""

    # Of a disaggregated service: which of its sides; empty: the service itself.
    role = ""

    def __init__(self, replica: EmulatedReplica, index: int, *, seed: int = 0):
        self.replica, self.index, self.seed = replica, index, seed
        self.loop = replica.loop
        self.model = replica.emulated.served_as
        # Where it answers, and the path before /v1 and /health there.
        self.url = self.root = ""
        # Which of the models of a shared pool it has, where each has an address of its own.
        self.hosted: str | None = None
        self.faults = Faults()
        self.host, self.port = "", 0
        self.rename(f"{replica.emulated.pool}/{index}")
        self._created = int(time.time())
        self._answered = 0
        self._wire: Server | None = None
        # Requests that came while it hung.
        self._hung: list[tuple[Request, Reply]] = []
        self._timers: dict[Kind, asyncio.TimerHandle] = {}
        self._reopening: asyncio.Task[None] | None = None
        self._generating: dict[str, Handler] = {
            **{path: partial(self._generate, *how) for path, how in _GENERATE.items()},
            "/v1/embeddings": self._embed,
            "/close_session": self._close_session,
        }
        speed = replica.speed
        self.adapters = adapters = EmulatedAdapters(lambda after_s, do: self.loop.call_later(after_s / speed, do))
        for path, how in ((LOAD, adapters.load), (UNLOAD, adapters.unload)):
            # vLLM's, and SGLang's.
            self._generating[f"/v1{path}"] = how
            self._generating[path] = partial(how, as_json=True)
        self._telling: dict[str, Callable[[Reply], None]] = {
            "/health": lambda reply: reply.send(200, b"", self.headers),
            "/metrics": self._metrics,
            "/version": lambda reply: reply.send(200, json.dumps({"version": FINGERPRINT}).encode(), self.headers),
            "/v1/models": self._models,
        }

    def rename(self, name: str) -> None:
        self.name = name
        said = f"{name}; {self.replica.emulated.label}; speed={self.replica.speed:g}"
        self.headers = f"x-crosstie-emulated: {said}\r\n".encode("latin-1", "replace")

    async def listen(self, host: str, port: int) -> None:
        """Port 0 takes a free one. Raises OSError."""
        door = Server(
            self.loop, self.handle, refusal=lambda status, why: failure(status, "BadRequestError", why),
            turns_away=lambda: self.faults.hits("refuse") is not None,
        )  # fmt: skip
        self.port = await door.listen(host, port)
        self.host, self._wire = host, door

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        if self._reopening is not None:
            self._reopening.cancel()
        self.replica.close()
        self._drop()

    def _drop(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        self._hung.clear()

    # Faults

    def inject(self, fault: Fault) -> None:
        """In force from now on, for as long as it says; replaces one of the same kind."""
        publisher = self.replica.publisher
        if fault.kind == "empty-cache":
            # Over as soon as it has happened.
            self.replica.empty_cache()
            if publisher is not None:
                publisher.cleared()
            return
        self.clear(fault.kind)
        self.faults.set(fault)
        if fault.for_s is not None:
            self._timers[fault.kind] = self.loop.call_later(
                fault.for_s / self.replica.speed, lambda: self.clear(fault.kind)
            )
        if fault.kind == "slow":
            self.replica.pace(slower=fault.factor or 1.0)
        elif fault.kind == "hang" and fault.share is None:
            self.replica.hold()
        elif fault.kind == "lose-events" and publisher is not None:
            publisher.losing = True
        elif fault.kind == "crash":
            self._drop()
            self.adapters.loaded.clear()
            self.replica.restart()
            if publisher is not None:
                publisher.restart()

    def clear(self, kind: Kind | None = None) -> None:
        """Ends a fault, or all of them."""
        for ending in KINDS if kind is None else (kind,):
            timer = self._timers.pop(ending, None)
            if timer is not None:
                timer.cancel()
            if self.faults.pop(ending, None) is None:
                continue
            if ending == "slow":
                self.replica.pace(slower=1.0)
            elif ending == "hang":
                self.replica.release()
                hung, self._hung = self._hung, []
                self._handle_again(hung)
            elif ending == "lose-events" and self.replica.publisher is not None:
                self.replica.publisher.losing = False
            elif ending == "crash":
                self._reopening = self.loop.create_task(self._reopen())

    def _handle_again(self, waiting: list[tuple[Request, Reply]]) -> None:
        for request, reply in waiting:
            if not reply.gone:
                self.handle(request, reply)

    async def _reopen(self) -> None:
        while self._wire is None:
            try:
                await self.listen(self.host, self.port)
            except OSError:
                # Somebody else has the port for now.
                await asyncio.sleep(_AGAIN_S)

    # Requests

    def handle(self, request: Request, reply: Reply) -> None:
        path = request.path.removeprefix(self.root)
        if path == "/emulate/fault":
            self._fault(request, reply)
            return
        generates = self._generating.get(path)
        hang = self.faults.get("hang")
        if hang is not None and (generates or not hang.spares_health) and self.faults.hits("hang"):
            self._hung.append((request, reply))
        elif self.faults.hits("refuse"):
            reply.cut()
        else:
            try:
                self._answer(path, request, reply, generates)
            except EngineError as error:
                body = failure(error.status, error.kind, str(error), error.param)
                reply.send(error.status, body, self.headers)

    def _answer(self, path: str, request: Request, reply: Reply, generates: Handler | None) -> None:
        for kind in ("error", "reject"):
            fault = self.faults.get(kind)
            if fault is not None and (generates or not fault.spares_health) and self.faults.hits(kind):
                if kind == "reject":
                    raise _full()
                message = "EngineCore encountered an issue (emulated fault)."
                raise EngineError(fault.status or 500, "InternalServerError", message)
        tells = self._telling.get(path)
        if generates is None and tells is None:
            raise EngineError(404, "NotFoundError", "Not Found")
        if request.method != ("POST" if generates else "GET") and not (tells and request.method == "HEAD"):
            raise EngineError(405, "MethodNotAllowedError", "Method Not Allowed")
        if generates and "poison" in self.faults and _POISON in request.body:
            raise EngineError(500, "InternalServerError", "EngineCore encountered an issue (emulated fault).")
        if generates and self.faults.hits("login"):
            reply.send(200, _LOGIN, self.headers, b"text/html")
        elif generates and b'"stream"' in request.body and self.faults.hits("ping"):
            reply.start(200, _STREAM + self.headers, None)
            self._ping(reply)
        elif generates:
            generates(request, reply)
        elif tells:
            tells(reply)

    def _ping(self, reply: Reply) -> None:
        if "ping" not in self.faults:
            reply.cut()
        elif not reply.gone:
            reply.write(b": ping\n\n")
            self.loop.call_later(_PING_S, self._ping, reply)

    def _generate(
        self, type: Any, text_of: Callable[..., PromptText], shape_of: Callable[..., AnswerShape], request: Request,
        reply: Reply,
    ) -> None:  # fmt: skip
        body = self._decoded(request, type)
        emulated = self.replica.emulated
        text = text_of(body, image_rule(emulated.deployment.model.id))
        tokenizer, ids = emulated.tokenizer, None
        if tokenizer is not None:
            read = tokenizer.read(request.body, request.path)
            if read is not None and read[0]:
                text.tokens, ids = len(read[0]), array("I", read[0]).tobytes()
        wanted = requests.generation_of(body, text, emulated.max_context, emulated.mean_output_tokens, self.seed)
        if tokenizer is not None:
            wanted = replace(wanted, prompt=wanted.prompt if ids is None else ids, block_bytes=emulated.block_bytes)
        self._answered += 1
        id = f"emulated-{emulated.pool}-{self.index}-{self._answered}"
        shape = shape_of(id, int(time.time()), body.model or self.model, wanted)
        self._begin(reply, shape, wanted)

    def _embed(self, request: Request, reply: Reply) -> None:
        body: EmbeddingBody = self._decoded(request, EmbeddingBody)
        if body.dimensions is not None and not 1 <= body.dimensions <= _MOST_DIMENSIONS:
            raise requests.bad_request(f"dimensions {body.dimensions}: from 1 to {_MOST_DIMENSIONS}", "dimensions")
        texts = requests.prompts(body.input, "input")
        longest, most = max(text.tokens for text in texts), self.replica.emulated.max_context
        if longest > most:
            message = f"This model's maximum context length is {most} tokens. However, an input has {longest} tokens."
            raise requests.bad_request(message, "input")
        plain = [b"".join(text.pieces) for text in texts]
        as_base64 = body.encoding_format == "base64"
        # They are prefilled together, as one prompt of their length.
        wanted = GenerationRequest(b"", max(sum(text.tokens for text in texts), 1))
        shape = Embeddings(self.model, plain, body.dimensions or EMBEDDING_DIMENSIONS, as_base64)
        self._begin(reply, shape, wanted)

    def _begin(self, reply: Reply, shape: AnswerShape, wanted: GenerationRequest) -> None:
        self._check_room()
        Generating(self, reply, shape, wanted)

    def _check_room(self) -> None:
        if self.replica.full:
            raise _full()

    def _decoded(self, request: Request, type: Any) -> Any:
        body = requests.decode(request.body, type)
        if body.model not in (None, self.model) and self.adapters.named(body.model, self.model) is None:
            raise EngineError(404, "NotFoundError", f"The model `{body.model}` does not exist.", "model")
        return body

    def _close_session(self, request: Request, reply: Reply) -> None:
        self.replica.cache.close_session(decode(request.body, Session).session_id)
        reply.send(200, b"", self.headers)

    def _models(self, reply: Reply) -> None:
        emulated = self.replica.emulated
        said = models(
            self.model, emulated.deployment, self._created, emulated.max_context, self.adapters.loaded
        )  # fmt: skip
        reply.send(200, said, self.headers)

    def _metrics(self, reply: Reply) -> None:
        label = f"{self.name}, {self.replica.emulated.label}"
        page = self.replica.exposition(label) + _LOADS % self.adapters.loads
        reply.send(200, page, self.headers, b"text/plain; version=0.0.4; charset=utf-8")

    def _fault(self, request: Request, reply: Reply) -> None:
        """GET tells, POST sets, DELETE clears them."""
        coming: list[Fault] = []
        if request.method == "POST":
            try:
                fault = read_fault(request.body)
            except BadInput as error:
                reply.send(400, failure(400, "BadRequestError", str(error)), self.headers)
                return
            if fault.kind == "crash":
                # Answered first: it leaves nobody to answer.
                self.loop.call_later(_ANSWER_S, self.inject, fault)
                coming = [fault]
            else:
                self.inject(fault)
        elif request.method == "DELETE":
            self.clear()
        elif request.method != "GET":
            reply.send(405, failure(405, "MethodNotAllowedError", "Method Not Allowed"), self.headers)
            return
        in_force = msgspec.json.encode({"replica": self.name, "faults": [*self.faults.values(), *coming]})
        reply.send(200, in_force, self.headers)


def _full() -> EngineError:
    return EngineError(503, "ServiceUnavailableError", "The engine's queue is full: too many requests are waiting.")

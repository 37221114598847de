"""A language model of forty words behind OpenAI's API, with the faults and habits that a test asks for."""

import hashlib
import json
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

WORDS = [f" w{number}" for number in range(40)]


@dataclass
class Engine:
    """`sharp`: what every logit is multiplied by, as a wrong scale does. `ways`: what /completions can."""

    sharp: float = 1.0
    # Up to which position the model is as it should be.
    right_until: int = 10**9
    template: str = "user: {} assistant:"
    ways: tuple[str, ...] = ("prompt_logprobs", "echo", "steps")
    chat_logprobs: bool = True
    most_top: int = 20
    # What its tokenizer takes for a token.
    piece: str = r"\s*\S+"
    models: tuple[str, ...] = ("toy",)
    # Answers by the beginning of the prompt; what comes after is not the model's own.
    said: dict[str, Any] = field(default_factory=dict)
    refuses: str = "nothing at all"
    # Requests that it is too busy for, before it takes one.
    busy: int = 0
    key: str = ""
    url: str = ""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    def cut(self, text: str) -> list[str]:
        return re.findall(self.piece, text)

    def top(self, tokens: list[str], most: int) -> list[tuple[str, float]]:
        factor = self.sharp if len(tokens) > self.right_until or self.right_until == 10**9 else 1.0
        return _likeliest("|".join(tokens), factor)[:most]


@lru_cache(maxsize=50_000)
def _likeliest(context: str, factor: float) -> list[tuple[str, float]]:
    """By all that came before; the first words are likelier than the last. Kept, since every test asks the same."""
    digest = hashlib.sha256(context.encode()).digest() * 2
    raw = {word: factor * (digest[i] / 32 - i / 20) for i, word in enumerate(WORDS)}
    whole = math.log(math.fsum(map(math.exp, raw.values())))
    return sorted(((word, value - whole) for word, value in raw.items()), key=lambda pair: -pair[1])


class _Handler(BaseHTTPRequestHandler):
    engine: Engine
    protocol_version = "HTTP/1.1"
    # Head and body in one segment: in two the second waits for the acknowledgement of the first, 40 ms a request.
    wbufsize = -1

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: it is a test."""

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": name} for name in self.engine.models]})

    def do_POST(self) -> None:
        engine = self.engine
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        engine.asked.append((self.path, body))
        engine.at_once += 1
        engine.most_at_once = max(engine.most_at_once, engine.at_once)
        try:
            if engine.key and self.headers.get("authorization") != f"Bearer {engine.key}":
                return self._answer(401, {"error": {"message": "no such key"}})
            if len(engine.asked) > 4 and engine.busy > 0:
                engine.busy -= 1
                return self._answer(503, {"error": {"message": "too much to do"}})
            made = self._chat(body) if self.path.endswith("/chat/completions") else self._completion(body)
            self._answer(200 if "choices" in made else 400, made)
        finally:
            engine.at_once -= 1

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        engine, text = self.engine, body["messages"][0]["content"]
        if text.startswith(engine.refuses):
            return {"error": {"message": "the prompt is too long"}}
        if body.get("top_logprobs", 0) > engine.most_top:
            return {"error": {"message": "top_logprobs is too large"}}
        context = engine.cut(engine.template.format(text))
        usage = {"prompt_tokens": len(context), "completion_tokens": body["max_tokens"]}
        for begins, answer in engine.said.items():
            if text.startswith(begins):
                choice = {"index": 0, "message": answer, "finish_reason": "stop"}
                return {"choices": [choice], "usage": usage}
        listed, words = [], ""
        for _ in range(body["max_tokens"]):
            top = engine.top(context, body.get("top_logprobs") or 1)
            listed.append({
                "token": top[0][0], "logprob": top[0][1],
                "top_logprobs": [{"token": token, "logprob": p} for token, p in top],
            })  # fmt: skip
            context.append(top[0][0])
            words += top[0][0]
        shown = {"content": listed} if engine.chat_logprobs and body.get("logprobs") else None
        choice = {"index": 0, "message": {"content": words}, "logprobs": shown, "finish_reason": "length"}
        return {"choices": [choice], "usage": usage}

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        engine, tokens = self.engine, self.engine.cut(body["prompt"])
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 1}
        if "prompt_logprobs" in body:
            if "prompt_logprobs" not in engine.ways:
                return {"choices": [{"text": " x", "logprobs": None}], "usage": usage}
            listed: list[Any] = [None]
            for i in range(1, len(tokens)):
                best = dict(engine.top(tokens[:i], body["prompt_logprobs"]))
                # The one that stands there comes first, however unlikely.
                entry = {tokens[i]: best.get(tokens[i], -15.0)} | best
                listed.append({token: {"logprob": p, "decoded_token": token} for token, p in entry.items()})
            return {"choices": [{"text": "", "prompt_logprobs": listed}], "usage": usage}
        top = engine.top(tokens, body["logprobs"])
        if body.get("echo"):
            if "echo" not in engine.ways:
                return {"error": {"message": "echo is not supported"}}
            everything = [*tokens, top[0][0]]
            bests = [dict(engine.top(tokens[:i], body["logprobs"])) for i in range(1, len(everything))]
            # Two of the listed tokens have the same text, and the one that stands there has taken the room.
            tops = [None, *(dict(list(one.items())[:-1]) | {token: one.get(token, -15.0)}
                            for one, token in zip(bests, everything[1:], strict=True))]  # fmt: skip
            offsets = [sum(map(len, everything[:i])) for i in range(len(everything))]
            listed_ = {"tokens": everything, "top_logprobs": tops, "text_offset": offsets}
            return {"choices": [{"text": body["prompt"], "logprobs": listed_}], "usage": usage}
        if "steps" not in engine.ways:
            return {"error": {"message": "no completions here"}}
        logprobs = {"tokens": [top[0][0]], "top_logprobs": [dict(top)]}
        return {"choices": [{"text": top[0][0], "logprobs": logprobs}], "usage": usage}

    def _answer(self, status: int, said: dict[str, Any]) -> None:
        data = msgspec.json.encode(said)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def served(engine: Engine) -> Iterator[Engine]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"engine": engine}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    engine.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

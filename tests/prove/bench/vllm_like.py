"""A server that answers as vLLM does where `bench` asks: a model with a root, usage, and its own count of tokens."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Around the one message of a chat, as Llama 3.1's template has it.
TEMPLATE_TOKENS = 15
_PIECES = re.compile(r" ?[A-Za-z]+|\d{1,3}|[^\sA-Za-z\d]|\s")


def by_words(text: str) -> int:
    """Words apart, long ones in pieces, as byte pairs have it."""
    return sum(-(-len(one) // 6) for one in _PIECES.findall(text))


def by_bytes(text: str) -> int:
    """A count that words do not add up to."""
    return max(len(text) // 3, 1)


@dataclass
class VllmLike:
    served: str = "llama-3.1-8b"
    root: str = ""
    count: Any = by_words
    tokenizes: bool = True
    owned_by: str = "vllm"
    url: str = ""
    # What was counted of prompts, and when each came, in order.
    prompts: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    asked_to_count: int = 0

    def tokens(self, asked: dict[str, Any]) -> int:
        if "messages" in asked:
            return TEMPLATE_TOKENS + sum(int(self.count(one["content"])) for one in asked["messages"])
        return 1 + int(self.count(asked["prompt"]))


@contextmanager
def vllm_like(**options: Any) -> Iterator[VllmLike]:
    engine = VllmLike(**options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            model = {"id": engine.served, "owned_by": engine.owned_by, "root": engine.root or engine.served}
            said = {"/v1/models": {"data": [model | {"max_model_len": 32_000}]}, "/version": {"version": "0.24.0"}}
            self._json(said.get(self.path))

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/tokenize" and engine.tokenizes:
                engine.asked_to_count += 1
                self._json({"count": engine.tokens(asked), "max_model_len": 32_000, "tokens": []})
            elif self.path == "/v1/chat/completions":
                self._chat(asked)
            else:
                self._json(None)

        def _chat(self, asked: dict[str, Any]) -> None:
            usage = {"prompt_tokens": engine.tokens(asked), "completion_tokens": asked["max_tokens"]}
            if not asked.get("stream"):
                self._json({"choices": [{"message": {"content": "x"}}], "usage": usage})
                return
            engine.prompts.append(usage["prompt_tokens"])
            engine.texts.append(asked["messages"][0]["content"])
            piece = 'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
            last = f'data: {{"choices":[],"usage":{json.dumps(usage)}}}\n\ndata: [DONE]\n\n'
            self._send("text/event-stream", (piece * 2 + last).encode())

        def _json(self, said: object) -> None:
            self._send("application/json", json.dumps(said or {}).encode(), 200 if said else 404)

        def _send(self, kind: str, data: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    engine.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

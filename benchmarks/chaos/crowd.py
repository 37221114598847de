"""Clients on raw sockets: most of them ask and read, some leave, stall, send slowly, or ask for nonsense.

Each request ends in one `Seen`: what its client made of it.
"""

import asyncio
import itertools
import json
import random
import socket
from collections.abc import Callable
from time import monotonic
from typing import Any, Literal

from http_answer import Answer, Malformed
from plan import LOCAL, Plan, planned

# What a client saw. `lost` is what must not be: no end, half an answer, a wrong one, or one that is another's.
How = Literal["answer", "error", "in-band error", "left", "stalled", "gateway killed", "lost"]
# No request may take so long: the gateway's own patience is far shorter.
_PATIENCE_S = 90.0


class Seen:
    __slots__ = ("began", "code", "complete_request", "ended", "first", "how", "plan", "status", "tokens", "why")

    def __init__(self, plan: Plan):
        self.plan = plan
        self.how: How = "lost"
        self.why = "it never ended"
        self.status = 0
        self.code = ""
        # Of the answer, as far as it was read: whole, or what had come when its client left.
        self.tokens = 0
        self.began = monotonic()
        self.first: float | None = None
        self.ended = 0.0
        # Whether all of the request had left its client.
        self.complete_request = False

    def end(self, how: How, why: str = "") -> None:
        self.how, self.why, self.ended = how, why, monotonic()


class _Connection(asyncio.Protocol):
    """The answers that are waited for, in their order."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Answer, Seen, asyncio.Future[None]]] = []
        self.lost = False
        self.transport: asyncio.Transport = None  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def expect(self, seen: Seen) -> tuple[Answer, asyncio.Future[None]]:
        answer, future = Answer(), asyncio.get_running_loop().create_future()
        self.waiting.append((answer, seen, future))
        return answer, future

    def data_received(self, data: bytes) -> None:
        while data:
            if not self.waiting:
                self.transport.abort()
                return
            answer, seen, future = self.waiting[0]
            try:
                data = answer.feed(data)
            except (Malformed, ValueError) as error:
                self._fail(error)
                return
            if seen.first is None and answer.pieces:
                seen.first = monotonic()
            limit = seen.plan.after_bytes if seen.plan.manner in ("leaves", "stalls") else None
            if answer.complete or (limit is not None and answer.received > limit):
                if answer.complete:
                    self.waiting.pop(0)
                if not future.done():
                    future.set_result(None)
                if not answer.complete:
                    return

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._fail(ConnectionError(str(exc) if exc else "closed"))

    def _fail(self, error: Exception) -> None:
        for _, _, future in self.waiting:
            if not future.done():
                future.set_exception(error)
                # Whoever waits for the first of several asks for no other.
                future.exception()
        self.waiting.clear()


class Crowd:
    """`keys`: secrets by name. `references`: what the real engines answer to each question, undisturbed."""

    def __init__(
        self, port: int, keys: dict[str, str], references: dict[tuple[bool, str], str], *, first: int, requests: int,
        seed: int, local_share: float, connections: int, deadline: float, killed: Callable[[float, float], bool],
    ):  # fmt: skip
        self.port, self.keys, self.references = port, keys, references
        self.requests, self.seed, self.local_share, self.connections = requests, seed, local_share, connections
        # When no more are begun; and whether the gateway itself was killed between two moments.
        self.deadline, self._killed = deadline, killed
        self.seen: list[Seen] = []
        self._numbers = itertools.count(first)
        self._end = first + requests
        self.open = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._visitor(i) for i in range(self.connections)))

    def _next(self) -> Plan | None:
        if monotonic() > self.deadline:
            return None
        number = next(self._numbers)
        return planned(self.seed, number, self.local_share) if number < self._end else None

    async def _visitor(self, index: int) -> None:
        patience = random.Random(self.seed + index)
        connection: _Connection | None = None
        while (plan := self._next()) is not None:
            plans = [plan]
            if plan.manner == "together":
                plans += [more._replace(manner="plain", wrong="") for _ in range(2) if (more := self._next())]
            seen = [Seen(one) for one in plans]
            self.seen += seen
            while connection is None or connection.lost or connection.transport.is_closing():
                connection = await self._connect()
                for one in seen:
                    one.began = monotonic()
            self.open += 1
            try:
                keep = await self._play(connection, seen)
            except Exception as error:  # noqa: BLE001 (whatever it is, it is told with the requests that it cost)
                keep = False
                self._broken(seen, error)
            finally:
                self.open -= 1
            # Some come back on the same connection, some do not.
            if not keep or patience.random() < 0.02:
                connection.transport.abort()
                connection = None
        if connection is not None:
            connection.transport.close()

    async def _connect(self) -> _Connection | None:
        loop = asyncio.get_running_loop()
        try:
            _, made = await loop.create_connection(_Connection, "127.0.0.1", self.port)
        except OSError:
            # Being started again; if it never comes, the requests that remain are lost.
            if monotonic() > self.deadline + _PATIENCE_S:
                raise
            await asyncio.sleep(0.05)
            return None
        return made

    def _broken(self, seen: list[Seen], error: Exception) -> None:
        now = monotonic()
        for one in seen:
            if one.ended:
                continue
            if self._killed(one.began, now):
                one.end("gateway killed")
            elif one.plan.manner == "stalls":
                # Who reads nothing for too long is cut off; that is its end.
                one.end("stalled")
            else:
                one.end("lost", f"{type(error).__name__}: {error}")

    async def _play(self, connection: _Connection, seen: list[Seen]) -> bool:
        """Whether the connection can be used again."""
        first = seen[0].plan
        requests = [self._request(one.plan) for one in seen]
        if first.manner == "leaves-while-sending":
            connection.transport.write(requests[0][: len(requests[0]) * 2 // 3])
            await asyncio.sleep(first.for_s * 0.05)
            seen[0].end("left")
            return False
        expected = [connection.expect(one) for one in seen]
        if first.manner == "sends-slowly":
            await self._trickle(connection, requests[0], first.for_s)
        else:
            connection.transport.write(b"".join(requests))
        for one in seen:
            one.complete_request = True
        keep = True
        for one, (answer, future) in zip(seen, expected, strict=True):
            await asyncio.wait_for(future, _PATIENCE_S)
            if not answer.complete:
                return await self._half_way(connection, one, answer)
            self._judge(one, answer)
            keep = keep and not answer.closes
        return keep

    async def _trickle(self, connection: _Connection, data: bytes, for_s: float) -> None:
        for i in range(5):
            if connection.transport.is_closing():
                # Answered at its head, where it may not come in: what it was told has come, and is judged.
                return
            connection.transport.write(data[len(data) * i // 5 : len(data) * (i + 1) // 5])
            await asyncio.sleep(for_s / 10)

    async def _half_way(self, connection: _Connection, one: Seen, answer: Answer) -> bool:
        if one.plan.manner == "leaves":
            one.tokens = _tokens_so_far(answer.body, one.plan)
            one.status = answer.status
            one.end("left")
            return False
        # So little that what it does not read stays with the gateway.
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.transport.pause_reading()
        await asyncio.sleep(one.plan.for_s)
        connection.transport.resume_reading()
        _, _, future = connection.waiting[0] if connection.waiting else (None, None, None)
        if future is None:
            raise ConnectionError("cut off while it did not read")
        again: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        connection.waiting[0] = (answer, Seen(one.plan._replace(manner="plain")), again)
        await asyncio.wait_for(again, _PATIENCE_S)
        self._judge(one, answer)
        return False

    def _request(self, plan: Plan) -> bytes:
        body = plan.body()
        key = {"wrong-key": "ct-nobody-has-this", "no-key": ""}.get(plan.wrong, self.keys[plan.key])
        line = f"authorization: Bearer {key}\r\n" if key else ""
        head = (
            f"POST {plan.path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{line}"
            f"x-request-id: {plan.id.decode()}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    # What came

    def _judge(self, one: Seen, answer: Answer) -> None:
        one.status = answer.status
        said = answer.header(b"x-request-id")
        if said and said != one.plan.id:
            one.end("lost", f"the answer is that of {said.decode('latin-1')}")
        elif answer.status != 200:
            self._judge_error(one, answer)
        elif one.plan.wrong:
            one.end("lost", f"{one.plan.wrong} was answered 200")
        elif one.plan.stream:
            self._judge_stream(one, answer.body)
        else:
            self._judge_whole(one, answer.body)

    def _judge_error(self, one: Seen, answer: Answer) -> None:
        try:
            error = json.loads(answer.body)["error"]
            one.code = str(error.get("code") or error.get("type"))
            clear = bool(error["message"])
        except (ValueError, KeyError, TypeError):
            clear = False
        if clear:
            one.end("error")
        else:
            one.end("lost", f"{answer.status} without a clear error: {answer.body[:200]!r}")

    def _expected(self, plan: Plan) -> str:
        return self.references[plan.chat, plan.prompt] if plan.local else plan.text

    def _judge_whole(self, one: Seen, body: bytes) -> None:
        plan = one.plan
        try:
            said = json.loads(body)
            choice = said["choices"][0]
            text = choice["message"]["content"] if plan.chat else choice["text"]
            usage = said["usage"]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            one.end("lost", f"no answer: {error!r}")
            return
        self._compare(one, text, usage)

    def _judge_stream(self, one: Seen, body: bytes) -> None:
        plan, texts, usage, error, finish, ids = one.plan, list[str](), None, None, list[str](), set[str]()
        *events, rest = body.split(b"\n\n")
        done = False
        for event in events:
            if event.startswith(b":"):
                continue
            if done or not event.startswith(b"data: "):
                one.end("lost", f"an event of another kind: {event[:100]!r}")
                return
            if event == b"data: [DONE]":
                done = True
                continue
            said: dict[str, Any] = json.loads(event[6:])
            if "error" in said:
                error = said["error"]
                continue
            ids.add(said["id"])
            usage = said.get("usage") or usage
            for choice in said["choices"]:
                texts.append((choice["delta"].get("content") if plan.chat else choice["text"]) or "")
                if choice.get("finish_reason"):
                    finish.append(choice["finish_reason"])
        text = "".join(texts)
        one.tokens = len(text) // 4 if not plan.local else len(texts)
        if error is not None:
            one.code = str(error.get("code"))
            good = self._expected(plan).startswith(text) and not rest and bool(error.get("message"))
            one.end(*(("in-band error", "") if good else ("lost", f"a wrong beginning, then an error: {text[-80:]!r}")))
        elif not done or rest or len(finish) != 1 or len(ids) != 1:
            why = f"done {done}, rest {rest[:40]!r}, finish {finish}, {len(ids)} ids, {len(text)} characters"
            one.end("lost", f"a stream without a proper end: {why}")
        elif plan.usage and usage is None:
            one.end("lost", "usage was asked for and did not come")
        elif not plan.usage and usage is not None and not plan.local:
            # (llama.cpp puts it into the last event of a completion, wished for or not.)
            one.end("lost", "usage came and was not asked for")
        else:
            self._compare(one, text, usage)

    def _compare(self, one: Seen, text: str, usage: dict[str, Any] | None) -> None:
        plan, expected = one.plan, self._expected(one.plan)
        one.tokens = plan.tokens
        if text != expected:
            at = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), len(text))
            one.end(
                "lost", f"another answer, {len(text)} of {len(expected)} characters, from {at} on: {text[at:][:60]!r}"
            )
        elif (
            usage is not None
            and not plan.local
            and ((usage["prompt_tokens"], usage["completion_tokens"]) != (plan.prompt_tokens, plan.tokens))
        ):
            one.end("lost", f"usage {usage} for {plan.prompt_tokens} and {plan.tokens} tokens")
        else:
            one.end("answer")


def _tokens_so_far(body: bytes, plan: Plan) -> int:
    """Of a stream that its client left; half an event counts for nothing."""
    texts = []
    for event in body.split(b"\n\n")[:-1]:
        if event.startswith(b"data: {"):
            for choice in json.loads(event[6:]).get("choices", ()):
                texts.append((choice["delta"].get("content") if plan.chat else choice["text"]) or "")
    text = "".join(texts)
    return sum(map(bool, texts)) if plan.local else len(text) // 4


__all__ = ["LOCAL", "Crowd", "How", "Seen"]

"""What is noted of a request on its way, from which its spans are made when it has ended."""

import random
from time import time_ns

from crosstie_gateway.gateway.interfaces import TracedRequest


class TracedAttempt:
    """One attempt: on which backend, from when to when, and what became of it."""

    __slots__ = ("backend", "began_ns", "ended_ns", "first_ns", "pool", "span_id", "status", "why")

    def __init__(self, pool: str, backend: str, span_id: int):
        self.pool, self.backend, self.span_id = pool, backend, span_id
        self.began_ns, self.first_ns, self.ended_ns = time_ns(), 0, 0
        self.why, self.status = "", 0


class RequestTrace(TracedRequest):
    def __init__(self, number: int, span_id: int, parent_id: int, state: bytes, sampled: bool):
        self.id = f"{number:032x}"
        self.number, self.span_id, self.parent_id, self.state, self.sampled = number, span_id, parent_id, state, sampled
        self.ended_ns = 0
        self.attempts: list[TracedAttempt] = []

    def attempt(self, pool: str, backend: str) -> bytes:
        tried = TracedAttempt(pool, backend, random_id(64))
        self.attempts.append(tried)
        passed_on = b"tracestate: %b\r\n" % self.state if self.state else b""
        return b"traceparent: 00-%032x-%016x-%02x\r\n%b" % (self.number, tried.span_id, self.sampled, passed_on)

    def first_token(self) -> None:
        self.attempts[-1].first_ns = time_ns()

    def failed(self, why: str, status: int) -> None:
        last = self.attempts[-1]
        last.why, last.status, last.ended_ns = why, status, time_ns()


def random_id(bits: int) -> int:
    """Not zero, which stands for none."""
    return random.getrandbits(bits) or 1

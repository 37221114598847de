"""The latest decisions, kept as they were taken and put into words only for whoever asks.

A request costs one entry in a bounded queue. An entry holds what the decision was about (never a body, a prompt or a
key) and is pushed out by those that follow.
"""

from collections import deque
from itertools import islice
from time import time
from typing import TYPE_CHECKING, Any

from crosstie.route.ask import Ask
from crosstie.route.decision import Considered, Decision

if TYPE_CHECKING:
    from crosstie.run.gateway.gateway import Gateway

MOST = 500
_PRIORITIES = ("low", "normal", "high")


class Recent:
    def __init__(self, gateway: "Gateway"):
        # Of all that were ever taken, those from `taken - len` to `taken` are kept.
        self.taken = 0
        self._kept: deque[tuple[float, bytes, int, Ask, Decision]] = deque(maxlen=MOST)
        gateway.context.on_decision = self._on_decision

    def _on_decision(self, request_id: bytes, attempts: int, ask: Ask, decision: Decision) -> None:
        self.taken += 1
        self._kept.append((time(), request_id, attempts, ask, decision))

    def rows(self, after: int, most: int) -> list[dict[str, Any]]:
        """Those taken after the first `after` ones, oldest first; of more than `most`, the latest."""
        wanted = min(max(self.taken - after, 0), len(self._kept), most)
        return [_row(*one) for one in islice(self._kept, len(self._kept) - wanted, None)]


def _row(at: float, request_id: bytes, attempts: int, ask: Ask, decision: Decision) -> dict[str, Any]:
    replica, told = decision.replica, decision.prediction
    return {
        "at": round(at, 3),
        "request_id": request_id.decode("latin-1"),
        "model": ask.model,
        "class": ask.class_name,
        "priority": _PRIORITIES[ask.priority],
        "input_tokens": round(ask.input_tokens),
        "expected_output_tokens": round(ask.output_tokens),
        "ttft_target_s": ask.ttft_s,
        "tpot_target_s": ask.tpot_s,
        # Backends that had failed it before.
        "attempt": attempts + 1,
        "outcome": decision.outcome,
        "pool": replica.pool.name if replica else None,
        "backend": replica.key if replica else None,
        "predicted": told
        and {
            "ttft_s": told.ttft_s,
            "tpot_s": told.tpot_s,
            "usd": told.predicted_usd,
            "cached_tokens": told.cached_tokens,
        },
        "meets_target": decision.meets,
        "reason": decision.reason,
        "considered": [_considered(one) for one in decision.considered],
    }


def _considered(one: Considered) -> dict[str, Any]:
    return {"pool": one.pool, "backend": one.backend, "score": one.score, "dropped": one.dropped}

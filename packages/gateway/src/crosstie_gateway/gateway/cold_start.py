"""Requests for a model without a serving replica, held while somebody starts one: `crosstie scale`, KEDA, a person.

A request is held where a replica is expected within its patience, `serve.hold_s` or its x-crosstie-ttft-ms; else it is
refused at once and told when to come back. Not compiled: who comes here waits for seconds.
"""

from collections import Counter
from collections.abc import Callable

from crosstie.core.histogram import Family
from crosstie_gateway.gateway.asks import hinted_ttft_s
from crosstie_gateway.gateway.context import Context
from crosstie_gateway.gateway.exchange import Exchange
from crosstie_gateway.gateway.progress import ProgressReply
from crosstie_gateway.wire.server import Reply

# Between two comments of a stream: half of the shortest idle timeout that proxies usually have.
_COMMENT_EVERY_S = 5.0
# What one start teaches of how long the next will take.
_LEARN = 0.5
# A start that is overdue is expected after this share of its usual time, again and again.
_OVERDUE = 0.25
# A model that nobody has asked for during so many starts is not being started for anybody.
_FORGOTTEN = 3.0


class ColdStart:
    """Of one model: since when and when last it was asked for in vain, and which requests are held."""

    def __init__(self, now: float):
        self.began = self.asked_at = self.told_at = now
        self.held: dict[Exchange, None] = {}


class ColdStarts:
    """`enter` takes a request as if it had just come. Seconds are the loop's."""

    def __init__(self, context: Context, enter: Callable[[Exchange], None]):
        self._context, self._enter = context, enter
        self._starts: dict[str, ColdStart] = {}
        # By model, how long a start takes.
        self._learnt: dict[str, float] = {}
        # By model and by what came of the requests: held, refused (at once), expired.
        self._counts: Counter[tuple[str, str]] = Counter()
        # Models and classes that were held at some time: they stay on the page of metrics, at none.
        self._seen: set[tuple[str, str]] = set()

    def take(self, exchange: Exchange) -> bool:
        """A request that no replica can be sent: whether it is held or refused here."""
        serving, now, model = self._context.serving, self._context.loop.time(), exchange.ask.model
        if serving.hold_s <= 0.0 or exchange.held_until < 0.0 or exchange.reply.started or self._serves(model):
            return False
        start = self._starts.setdefault(model, ColdStart(now))
        start.asked_at = now
        if not exchange.held_until:
            hint_s = hinted_ttft_s(exchange.request)
            exchange.held_until = now + (serving.hold_s if hint_s is None else min(serving.hold_s, hint_s))
        left_s = self._left_s(model, start)
        full = sum(len(other.held) for other in self._starts.values()) >= serving.max_held
        if full or now + left_s > exchange.held_until:
            why = (
                f"{serving.max_held} requests are held already (serve.max_held)" if full else "longer than it may wait"
            )
            self._refuse(exchange, "refused", left_s, why)
            return True
        self._counts[model, "held"] += 1
        # What it waits says nothing of how replicas keep targets.
        exchange.ask.ttft_s = None
        start.held[exchange] = None
        return True

    def leave(self, exchange: Exchange) -> None:
        for start in self._starts.values():
            start.held.pop(exchange, None)

    def tick(self) -> None:
        """Lets in requests whose model is served now, refuses those out of patience, tells others that they wait."""
        now = self._context.loop.time()
        for model, start in list(self._starts.items()):
            if self._serves(model):
                del self._starts[model]
                took_s, before_s = now - start.began, self._expected_s(model)
                self._learnt[model] = before_s + _LEARN * (took_s - before_s)
                for exchange in start.held:
                    self._enter(exchange)
                continue
            for exchange in [exchange for exchange in start.held if now >= exchange.held_until]:
                del start.held[exchange]
                self._refuse(exchange, "expired", self._left_s(model, start), "longer than it could wait")
            if now - start.told_at >= _COMMENT_EVERY_S:
                start.told_at = now
                self._comment(model, start)
            if not start.held and now - start.asked_at > _FORGOTTEN * self._expected_s(model):
                del self._starts[model]

    def _comment(self, model: str, start: ColdStart) -> None:
        said = f"crosstie: a replica of {model} is starting, expected in {self._left_s(model, start):.0f} s"
        text = said.encode("ascii", "replace")
        # What is picked for Envoy has its head from elsewhere; Anthropic's events have one of their own.
        for exchange in [exchange for exchange in start.held if type(exchange) is Exchange]:
            reply = exchange.reply
            if type(reply) is Reply and exchange.parsed.stream and exchange.request.path.endswith("/completions"):
                lines = b"x-request-id: %b\r\nx-crosstie-reason: held until a replica serves\r\n" % exchange.request_id
                exchange.reply = reply = ProgressReply(reply, lines)
            if isinstance(reply, ProgressReply):
                reply.comment(text)

    def _serves(self, model: str) -> bool:
        pools = self._context.router.fleet.by_model.get(model, ())
        replicas = [replica for pool in pools if not pool.draining for replica in pool.replicas]
        return any(replica.up and not replica.draining for replica in replicas)

    def _expected_s(self, model: str) -> float:
        return self._learnt.get(model, self._context.serving.start_s)

    def _left_s(self, model: str, start: ColdStart) -> float:
        expected_s, passed_s = self._expected_s(model), self._context.loop.time() - start.began
        return expected_s - passed_s if passed_s < expected_s else _OVERDUE * expected_s

    def _refuse(self, exchange: Exchange, how: str, left_s: float, why: str) -> None:
        self._counts[exchange.ask.model, how] += 1
        said = f"{exchange.ask.model} has no replica now: one is expected in about {max(left_s, 1.0):.0f} s, {why}"
        exchange.refuse(503, said, "model_starting", retry_after_s=max(left_s, 1.0))

    def families(self) -> list[Family]:
        if not self._counts:
            return []
        asks = [exchange.ask for start in self._starts.values() for exchange in start.held]
        held = Counter((ask.model, ask.class_name or "") for ask in asks)
        self._seen |= held.keys()
        counts = [({"model": model, "outcome": how}, float(n)) for (model, how), n in self._counts.items()]
        return [
            (
                "crosstie_held", "gauge", "Requests held until a first replica serves.",
                [({"model": model, "class": name}, float(held[model, name])) for model, name in sorted(self._seen)],
            ),
            ("crosstie_cold_starts_total", "counter", "Requests that found no replica of their model.", counts),
        ]  # fmt: skip

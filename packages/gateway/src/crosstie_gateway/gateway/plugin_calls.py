"""What plugins are told of a request (docs/plugins.md)."""

from typing import Any

from crosstie.route.decision import Considered
from crosstie.route.live import LivePool
from crosstie_gateway.gateway.context import Context
from crosstie_gateway.gateway.exchange import Exchange
from crosstie_gateway.gateway.interfaces import PluginQuestion


def question_of(context: Context, exchange: Exchange) -> PluginQuestion:
    ask, plugins, pools = exchange.ask, context.plugins, list[dict[str, Any]]()
    if plugins is not None and plugins.wants_pools:
        decision = context.router.decide(ask, context.now(), exclude=ask.tried, explain=True)
        known = {pool.name: pool for pool in context.router.fleet.by_model.get(ask.model, ())}
        pools = [_view(known[of.pool], of) for of in decision.considered if of.pool in known]
    path, key_id = exchange.request.path, exchange.record.key_id
    return PluginQuestion(path, ask.model, ask.class_name or "", key_id, exchange.request.body, pools)


def _view(pool: LivePool, considered: Considered) -> dict[str, Any]:
    seen = considered.prediction
    return {
        "name": pool.name,
        "accelerator": pool.pool.accelerator,
        "usd_per_gpu_hour": pool.pool.usd_per_gpu_hour,
        "replicas": len(pool.replicas),
        "up": sum(replica.up for replica in pool.replicas),
        "in_flight": sum(replica.in_flight for replica in pool.replicas),
        # Why the fleet's own policy would not send it there; None: it may.
        "dropped": considered.dropped,
        "ttft_s": None if seen is None else seen.ttft_s,
        "tpot_s": None if seen is None else seen.tpot_s,
        "usd": None if seen is None else seen.predicted_usd,
    }

"""Replicas that models share, as a part of the plan's document."""

from dataclasses import asdict
from typing import Any

import msgspec

from crosstie.decide.plan.shared import SharedPlan, SharedPoolPlan
from crosstie.host.expected import Expectation


def shared_document(shared: SharedPlan) -> dict[str, Any]:
    answer = shared.answer
    return {
        "gpus": {answer.accelerator: answer.gpus} if answer else {},
        "usd_per_hour": answer.usd_per_hour if answer else None,
        "pools": [_pool(pool) for pool in shared.pools],
        "left_out": shared.left_out,
        "simulated": asdict(shared.simulated) if shared.simulated else None,
    }


def _pool(pool: SharedPoolPlan) -> dict[str, Any]:
    replica = pool.replica
    return {
        "accelerator": pool.accelerator,
        "parallelism": msgspec.to_builtins(replica.parallelism),
        "replicas": pool.replicas,
        "gpus": pool.gpus,
        "usd_per_hour": pool.usd_per_hour,
        "watts": pool.watts,
        "utilisation": pool.utilisation,
        "limited_by": pool.limit,
        "room_bytes_a_replica": replica.room_bytes,
        "host_bytes_a_replica": replica.host_bytes,
        "expected": _expected(pool.expected),
        "with_the_answers_gpus": _expected(pool.beside),
        "models": [
            {
                "model": one.model,
                "precision": replica.deployments[one.model].precision.id,
                "bytes": one.bytes,
                "least_cache_bytes": one.min_kv_bytes,
                "load_s": one.load_s,
                "pinned": one.pinned,
            }
            for one in replica.hosted
        ],
    }


def _expected(found: Expectation) -> dict[str, Any]:
    """By model with the answer's own numbers only: copies have names of their own there."""
    return {
        "requests_per_s": found.requests_per_s,
        "cold_share": found.cold_share,
        "evictions_per_hour": found.evictions_per_hour,
        "cold_wait_s": found.wait_s,
        "loading_share": found.loading_share,
        "resident_share": found.resident,
        "holds": found.holds,
    }

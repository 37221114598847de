"""Pools and backends as they are now, in one process, and in all of them together."""

from typing import Any

from crosstie.core.fleet import Fleet
from crosstie.route.live import LivePool, Replica
from crosstie.run.gateway.backend import Backend
from crosstie.run.gateway.gateway import Gateway


def pools_here(gateway: Gateway, file: Fleet) -> dict[str, Any]:
    """`file`: the fleet as its file has it, which tells what was added."""
    live = gateway.live
    of_file = {pool.name: set(pool.backends) for pool in file.pools}
    return {
        "fleet": live.fleet.name,
        "policy": live.fleet.policy,
        "queued": len(gateway.waiting),
        "exchanges": len(gateway.exchanges),
        "pools": [_pool(gateway, pool, of_file.get(pool.name)) for pool in live.pools],
        # Removed, and still answering.
        "leaving": [
            {"pool": one.pool.name, "backend": one.key, "in_flight": one.in_flight}
            for one in live.leaving
            if one.in_flight
        ],
    }


def _pool(gateway: Gateway, live: LivePool, of_file: set[str] | None) -> dict[str, Any]:
    pool = live.pool
    return {
        "pool": pool.name,
        "model": pool.model,
        "accelerator": pool.accelerator,
        "from": "admin" if of_file is None else "file",
        "weight": pool.weight,
        "max_in_flight": pool.max_in_flight,
        "usd_per_gpu_hour": pool.usd_per_gpu_hour,
        "draining": live.draining,
        "backends": [
            _backend(gateway, gateway.backends[one.key], one, "file" if one.key in (of_file or ()) else "admin")
            for one in live.replicas
        ],
    }


def _backend(gateway: Gateway, backend: Backend, replica: Replica, source: str) -> dict[str, Any]:
    now, reported = gateway.now(), replica.reported
    return {
        "backend": replica.key,
        "from": source,
        "up": replica.up,
        "why_down": replica.why_down,
        "draining": replica.draining or replica.pool.draining,
        "breaker": backend.breaker.state,
        "in_flight": replica.in_flight,
        "connections": backend.origin.connections,
        "share": replica.share_at(now),
        "ttft_correction": replica.ttft.factor(now),
        "tpot_correction": replica.tpot.factor(now),
        "reported": reported
        and {
            "running": reported.running,
            "waiting": reported.waiting,
            "kv_used_fraction": reported.kv_used_fraction,
            "age_s": (now - reported.at) / gateway.speed,
        },
    }


_SUMMED = ("in_flight", "connections")


def together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Requests and connections add up; a backend that one process cannot reach is not up."""
    first, *others = answers
    found = {row["backend"]: row for pool in first["pools"] for row in pool["backends"]}
    for other in others:
        first["queued"] += other["queued"]
        first["exchanges"] += other["exchanges"]
        first["leaving"] += other["leaving"]
        for row in (row for pool in other["pools"] for row in pool["backends"]):
            own = found.get(row["backend"])
            if own is None:
                # A change is on its way there.
                continue
            for key in _SUMMED:
                own[key] += row[key]
            if own["up"] and not row["up"]:
                own["up"], own["why_down"], own["breaker"] = False, row["why_down"], row["breaker"]
    for pool in first["pools"]:
        for row in pool["backends"]:
            row["state"] = _state(row)
        states = {row["state"] for row in pool["backends"]}
        pool["in_flight"] = sum(row["in_flight"] for row in pool["backends"])
        pool["state"] = states.pop() if len(states) == 1 else "draining" if pool["draining"] else "mixed"
    return {**first, "processes": len(answers)}


def _state(row: dict[str, Any]) -> str:
    if row["draining"]:
        return "draining" if row["in_flight"] else "drained"
    return "up" if row["up"] else "down"

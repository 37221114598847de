"""Small live fleets, and requests to them."""

from typing import Any

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Fleet, Pool, Route, ServedClass, Serving
from crosstie.core.workload import Target
from crosstie.route.ask import Ask
from crosstie.route.build import live_fleet
from crosstie.route.decision import Decision
from crosstie.route.live import Flight, LiveFleet, Replica
from crosstie.route.policies import make_policy
from crosstie.route.policy import RoutingPolicy
from crosstie.route.router import Router
from crosstie.route.speed import Prediction

CATALOG = Catalog([])
MODEL = "llama-3.1-8b"


def pool(name: str = "amd", accelerator: str | None = "mi300x", replicas: int = 2, **changes: Any) -> Pool:
    plain: dict[str, Any] = {
        "name": name,
        "model": MODEL,
        "accelerator": accelerator,
        "parallelism": Parallelism(),
        "precision": "fp8" if accelerator else None,
        "kv_format": "bf16",
        "stack": "vllm" if accelerator else None,
        "replicas": replicas,
        "usd_per_gpu_hour": 1.3,
        "max_in_flight": 64,
        "max_context": 32_000,
        "backends": tuple(f"http://{name}-{i}" for i in range(replicas)),
    }
    return Pool(**{**plain, **changes})


AMD = pool()
NVIDIA = pool("nvidia", "h200", usd_per_gpu_hour=2.9)


def served(name: str = "chat", **changes: Any) -> ServedClass:
    plain: dict[str, Any] = {
        "name": name,
        "model": MODEL,
        "requests_per_s": 10.0,
        "input_tokens": 1000.0,
        "output_tokens": 200.0,
        "ttft": Target(seconds=1.0, percentile=0.95),
        "tpot": Target(seconds=0.05, percentile=0.9),
        "routes": (),
    }
    return ServedClass(**{**plain, **changes})


def routed(*pools: str) -> tuple[Route, ...]:
    return tuple(Route(pool=name, share=1.0 / len(pools)) for name in pools)


def fleet(*pools: Pool, classes: tuple[ServedClass, ...] = (served(),), **serving: Any) -> Fleet:
    return Fleet(
        name="test",
        planned="",
        policy="cheapest-meeting-target",
        pools=pools or (AMD, NVIDIA),
        classes=classes,
        serving=Serving(**serving),
    )


def live(*pools: Pool, now: float = 0.0, **options: Any) -> LiveFleet:
    return live_fleet(CATALOG, fleet(*pools, **options), now)


def ask(**changes: Any) -> Ask:
    plain: dict[str, Any] = {
        "model": MODEL,
        "class_name": "chat",
        "input_tokens": 1000.0,
        "output_tokens": 200.0,
        "ttft_s": 1.0,
        "tpot_s": 0.05,
    }
    return Ask(**{**plain, **changes})


def told(ttft_s: float = 0.05, tpot_s: float = 0.01, cached: float = 0.0) -> Prediction:
    return Prediction(
        ttft_s=ttft_s, tpot_s=tpot_s, predicted_usd=0.0, cached_tokens=cached, raw_ttft_s=ttft_s, raw_tpot_s=tpot_s
    )  # fmt: skip


def load(replica: Replica, requests: int, now: float = 0.0, *, decoding: bool = True, **changes: Any) -> list[Flight]:
    """So many requests on a replica, past their first token or not."""
    flights = [replica.start(ask(**changes), told(), now) for _ in range(requests)]
    for flight in flights if decoding else ():
        flight.decode_from(now)
    return flights


def decided(policy: RoutingPolicy, fleet: LiveFleet, ask: Ask, now: float, **options: Any) -> Decision:
    return Router(fleet, policy).decide(ask, now, **options)


def chosen(fleet: LiveFleet, name: str = "cheapest-meeting-target", now: float = 0.0, **changes: Any) -> str | None:
    """The pool that a policy sends a request to."""
    replica = decided(make_policy(name), fleet, ask(**changes), now).replica  # type: ignore[arg-type]
    return replica.pool.name if replica else None

"""Pools and classes of a plan as the gateway's fleet file has them; and where each kind of request goes while the fleet
is idle, asked of the gateway's own router, so that both agree.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment
from crosstie.core.disaggregated import Disaggregated, Servable
from crosstie.core.fleet import Fleet, Pool, PoolApart, PoolSide, Route, ServedClass
from crosstie.core.question import precision_word
from crosstie.core.workload import TIERS, RequestClass, Workload
from crosstie.decide.plan.answer import PoolPlan
from crosstie.perf.fit import longest_context
from crosstie.port.preflight.readiness import Readiness
from crosstie.route.ask import Ask
from crosstie.route.build import live_fleet
from crosstie.route.policies import make_policy
from crosstie.route.router import Router


def pool_of(pool: PoolPlan, judged: Readiness | None = None) -> Pool:
    deployment, drafts = pool.deployment, pool.deployment.speculation
    return Pool(
        name=pool.name,
        model=deployment.model.id,
        accelerator=deployment.accelerator.id,
        parallelism=deployment.parallelism,
        precision=precision_word(deployment),
        kv_format=deployment.kv_format,
        stack=deployment.stack.id,
        speculation=str(drafts) if drafts else None,
        text=drafts.text if drafts else "chat",
        acceptance=drafts.acceptance_length if drafts and drafts.source == "given" else None,
        release=(judged.release or None) if judged else None,
        settings=judged.settings if judged else (),
        replicas=pool.replicas,
        usd_per_gpu_hour=pool.usd_per_gpu_hour,
        sunk_usd_per_gpu_hour=pool.sunk_usd_per_gpu_hour,
        # What the promise bears at its worst moment, not on average.
        max_in_flight=max(math.floor(pool.most_in_flight), 1),
        max_context=longest_context(*_sides(deployment)),
        apart=_apart(deployment) if isinstance(deployment, Disaggregated) else None,
        **({} if isinstance(deployment, Disaggregated) else _tiers(pool)),
    )


def _tiers(pool: PoolPlan) -> dict[str, Any]:
    """What its classes count on, of which one engine has the most that any of them does; rates as slow as any."""
    prefixes = [prefix for carried in pool.carried if (prefix := carried.part.slice.prefix) is not None]
    sizes = {size: max((getattr(prefix, size) for prefix in prefixes), default=0.0) for size in TIERS}
    given = {rate: [value for prefix in prefixes if (value := getattr(prefix, rate))] for rate in TIERS.values()}
    return sizes | {rate: min(values) for rate, values in given.items() if values}


def _sides(one: Servable) -> tuple[Deployment, ...]:
    return (one.prefill, one.decode) if isinstance(one, Disaggregated) else (one,)


def _apart(service: Disaggregated) -> PoolApart:
    return PoolApart(
        prefill=PoolSide(replicas=service.prefill_replicas, parallelism=service.prefill.parallelism),
        decode=PoolSide(replicas=service.decode_replicas, parallelism=service.decode.parallelism),
        connector=service.connector.id,
    )


def routes_of(request_class: RequestClass, pools: Sequence[PoolPlan]) -> list[Route]:
    routes = []
    last = len(request_class.slices) - 1
    for index, piece in enumerate(request_class.slices):
        for pool in pools:
            for carried in pool.carried:
                if carried.part.request_class is request_class and carried.part.slice is piece:
                    # The longest slice takes whatever comes.
                    upto = None if index == last else piece.longest_input
                    routes.append(
                        Route(
                            pool=pool.name, share=carried.share, up_to_input=upto, traffic=piece.share, why=carried.why
                        )
                    )
    return routes


def class_of(request_class: RequestClass, routes: Sequence[Route]) -> ServedClass:
    return ServedClass(
        name=request_class.name,
        model=request_class.model,
        requests_per_s=request_class.requests_per_s,
        input_tokens=request_class.input_tokens,
        output_tokens=request_class.output_tokens,
        ttft=request_class.ttft,
        tpot=request_class.tpot,
        routes=tuple(routes),
    )


@dataclass(frozen=True, slots=True)
class Guided:
    """A slice of a class, the pool that its mean request is sent to by an idle gateway, and the router's reason."""

    class_name: str
    up_to_input: int
    pool: str
    why: str


def guide(catalog: Catalog, workload: Workload, pools: Sequence[PoolPlan]) -> list[Guided]:
    """Of the classes whose models have these pools; at the peak others take what the first has no room for."""
    by_model: dict[str, list[PoolPlan]] = {}
    for pool in pools:
        by_model.setdefault(pool.deployment.model.id, []).append(pool)
    several = [request_class for request_class in workload.classes if len(by_model.get(request_class.model, ())) > 1]
    asked = _asked(catalog, workload, several, [pool for one in by_model.values() if len(one) > 1 for pool in one])
    alone = [
        Guided(one.name, piece.longest_input, by_model[one.model][0].name, "the only pool of its model")
        for one in workload.classes
        if len(by_model.get(one.model, ())) == 1
        for piece in one.slices
    ]
    order = {request_class.name: place for place, request_class in enumerate(workload.classes)}
    return sorted([*asked, *alone], key=lambda one: order[one.class_name])


def _asked(
    catalog: Catalog, workload: Workload, classes: Sequence[RequestClass], pools: Sequence[PoolPlan]
) -> list[Guided]:
    fleet = Fleet(
        name=str(workload.name),
        planned="",
        policy="cheapest-meeting-target",
        # Of idle replicas of a pool one is like the other.
        pools=tuple(msgspec.structs.replace(pool_of(pool), backends=(f"http://{pool.name}",)) for pool in pools),
        classes=tuple(class_of(one, routes_of(one, pools)) for one in classes),
    )
    router = Router(live_fleet(catalog, fleet, 0.0), make_policy(fleet.policy, 0))
    found = []
    for request_class in classes:
        for piece in request_class.slices:
            ask = Ask(
                model=request_class.model,
                class_name=request_class.name,
                input_tokens=piece.input_tokens,
                output_tokens=piece.output_tokens,
                ttft_s=request_class.ttft.seconds if request_class.ttft else None,
                tpot_s=request_class.tpot.seconds if request_class.tpot else None,
            )
            decision = router.decide(ask, 1.0)
            pool = decision.replica.pool.name if decision.replica else ""
            found.append(Guided(request_class.name, piece.longest_input, pool, decision.reason))
    return found

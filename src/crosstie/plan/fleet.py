"""A plan as the fleet that the gateway serves."""

import math

from crosstie.core.fleet import Fleet, Pool, Route, ServedClass
from crosstie.core.workload import RequestClass
from crosstie.perf.memory import sequences_that_fit
from crosstie.plan.answer import FleetPlan, PoolPlan
from crosstie.plan.plan import Plan


def fleet_of(plan: Plan) -> Fleet:
    if plan.fleet is None:
        raise ValueError("a plan without a fleet has none to write")
    found = plan.fleet
    return Fleet(
        name=plan.workload.name,
        planned=plan.made,
        policy="cheapest-meeting-target",
        pools=tuple(_pool(pool) for pool in found.pools),
        classes=tuple(_class(one, found) for one in plan.workload.classes),
    )


def _pool(pool: PoolPlan) -> Pool:
    deployment = pool.deployment
    return Pool(
        name=pool.name,
        model=deployment.model.id,
        accelerator=deployment.accelerator.id,
        parallelism=deployment.parallelism,
        precision=deployment.precision.id,
        kv_format=deployment.kv_format,
        stack=deployment.stack.id,
        replicas=pool.replicas,
        usd_per_gpu_hour=pool.usd_per_gpu_hour,
        # What the promise bears at its worst moment, not on average.
        max_in_flight=max(math.floor(pool.most_in_flight), 1),
        max_context=_longest(pool),
    )


def _longest(pool: PoolPlan) -> int:
    """The longest single request whose cache a replica holds, as far as the model reaches."""
    deployment = pool.deployment
    low, high = 1, deployment.model.max_context or 10**7
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sequences_that_fit(deployment, middle) else (low, middle - 1)
    return low


def _class(one: RequestClass, found: FleetPlan) -> ServedClass:
    routes = []
    last = len(one.slices) - 1
    for index, piece in enumerate(one.slices):
        for pool in found.pools:
            for carried in pool.carried:
                if carried.part.request_class is one and carried.part.slice is piece:
                    # The longest slice takes whatever comes.
                    upto = None if index == last else piece.longest_input
                    routes.append(Route(pool=pool.name, share=carried.share, up_to_input=upto, why=carried.why))
    return ServedClass(
        name=one.name,
        model=one.model,
        requests_per_s=one.requests_per_s,
        input_tokens=one.input_tokens,
        output_tokens=one.output_tokens,
        ttft=one.ttft,
        tpot=one.tpot,
        routes=tuple(routes),
    )

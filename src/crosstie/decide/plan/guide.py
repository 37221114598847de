"""Where each kind of request goes while the fleet is idle: asked of the gateway's own router, so that both agree."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.core.fleet import Fleet
from crosstie.core.workload import RequestClass, Workload
from crosstie.decide.plan.answer import PoolPlan
from crosstie.decide.plan.pools import class_of, pool_of, routes_of
from crosstie.route.ask import Ask
from crosstie.route.build import live_fleet
from crosstie.route.policies import make_policy
from crosstie.route.router import Router


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

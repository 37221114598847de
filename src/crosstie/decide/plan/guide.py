"""Where each kind of request goes while the fleet is idle: asked of the gateway's own router, so that both agree."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.core.fleet import Fleet
from crosstie.core.workload import Workload
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
    models = {pool.deployment.model.id for pool in pools}
    classes = [one for one in workload.classes if one.model in models]
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
    for one in classes:
        for piece in one.slices:
            ask = Ask(
                model=one.model,
                class_name=one.name,
                input_tokens=piece.input_tokens,
                output_tokens=piece.output_tokens,
                ttft_s=one.ttft.seconds if one.ttft else None,
                tpot_s=one.tpot.seconds if one.tpot else None,
            )
            decision = router.decide(ask, 1.0)
            pool = decision.replica.pool.name if decision.replica else ""
            found.append(Guided(one.name, piece.longest_input, pool, decision.reason))
    return found

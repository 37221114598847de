"""The policies by the names that a fleet file and `--policy` give them.

A new one is a class in this room, a line here, its name in `core.fleet.Policy` and a row in docs/routing.md.
"""

from crosstie.core.errors import BadInput
from crosstie.core.fleet import Policy
from crosstie.route.cheapest import CheapestMeetingTarget, Fastest
from crosstie.route.plain import HeldPrefix, LeastLoaded, RoundRobin, Weighted
from crosstie.route.policy import RoutingPolicy

POLICIES: dict[str, type[RoutingPolicy]] = {
    policy.name: policy for policy in (CheapestMeetingTarget, Fastest, RoundRobin, LeastLoaded, Weighted, HeldPrefix)
}


def make_policy(name: Policy, seed: int = 0) -> RoutingPolicy:
    if name not in POLICIES:
        raise BadInput(f"unknown policy '{name}'; known: {', '.join(POLICIES)}")
    return POLICIES[name](seed)

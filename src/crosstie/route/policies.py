"""The policies by the names that a fleet file and `--policy` give them.

A new one is a class in this room, a line here, its name in `core.fleet.Policy` and a row in docs/routing.md.
"""

from collections.abc import Iterable

from crosstie.core.errors import BadInput
from crosstie.core.fleet import Policy
from crosstie.route.cheapest import CheapestMeetingTarget, Fastest
from crosstie.route.plain import HeldPrefix, LeastLoaded, RoundRobin, Weighted
from crosstie.route.policy import RoutingPolicy


def registry(policies: Iterable[type[RoutingPolicy]]) -> dict[str, type[RoutingPolicy]]:
    """By their names. Raises ValueError where two have the same."""
    found: dict[str, type[RoutingPolicy]] = {}
    for one in policies:
        if one.name in found:
            raise ValueError(f"two policies are called '{one.name}': {found[one.name].__name__} and {one.__name__}")
        found[one.name] = one
    return found


POLICIES = registry((CheapestMeetingTarget, Fastest, RoundRobin, LeastLoaded, Weighted, HeldPrefix))


def make_policy(name: Policy, seed: int = 0) -> RoutingPolicy:
    if name not in POLICIES:
        raise BadInput(f"unknown policy '{name}'; known: {', '.join(POLICIES)}")
    return POLICIES[name](seed)

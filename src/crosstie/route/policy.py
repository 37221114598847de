"""Policies by the names that a fleet file gives them."""

from crosstie.core.errors import BadInput
from crosstie.core.fleet import Policy
from crosstie.route.cheapest import CheapestMeetingTarget, Fastest
from crosstie.route.choosing import RoutingPolicy
from crosstie.route.plain import HeldPrefix, LeastLoaded, RoundRobin, Weighted

_ALL: tuple[type[RoutingPolicy], ...] = (CheapestMeetingTarget, Fastest, RoundRobin, LeastLoaded, Weighted, HeldPrefix)
POLICIES: dict[str, type[RoutingPolicy]] = {one.name: one for one in _ALL}

__all__ = ["POLICIES", "RoutingPolicy", "make_policy"]


def make_policy(name: Policy, seed: int = 0) -> RoutingPolicy:
    if name not in POLICIES:
        raise BadInput(f"unknown policy '{name}'; known: {', '.join(POLICIES)}")
    return POLICIES[name](seed)

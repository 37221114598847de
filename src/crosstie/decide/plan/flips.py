"""What would change the decision: prices, discounts, software; and limits of the workload that cost money.

Every flip is shown by a fleet that would be cheaper. It is looked for among the pools of the fleets that are
known already, and those of the accelerator in question: where one is found the decision does change there,
and it might change a little before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from crosstie.core.workload import Workload
from crosstie.core.worlds import WORLDS
from crosstie.decide.plan.answer import Alternative, alternative
from crosstie.decide.plan.market import Market, MarketItem
from crosstie.decide.plan.optimise import Choice
from crosstie.decide.plan.programme import Mask, Programme, Solution
from crosstie.decide.plan.solver import solve

# Accelerators that are not in the fleet and are looked at, nearest to entering it first.
_NEWCOMERS = 2
# Of the price at which it would enter if replicas could be divided: whole ones may ask for less.
_WHOLE = 0.92
# A price below this share of today's is not worth a sentence.
_FURTHEST = 0.3
# A saving below this share is the solver's, not the limit's.
_WORTH_SAYING = 0.002


@dataclass(frozen=True, slots=True)
class Flip:
    """A price that would make another fleet the cheaper one."""

    # "price" of an accelerator that is in the fleet, "discount" of one that is not.
    kind: str
    accelerator: str
    usd_per_gpu_hour: float
    at_usd_per_gpu_hour: float
    becomes: Alternative
    # What sources say it costs, from the least to the most.
    low_usd: float
    high_usd: float

    @property
    def within_sources(self) -> bool:
        """Whether some source's price is beyond the one that flips it: then the decision hangs on who is right."""
        if self.kind == "price":
            return self.high_usd > self.at_usd_per_gpu_hour
        return self.low_usd < self.at_usd_per_gpu_hour

    @property
    def change(self) -> float:
        """Of the price; negative for a discount."""
        return self.at_usd_per_gpu_hour / self.usd_per_gpu_hour - 1.0

    @property
    def software(self) -> float:
        """The same as a change of throughput: a GPU that does more for its price is one that costs less."""
        return self.usd_per_gpu_hour / self.at_usd_per_gpu_hour - 1.0


def sure_of_prices(flips: Sequence[Flip], market: Market) -> float | None:
    """The share of worlds in which no price is beyond its flip, where sellers make no market; None where all agree."""
    quotes = {item.id: item.quote for item in market.items}
    told = [(one, quotes[one.accelerator]) for one in flips if one.accelerator in quotes]
    if not any(quote.is_open for _, quote in told):
        return None
    holds = np.ones(WORLDS, dtype=bool)
    for flip, quote in told:
        beyond = quote.in_worlds - flip.at_usd_per_gpu_hour
        holds &= beyond < 0.0 if flip.kind == "price" else beyond > 0.0
    return float(holds.mean())


def _flip(kind: str, item: MarketItem, usd: float, becomes: Alternative) -> Flip:
    quote = item.quote
    return Flip(kind, item.id, quote.usd, float(usd), becomes, quote.low, quote.high)


def leaving(asked: Choice, answer: Solution, without: dict[str, Solution | None]) -> list[Flip]:
    """For each accelerator of the fleet the price above which a fleet without it is cheaper than this one."""
    flips = []
    for name, other in without.items():
        place = asked.market.index(name)
        item, paid = asked.market.items[place], answer.bought[place]
        becomes = alternative(asked, other, answer.usd_per_hour)
        if other is None or becomes is None or paid <= 0:
            continue
        rise = max(other.usd_per_hour - answer.usd_per_hour, 0.0) / paid
        flips.append(_flip("price", item, item.quote.usd + rise, becomes))
    return flips


def entering(asked: Choice, answer: Solution, known: Mask) -> list[Flip]:
    """For accelerators outside the fleet a price at which a fleet with them is cheaper."""
    now = {item.id: item.quote.usd for item in asked.market.items}
    inside = asked.gpus(answer)
    outside = [(name, usd) for name, usd in _entry_prices(asked, answer).items() if name not in inside]
    outside.sort(key=lambda pair: -pair[1] / now[pair[0]])
    flips = []
    for name, relaxed in outside[:_NEWCOMERS]:
        usd = min(relaxed, now[name]) * _WHOLE
        becomes = _at_price(asked, name, usd, answer, known) if usd > _FURTHEST * now[name] else None
        if becomes:
            flips.append(_flip("discount", asked.market.items[asked.market.index(name)], usd, becomes))
    return flips


def _at_price(asked: Choice, name: str, usd: float, answer: Solution, known: Mask) -> Alternative | None:
    """The fleet at another price of one accelerator, if it has it and is cheaper than the answer."""
    prices = asked.problem.usd_per_hour.copy()
    prices[asked.market.index(name)] = usd
    problem = replace(asked.problem, usd_per_hour=prices)
    solution = solve(problem, known | asked.allowing(lambda item: item.id == name), quickly=True)
    if solution is None or solution.usd_per_hour >= answer.usd_per_hour * (1.0 - 1e-6):
        return None
    return alternative(asked, solution, answer.usd_per_hour) if name in asked.gpus(solution) else None


def _entry_prices(asked: Choice, answer: Solution) -> dict[str, float]:
    """The price at which an accelerator would take some slice from the fleet, could replicas be divided."""
    problem = asked.problem
    per_request = problem.per_request(problem.replica_usd_per_hour)
    paid = per_request[answer.replicas > 0].min(axis=0)
    over = (per_request / paid).min(axis=1)
    found = {}
    for i, item in enumerate(asked.market.items):
        least = float(over[problem.accelerator == i].min(initial=np.inf))
        if np.isfinite(least):
            found[item.id] = item.quote.usd / least
    return found


@dataclass(frozen=True, slots=True)
class Binding:
    """A limit by its key in the workload file, and the fleet that would do without it."""

    key: str
    now: str
    saves_usd_per_hour: float
    without_it: Alternative


def bindings(asked: Choice, answer: Solution, workload: Workload) -> list[Binding]:
    """Limits that bind, those that cost most first."""
    found = []
    for key, now, freed in _lifted(asked, workload):
        other = solve(freed, quickly=True)
        instead = alternative(asked, other, answer.usd_per_hour)
        if other is None or instead is None:
            continue
        saved = answer.usd_per_hour - other.usd_per_hour
        if saved > _WORTH_SAYING * answer.usd_per_hour:
            found.append(Binding(key, now, saved, instead))
    return sorted(found, key=lambda one: -one.saves_usd_per_hour)


def _lifted(asked: Choice, workload: Workload) -> list[tuple[str, str, Programme]]:
    """Each limit that the workload sets, and the programme without it."""
    problem, limits = asked.problem, workload.constraints
    found = []
    if limits.power_kw is not None:
        found.append(("power_kw", f"{limits.power_kw:g}", replace(problem, power_watts=np.inf)))
    if np.any(problem.vendor_share > 0):
        shares = ", ".join(f"{vendor} {share:g}" for vendor, share in limits.vendor_share.items())
        found.append(("vendor_share", shares, replace(problem, vendor_share=np.zeros_like(problem.vendor_share))))
    if limits.whole_nodes:
        found.append(("whole_nodes", "true", replace(problem, unit=np.ones_like(problem.unit))))
    for index, item in enumerate(asked.market.items):
        if np.isfinite(item.at_most):
            free = problem.at_most.copy()
            free[index] = np.inf
            found.append((f"at_most.{item.id}", f"{item.at_most:g}", replace(problem, at_most=free)))
    return found

"""A scenario on several accelerators: each in its best layout at the most load that keeps the targets, and who is the
cheapest a token, by how much and how surely.

Prices are those of whole hours at that load: a fleet that idles pays more, by the same factor on all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.catalog.scenarios import Scenario
from crosstie.core.deployment import Accelerator, Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.estimate import Estimate
from crosstie.core.figures import dollars
from crosstie.core.units import HOURS_PER_YEAR, SECONDS_PER_HOUR
from crosstie.core.workload import Lora, RequestClass
from crosstie.decide.cost.prices import PURCHASE, Quote, quote, quotes
from crosstie.decide.plan.adapters import with_adapters
from crosstie.perf.estimate import estimate
from crosstie.perf.fit import FITS, candidate_layouts, place_each
from crosstie.perf.hardware import Array, Hardware
from crosstie.perf.steady_state import steady_state
from crosstie.perf.worlds import estimate_in_worlds
from crosstie.port.preflight.readiness import ReadinessCheck

# Rent by the hour, the first of these that an accelerator has.
BY_THE_HOUR = ("on-demand", "quoted")
_CLIENTS = np.array([2.0**k for k in range(12)])


@dataclass(frozen=True, slots=True)
class Contender:
    accelerator: Accelerator
    deployment: Deployment
    concurrency: int
    estimate: Estimate
    quote: Quote
    # Of a GPU, at the middle one of its sellers, the least and the most of them; and how it comes about.
    usd_per_hour: float
    least_usd_per_hour: float
    most_usd_per_hour: float
    priced: str

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.estimate.output_tokens_per_s_per_gpu

    def _usd_per_mtok(self, tokens_per_s_per_gpu: float) -> float:
        return self.usd_per_hour / SECONDS_PER_HOUR / tokens_per_s_per_gpu * 1e6

    @property
    def usd_per_mtok(self) -> float:
        return self._usd_per_mtok(self.tokens_per_s_per_gpu)

    @property
    def usd_interval(self) -> tuple[float, float] | None:
        """80%, by what is not known of the throughput; the price stays as it is."""
        if self.estimate.interval is None:
            return None
        low, high = self.estimate.interval.per_gpu(self.deployment.parallelism.gpus)
        return self._usd_per_mtok(high), self._usd_per_mtok(low)

    def usd_in_worlds(self, scenario: Scenario) -> Array:
        """USD per million tokens in every world, at this price."""
        found = estimate_in_worlds(self.deployment, self.estimate, (scenario.input, scenario.output))
        rate = found.output_tokens_per_s[0] / self.deployment.parallelism.gpus
        return np.asarray(self.usd_per_hour / SECONDS_PER_HOUR / rate * 1e6)


@dataclass(frozen=True, slots=True)
class Contest:
    scenario: Scenario
    # The cheapest a token first.
    ranking: tuple[Contender, ...]
    # Why others are not in it, by accelerator.
    problems: dict[str, str]

    @property
    def ratio(self) -> float | None:
        """The second's cost over the first's: by so much the first's price may rise before it loses."""
        return self.ranking[1].usd_per_mtok / self.ranking[0].usd_per_mtok if len(self.ranking) > 1 else None

    @property
    def ratio_at_worst(self) -> float | None:
        """The same with the first at its dearest seller and the second at its cheapest."""
        if self.ratio is None:
            return None
        first, second = self.ranking[:2]
        dearer, cheaper = first.most_usd_per_hour / first.usd_per_hour, second.least_usd_per_hour / second.usd_per_hour
        return self.ratio * cheaper / dearer

    @property
    def confidence(self) -> float | None:
        """The share of worlds in which the first is cheaper than the second, at these prices."""
        if len(self.ranking) < 2 or any(one.estimate.interval is None for one in self.ranking[:2]):
            return None
        first, second = (one.usd_in_worlds(self.scenario) for one in self.ranking[:2])
        return float((first < second).mean())


def contest(catalog: Catalog, scenario: Scenario, accelerators: Sequence[Accelerator]) -> Contest:
    chosen = [catalog.accelerator(name) for name in scenario.accelerators] or list(accelerators)
    check = ReadinessCheck(catalog)
    problems: dict[str, str] = {}
    found: list[Deployment] = []
    paid: dict[str, _Paid] = {}
    for accelerator in chosen:
        price = _price(catalog, accelerator, owned=scenario.owned)
        if price is None:
            problems[accelerator.id] = "no purchase price" if scenario.owned else "no price by the hour"
            continue
        paid[accelerator.id] = price
        try:
            layouts = _layouts(catalog, scenario, accelerator)
        except BadInput as error:
            problems[accelerator.id] = str(error)
            continue
        runs = [one for one in layouts if check.runs(one)]
        if not runs:
            most = f"{scenario.most_gpus} GPU{'s' if scenario.most_gpus > 1 else ''}"
            problems[accelerator.id] = "preflight: will not run" if layouts else f"does not fit on {most}"
        found += runs
    best = _best(scenario, found)
    for name in {one.accelerator.id for one in found} - best.keys():
        problems[name] = "no layout keeps the targets"
    ranking = [_contender(scenario, *best[name], paid[name]) for name in best]
    return Contest(scenario, tuple(sorted(ranking, key=lambda one: one.usd_per_mtok)), problems)


def _price(catalog: Catalog, accelerator: Accelerator, *, owned: bool) -> "_Paid | None":
    if not owned:
        one = quotes(catalog.prices, [accelerator.id], BY_THE_HOUR, {}).get(accelerator.id)
        return _Paid(one, one, f"{one.kind}, {one.origin}") if one else None
    bought = quote(catalog.prices, accelerator.id, PURCHASE)
    if bought is None:
        return None
    years, kwh = catalog.costs["life_years"].likely.value, catalog.costs["usd_per_kwh"].likely.value
    electricity = accelerator.chip.tdp.si / 1e3 * kwh
    hourly = bought.mapped(lambda usd: usd / (years * HOURS_PER_YEAR) + electricity)
    said = f"bought at {dollars(bought.usd)} ({bought.origin}), over {years:g} years, with electricity at its TDP"
    return _Paid(bought, hourly, said)


class _Paid(NamedTuple):
    quote: Quote
    hourly: Quote
    priced: str


def _layouts(catalog: Catalog, scenario: Scenario, accelerator: Accelerator) -> list[Deployment]:
    model = catalog.model(scenario.model)
    splits = [
        one for one in candidate_layouts(model, accelerator) if one.pp == 1 and one.gpus <= scenario.most_gpus
    ]  # fmt: skip
    first = catalog.deployment(model, accelerator, Parallelism(), scenario.precision)
    placed = place_each(catalog, first, splits, scenario.input + scenario.output)
    return with_adapters([one.deployment for one in placed if one.verdict == FITS], [_asked(scenario)])


def _asked(scenario: Scenario) -> RequestClass:
    """What adapters are sized for; the rate cancels out, since all requests are of this class."""
    lora = Lora(adapters=scenario.adapters, rank=scenario.rank) if scenario.adapters else None
    return RequestClass(name=scenario.name, model=scenario.model, requests_per_s=1.0, slices=(), lora=lora)


def _best(scenario: Scenario, deployments: Sequence[Deployment]) -> dict[str, tuple[Deployment, int]]:
    """By accelerator: the layout and the requests in flight that give most tokens a GPU within the targets."""
    if not deployments:
        return {}
    got = steady_state(Hardware(deployments), _CLIENTS, scenario.input, scenario.output)
    kept = got.concurrency_that_fits >= _CLIENTS
    for limit, seen in ((scenario.ttft_ms, got.ttft_s), (scenario.tpot_ms, got.tpot_s)):
        if limit is not None:
            kept = kept & (seen * 1e3 <= limit)
    gpus = np.array([[one.parallelism.gpus] for one in deployments])
    rate = np.where(kept, got.output_tokens_per_s / gpus, 0.0)
    best: dict[str, tuple[float, Deployment, int]] = {}
    for row, one in enumerate(deployments):
        at = int(rate[row].argmax())
        if rate[row, at] > best.get(one.accelerator.id, (0.0,))[0]:
            best[one.accelerator.id] = float(rate[row, at]), one, int(_CLIENTS[at])
    return {name: (one, clients) for name, (_, one, clients) in best.items()}


def _contender(scenario: Scenario, deployment: Deployment, clients: int, paid: _Paid) -> Contender:
    found = estimate(deployment, concurrency=clients, input_tokens=scenario.input, output_tokens=scenario.output)
    hour = paid.hourly
    return Contender(
        deployment.accelerator, deployment, clients, found, paid.quote, hour.usd, hour.low, hour.high, paid.priced
    )

"""A scenario on several accelerators: each in its best layout at the most load that keeps the targets, and who is the
cheapest a token, by how much and how surely.

Prices are of one kind for all, for whole hours at that load: a fleet that idles pays more, by the same factor on all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.catalog.scenarios import Scenario
from crosstie.core.deployment import Accelerator, Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.estimate import Estimate
from crosstie.core.figures import dollars
from crosstie.core.question import USUAL, BuyersQuestion, Reckoning, reckoning
from crosstie.core.workload import Lora, RequestClass
from crosstie.decide.cost.energy import draw_of
from crosstie.decide.cost.ownership import by_the_hour
from crosstie.decide.cost.prices import BUY, PURCHASE, Quote, quotes
from crosstie.decide.plan.candidates import with_adapters
from crosstie.perf.estimate import estimate
from crosstie.perf.fit import FITS, candidate_layouts, place_each
from crosstie.perf.hardware import Array, Hardware
from crosstie.perf.steady_state import steady_state
from crosstie.perf.worlds import estimate_in_worlds
from crosstie.port.preflight.readiness import ReadinessCheck

_CLIENTS = np.array([2.0**k for k in range(12)])


@dataclass(frozen=True, slots=True)
class Contender:
    accelerator: Accelerator
    deployment: Deployment
    concurrency: int
    estimate: Estimate
    # Of a GPU-hour, at the middle one of its sellers.
    quote: Quote
    reckoned: Reckoning

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.estimate.output_tokens_per_s_per_gpu

    @property
    def usd_per_mtok(self) -> float:
        assert self.reckoned.usd_per_mtok is not None, "whoever takes part has a price and a rate"
        return self.reckoned.usd_per_mtok

    @property
    def usd_interval(self) -> tuple[float, float] | None:
        """80%, by what is not known of the throughput; the price stays as it is."""
        return self.reckoned.usd_per_mtok_80

    def usd_in_worlds(self, scenario: Scenario) -> Array:
        """USD per million tokens in every world, at the price that it has there."""
        estimates = estimate_in_worlds(self.deployment, self.estimate, (scenario.input, scenario.output))
        rate = estimates.output_tokens_per_s[0] / self.deployment.parallelism.gpus
        return self.quote.per_mtok(self.quote.in_worlds, rate)


@dataclass(frozen=True, slots=True)
class Contest:
    scenario: Scenario
    question: BuyersQuestion
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
        first, second = (contender.quote for contender in self.ranking[:2])
        return self.ratio * (second.low / second.usd) / (first.high / first.usd)

    @property
    def flips_at(self) -> float | None:
        """USD a GPU-hour of the first at which the second is as cheap."""
        return None if self.ratio is None else self.ranking[0].quote.usd * self.ratio

    @property
    def confidence(self) -> float | None:
        """The share of worlds in which the first is cheaper than the second, each at its price there."""
        if len(self.ranking) < 2 or any(contender.estimate.interval is None for contender in self.ranking[:2]):
            return None
        first, second = (contender.usd_in_worlds(self.scenario) for contender in self.ranking[:2])
        return float((first < second).mean())


def contest(
    catalog: Catalog, scenario: Scenario, accelerators: Sequence[Accelerator], kind: str = USUAL.price
) -> Contest:
    """`kind`: of the prices of all; a scenario of owners has theirs."""
    kind = BUY if scenario.owned else kind
    chosen = [catalog.accelerator(name) for name in scenario.accelerators] or list(accelerators)
    check = ReadinessCheck(catalog)
    prices = quotes(catalog.prices, [accelerator.id for accelerator in chosen], [PURCHASE if kind == BUY else kind], {})
    problems: dict[str, str] = {}
    deployments: list[Deployment] = []
    for accelerator in chosen:
        if accelerator.id not in prices:
            problems[accelerator.id] = _unpriced(catalog, accelerator, kind)
            continue
        try:
            layouts = _layouts(catalog, scenario, accelerator)
        except BadInput as error:
            problems[accelerator.id] = str(error)
            continue
        runs = [layout for layout in layouts if check.runs(layout)]
        if not runs:
            most = f"{scenario.most_gpus} GPU{'s' if scenario.most_gpus > 1 else ''}"
            problems[accelerator.id] = "preflight: will not run" if layouts else f"does not fit on {most}"
        deployments += runs
    best = _best(scenario, deployments)
    for name in {deployment.accelerator.id for deployment in deployments} - best.keys():
        problems[name] = "no layout keeps the targets"
    ranking = [_contender(catalog, scenario, *best[name], prices[name]) for name in best]
    asked = BuyersQuestion(
        models=(scenario.model,), input_tokens=scenario.input, output_tokens=scenario.output, in_flight=None,
        targets=scenario.targets, price=kind, precision=scenario.precision, sure=0.5,
    )  # fmt: skip
    return Contest(scenario, asked, tuple(sorted(ranking, key=lambda contender: contender.usd_per_mtok)), problems)


def _unpriced(catalog: Catalog, accelerator: Accelerator, kind: str) -> str:
    """What it has instead: prices of different kinds are not held against each other."""
    others = quotes(catalog.prices, [accelerator.id], ["on-demand", "quoted", "reserved", PURCHASE], {})
    instead = f" ({quote.kind} {dollars(quote.usd)}, {quote.provider})" if (quote := others.get(accelerator.id)) else ""
    return f"no {PURCHASE if kind == BUY else kind} price{instead}"


def _layouts(catalog: Catalog, scenario: Scenario, accelerator: Accelerator) -> list[Deployment]:
    model = catalog.model(scenario.model)
    splits = [way for way in candidate_layouts(model, accelerator) if way.pp == 1 and way.gpus <= scenario.most_gpus]
    first = catalog.deployment(model, accelerator, Parallelism(), scenario.precision)
    placed = place_each(catalog, first, splits, scenario.input + scenario.output)
    return with_adapters([fit.deployment for fit in placed if fit.verdict == FITS], [_asked(scenario)])


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
    gpus = np.array([[placed.parallelism.gpus] for placed in deployments])
    rate = np.where(kept, got.output_tokens_per_s / gpus, 0.0)
    best: dict[str, tuple[float, Deployment, int]] = {}
    for row, deployment in enumerate(deployments):
        at = int(rate[row].argmax())
        if rate[row, at] > best.get(deployment.accelerator.id, (0.0,))[0]:
            best[deployment.accelerator.id] = float(rate[row, at]), deployment, int(_CLIENTS[at])
    return {name: (deployment, clients) for name, (_, deployment, clients) in best.items()}


def _contender(catalog: Catalog, scenario: Scenario, deployment: Deployment, clients: int, price: Quote) -> Contender:
    lengths = scenario.input, scenario.output
    estimated = estimate(deployment, concurrency=clients, input_tokens=lengths[0], output_tokens=lengths[1])
    draw = draw_of(catalog, deployment, estimated, *lengths) if price.kind == PURCHASE else None
    hour = by_the_hour(price, deployment.accelerator, catalog.costs, USUAL.horizon_years, draw)
    bought = f", {dollars(price.usd)} over {USUAL.horizon_years:g} years" if price.kind == PURCHASE else ""
    reckoned = reckoning(
        deployment, *lengths, in_flight=clients, output_tokens_per_s_per_gpu=estimated.output_tokens_per_s_per_gpu,
        tokens_80=estimated.interval.per_gpu(deployment.parallelism.gpus) if estimated.interval else None,
        usd_per_gpu_hour=hour.usd, price=f"{hour.kind}, {price.origin}{bought}",
    )  # fmt: skip
    return Contender(deployment.accelerator, deployment, clients, estimated, hour, reckoned)

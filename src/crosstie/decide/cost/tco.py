"""`tco`: what owning each accelerator of a scorecard costs, beside renting it, an API, or waiting for the next one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.catalog.prices import ApiPrice, Price
from crosstie.core.deployment import Accelerator, Deployment
from crosstie.core.errors import BadInput, BadParameter, DoesNotFit
from crosstie.core.figures import dollars, plural
from crosstie.core.question import USUAL, BuyersQuestion, Reckoning, precision_word
from crosstie.core.units import HOURS_PER_MONTH
from crosstie.decide.compare.scorecard import Entry, Scorecard, compare
from crosstie.decide.cost.assessment import Assessment, assess
from crosstie.decide.cost.choices import (
    Api,
    ApiQuote,
    BuyOrWait,
    HostOrApi,
    RentOrBuy,
    Successor,
    api_quote,
    buy_or_wait,
    given_api,
    host_or_api,
    rent_or_buy,
)
from crosstie.decide.cost.energy import basis, draw_of
from crosstie.decide.cost.ownership import Option, throughput, working_share
from crosstie.decide.cost.prices import BUY, PURCHASE, Quote, behind, quote, quotes, sold_tokens
from crosstie.perf.memory import memory_plan
from crosstie.perf.worlds import estimate_in_worlds

# Rents to hold against owning, each that an accelerator has; of the first two, hours as they are needed, one.
_BY_THE_HOUR = (USUAL.price, "quoted")
_CONTRACTS = ("reserved", "reserved-1-year", "reserved-3-years", "modelled-3-years")


@dataclass(frozen=True, slots=True)
class TcoRequest:
    """What is bought on which terms, and what to hold against it. Mappings are by the accelerators' ids."""

    # Of each accelerator.
    gpus: int = 8
    years: float = USUAL.horizon_years
    # What one costs before the discount, in place of the catalog's prices; discounts as fractions.
    purchase_usd: Mapping[str, float] = field(default_factory=dict)
    discount: Mapping[str, float] = field(default_factory=dict)
    # Engineers that one needs more than the others.
    engineers: Mapping[str, float] = field(default_factory=dict)
    # Assumptions in place of the catalog's, by accelerator and key: `crosstie catalog show costs` lists them.
    assumptions: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # Of the Monte Carlo. `vary` moves every assumption by this share instead of over its own range.
    samples: int = 10_000
    seed: int = 0
    vary: float | None = None
    # Whether to hold renting against it, and rents by the hour in place of the catalog's.
    rent: bool = False
    rent_usd_per_hour: Mapping[str, float] = field(default_factory=dict)
    # Whether to hold APIs against it, at the catalog's prices; or one at these, USD per million tokens in and out.
    api: bool = False
    api_usd_per_mtok: tuple[float, float] | None = None
    # What to wait for instead, renting the cheapest of today's meanwhile.
    successor: Successor | None = None


@dataclass(frozen=True, slots=True)
class RentComparison:
    """One option against its rent: at the least, the usual and the most that is asked."""

    name: str
    rent: Quote
    choices: Sequence[RentOrBuy]


@dataclass(frozen=True, slots=True)
class ApiComparison:
    """One option against APIs: at the least, the usual and the most that is charged."""

    name: str
    choices: Sequence[HostOrApi]


@dataclass(frozen=True, slots=True)
class ApiMarket:
    """What the model's tokens cost elsewhere, and each option against that."""

    quote: ApiQuote
    # Prices of the catalog that the quote was taken from; none where the user gave it.
    sources: Sequence[ApiPrice]
    options: Sequence[ApiComparison]


@dataclass(frozen=True, slots=True)
class WaitComparison:
    option: Option
    successor: Successor
    rent: Quote
    choice: BuyOrWait
    # What the performance model makes of both, per GPU at this load, with the ends of an 80% interval; None: nothing.
    modelled: tuple[float, float, float] | None = None

    @property
    def is_denied(self) -> bool:
        """Whether the speed-up is one that the accelerators' own figures do not allow."""
        said = self.successor.speedup
        return self.modelled is not None and said is not None and not self.modelled[1] <= said <= self.modelled[2]


@dataclass(frozen=True, slots=True)
class Tco:
    card: Scorecard
    assessed: Assessment
    # Prices of the catalog that an option's price was taken from.
    sources: dict[str, list[Price]]
    # Empty or None where it was not asked for.
    rented: Sequence[RentComparison]
    apis: ApiMarket | None
    waiting: WaitComparison | None
    # What each option's electricity rests on.
    power_basis: dict[str, str]

    def usd_per_gb_month(self, name: str) -> float:
        """Of memory, owned."""
        bill = self.assessed.bills[name]
        return bill.usd_per_gpu_hour * HOURS_PER_MONTH / (bill.option.accelerator.memory_bytes / 1e9)

    def usd_per_cache_gb_month(self, name: str) -> float:
        """Of what weights and engine leave for the KV cache."""
        entry = next(entry for entry in self.running if entry.accelerator.id == name)
        assert entry.deployment, "what runs is deployed somehow"
        room = memory_plan(entry.deployment).cache_bytes / 1e9
        return self.assessed.bills[name].usd_per_gpu_hour * HOURS_PER_MONTH / room

    @property
    def question(self) -> BuyersQuestion:
        sold = next(iter(self.assessed.bills.values())).utilisation
        years = self.assessed.years
        return msgspec.structs.replace(self.card.question, price=BUY, horizon_years=years, utilisation=sold)

    def reckoned(self, entry: Entry) -> Reckoning:
        bill = self.assessed.bills[entry.accelerator.id]
        assert entry.deployment, "what runs is deployed somehow"
        working = working_share(entry.deployment.parallelism.gpus, bill.option.gpus)
        return self.card.reckoned(
            entry, usd_per_gpu_hour=bill.usd_per_gpu_hour, utilisation=bill.utilisation * working,
            price=f"{BUY}, {dollars(bill.option.price.usd)} over {bill.years:g} years",
        )  # fmt: skip

    @property
    def layout_flip(self) -> str:
        """Where the second of the ranking is the cheapest once one of the two runs in another layout; else empty."""
        if len(self.assessed.ranking) < 2:
            return ""
        entries = {entry.accelerator.id: entry for entry in self.running}
        first, second = (entries[name] for name in self.assessed.ranking[:2])
        costs = self.assessed.usd_per_mtok
        mine, theirs = costs[first.accelerator.id], costs[second.accelerator.id]
        flips = [(d, theirs, cost) for d, cost in _in_others(first, mine) if cost > theirs]
        flips += [(d, cost, mine) for d, cost in _in_others(second, theirs) if cost < mine]
        if not flips:
            return ""
        d, cheap, dear = max(flips, key=lambda flip: flip[2] / flip[1])
        gpus = plural(d.parallelism.gpus, "GPU")
        at = f"{dollars(cheap)} against {dollars(dear)} per million output tokens"
        return f"The layout decides: with {d.accelerator.id} on {gpus} {second.accelerator.id} costs less, {at}."

    @property
    def running(self) -> list[Entry]:
        """Accelerators that run the model."""
        return [entry for entry in self.card.entries if entry.estimate]


def tco(catalog: Catalog, card: Scorecard, request: TcoRequest | None = None) -> Tco:
    """What owning each accelerator of a scorecard costs over the years, and per million output tokens.

    The scorecard (`compare`) says how fast each serves the model; accelerators that cannot run it are left out, and
    `DoesNotFit` is raised where none can.
    """
    asked = request or TcoRequest()
    _check(card, asked)
    apis = _apis(catalog, card, asked)
    running = [entry for entry in card.entries if entry.estimate]
    if not running:
        raise DoesNotFit(f"none can run it: {'; '.join(f'{e.accelerator.id}: {e.problem}' for e in card.entries)}")
    prices = quotes(catalog.prices, [e.accelerator.id for e in running], (PURCHASE,), asked.purchase_usd)
    options = [_option(catalog, card, entry, prices.get(entry.accelerator.id), asked) for entry in running]
    years, costs = asked.years, catalog.costs
    assessed = assess(options, costs, years, samples=asked.samples, seed=asked.seed, vary=asked.vary)
    waiting = None
    if asked.successor:
        best = next(option for option in options if option.name == assessed.ranking[0])
        # A bridge of months is rented by the hour where that has a price.
        rent = _rents(catalog, best.name, asked)[0]
        entry = next(entry for entry in running if entry.accelerator.id == best.name)
        modelled, awaited = _speedup(catalog, card, entry, asked.successor.accelerator), asked.successor
        if awaited.speedup is None and modelled:
            awaited = replace(awaited, speedup=modelled[0])
        waiting = WaitComparison(best, awaited, rent, buy_or_wait(best, awaited, costs, rent, years), modelled)
    rented = [
        RentComparison(way.name, rent, [rent_or_buy(way, costs, usd, years) for usd in (rent.low, rent.usd, rent.high)])
        for way in (options if asked.rent else ())
        for rent in _rents(catalog, way.name, asked)
    ]
    market = None
    if apis:
        quote, sources = apis
        ends = (quote.low, quote.usd, quote.high)
        compared = [ApiComparison(way.name, [host_or_api(way, costs, usd, years) for usd in ends]) for way in options]
        market = ApiMarket(quote, sources, compared)
    sources_of = {option.name: behind(catalog.prices, option.price) for option in options}
    power = {
        way.name: basis(catalog, way.accelerator, way.draw, "mean_power_fraction" in way.overrides) for way in options
    }
    return Tco(card, assessed, sources_of, rented, market, waiting, power)


def _speedup(catalog: Catalog, card: Scorecard, entry: Entry, later: Accelerator) -> tuple[float, float, float] | None:
    """Tokens/s of a GPU of the one over the other's, at the load of the card and in the fewest GPUs of each."""
    assert entry.deployment, "only entries that run are bought"
    own = entry.deployment
    (other,) = compare(
        catalog.with_announced, card.model, [later], card.load, precision=precision_word(own),
        kv_format=own.kv_format, stack=own.stack.id, speculation=own.speculation,
    ).entries  # fmt: skip
    if other.deployment is None or other.estimate is None or entry.estimate is None:
        return None
    lengths = (card.load.input_tokens, card.load.output_tokens)
    drawn = [
        estimate_in_worlds(deployment, estimate, lengths).output_tokens_per_s[0] / deployment.gpus
        for deployment, estimate in ((other.deployment, other.estimate), (own, entry.estimate))
    ]
    low, high = np.quantile(drawn[0] / drawn[1], [0.1, 0.9]).tolist()
    ratio = other.estimate.output_tokens_per_s_per_gpu / entry.estimate.output_tokens_per_s_per_gpu
    return ratio, min(low, ratio), max(high, ratio)


def _in_others(entry: Entry, usd_per_mtok: float) -> list[tuple[Deployment, float]]:
    """What a million tokens cost in an entry's other layouts: the same GPUs for other tokens."""
    assert entry.estimate, "only entries that run are bought"
    rate = entry.estimate.output_tokens_per_s_per_gpu
    return [(d, usd_per_mtok * rate / other.output_tokens_per_s_per_gpu) for d, other in entry.others]


def _check(card: Scorecard, asked: TcoRequest) -> None:
    known = [entry.accelerator.id for entry in card.entries]
    for name in ("purchase_usd", "discount", "engineers", "assumptions", "rent_usd_per_hour"):
        for given in getattr(asked, name):
            if given not in known:
                raise BadInput(f"{name}: {given} is not on the scorecard, which has {', '.join(known)}")
    if asked.rent_usd_per_hour and not asked.rent and asked.successor is None:
        raise BadInput("rents change nothing unless renting is compared, or waiting for a successor")


def _option(catalog: Catalog, card: Scorecard, entry: Entry, price: Quote | None, asked: TcoRequest) -> Option:
    name, estimate, deployment = entry.accelerator.id, entry.estimate, entry.deployment
    assert estimate, "only entries that run are bought"
    assert deployment, "what runs is deployed somehow"
    if asked.gpus < deployment.parallelism.gpus:
        raise BadParameter("gpus", f"{asked.gpus}: one replica on {name} takes {deployment.parallelism.gpus}")
    if price is None:
        raise BadInput(f"the catalog has no purchase price of {name}: give one with --purchase {name}=USD")
    working = working_share(deployment.parallelism.gpus, asked.gpus)
    return Option(
        accelerator=entry.accelerator, gpus=asked.gpus, price=price,
        draw=draw_of(catalog, deployment, estimate, card.load.input_tokens, card.load.output_tokens, working),
        output_tokens_per_s_per_gpu=throughput(
            deployment, estimate, (card.load.input_tokens, card.load.output_tokens), asked.gpus
        ),
        discount=asked.discount.get(name, 0.0), engineers=asked.engineers.get(name, 0.0),
        overrides=asked.assumptions.get(name, {}),
    )  # fmt: skip


def _rents(catalog: Catalog, name: str, asked: TcoRequest) -> list[Quote]:
    """Hours as they are needed, and years around the clock under contract, as far as either has a price."""
    by_the_hour = quotes(catalog.prices, [name], _BY_THE_HOUR, asked.rent_usd_per_hour)
    contracts = filter(None, (quote(catalog.prices, name, kind) for kind in _CONTRACTS))
    rents = [*by_the_hour.values(), *contracts]
    if not rents:
        raise BadInput(f"the catalog has no rent of {name}: give one with --rent-usd {name}=USD")
    return rents


def _apis(catalog: Catalog, card: Scorecard, asked: TcoRequest) -> tuple[ApiQuote, Sequence[ApiPrice]] | None:
    """What tokens cost elsewhere, and what that rests on: the user's own prices, else the catalog's where asked."""
    load, model = card.load, card.model
    if asked.api_usd_per_mtok is not None:
        return given_api(Api(*asked.api_usd_per_mtok, load.input_tokens, load.output_tokens)), []
    if not asked.api:
        return None
    offers = sold_tokens(catalog, model)
    asked_price = api_quote(offers, load.input_tokens, load.output_tokens)
    if asked_price is None:
        raise BadInput(
            f"--api: the catalog has no API price of {model.id}: give one with --api-input USD --api-output USD"
        )
    return asked_price, offers

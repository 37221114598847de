"""Three choices around a purchase: rent instead, pay an API instead, or wait for the next accelerator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from crosstie.catalog.prices import ApiPrice
from crosstie.core.deployment import Accelerator
from crosstie.core.errors import BadInput
from crosstie.core.units import HOURS_PER_MONTH, HOURS_PER_YEAR, MONTHS_PER_YEAR
from crosstie.decide.cost.ownership import RUNNING, Costs, Option, inputs, own, owned_usd
from crosstie.decide.cost.prices import Offer, Quote, by_provider, given
from crosstie.decide.cost.ranges import likely

_DAYS_PER_YEAR = HOURS_PER_YEAR / 24.0
_MOST_MONTHS = 240.0
# A slip is looked at in so many equally likely cases.
_CASES = 200


@dataclass(frozen=True, slots=True)
class RentOrBuy:
    """One owned GPU against one that is rented by the hour."""

    rent_usd_per_hour: float
    owned_usd_per_hour: float
    # Share of hours in use above which owning is cheaper than renting those hours alone; above 1: never.
    break_even_utilisation: float
    # Months of renting around the clock that cost as much as buying and running; None: never.
    payback_months: float | None

    @property
    def buy_wins_around_the_clock(self) -> bool:
        return self.break_even_utilisation < 1.0

    @property
    def saving_of_buying(self) -> float:
        """Share of the rent around the clock that owning saves; negative where it costs more."""
        return 1.0 - self.break_even_utilisation


def rent_or_buy(option: Option, costs: Costs, rent_usd_per_hour: float, years: float = 3.0) -> RentOrBuy:
    _check_rent(rent_usd_per_hour)
    owned = own(option, costs, years)
    values = likely(inputs(option, costs, years))
    outlay = option.price.usd * (1.0 - option.discount) + float(
        values["server_usd_per_gpu"] + values["network_usd_per_gpu"]
    )
    running = sum(owned.usd[line] for line in (*RUNNING, "engineers"))
    per_hour = running / (option.gpus * years * HOURS_PER_YEAR)
    left = rent_usd_per_hour - per_hour
    return RentOrBuy(
        rent_usd_per_hour=rent_usd_per_hour,
        owned_usd_per_hour=owned.usd_per_gpu_hour,
        break_even_utilisation=owned.usd_per_gpu_hour / rent_usd_per_hour,
        payback_months=outlay / left / HOURS_PER_MONTH if left > 0 else None,
    )


def _check_rent(usd_per_hour: float) -> None:
    if not 0.001 <= usd_per_hour <= 1e4:
        raise BadInput(f"a rent of {usd_per_hour:g} USD an hour: must be from 0.001 to 10,000")


@dataclass(frozen=True, slots=True)
class HostOrApi:
    """The whole fleet against an API that charges by the token."""

    api_usd_per_mtok: float
    own_usd_per_mtok: float
    fleet_usd_per_day: float
    # Output tokens a day at which the API costs what the fleet does, and their share of what the fleet can do.
    break_even_tokens_per_day: float
    break_even_utilisation: float

    @property
    def fleet_wins(self) -> bool:
        return self.own_usd_per_mtok < self.api_usd_per_mtok


@dataclass(frozen=True, slots=True)
class Api:
    """USD per million tokens, and the lengths of a request."""

    input_usd: float
    output_usd: float
    input_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        if not (0.0 <= self.input_usd <= 1e4 and 0.001 <= self.output_usd <= 1e4):
            prices = f"{self.input_usd:g} and {self.output_usd:g} USD"
            raise BadInput(f"API prices of {prices} a million tokens: input from 0, output from 0.001, at most 10,000")

    @property
    def usd_per_mtok(self) -> float:
        """Per million output tokens, with the prompts that go with them, as the fleet's cost counts them."""
        return self.output_usd + self.input_usd * self.input_tokens / self.output_tokens


@dataclass(frozen=True, slots=True)
class ApiQuote:
    """What APIs charge for a load: USD per million output tokens, with the prompts that go with them."""

    # The middle of the providers; the least and the most of all prices, and who charges them.
    usd: float
    low: float
    high: float
    cheapest: str
    dearest: str
    # By provider, the cheapest first: the middle of its newest prices.
    providers: dict[str, float]
    prices: int
    oldest: str
    newest: str
    is_given: bool = False

    def dearer_than(self, usd_per_mtok: float) -> int:
        """Providers that charge more than this."""
        return sum(1 for usd in self.providers.values() if usd > usd_per_mtok)


def given_api(api: Api) -> ApiQuote:
    usd = api.usd_per_mtok
    return ApiQuote(usd, usd, usd, cheapest="", dearest="", providers={}, prices=1, oldest="", newest="", is_given=True)


def api_quote(offers: Sequence[ApiPrice], input_tokens: int, output_tokens: int) -> ApiQuote | None:
    """A request's tokens at every price: who is cheap for long prompts may be dear for long answers."""
    if not offers:
        return None
    priced = [
        Offer(
            offer.provider,
            offer.output.date,
            Api(offer.input.value, offer.output.value, input_tokens, output_tokens).usd_per_mtok,
        )
        for offer in offers
    ]
    providers = {offer.provider: offer.usd for offer in by_provider(priced)}
    least, most = min(priced, key=lambda offer: offer.usd), max(priced, key=lambda offer: offer.usd)
    dates = sorted(offer.date for offer in priced)
    return ApiQuote(
        usd=median(providers.values()),
        low=least.usd,
        high=most.usd,
        cheapest=least.provider,
        dearest=most.provider,
        providers=dict(sorted(providers.items(), key=lambda item: item[1])),
        prices=len(priced),
        oldest=dates[0],
        newest=dates[-1],
    )


def host_or_api(option: Option, costs: Costs, api_usd_per_mtok: float, years: float = 3.0) -> HostOrApi:
    owned = own(option, costs, years)
    if owned.usd_per_mtok is None or owned.output_tokens is None:
        raise BadInput("an option without throughput has no cost per token")
    days = years * _DAYS_PER_YEAR
    capacity = owned.output_tokens / inputs(option, costs, years)["utilisation"].likely / days
    fleet = owned.total_usd / days
    needed = fleet / api_usd_per_mtok * 1e6
    return HostOrApi(api_usd_per_mtok, owned.usd_per_mtok, fleet, needed, needed / capacity)


@dataclass(frozen=True, slots=True)
class Successor:
    """An accelerator that is promised."""

    accelerator: Accelerator
    # Months until it is said to be there, and how much later it comes in the mean.
    months: float
    mean_slip_months: float
    # Tokens/s of one over tokens/s of one of today's; None: as the performance model has it.
    speedup: float | None
    # What one will cost, discounts taken off.
    purchase_usd: float

    def __post_init__(self) -> None:
        for what, value in (("months until delivery", self.months), ("months of slip", self.mean_slip_months)):
            if not 0.0 <= value <= _MOST_MONTHS:
                raise BadInput(f"{value:g} {what}: must be from 0 to {_MOST_MONTHS:g}")
        if self.speedup is not None and not 0.01 <= self.speedup <= 1000.0:
            raise BadInput(f"a speed-up of {self.speedup:g}x: must be from 0.01 to 1000")


@dataclass(frozen=True, slots=True)
class BuyOrWait:
    """The same tokens over the same horizon, either way."""

    buy_now_usd: float
    wait_usd: float
    # Part of waiting that goes to rent.
    bridge_usd: float
    gpus_later: float
    # Speed-up, and mean slip up to the horizon, at which both cost the same; None: no such value.
    break_even_speedup: float | None
    break_even_slip_months: float | None

    @property
    def waiting_wins(self) -> bool:
        return self.wait_usd < self.buy_now_usd


def mean_slip_months(probability_per_quarter: float) -> float:
    """Mean delay of a date that is missed by another quarter with the same probability each time."""
    if not 0.0 <= probability_per_quarter < 1.0:
        raise BadInput(f"a probability of {probability_per_quarter:g}: must be from 0 to below 1")
    return 3.0 * probability_per_quarter / (1.0 - probability_per_quarter)


def buy_or_wait(option: Option, successor: Successor, costs: Costs, rent: Quote, years: float) -> BuyOrWait:
    """Waiting rents today's accelerator until the successor is there, then owns fewer of that one.

    The slip is exponential, so a delay says nothing about how much more is to come. What comes after the
    horizon counts on neither side, and bought hardware is worth its remaining value.
    """
    _check_rent(rent.usd)
    now = own(option, costs, years).total_usd
    bridge, later, fixed = _waiting(option, successor, costs, rent, years)
    speedup = successor.speedup
    if speedup is None:
        raise BadInput(f"nothing says how fast {successor.accelerator.id} is: give speedup=X")
    wait = bridge + later / speedup + fixed
    left = now - bridge - fixed

    def gap(slip: float) -> float:
        parts = _waiting(option, replace(successor, mean_slip_months=slip), costs, rent, years)
        return parts[0] + parts[1] / speedup + parts[2] - now

    return BuyOrWait(
        buy_now_usd=now,
        wait_usd=wait,
        bridge_usd=bridge,
        gpus_later=option.gpus / speedup,
        break_even_speedup=later / left if left > 0 else None,
        break_even_slip_months=_root(gap, 0.0, years * MONTHS_PER_YEAR),
    )


def _waiting(
    option: Option, successor: Successor, costs: Costs, rent: Quote, years: float
) -> tuple[float, float, float]:
    """Expected USD: rent, as many successors as today's GPUs, and engineers, who do not shrink with the fleet."""
    later = Option(
        accelerator=successor.accelerator, gpus=option.gpus, overrides=option.overrides,
        price=given(successor.accelerator.id, successor.purchase_usd),
        # Nobody has measured it: the same share of its rated power.
        draw=option.draw and option.draw.scaled(successor.accelerator.chip.tdp.si / option.accelerator.chip.tdp.si),
    )  # fmt: skip
    cases = (np.arange(_CASES) + 0.5) / _CASES
    waits = (successor.months - successor.mean_slip_months * np.log1p(-cases)) / MONTHS_PER_YEAR
    rented = np.minimum(waits, years)
    bridge = float(rented.mean()) * HOURS_PER_YEAR * rent.usd * option.gpus
    owned = np.zeros(_CASES)
    owned[waits < years] = owned_usd(later, costs, (years - waits)[waits < years])
    engineers = own(option, costs, years).usd["engineers"]
    return bridge, float(np.mean(owned)), engineers


def _root(gap: Callable[[float], float], low: float, high: float) -> float | None:
    """Where `gap` changes its sign, by halving; None where it does not."""
    if gap(low) * gap(high) > 0:
        return None
    sign = gap(low) > 0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if (gap(middle) > 0) == sign else (low, middle)
    return 0.5 * (low + high)

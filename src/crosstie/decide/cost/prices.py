"""What an accelerator costs by the hour or to buy: what one seller asks, between the least and the most of its kind.

Providers differ by a factor of five for the same GPU, and kinds of prices by another two. So a quote is always of one
kind, the middle one of its sellers, with that seller and the date of its price.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low
from zlib import crc32

import numpy as np

from crosstie.catalog.library import Catalog, spellings
from crosstie.catalog.prices import KINDS, ApiPrice, Price
from crosstie.core.errors import BadInput
from crosstie.core.figures import dollars
from crosstie.core.model import Model
from crosstie.core.units import SECONDS_PER_HOUR
from crosstie.core.worlds import WORLDS
from crosstie.perf.hardware import Array

PURCHASE = "purchase"
# A purchase and what owning takes, spread over the hours of a horizon.
BUY = "buy"
# Sellers who differ by so much make no market: which of them one gets is as unsure as anything else.
NO_MARKET = 3.0
# The user's own price.
GIVEN = "given"
# What an analyst works out, and nobody sells: never taken unless it is asked for.
MODELLED = ("modelled-3-years", "own-hyperscaler", "own-neocloud")


@dataclass(frozen=True, slots=True)
class Quote:
    """USD by the hour, or for one accelerator where the kind is `purchase`."""

    accelerator: str
    # What the middle one of the sellers asks; the least and the most of all prices of this kind.
    usd: float
    low: float
    high: float
    kind: str
    # The seller, and as of when; empty where the user gave it.
    provider: str
    date: str
    # Prices of this kind.
    prices: int
    # The newest of each seller, the least first.
    sellers: tuple[float, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether sellers differ so much that none of them stands for all."""
        return len(self.sellers) > 1 and self.sellers[-1] >= NO_MARKET * self.sellers[0]

    @property
    def in_worlds(self) -> Array:
        """What it is in each world: the same everywhere, or where it is open one of the sellers in each, all equally
        often, in an order that is the accelerator's own."""
        if not self.is_open:
            return np.full(WORLDS, self.usd)
        order = np.random.default_rng(crc32(f"{self.accelerator} {self.kind}".encode())).permutation(WORLDS)
        return np.array(self.sellers)[order * len(self.sellers) // WORLDS]

    @staticmethod
    def per_mtok(usd_per_hour: float | Array, tokens_per_s: Array) -> Array:
        """USD per million tokens, at a price by the hour."""
        return np.asarray(usd_per_hour / SECONDS_PER_HOUR / tokens_per_s * 1e6)

    @property
    def is_given(self) -> bool:
        """Whether the user gave it, in place of what the catalog knows."""
        return self.kind == GIVEN

    @property
    def origin(self) -> str:
        """The seller, as of when, and what others ask for a price of this kind."""
        more = f"; {self.prices} prices from {dollars(self.low)} to {dollars(self.high)}" if self.prices > 1 else ""
        return f"{self.provider}, {self.date}{more}"

    def mapped(self, change: Callable[[float], float], kind: str = "") -> "Quote":
        """With each of its amounts changed."""
        usd, low, high = map(change, (self.usd, self.low, self.high))
        sellers = tuple(map(change, self.sellers))
        return replace(self, usd=usd, low=low, high=high, kind=kind or self.kind, sellers=sellers)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one provider asks at one date, in any unit."""

    provider: str
    date: str
    usd: float


def given(accelerator: str, usd: float) -> Quote:
    """A price that the user has in hand: no range around it."""
    return Quote(accelerator, usd, usd, usd, kind=GIVEN, provider="", date="", prices=1)


def quote(prices: Iterable[Price], accelerator: str, kind: str) -> Quote | None:
    """Of exactly one kind; of an even number of sellers the lower one of the two in the middle."""
    if kind not in KINDS:
        raise BadInput(f"'{kind}' is no kind of price; known: {', '.join(KINDS)}")
    offered = [p for p in prices if p.accelerator == accelerator and p.kind == kind]
    if not offered:
        return None
    sellers = by_provider(Offer(p.provider, p.amount.date, p.amount.value) for p in offered)
    usual = median_low(offer.usd for offer in sellers)
    seller = max((offer for offer in sellers if offer.usd == usual), key=lambda offer: offer.date)
    values = [p.amount.value for p in offered]
    asked = tuple(sorted(offer.usd for offer in sellers))
    return Quote(accelerator, usual, min(values), max(values), kind, seller.provider, seller.date, len(offered), asked)


def quotes(
    prices: Iterable[Price], accelerators: Iterable[str], kinds: Sequence[str], overrides: Mapping[str, float]
) -> dict[str, Quote]:
    """For every accelerator that has one, of the first of the kinds that it has; the user's own take precedence."""
    known = tuple(prices)
    quoted: dict[str, Quote] = {}
    for name in accelerators:
        asked = (quote(known, name, kind) for kind in kinds if kind != GIVEN)
        price = given(name, overrides[name]) if name in overrides else next(filter(None, asked), None)
        if price is not None:
            quoted[name] = price
    return quoted


def behind(prices: Iterable[Price], quoted: Quote) -> list[Price]:
    """What a quote of the catalog was taken from; nothing where the user gave it."""
    return [p for p in prices if p.accelerator == quoted.accelerator and p.kind == quoted.kind]


def sold_tokens(catalog: Catalog, model: Model) -> list[ApiPrice]:
    """Prices of this very model: of the catalog's entry with its name, if its layers are the same ones.

    A folder may have the name of a model and hold another, and a model of the same shape under another name
    sells at its own price, so neither is taken for it.
    """
    known = next((m for m in catalog.models.values() if model.id.casefold() in spellings(m)), None)
    if known is None or known.layers != model.layers or known.outer != model.outer:
        return []
    return [price for price in catalog.api_prices if price.model == known.id]


def by_provider(offers: Iterable[Offer]) -> list[Offer]:
    """The newest of each provider, the middle of it where a provider has several of the same day."""
    newest: dict[str, list[Offer]] = {}
    for offer in offers:
        held = newest.setdefault(offer.provider, [])
        if held and offer.date > held[0].date:
            held.clear()
        if not held or offer.date == held[0].date:
            held.append(offer)
    return [replace(group[0], usd=median(offer.usd for offer in group)) for group in newest.values()]

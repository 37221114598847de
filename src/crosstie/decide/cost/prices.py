"""What an accelerator costs by the hour or to buy: a range over what the sources say, never one of them alone.

Providers differ by a factor of five for the same GPU, so a quote carries the least, the middle and the
most of its providers, how old they are, and of which kind they are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from crosstie.catalog.library import Catalog, spellings
from crosstie.catalog.prices import KINDS, ApiPrice, Price
from crosstie.core.errors import BadInput
from crosstie.core.model import Model

# Rent, from the kind that compares best to the one that compares worst: a three-year contract is what a
# fleet pays, and one analyst models it for most accelerators; on-demand prices are an upper end of it.
RENT = ("rent-3-years", "on-demand", "rent-quoted")
# Kinds that a user may plan by, each with the kinds to look at, in this order.
BASES: dict[str, tuple[str, ...]] = {
    "rent": RENT,
    "on-demand": ("on-demand", "rent-quoted"),
    "spot": ("spot",),
    "own-hyperscaler": ("own-hyperscaler",),
    "own-neocloud": ("own-neocloud",),
    "purchase": ("purchase",),
}


@dataclass(frozen=True, slots=True)
class Quote:
    """USD by the hour, or for one accelerator where the kind is `purchase`."""

    accelerator: str
    # Of the kind that it was taken from: the middle of its providers.
    usd: float
    # Over every kind that was looked at.
    low: float
    high: float
    kind: str
    # Prices looked at, and the dates of the oldest and the newest of them.
    prices: int
    oldest: str
    newest: str

    @property
    def is_given(self) -> bool:
        """Whether the user gave it, in place of what the catalog knows."""
        return self.kind == "given"

    def mapped(self, change: Callable[[float], float], kind: str = "") -> "Quote":
        """With each of its amounts changed."""
        usd, low, high = map(change, (self.usd, self.low, self.high))
        return replace(self, usd=usd, low=low, high=high, kind=kind or self.kind)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one provider asks at one date, in any unit."""

    provider: str
    date: str
    usd: float


def given(accelerator: str, usd: float) -> Quote:
    """A price that the user has in hand: no range around it."""
    return Quote(accelerator, usd, usd, usd, kind="given", prices=1, oldest="", newest="")


def quote(prices: Iterable[Price], accelerator: str, kinds: Sequence[str] = RENT) -> Quote | None:
    """The middle of the first of `kinds` that has a price, between the least and the most of them all."""
    for kind in kinds:
        if kind not in KINDS:
            raise BadInput(f"'{kind}' is no kind of price; known: {', '.join(KINDS)}")
    found = [p for p in prices if p.accelerator == accelerator and p.kind in kinds]
    if not found:
        return None
    kind = next(kind for kind in kinds if any(p.kind == kind for p in found))
    offers = [Offer(p.provider, p.amount.date, p.amount.value) for p in found if p.kind == kind]
    values = [p.amount.value for p in found]
    dates = sorted(p.amount.date for p in found)
    return Quote(
        accelerator=accelerator,
        usd=median(by_provider(offers).values()),
        low=min(values),
        high=max(values),
        kind=kind,
        prices=len(found),
        oldest=dates[0],
        newest=dates[-1],
    )


def quotes(
    prices: Iterable[Price], accelerators: Iterable[str], kinds: Sequence[str], overrides: Mapping[str, float]
) -> dict[str, Quote]:
    """A quote for every accelerator that has one; the user's own figures take precedence."""
    known = tuple(prices)
    found = {
        name: given(name, overrides[name]) if name in overrides else quote(known, name, kinds) for name in accelerators
    }
    return {name: one for name, one in found.items() if one is not None}


def behind(prices: Iterable[Price], found: Quote) -> list[Price]:
    """What a quote of the catalog was taken from; nothing where the user gave it."""
    return [p for p in prices if p.accelerator == found.accelerator and p.kind == found.kind]


def sold_tokens(catalog: Catalog, model: Model) -> list[ApiPrice]:
    """Prices of this very model: of the catalog's entry with its name, if its layers are the same ones.

    A folder may have the name of a model and hold another, and a model of the same shape under another name
    sells at its own price, so neither is taken for it.
    """
    known = next((m for m in catalog.models.values() if model.id.casefold() in spellings(m)), None)
    if known is None or known.layers != model.layers or known.outer != model.outer:
        return []
    return [price for price in catalog.api_prices if price.model == known.id]


def by_provider(offers: Iterable[Offer]) -> dict[str, float]:
    """The newest of each provider, the middle of it where a provider has several of the same day."""
    newest: dict[str, list[Offer]] = {}
    for offer in offers:
        held = newest.setdefault(offer.provider, [])
        if held and offer.date > held[0].date:
            held.clear()
        if not held or offer.date == held[0].date:
            held.append(offer)
    return {provider: median(offer.usd for offer in group) for provider, group in newest.items()}

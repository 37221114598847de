"""What accelerators a plan may use, and what each costs: prices with their range, power, stock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from crosstie.catalog.costs import watts
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator
from crosstie.core.errors import BadData, BadInput
from crosstie.core.workload import MOST_DISCOUNT, Workload
from crosstie.decide.cost.energy import owned_draw
from crosstie.decide.cost.ownership import by_the_hour, running_usd_per_hour
from crosstie.decide.cost.prices import BUY, GIVEN, MODELLED, PURCHASE, Quote, quotes

# What sellers ask, or were quoted to ask.
RENTS = ("on-demand", "reserved", "reserved-1-year", "reserved-3-years", "spot", "quoted")
# What a plan may be priced by: rents; what an analyst models; buying, with the hour worked out from the purchase
# price and what `crosstie tco` assumes of ownership; or nothing but the user's own prices.
PLANNED_BY = (*RENTS, *MODELLED, BUY, GIVEN)


@dataclass(frozen=True, slots=True)
class MarketItem:
    """One accelerator as it is available."""

    accelerator: Accelerator
    # After the discount.
    quote: Quote
    discount: float
    running_usd_per_hour: float
    watts: float
    on_hand: int
    at_most: float
    # GPUs that are had at once.
    unit: int

    @property
    def id(self) -> str:
        return self.accelerator.id

    @property
    def vendor(self) -> str:
        return self.accelerator.vendor


@dataclass(frozen=True, slots=True)
class Market:
    items: tuple[MarketItem, ...]
    # Which prices were asked for: the first is meant for all, the others stand in for it.
    kinds: tuple[str, ...]
    # Accelerators that have none of these, with what a seller asks by another kind, if any does.
    left_out: dict[str, Quote | None]

    @property
    def of_other_kinds(self) -> list[MarketItem]:
        """Those whose price is not of the kind that was asked for first, and not the user's own."""
        return [item for item in self.items if item.quote.kind not in (self.kinds[0], GIVEN)]

    @property
    def vendors(self) -> list[str]:
        return sorted({item.vendor for item in self.items})

    def index(self, name: str) -> int:
        return next(i for i, item in enumerate(self.items) if item.id == name)


def adjusted(
    workload: Workload,
    *,
    kinds: Sequence[str] | None = None,
    usd_per_gpu_hour: Mapping[str, float] | None = None,
    reserved_usd_per_gpu_hour: Mapping[str, float] | None = None,
    discount: Mapping[str, float] | None = None,
    accelerators: Sequence[str] | None = None,
    sizing: str | None = None,
    sure: float | None = None,
    only_known: bool = False,
    single_gpus: bool = False,
    evidence: str | None = None,
) -> Workload:
    """The workload with prices (by accelerator), discounts (by accelerator or vendor) and the rest as given here."""
    if accelerators is not None and not accelerators:
        raise BadInput("accelerators: none is named; leave it out for all that have a price")
    prices, limits = workload.prices, workload.constraints
    usd = {name: checked_gpu_hour(value) for name, value in (usd_per_gpu_hour or {}).items()}
    off = {name: checked_discount(value) for name, value in (discount or {}).items()}
    reserved = {name: checked_gpu_hour(value) for name, value in (reserved_usd_per_gpu_hour or {}).items()}
    if single_gpus:
        limits = msgspec.structs.replace(limits, whole_nodes=False)
    if evidence:
        limits = msgspec.structs.replace(limits, evidence=evidence)
    if only_known:
        limits = msgspec.structs.replace(limits, only_known=True)
    if accelerators:
        limits = msgspec.structs.replace(limits, accelerators=tuple(dict.fromkeys(accelerators)))
    prices = msgspec.structs.replace(
        prices,
        kinds=tuple(dict.fromkeys(kinds)) if kinds else prices.kinds,
        usd_per_gpu_hour={**prices.usd_per_gpu_hour, **usd},
        reserved_usd_per_gpu_hour={**prices.reserved_usd_per_gpu_hour, **reserved},
        discount={**prices.discount, **off},
    )
    if sure is not None and sizing is not None:
        raise BadInput("--sure and --sizing say the same: give one of them")
    if sure is not None and not 0.5 <= sure <= 0.99:
        raise BadInput("a plan can be 50 to 99% sure")
    how_sure: dict[str, Any] = {"sure": sure} if sure else {"sizing": sizing, "sure": None} if sizing else {}
    return msgspec.structs.replace(workload, prices=prices, constraints=limits, **how_sure)


def held(workload: Workload, gpus: Mapping[str, int]) -> Workload:
    """The workload on GPUs that are there, and on no others."""
    limits = msgspec.structs.replace(
        workload.constraints, accelerators=tuple(gpus), vendors=(), inventory=dict(gpus), at_most=dict(gpus)
    )
    return msgspec.structs.replace(workload, constraints=limits)


def checked_gpu_hour(usd: float) -> float:
    if not 0.001 <= usd <= 1000:
        raise BadInput("a GPU-hour costs from 0.001 to 1,000 USD")
    return usd


def checked_discount(share: float) -> float:
    if not 0.0 <= share <= MOST_DISCOUNT:
        raise BadInput(f"a discount is from 0% to {MOST_DISCOUNT:.0%}")
    return share


def market(catalog: Catalog, workload: Workload) -> Market:
    wanted, prices = workload.constraints, workload.prices
    for kind in prices.kinds:
        if kind not in PLANNED_BY:
            raise BadData(workload.file, "prices.kind", f"'{kind}' is not one of {', '.join(PLANNED_BY)}")
    named = [catalog.accelerator(name) for name in wanted.accelerators] or list(catalog.accelerators.values())
    chosen = [a for a in named if not wanted.vendors or a.vendor in wanted.vendors]
    if not chosen:
        reason = f"nothing that may be used ({', '.join(a.id for a in named)}) is of {', '.join(wanted.vendors)}"
        raise BadData(workload.file, "constraints.vendors", reason)
    kinds = [PURCHASE if kind == BUY else kind for kind in prices.kinds]
    known = quotes(catalog.prices, [a.id for a in chosen], kinds, prices.usd_per_gpu_hour)
    others = quotes(catalog.prices, [a.id for a in chosen], RENTS, {})
    owned = BUY in prices.kinds or wanted.inventory
    draws = {a.id: owned_draw(catalog, workload, a) if owned else None for a in chosen}
    items: list[MarketItem] = []
    left_out: dict[str, Quote | None] = {}
    for accelerator in chosen:
        off = prices.discount.get(accelerator.id, prices.discount.get(accelerator.vendor, 0.0))
        quote = known.get(accelerator.id)
        draw = draws[accelerator.id]
        if quote is None:
            if wanted.inventory.get(accelerator.id):
                reason = f"has no price of kind {' or '.join(prices.kinds)}; give one with --price {accelerator.id}=USD"
                raise BadData(workload.file, f"constraints.inventory.{accelerator.id}", reason)
            left_out[accelerator.id] = others.get(accelerator.id)
            continue
        items.append(
            MarketItem(
                accelerator=accelerator,
                # A price that the user has in hand is by the hour, whatever the others are.
                quote=by_the_hour(quote, accelerator, catalog.costs, float(workload.horizon_years), draw, off),
                discount=off,
                running_usd_per_hour=running_usd_per_hour(accelerator, catalog.costs, draw=draw),
                watts=watts(accelerator, catalog.costs),
                on_hand=wanted.inventory.get(accelerator.id, 0),
                at_most=wanted.at_most.get(accelerator.id, float("inf")),
                unit=accelerator.node if wanted.whole_nodes else 1,
            )
        )
    if not items:
        kind = " or ".join(prices.kinds)
        raise BadInput(f"no accelerator that may be used has a price of kind {kind}; give one with --price NAME=USD")
    for vendor, share in wanted.vendor_share.items():
        if share > 0 and all(item.vendor != vendor for item in items):
            reason = f"no accelerator of {vendor} may be used and has a price"
            raise BadData(workload.file, f"constraints.vendor_share.{vendor}", reason)
    return Market(tuple(items), prices.kinds, left_out)

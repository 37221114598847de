"""What a fleet of owned accelerators costs over a horizon, line by line, and what a million tokens cost on it.

One idea: a bill is a function of named numbers. An option gives each of them a span; the likely bill, a
tornado, a break-even and a thousand samples are that one function at different numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from crosstie.catalog.costs import COSTS, Ranged, costs_for
from crosstie.core.deployment import Accelerator, Deployment
from crosstie.core.errors import BadInput, near_names
from crosstie.core.estimate import Estimate
from crosstie.core.units import HOURS_PER_YEAR, MONTHS_PER_YEAR, SECONDS_PER_HOUR, UNITS
from crosstie.decide.cost.energy import Draw
from crosstie.decide.cost.prices import BUY, PURCHASE, Quote, given
from crosstie.decide.cost.ranges import ValueRange, exactly, likely
from crosstie.perf.hardware import Array
from crosstie.perf.worlds import estimate_in_worlds

Costs = Mapping[str, Ranged]
# Lines of a bill, in the order in which they are read.
LINES = {
    "accelerators": "accelerators: value lost",
    "servers": "servers: value lost",
    "network": "network: value lost",
    "capital": "cost of capital",
    "power": "electricity of the IT",
    "cooling": "electricity of cooling and losses",
    "hosting": "hosting",
    "support": "support and spares",
    "engineers": "engineers for the software",
}
# Inputs in words, for sentences and pictures; the key is what `--set` takes.
WORDS = {
    "pue": "PUE",
    "usd_per_kwh": "electricity, USD/kWh",
    "hosting_usd_per_kw_month": "hosting, USD/kW-month",
    "server_usd_per_gpu": "server, USD a GPU",
    "network_usd_per_gpu": "network, USD a GPU",
    "support_per_year": "support a year",
    "capital_per_year": "cost of capital a year",
    "life_years": "life of hardware, years",
    "residual_fraction": "value after that life",
    "server_watts_per_gpu": "server and network, W a GPU",
    "mean_power_fraction": "mean power over rated",
    "engineer_usd_per_year": "an engineer, USD a year",
    "utilisation": "utilisation",
    "purchase_usd": "price",
    "output_tokens_per_s_per_gpu": "tokens/s a GPU",
    "gpu_busy_watts": "power of a GPU that serves, W",
}
# Of them those that people say in percent.
SHARES = ("support_per_year", "capital_per_year", "residual_fraction", "mean_power_fraction", "utilisation")
# Beyond these a figure is a slip: of a unit, or of a key that stuck.
MOST_GPUS, LEAST_USD, MOST_USD, MOST_ENGINEERS = 10_000_000, 0.01, 1e7, 100_000
# One third party's figure is no offer, and discounts of up to a fifth off list are reported: so much either way.
ONE_SOURCE_SHARE = 0.2
# Those that a GPU costs on after it was bought.
RUNNING = ("power", "cooling", "hosting", "support")


@dataclass(frozen=True, slots=True)
class Option:
    """A fleet that could be bought."""

    accelerator: Accelerator
    gpus: int
    # What one accelerator costs to buy, before the discount.
    price: Quote
    # Output tokens/s of one GPU at the operating point, and its interval where there is one; None: not asked.
    output_tokens_per_s_per_gpu: ValueRange | None = None
    discount: float = 0.0
    # Engineers that this option needs beyond what the others need.
    engineers: float = 0.0
    # Assumptions that differ from the catalog's, by their key.
    overrides: Mapping[str, float] = field(default_factory=dict)
    # What a GPU draws at the operating point and below; None: a share of its rated power.
    draw: Draw | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= MOST_GPUS:
            raise BadInput(f"{self.gpus} GPUs: must be from 1 to {MOST_GPUS:,}")
        if not 0.0 <= self.discount < 1.0:
            raise BadInput(f"a discount of {self.discount:.0%} on {self.name}: must be from 0% to below 100%")
        if not LEAST_USD <= self.price.usd <= MOST_USD:
            raise BadInput(
                f"a price of {self.price.usd:g} USD for {self.name}: must be from {LEAST_USD:g} to {MOST_USD:,.0f}"
            )
        if not 0.0 <= self.engineers <= MOST_ENGINEERS:
            raise BadInput(f"{self.engineers:g} engineers for {self.name}: must be from 0 to {MOST_ENGINEERS:,}")
        for key, value in self.overrides.items():
            check_assumption(key, value)

    @property
    def name(self) -> str:
        return self.accelerator.id

    @property
    def used_draw(self) -> Draw | None:
        """A share of the rated power that the user set stands over the prediction."""
        return None if "mean_power_fraction" in self.overrides else self.draw


@dataclass(frozen=True, slots=True)
class Ownership:
    """The bill of an option at its likely inputs."""

    option: Option
    years: float
    usd: dict[str, float]
    utilisation: float
    # IT power for each GPU, rated and in the mean; and what the meter counts over the horizon, cooling included.
    watts_per_gpu: float
    mean_watts_per_gpu: float
    kwh: float
    output_tokens: float | None

    @property
    def total_usd(self) -> float:
        return sum(self.usd.values())

    @property
    def usd_per_gpu_hour(self) -> float:
        return self.total_usd / (self.option.gpus * self.years * HOURS_PER_YEAR)

    @property
    def usd_per_mtok(self) -> float | None:
        """Per million output tokens, the prompts that go with them included."""
        return self.total_usd / self.output_tokens * 1e6 if self.output_tokens else None

    @property
    def kwh_per_mtok(self) -> float | None:
        return self.kwh / self.output_tokens * 1e6 if self.output_tokens else None


def own(option: Option, costs: Costs, years: float = 3.0) -> Ownership:
    values = likely(inputs(option, costs, years))
    tokens, drawn = output_tokens(values), float(_mean_watts(values))
    return Ownership(
        option=option,
        years=years,
        usd={name: float(usd) for name, usd in bill(values).items()},
        utilisation=float(values["utilisation"]),
        watts_per_gpu=float(values["gpu_watts"] + values["server_watts_per_gpu"]),
        mean_watts_per_gpu=drawn,
        kwh=option.gpus * drawn / 1e3 * float(values["pue"]) * HOURS_PER_YEAR * years,
        output_tokens=None if tokens is None else float(tokens),
    )


def owned_usd(option: Option, costs: Costs, years: Array) -> Array:
    """What `own` has as the total, for many horizons at once."""
    if not years.size:
        return years
    values = {**likely(inputs(option, costs, float(years.max()))), "years": years}
    return np.asarray(sum(bill(values).values()))


def bill(values: Mapping[str, Array]) -> dict[str, Array]:
    """USD over the horizon by line; numbers or arrays of samples alike."""
    years, gpus = values["years"], values["gpus"]
    price = values["purchase_usd"] * (1.0 - values["discount"])
    hardware = price + values["server_usd_per_gpu"] + values["network_usd_per_gpu"]
    worn, tied_up_years = _wear(years, values["life_years"], values["residual_fraction"])
    rated_kw = (values["gpu_watts"] + values["server_watts_per_gpu"]) / 1e3
    kwh = gpus * _mean_watts(values) / 1e3 * HOURS_PER_YEAR * years
    return {
        "accelerators": gpus * price * worn,
        "servers": gpus * values["server_usd_per_gpu"] * worn,
        "network": gpus * values["network_usd_per_gpu"] * worn,
        "capital": gpus * hardware * values["capital_per_year"] * tied_up_years,
        "power": kwh * values["usd_per_kwh"],
        "cooling": kwh * (values["pue"] - 1.0) * values["usd_per_kwh"],
        # Hosts charge for the power that they hold ready, not for the power drawn.
        "hosting": gpus * rated_kw * values["hosting_usd_per_kw_month"] * MONTHS_PER_YEAR * years,
        "support": gpus * hardware * values["support_per_year"] * years,
        "engineers": values["engineers"] * values["engineer_usd_per_year"] * years,
    }


def _mean_watts(values: Mapping[str, Array]) -> Array:
    """IT power of a GPU with its share of server and network: the GPU's as predicted at its utilisation, if it is."""
    mean = values["mean_power_fraction"]
    server, busy = values["server_watts_per_gpu"] * mean, values.get("gpu_busy_watts")
    if busy is None:
        return np.asarray(values["gpu_watts"] * mean + server)
    idle = values["gpu_idle_watts"]
    # A sample may be beyond the interval, and no GPU beyond its limit.
    over_idle = np.minimum(busy, values["gpu_watts"]) - idle
    return np.asarray(idle + over_idle * values["utilisation"] ** values["load_exponent"] + server)


def _wear(years: Array, life: Array, residual: Array) -> tuple[Array, Array]:
    """Share of its price that hardware loses, and the area under its value in years of the full price.

    Value falls in a straight line from 1 to the residual over the life, and stays there.
    """
    used = np.minimum(years, life)
    lost = (1.0 - residual) * used / life
    falling = used * (1.0 - 0.5 * lost)
    return lost, falling + residual * (years - used)


def output_tokens(values: Mapping[str, Array]) -> Array | None:
    rate = values.get("output_tokens_per_s_per_gpu")
    if rate is None:
        return None
    seconds = values["years"] * HOURS_PER_YEAR * SECONDS_PER_HOUR
    return np.asarray(values["gpus"] * rate * values["utilisation"] * seconds)


def usd_per_mtok(values: Mapping[str, Array]) -> Array:
    tokens = output_tokens(values)
    assert tokens is not None, "an option without throughput has no cost per token"
    return np.asarray(sum(bill(values).values()) / tokens * 1e6)


def inputs(option: Option, costs: Costs, years: float) -> dict[str, ValueRange]:
    """Everything that an option's bill depends on, with its span."""
    if not 0.0 < years <= 20.0:
        raise BadInput(f"a horizon of {years:g} years: must be above 0 and at most 20")
    ranges = costs_for(option.accelerator, costs).items()
    value_ranges = {key: ValueRange(spread.low.value, spread.likely.value, spread.high.value) for key, spread in ranges}
    value_ranges |= {key: exactly(value) for key, value in option.overrides.items()}
    value_ranges |= {
        "purchase_usd": price_span(option.price),
        "discount": exactly(option.discount),
        "engineers": exactly(option.engineers),
        "gpus": exactly(float(option.gpus)),
        "years": exactly(years),
        "gpu_watts": exactly(option.accelerator.chip.tdp.si),
    }
    if option.output_tokens_per_s_per_gpu is not None:
        value_ranges["output_tokens_per_s_per_gpu"] = option.output_tokens_per_s_per_gpu
    if draw := option.used_draw:
        value_ranges["gpu_busy_watts"] = draw.busy
        value_ranges |= {"gpu_idle_watts": exactly(draw.idle), "load_exponent": exactly(draw.exponent)}
    return value_ranges


def price_span(price: Quote) -> ValueRange:
    """What the user gave is exact; a lone source of the catalog gets a range of our own."""
    if price.is_given or price.low < price.high:
        return ValueRange(price.low, price.usd, price.high)
    return exactly(price.usd).scaled(ONE_SOURCE_SHARE)


def throughput(
    deployment: Deployment, estimate: Estimate, lengths: tuple[int, int], gpus: int | None = None
) -> ValueRange:
    """Output tokens/s of one GPU as an estimate at these lengths has it, in every world; exact where no calibration
    says how sure it is.

    `gpus`: those of the fleet. What is left over beside whole replicas is paid for and gives no tokens.
    """
    gpus_per_replica = deployment.parallelism.gpus
    busy = working_share(gpus_per_replica, gpus or gpus_per_replica)
    rate = estimate.output_tokens_per_s_per_gpu * busy
    if estimate.interval is None:
        return exactly(rate)
    low, high = (end * busy for end in estimate.interval.per_gpu(gpus_per_replica))
    worlds = estimate_in_worlds(deployment, estimate, lengths).output_tokens_per_s[0] * busy / gpus_per_replica
    return ValueRange(min(low, rate), rate, max(high, rate), interval=True, worlds=tuple(worlds.tolist()))


def working_share(gpus_per_replica: int, fleet: int) -> float:
    """Of the GPUs of a fleet those that hold a replica."""
    if fleet < gpus_per_replica:
        raise BadInput(f"{fleet} GPUs are fewer than the {gpus_per_replica} that one replica takes")
    return fleet // gpus_per_replica * gpus_per_replica / fleet


def check_assumption(key: str, value: float) -> None:
    """A user's own figure must be one of the assumptions, and plausible in its unit."""
    if key not in COSTS:
        hint = near_names(key, COSTS)
        more = f"did you mean {' or '.join(hint)}?" if hint else f"known: {', '.join(COSTS)}"
        raise BadInput(f"'{key}' is no assumption of ownership; {more}")
    spec = COSTS[key]
    unit, factor = next((name, unit.si) for name, unit in UNITS.items() if unit.dimension == spec.dimension)
    low, high = spec.low / factor, spec.high / factor
    # The bounds went through SI and back, so they may be off in the last digit.
    slack = 1e-9 * high
    if not low - slack <= value <= high + slack:
        raise BadInput(f"{key}={value:g}: {spec.meaning} must be from {low:g} to {high:g} {unit}")


def hourly_usd(
    accelerator: Accelerator, purchase_usd: float, costs: Costs, years: float = 3.0, draw: Draw | None = None
) -> float:
    """All-in USD of one owned GPU by the hour, busy or not: hardware, capital, power, hosting and support."""
    return own(Option(accelerator, 1, given(accelerator.id, purchase_usd), draw=draw), costs, years).usd_per_gpu_hour


def by_the_hour(
    quote: Quote, accelerator: Accelerator, costs: Costs, years: float, draw: Draw | None = None, discount: float = 0.0
) -> Quote:
    """What a GPU-hour costs after the discount; a purchase is spread over the hours of the horizon."""
    if quote.kind != PURCHASE:
        return quote.mapped(lambda usd: usd * (1.0 - discount))
    return quote.mapped(lambda usd: hourly_usd(accelerator, usd * (1.0 - discount), costs, years, draw), kind=BUY)


def running_usd_per_hour(
    accelerator: Accelerator, costs: Costs, purchase_usd: float = 0.0, draw: Draw | None = None
) -> float:
    """USD by the hour of a GPU that is owned already: power, cooling, hosting and support.

    Support is a share of the hardware's price: without `purchase_usd` only server and network have it.
    """
    option = Option(accelerator, 1, given(accelerator.id, purchase_usd or 1.0), draw=draw)
    values = likely(inputs(option, costs, years=1.0)) | {"purchase_usd": np.asarray(purchase_usd)}
    usd = bill(values)
    return sum(float(usd[line]) for line in RUNNING) / HOURS_PER_YEAR

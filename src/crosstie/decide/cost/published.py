"""A published comparison, taken apart: 800 MI325X against 800 H200 over three years.

An article says: 22,000 against 35,000 USD, 14% off both, costs 60% depreciation and 40% power and cooling,
and so 31% less per token for a 70B model; 19% after two engineers more at 280,000 USD a year; robust to
20% either way. It gives no throughputs, so what its figures imply is worked out here, beside what
Crosstie's own model says.
"""

from dataclasses import dataclass, replace

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import DoesNotFit
from crosstie.decide.cost.ownership import Option, Ownership, own, throughput
from crosstie.decide.cost.prices import given
from crosstie.decide.cost.ranges import ValueRange
from crosstie.decide.cost.sensitivity import Contest, contest, monte_carlo, saving, tornado
from crosstie.perf.estimate import estimate
from crosstie.perf.fit import smallest_layout

MODEL = "llama-3.1-70b"
INPUT_TOKENS, OUTPUT_TOKENS = 4096, 1024
GPUS, YEARS, DISCOUNT = 800, 3.0, 0.14
PRICES_USD = {"mi325x": 22_000.0, "h200": 35_000.0}
DEPRECIATION_SHARE = 0.6
ENGINEERS, ENGINEER_USD_PER_YEAR = 2.0, 280_000.0
CLAIMED_SAVING, CLAIMED_AFTER_ENGINEERS, CLAIMED_VARIATION = 0.31, 0.19, 0.20


@dataclass(frozen=True, slots=True)
class ServingPoint:
    """How the model is served on each: the article does not say, so there are several."""

    precision: str
    # Requests in flight on a replica, by accelerator.
    concurrency: dict[str, int]
    # None: the fewest GPUs that hold model and load.
    parallelism: Parallelism | None = None


# The first is what the figures of `Modelled` stand for.
POINTS = {
    "fp8, fewest GPUs, 64 in flight a replica": ServingPoint("fp8", {"mi325x": 64, "h200": 64}),
    "fp8, fewest GPUs, 32 in flight a GPU": ServingPoint("fp8", {"mi325x": 32, "h200": 64}),
    "fp8, TP2 on both, 64 in flight": ServingPoint("fp8", {"mi325x": 64, "h200": 64}, Parallelism(tp=2)),
    "fp8, TP8 on both, 256 in flight": ServingPoint("fp8", {"mi325x": 256, "h200": 256}, Parallelism(tp=8)),
    "bf16, fewest GPUs, 64 in flight a replica": ServingPoint("bf16", {"mi325x": 64, "h200": 64}),
}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The article's own figures under one reading of its 60/40: USD of the whole fleet over three years."""

    mi325x_usd: float
    h200_usd: float
    # Power and cooling of each, within these totals.
    mi325x_power_usd: float
    h200_power_usd: float

    def saving(self, throughput_ratio: float = 1.0, engineers_usd: float = 0.0) -> float:
        """Saving per token of the MI325X; `throughput_ratio`: its tokens/s over the H200's."""
        return saving((self.mi325x_usd + engineers_usd) / throughput_ratio, self.h200_usd)

    def ratio_for(self, wanted: float) -> float:
        """Throughput ratio that gives a saving."""
        return self.mi325x_usd / self.h200_usd / (1.0 - wanted)

    def engineers_points(self, throughput_ratio: float = 1.0, engineers_usd: float = 0.0) -> float:
        """What the engineers take off the saving, as a share of the H200's cost."""
        return engineers_usd / throughput_ratio / self.h200_usd

    def saving_at(self, share: float, throughput_ratio: float = 1.0) -> tuple[float, float]:
        """Least and most saving with power and cooling of both up or down by `share`, together."""
        ends = [
            saving(
                (self.mi325x_usd + side * share * self.mi325x_power_usd) / throughput_ratio,
                self.h200_usd + side * share * self.h200_power_usd,
            )
            for side in (-1.0, 1.0)
        ]
        return min(ends), max(ends)


@dataclass(frozen=True, slots=True)
class Modelled:
    """The same purchase by Crosstie's performance model and its assumptions of ownership."""

    # Tokens/s of one MI325X over one H200, and the ratio at opposite ends of their 80% intervals.
    throughput_ratio: float
    throughput_ratio_interval: tuple[float, float]
    saving: float
    saving_after_engineers: float
    # 80% of samples with every assumption within its range.
    saving_interval: tuple[float, float]
    # Least and most saving with each assumption about operation alone 20% up or down.
    saving_at_variation: tuple[float, float]
    # What the saving would be if both gave the same tokens/s, and the ratio that gives 31%.
    saving_at_equal_throughput: float
    ratio_for_claim: float
    # Share of the H200's bill that is electricity, and that with hosting, against the article's 40%.
    electricity_share: float
    electricity_and_hosting_share: float
    # Saving at each of `POINTS`: the answer turns with how the model is served.
    saving_by_point: dict[str, float]


@dataclass(frozen=True, slots=True)
class Published:
    hardware_only_saving: float
    # Each fleet's power and cooling are 40% of its own total.
    own_split: Arithmetic
    # Both pay the same USD for power and cooling: 40% of the H200's total.
    equal_power: Arithmetic
    engineers_usd: float
    # Two engineers as a share of the discounted hardware, MI325X and H200.
    engineers_of_hardware: tuple[float, float]
    # Fleet size and number of engineers at which 31% would become 19%, at equal throughput.
    gpus_for_claim: float
    engineers_for_claim: float
    modelled: Modelled


def mi325x_against_h200(catalog: Catalog) -> Published:
    """Everything that the claims c18, c19 and c20 can be held against."""
    hardware = {name: GPUS * usd * (1.0 - DISCOUNT) for name, usd in PRICES_USD.items()}
    h200_usd = hardware["h200"] / DEPRECIATION_SHARE
    power = h200_usd - hardware["h200"]
    own_total = hardware["mi325x"] / DEPRECIATION_SHARE
    own_split = Arithmetic(own_total, h200_usd, own_total - hardware["mi325x"], power)
    equal_power = Arithmetic(hardware["mi325x"] + power, h200_usd, power, power)
    engineers_usd = ENGINEERS * ENGINEER_USD_PER_YEAR * YEARS
    claimed_points = CLAIMED_SAVING - CLAIMED_AFTER_ENGINEERS
    real_points = own_split.engineers_points(engineers_usd=engineers_usd)
    return Published(
        hardware_only_saving=saving(hardware["mi325x"], hardware["h200"]),
        own_split=own_split,
        equal_power=equal_power,
        engineers_usd=engineers_usd,
        engineers_of_hardware=(engineers_usd / hardware["mi325x"], engineers_usd / hardware["h200"]),
        gpus_for_claim=GPUS * real_points / claimed_points,
        engineers_for_claim=ENGINEERS * claimed_points / real_points,
        modelled=_modelled(catalog),
    )


def _modelled(catalog: Catalog) -> Modelled:
    usual = next(iter(POINTS.values()))
    plain = [_option(catalog, name, usual) for name in PRICES_USD]
    staffed = [replace(plain[0], engineers=ENGINEERS), plain[1]]
    match, h200_bill = contest(plain, catalog.costs, YEARS), own(plain[1], catalog.costs, YEARS)
    rates = [_rate(option) for option in plain]
    ratio = rates[0].likely / rates[1].likely
    at_likely = _saving(match)
    interval = monte_carlo(match).saving
    assert interval is not None, "two options have a saving"
    return Modelled(
        throughput_ratio=ratio,
        throughput_ratio_interval=(rates[0].low / rates[1].high, rates[0].high / rates[1].low),
        saving=at_likely,
        saving_after_engineers=_saving(contest(staffed, catalog.costs, YEARS)),
        saving_interval=interval,
        saving_at_variation=_at_variation(match, at_likely),
        saving_at_equal_throughput=1.0 - (1.0 - at_likely) * ratio,
        ratio_for_claim=(1.0 - at_likely) * ratio / (1.0 - CLAIMED_SAVING),
        electricity_share=_share(h200_bill, "power", "cooling"),
        electricity_and_hosting_share=_share(h200_bill, "power", "cooling", "hosting"),
        saving_by_point={words: _saving_at(catalog, point) for words, point in POINTS.items()},
    )


def _saving_at(catalog: Catalog, point: ServingPoint) -> float:
    return _saving(contest([_option(catalog, name, point) for name in PRICES_USD], catalog.costs, YEARS))


def _option(catalog: Catalog, name: str, point: ServingPoint) -> Option:
    """800 of them at the article's price, serving a 70B model."""
    deployment = _deployment(catalog, name, point)
    found = estimate(
        deployment, concurrency=point.concurrency[name], input_tokens=INPUT_TOKENS, output_tokens=OUTPUT_TOKENS
    )
    return Option(
        accelerator=deployment.accelerator, gpus=GPUS, price=given(name, PRICES_USD[name]), discount=DISCOUNT,
        output_tokens_per_s_per_gpu=throughput(found, deployment.parallelism.gpus, GPUS),
        overrides={"engineer_usd_per_year": ENGINEER_USD_PER_YEAR},
    )  # fmt: skip


def _deployment(catalog: Catalog, name: str, point: ServingPoint) -> Deployment:
    model, accelerator = catalog.model(MODEL), catalog.accelerator(name)
    if point.parallelism is not None:
        return catalog.deployment(model, accelerator, point.parallelism, point.precision)
    placed = smallest_layout(
        catalog, model, accelerator,
        context=INPUT_TOKENS + OUTPUT_TOKENS, sequences=point.concurrency[name], precision=point.precision,
    )  # fmt: skip
    if placed is None:
        raise DoesNotFit(f"{name} does not hold {MODEL}")
    return placed.deployment


def _rate(option: Option) -> ValueRange:
    assert option.output_tokens_per_s_per_gpu is not None
    return option.output_tokens_per_s_per_gpu


def _saving(match: Contest) -> float:
    costs = match.usd_per_mtok()
    return saving(costs["mi325x"], costs["h200"])


def _at_variation(match: Contest, at_likely: float) -> tuple[float, float]:
    ends = [at_likely]
    for bar in tornado(match.varied(CLAIMED_VARIATION), "mi325x", "h200"):
        ends += [bar.outcome_at_low, bar.outcome_at_high]
    return min(ends), max(ends)


def _share(bill: Ownership, *lines: str) -> float:
    return sum(bill.usd[line] for line in lines) / bill.total_usd

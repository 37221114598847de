"""A published comparison, taken apart: 800 MI325X against 800 H200 over three years.

An article says: 22,000 against 35,000 USD, 14% off both, costs 60% depreciation and 40% power and cooling,
and so 31% less per token for a 70B model; 19% after two engineers more at 280,000 USD a year; robust to
20% either way. It gives no throughputs, so what its figures imply is worked out here, beside what
Crosstie's own model says.
"""

from dataclasses import dataclass, replace

from crosstie.catalog.costs import COSTS
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import DoesNotFit
from crosstie.decide.compare.scorecard import Load, compare
from crosstie.decide.cost.energy import draw_of
from crosstie.decide.cost.ownership import Option, Ownership, own, throughput
from crosstie.decide.cost.prices import given
from crosstie.decide.cost.sensitivity import PriceContest, contest, monte_carlo, saving, tornado

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
    h200: Ownership
    # Saving at each of `POINTS`: the answer turns with how the model is served.
    saving_by_point: dict[str, float]


@dataclass(frozen=True, slots=True)
class Published:
    # Each fleet's power and cooling are 40% of its own total.
    own_split: Arithmetic
    # Both pay the same USD for power and cooling: 40% of the H200's total.
    equal_power: Arithmetic
    engineers_usd: float
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
    real_points = engineers_usd / h200_usd
    return Published(
        own_split=own_split,
        equal_power=equal_power,
        engineers_usd=engineers_usd,
        gpus_for_claim=GPUS * real_points / claimed_points,
        engineers_for_claim=ENGINEERS * claimed_points / real_points,
        modelled=_modelled(catalog),
    )


def _modelled(catalog: Catalog) -> Modelled:
    points = {words: [_option(catalog, name, point) for name in PRICES_USD] for words, point in POINTS.items()}
    mi325x, h200 = next(iter(points.values()))
    match = contest([mi325x, h200], catalog.costs, YEARS)
    rate, against = (match.inputs[name]["output_tokens_per_s_per_gpu"] for name in PRICES_USD)
    saved = _saving(match)
    interval = monte_carlo(match).saving
    assert interval is not None, "two options have a saving"
    varied = tornado(match.varied(CLAIMED_VARIATION), "mi325x", "h200")
    operation = [bar for bar in varied if bar.key in COSTS]
    ends = [saved, *(end for bar in operation for end in (bar.outcome_at_low, bar.outcome_at_high))]
    staffed = contest([replace(mi325x, engineers=ENGINEERS), h200], catalog.costs, YEARS)
    return Modelled(
        throughput_ratio=rate.likely / against.likely,
        throughput_ratio_interval=(rate.low / against.high, rate.high / against.low),
        saving=saved,
        saving_after_engineers=_saving(staffed),
        saving_interval=interval,
        saving_at_variation=(min(ends), max(ends)),
        h200=own(h200, catalog.costs, YEARS),
        saving_by_point={words: _saving(contest(pair, catalog.costs, YEARS)) for words, pair in points.items()},
    )


def _option(catalog: Catalog, name: str, point: ServingPoint) -> Option:
    """800 of them at the article's price, serving a 70B model."""
    load = Load(point.concurrency[name], INPUT_TOKENS, OUTPUT_TOKENS)
    (entry,) = compare(
        catalog, catalog.model(MODEL), [catalog.accelerator(name)], load,
        parallelism=point.parallelism, precision=point.precision,
    ).entries  # fmt: skip
    if entry.deployment is None or entry.estimate is None:
        raise DoesNotFit(f"{name} does not hold {MODEL}")
    return Option(
        accelerator=entry.accelerator, gpus=GPUS, price=given(name, PRICES_USD[name]), discount=DISCOUNT,
        output_tokens_per_s_per_gpu=throughput(
            entry.deployment, entry.estimate, (INPUT_TOKENS, OUTPUT_TOKENS), GPUS
        ),
        draw=draw_of(catalog, entry.deployment, entry.estimate, INPUT_TOKENS, OUTPUT_TOKENS),
        overrides={"engineer_usd_per_year": ENGINEER_USD_PER_YEAR},
    )  # fmt: skip


def _saving(match: PriceContest) -> float:
    costs = match.usd_per_mtok()
    return saving(costs["mi325x"], costs["h200"])

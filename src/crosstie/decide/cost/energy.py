"""What owned GPUs draw: predicted at the load that they serve, down to what they draw while they wait for work."""

from dataclasses import dataclass, replace
from math import log

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator, Deployment
from crosstie.core.errors import CrosstieError
from crosstie.core.estimate import Estimate
from crosstie.core.workload import Workload
from crosstie.decide.cost.ranges import ValueRange
from crosstie.perf.estimate import estimate
from crosstie.perf.fit import candidate_layouts, surely_fits

# Requests in flight on a replica of which nothing is known yet: power hardly hangs on it.
_IN_FLIGHT = 32


@dataclass(frozen=True, slots=True)
class Draw:
    """Watts of one GPU that gives a share of the operating point's output: idle + (busy - idle) x share^exponent.

    An exponent of 1 is time shared between work and waiting. Engines that batch have a lower one: with less to do they
    run smaller batches, and not much colder.
    """

    busy: ValueRange
    idle: float
    exponent: float

    def watts(self, share: float) -> float:
        return self.idle + (self.busy.likely - self.idle) * float(share**self.exponent)

    def interval(self, share: float) -> tuple[float, float]:
        ends = (replace(self, busy=ValueRange(end, end, end)) for end in (self.busy.low, self.busy.high))
        low, high = (draw.watts(share) for draw in ends)
        return low, high

    def held(self, share: float) -> "Draw":
        """At that share whatever the utilisation."""
        low, high = self.interval(share)
        return Draw(ValueRange(low, self.watts(share), high, interval=True), self.idle, 0.0)

    def scaled(self, factor: float) -> "Draw":
        ends = (self.busy.low * factor, self.busy.likely * factor, self.busy.high * factor)
        return Draw(ValueRange(*ends, interval=self.busy.interval), self.idle * factor, self.exponent)


def draw_of(
    catalog: Catalog, deployment: Deployment, estimated: Estimate, input_tokens: int, output_tokens: int,
    working: float = 1.0,
) -> Draw | None:  # fmt: skip
    """Of a replica that serves what was `estimated`; None where power was never measured on its accelerator.

    `working`: the share of GPUs that hold a replica. The others are idle.
    """
    power, accelerator = catalog.power, deployment.accelerator
    if not power.knows(accelerator):
        return None
    rated, idle = accelerator.chip.tdp.si, power.idle_watts(accelerator)
    busy = max(power.serving_watts(deployment, estimated), idle)
    exponent = 1.0
    if estimated.concurrency >= 2 and busy > idle:
        half = estimate(
            deployment,
            concurrency=round(estimated.concurrency / 2),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
        )
        share = half.output_tokens_per_s / estimated.output_tokens_per_s
        over_idle = max(power.serving_watts(deployment, half) - idle, 0.01 * (busy - idle)) / (busy - idle)
        exponent = min(max(log(over_idle) / log(share), 0.0), 1.0) if share < 1.0 else 0.0
    ends = (max(busy * power.low.value, idle), busy, max(min(busy * power.high.value, rated), busy))
    low, likely, high = (idle + (end - idle) * working for end in ends)
    return Draw(ValueRange(low, likely, high, interval=True), idle, exponent)


def mean_share(workload: Workload) -> float:
    """Today's mean traffic over what the fleet is for, the peak by the end of its first year."""
    return workload.mean_over_peak / max(1.0 + workload.growth_per_year, 1.0)


def owned_draw(catalog: Catalog, workload: Workload, accelerator: Accelerator) -> Draw | None:
    """What an owned GPU draws in the mean, by the class with most output, on the fewest GPUs that hold its model."""
    main = max(workload.classes, key=lambda request_class: request_class.requests_per_s * request_class.output_tokens)
    lengths = max(round(main.input_tokens), 1), max(round(main.output_tokens), 1)
    choice = workload.models.get(main.model)
    if not catalog.power.knows(accelerator):
        return None
    try:
        model = catalog.model(main.model)
        splits = [split for split in candidate_layouts(model, accelerator) if split.ep == 1 and split.dp == 1]
        precision = choice.precisions[0] if choice and choice.precisions else None
        first = catalog.deployment(model, accelerator, splits[0], precision)
        each = (msgspec.structs.replace(first, parallelism=split) for split in splits)
        deployment = next(candidate for candidate in each if surely_fits(candidate, sum(lengths)))
        load = {"input_tokens": lengths[0], "output_tokens": lengths[1]}
        draw = draw_of(catalog, deployment, estimate(deployment, concurrency=_IN_FLIGHT, **load), *lengths)
    except (CrosstieError, StopIteration):
        return None
    return draw and draw.held(mean_share(workload) / (1.0 + workload.constraints.spare))


def basis(catalog: Catalog, accelerator: Accelerator, draw: Draw | None, is_set: bool = False) -> str:
    """What the electricity of an accelerator rests on, in words."""
    if is_set:
        return "a share of the rated power, as set"
    if draw is None:
        return "a share of the rated power (mean_power_fraction): its power was not measured while it served"
    scale = catalog.power.scale[accelerator.id]
    idle = catalog.power.idle.get(accelerator.id) or catalog.power.idle["other"]
    return f"predicted from published joules a token, {scale.date} ({scale.note}); idle {idle.basis}, {idle.date}"

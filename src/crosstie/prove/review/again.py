"""What the same plan would cost with what was learnt: the traffic, lengths and hits that were seen, and the speed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from crosstie.catalog.calibration import Calibration, subject_of
from crosstie.catalog.lengths import cut
from crosstie.catalog.library import Catalog
from crosstie.catalog.reuse import with_prefixes
from crosstie.catalog.traces import Ints
from crosstie.core.errors import CrosstieError
from crosstie.core.estimate import SERVING
from crosstie.core.fleet import Pool
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.workload import PrefixReuse, RequestClass, Workload
from crosstie.decide.plan.plan import Plan, plan
from crosstie.perf.estimate import estimate
from crosstie.prove.review.expected import PoolSpeed
from crosstie.prove.review.figures import FEW, ReviewFigure
from crosstie.prove.review.review import Review
from crosstie.route.build import deployment_of

# Constants that are rates: a slower replica has less of them, and more of the others, which are times. The rate of
# experts is over that of plain products, and the time of routing over that of a kernel.
_RATES = ("compute", "weights", "attention", "cache", "link")
_RELATIVE = ("experts", "routing")
# What says that requests of a class have become others.
_SIZES = (
    "prompt tokens, mean", "prompt tokens, p95", "answer tokens, mean", "answer tokens, p95", "prompts cached",
)  # fmt: skip
# Speeds that are nearer than this are the same.
_SAME = 0.02
# Looking for the factor of a calibration: how often, and how far (a logarithm).
_TRIES, _FURTHEST = 6, 3.0


@dataclass(frozen=True, slots=True)
class RevisedPlan:
    """A plan with some of what was learnt, and what that was."""

    what: str
    gpus: dict[str, int]
    # None: no fleet will do, and why.
    usd_per_hour: float | None
    usd_per_million: float | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Again:
    # As it was saved; with today's catalog; and with what was seen.
    steps: list[RevisedPlan]
    # What was learnt, and what was not, in words.
    learnt: list[str]


def again(catalog: Catalog, review: Review, *, quick: bool = False, on_progress: OnProgress = no_progress) -> Again:
    """Each plan is confirmed by simulation where the saved one was, unless `quick`."""
    planned = review.planned
    saved = planned.saved
    confirm = saved.confirmed is not None and not quick
    first = RevisedPlan("as saved", saved.gpus, saved.usd_per_hour, planned.plan.usd_per_million_tokens.usd_per_million)
    steps, learnt = [first], list[str]()

    def planned_again(what: str, catalog: Catalog, workload: Workload) -> None:
        on_progress(0, 0, f"planning {what}")
        try:
            steps.append(_step(what, plan(catalog, workload, confirm=confirm, on_progress=on_progress)))
        except CrosstieError as error:
            steps.append(RevisedPlan(what, {}, None, None, str(error)))

    planned_again("with today's prices and catalog", catalog, saved.workload)
    workload = _workload(catalog, review, learnt)
    changed = workload != saved.workload
    if changed:
        planned_again("with the traffic seen", catalog, workload)
    slower = _calibrated(catalog, review, learnt)
    if slower is not None:
        what = "with the traffic and the speed seen" if changed else "with the speed seen"
        planned_again(what, catalog.calibrated_by(slower), workload)
    if len(steps) == 2:
        learnt.append("nothing was seen that is surely other than planned: traffic and speed are as they were")
    if confirm != (saved.confirmed is not None):
        learnt.append("planned again by closed forms alone; the saved plan was confirmed by simulation")
    return Again(steps, learnt)


def _step(what: str, made: Plan) -> RevisedPlan:
    if made.fleet is None:
        why = made.obstacles[0].why if made.obstacles else "no fleet will do"
        return RevisedPlan(what, {}, None, None, why)
    return RevisedPlan(what, made.fleet.gpus, made.fleet.usd_per_hour, made.fleet.cost.usd_per_million)


def _workload(catalog: Catalog, review: Review, learnt: list[str]) -> Workload:
    """The plan's, with each class as it was seen, where enough was."""
    before = review.planned.workload
    classes = tuple(_class(catalog, review, request_class, learnt) for request_class in before.classes)
    mean = next((figure.seen.value for figure in review.figures if figure.what == "mean over busiest hour"), None)
    if mean is not None:
        learnt.append(f"traffic has a mean of {mean:.0%} of its peak, not {before.mean_over_peak:.0%}")
    return msgspec.structs.replace(
        before, classes=classes, mean_over_peak=before.mean_over_peak if mean is None else min(max(mean, 0.001), 1.0)
    )


def _class(catalog: Catalog, review: Review, kind: RequestClass, learnt: list[str]) -> RequestClass:
    production = review.production
    rows = production.rows(kind.name)
    rate = next(figure for figure in review.of("traffic") if figure.of == kind.name)
    if len(rows) < FEW:
        learnt.append(f"{kind.name}: as planned, since {len(rows)} requests are too few to plan by")
        return kind
    if not any(_differs(figure) for figure in review.figures if figure.of == kind.name and figure.what in _SIZES):
        changed = kind
    else:
        changed = _recut(catalog, review, kind, rows)
        learnt.append(f"{kind.name}: {changed.input_tokens:,.0f} tokens in and {changed.output_tokens:,.0f} out")
    if _differs(rate):
        changed = msgspec.structs.replace(changed, requests_per_s=max(rate.seen.value, 1e-3))
        learnt.append(f"{kind.name}: {rate.seen.value:.3g} requests/s at the peak, not {kind.requests_per_s:.3g}")
    return changed


def _recut(catalog: Catalog, review: Review, request_class: RequestClass, rows: Ints) -> RequestClass:
    """A class with the lengths and hits that were seen."""
    trace = review.production.trace
    inputs, outputs = (tokens[rows].astype(np.float64) for tokens in (trace.input_tokens, trace.output_tokens))
    context = catalog.model(request_class.model).max_context or 10**8
    exempt = request_class.ttft.longest_exempt if request_class.ttft else 0.0
    slices = cut(inputs, outputs, paired=True, exempt=exempt, context=context, halved=len(request_class.slices) > 1)
    hits, pictures = _hit_rate(review, request_class), request_class.slices[0].pictures
    if hits:
        prefix, file = PrefixReuse(hit_rate=hits), Path(review.planned.file)
        slices = with_prefixes(file, request_class.name, prefix, slices, inputs, request_class.requests_per_s, None)
    if pictures is not None:
        slices = tuple(msgspec.structs.replace(piece, pictures=pictures) for piece in slices)
    return msgspec.structs.replace(request_class, slices=slices)


def _differs(figure: ReviewFigure) -> bool:
    """Whether it is surely another than planned: what may be chance is nothing learnt."""
    low, high = figure.seen.low, figure.seen.high
    if figure.predicted is None or low is None or high is None:
        return False
    return not low - 1e-9 <= figure.predicted <= high + 1e-9


def _hit_rate(review: Review, request_class: RequestClass) -> float:
    """As seen, or where nobody says, as planned."""
    seen = [figure for figure in review.of("hit-rate") if figure.of in (request_class.name, "")]
    return min(seen[0].seen.value, 0.999) if seen else review.planned.hit_rate(request_class.name)


def _calibrated(catalog: Catalog, review: Review, learnt: list[str]) -> Calibration | None:
    """The calibration under which the pools are as fast as they were seen to be; None where nothing says otherwise."""
    made = catalog.calibration
    trace = review.production.trace
    lengths = max(round(float(trace.input_tokens.mean())), 1), max(round(float(trace.output_tokens.mean())), 1)
    for speed, pool in _off(review):
        ratio = speed.ratio.value
        faster = _scaled(catalog, made, pool, ratio, max(round(speed.in_flight), 1), lengths)
        if faster is not None:
            made = faster
            word = "slower" if ratio < 1.0 else "faster"
            named = f"{pool.model} on {pool.accelerator} with {pool.stack}"
            learnt.append(f"{named}: {abs(ratio - 1.0):.0%} {word} than estimated")
    return None if made is catalog.calibration else made


def _scaled(
    catalog: Catalog, made: Calibration, pool: Pool, ratio: float, in_flight: int, lengths: tuple[int, int]
) -> Calibration | None:
    """All rates of a pool's deployment moved by one factor, and its times by the inverse: the one at which the estimate
    has `ratio` of its throughput. Shares of a peak bend towards their ceiling, so that factor is looked for."""
    deployment = deployment_of(catalog, pool)
    if deployment is None:
        return None
    subject = subject_of(deployment)
    scope = " / ".join((subject.stack, subject.model, subject.bits, subject.accelerator))
    before = made.scopes.get(scope, (0.0,) * len(made.constants))

    def moved(by: float) -> Calibration:
        parts = tuple(part + _moved(name, by) for name, part in zip(made.constants, before, strict=True))
        return msgspec.structs.replace(made, scopes={**made.scopes, scope: parts})

    def throughput(calibration: Calibration) -> float:
        deployment = deployment_of(catalog.calibrated_by(calibration), pool)
        assert deployment is not None
        load = {"concurrency": in_flight, "input_tokens": lengths[0], "output_tokens": lengths[1]}
        return estimate(deployment, **load).output_tokens_per_s

    wanted, was, by = math.log(ratio), throughput(made), math.log(ratio)
    for _ in range(_TRIES):
        got = math.log(throughput(moved(by)) / was)
        if abs(got - wanted) < 1e-3 or abs(got) < 1e-6:
            break
        by = min(max(by * wanted / got, -_FURTHEST), _FURTHEST)
    return moved(by)


def _off(review: Review) -> Iterator[tuple[PoolSpeed, Pool]]:
    """Pools whose speed is surely not that of the model, the one with most requests for each deployment."""
    pools = {pool.name: pool for pool in review.planned.fleet.pools}
    known = set()
    speeds = review.expected.speeds if review.expected else []
    for speed in sorted(speeds, key=lambda pool_speed: -pool_speed.ratio.requests):
        pool, ratio = pools[speed.pool], speed.ratio
        sure = ratio.low is not None and ratio.high is not None and not ratio.low <= 1.0 <= ratio.high
        if not sure or abs(ratio.value - 1.0) < _SAME or pool.apart is not None:
            continue
        if (pool.model, pool.accelerator, pool.stack) not in known:
            known.add((pool.model, pool.accelerator, pool.stack))
            yield speed, pool


def _moved(constant: str, by: float) -> float:
    if constant not in SERVING or constant in _RELATIVE:
        return 0.0
    return by if constant in _RATES else -by

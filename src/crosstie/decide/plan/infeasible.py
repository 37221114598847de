"""Why no fleet will do: the limit that makes it so, and how far it would have to give."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from crosstie.core.disaggregated import Servable
from crosstie.core.units import HOURS_PER_MONTH
from crosstie.core.workload import RequestClass, Slice, Target, Workload
from crosstie.decide.plan.capacity import EstimateScale, own_ttft_s
from crosstie.decide.plan.optimise import Choice
from crosstie.decide.plan.programme import Array, Mask, Programme
from crosstie.decide.plan.scaling import scaling_of
from crosstie.decide.plan.solver import solve_beside
from crosstie.decide.plan.survey import Survey, offers, peak_of, tiers
from crosstie.perf.memory import cache_sequences

# Targets are tried in two-digit figures of milliseconds from a hundredth on, some steps of them at once, and no
# further than to about two hundred times of where they start.
_FINEST_S = 1e-5
_BOUNDLESS_WATTS = 1e12
_STRIDE = 9
_FURTHEST = 207
_LEAST_ALONE = 0.5


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A limit by its key in the workload file, what it is, and the least change that would let a fleet exist."""

    key: str
    now: str
    needs: str
    why: str
    # Whether this change alone would do; otherwise it takes all that are not.
    alone: bool = True


def obstacles(surveyed: Sequence[Survey], asked: Choice, workload: Workload) -> list[Obstacle]:
    """Requests that nothing can serve come first: while there are any, no other limit matters."""
    return _unserved(surveyed, asked, workload) or _limits(asked, workload)


def _unserved(surveyed: Sequence[Survey], asked: Choice, workload: Workload) -> list[Obstacle]:
    found: list[Obstacle] = []
    served: Mask = np.any(asked.problem.rate > 0, axis=0)
    for one in surveyed:
        for kind in workload.classes:
            places = [place for place, part in enumerate(one.parts) if part.request_class is kind]
            if all(served[one.parts[place].index] for place in places):
                continue
            longest = max((one.parts[place].slice for place in places), key=lambda piece: piece.context)
            held = [one.deployments and bool((one.curves[place].room > 0).any()) for place in places]
            found += _targets(surveyed, one, kind, workload) if all(held) else [_memory(one, kind, longest, workload)]
    return found if len(found) == 1 else [replace(obstacle, alone=False) for obstacle in found]


def _memory(survey: Survey, kind: RequestClass, longest: Slice, workload: Workload) -> Obstacle:
    stacks = workload.choice(kind.model).stacks
    if not survey.deployments and workload.choice(kind.model).apart:
        return Obstacle(
            f'models."{kind.model}".apart',
            "true",
            "false, or left out; or engines and accelerators that a connector joins (docs/disaggregation.md)",
            f"no allowed engine serves {kind.model} apart with room for {longest.context:,} tokens on both sides",
        )
    more = "more memory: other accelerators, precisions or kv formats"
    if not survey.deployments and stacks:
        more += f"; or other stacks than {', '.join(stacks)}"
    most = max((_longest_held(deployment) for deployment in survey.deployments), default=0)
    kept = kind.prefix
    if kept is not None and kept.idle_s and most >= longest.context:
        return Obstacle(
            f"class '{kind.name}' prefix.idle_s",
            f"{kept.idle_s:g} s with a hit_rate of {kept.hit_rate or 0.0:g}",
            f"less, or a hit_rate without idle_s, or {more}",
            f"no allowed replica of {kind.model} has room for the cache of conversations until they go on",
        )
    return Obstacle(
        f"class '{kind.name}'",
        f"{longest.context:,} tokens in one request",
        f"at most {most:,}, or {more}" if most else more,
        f"no allowed replica of {kind.model} holds it",
    )


def _longest_held(one: Servable) -> int:
    """Tokens of the longest request that a replica holds, to two digits."""
    tokens = np.array([two_digits(step) for step in range(steps_up_to(1e8))])
    held = cache_sequences(one.decode, tokens) / one.parallelism.dp >= 1.0
    return int(tokens[held].max(initial=0.0))


def _targets(surveyed: Sequence[Survey], survey: Survey, kind: RequestClass, workload: Workload) -> list[Obstacle]:
    """The least that a class's targets would have to give: one of them if that will do, else both."""
    alone = alone_s(survey, kind, scaling_of(workload)(survey.deployments))

    def serves(**targets: Target | None) -> bool:
        return _serves(surveyed, kind, msgspec.structs.replace(kind, **targets), workload)

    def least(key: str, **others: Target | None) -> Target | None:
        """The strictest that will do, the other target being what it is or as given."""
        target: Target | None = getattr(kind, key)
        if target is None:
            return None
        # Shorter prompts of the same slice may do with less.
        start = max(target.seconds, _LEAST_ALONE * alone[key][0])
        return _least(target, start, lambda tried: serves(**{key: tried, **others}))

    needs = {key: found for key in ("ttft", "tpot") if (found := least(key))}
    if len(needs) == 2:
        # Either would do: the one that has to give less.
        needs = dict([min(needs.items(), key=lambda item: item[1].seconds / getattr(kind, item[0]).seconds)])
    if not needs and kind.ttft and kind.tpot and (tpot := least("tpot", ttft=None)):
        ttft = least("ttft", tpot=tpot)
        needs = {"ttft": ttft, "tpot": tpot} if ttft else {}
    if not needs:
        both = " and ".join(f"{key}_ms" for key in ("ttft", "tpot") if getattr(kind, key))
        why = "no replica keeps what the class asks, and no looser target was found that one would keep"
        return [Obstacle(f"class '{kind.name}' {both}".strip(), "as written", "left out, or other accelerators", why)]
    return [_target(kind, key, needed, survey, alone[key], workload) for key, needed in needs.items()]


def _target(
    kind: RequestClass, key: str, needed: Target, survey: Survey, alone: tuple[float, int, int], workload: Workload
) -> Obstacle:
    target: Target = getattr(kind, key)
    percentile = f"p{target.percentile * 100:g}"
    best, place, tokens = alone
    fastest = survey.deployments[place]
    read = f" (as slow as it is in {1.0 - workload.sureness:.0%} of cases)" if workload.sureness > 0.5 else ""
    return Obstacle(
        f"class '{kind.name}' {key}_ms",
        f"{percentile} = {target.seconds * 1e3:g}",
        f"{percentile} = {needed.seconds * 1e3:g}",
        f"{fastest.label} under {fastest.stack.name}, the fastest that may be used, takes {best * 1e3:,.3g} ms{read} "
        f"for a request of {tokens:,} tokens by itself, and longer beside others",
    )


def alone_s(survey: Survey, kind: RequestClass, scale: EstimateScale) -> dict[str, tuple[float, int, int]]:
    """By target, for the slice in which its percentile lies: the seconds of one request alone, the replica that is
    fastest at it, and its mean prompt."""
    found: dict[str, tuple[float, int, int]] = {"ttft": (0.0, 0, 0), "tpot": (0.0, 0, 0)}
    upto = 0.0
    for part, curve in zip(survey.parts, survey.curves, strict=True):
        if part.request_class is not kind:
            continue
        own = {"tpot": (kind.tpot, curve.alone_tpot_s * scale.tpot), "ttft": (kind.ttft, own_ttft_s(curve, scale))}
        for key, (target, values) in own.items():
            if target is not None and upto < target.percentile:
                seconds = np.where(curve.room > 0, values, np.inf)
                found[key] = float(seconds.min()), int(np.argmin(seconds)), round(part.slice.input_tokens)
        upto += part.slice.share
    return found


def _serves(surveyed: Sequence[Survey], kind: RequestClass, instead: RequestClass, workload: Workload) -> bool:
    """Whether some replica would serve each slice of the class, had it these targets."""
    relaxed = [with_class(one, kind, instead) for one in surveyed if any(p.request_class is kind for p in one.parts)]
    offered = offers(relaxed, scaling_of(workload), peak=peak_of(workload))
    mine = [place for place, part in enumerate(offered.parts) if part.request_class is instead]
    return bool(np.all(offered.requests_per_s[:, mine].max(axis=0, initial=0.0) > 0))


def with_class(survey: Survey, kind: RequestClass, instead: RequestClass) -> Survey:
    parts = [replace(part, request_class=instead) if part.request_class is kind else part for part in survey.parts]
    return replace(survey, parts=parts, tiers=tiers([part.request_class for part in parts]))


def _least(target: Target, start_s: float, will_do: Callable[[Target], bool]) -> Target | None:
    """The first of the two-digit milliseconds from `start_s` on that will do: in strides first, then step by step."""

    def at(step: int) -> Target:
        return msgspec.structs.replace(target, seconds=two_digits(step) * _FINEST_S)

    first = steps_up_to(start_s / _FINEST_S)
    for stride in range(first, first + _FURTHEST, _STRIDE):
        if will_do(at(stride)):
            between = range(max(first, stride - _STRIDE + 1), stride + 1)
            return next(at(step) for step in between if will_do(at(step)))
    return None


def two_digits(step: int) -> float:
    """1.0, 1.1, ... 9.9, 10, 11, ... 99, 100, 110 and so on."""
    return float((10 + step % 90) * 10 ** (step // 90)) / 10.0


def steps_up_to(value: float) -> int:
    """The first step that is no less."""
    decade = max(math.floor(math.log10(max(value, 1.0))), 0)
    return next(step for step in range(90 * decade, 90 * decade + 92) if two_digits(step) >= value * (1.0 - 1e-9))


def _rounded_up(value: float) -> float:
    """Two digits, upwards, so that the figure is enough."""
    unit = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return two_digits(steps_up_to(value / unit)) * unit


def _limits(asked: Choice, workload: Workload) -> list[Obstacle]:
    """Each limit that would do to give up alone, with the least that it would have to become."""
    problem, limits = asked.problem, workload.constraints
    found: list[Obstacle] = []
    unpaid = replace(problem, budget_usd_per_hour=np.inf)
    if np.isfinite(problem.budget_usd_per_hour) and (free := solve_beside(unpaid)):
        needs = f"{_rounded_up(free.usd_per_hour * HOURS_PER_MONTH):,.6g}"
        why = "the cheapest fleet that meets everything else costs that"
        key, now = "constraints.budget_usd_per_month", f"{limits.budget_usd_per_month:,.12g}"
        found.append(Obstacle(key, now, needs, why))
    # As good as none, but a limit still: without any, only what is worth its price is looked at.
    boundless = replace(problem, power_watts=_BOUNDLESS_WATTS, by_power=True)
    if np.isfinite(problem.power_watts) and (free := solve_beside(boundless)):
        needs = f"{_rounded_up(free.watts / 1e3):,.6g}"
        why = "the fleet of least power that meets everything else takes that"
        found.append(Obstacle("constraints.power_kw", f"{limits.power_kw:,.12g}", needs, why))
    unstinted = replace(problem, at_most=np.full_like(problem.at_most, np.inf))
    if np.isfinite(problem.at_most).any() and (free := solve_beside(unstinted)):
        found.append(_at_most(asked, free.gpus))
    for vendor, share in limits.vendor_share.items():
        without = _without_share(asked, vendor)
        if share > 0 and without is not None:
            why = f"the cheapest fleet that meets everything else has that share of {vendor}"
            found.append(Obstacle(f"constraints.vendor_share.{vendor}", f"{share:g}", f"{without:.2g}", why))
    return found


def _at_most(asked: Choice, gpus: Array) -> Obstacle:
    over = {
        item.id: (item.at_most, round(gpus[i]))
        for i, item in enumerate(asked.market.items)
        if gpus[i] > item.at_most
    }  # fmt: skip
    return Obstacle(
        "constraints.at_most",
        ", ".join(f"{name} = {most:.0f}" for name, (most, _) in over.items()),
        ", ".join(f"{name} = {needed}" for name, (_, needed) in over.items()),
        "the cheapest fleet that meets everything else has so many",
    )


def _without_share(asked: Choice, vendor: str) -> float | None:
    problem: Programme = asked.problem
    vendors = asked.market.vendors
    if vendor not in vendors:
        return 0.0
    shares = problem.vendor_share.copy()
    shares[vendors.index(vendor)] = 0.0
    free = solve_beside(replace(problem, vendor_share=shares))
    if free is None:
        return None
    value = free.gpus * problem.usd_per_hour
    return float(np.floor(value[problem.vendor == vendors.index(vendor)].sum() / value.sum() * 100) / 100)

"""The trade that every replica offers: how fast each user is served against how many a GPU serves, and the cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment
from crosstie.decide.compare.scorecard import Load, Scorecard
from crosstie.decide.cost.prices import Quote
from crosstie.perf.fit import FITS, candidate_layouts, longest_context, place_each
from crosstie.perf.hardware import Hardware
from crosstie.perf.steady_state import steady_state
from crosstie.perf.worlds import in_worlds, interval_80
from crosstie.port.preflight.readiness import ReadinessCheck

# Below it prompts hardly matter.
_SHORTEST = 1024


@dataclass(frozen=True, slots=True)
class Curve:
    """One replica from a single user to a full one; lists of equal length."""

    label: str
    accelerator: str
    concurrency: list[int]
    ttft_s: list[float]
    tokens_per_s_per_user: list[float]
    output_tokens_per_s_per_gpu: list[float]


def curves(card: Scorecard) -> list[Curve]:
    """A curve for each entry of a scorecard that runs, at its lengths."""
    deployments = [entry.deployment for entry in card.entries if entry.deployment]
    return [curve(deployment, card.load.input_tokens, card.load.output_tokens) for deployment in deployments]


def curve(deployment: Deployment, input_tokens: int, output_tokens: int) -> Curve:
    hardware = Hardware([deployment])
    room = steady_state(hardware, 1, input_tokens, output_tokens).concurrency_that_fits[0, 0]
    clients = doublings(int(room))
    got = steady_state(hardware, clients, input_tokens, output_tokens)
    return Curve(
        label=deployment.label,
        accelerator=deployment.accelerator.id,
        concurrency=list(clients),
        ttft_s=got.ttft_s[0].tolist(),
        tokens_per_s_per_user=(1.0 / got.tpot_s[0]).tolist(),
        output_tokens_per_s_per_gpu=(got.output_tokens_per_s[0] / deployment.parallelism.gpus).tolist(),
    )


@dataclass(frozen=True, slots=True)
class ContextCurve:
    """One replica at the load's requests in flight, from short prompts to the longest; lists of equal length."""

    label: str
    accelerator: str
    input_tokens: list[int]
    # Of the load's requests, those that run at once: the others wait.
    running: list[float]
    ttft_s: list[float]
    tokens_per_s_per_user: list[float]
    output_tokens_per_s_per_gpu: list[float]


def context_curves(card: Scorecard) -> list[ContextCurve]:
    """A curve for each entry of a scorecard that runs, at its requests in flight and answers of its length."""
    return [_by_context(entry.deployment, card.load) for entry in card.entries if entry.deployment]


def _by_context(deployment: Deployment, load: Load) -> ContextCurve:
    lengths = _lengths(deployment, load)
    got = steady_state(Hardware([deployment]), load.concurrency, np.array(lengths), load.output_tokens)
    return ContextCurve(
        label=deployment.label,
        accelerator=deployment.accelerator.id,
        input_tokens=lengths,
        running=np.minimum(got.concurrency_that_fits[0], load.concurrency).tolist(),
        ttft_s=got.ttft_s[0].tolist(),
        tokens_per_s_per_user=(1.0 / got.tpot_s[0]).tolist(),
        output_tokens_per_s_per_gpu=(got.output_tokens_per_s[0] / deployment.parallelism.gpus).tolist(),
    )


def _lengths(deployment: Deployment, load: Load) -> list[int]:
    most = max(longest_context(deployment) - load.output_tokens, 1)
    return [n for n in doublings(most) if n >= _SHORTEST] or [most]


@dataclass(frozen=True, slots=True)
class CostCurve:
    """What a million output tokens of one accelerator cost at each of several points; lists of equal length."""

    accelerator: str
    layouts: list[str]
    concurrency: list[int]
    input_tokens: list[int]
    tpot_s: list[float]
    usd_per_mtok: list[float]
    # 80%: by what is not known of the throughput, and of the price where sellers differ threefold.
    usd_per_mtok_80: list[tuple[float, float]]


def frontiers(catalog: Catalog, card: Scorecard, prices: Mapping[str, Quote]) -> list[CostCurve]:
    """By accelerator, the cheapest at each TPOT, over requests in flight and, unless one was asked for, layouts."""
    load, check, made = card.load, ReadinessCheck(catalog), list[CostCurve]()
    for own in (entry.deployment for entry in card.entries if entry.deployment):
        if own.accelerator.id not in prices:
            continue
        splits = [] if card.asked else [one for one in candidate_layouts(own.model, own.accelerator) if one.pp == 1]
        placed = place_each(catalog, own, [one for one in splits if one != own.parallelism], load.context)
        layouts = [own, *(one.deployment for one in placed if one.verdict == FITS and check.runs(one.deployment))]
        room = steady_state(Hardware(layouts), 1, load.input_tokens, load.output_tokens).concurrency_that_fits
        clients = np.array(doublings(int(room.max())))
        got = steady_state(Hardware(layouts), clients, load.input_tokens, load.output_tokens)
        rate = got.output_tokens_per_s / np.array([[one.parallelism.gpus] for one in layouts])
        rows, columns = np.nonzero((room >= clients) | (clients == 1))
        best, points = 0.0, list[tuple[Deployment, int, int]]()
        # From the fastest on, whatever gives more than all that are faster.
        for at in np.lexsort((-rate[rows, columns], got.tpot_s[rows, columns])):
            if rate[rows[at], columns[at]] > best:
                best = rate[rows[at], columns[at]]
                points.append((layouts[rows[at]], int(clients[columns[at]]), load.input_tokens))
        made.append(_costs(prices[own.accelerator.id], points, load.output_tokens))
    return made


def contexts_priced(card: Scorecard, prices: Mapping[str, Quote]) -> list[CostCurve]:
    """By accelerator, over the length of prompts, at the load's requests in flight."""
    return [
        _costs(prices[own.accelerator.id], [(own, card.load.concurrency, n) for n in _lengths(own, card.load)],
               card.load.output_tokens)
        for own in (entry.deployment for entry in card.entries) if own and own.accelerator.id in prices
    ]  # fmt: skip


def _costs(price: Quote, points: Sequence[tuple[Deployment, int, int]], output_tokens: int) -> CostCurve:
    deployments = [deployment for deployment, _, _ in points]
    clients, inputs = (np.array([point[at] for point in points], float)[:, None] for at in (1, 2))
    got = steady_state(Hardware(deployments), clients, inputs, output_tokens)
    drawn = in_worlds(deployments, clients, inputs, output_tokens)
    gpus = np.array([[one.parallelism.gpus] for one in deployments])
    usd = price.per_mtok(price.usd, got.output_tokens_per_s / gpus)[:, 0].tolist()
    worlds = price.per_mtok(price.in_worlds, (drawn or got).output_tokens_per_s / gpus)
    return CostCurve(
        accelerator=price.accelerator,
        layouts=[str(one.parallelism) for one in deployments],
        concurrency=[point[1] for point in points],
        input_tokens=[point[2] for point in points],
        tpot_s=got.tpot_s[:, 0].tolist(),
        usd_per_mtok=usd,
        usd_per_mtok_80=[interval_80(row, middle) for row, middle in zip(worlds, usd, strict=True)],
    )


def doublings(most: int) -> Sequence[int]:
    """1, 2, 4, ... and the most itself."""
    steps = [2**k for k in range(max(most, 1).bit_length())]
    return steps if steps[-1] == most or most < 1 else [*steps, most]

"""What a token costs: against how fast tokens come, and over the length of prompts, with the 80% interval of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment
from crosstie.decide.compare.curve import doublings, prompt_lengths
from crosstie.decide.compare.scorecard import Scorecard
from crosstie.decide.cost.prices import Quote
from crosstie.perf.fit import FITS, candidate_layouts, place_each
from crosstie.perf.hardware import Hardware
from crosstie.perf.steady_state import steady_state
from crosstie.perf.worlds import in_worlds, interval_80
from crosstie.port.preflight.readiness import ReadinessCheck


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
        _costs(prices[own.accelerator.id], [(own, card.load.concurrency, n) for n in prompt_lengths(own, card.load)],
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

"""The trade that every replica offers: how fast each user is served, how many a GPU serves, and what a token costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment
from crosstie.decide.compare.scorecard import Scorecard
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
    """One accelerator at several loads; lists of equal length, those of costs empty where it has no price."""

    label: str
    accelerator: str
    concurrency: list[int]
    ttft_s: list[float]
    tokens_per_s_per_user: list[float]
    output_tokens_per_s_per_gpu: list[float]
    layouts: list[str] = field(default_factory=list)
    input_tokens: list[int] = field(default_factory=list)
    # Of the requests in flight, those that run at once: the others wait.
    running: list[float] = field(default_factory=list)
    usd_per_mtok: list[float] = field(default_factory=list)
    # 80%: by what is not known of the throughput, and of the price where sellers differ threefold.
    usd_per_mtok_80: list[tuple[float, float]] = field(default_factory=list)


def curves(card: Scorecard) -> list[Curve]:
    """A curve for each entry of a scorecard that runs, at its lengths: from a single user to a full replica."""
    return [curve(deployment, card.load.input_tokens, card.load.output_tokens) for deployment in _running(card)]


def curve(deployment: Deployment, input_tokens: int, output_tokens: int) -> Curve:
    room = steady_state(Hardware([deployment]), 1, input_tokens, output_tokens).concurrency_that_fits[0, 0]
    return _curve([(deployment, clients, input_tokens) for clients in doublings(int(room))], output_tokens)


def context_curves(card: Scorecard, prices: Mapping[str, Quote]) -> list[Curve]:
    """From short prompts to the longest, at the scorecard's requests in flight and answers of its length."""
    made = []
    for deployment in _running(card):
        most = max(longest_context(deployment) - card.load.output_tokens, 1)
        lengths = [n for n in doublings(most) if n >= _SHORTEST] or [most]
        points = [(deployment, card.load.concurrency, n) for n in lengths]
        made.append(_curve(points, card.load.output_tokens, prices.get(deployment.accelerator.id)))
    return made


def frontiers(catalog: Catalog, card: Scorecard, prices: Mapping[str, Quote]) -> list[Curve]:
    """The cheapest at each TPOT, over requests in flight and, unless one was asked for, layouts."""
    load, check, made = card.load, ReadinessCheck(catalog), list[Curve]()
    for own in _running(card):
        splits = [] if card.asked else [way for way in candidate_layouts(own.model, own.accelerator) if way.pp == 1]
        placed = place_each(catalog, own, [split for split in splits if split != own.parallelism], load.context)
        layouts = [own, *(fit.deployment for fit in placed if fit.verdict == FITS and check.runs(fit.deployment))]
        room = steady_state(Hardware(layouts), 1, load.input_tokens, load.output_tokens).concurrency_that_fits
        clients = np.array(doublings(int(room.max())))
        got = steady_state(Hardware(layouts), clients, load.input_tokens, load.output_tokens)
        rate = got.output_tokens_per_s / np.array([[layout.parallelism.gpus] for layout in layouts])
        rows, columns = np.nonzero((room >= clients) | (clients == 1))
        best, points = 0.0, list[tuple[Deployment, int, int]]()
        # From the fastest on, whatever gives more than all that are faster.
        for at in np.lexsort((-rate[rows, columns], got.tpot_s[rows, columns])):
            if rate[rows[at], columns[at]] > best:
                best = rate[rows[at], columns[at]]
                points.append((layouts[rows[at]], int(clients[columns[at]]), load.input_tokens))
        made.append(_curve(points, load.output_tokens, prices.get(own.accelerator.id)))
    return made


def _running(card: Scorecard) -> list[Deployment]:
    return [entry.deployment for entry in card.entries if entry.deployment]


def _curve(points: Sequence[tuple[Deployment, int, int]], output_tokens: int, price: Quote | None = None) -> Curve:
    """Each point: a replica, requests in flight on it, and the tokens of a prompt."""
    deployments = [deployment for deployment, _, _ in points]
    clients, inputs = (np.array([point[at] for point in points], float)[:, None] for at in (1, 2))
    gpus = np.array([[deployment.parallelism.gpus] for deployment in deployments])
    got = steady_state(Hardware(deployments), clients, inputs, output_tokens)
    rate = got.output_tokens_per_s / gpus
    usd, ends = list[float](), list[tuple[float, float]]()
    if price:
        drawn = in_worlds(deployments, clients, inputs, output_tokens)
        usd = price.per_mtok(price.usd, rate)[:, 0].tolist()
        worlds = price.per_mtok(price.in_worlds, drawn.output_tokens_per_s / gpus if drawn else rate)
        ends = [interval_80(row, middle) for row, middle in zip(worlds, usd, strict=True)]
    return Curve(
        label=deployments[0].label,
        accelerator=deployments[0].accelerator.id,
        concurrency=[point[1] for point in points],
        ttft_s=got.ttft_s[:, 0].tolist(),
        tokens_per_s_per_user=(1.0 / got.tpot_s[:, 0]).tolist(),
        output_tokens_per_s_per_gpu=rate[:, 0].tolist(),
        layouts=[str(deployment.parallelism) for deployment in deployments],
        input_tokens=[point[2] for point in points],
        running=np.minimum(got.concurrency_that_fits, clients)[:, 0].tolist(),
        usd_per_mtok=usd,
        usd_per_mtok_80=ends,
    )


def doublings(most: int) -> Sequence[int]:
    """1, 2, 4, ... and the most itself."""
    steps = [2**k for k in range(max(most, 1).bit_length())]
    return steps if steps[-1] == most or most < 1 else [*steps, most]

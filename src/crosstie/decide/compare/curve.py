"""The trade that every replica offers: how fast each user is served against how many a GPU serves."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crosstie.core.deployment import Deployment
from crosstie.decide.compare.scorecard import Load, Scorecard
from crosstie.perf.fit import longest_context
from crosstie.perf.hardware import Hardware
from crosstie.perf.steady_state import steady_state

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
    lengths = prompt_lengths(deployment, load)
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


def prompt_lengths(deployment: Deployment, load: Load) -> list[int]:
    most = max(longest_context(deployment) - load.output_tokens, 1)
    return [n for n in doublings(most) if n >= _SHORTEST] or [most]


def doublings(most: int) -> Sequence[int]:
    """1, 2, 4, ... and the most itself."""
    steps = [2**k for k in range(max(most, 1).bit_length())]
    return steps if steps[-1] == most or most < 1 else [*steps, most]

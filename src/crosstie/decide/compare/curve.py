"""The trade that every replica offers: how fast each user is served against how many a GPU serves."""

from collections.abc import Sequence
from dataclasses import dataclass

from crosstie.core.deployment import Deployment
from crosstie.decide.compare.scorecard import Scorecard
from crosstie.perf.hardware import Hardware
from crosstie.perf.steady_state import steady_state


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
    return [curve(one, card.load.input_tokens, card.load.output_tokens) for one in deployments]


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


def doublings(most: int) -> Sequence[int]:
    """1, 2, 4, ... and the most itself."""
    steps = [2**k for k in range(max(most, 1).bit_length())]
    return steps if steps[-1] == most or most < 1 else [*steps, most]

"""What speculation is worth on a replica: against none, if fewer drafts are kept, and up to how many requests."""

from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from crosstie.core.deployment import Deployment
from crosstie.perf.hardware import Hardware
from crosstie.perf.steady_state import steady_state

# A share of the kept drafts fewer that anybody should expect of other texts.
FEWER = 0.2
# Requests in flight that are tried, evenly spaced in their logarithms.
_LOADS = 60
# Less of a gain than this is none.
_EVEN = 0.005


@dataclass(frozen=True, slots=True)
class Payoff:
    """Ratios of tokens a second with speculation over those without, at the same number of requests in flight."""

    gain: float
    gain_if_fewer: float
    # TPOT without over TPOT with.
    faster: float
    # Requests in flight from which on it costs tokens rather than gives them; None: it pays up to a full replica.
    pays_below: int | None
    # The least acceptance length at which it still pays at this load; None: not at any.
    breaks_even: float | None


def payoff_of(deployment: Deployment, concurrency: int, input_tokens: int, output_tokens: int) -> Payoff | None:
    """None for a replica without speculation."""
    speculation = deployment.speculation
    if speculation is None:
        return None
    shares = np.linspace(0.0, 1.0, 11)
    off = replace(deployment, speculation=None)
    fewer = replace(deployment, speculation=speculation.keeping(1.0 - FEWER))
    others = [replace(deployment, speculation=speculation.keeping(float(share))) for share in shares]
    hardware = Hardware([off, deployment, fewer, *others])
    now = steady_state(hardware, concurrency, input_tokens, output_tokens)
    rate, tpot = now.output_tokens_per_s[:, 0], now.tpot_s[:, 0]
    room = steady_state(hardware, 1, input_tokens, output_tokens).concurrency_that_fits[:2, 0].min()
    loads = np.unique(np.geomspace(1.0, max(room, 1.0), _LOADS).round())
    swept = steady_state(Hardware([off, deployment]), loads, input_tokens, output_tokens).output_tokens_per_s
    lost = swept[1] < swept[0] * (1.0 - _EVEN)
    # From the last load at which it pays on: waves of prompts may cost a few per cent before that.
    pays = np.flatnonzero(~lost)
    first = 0 if not len(pays) else int(pays[-1]) + 1
    kept = speculation.acceptance_length - 1.0
    worth = rate[3:] >= rate[0] * (1.0 - _EVEN)
    return Payoff(
        gain=float(rate[1] / rate[0]),
        gain_if_fewer=float(rate[2] / rate[0]),
        faster=float(tpot[0] / tpot[1]),
        pays_below=int(loads[first]) if first < len(loads) else None,
        breaks_even=1.0 + kept * float(shares[worth.argmax()]) if worth.any() else None,
    )

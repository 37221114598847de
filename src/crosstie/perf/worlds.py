"""What deployments give in every world (core.worlds): the same steady state under each draw of the constants.

Arrays have a row a deployment and a column a world. What a measurement is off by besides its constants goes onto TTFT
and TPOT; throughput then follows from both by Little's law, so the figures of a world never contradict each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crosstie.core.disaggregated import Disaggregated, Servable
from crosstie.core.estimate import CONSTANTS, METRICS, Estimate, Interval
from crosstie.core.worlds import LEVEL, WORLDS, Worlds
from crosstie.perf.disaggregated import Columns, Sides, columns_of, state_of
from crosstie.perf.hardware import Array, Hardware
from crosstie.perf.steady_state import held_sequences

_TTFT, _TPOT = METRICS.index("ttft"), METRICS.index("tpot")
# Standard deviations at which the ends of an interval lie that holds four fifths of a normal distribution.
END = 1.2815515655446004
# A constant is moved by so much either way, in logarithms, to see what follows from it: about as far as worlds do.
_MOVE = 0.25


@dataclass(frozen=True, slots=True)
class WorldEstimates:
    """Arrays of shape (deployments, WORLDS)."""

    ttft_s: Array
    tpot_s: Array
    output_tokens_per_s: Array

    def interval(self, row: int, estimate: Mapping[str, float]) -> Interval:
        """Of one deployment; the estimate itself is never outside."""
        return Interval(
            level=LEVEL,
            **{name: interval_80(getattr(self, name)[row], estimate[name])
               for name in ("ttft_s", "tpot_s", "output_tokens_per_s")},
        )  # fmt: skip


def interval_80(drawn: Array, estimate: float) -> tuple[float, float]:
    low, high = np.quantile(drawn, [0.5 - LEVEL / 2.0, 0.5 + LEVEL / 2.0]).tolist()
    return min(low, estimate), max(high, estimate)


def in_worlds(
    several: Sequence[Servable], concurrency: float | Array, input_tokens: float | Array, output_tokens: float,
    cached_tokens: float = 0.0,
) -> WorldEstimates | None:  # fmt: skip
    """What closed loops of so many clients get; None where no calibration says how sure the estimates are.

    Clients and prompts are those of all, or a column with a row for each."""
    columns = columns_of(several)
    worlds = _known_worlds(columns)
    if worlds is None:
        return None
    for side, own in zip(columns.sides, worlds, strict=True):
        _put_in_worlds(side, own)
    clients = concurrency * np.ones((1, WORLDS))
    state = state_of(columns, clients, input_tokens, output_tokens, cached_tokens)
    # With what measurements are off by besides, and the throughput that follows.
    ttft = state.ttft_s * np.exp(_metric(worlds[0], _TTFT))
    tpot = state.tpot_s * np.exp(_metric(worlds[-1], _TPOT))
    return WorldEstimates(ttft, tpot, clients / (ttft + tpot * (output_tokens - 1.0)) * output_tokens)


def estimate_in_worlds(one: Servable, found: Estimate, lengths: tuple[int, int]) -> WorldEstimates:
    """Of an estimate, at its own load; where nothing says how sure it is, it is the same in all worlds."""
    every = np.ones((1, WORLDS))
    return in_worlds([one], found.concurrency, *lengths) or WorldEstimates(
        found.ttft_s * every, found.tpot_s * every, found.output_tokens_per_s * every
    )


def _known_worlds(columns: Columns) -> list[list[Worlds]] | None:
    """By side and deployment; None where one of them has none."""
    known = [[deployment.correction.worlds for deployment in side.deployments] for side in columns.sides]
    own = [[worlds for worlds in side if worlds is not None] for side in known]
    return own if list(map(len, own)) == list(map(len, known)) else None


def _metric(worlds: Sequence[Worlds], metric: int) -> Array:
    """By how much a measurement of each deployment is off besides its constants, as logarithms."""
    return np.stack([own.metrics[:, metric] for own in worlds])


def _put_in_worlds(hardware: Hardware, worlds: Sequence[Worlds]) -> None:
    """From now on the hardware has a column a world: its constants, and how many drafts are kept."""
    logs = np.stack([world.constants for world in worlds])
    hardware.put_off({name: logs[:, :, i] for i, name in enumerate(CONSTANTS)})
    if hardware.speculates:
        doubts = [one.speculation.doubt if one.speculation else (0.0, 0.0) for one in hardware.deployments]
        kept = np.stack([two_piece(one.acceptance, *doubt) for one, doubt in zip(worlds, doubts, strict=True)])
        hardware.tokens_per_step = np.clip(hardware.tokens_per_step * np.exp(kept), 1.0, hardware.queries)


def two_piece(deviations: Array, low: float, high: float) -> Array:
    """Logarithms of a quantity whose 80% interval has these ends, as logarithms over its middle."""
    return np.asarray(np.where(deviations < 0.0, -deviations * min(low, 0.0), deviations * max(high, 0.0)) / END)


def world_logs(several: Sequence[Servable], input_tokens: float, output_tokens: float) -> Array:
    """(deployments, WORLDS, METRICS): logarithms of what worlds give over the estimates, for many deployments at once.

    The steady state is taken as straight in the logarithms of the constants, either way: two looks at each of these
    instead of one at each world. Nothing moves where no calibration says how sure the estimates are.
    """
    found = np.zeros((len(several), WORLDS, len(METRICS)))
    groups: dict[tuple[object, ...], list[int]] = {}
    for place, one in enumerate(several):
        sides = (one.prefill, one.decode) if isinstance(one, Disaggregated) else (one,)
        if all(side.correction.worlds is not None for side in sides):
            key = isinstance(one, Disaggregated), one.model.id, one.precision.id, one.kv_format
            groups.setdefault(key, []).append(place)
    for places in groups.values():
        found[places] = _logs([several[place] for place in places], input_tokens, output_tokens)
    return found


def _clients(hardware: Hardware, input_tokens: float, output_tokens: float) -> Array:
    """A middling load: 32 requests in flight, or as many as fit."""
    held = np.full((1, 1), input_tokens + output_tokens)
    return np.clip(held_sequences(hardware, held, np.zeros((1, 1))), 1.0, 32.0)


def _move(hardware: Hardware, first: int, columns: int) -> None:
    """Gives the hardware so many columns: from `first` on one for each constant moved up and one for each moved down,
    drafts that are kept after the constants; in the others nothing is moved."""
    moved = len(CONSTANTS) + 1
    logs = np.zeros((moved, 1, columns))
    for i in range(moved):
        logs[i, 0, first + i], logs[i, 0, first + moved + i] = _MOVE, -_MOVE
    hardware.put_off({name: logs[i] for i, name in enumerate(CONSTANTS)})
    if hardware.speculates:
        hardware.tokens_per_step = hardware.tokens_per_step * np.exp(logs[-1])


def _moves(hardware: Hardware, worlds: Sequence[Worlds]) -> Array:
    """(deployments, WORLDS, moved): by how much each world moves the constants and the drafts that are kept, up and
    then down."""
    doubts = [one.speculation.doubt if one.speculation else (0.0, 0.0) for one in hardware.deployments]
    kept = [two_piece(one.acceptance, *doubt)[:, None] for one, doubt in zip(worlds, doubts, strict=True)]
    both = np.stack([np.concatenate([one.constants, more], axis=1) for one, more in zip(worlds, kept, strict=True)])
    return np.concatenate([np.maximum(both, 0.0), np.maximum(-both, 0.0)], axis=2)


def _logs(several: Sequence[Servable], input_tokens: float, output_tokens: float) -> Array:
    """From what each move of a constant makes of the steady state to what each world does."""
    columns, moved = columns_of(several), 2 * (len(CONSTANTS) + 1)
    sides, worlds = columns.sides, _known_worlds(columns)
    assert worlds is not None, "deployments that nobody calibrated are left out"
    count = 1 + moved * len(sides)
    for i, side in enumerate(sides):
        _move(side, 1 + i * moved, count)
    clients = _clients(sides[-1], input_tokens, output_tokens)
    if isinstance(columns, Sides):
        clients = clients * columns.decode_replicas
    state = state_of(columns, np.broadcast_to(clients, (len(several), count)), input_tokens, output_tokens)
    moves = np.concatenate([_moves(side, own) for side, own in zip(sides, worlds, strict=True)], axis=2)
    request_s = state.ttft_s + state.tpot_s * (output_tokens - 1.0)

    def in_every_world(values: Array) -> Array:
        slopes = np.log(values[:, 1:] / values[:, :1]) / _MOVE
        return np.asarray(np.einsum("dwm,dm->dw", moves, slopes))

    ttft_off, tpot_off = _metric(worlds[0], _TTFT), _metric(worlds[-1], _TPOT)
    waiting = (state.ttft_s / request_s)[:, :1]
    rate = -in_every_world(request_s) - waiting * ttft_off - (1.0 - waiting) * tpot_off
    logs = in_every_world(state.ttft_s) + ttft_off, in_every_world(state.tpot_s) + tpot_off, rate
    return np.stack(logs, axis=2)

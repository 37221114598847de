"""What deployments give in every world (core.worlds): the same steady state under each draw of the constants.

Arrays have a row a deployment and a column a world. What a measurement is off by besides its constants goes onto TTFT
and TPOT; throughput then follows from both by Little's law, so the figures of a world never contradict each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crosstie.core.deployment import Deployment
from crosstie.core.disaggregated import Disaggregated, Servable
from crosstie.core.estimate import CONSTANTS, METRICS, Estimate, Interval
from crosstie.core.worlds import LEVEL, WORLDS, Worlds
from crosstie.perf.disaggregated import Sides, disaggregated_state
from crosstie.perf.hardware import Array, Hardware
from crosstie.perf.steady_state import held_sequences, steady_state

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
    deployments: Sequence[Deployment], concurrency: float | Array, input_tokens: float | Array, output_tokens: float,
    cached_tokens: float = 0.0,
) -> WorldEstimates | None:  # fmt: skip
    """What closed loops of so many clients get; None where no calibration says how sure the estimates are.

    Clients and prompts are those of all deployments, or a column with a row for each."""
    worlds = known_worlds(deployments)
    if worlds is None:
        return None
    hardware = Hardware(deployments)
    put_in_worlds(hardware, worlds)
    clients = concurrency * np.ones((1, WORLDS))
    found = steady_state(hardware, clients, input_tokens, output_tokens, cached_tokens=cached_tokens)
    return measured(worlds, worlds, found.ttft_s, found.tpot_s, clients, output_tokens)


def services_in_worlds(
    services: Sequence[Disaggregated], concurrency: float, input_tokens: float, output_tokens: float,
    cached_tokens: float = 0.0,
) -> WorldEstimates | None:  # fmt: skip
    prefill, decode = known_worlds([one.prefill for one in services]), known_worlds([one.decode for one in services])
    if prefill is None or decode is None:
        return None
    sides = Sides(services)
    put_in_worlds(sides.prefill, prefill)
    put_in_worlds(sides.decode, decode)
    clients = np.full((1, WORLDS), float(concurrency))
    found = disaggregated_state(sides, clients, input_tokens, output_tokens, cached_tokens=cached_tokens)
    return measured(prefill, decode, found.ttft_s, found.tpot_s, concurrency, output_tokens)


def estimate_in_worlds(one: Servable, found: Estimate, lengths: tuple[int, int]) -> WorldEstimates:
    """Of an estimate, at its own load; where nothing says how sure it is, it is the same in all worlds."""
    if isinstance(one, Disaggregated):
        drawn = services_in_worlds([one], found.concurrency, *lengths)
    else:
        drawn = in_worlds([one], found.concurrency, *lengths)
    every = np.ones((1, WORLDS))
    return drawn or WorldEstimates(found.ttft_s * every, found.tpot_s * every, found.output_tokens_per_s * every)


def known_worlds(deployments: Sequence[Deployment]) -> list[Worlds] | None:
    worldses = [deployment.correction.worlds for deployment in deployments if deployment.correction.worlds is not None]
    return worldses if len(worldses) == len(deployments) else None


def put_in_worlds(hardware: Hardware, worlds: Sequence[Worlds]) -> None:
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


def measured(
    prefill: Sequence[Worlds], decode: Sequence[Worlds], ttft_s: Array, tpot_s: Array,
    concurrency: float | Array, output_tokens: float,
) -> WorldEstimates:  # fmt: skip
    """With what measurements are off by besides, and the throughput that follows."""
    ttft = ttft_s * np.exp(np.stack([worlds.metrics[:, _TTFT] for worlds in prefill]))
    tpot = tpot_s * np.exp(np.stack([worlds.metrics[:, _TPOT] for worlds in decode]))
    requests_per_s = concurrency / (ttft + tpot * (output_tokens - 1.0))
    return WorldEstimates(ttft, tpot, requests_per_s * output_tokens)


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
    for (apart, *_), places in groups.items():
        some = [several[place] for place in places]
        services = [one for one in some if isinstance(one, Disaggregated)]
        found[places] = (
            _logs_of_services(services, input_tokens, output_tokens)
            if apart
            else _logs_of_replicas([one for one in some if isinstance(one, Deployment)], input_tokens, output_tokens)
        )
    return found


def _logs_of_replicas(several: Sequence[Deployment], input_tokens: float, output_tokens: float) -> Array:
    worlds = known_worlds(several) or []
    hardware = Hardware(several)
    columns = _moved(hardware, 1, 0)
    clients = _clients(hardware, input_tokens, output_tokens)
    state = steady_state(hardware, np.broadcast_to(clients, (len(several), columns)), input_tokens, output_tokens)
    moves = _moves(hardware, worlds)
    return _logs(state.ttft_s, state.tpot_s, moves, worlds, worlds, output_tokens)


def _logs_of_services(services: Sequence[Disaggregated], input_tokens: float, output_tokens: float) -> Array:
    prefill, decode = ([getattr(service, side) for service in services] for side in ("prefill", "decode"))
    first, then = known_worlds(prefill) or [], known_worlds(decode) or []
    sides, moved = Sides(services), 2 * (len(CONSTANTS) + 1)
    columns = _moved(sides.prefill, 1, moved)
    _moved(sides.decode, 1 + moved, 0)
    clients = _clients(sides.decode, input_tokens, output_tokens) * sides.decode_replicas
    wide = np.broadcast_to(clients, (len(services), columns))
    state = disaggregated_state(sides, wide, input_tokens, output_tokens)
    moves = np.concatenate([_moves(sides.prefill, first), _moves(sides.decode, then)], axis=2)
    return _logs(state.ttft_s, state.tpot_s, moves, first, then, output_tokens)


def _clients(hardware: Hardware, input_tokens: float, output_tokens: float) -> Array:
    """A middling load: 32 requests in flight, or as many as fit."""
    held = np.full((1, 1), input_tokens + output_tokens)
    return np.clip(held_sequences(hardware, held, np.zeros((1, 1))), 1.0, 32.0)


def _moved(hardware: Hardware, first: int, after: int) -> int:
    """Gives the hardware a column for nothing moved, one for each constant moved up and one for each moved down, drafts
    that are kept after the constants; with `first` and `after` further columns around them. How many that are."""
    moved = len(CONSTANTS) + 1
    columns = first + 2 * moved + after
    logs = np.zeros((moved, 1, columns))
    for i in range(moved):
        logs[i, 0, first + i], logs[i, 0, first + moved + i] = _MOVE, -_MOVE
    hardware.put_off({name: logs[i] for i, name in enumerate(CONSTANTS)})
    if hardware.speculates:
        hardware.tokens_per_step = hardware.tokens_per_step * np.exp(logs[-1])
    return columns


def _moves(hardware: Hardware, worlds: Sequence[Worlds]) -> Array:
    """(deployments, WORLDS, moved): by how much each world moves the constants and the drafts that are kept, up and
    then down."""
    doubts = [one.speculation.doubt if one.speculation else (0.0, 0.0) for one in hardware.deployments]
    kept = [two_piece(one.acceptance, *doubt)[:, None] for one, doubt in zip(worlds, doubts, strict=True)]
    both = np.stack([np.concatenate([one.constants, more], axis=1) for one, more in zip(worlds, kept, strict=True)])
    return np.concatenate([np.maximum(both, 0.0), np.maximum(-both, 0.0)], axis=2)


def _logs(
    ttft_s: Array, tpot_s: Array, moves: Array, prefill: Sequence[Worlds], decode: Sequence[Worlds],
    output_tokens: float,
) -> Array:  # fmt: skip
    """From what each move makes of the steady state to what each world does."""
    request_s = ttft_s + tpot_s * (output_tokens - 1.0)

    def in_every_world(values: Array) -> Array:
        slopes = np.log(values[:, 1:] / values[:, :1]) / _MOVE
        return np.asarray(np.einsum("dwm,dm->dw", moves, slopes))

    off = [np.stack([worlds.metrics[:, i] for worlds in side]) for side, i in ((prefill, _TTFT), (decode, _TPOT))]
    waiting = (ttft_s / request_s)[:, :1]
    rate = -in_every_world(request_s) - waiting * off[0] - (1.0 - waiting) * off[1]
    return np.stack([in_every_world(ttft_s) + off[0], in_every_world(tpot_s) + off[1], rate], axis=2)

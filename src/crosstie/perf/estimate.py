"""Estimates of replicas and services: the arrays of a steady state, with what binds and how sure they are, as nouns."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crosstie.core.deployment import Deployment
from crosstie.core.disaggregated import Disaggregated, Servable
from crosstie.core.errors import BadInput
from crosstie.core.estimate import Correction, Estimate
from crosstie.core.fact import Fact
from crosstie.perf.disaggregated import DisaggregatedState, columns_of, state_of
from crosstie.perf.hardware import Array, Hardware
from crosstie.perf.memory import memory_plan
from crosstie.perf.steady_state import SteadyState, prefill_alone, single_stream_ceiling
from crosstie.perf.step import StepCost, shape, step
from crosstie.perf.worlds import in_worlds

# What an estimate has of the steady state as it is.
_SAME = ("ttft_s", "ttft_burst_s", "tpot_s", "output_tokens_per_s", "requests_per_s", "decoding")


def estimate(
    one: Servable, *, concurrency: int, input_tokens: int, output_tokens: int, cached_tokens: int = 0
) -> Estimate:
    lengths = {"input_tokens": input_tokens, "output_tokens": output_tokens, "cached_tokens": cached_tokens}
    return estimates([one], concurrency=concurrency, **lengths)[0]


def estimates(
    several: Sequence[Servable],
    *,
    concurrency: int,
    input_tokens: int,
    output_tokens: int,
    cached_tokens: int = 0,
) -> list[Estimate]:
    """One estimate a replica, or a disaggregated service, of the same model at the same load.

    `cached_tokens`: tokens of a prompt that the cache holds already, of an earlier turn for example.
    """
    columns = columns_of(several)
    for side in columns.sides:
        check_lengths(side, input_tokens, output_tokens)
    state = state_of(columns, concurrency, input_tokens, output_tokens, cached_tokens)
    decode = columns.sides[-1]
    if isinstance(state, DisaggregatedState):
        prefill = state.prefill
    else:
        prefill = prefill_alone(decode, input_tokens, cached_tokens)
    alone = step(decode, shape(1.0, input_tokens + output_tokens / 2))
    worlds = in_worlds(several, concurrency, input_tokens, output_tokens, cached_tokens)
    found = []
    for i, one in enumerate(several):
        own: dict[str, Any] = {name: float(getattr(state, name)[i, 0]) for name in _SAME}
        load = concurrency / one.gpus
        sides = (one.prefill, one.decode) if isinstance(one, Disaggregated) else (one,)
        rests_on = [basis(side, load) for side in sides]
        found.append(
            Estimate(
                **own,
                output_tokens_per_s_per_gpu=own["output_tokens_per_s"] / one.gpus,
                concurrency=float(concurrency),
                concurrency_that_fits=float(np.floor(state.concurrency_that_fits[i, 0])),
                prefill_bound=bound(prefill, i),
                decode_bound=_decode_bound(state, i),
                prefill_roofline_fraction=_roofline_fraction(prefill, i),
                decode_roofline_fraction=_roofline_fraction(state.decode, i),
                single_stream_tokens_per_s=float(decode.tokens_per_step[i, 0] / alone.total_s[i, 0]),
                single_stream_ceiling_tokens_per_s=ceiling(one.decode),
                gpu_s_per_token=_spending(decode, one, state, i, output_tokens),
                decode_shares=_shares(state.decode, i),
                interval=worlds.interval(i, own) if worlds else None,
                basis="prefill: {}; decode: {}".format(*rests_on) if len(sides) == 2 else rests_on[0],
                extrapolated=any(side.correction.extrapolated for side in sides),
            )
        )
    return found


def _decode_bound(steady: SteadyState | DisaggregatedState, row: int) -> str:
    if steady.capacity_binds[row, 0]:
        return "memory capacity"
    return "engine limit" if steady.engine_binds[row, 0] else bound(steady.decode, row)


def _spending(
    hardware: Hardware, one: Servable, steady: SteadyState | DisaggregatedState, row: int, output_tokens: int
) -> dict[str, float]:
    """GPU-seconds per output token: what a prompt adds to the steps that carry it, and a decode step's share."""
    if isinstance(steady, DisaggregatedState):
        assert isinstance(one, Disaggregated)
        return _spending_apart(one, steady, row, output_tokens)
    split = hardware.deployments[row].parallelism
    sequences = max(float(steady.decoding[row, 0]) / split.pp, 1.0)
    steps = (output_tokens - 1) / output_tokens / float(hardware.tokens_per_step[row, 0])
    decode_share = split.stage_gpus * steps / sequences
    prefill_share = split.stage_gpus * float(steady.chunks[row, 0]) / output_tokens
    # Sequences that ride along in a step that carries a prompt would have cost their own step.
    company = float(steady.decoding[row, 0]) / (float(steady.decoding[row, 0]) + 1.0)
    riding = 0.0 if hardware.prefill_first[row, 0] else company
    found = {}
    for name, of in RESOURCES.items():
        decode, mixed = float(of(steady.decode)[row, 0]), float(of(steady.mixed)[row, 0])
        found[f"prefill {name}"] = prefill_share * max(mixed - riding * decode, 0.0)
        found[f"decode {name}"] = decode_share * decode
    return found


def _spending_apart(
    service: Disaggregated, state: DisaggregatedState, row: int, output_tokens: int
) -> dict[str, float]:
    """GPU-seconds per output token that each side works; what it idles is in neither."""
    prefill_s, rate = float(state.prefill.total_s[row, 0]), float(state.requests_per_s[row, 0])
    busy_s = float(state.prefill_busy[row, 0]) * service.prefill_gpus / max(rate * output_tokens, 1e-12)
    prompts = busy_s / max(prefill_s, 1e-12)
    sequences = max(float(state.decoding[row, 0]) / service.decode_replicas, 1.0)
    steps = (output_tokens - 1) / output_tokens
    answers = service.decode.parallelism.gpus * steps / sequences
    return {
        **{f"prefill {name}": prompts * float(of(state.prefill)[row, 0]) for name, of in RESOURCES.items()},
        **{f"decode {name}": answers * float(of(state.decode)[row, 0]) for name, of in RESOURCES.items()},
    }


def _shares(cost: StepCost, row: int) -> dict[str, float]:
    total = float(cost.total_s[row, 0])
    return {
        "bookkeeping": float(cost.parts_s["bookkeeping"][row, 0]) / total,
        "host": float((cost.total_s - cost.gpu_s)[row, 0]) / total,
    }


RESOURCES: dict[str, Callable[[StepCost], Array]] = {
    "compute": lambda cost: cost.compute_s,
    "memory bandwidth": lambda cost: cost.memory_s,
    "interconnect": lambda cost: cost.interconnect_s,
    "host": lambda cost: cost.total_s - cost.gpu_s,
}


def check_lengths(hardware: Hardware, input_tokens: int, output_tokens: int) -> None:
    if input_tokens < 1 or output_tokens < 1:
        raise BadInput(f"input {input_tokens}, output {output_tokens}: both must be at least 1")
    hardware.model.check_context(input_tokens + output_tokens, f"input {input_tokens} plus output {output_tokens}")
    for deployment in hardware.deployments:
        if not memory_plan(deployment).fits:
            raise BadInput(f"{deployment.label}: the weights leave no room for the cache")


def bound(cost: StepCost, row: int) -> str:
    """The resource that a step spends most of its time on."""
    parts = {name: float(of(cost)[row, 0]) for name, of in RESOURCES.items() if name != "host"}
    host = float(cost.host_s[row, 0])
    if host > (sum(parts.values()) if bool(cost.host_overlapped[row, 0]) else max(parts.values())):
        return "host"
    return max(parts, key=lambda name: parts[name])


def _roofline_fraction(cost: StepCost, row: int) -> float:
    return float(cost.ideal_s[row, 0] / cost.total_s[row, 0])


def active_weight_bytes(deployment: Deployment) -> float:
    """Stored bytes of the weights that one token multiplies by."""
    return sum(
        tensor.active_parameters * layers * deployment.precision[tensor.role].bytes
        for tensor, layers in deployment.model.tensors()
        if tensor.is_multiplied
    )


def ceiling(deployment: Deployment) -> float:
    """Pipeline stages take turns on one stream, so only one stage's bandwidth counts."""
    steps_per_s = single_stream_ceiling(
        active_weight_bytes(deployment), deployment.accelerator.memory_bytes_per_s, deployment.parallelism.stage_gpus
    )
    return steps_per_s * (deployment.speculation.acceptance_length if deployment.speculation else 1.0)


def _beyond(correction: Correction, load: float) -> str:
    """Words for a load that is twice as far as any that was measured, or further."""
    if correction.loads is None or correction.doublings(load) < 1.0:
        return ""
    low, high = correction.loads
    return f"; at {load:.3g} requests in flight a GPU, where {low:.3g} to {high:.3g} were measured"


def basis(deployment: Deployment, load: float) -> str:
    """What an estimate at so many requests in flight a GPU rests on, said so that nobody takes more from it."""
    correction = deployment.correction
    if correction.worlds is not None:
        return correction.basis + _beyond(correction, load)
    constants = deployment.efficiency
    used: dict[str, Fact] = {f"compute.{name}": constants.compute[name] for name in deployment.accelerator.dense}
    used |= {f"weights.{name}": fact for name, fact in constants.weights.items()}
    used |= {name: getattr(constants, name) for name in ("attention", "cache", "elementwise", "kernel")}
    measured = sum(fact.basis in ("measured", "derived") for fact in used.values())
    scopes = Counter(constants.scope[name] for name in used)
    where = ", ".join(f"{name} ({count})" for name, count in scopes.most_common())
    return f"uncalibrated; {measured} of {len(used)} efficiencies rest on measurements, the rest assumed; from {where}"

"""Estimates of replicas: the arrays of `serving`, with what binds and how sure they are, as nouns."""

from collections.abc import Sequence

import numpy as np

from crosstie.core.deployment import Deployment
from crosstie.core.errors import BadInput
from crosstie.core.estimate import Estimate
from crosstie.perf.hardware import Hardware
from crosstie.perf.memory import memory_plan
from crosstie.perf.serving import Steady, serve, single_stream_ceiling
from crosstie.perf.step import StepCost, shape, step


def estimate(deployment: Deployment, *, concurrency: int, input_tokens: int, output_tokens: int) -> Estimate:
    return estimates([deployment], concurrency=concurrency, input_tokens=input_tokens, output_tokens=output_tokens)[0]


def estimates(
    deployments: Sequence[Deployment], *, concurrency: int, input_tokens: int, output_tokens: int
) -> list[Estimate]:
    """One estimate a deployment of the same model at the same load."""
    hardware = Hardware(deployments)
    check_lengths(hardware, input_tokens, output_tokens)
    steady = serve(hardware, concurrency, input_tokens, output_tokens)
    alone = step(hardware, shape(1.0, input_tokens + output_tokens / 2))
    found = []
    for i, deployment in enumerate(deployments):
        full = bool(steady.capacity_binds[i, 0])
        output_rate = float(steady.output_tokens_per_s[i, 0])
        found.append(
            Estimate(
                ttft_s=float(steady.ttft_s[i, 0]),
                ttft_burst_s=float(steady.ttft_burst_s[i, 0]),
                tpot_s=float(steady.tpot_s[i, 0]),
                output_tokens_per_s=output_rate,
                output_tokens_per_s_per_gpu=output_rate / deployment.parallelism.gpus,
                requests_per_s=float(steady.requests_per_s[i, 0]),
                concurrency=float(concurrency),
                decoding=float(steady.decoding[i, 0]),
                concurrency_that_fits=float(np.floor(steady.concurrency_that_fits[i, 0])),
                prefill_bound=bound(steady.prefill, i),
                decode_bound="memory capacity" if full else bound(steady.decode, i),
                prefill_roofline_fraction=roofline_fraction(steady.prefill, i),
                decode_roofline_fraction=roofline_fraction(steady.decode, i),
                single_stream_tokens_per_s=1.0 / float(alone.total_s[i, 0]),
                single_stream_ceiling_tokens_per_s=ceiling(deployment),
                gpu_s_per_token=spending(hardware, steady, i, input_tokens, output_tokens),
                basis=basis(deployment),
            )
        )
    return found


def spending(hardware: Hardware, steady: Steady, row: int, input_tokens: int, output_tokens: int) -> dict[str, float]:
    """GPU-seconds per output token: a prompt's chunks over its outputs, a step over its sequences."""
    split = hardware.deployments[row].parallelism
    chunk = min(float(input_tokens), float(hardware.chunk_tokens[row, 0]))
    prefill_share = split.stage_gpus * input_tokens / chunk / output_tokens
    decode_share = split.stage_gpus / max(float(steady.decoding[row, 0]) / split.pp, 1.0)
    found = {}
    for phase, cost, share in (("prefill", steady.prefill, prefill_share), ("decode", steady.decode, decode_share)):
        host = float((cost.total_s - cost.gpu_s)[row, 0])
        found[f"{phase} compute"] = share * float(cost.compute_s[row, 0])
        found[f"{phase} memory bandwidth"] = share * float(cost.memory_s[row, 0])
        found[f"{phase} interconnect"] = share * float(cost.interconnect_s[row, 0])
        found[f"{phase} host"] = share * host
    return found


def check_lengths(hardware: Hardware, input_tokens: int, output_tokens: int) -> None:
    model = hardware.model
    if input_tokens < 1 or output_tokens < 1:
        raise BadInput(f"--input {input_tokens} --output {output_tokens}: both must be at least 1")
    longest = model.max_context
    if longest is not None and input_tokens + output_tokens > longest:
        raise BadInput(
            f"--input {input_tokens} and --output {output_tokens} together exceed the context of {model.id}, {longest}"
        )
    for deployment in hardware.deployments:
        if not memory_plan(deployment).fits:
            raise BadInput(f"{deployment.label}: the weights leave no room for the cache")


def bound(cost: StepCost, row: int) -> str:
    """The resource that a step spends most of its time on."""
    parts = {
        "compute": float(cost.compute_s[row, 0]),
        "memory bandwidth": float(cost.memory_s[row, 0]),
        "interconnect": float(cost.interconnect_s[row, 0]),
    }
    host = float(cost.host_s[row, 0])
    if host > (sum(parts.values()) if bool(cost.host_overlapped[row, 0]) else max(parts.values())):
        return "host"
    return max(parts, key=lambda name: parts[name])


def roofline_fraction(cost: StepCost, row: int) -> float:
    return float(cost.ideal_s[row, 0] / cost.total_s[row, 0])


def active_weight_bytes(deployment: Deployment) -> float:
    """Stored bytes of the weights that one token multiplies by."""
    return sum(
        tensor.active_parameters * layers * deployment.precision[tensor.role].bytes
        for tensor, layers in deployment.model.tensors()
        if tensor.role != "embedding" or tensor.kernel
    )


def ceiling(deployment: Deployment) -> float:
    """Pipeline stages take turns on one stream, so only one stage's bandwidth counts."""
    return single_stream_ceiling(
        active_weight_bytes(deployment), deployment.accelerator.memory_bytes_per_s, deployment.parallelism.stage_gpus
    )


def basis(deployment: Deployment) -> str:
    """Where the efficiencies behind an estimate come from, said so that nobody takes more from it."""
    constants = deployment.efficiency
    values = [constants.attention, constants.cache, constants.elementwise, constants.kernel]
    values += [*constants.compute.values(), *constants.weights.values()]
    derived = sum(1 for fact in values if fact.basis in ("measured", "derived"))
    scope = constants.scope.get("kernel", "default")
    nearest = f"{derived} of {len(values)} efficiencies from measurements, the rest assumed"
    return f"uncalibrated model; constants of {scope}: {nearest}"

"""The operations of a replica's prefill and decode steps under the roofs of its accelerator."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from crosstie.core.deployment import Deployment
from crosstie.core.errors import BadInput
from crosstie.perf.estimate import check_lengths
from crosstie.perf.hardware import Hardware, compute_format
from crosstie.perf.steady_state import chunk_alone, steady_state
from crosstie.perf.step import Shape, counted, shape, step
from crosstie.perf.work import Operation, Work


@dataclass(frozen=True, slots=True)
class Spot:
    """An operation of all layers that have it, on one GPU: what it does and the seconds that it takes."""

    name: str
    # The format that it computes in.
    format: str
    flop: float
    # Weights and cache, each read once: as little as there can be.
    moved_bytes: float
    seconds: float
    share_of_step: float

    @property
    def flop_per_byte(self) -> float:
        return self.flop / self.moved_bytes

    @property
    def flop_per_s(self) -> float:
        return self.flop / self.seconds


@dataclass(frozen=True, slots=True)
class StepSpots:
    """A step: its operations, and the shares of its time that no arithmetic takes."""

    # "prefill" or "decode".
    kind: str
    # Prompt tokens, or sequences that decode.
    size: float
    context: float
    seconds: float
    spots: list[Spot]
    elsewhere: dict[str, float]


@dataclass(frozen=True, slots=True)
class Roof:
    """FLOP/s of a format: the datasheet's, and what the model has its dense products reach (0 where there are none)."""

    format: str
    peak_flop_per_s: float
    reached_flop_per_s: float


@dataclass(frozen=True, slots=True)
class Roofline:
    deployment: Deployment
    memory_bytes_per_s: float
    roofs: list[Roof]
    steps: list[StepSpots]


def roofline(deployment: Deployment, *, concurrency: int, input_tokens: int, output_tokens: int) -> Roofline:
    """A chunk of a prompt alone, and the decode step of so many clients in a steady state."""
    if deployment.speculation:
        raise BadInput("a roofline is of steps without drafts: leave --speculation out")
    hardware = Hardware([deployment])
    check_lengths(hardware, input_tokens, output_tokens)
    steady = steady_state(hardware, concurrency, input_tokens, output_tokens)
    decode = shape(np.maximum(steady.decoding / hardware.pp, 1.0), input_tokens + output_tokens / 2)
    return Roofline(
        deployment, deployment.accelerator.memory_bytes_per_s, list(_roofs(hardware)),
        [_step("prefill", hardware, chunk_alone(hardware, input_tokens)), _step("decode", hardware, decode)],
    )  # fmt: skip


def _step(kind: str, hardware: Hardware, at: Shape) -> StepSpots:
    cost = step(hardware, at)
    total = float(cost.total_s[0, 0])
    sums: dict[tuple[str, str], tuple[float, float, float]] = {}
    for name, format, work in _operations(hardware):
        account = counted(hardware, work, at)
        done = (float(account.flop[0, 0]), float(account.moved_bytes[0, 0]), float(account.total[0, 0]))
        before = sums.get((name, format), (0.0, 0.0, 0.0))
        sums[name, format] = (before[0] + done[0], before[1] + done[1], before[2] + done[2])
    spots = [Spot(*key, *done, done[2] / total) for key, done in sums.items() if min(done) > 0]
    elsewhere = {
        "norms, activations and routing": cost.parts_s["bookkeeping"],
        "between GPUs": cost.interconnect_s,
        "host": cost.total_s - cost.gpu_s,
    }
    size = at.prefill_tokens if kind == "prefill" else at.decode_sequences
    context = at.prefill_start if kind == "prefill" else at.decode_context
    return StepSpots(
        kind, float(size.flat[0]), float(context.flat[0]), total, spots,
        {name: float(one[0, 0]) / total for name, one in elsewhere.items()},
    )  # fmt: skip


def _operations(hardware: Hardware) -> Iterator[tuple[str, str, Work]]:
    """Each part of the work by itself: its name, what it computes in, and a work with nothing else in it."""
    whole, (deployment,) = hardware.work, hardware.deployments
    none = whole._replace(
        operations={}, scans={}, states={}, head=(), elementwise_bytes=0.0, elementwise_sharded_bytes=0.0,
        elementwise_kernels=0.0, routing_kernels=0.0,
    )  # fmt: skip

    def computes(operation: Operation) -> str:
        largest = max(operation.tensors, key=lambda tensor: tensor.parameters)
        return compute_format(deployment, hardware.precision[largest.role].main)

    for operation, count in whole.operations.items():
        yield _name(operation), computes(operation), none._replace(operations={operation: count})
    for scan, count in whole.scans.items():
        format = scan.compute if scan.compute in deployment.accelerator.dense else _half(deployment)
        yield f"attention ({scan.name})", format, none._replace(scans={scan: count})
    for state, count in whole.states.items():
        yield "recurrent state", _half(deployment), none._replace(states={state: count})
    for operation in whole.head:
        yield "head", computes(operation), none._replace(head=(operation,))


_WORDS = {"qkv": "QKV", "o": "attention output", "mlp_up": "MLP up", "mlp_down": "MLP down"}


def _name(operation: Operation) -> str:
    """As the kernel is called; where that says little, the matrices that it multiplies by."""
    kernel = operation.tensors[0].kernel
    if len(kernel) < 2 and kernel not in _WORDS:
        return " + ".join(tensor.name for tensor in operation.tensors)
    return _WORDS.get(kernel, kernel.replace("_up", " up").replace("_down", " down"))


def _half(deployment: Deployment) -> str:
    return "bf16" if "bf16" in deployment.accelerator.dense else "fp16"


def _roofs(hardware: Hardware) -> Iterator[Roof]:
    (deployment,) = hardware.deployments
    used = {compute_format(deployment, mix.main): mix.main for mix in hardware.precision.by_role.values()}
    for name, fact in sorted(deployment.accelerator.dense.items(), key=lambda one: one[1].si):
        reached = float(hardware.rates(used[name])[0][0, 0]) if name in used else 0.0
        yield Roof(name, fact.si, reached)

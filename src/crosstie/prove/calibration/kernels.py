"""Kernels that were timed one by one: what they say about the constants, apart from any engine or model."""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from crosstie.catalog.calibration import CalibrationSubject
from crosstie.catalog.feedforward import ROUTING_KERNELS
from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import text_of
from crosstie.core.deployment import Deployment, kv_bytes_per_element
from crosstie.core.errors import BadData, UnknownName
from crosstie.perf.hardware import Array, Hardware
from crosstie.perf.step import ACTIVATION_BYTES, EXPERT_PADDING_ROWS, all_reduce_s, distinct_share, smooth_maximum

KINDS = ("gemm", "mixture", "attention-prefill", "attention-decode", "all-reduce")
# Any dense model will do: a kernel takes only the rates from it.
_CARRIER = "llama-3.1-8b"


class MeasuredKernel(msgspec.Struct, frozen=True, kw_only=True):
    """One shape. Rows and columns of a product; tokens and widths of experts; sequences and heads; bytes."""

    accelerator: str
    stack: str
    kind: str
    format: str
    seconds: float
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    tokens: float = 0.0
    hidden: float = 0.0
    inner: float = 0.0
    topk: float = 0.0
    experts: float = 1.0
    tp: float = 1.0
    ep: float = 1.0
    batch: float = 0.0
    context: float = 0.0
    heads: float = 0.0
    kv_heads: float = 0.0
    head_dim: float = 0.0
    kv_format: str = "bf16"
    gpus: float = 1.0
    bytes: float = 0.0


_NUMBERS = tuple(
    field.name for field in msgspec.structs.fields(MeasuredKernel) if field.type is float and field.name != "seconds"
)


def read_kernels(file: Path) -> list[MeasuredKernel]:
    """A table of kernels, gzipped or not; columns as the fields of Kernel, others are left alone."""
    kernels = []
    for line, row in enumerate(csv.DictReader(io.StringIO(text_of(file))), start=2):
        given = {name: row[name] for name in MeasuredKernel.__struct_fields__ if row.get(name)}
        try:
            kernel = msgspec.convert(given, MeasuredKernel, strict=False)
        except msgspec.ValidationError as error:
            raise BadData(file, f"line {line}", str(error)) from None
        if kernel.kind not in KINDS or not 0 < kernel.seconds < math.inf:
            raise BadData(file, f"line {line}", "has an unknown kind or no time")
        for name in _NUMBERS:
            if not 0 <= getattr(kernel, name) < math.inf:
                raise BadData(file, f"line {line}", f"{name} is negative or not finite")
        kernels.append(kernel)
    return kernels


def subject_of_kernel(catalog: Catalog, kernel: MeasuredKernel) -> CalibrationSubject:
    accelerator = catalog.accelerator(kernel.accelerator)
    weights = kernel.kind in ("gemm", "mixture")
    if kernel.format not in catalog.formats:
        raise UnknownName("format", kernel.format, catalog.formats)
    return CalibrationSubject(
        vendor=accelerator.vendor,
        family=accelerator.family,
        accelerator=accelerator.id,
        stack=kernel.stack,
        bits=f"{catalog.formats[kernel.format].width}-bit" if weights else "",
        kind="mixture" if kernel.kind == "mixture" else "",
        model="",
        layout="",
        # A kernel is no engine's gain.
        month="2024-12",
    )


class KernelPredictor:
    """Kernels in their order; `predict` again after `correct`."""

    def __init__(self, catalog: Catalog, kernels: Sequence[MeasuredKernel]):
        self.kernels = list(kernels)
        groups: dict[tuple[str, str], list[int]] = {}
        for index, kernel in enumerate(self.kernels):
            groups.setdefault((kernel.kind, kernel.format), []).append(index)
        model = catalog.model(_CARRIER)
        self._groups: list[tuple[Array, str, Hardware, dict[str, Array]]] = []

        @cache
        def carrier(accelerator: str, stack: str, format: str) -> Deployment:
            return catalog.deployment(model, catalog.accelerator(accelerator), None, format, "bf16", stack)

        for (kind, format), indices in groups.items():
            members = [self.kernels[i] for i in indices]
            hardware = Hardware([carrier(kernel.accelerator, kernel.stack, format) for kernel in members])
            columns = {name: np.array([[getattr(kernel, name)] for kernel in members]) for name in _NUMBERS}
            columns["kv_bytes"] = np.array([[kv_bytes_per_element(kernel.kv_format)] for kernel in members])
            self._groups.append((np.array(indices), kind, hardware, columns))

    def correct(self, factors: Mapping[str, Array]) -> None:
        for indices, _, hardware, _ in self._groups:
            hardware.correct({name: values[indices][:, None] for name, values in factors.items()})

    def predict(self) -> Array:
        seconds = np.zeros(len(self.kernels))
        for indices, kind, hardware, of in self._groups:
            seconds[indices] = _SECONDS[kind](hardware, of)[:, 0]
        return seconds


def _gemm(hardware: Hardware, of: Mapping[str, Array]) -> Array:
    format = hardware.precision["mlp"].main
    rate, _ = hardware.rates(format)
    weights = of["n"] * of["k"]
    moved = of["m"] * (of["n"] + of["k"]) * ACTIVATION_BYTES / hardware.elementwise_bytes_per_s
    memory = weights * hardware.precision["mlp"].bytes / hardware.stream_bytes_per_s(format) + moved
    return hardware.kernel_s + smooth_maximum(2.0 * of["m"] * weights / rate, memory)


def _mixture(hardware: Hardware, of: Mapping[str, Array]) -> Array:
    """Two grouped products and the small kernels around them."""
    format = hardware.precision["mlp"].main
    rate = hardware.expert_rate(format)
    local = of["experts"] / of["ep"]
    rows = of["tokens"] * of["topk"] / of["ep"]
    share = of["topk"] / of["experts"]
    visited = np.minimum(local * distinct_share(share, of["tokens"]), np.minimum(local, rows))
    seconds = (2.0 + ROUTING_KERNELS * hardware.factors["routing"]) * hardware.kernel_s
    inner = of["inner"] / of["tp"]
    for out in (2.0 * inner, inner):
        matrix = out * of["hidden"]
        moved = rows * (out + of["hidden"]) * ACTIVATION_BYTES / hardware.elementwise_bytes_per_s
        stored = visited * matrix * hardware.precision["mlp"].bytes / hardware.stream_bytes_per_s(format)
        seconds = seconds + smooth_maximum((rows + EXPERT_PADDING_ROWS * visited) * 2.0 * matrix / rate, moved + stored)
    return seconds


def _prefill(hardware: Hardware, of: Mapping[str, Array]) -> Array:
    rate, _ = hardware.attention_rates("bf16")
    flop = 4.0 * of["batch"] * of["context"] ** 2 / 2.0 * of["heads"] * of["head_dim"]
    return 2.0 * hardware.kernel_s + flop / rate


def _decode(hardware: Hardware, of: Mapping[str, Array]) -> Array:
    read = of["batch"] * of["context"] * 2.0 * of["kv_heads"] * of["head_dim"] * of["kv_bytes"]
    return 2.0 * hardware.kernel_s + read / hardware.cache_bytes_per_s


_SECONDS: dict[str, Callable[[Hardware, Mapping[str, Array]], Array]] = {
    "gemm": _gemm,
    "mixture": _mixture,
    "attention-prefill": _prefill,
    "attention-decode": _decode,
    "all-reduce": lambda hardware, of: all_reduce_s(hardware, of["bytes"], of["gpus"]),
}

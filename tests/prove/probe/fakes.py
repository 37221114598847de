"""A PyTorch without PyTorch: enough of a GPU for the probe to open, describe and time, on a clock of its own."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from crosstie.prove.probe.device import Timing
from crosstie.prove.probe.kernels import Case, LoadedDevice, Measured

SECONDS = {
    "copy": 2 * (1 << 30) / 4e12,
    "kernel-in-graph": 2e-6,
    "kernel-eager": 5e-6,
    "host-launch": 4e-6,
    "gemm": 1e-3,
    "attention-prefill": 1e-3,
    "attention-decode": 1e-3,
    "decode-step": 5e-3,
    "prefill-step": 0.1,
}


class FakeTensor:
    def __matmul__(self, other: object) -> "FakeTensor":
        return self

    def mul_(self, scale: float) -> "FakeTensor":
        return self


class FakeCuda:
    """`now` is the device's clock in seconds; whoever plays a kernel moves it on."""

    def __init__(self, name: str, memory: int, gpus: int):
        self.name, self.memory, self.gpus = name, memory, gpus
        self.now, self.captures, self.refuses_capture, self.broken = 0.0, 0, False, False
        self.capturing: list[float] | None = None

    def is_available(self) -> bool:
        return self.gpus > 0

    def device_count(self) -> int:
        return self.gpus

    def get_device_name(self, index: int) -> str:
        return self.name

    def get_device_capability(self, index: int) -> tuple[int, int]:
        return 9, 0

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(
            total_memory=self.memory, gcnArchName="gfx942:sramecc+:xnack-",
            pci_domain_id=0, pci_bus_id=0x1A, pci_device_id=0,
        )  # fmt: skip

    def mem_get_info(self) -> tuple[int, int]:
        return self.memory, self.memory

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    def empty_cache(self) -> None:
        pass

    def kernel(self, seconds: float) -> None:
        if self.capturing is None:
            self.now += seconds
        else:
            self.capturing.append(seconds)

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: (end.at - event.at) * 1e3
        return event

    def CUDAGraph(self) -> Any:  # noqa: N802
        graph = SimpleNamespace(seconds=0.0)

        def replay() -> None:
            self.now += graph.seconds

        graph.replay = replay
        return graph

    @contextlib.contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        if self.refuses_capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captures += 1
        self.capturing = []
        try:
            yield
        finally:
            graph.seconds, self.capturing = sum(self.capturing), None


class FakeTorch:
    __version__ = "2.99.0"
    bfloat16, float8_e4m3fn, float8_e4m3fnuz = "torch.bfloat16", "torch.float8_e4m3fn", "torch.float8_e4m3fnuz"

    def __init__(self, name: str = "NVIDIA H200", memory: int = 150_100_000_000, gpus: int = 1, hip: str | None = None):
        self.cuda = FakeCuda(name, memory, gpus)
        self.version = SimpleNamespace(hip=hip, cuda=None if hip else "13.0")

    def manual_seed(self, seed: int) -> None:
        pass

    def no_grad(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def randn(self, *size: int, device: str, dtype: str) -> FakeTensor:
        return FakeTensor()


def measured(bench: LoadedDevice, case: Case) -> Measured:
    """Stands in for every kernel: the time of its kind, whatever the shape."""
    return Timing(SECONDS[case["kind"]], 10, 1.1, True), "flash" if "context" in case else "matmul"

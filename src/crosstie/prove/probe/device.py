"""The GPU at hand: opened through PyTorch, described for the record, and matched to the catalog by name and memory;
and how long an operation takes on it, by its own events, inside a graph where capture works.
"""

import glob
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

from crosstie.core.errors import BadInput

# Words of a device's name that make another card of it, so that both names must have them or neither.
OTHER_CARDS = {"nvl", "pcie", "d", "laptop", "max"}
# Words of a catalog id that drivers leave out.
UNSAID = {"sxm"}
# A shape that a kernel refuses, in the ways in which PyTorch refuses one.
REFUSALS = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError)
# Past so many variants of a function PyTorch stops compiling without an error, and batches would be timed unfused.
VARIANTS = 64
# How far the driver's figure for the memory may be from the catalog's.
MEMORY_TOLERANCE = 0.06
Run = Callable[[], object]
# A replay shorter than this is repeated inside the graph, so that starting a graph is not what is timed.
SHORTEST_S = 3e-4
MOST_REPEATS = 50
LEAST_SAMPLES, MOST_SAMPLES = 5, 100


class Timing(NamedTuple):
    """Seconds of one operation (the median), how many samples that is of, and their 90th over their 10th percentile."""

    seconds: float
    samples: int
    spread: float
    graph: bool


def timing(samples: list[float], operations: int, graph: bool) -> Timing:
    ordered = sorted(samples)
    last = len(ordered) - 1
    low, middle, high = (ordered[round(last * share)] for share in (0.1, 0.5, 0.9))
    return Timing(middle / operations, len(ordered), high / low if low > 0 else 1.0, graph)


def sampled(measure: Callable[[], float], budget_s: float) -> list[float]:
    samples: list[float] = []
    start = time.perf_counter()
    while len(samples) < LEAST_SAMPLES or (len(samples) < MOST_SAMPLES and time.perf_counter() - start < budget_s):
        samples.append(measure())
    return samples


class HostTimer:
    """By the wall clock, for devices that work while they are called."""

    def elapsed(self, run: Run) -> float:
        """Seconds that the device spends on one call."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def time(self, run: Run, operations: int = 1, budget_s: float = 0.04, graph: bool = True) -> Timing:
        """A call does `operations` of what is timed; sampling stops after `budget_s`."""
        run()
        return timing(sampled(lambda: self.elapsed(run), budget_s), operations, False)

    def host(self, run: Run, operations: int = 1, budget_s: float = 0.04) -> Timing:
        """Seconds after which the call returns, whether or not the device is done."""
        return self.time(run, operations, budget_s)


class GpuTimer(HostTimer):
    """CUDA and ROCm alike: PyTorch gives both the same events and graphs."""

    def __init__(self, torch: Any):
        self.torch, self.cuda = torch, torch.cuda

    def elapsed(self, run: Run) -> float:
        begin, end = self.cuda.Event(enable_timing=True), self.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        self.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def time(self, run: Run, operations: int = 1, budget_s: float = 0.04, graph: bool = True) -> Timing:
        # Compiles, chooses kernels and allocates, none of which may happen during a capture.
        run()
        self.cuda.synchronize()
        replay = self._captured(run, 1) if graph else None
        call = replay or run
        call()
        once = self.elapsed(call)
        repeats = min(MOST_REPEATS, math.ceil(SHORTEST_S / once)) if once > 0 else MOST_REPEATS
        if repeats > 1:
            replay = self._captured(run, repeats) if replay else None
            call = replay or _repeated(run, repeats)
            call()
        samples = sampled(lambda: self.elapsed(call), budget_s)
        return timing(samples, operations * repeats, replay is not None)

    def host(self, run: Run, operations: int = 1, budget_s: float = 0.04) -> Timing:
        def one() -> float:
            self.cuda.synchronize()
            return HostTimer.elapsed(self, run)

        one()
        samples = sampled(one, budget_s)
        self.cuda.synchronize()
        return timing(samples, operations, False)

    def _captured(self, run: Run, repeats: int) -> Run | None:
        """None where the operation cannot be captured: it asks the host something, or the driver refuses."""
        graph = self.cuda.CUDAGraph()
        try:
            with self.cuda.graph(graph):
                _repeated(run, repeats)()
        except RuntimeError as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                # Ending the capture failed because the user ended it.
                raise KeyboardInterrupt from None
            self.cuda.synchronize()
            return None
        replay: Run = graph.replay
        return replay


def _repeated(run: Run, repeats: int) -> Run:
    def all_of_them() -> None:
        for _ in range(repeats):
            run()

    return all_of_them


@dataclass
class ProbedDevice:
    """PyTorch, the device it is to use, and the clock for it."""

    torch: Any
    name: str
    timer: HostTimer
    # The 8-bit type that the matrix units multiply, or None where they have none.
    fp8: Any = None
    compiles: bool = True
    # What could not be done as it should, other than a shape.
    notes: list[dict[str, Any]] = field(default_factory=list)

    def normal(self, *size: int, scale: float = 1.0) -> Any:
        """Random numbers: zeros would draw less power and run faster than anything real."""
        made = self.torch.randn(*size, device=self.name, dtype=self.torch.bfloat16)
        return made if scale == 1.0 else made.mul_(scale)

    def ones(self, *size: int) -> Any:
        return self.torch.ones(*size, device=self.name)

    def free_bytes(self) -> float:
        return float("inf") if self.name == "cpu" else float(self.torch.cuda.mem_get_info()[0])

    def settle(self) -> None:
        """Waits for the device, so that a fault is known where it arose, and gives memory back."""
        if self.name != "cpu":
            self.torch.cuda.synchronize()
            self.torch.cuda.empty_cache()

    def need(self, size: float, what: str) -> None:
        if size > self.free_bytes():
            raise RuntimeError(f"{what} need {size / 1e9:.1f} GB, {self.free_bytes() / 1e9:.1f} are free")

    @cached_property
    def functional(self) -> Any:
        return self.torch.nn.functional

    def fused(self, function: Callable[..., Any], *trial: Any) -> Callable[..., Any]:
        """One kernel of several small operations, as engines have it; where nothing compiles, the operations."""
        if not self.compiles:
            return function
        try:
            config = import_module("torch._dynamo").config
            for limit in ("recompile_limit", "cache_size_limit"):
                if hasattr(config, limit):
                    setattr(config, limit, VARIANTS)
            compiled: Callable[..., Any] = self.torch.compile(function, dynamic=True)
            compiled(*trial)
        except (*REFUSALS, ImportError) as error:
            self.compiles = False
            self.notes.append({"kind": "fusion", "reason": first_line(error)})
            return function
        return compiled


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:240] if text else 'no reason given'}"


def load_torch() -> Any:
    # A few small kernels compile sooner than a pool of compilers starts.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    try:
        return import_module("torch")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise BadInput(
                "the probe runs through PyTorch, which this Python lacks; install the build for your GPU (pytorch.org)"
            ) from None
        raise BadInput(f"PyTorch cannot be loaded: {first_line(error)}") from None
    except OSError as error:
        raise BadInput(f"PyTorch cannot be loaded: {first_line(error)}") from None


def open_device() -> ProbedDevice:
    torch = load_torch()
    if not torch.cuda.is_available():
        raise BadInput(f"there is nothing to probe: PyTorch {torch.__version__} sees no CUDA or ROCm GPU")
    torch.manual_seed(0)
    return ProbedDevice(torch, "cuda", GpuTimer(torch), fp8_type(torch, architecture(torch)))


def architecture(torch: Any) -> str:
    """gfx942, sm_90."""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(0)
    return f"sm_{major}{minor}"


def fp8_type(torch: Any, isa: str) -> Any:
    """CDNA 3 multiplies a dialect of its own, without negative zero and infinities."""
    return getattr(torch, "float8_e4m3fnuz" if isa.startswith("gfx94") else "float8_e4m3fn", None)


def describe(device: ProbedDevice, known: Mapping[str, float]) -> dict[str, Any]:
    """What a reader must know of the machine; `known` is the catalog's memory by accelerator."""
    torch = device.torch
    properties = torch.cuda.get_device_properties(0)
    name, memory = str(torch.cuda.get_device_name(0)), int(properties.total_memory)
    driver, power_limit_w = driver_and_power(torch, pci_address(properties))
    return {
        "device": name,
        "accelerator": guess_accelerator(name, memory, known),
        "architecture": architecture(torch),
        "memory_bytes": memory,
        "gpus": int(torch.cuda.device_count()),
        "power_limit_w": power_limit_w,
        "driver": driver,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "python": platform.python_version(),
        "host": platform.machine(),
        "fp8_dialect": str(device.fp8).rpartition("_")[2] if device.fp8 is not None else None,
    }


def words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.casefold()))


def guess_accelerator(name: str, memory_bytes: float, known: Mapping[str, float]) -> str | None:
    """The one catalog id whose words the device's name has and whose memory it has; None where that is not one."""
    said = words(name)
    fitting = []
    for id, expected in known.items():
        wanted = words(id)
        named = wanted - UNSAID <= said and wanted & OTHER_CARDS == said & OTHER_CARDS
        if named and abs(memory_bytes / expected - 1) < MEMORY_TOLERANCE:
            fitting.append(id)
    return fitting[0] if len(fitting) == 1 else None


def pci_address(properties: Any) -> str | None:
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return None
    domain, bus, slot = (int(part) for part in parts if part is not None)
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def driver_and_power(torch: Any, address: str | None) -> tuple[str | None, float | None]:
    """From the driver's own tool or files; None for what they do not tell."""
    if torch.version.hip:
        caps = glob.glob(f"/sys/bus/pci/devices/{address}/hwmon/hwmon*/power1_cap") if address else []
        watts = _number(_text(caps[0])) if caps else None
        return _text("/sys/module/amdgpu/version"), None if watts is None else watts / 1e6
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(
            [*query, *(["-i", address] if address else [])], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    lines = asked.stdout.strip().splitlines()
    if len(lines) != 1:
        return (lines[0].partition(",")[0].strip() if lines else None), None
    driver, _, watts_text = lines[0].partition(",")
    return driver.strip() or None, _number(watts_text)


def _text(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read().strip() or None
    except OSError:
        return None


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None

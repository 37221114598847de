"""Power, memory and use of the GPUs while a load runs: by the vendor's own tool here, or an exporter's page elsewhere.

nvidia-smi writes a line a second by itself; amd-smi is a Python program that is started anew for every look, so it is
asked less often. Exporters are NVIDIA's DCGM exporter and AMD's device metrics exporter.
"""

import contextlib
import json
import math
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

from crosstie.core.errors import BadInput
from crosstie.core.histogram import samples_of
from crosstie.prove.bench.server_counts import metrics_page
from crosstie.wire.address import Address

_NVIDIA = ("nvidia-smi", "--query-gpu=index,power.draw,memory.used,utilization.gpu", "--format=csv,noheader,nounits")
_AMD = ("amd-smi", "metric", "--power", "--mem-usage", "--usage", "--json")
MIB = 2**20
_AMD_EVERY_S, _PAGE_EVERY_S = 5.0, 1.0
# By name of an exporter's metric: what it is of, and what makes it watts, bytes and a share. MI200s report the average.
_METRICS = {
    "DCGM_FI_DEV_POWER_USAGE": ("power_w", 1.0),
    "DCGM_FI_DEV_FB_USED": ("memory_bytes", MIB),
    "DCGM_FI_DEV_GPU_UTIL": ("busy", 0.01),
    "gpu_average_package_power": ("power_w", 1.0),
    "gpu_package_power": ("power_w", 1.0),
    "gpu_used_vram": ("memory_bytes", MIB),
    "gpu_gfx_activity": ("busy", 0.01),
}


class GpuReading(NamedTuple):
    """Of one GPU at one moment; not a number where nobody says."""

    gpu: str
    power_w: float = math.nan
    memory_bytes: float = math.nan
    busy: float = math.nan


@dataclass(frozen=True)
class GpuUse:
    """Of one GPU over a run."""

    gpu: str
    readings: int
    power_w: float
    most_power_w: float
    most_memory_bytes: float
    busy: float


def nvidia_reading(line: str) -> GpuReading | None:
    """A line of nvidia-smi's CSV: `0, 71.93, 4, 0`; what a GPU does not tell is `[N/A]`."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 4 or not cells[0].isdigit():
        return None
    power, memory, busy = map(_number, cells[1:])
    return GpuReading(cells[0], power, memory * MIB, busy * 0.01)


def amd_readings(text: str) -> list[GpuReading]:
    """amd-smi's JSON, a list or an object around one; before it there may be warnings."""
    start = min((at for at in (text.find("["), text.find("{")) if at >= 0), default=len(text))
    try:
        said = json.loads(text[start:])
    except json.JSONDecodeError:
        return []
    rows = said.get("gpu_data", []) if isinstance(said, dict) else said
    return [
        GpuReading(
            str(row.get("gpu", "")),
            _first(row.get("power"), "socket_power", "average_socket_power", "current_socket_power"),
            _first(row.get("mem_usage"), "used_vram") * MIB,
            _first(row.get("usage"), "gfx_activity") * 0.01,
        )
        for row in rows
        if isinstance(row, dict)
    ]


def page_readings(page: str) -> list[GpuReading]:
    """An exporter's /metrics."""
    readings: dict[str, dict[str, float]] = {}
    for name, labels, value in samples_of(page):
        gpu = labels.get("gpu", labels.get("gpu_id"))
        if gpu is not None and (metric := _METRICS.get(name.removeprefix("amd_"))):
            field, factor = metric
            readings.setdefault(gpu, {})[field] = value * factor
    return [GpuReading(gpu, **fields) for gpu, fields in sorted(readings.items())]


def _first(row: Any, *names: str) -> float:
    for name in names:
        value = row.get(name) if isinstance(row, dict) else None
        value = value.get("value") if isinstance(value, dict) else value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return math.nan


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def local_tool() -> str | None:
    return next((name for name in ("nvidia-smi", "amd-smi") if shutil.which(name)), None)


class GpuWatch:
    """Reads until it is closed. `source`: nvidia-smi, amd-smi, or the address of an exporter's page."""

    def __init__(self, source: str):
        self.source = source
        self._read: list[tuple[float, GpuReading]] = []
        self._over = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        if source == "nvidia-smi":
            run = self._nvidia
        elif source == "amd-smi":
            run = self._looking(_AMD_EVERY_S, lambda: amd_readings(_printed(_AMD)))
        else:
            run = self._looking(_PAGE_EVERY_S, lambda: page_readings(_page(source)))
        self._thread = threading.Thread(target=run, daemon=True, name="gpus")

    def __enter__(self) -> "GpuWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._thread.join()

    def add(self, readings: Iterable[GpuReading], at: float | None = None) -> None:
        now = monotonic() if at is None else at
        self._read += [(now, reading) for reading in readings]

    def over(self, began: float, ended: float) -> list[GpuUse]:
        """What each GPU did between two moments of the monotonic clock."""
        by_gpu: dict[str, list[GpuReading]] = {}
        for at, reading in list(self._read):
            if began <= at <= ended:
                by_gpu.setdefault(reading.gpu, []).append(reading)
        return [
            GpuUse(gpu, len(own), *_mean_and_most(row.power_w for row in own),
                   _mean_and_most(row.memory_bytes for row in own)[1], _mean_and_most(row.busy for row in own)[0])
            for gpu, own in sorted(by_gpu.items())
        ]  # fmt: skip

    def _nvidia(self) -> None:
        with subprocess.Popen(
            [*_NVIDIA, "--loop=1"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as p:
            self._process = p
            for line in p.stdout or ():
                reading = nvidia_reading(line)
                if reading is not None:
                    self.add([reading])
                if self._over.is_set():
                    break
            p.terminate()

    def _looking(self, every_s: float, look: Callable[[], list[GpuReading]]) -> Callable[[], None]:
        def run() -> None:
            while True:
                # A look that fails is one reading less, which the count of readings shows.
                with contextlib.suppress(OSError, BadInput):
                    self.add(look())
                if self._over.wait(every_s):
                    return

        return run


def _mean_and_most(values: Iterable[float]) -> tuple[float, float]:
    known = [value for value in values if not math.isnan(value)]
    return (sum(known) / len(known), max(known)) if known else (math.nan, math.nan)


def _printed(command: tuple[str, ...]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except subprocess.TimeoutExpired:
        return ""


def check(source: str) -> None:
    """Raises where a source that was named tells nothing of any GPU."""
    if "://" in source:
        if not page_readings(_page(source)):
            known = " or ".join(name for name, (field, _) in _METRICS.items() if field == "power_w")
            raise BadInput(f"--gpu-metrics {source}: has no metric of a GPU such as {known}")
    elif source not in ("nvidia-smi", "amd-smi"):
        raise BadInput(f"--gpu-metrics {source}: is neither nvidia-smi, amd-smi nor an exporter's address")
    elif not shutil.which(source):
        raise BadInput(f"--gpu-metrics {source}: there is no such program here")


def _page(source: str) -> str:
    at = Address(source)
    return metrics_page(f"--gpu-metrics {source}", at, at.base or "/metrics")

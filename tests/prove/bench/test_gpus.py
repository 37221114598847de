"""Power and memory as the vendors' tools and exporters tell them."""

import math
import sys
from pathlib import Path

import pytest

from crosstie.core.errors import BadInput
from crosstie.prove.bench.gpus import MIB, GpuReading, GpuWatch, amd_readings, check, nvidia_reading, page_readings

AMD_LIST = """WARNING: User is missing the following required groups: render
[{"gpu": 0,
  "usage": {"gfx_activity": {"value": 87, "unit": "%"}, "umc_activity": {"value": 41, "unit": "%"}},
  "power": {"socket_power": {"value": 542, "unit": "W"}, "gfx_voltage": "N/A"},
  "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 121344, "unit": "MB"}}},
 {"gpu": 1, "usage": "N/A", "power": {"socket_power": "N/A", "average_socket_power": {"value": 90, "unit": "W"}}}]
"""
DCGM = """# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).
# TYPE DCGM_FI_DEV_POWER_USAGE gauge
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a",device="nvidia0",modelName="NVIDIA H100 80GB HBM3"} 321.5
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a"} 1024
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a"} 77
DCGM_FI_DEV_POWER_USAGE{gpu="1",UUID="GPU-b"} 100
"""
AMD_PAGE = """gpu_package_power{card_model="0xabc",gpu_id="0",hostname="a"} 612
gpu_used_vram{gpu_id="0",hostname="a"} 2048
gpu_gfx_activity{gpu_id="0",hostname="a"} 50
amd_gpu_average_package_power{gpu_id="1"} 300
"""


def about(gpu: str, *numbers: float) -> tuple[object, ...]:
    return (gpu, *map(pytest.approx, numbers))


def test_nvidia_smi() -> None:
    assert nvidia_reading("0, 71.93, 4, 3") == about("0", 71.93, 4.0 * MIB, 0.03)
    told = nvidia_reading("1, [N/A], 2048, [N/A]")
    assert told is not None
    assert math.isnan(told.power_w)
    assert told.memory_bytes == 2048 * MIB
    assert nvidia_reading("No devices were found") is None


def test_amd_smi() -> None:
    first, second = amd_readings(AMD_LIST)
    assert first == about("0", 542.0, 121344.0 * MIB, 0.87)
    assert second.power_w == 90.0
    assert math.isnan(second.busy)
    wrapped = f'{{"gpu_data": {AMD_LIST.partition(chr(10))[2]}}}'
    assert amd_readings(wrapped)[0] == first
    assert amd_readings("amd-smi: not found") == []


def test_exporters() -> None:
    first, second = page_readings(DCGM)
    assert first == about("0", 321.5, 1024.0 * MIB, 0.77)
    assert second.power_w == 100.0
    third, fourth = page_readings(AMD_PAGE)
    assert third == about("0", 612.0, 2048.0 * MIB, 0.5)
    assert fourth.power_w == 300.0


def test_readings_count_for_the_run_that_they_fall_in() -> None:
    watch = GpuWatch("nvidia-smi")
    for at, watts in ((1.0, 100.0), (2.0, 300.0), (3.0, 500.0), (9.0, 1.0)):
        watch.add([GpuReading("0", watts, watts * MIB)], at)
    (use,) = watch.over(1.5, 3.5)
    assert (use.readings, use.power_w, use.most_power_w, use.most_memory_bytes) == (2, 400.0, 500.0, 500.0 * MIB)
    assert math.isnan(use.busy)
    assert watch.over(20.0, 30.0) == []


def test_a_tool_that_writes_by_itself_is_read_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in nvidia-smi's place, which writes what that does and goes on until it is ended."""
    from tests.waiting import comes_true

    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!{sys.executable}\nimport time\nprint('0, 250.0, 100, 50', flush=True)\ntime.sleep(1e5)\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    check("nvidia-smi")
    with GpuWatch("nvidia-smi") as watch:
        comes_true(lambda: bool(watch.over(0.0, math.inf)))
    (use,) = watch.over(0.0, math.inf)
    assert use.power_w == 250.0


@pytest.mark.parametrize(
    ("source", "said"),
    [("rocm-smi", "neither nvidia-smi"), ("amd-smi", "no such program"), ("http://127.0.0.1:9/metrics", "gpu-metrics")],
)
def test_a_source_that_tells_nothing_is_refused(source: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BadInput, match=said):
        check(source)

"""Machines that nothing is wrong with, made by hand, and changes to them."""

from typing import Any

import msgspec

from crosstie.port.doctor.machine import FoundDevice, Gpu, Link, Machine

OPEN = FoundDevice(mode="660", gid=993, group="render", open=True)
SHUT = FoundDevice(mode="660", gid=993, group="render", open=False)


def healthy(vendor: str, **changes: Any) -> Machine:
    """Two GPUs, joined; fields that begin with gpu_ are those of each GPU."""
    own = {key.removeprefix("gpu_"): changes.pop(key) for key in list(changes) if key.startswith("gpu_")}
    amd = vendor == "AMD"
    gpu = Gpu(
        vendor=vendor, name="AMD Instinct MI300X" if amd else "NVIDIA H200", isa="gfx942" if amd else "sm_90",
        pci="1002:74a1" if amd else "10de:2335", compute_units=304 if amd else None, memory_bytes=192 << 30,
        used_bytes=1 << 30, compute_partition="SPX" if amd else "", memory_partition="NPS1" if amd else "",
        persistence="" if amd else "Enabled", compute_mode="" if amd else "Default",
        fabric="" if amd else "Completed", link_width=16, link_width_max=16, accelerator="mi300x" if amd else "h200",
    )  # fmt: skip
    nodes = ("/dev/kfd", "/dev/dri/renderD128") if amd else ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0")
    plain = Machine(
        taken="2026-11-16", system="Linux 6.8.0 x86_64",
        gpus=tuple(msgspec.structs.replace(gpu, bus=f"0000:0{place}:00.0", **own) for place in (1, 2)),
        links=(Link(one=0, other=1, kind="XGMI" if amd else "NV18"),), rocm="7.0.2" if amd else "",
        nvidia="" if amd else "580.95.05", cuda="" if amd else "13.0",
        packages={"torch": "2.9.0", "vllm": "0.26.0", **({"amd-aiter": "0.1.9"} if amd else {})},
        torch_build={"hip": "7.2.26015-fc0010cf6a"} if amd else {"cuda": "13.0"}, devices=dict.fromkeys(nodes, OPEN),
        cpus=64, memory_bytes=512 << 30, shm_bytes=64 << 30, limits={"memlock": -1, "nofile": 1 << 20},
        boot=("iommu=pt",), iommus=("ivhd0",), numa_nodes=2, numa_balancing=0, transparent_hugepages="madvise",
        modules=("nvidia_peermem",),
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)

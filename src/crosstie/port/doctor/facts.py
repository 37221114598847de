"""What rows of checks.toml may ask: facts of a machine, and of each of its GPUs, as words, numbers, true and false.

A fact that no source tells is absent, and keeps a row from holding; a variable that is not set is "unset".
"""

from collections.abc import Iterable, Mapping

from crosstie.port.doctor.machine import Gpu, Machine, whole
from crosstie.port.preflight.rules import Value

# Where each fact was read, for who doubts it.
PLACES = {
    "kfd": "/dev/kfd", "render": "/dev/dri", "nvidia_nodes": "/dev/nvidiactl", "uvm": "/dev/nvidia-uvm",
    "shm_mib": "/dev/shm", "memlock_mib": "ulimit -l", "nofile": "ulimit -n", "gpus": "GPUs", "gpus.rocm": "GPUs",
    "gpus.cuda": "GPUs", "discrete": "GPUs", "linked": "links", "rdma": "/sys/class/infiniband",
    "rdma_down": "/sys/class/infiniband", "pids_limit": "/sys/fs/cgroup",
    "peermem": "/proc/modules", "iommu": "/proc/cmdline", "virtual": "/proc/cmdline",
    "numa_balancing": "/proc/sys/kernel/numa_balancing", "numa_nodes": "/sys/devices/system/node",
    "transparent_hugepages": "/sys/kernel/mm/transparent_hugepage/enabled", "hugepages_percent": "/proc/meminfo",
    "container": "container", "seccomp": "/proc/self/status", "torch": "torch", "torch_release": "torch",
    "aiter": "packages", "aiter_wanted": "environment", "aiter_by": "environment", "visible_differ": "environment",
    "visible_hip": "environment", "debugging": "environment", "debug_by": "environment",
}  # fmt: skip
OF_GPU = (
    "name", "isa", "pci", "compute_partition", "memory_partition", "mig", "persistence", "compute_mode", "fabric",
    "narrow", "link_width", "link_width_max", "used_percent", "integrated", "known", "override",
)  # fmt: skip
_WAITS = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL", "AMD_SERIALIZE_COPY")
_AITER = ("VLLM_ROCM_USE_AITER", "SGLANG_USE_AITER")
_ON = ("1", "true", "True", "3")
_NO_LIMIT = 1 << 40
UNSET = "unset"


def known_facts(variables: Iterable[str] = ()) -> set[str]:
    return {*PLACES, *(f"gpu.{name}" for name in OF_GPU), *(f"env.{name}" for name in variables)}


def machine_facts(machine: Machine) -> dict[str, Value]:
    env = machine.environment
    amd, nvidia = (sum(gpu.vendor == vendor for gpu in machine.usable) for vendor in ("AMD", "NVIDIA"))
    waiting = next((name for name in _WAITS if env.get(name) in _ON), "")
    aiter = next((name for name in _AITER if env.get(name) in _ON), "")
    hip = {env[name] for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if env.get(name)}
    found: dict[str, Value | None] = {
        "kfd": _node(machine, "/dev/kfd"),
        "render": _node(machine, "/dev/dri/renderD"),
        "nvidia_nodes": _node(machine, "/dev/nvidiactl"),
        "uvm": _node(machine, "/dev/nvidia-uvm"),
        "shm_mib": None if machine.shm_bytes is None else machine.shm_bytes >> 20,
        "memlock_mib": _limit(machine.limits.get("memlock"), 20),
        "nofile": _limit(machine.limits.get("nofile"), 0),
        "gpus": amd + nvidia,
        "gpus.rocm": amd,
        "gpus.cuda": nvidia,
        "discrete": bool(machine.usable),
        "linked": any(link.is_fast for link in machine.links),
        "rdma": any(nic.up and nic.rdma for nic in machine.nics),
        "rdma_down": sum(nic.rdma and not nic.up for nic in machine.nics),
        "pids_limit": machine.pids_limit,
        "peermem": any(name in ("nvidia_peermem", "nv_peer_mem") for name in machine.modules),
        "iommu": _iommu(machine),
        # Guests see what the hypervisor shows them of it.
        "virtual": not machine.iommus,
        "numa_balancing": machine.numa_balancing,
        "numa_nodes": machine.numa_nodes,
        "transparent_hugepages": machine.transparent_hugepages or None,
        "hugepages_percent": 100 * machine.hugepages_bytes // max(machine.memory_bytes, 1),
        "container": machine.container,
        "seccomp": machine.seccomp,
        "torch": _torch(machine),
        "torch_release": machine.packages.get("torch"),
        "aiter": "amd" if "amd-aiter" in machine.packages else "other" if "aiter" in machine.packages else "none",
        "aiter_wanted": bool(aiter),
        "aiter_by": aiter,
        "visible_differ": len(hip) > 1,
        "visible_hip": bool(hip),
        "debugging": bool(waiting),
        "debug_by": waiting,
    }
    return {name: value for name, value in found.items() if value is not None}


def gpu_facts(gpu: Gpu, environment: Mapping[str, str]) -> dict[str, Value]:
    narrow = None if not gpu.link_width or not gpu.link_width_max else gpu.link_width < gpu.link_width_max
    used = None if gpu.used_bytes is None or not gpu.memory_bytes else 100 * gpu.used_bytes // gpu.memory_bytes
    override = _override(environment.get("HSA_OVERRIDE_GFX_VERSION", ""), gpu.isa)
    more = {"narrow": narrow, "used_percent": used, "known": bool(gpu.accelerator), "override": override}
    values = {name: more[name] if name in more else getattr(gpu, name) for name in OF_GPU}
    return {f"gpu.{name}": value for name, value in values.items() if value not in (None, "")}


def _override(said: str, isa: str) -> str | None:
    """9.4.2 is gfx942, 9.0.10 gfx90a: whether ROCm is told the GPU's own kind, or another."""
    if not said or not isa:
        return None
    parts = [whole(part) for part in said.split(".")]
    if len(parts) != 3 or None in parts:
        return "other"
    major, minor, stepping = (part or 0 for part in parts)
    return "same" if f"gfx{major}{minor:x}{stepping:x}" == isa else "other"


def _node(machine: Machine, start: str) -> str:
    """One that may be opened is enough: a container is given its own GPUs alone. Windows has one for all of them."""
    if (windows := machine.devices.get("/dev/dxg")) and windows.open:
        return "ok"
    found = [device for path, device in machine.devices.items() if path.startswith(start)]
    return "absent" if not found else "ok" if any(device.open for device in found) else "denied"


def _limit(value: int | None, shift: int) -> int | None:
    return None if value is None else _NO_LIMIT if value < 0 else value >> shift


def _iommu(machine: Machine) -> str:
    """By the kernel's word on the GPUs themselves, else by the boot line."""
    if not machine.iommus:
        return "off"
    if kinds := {gpu.iommu for gpu in machine.usable if gpu.iommu}:
        return "passing" if kinds == {"identity"} else "translating"
    passing = {"iommu=pt", "iommu.passthrough=1", "amd_iommu=off", "intel_iommu=off", "iommu=off"}
    return "passing" if passing & set(machine.boot) else "translating"


def _torch(machine: Machine) -> str | None:
    if "torch" not in machine.packages:
        return None
    return "rocm" if machine.torch_build.get("hip") else "cuda" if machine.torch_build.get("cuda") else "cpu"

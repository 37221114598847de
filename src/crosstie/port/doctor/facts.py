"""What rows of checks.toml may ask: facts of a machine, and of each of its GPUs, as words, numbers, true and false.

A fact that no source tells is absent, and keeps a row from holding; a variable that is not set is "unset".
"""

from collections.abc import Callable, Iterable, Mapping

from crosstie.port.doctor.machine import Gpu, Machine, whole
from crosstie.port.preflight.rules import Value

OF_GPU = (
    "name", "isa", "pci", "compute_partition", "memory_partition", "mig", "persistence", "compute_mode", "fabric",
    "narrow", "link_width", "link_width_max", "used_percent", "integrated", "known", "override",
)  # fmt: skip
_WAITS = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL", "AMD_SERIALIZE_COPY")
_AITER = ("VLLM_ROCM_USE_AITER", "SGLANG_USE_AITER")
_VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_ON = ("1", "true", "True", "3")
_NO_LIMIT = 1 << 40
UNSET = "unset"


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
    devices = [device for path, device in machine.devices.items() if path.startswith(start)]
    return "absent" if not devices else "ok" if any(device.open for device in devices) else "denied"


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


def _set_in(machine: Machine, names: Iterable[str]) -> str:
    """The first of these variables that is switched on, or nothing."""
    return next((name for name in names if machine.environment.get(name) in _ON), "")


def _visible(machine: Machine) -> set[str]:
    """The different values of the variables that both HIP and PyTorch read."""
    return {value for name in _VISIBLE if (value := machine.environment.get(name))}


def _usable(machine: Machine, vendor: str) -> int:
    return sum(gpu.vendor == vendor for gpu in machine.usable)


# Each fact of a machine: where it was read, for who doubts it, and how it follows; None where no source tells.
_FACTS: dict[str, tuple[str, Callable[[Machine], Value | None]]] = {
    "kfd": ("/dev/kfd", lambda m: _node(m, "/dev/kfd")),
    "render": ("/dev/dri", lambda m: _node(m, "/dev/dri/renderD")),
    "nvidia_nodes": ("/dev/nvidiactl", lambda m: _node(m, "/dev/nvidiactl")),
    "uvm": ("/dev/nvidia-uvm", lambda m: _node(m, "/dev/nvidia-uvm")),
    "shm_mib": ("/dev/shm", lambda m: None if m.shm_bytes is None else m.shm_bytes >> 20),
    "memlock_mib": ("ulimit -l", lambda m: _limit(m.limits.get("memlock"), 20)),
    "nofile": ("ulimit -n", lambda m: _limit(m.limits.get("nofile"), 0)),
    "gpus": ("GPUs", lambda m: _usable(m, "AMD") + _usable(m, "NVIDIA")),
    "gpus.rocm": ("GPUs", lambda m: _usable(m, "AMD")),
    "gpus.cuda": ("GPUs", lambda m: _usable(m, "NVIDIA")),
    "discrete": ("GPUs", lambda m: bool(m.usable)),
    "linked": ("links", lambda m: any(link.is_fast for link in m.links)),
    "rdma": ("/sys/class/infiniband", lambda m: any(nic.up and nic.rdma for nic in m.nics)),
    "rdma_down": ("/sys/class/infiniband", lambda m: sum(nic.rdma and not nic.up for nic in m.nics)),
    "pids_limit": ("/sys/fs/cgroup", lambda m: m.pids_limit),
    "peermem": ("/proc/modules", lambda m: not {"nvidia_peermem", "nv_peer_mem"}.isdisjoint(m.modules)),
    "iommu": ("/proc/cmdline", _iommu),
    # Guests see what the hypervisor shows them of it.
    "virtual": ("/proc/cmdline", lambda m: not m.iommus),
    "numa_balancing": ("/proc/sys/kernel/numa_balancing", lambda m: m.numa_balancing),
    "numa_nodes": ("/sys/devices/system/node", lambda m: m.numa_nodes),
    "transparent_hugepages": (
        "/sys/kernel/mm/transparent_hugepage/enabled",
        lambda m: m.transparent_hugepages or None,
    ),
    "hugepages_percent": ("/proc/meminfo", lambda m: 100 * m.hugepages_bytes // max(m.memory_bytes, 1)),
    "container": ("container", lambda m: m.container),
    "seccomp": ("/proc/self/status", lambda m: m.seccomp),
    "torch": ("torch", _torch),
    "torch_release": ("torch", lambda m: m.packages.get("torch")),
    "aiter": (
        "packages",
        lambda m: "amd" if "amd-aiter" in m.packages else "other" if "aiter" in m.packages else "none",
    ),
    "aiter_wanted": ("environment", lambda m: bool(_set_in(m, _AITER))),
    "aiter_by": ("environment", lambda m: _set_in(m, _AITER)),
    "visible_differ": ("environment", lambda m: len(_visible(m)) > 1),
    "visible_hip": ("environment", lambda m: bool(_visible(m))),
    "debugging": ("environment", lambda m: bool(_set_in(m, _WAITS))),
    "debug_by": ("environment", lambda m: _set_in(m, _WAITS)),
}


def known_facts(variables: Iterable[str] = ()) -> set[str]:
    return {*_FACTS, *(f"gpu.{name}" for name in OF_GPU), *(f"env.{name}" for name in variables)}


def place_of(fact: str) -> str:
    if fact.startswith("env."):
        return "environment"
    return "GPUs" if fact.startswith("gpu.") else _FACTS[fact][0] if fact in _FACTS else "machine"


def machine_facts(machine: Machine) -> dict[str, Value]:
    values = {name: of(machine) for name, (_, of) in _FACTS.items()}
    return {name: value for name, value in values.items() if value is not None}

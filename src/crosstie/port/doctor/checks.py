"""Rows of checks.toml against a machine: each that holds is a finding with its remedy and its source.

They ask for facts of the machine and of each of its GPUs: words, numbers, true and false. A fact that no source tells
is absent, and keeps a row from holding; a variable that is not set is "unset".
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

import msgspec

from crosstie.catalog.reading import read_record, sourced_file, table
from crosstie.core.errors import BadData
from crosstie.core.finding import Finding, Location, Severity
from crosstie.port.doctor.machine import Gpu, Machine, whole
from crosstie.port.preflight.rules import Value, conditions, covers, hold, targets

FILE = Path(__file__).parent / "data" / "checks.toml"
# Of GPUs.
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
_NAMED = re.compile(r"\{([\w.]+)\}")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    on: tuple[str, ...]
    when: dict[str, tuple[Value, ...]]
    unless: dict[str, tuple[Value, ...]] = {}
    severity: Severity
    # Facts in braces are filled in, here and in the remedy.
    what: str
    remedy: str = ""
    needs: str
    source: str
    date: str


@cache
def checks(file: Path = FILE) -> tuple[Check, ...]:
    found: list[Check] = []
    with sourced_file(file, {"check"}) as (raw, sources):
        for index, raw_check in enumerate(raw.get("check") or []):
            where = f"check[{index}]"
            entry = table(file, where, raw_check)
            known = known_facts(key[4:] for key in {**entry.get("when", {}), **entry.get("unless", {})} if _env(key))
            check = read_record(
                file, where, entry, Check, sources,
                on=targets(file, f"{where}.on", entry.get("on")),
                when=conditions(file, f"{where}.when", entry.get("when") or {}, known),
                unless=conditions(file, f"{where}.unless", entry.get("unless") or {}, known),
            )  # fmt: skip
            for name in _NAMED.findall(check.what + check.remedy + check.needs):
                if name not in known:
                    raise BadData(file, f"{check.id}.what", f"{{{name}}} is no fact")
            if check.severity != "note" and not check.remedy:
                raise BadData(file, f"{check.id}.remedy", "missing: only a note may do without")
            if any(check.id == other.id for other in found):
                raise BadData(file, check.id, "this id stands here twice")
            found.append(check)
    return tuple(found)


def _env(key: str) -> bool:
    return key.startswith("env.")


def check_findings(machine: Machine) -> list[Finding]:
    common = machine_facts(machine)
    found: dict[Finding, None] = {}
    for check in checks():
        variables = {key: machine.environment.get(key[4:], UNSET) for key in check.when if _env(key)}
        for gpu in machine.gpus:
            facts = {**common, **variables, **gpu_facts(gpu, machine.environment)}
            isa = gpu.isa or ("gfx" if gpu.vendor == "AMD" else "sm_")
            if any(covers(target, isa) for target in check.on) and hold(check.when, check.unless, facts):
                of_gpu = any(key.startswith("gpu.") for key in check.when)
                # A GPU inside the processor is the machine's fault, and no kind that a verdict is given of.
                found[_finding(check, facts, gpu.label if of_gpu and not gpu.integrated else "")] = None
    return list(found)


def _finding(check: Check, facts: Mapping[str, Value], target: str) -> Finding:
    asked = [key for key in check.when if key in facts]
    seen = ", ".join(f"{key} = {facts[key]}" for key in asked)
    first = asked[0] if asked else ""
    return Finding(
        check=check.id, severity=check.severity, what=_filled(check.what, facts), grounds="seen", target=target,
        where=Location(file=place_of(first), name=first), remedy=_filled(check.remedy, facts),
        evidence=f"{seen}; {_filled(check.needs, facts)} ({check.source}, {check.date})",
    )  # fmt: skip


def _filled(text: str, facts: Mapping[str, Value]) -> str:
    return _NAMED.sub(lambda name: str(facts.get(name[1], "not told")), text)


# Facts


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

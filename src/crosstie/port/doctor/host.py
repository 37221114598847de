"""A record in, a `Machine` out: the GPUs of both vendors, and what the kernel tells of the rest."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from crosstie.catalog.reading import read_table
from crosstie.core.errors import BadData
from crosstie.port.doctor.amd import VENDOR as AMD, amd_gpus, amd_links, amdgpu_release, rocm_release
from crosstie.port.doctor.machine import Gpu, Link, Machine, Nic, PythonFacts, whole
from crosstie.port.doctor.nvidia import VENDOR as NVIDIA, nvidia_gpus, nvidia_links, nvidia_releases
from crosstie.port.doctor.record import FACTS

DEVICES = Path(__file__).parent / "data" / "devices.csv"
_PCI = "files/sys/bus/pci/devices/"
_VENDORS = {f"0x{AMD}": "AMD", f"0x{NVIDIA}": "NVIDIA"}
# What cgroups of the first version write for no limit.
_NO_LIMIT = 1 << 60


class _Told(PythonFacts, frozen=True, kw_only=True):
    # Files by which containers give themselves away.
    container: tuple[str, ...] = ()


def machine_of(record: Mapping[str, str], name: str = "this machine") -> Machine:
    try:
        told = msgspec.json.decode(record[FACTS], type=_Told)
    except msgspec.DecodeError as error:
        raise BadData(f"{name}/{FACTS}", "", f"not what `crosstie doctor --record` writes: {error}") from None
    gpus, links = _gpus(record)
    driver, cuda = nvidia_releases(record)
    return Machine(
        **{field: getattr(told, field) for field in PythonFacts.__struct_fields__},
        gpus=gpus, links=links, driverless=_driverless(record), nics=_nics(record),
        amdgpu=amdgpu_release(record), rocm=rocm_release(record), nvidia=driver, cuda=cuda,
        cuda_toolkit=_toolkit(record),
        llama_cpp=_first(r"version: (\d+)", record.get("commands/llama-server.txt", "")),
        cpu_limit=_cpu_limit(record), memory_bytes=_meminfo(record, "MemTotal") << 10,
        memory_limit_bytes=_limit(record, "memory.max", "memory/memory.limit_in_bytes"),
        pids_limit=_limit(record, "pids.max", "pids/pids.max"),
        container=bool(told.container) or "KUBERNETES_SERVICE_HOST" in told.environment,
        seccomp=_first(r"^Seccomp:\s*(\d)", _file(record, "proc/self/status")) == "2",
        modules=tuple(line.split()[0] for line in _file(record, "proc/modules").splitlines() if line.strip()),
        boot=tuple(_file(record, "proc/cmdline").split()), iommus=tuple(_file(record, "sys/class/iommu").split()),
        numa_nodes=_span(_file(record, "sys/devices/system/node/online")),
        numa_balancing=whole(_file(record, "proc/sys/kernel/numa_balancing")),
        transparent_hugepages=_first(r"\[(\w+)\]", _file(record, "sys/kernel/mm/transparent_hugepage/enabled")),
        hugepages_bytes=_meminfo(record, "HugePages_Total") * _meminfo(record, "Hugepagesize") << 10,
        failed={_tool(key): text.strip() for key, text in record.items() if key.endswith(".error")},
        read=tuple(sorted({_tool(key) for key in record if not key.endswith(".error")})),
    )  # fmt: skip


def _tool(key: str) -> str:
    """What a text of the record was had from: a tool, the kernel's topology, /proc, /sys."""
    part, _, rest = key.partition("/")
    if part == "commands":
        return re.sub(r"(-(static|topology|version|isa|topo))?\.(json|txt|xml|csv)(\.error)?$", "", rest)
    if part == "files":
        return "kfd" if rest.startswith("sys/class/kfd/") else f"/{rest.partition('/')[0]}"
    return "python"


def _gpus(record: Mapping[str, str]) -> tuple[tuple[Gpu, ...], tuple[Link, ...]]:
    amd, nvidia = amd_gpus(record), nvidia_gpus(record)
    links = amd_links(record, amd)
    # Instances of a GPU are joined by nothing.
    more = nvidia_links(record, len(nvidia)) if not any(gpu.is_partition for gpu in nvidia) else []
    shifted = [Link(one=link.one + len(amd), other=link.other + len(amd), kind=link.kind) for link in more]
    known = [_with_bus(gpu, record) for gpu in (*amd, *nvidia)]
    # Where no tool answers, the bus still tells which GPUs there are.
    for vendor, seen in (("AMD", amd), ("NVIDIA", nvidia)):
        known += [] if seen else [_with_bus(gpu, record) for gpu in _on_bus(record, vendor)]
    return tuple(map(identified, known)), (*links, *shifted)


def _with_bus(gpu: Gpu, record: Mapping[str, str]) -> Gpu:
    """What the kernel's files of a PCI device add."""

    def said(name: str) -> str:
        # Partitions have no files of their own.
        found = record.get(f"{_PCI}{gpu.board}.0/{name}", "").strip()
        return "" if found in ("N/A", "0", "") else found

    more: dict[str, Any] = {
        "revision": gpu.revision or said("revision").removeprefix("0x"),
        "compute_partition": gpu.compute_partition or said("current_compute_partition"),
        "memory_partition": gpu.memory_partition or said("current_memory_partition"),
        "iommu": said("iommu_group/type"),
        "link_width": gpu.link_width or whole(said("current_link_width")),
        "link_width_max": gpu.link_width_max or whole(said("max_link_width")),
    }
    if not more["compute_partition"] or more["compute_partition"] == "SPX":
        more["memory_bytes"] = gpu.memory_bytes or whole(said("mem_info_vram_total"))
        more["used_bytes"] = gpu.used_bytes or whole(said("mem_info_vram_used"))
    return msgspec.structs.replace(gpu, **more)


def _on_bus(record: Mapping[str, str], vendor: str) -> list[Gpu]:
    gpus = []
    for name, bus in _pci(record).items():
        driver = bus.get("driver", "").strip()
        if driver in ("amdgpu", "nvidia") and _VENDORS.get(bus["vendor"].strip()) == vendor:
            pci = f"{bus['vendor'].strip()[2:]}:{bus.get('device', '').strip()[2:]}"
            gpus.append(Gpu(vendor=vendor, bus=name, pci=pci, seen_by=("/sys",)))
    return gpus


def _driverless(record: Mapping[str, str]) -> tuple[str, ...]:
    """Boards that an engine could use, with no driver or one for guests (vfio-pci)."""
    return tuple(
        f"{bus['vendor'].strip()[2:]}:{bus.get('device', '').strip()[2:]} at {name}"
        + (f" ({driver})" if (driver := bus.get("driver", "").strip()) else "")
        for name, bus in _pci(record).items()
        if bus["vendor"].strip() in _VENDORS and bus.get("driver", "").strip() not in ("amdgpu", "nvidia")
    )


def _pci(record: Mapping[str, str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for key, text in record.items():
        if key.startswith(_PCI):
            name, _, leaf = key.removeprefix(_PCI).partition("/")
            found.setdefault(name, {})[leaf] = text
    return {name: leaves for name, leaves in found.items() if "vendor" in leaves}


def _nics(record: Mapping[str, str]) -> tuple[Nic, ...]:
    nics = []
    for name, port in _folders(record, "infiniband"):
        rate = _first(r"^([\d.]+) Gb", record.get(f"{port}/rate", ""))
        layer, up = record.get(f"{port}/link_layer", "").strip(), "ACTIVE" in record.get(f"{port}/state", "")
        nics.append(Nic(name=name, layer=layer, up=up, rdma=True, gbit_per_s=float(rate) if rate else None))
    for name, port in _folders(record, "net"):
        # -1 where the adapter does not say.
        speed = whole(record.get(f"{port}/speed", "")) or 0
        up = record.get(f"{port}/operstate", "").strip() == "up"
        gbit_per_s = speed / 1000 if speed > 0 else None
        nics.append(Nic(name=name, layer="Ethernet", up=up, rdma=False, gbit_per_s=gbit_per_s))
    return tuple(nics)


def _folders(record: Mapping[str, str], kind: str) -> list[tuple[str, str]]:
    """Adapters of a class, or their ports, by name."""
    start = f"files/sys/class/{kind}/"
    found = sorted({str(PurePosixPath(key).parent) for key in record if key.startswith(start)})
    return [(folder.removeprefix(start).partition("/")[0], folder) for folder in found]


def _toolkit(record: Mapping[str, str]) -> str:
    try:
        raw = json.loads(_file(record, "usr/local/cuda/version.json") or "{}")
        return str(raw["cuda"]["version"])
    except (ValueError, KeyError, TypeError):
        return ""


def _file(record: Mapping[str, str], name: str) -> str:
    return record.get(f"files/{name}", "")


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else ""


def _meminfo(record: Mapping[str, str], key: str) -> int:
    return int(_first(rf"^{key}:\s+(\d+)", _file(record, "proc/meminfo")) or 0)


def _span(text: str) -> int:
    """How many: "0", "0-1", "0,2"."""
    ends = re.findall(r"([0-9]+)(?:-([0-9]+))?", text)
    return max(sum(int(last or first) - int(first) + 1 for first, last in ends), 1)


def _groups(record: Mapping[str, str], name: str) -> list[str]:
    """A limit of the container and of every group that stands above the process."""
    return [
        text.strip() for key, text in record.items() if re.fullmatch(rf"files/sys/fs/cgroup/(\d+/)?{name}", key)
    ]  # fmt: skip


def _limit(record: Mapping[str, str], name: str, before: str) -> int | None:
    said = [*_groups(record, name), _file(record, f"sys/fs/cgroup/{before}").strip()]
    found = [number for text in said if (number := whole(text)) is not None and 0 <= number < _NO_LIMIT]
    return min(found, default=None)


def _cpu_limit(record: Mapping[str, str]) -> float | None:
    said = [text.split() for text in _groups(record, "cpu.max")]
    said.append([_file(record, f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period")])
    quotas = [[whole(text) or 0 for text in pair] for pair in said]
    return min((pair[0] / pair[1] for pair in quotas if len(pair) == 2 and min(pair) > 0), default=None)


# Which accelerator of the catalog a device is, by its PCI id: tools spell names in many ways, ids in one


@cache
def known_devices() -> tuple[dict[str, str], ...]:
    return tuple(row for _, row in read_table(DEVICES, ("pci", "revision", "compute_units", "accelerator", "source")))


def identified(gpu: Gpu) -> Gpu:
    found = [row for row in known_devices() if row["pci"] == gpu.pci and _is(gpu, row)]
    return msgspec.structs.replace(gpu, accelerator=found[0]["accelerator"]) if len(found) == 1 else gpu


def _is(gpu: Gpu, row: dict[str, str]) -> bool:
    """Cards of one chip differ by revision, which rocminfo does not print, and by compute units, which it does."""
    if not row["revision"]:
        return True
    if gpu.compute_units is not None:
        return str(gpu.compute_units) == row["compute_units"]
    return gpu.revision == row["revision"]

"""AMD's GPUs as amd-smi, rocminfo and the driver's files tell of them.

Programs see what the driver's topology lists, partition by partition, so that comes first; rocminfo lists the same,
and amd-smi adds names and modes. amd-smi gives each partition the memory of the whole GPU (ROCm issue 4750), so its
figure counts last.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from crosstie.port.doctor.machine import Gpu, Link, whole

VENDOR = "1002"
_NODES = "files/sys/class/kfd/kfd/topology/nodes/"
# Kinds of link and of memory in the topology: uapi/linux/kfd_sysfs.h.
_KINDS = {2: "PCIE", 11: "XGMI"}
_VIDEO_MEMORY = (1, 2)
_UNSAID = ("", "N/A")
# What a board is split into, by the devices that it shows.
_SPLITS = {2: "DPX", 3: "TPX", 4: "QPX", 6: "CPX", 8: "CPX"}


def amd_gpus(record: Mapping[str, str]) -> list[Gpu]:
    lists = {"kfd": _kfd(record), "rocminfo": _rocminfo(record), "amd-smi": _amd_smi(record)}
    first = next((name for name, gpus in lists.items() if gpus), None)
    if first is None:
        return []
    return [_filled(gpu, first, place, lists) for place, gpu in enumerate(lists[first])]


def _filled(gpu: Gpu, first: str, place: int, lists: Mapping[str, list[Gpu]]) -> Gpu:
    """What the first source leaves out, by the others: the same place where lists are as long, else the same board."""
    seen = [first]
    for name, gpus in lists.items():
        if name == first or not gpus:
            continue
        same = [other for other in gpus if other.board == gpu.board]
        if len(gpus) == len(lists[first]) and gpus[place].bus == gpu.bus:
            same = [gpus[place]]
        if not same:
            continue
        seen.append(name)
        more = {
            field: getattr(same[0], field)
            for field in Gpu.__struct_fields__
            if getattr(gpu, field) in ("", None, False) and field != "accelerator"
        }
        # A card's own name, not the family's.
        if "Graphics" in gpu.name and same[0].name:
            more["name"] = same[0].name
        gpu = msgspec.structs.replace(gpu, **more)
    return msgspec.structs.replace(gpu, seen_by=tuple(seen))


def _kfd(record: Mapping[str, str]) -> list[Gpu]:
    gpus = [
        Gpu(
            vendor="AMD", bus=_bus_of(node.get("location_id", 0), node.get("domain", 0)),
            isa=_isa(node["gfx_target_version"]), pci=f"{VENDOR}:{node.get('device_id', 0):04x}",
            compute_units=node["simd_count"] // max(node.get("simd_per_cu", 1), 1),
            memory_bytes=_bank_bytes(record, name) or None,
        )
        for name, node in _gpu_nodes(record)
    ]  # fmt: skip
    boards = Counter(gpu.board for gpu in gpus)
    return [msgspec.structs.replace(gpu, compute_partition=_SPLITS.get(boards[gpu.board], "")) for gpu in gpus]


def _gpu_nodes(record: Mapping[str, str]) -> list[tuple[str, dict[str, int]]]:
    """Nodes that compute, in the order of their numbers; those of processors have no SIMDs."""
    names = {name.removeprefix(_NODES).partition("/")[0] for name in record if name.startswith(_NODES)}
    nodes = [
        (name, _properties(record.get(f"{_NODES}{name}/properties", "")))
        for name in sorted(names, key=lambda name: whole(name) or 0)
    ]
    return [(name, node) for name, node in nodes if node.get("simd_count") and node.get("gfx_target_version")]


def _properties(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}


def _bank_bytes(record: Mapping[str, str], node: str) -> int:
    start = f"{_NODES}{node}/mem_banks/"
    banks = [_properties(text) for name, text in record.items() if name.startswith(start)]
    return sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _VIDEO_MEMORY)


def _isa(version: int) -> str:
    """90402 is gfx942, 90010 gfx90a, 120001 gfx1201."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _bus_of(location: int, domain: int = 0) -> str:
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def amd_links(record: Mapping[str, str], gpus: list[Gpu]) -> list[Link]:
    nodes = [name for name, _ in _gpu_nodes(record)]
    found: dict[tuple[int, int], str] = {}
    if nodes and len(nodes) == len(gpus):
        for name, text in record.items():
            if name.startswith(_NODES) and re.search(r"/(io|p2p)_links/", name):
                link = _properties(text)
                ends = [str(link.get(end, "")) for end in ("node_from", "node_to")]
                if all(end in nodes for end in ends):
                    one, other = sorted(nodes.index(end) for end in ends)
                    kind = _KINDS.get(link.get("type", 0), "other")
                    found.setdefault((one, other), kind)
                    if kind == "XGMI":
                        found[one, other] = kind
    else:
        places = {gpu.bus: place for place, gpu in enumerate(gpus)}
        for row in _entries(record.get("commands/amd-smi-topology.json")):
            for said in row.get("links") or []:
                place = [places[bus] for end in (row, said) if (bus := _bus_text(end.get("bdf"))) in places]
                if len(place) == 2:
                    found[min(place), max(place)] = str(said.get("link_type", "other"))
    return [Link(one=one, other=other, kind=kind) for (one, other), kind in sorted(found.items()) if one != other]


def _amd_smi(record: Mapping[str, str]) -> list[Gpu]:
    gpus = []
    for entry in _entries(record.get("commands/amd-smi-static.json")):
        asic, bus, board, split = (_table(entry, key) for key in ("asic", "bus", "board", "partition"))
        # Newer releases put a family's name into market_name, and the card's own into product_name.
        name = next((said for said in (_said(asic, "market_name"), _said(board, "product_name")) if said), "")
        if "Graphics" in name:
            name = _said(board, "product_name") or name
        gpus.append(
            Gpu(
                vendor="AMD", name=name, bus=_bus_text(bus.get("bdf")), isa=_said(asic, "target_graphics_version"),
                pci=f"{VENDOR}:{_said(asic, 'device_id').lower().removeprefix('0x')}",
                revision=_said(asic, "rev_id").lower().removeprefix("0x"),
                compute_units=whole(asic.get("num_compute_units")),
                memory_bytes=_vram_bytes(_table(entry, "vram")),
                compute_partition=_said(split, "accelerator_partition") or _said(split, "compute_partition"),
                memory_partition=_said(split, "memory_partition"),
            )
        )  # fmt: skip
    return gpus


def _entries(text: str | None) -> list[dict[str, Any]]:
    """A list of GPUs, or since ROCm 7 an object that has it under gpu_data; Python's warnings may stand before it."""
    if not text:
        return []
    begin = re.search(r"^[\[{]", text, re.MULTILINE)
    try:
        raw = json.loads(text[begin.start() :]) if begin else []
    except ValueError:
        return []
    listed = raw.get("gpu_data", []) if isinstance(raw, dict) else raw
    return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []


def _table(entry: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = entry.get(key)
    return found if isinstance(found, dict) else {}


def _said(entry: Mapping[str, Any], key: str) -> str:
    found = str(entry.get(key, "")).strip()
    return "" if found in _UNSAID else found


def _vram_bytes(vram: Mapping[str, Any]) -> int | None:
    """`size` has a value and a unit; before ROCm 6.2 it was vram_size_mb. MB are MiB there."""
    size = vram.get("size", vram.get("vram_size_mb"))
    number = whole(size.get("value") if isinstance(size, dict) else str(size).removesuffix(" MB"))
    return None if number is None else number << 20


def _bus_text(value: object) -> str:
    return str(value or "").lower()


def _rocminfo(record: Mapping[str, str]) -> list[Gpu]:
    gpus = []
    for text in re.split(r"^\*+\s*\nAgent \d+\s*\n\*+\s*$", record.get("commands/rocminfo.txt", ""), flags=re.M)[1:]:
        said = dict(_lines(text))
        if said.get("Device Type") != "GPU":
            continue
        chip = re.search(r"\(0x([0-9a-f]+)\)", said.get("Chip ID", ""))
        pool = re.search(r"FLAGS: COARSE GRAINED\s*\n\s*Size:\s+(\d+)", text)
        gpus.append(
            Gpu(
                vendor="AMD", name=said.get("Marketing Name", ""), bus=_bus_of(whole(said.get("BDFID")) or 0),
                isa=said.get("Name", ""), pci=f"{VENDOR}:{chip[1]:0>4}" if chip else "",
                compute_units=whole(said.get("Compute Unit")),
                memory_bytes=int(pool[1]) << 10 if pool else None,
                integrated="APU" in said.get("Memory Properties", ""),
            )
        )  # fmt: skip
    return gpus


def _lines(text: str) -> Iterable[tuple[str, str]]:
    """An agent's own lines, two blanks in; those of its pools and instruction sets stand deeper."""
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and line.startswith("  ") and not line.startswith("   "):
            yield name.strip(), value.strip()


def rocm_release(record: Mapping[str, str]) -> str:
    """The installed release: its own file, else what amd-smi says."""
    stated = record.get("files/opt/rocm/.info/version", "").strip().partition("-")[0]
    if stated:
        return stated
    try:
        raw = json.loads(record.get("commands/amd-smi-version.json", ""))
    except ValueError:
        return ""
    entry = raw[0] if isinstance(raw, list) and raw else raw
    return _said(entry, "rocm_version") if isinstance(entry, dict) else ""


def amdgpu_release(record: Mapping[str, str]) -> str:
    """The driver's own number; one that came with the kernel has none."""
    stated = record.get("files/sys/module/amdgpu/version", "").strip()
    drivers = [_said(_table(e, "driver"), "version") for e in _entries(record.get("commands/amd-smi-static.json"))]
    return stated or next((driver for driver in drivers if driver), "")

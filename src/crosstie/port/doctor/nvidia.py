"""NVIDIA's GPUs as nvidia-smi tells of them: its XML, its list of compute capabilities, its table of links."""

import re
from collections.abc import Mapping
from xml.etree import ElementTree

import msgspec

from crosstie.port.doctor.machine import Gpu, Link, whole

VENDOR = "10de"
_UNSAID = ("N/A", "[N/A]", "None", "Requested functionality has been deprecated")
_ESCAPES = re.compile(r"\x1b\[[\d;]*m")


def nvidia_gpus(record: Mapping[str, str]) -> list[Gpu]:
    root = _xml(record)
    if root is None:
        return []
    isas = dict(_isas(record.get("commands/nvidia-smi-isa.csv", "")))
    return [instance for gpu in root.findall("gpu") for instance in _instances(gpu, _gpu(gpu, isas))]


def _instances(gpu: ElementTree.Element, card: Gpu) -> list[Gpu]:
    """What programs can open: the GPU, or with MIG on what it is split into."""
    return [
        msgspec.structs.replace(
            card, memory_bytes=_mib(element.findtext("fb_memory_usage/total") or ""),
            used_bytes=_mib(element.findtext("fb_memory_usage/used") or ""),
            compute_units=whole(element.findtext("device_attributes/shared/multiprocessor_count")),
        )
        for element in gpu.findall("mig_devices/mig_device")
    ] or [card]  # fmt: skip


def _xml(record: Mapping[str, str]) -> ElementTree.Element | None:
    text = record.get("commands/nvidia-smi.xml", "")
    # Of a tool that was run here, or of a record that the user names; entities are refused all the same.
    if not text.strip() or "<!ENTITY" in text:
        return None
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return None


def _gpu(gpu: ElementTree.Element, isas: Mapping[str, str]) -> Gpu:
    def said(path: str) -> str:
        found = (gpu.findtext(path) or "").strip()
        return "" if found in _UNSAID else found

    bus = _bus(gpu.get("id", "") or said("pci/pci_bus_id"))
    device = said("pci/pci_device_id").lower().removeprefix("0x")
    return Gpu(
        vendor="NVIDIA", name=said("product_name"), bus=bus, isa=isas.get(bus, ""),
        # The device stands before the vendor: 233510DE.
        pci=f"{VENDOR}:{device[:4]}" if len(device) == 8 else "",
        memory_bytes=_mib(said("fb_memory_usage/total")), used_bytes=_mib(said("fb_memory_usage/used")),
        mig=said("mig_mode/current_mig"), persistence=said("persistence_mode"), compute_mode=said("compute_mode"),
        fabric=said("fabric/state"), link_width=_lanes(said("pci/pci_gpu_link_info/link_widths/current_link_width")),
        link_width_max=_lanes(said("pci/pci_gpu_link_info/link_widths/max_link_width")), seen_by=("nvidia-smi",),
    )  # fmt: skip


def _isas(text: str) -> list[tuple[str, str]]:
    found = re.findall(r"^([0-9A-Fa-f:.]+), *(\d+)\.(\d+)\s*$", text, re.MULTILINE)
    return [(_bus(bus), f"sm_{major}{minor}") for bus, major, minor in found]


def _bus(text: str) -> str:
    """00000000:17:00.0 as the kernel writes it, 0000:17:00.0."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""


def _mib(text: str) -> int | None:
    match = re.fullmatch(r"(\d+) MiB", text)
    return int(match[1]) << 20 if match else None


def _lanes(text: str) -> int | None:
    match = re.fullmatch(r"(\d+)x", text)
    return int(match[1]) if match else None


def nvidia_links(record: Mapping[str, str], count: int) -> list[Link]:
    """The upper half of the table that `nvidia-smi topo -m` prints, of its GPUs alone."""
    links = []
    for line in _ESCAPES.sub("", record.get("commands/nvidia-smi-topo.txt", "")).splitlines():
        words = line.split()
        row = re.fullmatch(r"GPU(\d+)", words[0]) if words else None
        kinds = words[1 : count + 1]
        # The line of headings begins with GPU0 as well.
        if row and int(row[1]) < len(kinds) == count and kinds[one := int(row[1])] == "X":
            links += [
                Link(one=one, other=other, kind=kind) for other, kind in enumerate(kinds) if other > one and kind != "X"
            ]
    return links


def nvidia_releases(record: Mapping[str, str]) -> tuple[str, str]:
    """The driver's release, and the newest CUDA that it speaks."""
    root = _xml(record)
    if root is not None:
        return (root.findtext("driver_version") or "").strip(), (root.findtext("cuda_version") or "").strip()
    match = re.search(r"Kernel Module[^\n]*?(\d+\.\d+[.\d]*)", record.get("files/proc/driver/nvidia/version", ""))
    return (match[1] if match else ""), ""

"""What tools print and the kernel tells becomes a machine. Each text says whether it was seen on a real one."""

import json
from pathlib import Path

import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData
from crosstie.port.doctor.checks import machine_facts
from crosstie.port.doctor.host import known_devices, machine_of
from crosstie.port.doctor.machine import Machine
from crosstie.port.doctor.record import Record, read_record

DATA = Path(__file__).parent / "data"
MACHINES = Path(__file__).parents[3] / "examples" / "machines"
FACTS = {"facts.json": "{}"}

# Made by the format in ROCm/amdsmi@0ceca28f amdsmi_cli/amdsmi_commands.py (a list), with values of MI300X that public
# issues show.
STATIC = {
    "gpu": 0,
    "asic": {
        "market_name": "AMD Instinct MI300X", "vendor_id": "0x1002", "device_id": "0x74a1", "rev_id": "0x00",
        "asic_serial": "0xA", "oam_id": 6, "num_compute_units": 304, "target_graphics_version": "gfx942",
    },
    "bus": {"bdf": "0000:05:00.0", "max_pcie_width": 16, "max_pcie_speed": {"value": 32, "unit": "GT/s"}},
    "driver": {"name": "amdgpu", "version": "6.12.12"},
    "board": {"model_number": "102-G30211-0C", "product_name": "AMD Instinct MI300X OAM"},
    "partition": {"compute_partition": "SPX", "memory_partition": "NPS1", "partition_id": 0},
    "vram": {"type": "HBM3", "vendor": "N/A", "size": {"value": 196592, "unit": "MB"}},
}  # fmt: skip
# The first lines of what an RX 7800 XT printed (nathaninline/ajean issue 39, 2026-08-21): warnings of Python before
# an object, and its GPUs under gpu_data. Cut after the bus; the serial number is made up.
RX_7800_XT = """/usr/lib/python3.14/site-packages/amdsmi/amdsmi_interface.py:3569: SyntaxWarning: 'return' in a 'finally' block
  return return_dictionary
{
    "gpu_data": [
        {
            "gpu": 0,
            "asic": {
                "market_name": "AMD Radeon RX 7800 XT",
                "vendor_id": "0x1002",
                "device_id": "0x747e",
                "rev_id": "0xc8",
                "asic_serial": "0x0",
                "oam_id": "N/A",
                "num_compute_units": 60,
                "target_graphics_version": "gfx1101"
            },
            "bus": {
                "bdf": "0000:03:00.0",
                "max_pcie_width": 16
            }
        }
    ]
}
"""
# Of ROCm/rocm-systems docs (amd-smi changelog, "new format"), made complete: two GPUs that xGMI joins.
TOPOLOGY = [
    {"gpu": place, "bdf": own, "links": [
        {"gpu": place, "bdf": own, "weight": 0, "link_status": "ENABLED", "link_type": "SELF"},
        {"gpu": 1 - place, "bdf": other, "weight": 15, "link_status": "ENABLED", "link_type": "XGMI", "num_hops": 1},
    ]}
    for place, (own, other) in enumerate([("0000:05:00.0", "0000:15:00.0"), ("0000:15:00.0", "0000:05:00.0")])
]  # fmt: skip
# Seen: influxdata/telegraf testdata/a100-sxm4-v12.xml and 3090-v13.xml (MIT), cut to what is read.
NVIDIA = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
    <driver_version>535.54.03</driver_version>
    <cuda_version>12.2</cuda_version>
    <attached_gpus>2</attached_gpus>
    <gpu id="00000000:01:00.0">
        <product_name>NVIDIA A100-SXM4-80GB</product_name>
        <persistence_mode>Disabled</persistence_mode>
        <mig_mode><current_mig>Enabled</current_mig><pending_mig>Enabled</pending_mig></mig_mode>
        <mig_devices>
            <mig_device>
                <device_attributes><shared><multiprocessor_count>14</multiprocessor_count></shared></device_attributes>
                <fb_memory_usage><total>19968 MiB</total><used>12 MiB</used></fb_memory_usage>
            </mig_device>
        </mig_devices>
        <pci>
            <pci_device_id>20B210DE</pci_device_id>
            <pci_gpu_link_info><link_widths>
                <max_link_width>16x</max_link_width><current_link_width>8x</current_link_width>
            </link_widths></pci_gpu_link_info>
        </pci>
        <fb_memory_usage><total>81920 MiB</total><used>50 MiB</used></fb_memory_usage>
        <compute_mode>Default</compute_mode>
        <fabric><state>N/A</state></fabric>
    </gpu>
    <gpu id="00000000:09:00.0">
        <product_name>NVIDIA GeForce RTX 3090</product_name>
        <persistence_mode>Enabled</persistence_mode>
        <mig_mode><current_mig>N/A</current_mig></mig_mode>
        <pci><pci_device_id>220410DE</pci_device_id></pci>
        <fb_memory_usage><total>24576 MiB</total><used>7 MiB</used></fb_memory_usage>
    </gpu>
</nvidia_smi_log>
"""
# Seen: vllm-project/vllm issue 13855 (nvidia-smi topo -m of a DGX), cut to three GPUs and one adapter; the escapes
# are those that a terminal gets.
TOPO = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tPXB\t0-55,112-167\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tNODE\t0-55,112-167\t0\t\tN/A\n"
    "GPU2\tNV18\tSYS\t X \tNODE\t0-55,112-167\t0\t\tN/A\n"
    "NIC0\tPXB\tNODE\tNODE\t X \n\nLegend:\n  X    = Self\n"
)


def read(record: Record) -> Machine:
    return machine_of({**FACTS, **record})


def amd_smi(static: object, topology: object = ()) -> Machine:
    return read({
        "commands/amd-smi-static.json": static if isinstance(static, str) else json.dumps(static),
        "commands/amd-smi-topology.json": json.dumps(topology),
    })  # fmt: skip


def test_amd_smi_lists_gpus() -> None:
    (gpu,) = amd_smi([STATIC]).gpus
    assert (gpu.name, gpu.isa, gpu.pci, gpu.accelerator) == ("AMD Instinct MI300X", "gfx942", "1002:74a1", "mi300x")
    assert (gpu.compute_units, gpu.memory_bytes) == (304, 196592 << 20)
    assert (gpu.compute_partition, gpu.memory_partition, gpu.is_partition) == ("SPX", "NPS1", False)
    assert amd_smi([STATIC]).amdgpu == "6.12.12"


def test_newer_amd_smi_wraps_its_list_and_may_warn_before_it() -> None:
    (gpu,) = amd_smi(RX_7800_XT).gpus
    assert (gpu.name, gpu.isa, gpu.pci, gpu.revision) == ("AMD Radeon RX 7800 XT", "gfx1101", "1002:747e", "c8")
    assert gpu.accelerator == ""


def test_a_family_s_name_gives_way_to_the_board_s() -> None:
    generic = {**STATIC, "asic": {**STATIC["asic"], "market_name": "AMD Radeon Graphics"}}  # type: ignore[dict-item]
    assert amd_smi([generic]).gpus[0].name == "AMD Instinct MI300X OAM"


@pytest.mark.parametrize("text", ["", "not JSON", "{}", "[]", "null", '{"gpu_data": 3}', '[3, "x"]', "[{}]"])
def test_what_amd_smi_should_not_print_is_no_crash(text: str) -> None:
    assert len(amd_smi(text).gpus) <= 1


def test_links_are_those_of_amd_smi_where_the_driver_s_files_are_not_seen() -> None:
    second = {**STATIC, "gpu": 1, "bus": {"bdf": "0000:15:00.0"}}
    assert [(link.one, link.other, link.kind) for link in amd_smi([STATIC, second], TOPOLOGY).links] == [(0, 1, "XGMI")]


def test_rocminfo_tells_cards_and_the_processor_s_own_gpu() -> None:
    machine = machine_of(read_record(MACHINES / "rx-9070-xt"))
    card, own = machine.gpus
    assert (card.name, card.isa, card.accelerator) == ("AMD Radeon RX 9070 XT", "gfx1201", "rx-9070-xt")
    assert (card.bus, card.compute_units, card.memory_bytes) == ("0000:03:00.0", 64, 16695296 << 10)
    assert (own.isa, own.integrated, own.bus) == ("gfx1036", True, "0000:7b:00.0")
    assert machine.usable == (card,)
    assert machine.rocm == "7.0.1"


def test_the_driver_s_topology_tells_partitions() -> None:
    gpus = read(json.loads((DATA / "kfd-mi300x-cpx.json").read_text())).gpus
    assert len(gpus) == 8
    assert {(gpu.isa, gpu.pci, gpu.compute_units, gpu.accelerator) for gpu in gpus} == {
        ("gfx942", "1002:74a1", 38, "mi300x")
    }
    assert {(gpu.board, gpu.compute_partition, gpu.is_partition) for gpu in gpus} == {("0000:05:00", "CPX", True)}
    assert [gpu.bus for gpu in gpus[:2]] == ["0000:05:00.0", "0000:05:00.1"]


def test_the_driver_s_topology_tells_links() -> None:
    machine = read(json.loads((DATA / "kfd-mi210.json").read_text()))
    assert [gpu.isa for gpu in machine.gpus] == ["gfx90a"] * 8
    fast = {(link.one, link.other) for link in machine.links if link.is_fast}
    # Two hives of four, and PCIe between them.
    assert fast == {(a, b) for a in range(8) for b in range(a + 1, 8) if a // 4 == b // 4}
    assert len(machine.links) == 28


def test_memory_of_a_partition_is_the_topology_s_not_amd_smi_s() -> None:
    record = json.loads((DATA / "kfd-mi300x-cpx.json").read_text())
    # Seen: ROCm/legacy-rocm-build issue 4750.
    bank = "heap_type 1\nsize_in_bytes 25767706624\nflags 0\nwidth 8192\nmem_clk_max 1300\n"
    record |= {f"files/sys/class/kfd/kfd/topology/nodes/{n}/mem_banks/0/properties": bank for n in range(2, 10)}
    gpus = read({**record, "commands/amd-smi-static.json": json.dumps([STATIC])}).gpus
    assert {gpu.memory_bytes for gpu in gpus} == {25767706624}
    assert {gpu.name for gpu in gpus} == {"AMD Instinct MI300X"}
    assert gpus[0].seen_by == ("kfd", "amd-smi")


def test_nvidia_smi_lists_gpus() -> None:
    isas = "00000000:01:00.0, 8.0\n00000000:09:00.0, 8.6\n"
    machine = read({"commands/nvidia-smi.xml": NVIDIA, "commands/nvidia-smi-isa.csv": isas})
    a100, rtx = machine.gpus
    assert (a100.accelerator, a100.isa, a100.mig, a100.is_partition) == ("a100-80gb", "sm_80", "Enabled", True)
    assert (a100.memory_bytes, a100.used_bytes, a100.compute_units) == (19968 << 20, 12 << 20, 14)
    assert (a100.link_width, a100.link_width_max, a100.fabric) == (8, 16, "")
    assert (rtx.accelerator, rtx.isa, rtx.mig, rtx.bus) == ("rtx-3090", "sm_86", "", "0000:09:00.0")
    assert (machine.nvidia, machine.cuda) == ("535.54.03", "12.2")


@pytest.mark.parametrize("text", ["", "<a>", "Failed to initialize NVML", "<!DOCTYPE x [<!ENTITY a 'b'>]><x>&a;</x>"])
def test_what_nvidia_smi_should_not_print_is_no_crash(text: str) -> None:
    assert read({"commands/nvidia-smi.xml": text}).gpus == ()


def test_the_table_of_links_is_read_whatever_stands_beside_it() -> None:
    three = NVIDIA.replace("Enabled</current_mig>", "Disabled</current_mig>").replace(
        "</nvidia_smi_log>", '<gpu id="00000000:0A:00.0"></gpu></nvidia_smi_log>'
    )
    machine = read({"commands/nvidia-smi.xml": three, "commands/nvidia-smi-topo.txt": TOPO})
    assert [(link.one, link.other, link.kind) for link in machine.links] == [
        (0, 1, "NV18"), (0, 2, "NV18"), (1, 2, "SYS"),
    ]  # fmt: skip


def bus(name: str, vendor: str, device: str, driver: str, **more: str) -> Record:
    start = f"files/sys/bus/pci/devices/{name}"
    leaves = {"vendor": vendor, "device": device, "class": "0x030000", **more, **({"driver": driver} if driver else {})}
    return {f"{start}/{leaf}": f"{text}\n" for leaf, text in leaves.items()}


def test_the_bus_tells_gpus_where_no_tool_does() -> None:
    (gpu,) = read(
        bus("0000:03:00.0", "0x1002", "0x744c", "amdgpu", revision="0xcc", mem_info_vram_total="21458059264")
    ).gpus
    assert (gpu.accelerator, gpu.memory_bytes, gpu.seen_by) == ("rx-7900-xt", 21458059264, ("/sys",))


def test_the_kernel_s_word_on_the_iommu_goes_before_the_boot_line() -> None:
    for kind, told in (("identity", "passing"), ("DMA-FQ", "translating")):
        group = {"iommu_group/type": kind}
        record = bus("0000:03:00.0", "0x1002", "0x74a1", "amdgpu", **group)
        assert machine_facts(read({**record, "files/sys/class/iommu": "ivhd0"}))["iommu"] == told


def test_a_board_without_its_driver_is_told_and_is_no_gpu() -> None:
    machine = read(
        {**bus("0000:01:00.0", "0x10de", "0x2335", "vfio-pci"), **bus("0000:00:02.0", "0x8086", "0x1", "i915")}
    )
    assert machine.gpus == ()
    assert machine.driverless == ("10de:2335 at 0000:01:00.0 (vfio-pci)",)


def test_the_kernel_s_files_add_partitions_and_lanes() -> None:
    more = bus(
        "0000:05:00.0",
        "0x1002",
        "0x74a1",
        "amdgpu",
        current_memory_partition="NPS4",
        current_link_width="8",
        max_link_width="16",
    )
    static = {**STATIC, "partition": "N/A"}
    (gpu,) = read({**more, "commands/amd-smi-static.json": json.dumps([static])}).gpus
    assert (gpu.memory_partition, gpu.link_width, gpu.link_width_max) == ("NPS4", 8, 16)


def test_the_tightest_limit_of_the_groups_above_counts() -> None:
    machine = read({
        "files/proc/meminfo": "MemTotal:       1000 kB\nHugePages_Total:      10\nHugepagesize:       2048 kB\n",
        "files/sys/fs/cgroup/0/memory.max": "max\n",
        "files/sys/fs/cgroup/1/memory.max": "4096\n",
        "files/sys/fs/cgroup/cpu.max": "150000 100000\n",
        "files/sys/fs/cgroup/0/cpu.max": "max 100000\n",
        "files/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "files/sys/fs/cgroup/pids.max": "max\n",
    })  # fmt: skip
    assert (machine.memory_limit_bytes, machine.cpu_limit, machine.pids_limit) == (4096, 1.5, None)
    assert (machine.memory_bytes, machine.hugepages_bytes) == (1000 << 10, 20480 << 10)


@pytest.mark.parametrize("said", ["\u00b2", "0.", "-", "max max", "0-", "9" * 40, ""])
def test_numbers_that_are_none_tell_nothing(said: str) -> None:
    machine = read({
        "files/sys/fs/cgroup/memory.max": said, "files/sys/fs/cgroup/cpu.max": said,
        "files/sys/devices/system/node/online": said, "files/proc/sys/kernel/numa_balancing": said,
        "files/sys/class/net/eth0/speed": said,
    })  # fmt: skip
    assert (machine.memory_limit_bytes, machine.cpu_limit, machine.numa_balancing) == (None, None, None)


def test_adapters_iommus_and_nodes() -> None:
    port = "files/sys/class/infiniband/mlx5_0/ports/1"
    machine = read({
        f"{port}/state": "4: ACTIVE\n", f"{port}/rate": "400 Gb/sec (4X NDR)\n", f"{port}/link_layer": "InfiniBand\n",
        "files/sys/class/net/eth0/operstate": "up\n", "files/sys/class/net/eth0/speed": "25000\n",
            "files/sys/class/iommu": "ivhd0\nivhd1", "files/sys/devices/system/node/online": "0-1\n",
        "files/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "files/proc/self/status": "Seccomp:\t2\n", "files/proc/modules": "nvidia_peermem 16384 0 - Live\n",
        "commands/llama-server.txt": "version: 10586 (b21e4de7)\nbuilt with cc for x86_64-linux-gnu\n",
        "commands/rocminfo.txt.error": "exit status 1: Unable to open /dev/kfd",
    })  # fmt: skip
    nic, plain = machine.nics
    assert (nic.name, nic.up, nic.gbit_per_s, nic.layer, nic.rdma) == ("mlx5_0", True, 400.0, "InfiniBand", True)
    assert (plain.name, plain.up, plain.gbit_per_s, plain.rdma) == ("eth0", True, 25.0, False)
    assert (machine.iommus, machine.numa_nodes, machine.transparent_hugepages) == (("ivhd0", "ivhd1"), 2, "madvise")
    assert (machine.seccomp, machine.modules, machine.llama_cpp) == (True, ("nvidia_peermem",), "10586")
    assert machine.failed == {"rocminfo": "exit status 1: Unable to open /dev/kfd"}


def test_a_real_h200_is_read() -> None:
    machine = machine_of(read_record(MACHINES / "h200"))
    (gpu,) = machine.gpus
    assert (gpu.name, gpu.isa, gpu.accelerator, gpu.bus) == ("NVIDIA H200", "sm_90", "h200", "0000:00:06.0")
    assert (gpu.memory_bytes, gpu.mig, gpu.compute_mode) == (143771 << 20, "Disabled", "Default")
    assert (machine.nvidia, machine.cuda, machine.torch_build) == ("580.159.04", "13.0", {"cuda": "13.0"})
    assert (machine.packages["torch"], machine.packages["triton"]) == ("2.11.0", "3.6.0")
    assert (machine.cpus, machine.container, machine.memory_limit_bytes) == (16, True, 128 << 30)
    assert (machine.links, machine.driverless, machine.failed) == ((), (), {})
    assert machine.modules == ("nvidia_uvm", "nvidia")


def test_every_device_that_is_listed_is_in_the_catalog() -> None:
    catalog = Catalog([])
    for row in known_devices():
        accelerator = catalog.accelerator(row["accelerator"])
        assert row["source"]
        assert accelerator.vendor == ("AMD" if row["pci"].startswith("1002:") else "NVIDIA")
        if row["compute_units"]:
            assert accelerator.chip.compute_units.value == float(row["compute_units"])
    assert {row["accelerator"] for row in known_devices()} == set(catalog.accelerators)


def test_facts_that_are_none_are_refused() -> None:
    with pytest.raises(BadData, match="not what `crosstie doctor --record` writes"):
        machine_of({"facts.json": '{"cpus": "many"}'}, "mine")

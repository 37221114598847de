"""A machine as engines will find it: GPUs and what joins them, drivers, software, limits, variables."""

import re
from collections import Counter
from pathlib import Path

import msgspec
from packaging.version import InvalidVersion, Version

from crosstie.core.errors import BadInput


def whole(said: object) -> int | None:
    """The whole number that a tool or a file gives, if it is one."""
    text = str(said).strip()
    return int(text) if re.fullmatch(r"-?[0-9]{1,20}", text) else None


def release_of(text: str) -> Version | None:
    """7.0.51831-a3e329ad8 names a build behind the release; None for what is no release."""
    try:
        return Version(text.partition("-")[0])
    except InvalidVersion:
        return None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One device that a program can open: a whole GPU, or a partition of one."""

    vendor: str
    name: str = ""
    # As in 0000:83:00.0; partitions of a GPU differ in the last figure, or not at all.
    bus: str = ""
    # gfx942, sm_90; "" where no source tells.
    isa: str = ""
    # vendor:device, and the revision that tells cards of one chip apart.
    pci: str = ""
    revision: str = ""
    compute_units: int | None = None
    memory_bytes: int | None = None
    used_bytes: int | None = None
    compute_partition: str = ""
    memory_partition: str = ""
    mig: str = ""
    persistence: str = ""
    compute_mode: str = ""
    fabric: str = ""
    # How the kernel maps what it sends: identity, DMA, DMA-FQ; "" where that is not told.
    iommu: str = ""
    link_width: int | None = None
    link_width_max: int | None = None
    # Whether it is part of the processor and takes its memory.
    integrated: bool = False
    # The catalog's name for the whole GPU; "" where it has none.
    accelerator: str = ""
    # Which of the sources told of it.
    seen_by: tuple[str, ...] = ()

    @property
    def is_partition(self) -> bool:
        return self.compute_partition not in ("", "SPX", "N/A") or self.mig == "Enabled"

    @property
    def board(self) -> str:
        return self.bus.rpartition(".")[0]

    @property
    def label(self) -> str:
        return self.accelerator or self.isa or self.name or self.pci


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What joins two GPUs, by their places in the list: XGMI, NV18, PCIE, PIX, SYS."""

    one: int
    other: int
    kind: str

    @property
    def is_fast(self) -> bool:
        return self.kind == "XGMI" or self.kind.startswith("NV")


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    # InfiniBand, Ethernet.
    layer: str
    up: bool
    rdma: bool
    gbit_per_s: float | None = None


class FoundDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A file under /dev, and whether who asks may open it."""

    mode: str
    gid: int
    group: str
    open: bool


class PythonFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What Python tells of a machine; a record that was made by hand may have less."""

    taken: str = ""
    system: str = ""
    packages: dict[str, str] = {}
    # What PyTorch was built for: cuda or hip, with the release.
    torch_build: dict[str, str] = {}
    # By engine: each requirement that it declares, with the release that is installed, "" for none.
    requires: dict[str, dict[str, str]] = {}
    # What requirements may depend on, of the interpreter that engines run in.
    markers: dict[str, str] = {}
    # By engine: what it said when it was imported, "" where all was well.
    imports: dict[str, str] = {}
    environment: dict[str, str] = {}
    devices: dict[str, FoundDevice] = {}
    uid: int = 0
    groups: tuple[int, ...] = ()
    cpus: int = 0
    shm_bytes: int | None = None
    # Soft limits; -1 is none.
    limits: dict[str, int] = {}


class Machine(PythonFacts, frozen=True, kw_only=True):
    gpus: tuple[Gpu, ...] = ()
    # GPUs on the PCI bus that no driver has taken, as vendor:device at bus.
    driverless: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    nics: tuple[Nic, ...] = ()
    amdgpu: str = ""
    rocm: str = ""
    nvidia: str = ""
    # The newest CUDA that the driver speaks, and the toolkit that is installed.
    cuda: str = ""
    cuda_toolkit: str = ""
    llama_cpp: str = ""
    # What the container or the job may use, where it is limited.
    cpu_limit: float | None = None
    memory_bytes: int = 0
    memory_limit_bytes: int | None = None
    pids_limit: int | None = None
    container: bool = False
    seccomp: bool = False
    modules: tuple[str, ...] = ()
    boot: tuple[str, ...] = ()
    # Names of the IOMMUs that are switched on.
    iommus: tuple[str, ...] = ()
    numa_nodes: int = 1
    numa_balancing: int | None = None
    transparent_hugepages: str = ""
    hugepages_bytes: int = 0
    # Tools that are there and failed, with what they said.
    failed: dict[str, str] = {}
    # Sources that told something.
    read: tuple[str, ...] = ()

    @property
    def usable(self) -> tuple[Gpu, ...]:
        """Without those inside the processor, which engines should not take for one."""
        return tuple(gpu for gpu in self.gpus if not gpu.integrated)

    @property
    def kinds(self) -> dict[str, list[Gpu]]:
        """Those that are alike, by what they are called."""
        found: dict[str, list[Gpu]] = {}
        for gpu in self.usable:
            found.setdefault(gpu.label, []).append(gpu)
        return found

    @property
    def cpus_allowed(self) -> float:
        return min(self.cpus, self.cpu_limit or self.cpus)

    @property
    def memory_allowed(self) -> int:
        return min(self.memory_bytes, self.memory_limit_bytes or self.memory_bytes)


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    """What is read again of the document that `crosstie doctor --json` writes."""

    machine: Machine


def gpus_of(file: Path) -> dict[str, int]:
    """Accelerators that an engine could use on the machine of doctor's document, and how many of each."""
    try:
        machine = msgspec.json.decode(file.read_bytes(), type=_Document).machine
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: no document of `crosstie doctor --json`: {error}") from None
    return dict(Counter(gpu.accelerator for gpu in machine.usable if gpu.accelerator))

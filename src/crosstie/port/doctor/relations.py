"""What no single fact shows: drivers against builds, releases against each other, variables against the GPUs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import cast

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import read_records, sourced_file
from crosstie.core.figures import gigabytes, plural
from crosstie.core.finding import Finding, Location, Severity
from crosstie.port.doctor.machine import Machine, release_of, whole
from crosstie.port.doctor.record import NO_ANSWER
from crosstie.port.preflight.engine import EngineRelease
from crosstie.port.preflight.matrix import EngineBuild, builds
from crosstie.port.preflight.variables import variables

STACKS = Path(__file__).parent / "data" / "stacks.toml"
# AMD's packages of the driver are numbered from 30 on since ROCm 7; the module has the kernel's number.
_FIRST_PACKAGE = 30
_TOOLS = {"rocminfo": "AMD", "amd-smi": "AMD", "nvidia-smi": "NVIDIA"}
_VISIBLE = {
    "AMD": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "NVIDIA": ("CUDA_VISIBLE_DEVICES",),
}
_LINKS = {"mesh": "xGMI", "switch": "NVLink"}
_COMPATIBILITY = "NVIDIA, CUDA Compatibility, minor version compatibility, 2026-09-09"
_PROCESSES = "vLLM documentation, configuration/optimization: CPU resources for GPU deployments, as of 0.20, 2026-05-14"


def relation_findings(machine: Machine, catalog: Catalog, engines: Sequence[EngineRelease]) -> list[Finding]:
    return [
        *_found(machine), *_tools(machine), *_visible(machine), *_mixed(machine), *_links(machine, catalog),
        *_driver(machine), *_rocm(machine), *_stacks(machine),
        *(one for engine in engines for one in _release(machine, engine)),
        *_requirements(machine), *_imports(machine), *_variables(machine, engines),
        *_processors(machine), *_host_memory(machine),
    ]  # fmt: skip


def _finding(
    check: str, severity: Severity, what: str, file: str, evidence: str, remedy: str = "", target: str = ""
) -> Finding:
    return Finding(
        check=check, severity=severity, what=what, where=Location(file=file), evidence=evidence, remedy=remedy,
        grounds="seen", target=target,
    )  # fmt: skip


def _found(machine: Machine) -> Iterable[Finding]:
    for board in machine.driverless:
        yield _finding(
            "driver", "error", f"GPU {board}: on the PCI bus, and neither amdgpu nor nvidia has it",
            "/sys/bus/pci/devices", "no driver of its vendor is bound to it",
            "Install and load the vendor's driver; a GPU that is bound to vfio-pci belongs to a virtual machine.",
        )  # fmt: skip
    if not machine.usable and not machine.driverless:
        yield _finding(
            "no-gpu", "error", "no GPU that an engine could use is seen", "GPUs",
            f"sources that told something: {', '.join(machine.read)}",
            "In a container: --device /dev/kfd --device /dev/dri (AMD), --gpus all (NVIDIA). On the host: lspci shows "
            "whether there is one.",
        )  # fmt: skip


def _tools(machine: Machine) -> Iterable[Finding]:
    """An image may carry the tool of a vendor whose GPUs are not there; then it may fail."""
    vendors = {gpu.vendor for gpu in machine.gpus}
    for tool, said in machine.failed.items():
        vendor = _TOOLS.get(tool)
        if vendor is None:
            continue
        meant = vendor in vendors or not vendors
        yield _finding(
            "tool-failed", "error" if meant else "note", f"{tool} fails: {said}", tool, said,
            "What it says; mostly the driver is not loaded, or is of another release than the tool." if meant else "",
        )  # fmt: skip


def _visible(machine: Machine) -> Iterable[Finding]:
    for vendor, names in _VISIBLE.items():
        total = sum(gpu.vendor == vendor for gpu in machine.gpus)
        for name in names if total else ():
            said = machine.environment.get(name)
            # vLLM takes an empty one for unset on ROCm; CUDA hides every GPU.
            if said is None or (said == "" and vendor == "AMD"):
                continue
            shown, wrong = _counted(said, total)
            evidence = f"{name}={said}; {plural(total, 'GPU')} of {vendor}"
            if not shown:
                what = f"{name}={said} hides every GPU"
            elif wrong:
                what = f"{name}={said}: there is no GPU {wrong}, and what comes after it is hidden"
            else:
                if shown < total:
                    yield _finding("visible", "note", f"{name} shows {shown} of {total} GPUs", "environment", evidence)
                continue
            yield _finding(
                "visible", "error", what, "environment", evidence, f"unset {name}, or numbers from 0 to {total - 1}"
            )


def _counted(said: str, total: int) -> tuple[int, str]:
    """How many of them are shown, and the first number that names none. UUIDs are taken at their word."""
    shown = 0
    for one in (part.strip() for part in said.split(",")):
        if (number := whole(one)) is not None and not 0 <= number < total:
            return shown, one
        if not one:
            return shown, ""
        shown += 1
    return shown, ""


def _mixed(machine: Machine) -> Iterable[Finding]:
    kinds = Counter(gpu.label for gpu in machine.usable)
    if len(kinds) > 1:
        told = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        yield _finding(
            "mixed", "note", f"GPUs of several kinds ({told}): an engine splits a model over one kind", "GPUs", told
        )


def _links(machine: Machine, catalog: Catalog) -> Iterable[Finding]:
    """Boards that are sold joined, and are not."""
    whole = [(place, gpu) for place, gpu in enumerate(machine.gpus) if gpu.accelerator and not gpu.is_partition]
    for name in dict.fromkeys(gpu.accelerator for _, gpu in whole):
        technology = _LINKS.get(catalog.accelerator(name).scale_up.topology.value)
        places = [place for place, gpu in whole if gpu.accelerator == name]
        told = [link for link in machine.links if link.one in places and link.other in places]
        slow = [link for link in told if not link.is_fast]
        if technology and slow:
            pairs = ", ".join(f"{link.one}-{link.other} ({link.kind})" for link in slow[:6])
            yield _finding(
                "links", "slow", f"{len(slow)} of {plural(len(told), 'pair')} of GPUs have no {technology} between "
                f"them: {pairs}{', ...' if len(slow) > 6 else ''}", "links",
                f"the catalog's {name} is joined by {technology}", "amd-smi xgmi or nvidia-smi nvlink -s shows which "
                "links are down; a reset of the GPUs, fabric manager, or the vendor. Or split over those that are "
                "joined (HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES).", name,
            )  # fmt: skip


def _driver(machine: Machine) -> Iterable[Finding]:
    built, spoken = release_of(machine.torch_build.get("cuda", "")), release_of(machine.cuda)
    if built is None or spoken is None or built.release[:2] <= spoken.release[:2]:
        return
    over = built.major > spoken.major
    told = f"PyTorch is built for CUDA {built}, driver {machine.nvidia} speaks up to {spoken}"
    yield _finding(
        "cuda-driver", "error" if over else "note",
        f"{told}: it will not start" if over else f"{told}: runs, without what is new in {built}", "nvidia-smi",
        f"{told} ({_COMPATIBILITY})",
        f"A driver that speaks CUDA {built}, its cuda-compat package (data-centre GPUs), or PyTorch for CUDA "
        f"{spoken.major}." if over else "",
    )  # fmt: skip


def _rocm(machine: Machine) -> Iterable[Finding]:
    built, installed = release_of(machine.torch_build.get("hip", "")), release_of(machine.rocm)
    if built and installed and built.major != installed.major:
        told = f"PyTorch is built for ROCm {built.major}.{built.minor}, ROCm {installed} is installed"
        yield _finding(
            "rocm-release", "unknown", f"{told}: libraries of both may be loaded into one process", "/opt/rocm", told,
            f"PyTorch for ROCm {installed.major}, or a ROCm {built.major} beside it; the engine's image has one.",
        )  # fmt: skip


def _requirements(machine: Machine) -> Iterable[Finding]:
    """What an engine declares that it needs: it may die without at its start or under its first load. One that can be
    imported may also run without: vLLM 0.24.0 has died for want of one, and served with thirteen missing."""
    for engine, declared in machine.requires.items():
        lacking = "unknown" if machine.imports.get(engine) == "" else "error"
        wanted = [(text, has) for text, has in declared.items() if _is_meant(text, machine)]
        for severity, said, some, remedy in (
            (lacking, "not installed", [text for text, has in wanted if not has], "Install"),
            ("unknown", "of another release", [f"{text} (here {has})" for text, has in wanted if has and not
             _satisfies(text, has)], "Reinstall"),
        ):  # fmt: skip
            if some:
                names = ", ".join(one.partition(";")[0].strip() if not one.endswith(")") else one for one in some)
                yield _finding(
                    "requirements", cast(Severity, severity), f"{engine} {machine.packages.get(engine, '')} declares "
                    f"{plural(len(some), 'requirement')} that {'is' if len(some) == 1 else 'are'} {said}: {names}",
                    "packages", f"the metadata of {engine}", f"{remedy} {engine} with its requirements: pip check "
                    "shows what is left; the engine's image has all of them.",
                )  # fmt: skip


def _requirement(text: str) -> Requirement | None:
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def _is_meant(text: str, machine: Machine) -> bool:
    found = _requirement(text)
    return found is not None and (found.marker is None or found.marker.evaluate({**machine.markers, "extra": ""}))


def _satisfies(text: str, has: str) -> bool:
    requirement = _requirement(text)
    try:
        return requirement is None or requirement.specifier.contains(Version(has), prereleases=True)
    except InvalidVersion:
        # A build of one's own.
        return True


def _imports(machine: Machine) -> Iterable[Finding]:
    for engine, said in machine.imports.items():
        if said:
            slow = said.startswith(NO_ANSWER)
            yield _finding(
                "import", "unknown" if slow else "error", f"import {engine}: {said}", "packages",
                f"tried in a process of its own, with the Python that has {engine}",
                f"Try it by hand: python -c 'import {engine}'." if slow else
                f"Install what is missing, or {engine} of a release that goes with what is here.",
            )  # fmt: skip


def _release(machine: Machine, engine: EngineRelease) -> Iterable[Finding]:
    """An engine against what its project builds that release on, and against what preflight has read."""
    if engine.version > engine.newest:
        yield _finding(
            "engine-unread", "unknown", f"{engine} is newer than what preflight's rules were read in "
            f"({engine.newest})", "packages", f"installed: {engine}", f"{engine.name}=={engine.newest}, or try it on "
            "one GPU first; `crosstie catalog update` may have newer rules.",
        )  # fmt: skip
    build = _build(engine)
    for vendor, key, wanted in (("AMD", "hip", build.rocm), ("NVIDIA", "cuda", build.cuda)) if build else ():
        assert build
        has, asked = release_of(machine.torch_build.get(key, "")), release_of(wanted)
        if not any(gpu.vendor == vendor for gpu in machine.gpus) or has is None or asked is None:
            continue
        # CUDA keeps what is built for one of its majors running; ROCm promises that for none.
        same = has.major == asked.major if key == "cuda" else has.release[:2] == asked.release[:2]
        if not same:
            name, image = ("ROCm", build.rocm_image) if key == "hip" else ("CUDA", build.cuda_image)
            yield _finding(
                "engine-build", "unknown", f"{engine.name} {build.version} is built on {name} {wanted}, PyTorch here "
                f"on {has.major}.{has.minor}: nobody has read or tried that pair", "packages",
                f"{build.source}, of {build.released}",
                f"The image {image}." if image else f"PyTorch for {name} {wanted}.",
            )  # fmt: skip


def _build(engine: EngineRelease) -> EngineBuild | None:
    """Of its own release, or of the newest before it whose build files were read."""
    found = [build for build in builds() if build.engine == engine.name and Version(build.version) <= engine.version]
    return next((build for build in found if build.rocm or build.cuda), None)


def _processors(machine: Machine) -> Iterable[Finding]:
    gpus = len(machine.usable)
    needed, has = gpus + 2, machine.cpus_allowed
    if gpus and 0 < has < needed:
        limit = f", limited from {machine.cpus}" if machine.cpu_limit and machine.cpu_limit < machine.cpus else ""
        yield _finding(
            "processors", "slow", f"{has:g} CPUs for {plural(gpus, 'GPU')}: a vLLM over all of them has {needed} busy "
            "processes, and a scheduler that waits for a core leaves GPUs idle", "/sys/fs/cgroup",
            f"{has:g} CPUs may be used{limit} ({_PROCESSES})",
            f"At least {needed} physical cores: --cpus (Docker), resources.limits.cpu (Kubernetes), --cpus-per-task "
            "(Slurm).",
        )  # fmt: skip


def _host_memory(machine: Machine) -> Iterable[Finding]:
    largest = max((gpu.memory_bytes or 0 for gpu in machine.usable), default=0)
    if not 0 < machine.memory_allowed < largest:
        return
    limited = machine.memory_allowed < machine.memory_bytes
    whose = "the container may use" if limited else "the host has"
    yield _finding(
        "host-memory", "setting" if limited else "note", f"{whose} {gigabytes(machine.memory_allowed)} of memory, less "
        f"than one GPU has ({gigabytes(largest)})" + (": loading a model that fills it may be killed" if limited else
        ": a model that fills it does not stay in the page cache, and loads slowly each time"),
        "/sys/fs/cgroup" if limited else "/proc/meminfo",
        f"limit {machine.memory_limit_bytes or 'none'}, memory {machine.memory_bytes} bytes",
        "A higher --memory (Docker) or resources.limits.memory (Kubernetes); page cache counts, and pinned buffers and "
        "offloaded caches come on top." if limited else "",
    )  # fmt: skip


def _variables(machine: Machine, engines: Iterable[EngineRelease]) -> list[Finding]:
    """Those that are set, and that the engines do not read, any more or at all."""
    return [
        Finding(
            check="variable", severity="setting", where=Location(file="environment", name=name), grounds="read",
            what=f"{name}={value} does nothing: {fault}",
            evidence=f"{engine}: {known.source}, {known.date}",
            remedy=f"{known.instead[name]} on the engine's command line" if name in known.instead else f"unset {name}",
        )
        for engine in engines
        if (known := variables(engine.name)) is not None
        for name, value in machine.environment.items()
        if name in known.last and (fault := known.fault(name, engine.version))
    ]  # fmt: skip


# The ROCm, driver and firmware that a chip needs at least, against those that the machine has


class ChipStack(msgspec.Struct, frozen=True, kw_only=True):
    """What these accelerators need at least; "" where the source says nothing of it."""

    accelerators: tuple[str, ...]
    rocm: str = ""
    amdgpu: str = ""
    module: str = ""
    firmware: str = ""
    source: str
    date: str


@cache
def chip_stacks(file: Path = STACKS) -> tuple[ChipStack, ...]:
    with sourced_file(file, {"chip"}) as (raw, sources):
        return read_records(file, "chip", raw.get("chip"), ChipStack, sources)


def _stacks(machine: Machine) -> Iterator[Finding]:
    for label, gpus in machine.kinds.items():
        for row in chip_stacks():
            if gpus[0].accelerator in row.accelerators:
                yield from _of_rocm(machine, row, label, gpus[0].isa)
                yield from _of_driver(machine, row, label)


def _of_rocm(machine: Machine, row: ChipStack, label: str, isa: str) -> Iterator[Finding]:
    """PyTorch brings libraries of the ROCm that it is built for; the installed ones count where it brings none."""
    built, installed = release_of(machine.torch_build.get("hip", "")), release_of(machine.rocm)
    has, whose = (built, f"PyTorch is built for ROCm {built}") if built else (installed, f"ROCm {installed} is here")
    if row.rocm and has and has < Version(row.rocm):
        yield _of_stack(
            row, label, "chip-rocm", f"{label} needs ROCm {row.rocm} or newer, and {whose}: its libraries have no "
            f"kernels for {isa or 'this chip'}", "/opt/rocm",
            f"ROCm {row.rocm} or newer with an engine that is built for it: the engines' own images have both.",
        )  # fmt: skip
    elif row.rocm and built and installed and installed < Version(row.rocm):
        yield _of_stack(
            row, label, "chip-rocm", f"{label} needs ROCm {row.rocm} or newer, and {installed} is installed; PyTorch "
            f"brings {built}", "/opt/rocm", f"ROCm {row.rocm} or newer, so that what PyTorch does not bring goes with "
            "it.", severe=False,
        )  # fmt: skip


def _of_driver(machine: Machine, row: ChipStack, label: str) -> Iterator[Finding]:
    has = release_of(machine.amdgpu)
    wanted = "" if has is None else row.amdgpu if has.major >= _FIRST_PACKAGE else row.module
    if not wanted or has is None or has >= Version(wanted):
        return
    module = f" (the module says {row.module})" if row.module else ""
    firmware = f" Its firmware: PLDM bundle {row.firmware} or newer, from the server's maker." if row.firmware else ""
    yield _of_stack(
        row, label, "chip-driver", f"{label} needs AMD's driver {row.amdgpu} or newer{module}, and {has} is loaded",
        "/sys/module/amdgpu/version", f"amdgpu {row.amdgpu} or newer on the host; a container has the host's."
        + firmware,
    )  # fmt: skip


def _of_stack(
    row: ChipStack, label: str, check: str, what: str, file: str, remedy: str, *, severe: bool = True
) -> Finding:
    return Finding(
        check=check, severity="error" if severe else "setting", what=what, where=Location(file=file), grounds="seen",
        evidence=f"{row.source}, {row.date}", remedy=remedy, target=label,
    )  # fmt: skip

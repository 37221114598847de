"""What no single fact shows: drivers against builds, releases against each other, variables against the GPUs.

What is said of each stands in data/relations.toml; what a chip needs at least in data/stacks.toml.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import read_records, sourced_file
from crosstie.core.figures import gigabytes, plural
from crosstie.core.finding import Finding, Location
from crosstie.port.doctor.machine import Machine, release_of, whole
from crosstie.port.doctor.record import NO_ANSWER
from crosstie.port.preflight.engine import EngineRelease
from crosstie.port.preflight.matrix import EngineBuild, builds
from crosstie.port.preflight.phrases import told
from crosstie.port.preflight.variables import variables

_DATA = Path(__file__).parent / "data"
# AMD's packages of the driver are numbered from 30 on since ROCm 7; the module has the kernel's number.
_FIRST_PACKAGE = 30
_TOOLS = {"rocminfo": "AMD", "amd-smi": "AMD", "nvidia-smi": "NVIDIA"}
_VISIBLE = {
    "AMD": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "NVIDIA": ("CUDA_VISIBLE_DEVICES",),
}
_LINKS = {"mesh": "xGMI", "switch": "NVLink"}


def _told(row: str, target: str = "", **facts: object) -> Finding:
    return told(row, None, target, by=_DATA / "relations.toml", **facts)


def relation_findings(machine: Machine, catalog: Catalog, engines: Sequence[EngineRelease]) -> list[Finding]:
    return [
        *_found(machine), *_tools(machine), *_visible(machine), *_mixed(machine), *_links(machine, catalog),
        *_driver(machine), *_rocm(machine), *_stacks(machine),
        *(one for engine in engines for one in _release(machine, engine)),
        *_requirements(machine), *_imports(machine),
        *_processors(machine), *_host_memory(machine), *_variables(machine, engines),
    ]  # fmt: skip


def _found(machine: Machine) -> Iterator[Finding]:
    for board in machine.driverless:
        yield _told("driver", board=board)
    if not machine.usable and not machine.driverless:
        yield _told("no-gpu", read=", ".join(machine.read))


def _tools(machine: Machine) -> Iterator[Finding]:
    """An image may carry the tool of a vendor whose GPUs are not there; then it may fail."""
    vendors = {gpu.vendor for gpu in machine.gpus}
    for tool, said in machine.failed.items():
        if (vendor := _TOOLS.get(tool)) is not None:
            meant = vendor in vendors or not vendors
            yield _told("tool-failed" if meant else "tool-of-no-use", tool=tool, said=said)


def _visible(machine: Machine) -> Iterator[Finding]:
    for vendor, names in _VISIBLE.items():
        total = sum(gpu.vendor == vendor for gpu in machine.gpus)
        for name in names if total else ():
            said = machine.environment.get(name)
            # vLLM takes an empty one for unset on ROCm; CUDA hides every GPU.
            if said is None or (said == "" and vendor == "AMD"):
                continue
            shown, wrong = _counted(said, total)
            if wrong or shown < total:
                yield _told(
                    "visible-none" if not shown else "visible-wrong" if wrong else "visible", name=name, said=said,
                    vendor=vendor, gpus=plural(total, "GPU"), total=total, last=total - 1, shown=shown, wrong=wrong,
                )  # fmt: skip


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


def _mixed(machine: Machine) -> Iterator[Finding]:
    if len(machine.kinds) > 1:
        yield _told("mixed", kinds=", ".join(f"{len(gpus)} x {kind}" for kind, gpus in machine.kinds.items()))


def _links(machine: Machine, catalog: Catalog) -> Iterator[Finding]:
    """Boards that are sold joined, and are not."""
    whole = [(place, gpu) for place, gpu in enumerate(machine.gpus) if gpu.accelerator and not gpu.is_partition]
    for name in dict.fromkeys(gpu.accelerator for _, gpu in whole):
        technology = _LINKS.get(catalog.accelerator(name).scale_up.topology.value)
        places = [place for place, gpu in whole if gpu.accelerator == name]
        told = [link for link in machine.links if link.one in places and link.other in places]
        slow = [link for link in told if not link.is_fast]
        if technology and slow:
            pairs = ", ".join(f"{link.one}-{link.other} ({link.kind})" for link in slow[:6])
            yield _told(
                "links", name, name=name, technology=technology, slow=len(slow), told=plural(len(told), "pair"),
                pairs=pairs + (", ..." if len(slow) > 6 else ""),
            )  # fmt: skip


def _driver(machine: Machine) -> Iterator[Finding]:
    built, spoken = release_of(machine.torch_build.get("cuda", "")), release_of(machine.cuda)
    if built is None or spoken is None or built.release[:2] <= spoken.release[:2]:
        return
    row = "cuda-driver" if built.major > spoken.major else "cuda-driver-minor"
    yield _told(row, built=built, driver=machine.nvidia, spoken=spoken, major=spoken.major)


def _rocm(machine: Machine) -> Iterator[Finding]:
    built, installed = release_of(machine.torch_build.get("hip", "")), release_of(machine.rocm)
    if built and installed and built.major != installed.major:
        yield _told(
            "rocm-release", built=f"{built.major}.{built.minor}", installed=installed, built_major=built.major,
            installed_major=installed.major,
        )  # fmt: skip


def _requirements(machine: Machine) -> Iterator[Finding]:
    """What an engine declares that it needs."""
    for engine, declared in machine.requires.items():
        imported = machine.imports.get(engine) == ""
        wanted = [(text, has) for text, has in declared.items() if _is_meant(text, machine)]
        other = [f"{text} (here {has})" for text, has in wanted if has and not _satisfies(text, has)]
        for row, some in (
            ("requirements-imported" if imported else "requirements", [text for text, has in wanted if not has]),
            ("requirements-of-another-release", other),
        ):
            if some:
                yield _told(
                    row, engine=f"{engine} {machine.packages.get(engine, '')}", name=engine,
                    count=plural(len(some), "requirement"), are=f"that {'is' if len(some) == 1 else 'are'}",
                    names=", ".join(one if one.endswith(")") else one.partition(";")[0].strip() for one in some),
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


def _imports(machine: Machine) -> Iterator[Finding]:
    for engine, said in machine.imports.items():
        if said:
            yield _told("import-slow" if said.startswith(NO_ANSWER) else "import", engine=engine, said=said)


def _release(machine: Machine, engine: EngineRelease) -> Iterator[Finding]:
    """An engine against what its project builds that release on, and against what preflight has read."""
    if engine.version > engine.newest:
        yield _told("engine-unread", engine=engine, name=engine.name, newest=engine.newest)
    build = _build(engine)
    if build is None:
        return
    for vendor, key, platform, wanted, image in (
        ("AMD", "hip", "ROCm", build.rocm, build.rocm_image),
        ("NVIDIA", "cuda", "CUDA", build.cuda, build.cuda_image),
    ):
        has, asked = release_of(machine.torch_build.get(key, "")), release_of(wanted)
        if not any(gpu.vendor == vendor for gpu in machine.gpus) or has is None or asked is None:
            continue
        # CUDA keeps what is built for one of its majors running; ROCm promises that for none.
        same = has.major == asked.major if key == "cuda" else has.release[:2] == asked.release[:2]
        if not same:
            yield _told(
                "engine-build", name=engine.name, version=build.version, platform=platform, wanted=wanted,
                has=f"{has.major}.{has.minor}", source=build.source, released=build.released,
                cure=f"The image {image}." if image else f"PyTorch for {platform} {wanted}.",
            )  # fmt: skip


def _build(engine: EngineRelease) -> EngineBuild | None:
    """Of its own release, or of the newest before it whose build files were read."""
    found = [build for build in builds() if build.engine == engine.name and Version(build.version) <= engine.version]
    return next((build for build in found if build.rocm or build.cuda), None)


def _processors(machine: Machine) -> Iterator[Finding]:
    gpus = len(machine.usable)
    needed, has = gpus + 2, machine.cpus_allowed
    if gpus and 0 < has < needed:
        limit = f", limited from {machine.cpus}" if machine.cpu_limit and machine.cpu_limit < machine.cpus else ""
        yield _told("processors", has=f"{has:g}", gpus=plural(gpus, "GPU"), needed=needed, limit=limit)


def _host_memory(machine: Machine) -> Iterator[Finding]:
    largest = max((gpu.memory_bytes or 0 for gpu in machine.usable), default=0)
    if 0 < machine.memory_allowed < largest:
        limited = machine.memory_allowed < machine.memory_bytes
        yield _told(
            "host-memory-limited" if limited else "host-memory", memory=gigabytes(machine.memory_allowed),
            largest=gigabytes(largest), limit=machine.memory_limit_bytes or "none", bytes=machine.memory_bytes,
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


class ChipStack(msgspec.Struct, frozen=True, kw_only=True):
    """The ROCm, driver and firmware that these accelerators need at least; "" where the source says nothing of it."""

    accelerators: tuple[str, ...]
    rocm: str = ""
    amdgpu: str = ""
    module: str = ""
    firmware: str = ""
    source: str
    date: str


@cache
def chip_stacks() -> tuple[ChipStack, ...]:
    file = _DATA / "stacks.toml"
    with sourced_file(file, {"chip"}) as (raw, sources):
        return read_records(file, "chip", raw.get("chip"), ChipStack, sources)


def _stacks(machine: Machine) -> Iterator[Finding]:
    for chip, gpus in machine.kinds.items():
        for row in chip_stacks():
            if gpus[0].accelerator in row.accelerators:
                yield from _of_rocm(machine, row, chip, gpus[0].isa)
                yield from _of_driver(machine, row, chip)


def _of_rocm(machine: Machine, row: ChipStack, chip: str, isa: str) -> Iterator[Finding]:
    """PyTorch brings libraries of the ROCm that it is built for; the installed ones count where it brings none."""
    built, installed = release_of(machine.torch_build.get("hip", "")), release_of(machine.rocm)
    has, whose = (built, f"PyTorch is built for ROCm {built}") if built else (installed, f"ROCm {installed} is here")
    source = f"{row.source}, {row.date}"
    if row.rocm and has and has < Version(row.rocm):
        yield _told("chip-rocm", chip, chip=chip, rocm=row.rocm, whose=whose, isa=isa or "this chip", source=source)
    elif row.rocm and built and installed and installed < Version(row.rocm):
        yield _told(
            "chip-rocm-brought", chip, chip=chip, rocm=row.rocm, installed=installed, built=built, source=source
        )


def _of_driver(machine: Machine, row: ChipStack, chip: str) -> Iterator[Finding]:
    has = release_of(machine.amdgpu)
    wanted = "" if has is None else row.amdgpu if has.major >= _FIRST_PACKAGE else row.module
    if wanted and has is not None and has < Version(wanted):
        firmware = f" Its firmware: PLDM bundle {row.firmware} or newer, from the server's maker."
        yield _told(
            "chip-driver", chip, chip=chip, wanted=row.amdgpu, has=has, source=f"{row.source}, {row.date}",
            module=f" (the module says {row.module})" if row.module else "", firmware=firmware if row.firmware else "",
        )  # fmt: skip

"""`crosstie doctor`: what this machine has, and what of it an engine would trip over."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.text import Text

from crosstie.catalog.library import names_in
from crosstie.cli.findings_show import report, report_options
from crosstie.cli.options import file_option, text_option
from crosstie.cli.show import show
from crosstie.core.errors import BadInput
from crosstie.core.figures import gigabytes, plural, with_unit
from crosstie.port.doctor.doctor import diagnose
from crosstie.port.doctor.host import machine_of
from crosstie.port.doctor.machine import Machine, Nic
from crosstie.port.doctor.record import capture, read_record, write_record
from crosstie.web.parts import Line, Parts

_LABEL = 11
_CAVEAT = "The checks were read in public sources; who wrote them has tried none of them on an AMD GPU."


@click.command("doctor")
@text_option("--engine engines", "E,...", "Check against these: vllm==0.27.1. [default: installed]")
@text_option("--python", "PATH", "The Python that engines run in. [default: Crosstie's own]")
@file_option("--record", "Write what the machine tells into a new folder, as well.", metavar="DIR")
@file_option("--from folder", "Look at a machine that was recorded, not at this.", metavar="DIR")
@report_options
def command(engines: str | None, python: str | None, record: Path | None, folder: Path | None, **reporting: Any) -> int:
    """What this machine has, and what an engine would trip over: findings with remedies.

    \b
    crosstie doctor
    crosstie doctor --python /opt/vllm/bin/python --fail-on setting
    crosstie doctor --record ./node7        # here, then anywhere:
    crosstie doctor --from ./node7 --engine vllm==0.27.1

    Reads amd-smi, rocminfo, nvidia-smi, driver files, limits, cgroups, NICs, packages and variables, and imports an
    installed engine in a separate process to see what it requires. It changes nothing and starts nothing on a GPU.
    A record has no serial numbers, UUIDs or host names. Without Crosstie, its source tree is enough to write one:

    \b
    PYTHONPATH=src python3 -m crosstie.port.doctor.record ./node7

    `crosstie fit MODEL --on this` and `crosstie plan WORKLOAD --on this` take what is found here. Exit status: 0
    nothing as grave as --fail-on, 1 something is, 2 the check could not run.
    """
    if folder is not None and (record or python):
        raise BadInput("--from looks at a record, so --record and --python do not go with it")
    if engines is not None and not names_in(engines):
        raise BadInput("--engine names no engine")
    texts = capture(python, tries_engines=True) if folder is None else read_record(folder)
    if record is not None:
        write_record(texts, record)
        click.echo(f"record written to {record}", err=True)
    diagnosis = diagnose(machine_of(texts, str(folder or "this machine")), engines=names_in(engines) if engines else ())
    title = f"{folder}, recorded {diagnosis.machine.taken}" if folder else "this machine"
    if not reporting["as_json"]:
        show(parts(diagnosis.machine))
    more = {"engines": list(diagnosis.engines), "machine": msgspec.to_builtins(diagnosis.machine)}
    against = f", against {', '.join(diagnosis.engines)}" if diagnosis.engines else ""
    return report(f"{title}{against}", diagnosis.findings, diagnosis.verdicts, more=more, caveat=_CAVEAT, **reporting)


def parts(machine: Machine) -> Parts:
    yield from (Line(Text.assemble((f"{name:<{_LABEL}}", "dim"), said), hang=_LABEL) for name, said in _lines(machine))


def _lines(machine: Machine) -> Iterable[tuple[str, str]]:
    for label, gpus in machine.kinds.items():
        first = gpus[0]
        known = ", ".join(dict.fromkeys(filter(None, (label, first.isa))))
        each = " each" if len(gpus) > 1 else ""
        memory = f", {gigabytes(first.memory_bytes)}{each}" if first.memory_bytes else ""
        split = " ".join(filter(None, (first.compute_partition, first.memory_partition)))
        yield "GPUs", f"{len(gpus)} x {first.name or first.vendor} ({known}){memory}{f', {split}' if split else ''}"
    if not machine.usable:
        yield "GPUs", "none seen"
    if own := [gpu for gpu in machine.gpus if gpu.integrated]:
        yield "", f"{len(own)} inside the processor ({', '.join(gpu.isa for gpu in own)}), left out"
    if joined := Counter(link.kind for link in machine.links):
        yield "joined by", ", ".join(f"{kind} ({plural(count, 'pair')})" for kind, count in joined.items())
    drivers = {"amdgpu": machine.amdgpu, "ROCm": machine.rocm, "NVIDIA": machine.nvidia, "CUDA up to": machine.cuda}
    if said := [f"{name} {release}" for name, release in drivers.items() if release]:
        yield "driver", ", ".join(said)
    yield "software", ", ".join(_software(machine)) or "no PyTorch, no engine"
    yield "host", ", ".join(_host(machine))
    rates = Counter(_rate(nic) for nic in machine.nics if nic.up)
    if machine.nics:
        yield "network", ", ".join(f"{count} x {rate}" for rate, count in rates.items()) or "adapters, all down"
    if machine.environment:
        yield "variables", ", ".join(f"{name}={value}" for name, value in machine.environment.items())


def _rate(nic: Nic) -> str:
    speed = f" {nic.gbit_per_s:g} Gbit/s" if nic.gbit_per_s else ""
    return f"{nic.layer}{speed}{' with RDMA' if nic.rdma else ''}"


def _software(machine: Machine) -> Iterable[str]:
    build = machine.torch_build
    built = f" (ROCm {build['hip']})" if "hip" in build else f" (CUDA {build['cuda']})" if "cuda" in build else " (CPU)"
    for name, release in machine.packages.items():
        yield f"{name} {release}{built if name == 'torch' else ''}"
    if machine.llama_cpp:
        yield f"llama.cpp b{machine.llama_cpp}"


def _host(machine: Machine) -> Iterable[str]:
    yield machine.system or "system not told"
    if machine.cpus:
        yield f"{machine.cpus_allowed:g} CPUs"
    if machine.memory_bytes:
        yield f"{gigabytes(machine.memory_allowed)} of memory"
    if machine.shm_bytes is not None:
        yield f"/dev/shm {with_unit(machine.shm_bytes, 'B')}"
    if machine.container:
        yield "in a container"

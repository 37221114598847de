"""`crosstie preflight kernels`: what Triton kernels would hit on each target, compiled ahead of time without a GPU."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from crosstie.catalog.library import Catalog
from crosstie.cli.findings_show import report, report_options
from crosstie.cli.show import console, names, number, print_table, progress, table
from crosstie.core.errors import BadInput
from crosstie.port.kernels.report import KernelRow, find, row_json, rows_of, verdicts
from crosstie.port.kernels.running import KernelOptions, TargetResult, compile_kernels
from crosstie.port.kernels.targets import target

_COLUMNS = (
    ("kernel", "left"), ("on", "left"), ("configs", "right"), ("LDS", "right"), ("registers", "right"),
    ("spills", "right"), ("waves/SIMD", "right"), ("matrix", "left"), ("verdict", "left"),
)  # fmt: skip


@click.command("kernels")
@click.argument("what", metavar="FILE_OR_MODULE", required=False)
@click.option(
    "--on",
    "chosen",
    metavar="A,B",
    required=True,
    help="Accelerators of the catalog, or instruction sets such as gfx942 and sm_90.",
)
@click.option(
    "--spec",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="How kernels are launched. [default: the TOML file beside FILE, of the same name]",
)
@click.option(
    "--launch",
    multiple=True,
    metavar="[MODULE:]FUNCTION",
    help="A function that launches kernels; it is called on a fake device, and nothing runs.",
)
@click.option("--example", type=click.Choice(["vllm"]), help="Kernels of a library, launched by its own wrappers.")
@click.option("--max-configs", type=click.IntRange(1), metavar="N", help="Of an autotuned kernel, the first N only.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Compilations at once. [default: processors]")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="S",
    help="Seconds for one compilation.",
)
@click.option(
    "--python",
    default=sys.executable,
    metavar="PATH",
    help="The interpreter whose Triton compiles, 3.11 or later. [default: this one]",
)
@click.option("--no-cache", is_flag=True, help="Compile everything again.")
@report_options
def command(
    what: str | None, chosen: str, spec: str | None, launch: tuple[str, ...], example: str | None,
    max_configs: int | None, jobs: int | None, timeout: float, python: str, no_cache: bool,
    as_json: bool, sarif_file: str | None, fail_on: str, verbose: bool,
) -> int:  # fmt: skip
    """Compiles Triton kernels for each target, and says what a launch there would hit.

    \b
    crosstie preflight kernels my_kernels.py --on mi300x,mi355x,h100-sxm
    crosstie preflight kernels my_package.ops --launch my_package.ops:smoke_test --on gfx942
    crosstie preflight kernels --example vllm --on mi300x --python /path/to/vllm/bin/python

    Types come from a spec (my_kernels.toml beside the file, or CROSSTIE_KERNELS in it), or from a shadow launch:
    functions named crosstie_launch... in the file and those of --launch are called with a torch and a Triton that
    take CPU tensors for the target's, and what they would launch is compiled. The code is imported and run.
    """
    targets = [target(Catalog(), name) for name in names(chosen)]
    if not targets:
        raise BadInput("--on names no accelerator")
    if (what is None) == (example is None):
        raise BadInput("give a file or a module, or --example")
    asked = KernelOptions(
        what=example_file(example) if example else _what(what or ""),
        spec=spec or _beside(what or ""),
        launch=tuple(map(_launch, launch)),
        jobs=jobs or os.cpu_count() or 1,
        timeout_s=timeout,
        max_configs=max_configs,
        cache=None if no_cache else _cache(),
        python=python,
    )
    with progress() as on_progress:
        answers = compile_kernels(asked, targets, on_progress)
    _check_found(asked.what, answers)
    findings = find(answers)
    rows = rows_of(answers, findings)
    if not as_json:
        _show(rows)
    return report(
        _title(example or what or "", answers), findings, verdicts(answers, findings),
        as_json=as_json, sarif_file=sarif_file, fail_on=fail_on, verbose=verbose,
        more={"triton": answers[0].triton, "kernels": [row_json(one) for a in answers for one in a.compilations]},
    )  # fmt: skip


def _what(name: str) -> str:
    if name.endswith(".py") or os.sep in name:
        file = Path(name)
        if file.is_dir():
            raise BadInput(f"{name}: is a folder; name a file, or a module as my_package.ops")
        if not file.is_file():
            raise BadInput(f"{name}: there is no such file")
        if file.suffix != ".py":
            raise BadInput(f"{name}: is no Python file")
        return str(file.resolve())
    return name


def example_file(name: str) -> str:
    import crosstie.port.kernels

    return str(Path(crosstie.port.kernels.__path__[0]) / f"example_{name}.py")


def _beside(name: str) -> str | None:
    file = Path(name).with_suffix(".toml") if name.endswith(".py") else None
    return str(file) if file and file.is_file() else None


def _launch(name: str) -> str:
    where, _, function = name.rpartition(":")
    return f"{_what(where)}:{function}" if where else function


def _cache() -> Path | None:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "crosstie" / "kernels"
    except RuntimeError:
        # No home directory: then every run compiles.
        return None


def _check_found(what: str, answers: Sequence[TargetResult]) -> None:
    for answer in answers:
        own = [kernel["name"] for kernel in answer.found if not kernel["helper"] and not kernel["imported"]]
        if not answer.compilations and not own and not answer.failures:
            others = [kernel["name"] for kernel in answer.found if kernel["imported"]]
            more = f"; it imports {', '.join(others)}: name their module, or launch them" if others else ""
            raise BadInput(f"{what}: no Triton kernel that can be launched{more}")


def _title(name: str, answers: Sequence[TargetResult]) -> str:
    count = sum(len(answer.compilations) for answer in answers)
    return f"{name}: {count} compilations with Triton {answers[0].triton}"


def _show(rows: Sequence[KernelRow]) -> None:
    if rows:
        print_table(console(), table("", _COLUMNS, [_cells(row) for row in rows]))


def _cells(row: KernelRow) -> list[str]:
    waves = "-" if row.waves_per_simd is None else f"{row.waves_per_simd:g}"
    return [
        row.kernel, row.target, number(row.configurations), number(row.lds_bytes), number(row.registers),
        number(row.spills), waves, row.matrix, row.verdict,
    ]  # fmt: skip

"""`crosstie preflight kernels`: what Triton kernels would hit on each target, compiled ahead of time without a GPU."""

import sys
from collections.abc import Sequence
from typing import Any

import click
import msgspec

from crosstie.catalog.library import Catalog, names_in
from crosstie.cli.findings_show import report, report_options
from crosstie.cli.options import whole_option
from crosstie.cli.progress import progress
from crosstie.cli.show import console, heading, print_json, say, show_table
from crosstie.core.figures import number
from crosstie_port.kernels.aiter import Coverage, aiter_coverage
from crosstie_port.kernels.report import KernelRow, compilation_json, preflight_kernels
from crosstie_port.kernels.targets import target

_COLUMNS = (
    "kernel", "on", "verdict", ">configs", ">LDS bytes", ">registers", ">spills", ">waves/SIMD", "~matrix",
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
@whole_option("--max-configs", 1, None, "Of an autotuned kernel, the first N only.")
@whole_option("--jobs", 1, None, "Compilations at once. [default: processors]")
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
@click.option(
    "--aiter", is_flag=True, help="What AITER's own kernels cover on these targets; the argument is words to look for."
)
@report_options
def command(
    what: str | None, chosen: str, spec: str | None, launch: tuple[str, ...], max_configs: int | None,
    jobs: int | None, timeout: float, python: str, no_cache: bool, aiter: bool,
    **reporting: Any,
) -> int:  # fmt: skip
    """Compiles Triton kernels for each target, and says what a launch there would hit.

    \b
    crosstie preflight kernels my_kernels.py --on mi300x,mi355x,h100-sxm
    crosstie preflight kernels my_package.ops --launch smoke_test --on gfx942
    crosstie preflight kernels examples/port/vllm_launches.py --on mi300x
    crosstie preflight kernels --aiter "MLA fp8" --on mi300x,mi355x

    Types come from a spec (my_kernels.toml beside the file, or CROSSTIE_KERNELS in it), or from a shadow launch:
    functions named crosstie_launch... in the file and those of --launch are called with a torch and a Triton that
    take CPU tensors for the target's, and what they would launch is compiled. The code is imported and run.
    """
    if aiter:
        return _show_aiter(what or "", names_in(chosen), reporting["as_json"])
    with progress() as on_progress:
        found = preflight_kernels(
            what, on=names_in(chosen), spec=spec, launch=launch, max_configs=max_configs, jobs=jobs,
            timeout_s=timeout, python=python, cached=not no_cache, on_progress=on_progress,
        )  # fmt: skip
    if found.rows and not reporting["as_json"]:
        show_table(console(), _COLUMNS, map(_cells, found.rows))
    title = f"{what}: {len(found.compilations)} compilations with Triton {found.triton}"
    return report(
        title, found.findings, found.verdicts, **reporting,
        more={"triton": found.triton, "kernels": [compilation_json(compilation) for compilation in found.compilations]},
    )  # fmt: skip


def _show_aiter(about: str, names: Sequence[str], as_json: bool) -> int:
    catalog = Catalog()
    isas = list(dict.fromkeys(target(catalog, name).isa for name in names))
    rows = aiter_coverage(isas, about)
    if as_json:
        print_json({"rows": [msgspec.to_builtins(row) for row in rows]})
        return 0
    kinds: dict[tuple[str, str, str], dict[str, Coverage]] = {}
    for row in rows:
        kinds.setdefault((row.operation, row.types, row.shape), {})[row.isa] = row
    out = console()
    source, _, _ = rows[0].source.partition(" ")
    heading(out, f"Assembly kernels of AITER ({source}, {rows[0].date}), and its Triton kernel of the operation")
    columns = ("operation", "types", "shape", *(f">{isa}" for isa in isas), "Triton kernel")
    show_table(
        out,
        columns,
        [
            [
                *kind,
                *(str(row.kernels or row.otherwise) for row in on.values()),
                ", ".join({row.triton for row in on.values()} - {""}),
            ]
            for kind, on in kinds.items()
        ],
    )
    say(
        out, "Triton: no kernel of that kind, and AITER's own Triton kernel takes its place; none: nor has it that one."
    )
    say(out, "Kernels of Composable Kernel and FlyDSL are not counted. --json has file and line of each.")
    return 0


def _cells(row: KernelRow) -> list[str]:
    return [
        row.kernel, row.target, row.verdict, number(row.configurations), number(row.lds_bytes), number(row.registers),
        number(row.spills), number(row.waves_per_simd), row.matrix,
    ]  # fmt: skip

"""`crosstie preflight source`: what CUDA C++ and Python sources trip over on ROCm, with file, line and remedy."""

from typing import Any

import click
import msgspec

from crosstie.catalog.library import names_in
from crosstie.cli.findings_show import report, report_options
from crosstie.cli.options import on_option
from crosstie.cli.progress import progress
from crosstie.core.errors import BadInput
from crosstie.port.source.check import SourceReport, preflight_source
from crosstie.port.source.clang import Opinion

_MOST_NAMED = 6


@click.command("source")
@click.argument("path", metavar="DIR_OR_FILE")
@on_option("Accelerators to port to, such as mi300x.", required=True)
@click.option("--hipify/--no-hipify", default=True, show_default=True, help="Look at what HIPIFY converts and leaves.")
@click.option(
    "--clang", metavar="PATH", help="Clang for the second opinion. [default: clang-19 or another on the path]"
)
@click.option("--no-clang", is_flag=True, help="No second opinion.")
@click.option(
    "--jobs", type=click.IntRange(1, 256), metavar="N", help="Files that clang compiles at once. [default: cores]"
)
@report_options
def command(
    path: str, accelerators: str, hipify: bool, clang: str | None, no_clang: bool, jobs: int | None, **reporting: Any
) -> int:
    """What CUDA C++ and Python sources trip over on ROCm: file, line, evidence, remedy.

    \b
    crosstie preflight source ./csrc --on mi300x,mi355x
    crosstie preflight source ./kernel.cu --on rx-7900-xtx --json
    crosstie preflight source . --on mi300x --sarif findings.sarif

    Reads the sources as a build for ROCm would (code behind #ifndef USE_ROCM is left out), runs PyTorch's HIPIFY on
    a copy, looks for what it does not see, and asks clang's HIP front end where there is one. What is a hazard
    depends on the accelerator: 64-lane wavefronts on gfx9, 64 KB of LDS on gfx942 and 160 KB on gfx950, two dialects
    of FP8. Needs no GPU; HIPIFY needs crosstie[preflight].
    """
    if clang and no_clang:
        raise BadInput("--clang and --no-clang exclude each other")
    with progress() as on_progress:
        found = preflight_source(
            path, on=names_in(accelerators), hipify=hipify, clang=clang, use_clang=not no_clang, jobs=jobs,
            on_progress=on_progress,
        )  # fmt: skip
    more = {
        "files": {"cpp": found.cpp_files, "python": found.python_files, "build": found.build_files},
        "hipify": msgspec.to_builtins(found.converted),
        "clang": _opinion(found.opinion),
    }
    return report(_title(path, found), found.findings, found.verdicts, more=more, **reporting)


def _opinion(opinion: Opinion | None) -> dict[str, object] | None:
    """Without its hazards, which are among the findings."""
    document = msgspec.to_builtins(opinion) or {}
    return {key: value for key, value in document.items() if key != "hazards"} or None


def _title(path: str, found: SourceReport) -> str:
    counts = f"{path}: {found.cpp_files:,} C++, {found.python_files:,} Python and {found.build_files:,} build files"
    if found.converted is None:
        return f"{counts}; HIPIFY was not run"
    converted = found.converted.names
    if not converted:
        return f"{counts}; HIPIFY finds nothing to convert"
    most = ", ".join(f"{name} {count:,}" for name, count in list(converted.items())[:_MOST_NAMED])
    total, files = sum(converted.values()), len(found.converted.files)
    return f"{counts}; HIPIFY converts {total:,} names in {files:,} files ({most}, ...)"

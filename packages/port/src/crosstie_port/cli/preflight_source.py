"""`crosstie preflight source`: what CUDA C++ and Python sources trip over on ROCm, with file, line and remedy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from crosstie.catalog.library import names_in
from crosstie.catalog.writing import write_text
from crosstie.cli.findings_show import report, report_options
from crosstie.cli.options import FILE, on_option, whole_option
from crosstie.cli.progress import progress
from crosstie.cli.show import console, say
from crosstie.core.errors import BadInput
from crosstie_port.source.baseline import baseline_of, new_findings
from crosstie_port.source.check import SourceReport, preflight_source
from crosstie_port.source.clang import Opinion
from crosstie_port.source.effort import FileEffort, by_file
from crosstie_port.source.fix import patch

_MOST_NAMED = 6
_MOST_FILES = 5


@click.command("source")
@click.argument("path", metavar="DIR_OR_FILE")
@on_option("Accelerators to port to, such as mi300x.", required=True)
@click.option("--hipify/--no-hipify", default=True, show_default=True, help="Look at what HIPIFY converts and leaves.")
@click.option(
    "--clang", metavar="PATH", help="Clang for the second opinion. [default: clang-19 or another on the path]"
)
@click.option("--no-clang", is_flag=True, help="No second opinion.")
@whole_option("--jobs", 1, 256, "Files that clang compiles at once. [default: cores]")
@click.option("--baseline", type=FILE, metavar="FILE", help="Leave out the findings that this file knows.")
@click.option("--write-baseline", type=FILE, metavar="FILE", help="Write what is found, as a baseline for later runs.")
@click.option("--fix", "patch_file", type=FILE, metavar="FILE", help="Write a patch for mechanical findings.")
@report_options
def command(
    path: str, accelerators: str, hipify: bool, clang: str | None, no_clang: bool, jobs: int | None,
    baseline: Path | None, write_baseline: Path | None, patch_file: Path | None, **reporting: Any,
) -> int:  # fmt: skip
    """What CUDA C++ and Python sources trip over on ROCm: file, line, evidence, remedy.

    \b
    crosstie preflight source ./csrc --on mi300x,mi355x
    crosstie preflight source ./kernel.cu --on rx-7900-xtx --json
    crosstie preflight source . --on mi300x --sarif findings.sarif
    crosstie preflight source . --on mi300x --write-baseline known.json
    crosstie preflight source . --on mi300x --baseline known.json --fix port.patch

    Reads the sources as a build for ROCm would (code behind #ifndef USE_ROCM is left out), runs PyTorch's HIPIFY on
    a copy, looks for what it does not see, and asks clang's HIP front end where there is one. What is a hazard
    depends on the accelerator: 64-lane wavefronts on gfx9, 64 KB of LDS on gfx942 and 160 KB on gfx950, two dialects
    of FP8. Needs no GPU; HIPIFY needs torch. With --baseline only what is new counts; --fix leaves the
    sources as they are: apply its patch with `git apply`.
    """
    if clang and no_clang:
        raise BadInput("--clang and --no-clang exclude each other")
    with progress() as on_progress:
        found = preflight_source(
            path, on=names_in(accelerators), hipify=hipify, clang=clang, use_clang=not no_clang, jobs=jobs,
            on_progress=on_progress,
        )  # fmt: skip
    findings = found.findings
    if baseline is not None:
        findings = new_findings(findings, baseline)
    if write_baseline is not None:
        write_text(write_baseline, baseline_of(found.findings).decode())
    cured = 0
    if patch_file is not None:
        text, cured = patch(findings, Path(path))
        write_text(patch_file, text)
    effort = by_file(findings)
    more = {
        "source": path,
        "effort": msgspec.to_builtins(effort),
        "known": len(found.findings) - len(findings),
        "cured_by_patch": cured,
        "files": {"cpp": found.cpp_files, "python": found.python_files, "build": found.build_files},
        "hipify": msgspec.to_builtins(found.converted),
        "clang": _opinion(found.opinion),
    }
    status = report(_title(path, found), findings, found.verdicts, more=more, **reporting)
    if not reporting["as_json"]:
        _show_work(effort, len(found.findings) - len(findings), cured, patch_file)
    return status


def _show_work(effort: Sequence[FileEffort], known: int, cured: int, patch_file: Path | None) -> None:
    out = console()
    if len(effort) > 1:
        say(out, f"most work, of {len(effort):,} files (findings to rewrite, to think about, mechanical):")
        for one in effort[:_MOST_FILES]:
            say(out, f"  {one.rewrite:>3} {one.local:>3} {one.mechanical:>3}  {one.file}", hang=15)
    if known:
        say(out, f"{known:,} findings are known from the baseline and left out; the verdict is of all")
    if patch_file is not None:
        say(out, f"{patch_file}: a patch that cures {cured:,} of them; it was not compiled")


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

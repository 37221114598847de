"""`crosstie preflight MODEL_DIR`: what breaks when this checkpoint moves to these accelerators; and its `--matrix`."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import click
import msgspec

from crosstie.catalog.library import names_in
from crosstie.cli.answer import Wanted
from crosstie.cli.assignments import assigned
from crosstie.cli.findings_show import report, report_options
from crosstie.cli.options import complete_models, flag_option, on_option, text_option, whole_option
from crosstie.cli.progress import progress
from crosstie.core.errors import BadInput
from crosstie.core.finding import VERDICTS
from crosstie.port.preflight.effort import Effort, effort_of
from crosstie.port.preflight.matrix import MatrixChange, MatrixRow, ReleaseMatrix, matrix
from crosstie.port.preflight.model import ModelReport, ScanDepth, preflight
from crosstie.web.parts import Heading, Line, Parts, Table, closing, note

# What --matrix shows unless it is told: one of each generation that people move between.
_PARTS = "mi300x,mi355x,h200,b200"
_KV = ("auto", "bf16", "fp8", "fp8_e5m2")
# A cell has room for a word or two.
_SHORT = {"ready with settings": "settings", "will not run": "no"}
_LEGEND = (
    "settings: ready with settings; no: will not run; not known: no rule was read. CUDA and ROCm are those of the "
    "project's own images, whose names come from its build files: none was pulled."
)


@click.command("model")
@click.argument("model", metavar="MODEL_DIR", shell_complete=complete_models)
@on_option("Accelerators, such as mi300x,mi355x,h200.")
@text_option(
    "--engine", "E[==V]", "vllm, sglang or llama.cpp, with a release or without: vllm==0.28.0. [default: vllm]"
)
@flag_option("--matrix as_matrix", "Every release of every engine by accelerator, with CUDA, ROCm, images, and what "
             "changed when.")  # fmt: skip
@whole_option("--tp", 1, 1024, "Tensor-parallel ranks. [default: the fewest that hold it]")
@flag_option("--ep", "Experts are spread over the ranks instead of being cut.")
@click.option("--kv", type=click.Choice(_KV), default="auto", show_default=True, help="The KV cache's type.")
@whole_option("--context", 1, None, "Tokens a sequence, for memory. [default: 8192]")
@text_option("--with features", "F,...", "Features that must work: lora, speculative-mtp, ...")
@text_option("--env environment", "NAME=VALUE", "A variable of the engine's environment.", multiple=True)
@text_option("--flag flags", "NAME=VALUE", "An engine flag: attention-backend=TRITON_ATTN.", multiple=True)
@click.option("--scan", type=click.Choice(("none", "sample", "all")), default="sample", show_default=True,
              help="How much of the FP8 weights to read; scales are always read whole.")  # fmt: skip
@report_options
def command(
    model: str, accelerators: str | None, engine: str | None, as_matrix: bool, tp: int | None, ep: bool, kv: str,
    context: int | None, features: str | None, environment: tuple[str, ...], flags: tuple[str, ...], scan: ScanDepth,
    **reporting: Any,
) -> int:  # fmt: skip
    """What breaks when the checkpoint in MODEL_DIR moves to these accelerators, with evidence and remedy.

    \b
    crosstie preflight ./DeepSeek-R1 --on mi300x,mi355x,h200 --engine vllm
    crosstie preflight ./my-model --on mi300x --tp 8 --env VLLM_ROCM_USE_AITER=1
    crosstie preflight ./my-model --on mi300x --engine sglang --sarif found.sarif
    crosstie preflight model deepseek-v3 --on mi300x  # a name: the config alone
    crosstie preflight org/name --on mi300x  # of the hub: headers, no weights
    crosstie preflight deepseek-v3 --matrix --on mi300x,mi355x,h200

    Reads config.json, the quantisation config and the safetensors headers; of the tensors the scales, and a sample
    of FP8 weights. Checks: FP8 dialect, loader, kernels of each operation, memory, architecture, features. Verdicts:
    ready, ready with settings, slow path, not known (no rule was read for something it needs), will not run (or
    gives wrong numbers). Exit status 1: a finding is at least as grave as --fail-on; 2: the check could not run.
    --matrix asks which release to take: its status is 0.
    """
    if not accelerators and not as_matrix:
        raise BadInput("--on: which accelerators? Such as --on mi300x,mi355x,h200")
    given: dict[str, Any] = {
        "tp": tp, "ep": ep, "kv": None if kv == "auto" else kv, "context": context, "features": names_in(features),
        "environment": assigned("--env", environment, str), "flags": assigned("--flag", flags, str), "scan": scan,
    }  # fmt: skip
    on = names_in(accelerators or _PARTS)
    if as_matrix:
        return _matrix(model, on, engine, given, reporting)
    with progress() as on_progress:
        made = preflight(model, on=on, engine=engine or "vllm", on_progress=on_progress, **given)
    with_settings = {f"{name} ({made.layouts[name]})": made.verdict_with_settings(name) for name in made.verdicts}
    verdicts = made.verdicts if reporting["as_json"] else with_settings
    title, efforts = f"{made.name} on {made.engine}: {made.stored}", _efforts(made)
    last = [f"effort on {name}: {effort} ({effort.basis})" for name, effort in efforts.items()]
    if reporting["verbose"]:
        last += [f"  {days[0]:g} to {days[2]:g}: {what}" for what, days in _parts(efforts.values()).items()]
        last += dict.fromkeys(f"  effort is {effort.source}" for effort in efforts.values())
    return report(title, made.findings, verdicts, more=about(model, made), last=last, **reporting)


def about(checkpoint: str, checked: ModelReport) -> dict[str, Any]:
    """What its document has beside verdicts and findings."""
    return {
        "checkpoint": checkpoint, "model": checked.name, "engine": str(checked.engine), "layouts": checked.layouts,
        "settings": checked.settings, "effort": msgspec.to_builtins(_efforts(checked)),
    }  # fmt: skip


def _efforts(seen: ModelReport) -> dict[str, Effort]:
    return {name: effort_of(row for row in seen.findings if row.target in ("", name)) for name in seen.verdicts}


def _parts(efforts: Iterable[Effort]) -> dict[str, tuple[float, float, float]]:
    """The pieces of work of all accelerators, each once."""
    return {what: days for effort in efforts for what, days in effort.parts.items()}


def _matrix(model: str, on: list[str], engine: str | None, given: dict[str, Any], reporting: dict[str, Any]) -> int:
    """The question is which release to take, so a verdict that is bad somewhere is no failure."""
    for flag in ("sarif_file", "html"):
        if reporting[flag]:
            raise BadInput(f"--{flag.partition('_')[0]} goes with findings: leave --matrix away")
    with progress() as on_progress:
        release_matrix = matrix(model, on=on, engine=engine, on_progress=on_progress, **given)
    Wanted(reporting["verbose"], reporting["as_json"]).give(
        lambda: msgspec.to_builtins(release_matrix), lambda details: matrix_parts(release_matrix, details)
    )
    return 0


def matrix_parts(matrix: ReleaseMatrix, verbose: bool) -> Parts:
    yield Heading(f"{matrix.name} by engine and release: {matrix.stored}")
    for engine, group in groupby(matrix.rows, key=lambda row: row.build.engine):
        yield from _engine(engine, list(group), matrix, verbose)
    yield note(_LEGEND)
    yield note("Nothing here ran on an AMD GPU.")
    if not verbose:
        yield closing("all releases, their dates, settings and sources, and each change in full")


def _engine(engine: str, rows: Sequence[MatrixRow], matrix: ReleaseMatrix, verbose: bool) -> Parts:
    parts = list(rows[0].verdicts)
    shown = rows if verbose else _without_tail(rows)
    table = [
        [
            row.build.version + ("" if row is not shown[-1] or len(shown) == len(rows) else " and older"),
            row.build.cuda or "?", row.build.rocm or "?",
            *(_SHORT.get(said, said) for said in row.verdicts.values()),
        ]
        for row in shown
    ]  # fmt: skip
    yield ""
    yield Table([engine, "CUDA", "ROCm", *parts], table)
    yield from (f"  {end.name}: {end.what} ({end.source}, {end.date})" for end in matrix.ended if end.engine == engine)
    named = next((row.build for row in rows if row.build.rocm_image or row.build.cuda_image), None)
    if named:
        images = [image for image in (named.cuda_image, named.rocm_image) if image]
        yield f"  images of {named.version}: {', '.join(images)}"
    if verbose:
        for row in shown:
            settings = "; ".join(f"{part}: {' '.join(said)}" for part, said in row.settings.items() if said)
            yield (
                f"  {row.build.version} of {row.build.released}: {row.build.source}"
                + (f"; {settings}" if settings else "")
            )
    yield from _changes([change for change in matrix.changes if change.engine == engine], verbose)


def _without_tail(rows: Sequence[MatrixRow]) -> Sequence[MatrixRow]:
    """Old releases that all say the same are one row."""
    last = len(rows) - 1
    while last > 0 and rows[last - 1].verdicts == rows[last].verdicts:
        last -= 1
    return rows[: last + 1]


def _changes(changes: Sequence[MatrixChange], verbose: bool) -> Parts:
    """Accelerators that change alike in one release are one line."""
    order = list(VERDICTS.values())
    for (version, before, after), group in groupby(changes, key=lambda row: (row.version, row.before, row.after)):
        alike = list(group)
        parts = ", ".join(change.accelerator for change in reversed(alike))
        word = "gone" if order.index(after) < order.index(before) else "new"
        why = alike[0].why if verbose else alike[0].why.partition(": ")[2].partition(". ")[0] or alike[0].why
        yield Line(f"  {version} ({alike[0].released}), {parts}: {before}, then {after}; {word}: {why}", hang=4)

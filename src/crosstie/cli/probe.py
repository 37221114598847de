"""`crosstie probe`: measures the GPU at hand."""

from collections import Counter
from pathlib import Path

import click
import msgspec
from rich.text import Text

from crosstie.catalog.library import Catalog, names_in
from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.options import file_option, flag_option, text_option
from crosstie.cli.progress import progress
from crosstie.core.errors import BadInput
from crosstie.core.figures import arithmetic, bandwidth, gigabytes, seconds, share
from crosstie.prove.probe.document import Probe, Provenance, Reached, default_name, probe_from, reached, read_probe
from crosstie.prove.probe.kernels import check_target, run_plan, write_json, write_run
from crosstie.prove.probe.plan import PARTS, plan_of
from crosstie.web.parts import Parts, Table

SHOW = {"bytes_per_s": bandwidth, "flop_per_s": arithmetic, "s": seconds}


@click.command("probe")
@file_option("-o --output", "Where to. [default: probe-ACCELERATOR-DATE.json]")
@text_option("--parts", "P,...", f"Only these of {', '.join(PARTS)}.")
@flag_option("--quick", "A few shapes of each part: under a minute.")
@file_option("--plan", "Measure nothing; write the plan, for a GPU without Crosstie.")
@file_option("--read", "Measure nothing; show an earlier document.")
@answer_options()
def command(
    output: Path | None, parts: str | None, quick: bool, plan: Path | None, read: Path | None, wanted: Wanted
) -> int:
    """What the GPU of this machine reaches: copies, matrix products, attention, launches, whole steps.

    \b
    crosstie probe
    crosstie probe --quick --parts copy,gemm -o mine.json
    crosstie probe --read mine.json

    Runs through PyTorch, on CUDA and ROCm alike, for minutes; nothing else should use the GPU meanwhile. The
    document has every time with its shape, and a shape that a kernel refused with the reason. Ctrl-C writes
    what is complete, marked as partial, and exits with 2; before the first measurement it writes nothing.

    On a machine that has PyTorch and not Crosstie, the source tree is enough:

    \b
    crosstie probe --plan plan.json   # anywhere; then there:
    PYTHONPATH=src python3 -m crosstie.prove.probe.kernels plan.json out.json
    crosstie probe --read out.json    # anywhere
    """
    if read is not None and (output or parts or quick or plan):
        raise BadInput("--read shows a document, so -o, --parts, --quick and --plan do not go with it")
    catalog = Catalog()
    if read is not None:
        return answer(read_probe(read), catalog, wanted)
    if parts is not None and not names_in(parts):
        raise BadInput(f"--parts names no part; known: {', '.join(PARTS)}")
    planned = plan_of(catalog, names_in(parts), quick)
    if plan is not None:
        if output or wanted.as_json:
            raise BadInput("--plan measures nothing, so -o and --json do not go with it")
        write_json(plan, planned)
        click.echo(f"{len(planned['cases'])} shapes written to {plan}")
        return 0
    check_target(output or Path("probe.json"))
    with progress() as on_progress:
        document = run_plan(planned, lambda done, total, part: on_progress(done, total, PARTS[part]))
    made = document["provenance"]
    target = output or default_name(made["device"], made["accelerator"], made["date"], Path())
    write_run(target, document, planned)
    click.echo(f"written to {target}", err=True)
    return answer(probe_from(msgspec.json.encode(document), target), catalog, wanted)


def answer(probe: Probe, catalog: Catalog, wanted: Wanted) -> int:
    wanted.give(lambda: msgspec.to_builtins(probe), lambda _: probe_parts(probe, reached(probe, catalog)))
    return 0


def probe_parts(probe: Probe, lines: list[Reached]) -> Parts:
    made = probe.provenance
    yield Text.assemble((made.device, "bold"), f"  {machine(made)}")
    columns = ["kernel", "at", ">reached", ">peak", ">of peak", "~peak of"]
    yield Table(columns, [row(line) for line in lines])
    if made.accelerator is None:
        yield "  the catalog has no accelerator of this name and memory, so no peak stands beside these"
    yield from (f"  {part}: skipped, {reason}" for part, reason in made.skipped.items())
    if made.partial:
        yield f"  partial: {made.partial}"
    for (kind, reason), times in Counter((failure.kind, failure.reason) for failure in made.failures).items():
        yield f"  {kind}, {times} refused: {reason}"


def row(line: Reached) -> list[str]:
    shown = SHOW[line.unit]
    if line.peak is None or line.fraction is None:
        return [line.what, line.at, shown(line.value), "-", "-", "-"]
    return [line.what, line.at, shown(line.value), shown(line.peak), share(line.fraction), line.peak_name]


def machine(made: Provenance) -> str:
    runtime = f"ROCm {made.hip}" if made.hip else f"CUDA {made.cuda}"
    power = f", {made.power_limit_w:.0f} W limit" if made.power_limit_w else ""
    driver = f", driver {made.driver}" if made.driver else ""
    taken = f"taken for {made.accelerator}, " if made.accelerator else ""
    return f"{taken}{gigabytes(made.memory_bytes)}{power}{driver}, PyTorch {made.torch}, {runtime}, {made.date}"

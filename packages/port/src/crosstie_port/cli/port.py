"""`crosstie port`: the work of moving a model to other accelerators, in its order, ticked off as evidence comes in."""

from pathlib import Path
from typing import Any

import click
import msgspec
from rich.text import Text

from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.options import FILE, complete_accelerators, complete_models
from crosstie.cli.progress import progress
from crosstie.core.figures import plural
from crosstie.port.preflight.effort import MOVE, Effort
from crosstie.web.parts import CommandLine, Heading, Line, Parts, Table, closing
from crosstie.web.report import KeyNumber
from crosstie_port.porting.steps import PHASES, PortStep, PortWork
from crosstie_port.porting.work import RESULTS, port_work

_COLOURS = {"done": "green", "failed": "red", "blocked": "yellow", "open": ""}
_MOVE = "install, an evaluation, a load test, a runbook"
_DETAILS = "every remedy, and what the person-days are made of"


@click.command("port")
@click.argument("checkpoint", shell_complete=complete_models)
@click.option("--from", "origin", required=True, metavar="A", shell_complete=complete_accelerators,
              help="The accelerator that runs it now, such as h200.")  # fmt: skip
@click.option("--to", "target", required=True, metavar="B", shell_complete=complete_accelerators,
              help="The accelerator that it moves to, such as mi355x.")  # fmt: skip
@click.option("--source", type=FILE, metavar="DIR", help="CUDA C++ and Python that move with it.")
@click.option("--engine", metavar="E[==V]", default="vllm", show_default=True,
              help="vllm, sglang or llama.cpp, with a release or without.")  # fmt: skip
@click.option("--results", type=FILE, metavar="DIR", help="The folder in which the steps' commands leave their files.")
@answer_options(_DETAILS, html=True)
def command(
    checkpoint: str, origin: str, target: str, source: Path | None, engine: str, results: Path | None,
    wanted: Wanted,
) -> int:  # fmt: skip
    """The work of moving a model to other accelerators: steps in order, their commands, person-days, and what is done.

    \b
    crosstie port ./my-model --from h200 --to mi355x --source ./csrc
    mkdir results
    crosstie port ./my-model --from h200 --to mi355x --results results
    crosstie port deepseek-v3 --from h200 --to mi355x --html port.html

    CHECKPOINT is what `crosstie preflight` takes: a folder, a GGUF file, a config.json, a catalog name or a hub
    repository. Checkpoint, sources and recipe are checked here. Every other step waits for a file in --results, which
    its command writes. A file is not taken if it is of another model, engine or accelerator, older than the checkpoint
    or the sources, or, for steps on a GPU, made on a CPU or an emulated endpoint. Exit status: 0 nothing blocks, 1 a
    step has failed or is blocked, 2 the question was wrong.
    """
    with progress() as on_progress:
        work = port_work(
            checkpoint, origin=origin, target=target, source=source, engine=engine, results=results,
            on_progress=on_progress,
        )  # fmt: skip
    wanted.give(
        lambda: document(work),
        lambda details: parts(work, details, results),
        title=_title(work),
        facts=lambda: _facts(work),
    )
    return 1 if work.status == "stuck" else 0


def document(work: PortWork) -> dict[str, Any]:
    more = {
        "status": work.status, "next": [step.name for step in work.next], "effort": work.effort,
        "not_counted": work.uncounted,
    }  # fmt: skip
    found: dict[str, Any] = msgspec.to_builtins({**more, **msgspec.structs.asdict(work)})
    return found


def _title(work: PortWork) -> str:
    return f"{work.model} from {work.origin} to {work.target} on {work.engine}"


def _counts(work: PortWork) -> str:
    counts = {status: sum(step.status == status for step in work.steps) for status in _COLOURS}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)


def _facts(work: PortWork) -> list[KeyNumber]:
    done = sum(step.status == "done" for step in work.steps)
    named = {"all": "Person-days, guessed", "before_a_gpu": f"Before {work.target} is there", "left": "Left to do"}
    numbers = [
        KeyNumber(name, f"{work.effort[key].likely_days:g}", _range(work.effort[key])) for key, name in named.items()
    ]
    return [KeyNumber("Steps done", f"{done} of {len(work.steps)}", _counts(work)), *numbers]


def _range(effort: Effort | None) -> str:
    return f"{effort.low_days:g} to {effort.high_days:g}" if effort and effort.high_days else ""


def parts(work: PortWork, verbose: bool, results: Path | None) -> Parts:
    yield Text(_title(work), "bold")
    yield f"{plural(len(work.steps), 'step')}: {_counts(work)}"
    uncounted = f", and what {' and '.join(work.uncounted)} may find" if work.uncounted else ""
    yield Line(f"effort, guessed: {work.effort['all']}{uncounted}", hang=2)
    yield f"  before {work.target} is there: {work.effort['before_a_gpu']}"
    yield f"  left to do: {work.effort['left']}"
    if work.next:
        yield Text.assemble(("next: ", "bold"), ", ".join(step.name for step in work.next))
    yield ""
    rows = [[step.name, step.status, _range(step.effort), step.says] for step in work.steps]
    yield Table(("step", "state", "person-days", "~answer"), rows)
    titles = ("At a desk, before a GPU is there", f"On {work.origin}, which runs it now", f"On {work.target}")
    for phase, title in zip(PHASES, titles, strict=True):
        steps = [step for step in work.steps if step.phase == phase]
        if steps:
            yield ""
            yield Heading(title)
        for step in steps:
            yield from _step(step, verbose)
    yield ""
    yield Heading("What this rests on")
    yield from _grounds(work, verbose, results)
    if not verbose:
        yield closing(_DETAILS)


def _step(step: PortStep, verbose: bool) -> Parts:
    yield Line(Text.assemble((step.name, _COLOURS[step.status] or "bold"), f": {step.what}"), hang=2)
    if step.command:
        yield CommandLine(step.command)
    yield from (Line(f"  - not taken: {why}", "yellow", hang=4) for why in step.not_taken)
    if step.status == "done" and not verbose:
        return
    shown = step.remedies if verbose else step.remedies[:1]
    yield from (Line(f"  - {remedy}", hang=4) for remedy in shown)
    if len(shown) < len(step.remedies):
        yield f"  - and {len(step.remedies) - len(shown)} more"


def _grounds(work: PortWork, verbose: bool, results: Path | None) -> Parts:
    reasons: dict[str, list[str]] = {}
    for name, why in work.left_out.items():
        reasons.setdefault(why, []).append(name)
    yield from (f"- left out: {', '.join(names)} ({why})" for why, names in reasons.items())
    yield f"- person-days are {work.effort['all'].basis}: {work.effort['all'].source}"
    if verbose:
        for step in work.steps:
            for what, days in (step.effort.parts if step.effort else {}).items():
                yield f"- {step.name}, {days[0]:g} to {days[2]:g} person-days: {_MOVE if what == MOVE else what}"
    if results is None:
        yield f"- no results were read: `mkdir {RESULTS}`, and --results {RESULTS} ticks steps off"
    ran = dict.fromkeys(file for step in work.steps if step.phase == "to" for file in step.evidence)
    if ran:
        yield f"- from {work.target} itself: {', '.join(ran)}; all else was read, computed or compiled"
    else:
        yield f"- nothing here ran on {work.target}"

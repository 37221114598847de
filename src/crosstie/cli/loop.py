"""`crosstie loop`: predicted, measured where least is known, learnt, planned again; one report."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from crosstie.catalog.library import Catalog
from crosstie.catalog.writing import write_text
from crosstie.cli.answer import write_html
from crosstie.cli.lazy import GroupedCommand
from crosstie.cli.options import (
    FILE,
    complete_accelerators,
    complete_models,
    flag_option,
    json_option,
    real_option,
    text_option,
    whole_option,
)
from crosstie.cli.progress import progress
from crosstie.cli.replica import PRECISION_HELP
from crosstie.cli.show import json_text, print_json, show
from crosstie.core.errors import BadInput
from crosstie.core.figures import dollars, milliseconds, percent, significant
from crosstie.prove.loop.engine import EngineFailed
from crosstie.prove.loop.folder import LoopAsked, LoopFolder
from crosstie.prove.loop.loop import LoopResult, LoopSettings, MachineLoop, begun, report_document
from crosstie.web.parts import Heading, Line, Parts, Table, caution
from crosstie.web.report import write_markdown

_KEY = "OPENAI_API_KEY"
_INTERRUPTED = 130
_NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "output_tokens_per_s": "tok/s"}
_TITLES = {"ttft_s": "TTFT, ms", "tpot_s": "TPOT, ms", "output_tokens_per_s": "tok/s"}


@click.command(
    "loop", cls=GroupedCommand,
    groups={
        "The replica": "--on --engine --engine-command --engine-args --precision --tp --context --endpoint --emulate "
                       "--speed",
        "The measurement": "--out --minutes --points --prompts --workload --quick",
        "The answer": "--json",
    },
)  # fmt: skip
@click.argument("model", required=False, default="", shell_complete=complete_models)
@click.option("--on", "accelerator", metavar="A", default="", shell_complete=complete_accelerators,
              help="Which of this machine's accelerators, or that of --endpoint. [default: the first]")  # fmt: skip
@text_option("--engine", "E", "vllm, sglang or llama.cpp, with a release or without.", default="")
@text_option("--engine-command", "WORDS", "How the engine is run: 'python3 -m vllm.entrypoints.cli.main'.", default="")
@text_option("--engine-args", "WORDS", "Further flags of it, such as '--load-format dummy'.", default="")
@text_option("--precision", "P", f"{PRECISION_HELP} [default: native]", default="")
@whole_option("--tp", 1, 1024, "Tensor-parallel ranks. [default: as few as fit]")
@whole_option("--context", 1, 10**7, "Tokens of a request. [default: as many as fit]")
@text_option("--endpoint", "URL", "An engine that runs already; none is started.", default="")
@click.option("--emulate", metavar="A[:FACTOR]", default="",
              help="An emulated replica in the place of an engine, FACTOR times as slow as predicted.")  # fmt: skip
@real_option("--speed", 0.01, 1000, "With --emulate: emulated seconds a second.", default=1.0, show_default=False)
@click.option("--out", type=FILE, metavar="DIR", default=Path("loop"), show_default=True,
              help="Where everything is kept; a loop that ended early goes on there.")  # fmt: skip
@real_option("--minutes", 0.01, 10_000, "How long it may measure, the engine's start included.", default=20.0)
@whole_option("--points", 1, 100, "Points to measure at most.", default=8)
@text_option("--prompts", "FILE|FOLDER", "Text of the prompts, as of `bench`. [default: filler]", default="")
@click.option("--workload", type=str, metavar="FILE", default="", help="Plan it before and after.")
@flag_option("--quick", "Plan by closed forms alone, as `plan --quick`.")
@json_option
def command(out: Path, as_json: bool, **options: Any) -> int:
    """Predicts a replica, measures the loads that say most, learns from them and plans again: one report.

    \b
    crosstie loop llama-3.1-8b --workload workload.toml --minutes 20
    crosstie loop ./checkpoint --precision fp8 --engine-args '--load-format dummy'
    crosstie loop llama-3.1-8b --endpoint http://server:8000 --on mi300x
    crosstie loop llama-3.1-8b --emulate h200:1.15     # on a laptop
    crosstie loop --out loop                           # go on with it

    On a machine with a GPU and an engine it runs doctor and recipe, starts the engine, runs `bench` at the loads
    that narrow the intervals most, then `calibrate`, and `plan` before and after. The folder gets report.md,
    report.json, report.html, a `bench` file for each load, calibration.json and the engine's log. Your own catalog
    stays as it is: `crosstie calibrate --add DIR/points/*.json` changes it.

    Ctrl-C, kill -9 or a crash loses at most the load under way; the same command, or `crosstie loop --out DIR`,
    continues. The engine ends with the loop. Exit status 1 if the engine does not start, a request failed or
    nothing was measured; 130 after Ctrl-C.
    """
    source = click.get_current_context().get_parameter_source
    given = {name: value for name, value in options.items() if source(name) is not ParameterSource.DEFAULT}
    given |= {name: _wherever(given[name]) for name in ("model", "workload", "prompts") if given.get(name)}
    folder = LoopFolder(out)
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out}: is a file")
    with folder.held():
        state = begun(folder, given)
        _check(state.asked)
        with progress("loop") as on_progress:
            settings = LoopSettings(on_progress, _tell, api_key=os.environ.get(_KEY) or None)
            try:
                loop_result = MachineLoop(Catalog(), folder, state, settings).run()
            except EngineFailed as error:
                click.echo(f"crosstie: {error}", err=True)
                return 1
        if loop_result.interrupted:
            click.echo(f"interrupted: `crosstie loop --out {out}` goes on", err=True)
            return _INTERRUPTED
        if not loop_result.measured:
            click.echo("crosstie: no point was measured: more --minutes", err=True)
            return 1
        made = _write(out, loop_result)
    if as_json:
        print_json(made)
    else:
        show(loop_parts(made))
    return int(bool(loop_result.failed))


def _wherever(name: str) -> str:
    """A file or folder by its whole path: a loop may be gone on with from another folder. A name stays a name."""
    path = Path(name).expanduser()
    is_path = name.startswith((".", "~", "/")) or (path.is_file() and path.suffix != "")
    return str(path.absolute()) if is_path or ("/" in name and path.exists()) else name


def _check(asked: LoopAsked) -> None:
    if asked.endpoint and asked.emulate:
        raise BadInput("--endpoint is an engine that runs, and --emulate starts one: give one of them")
    if asked.speed != 1.0 and not asked.emulate:
        raise BadInput("--speed is about --emulate, which is not given")
    if asked.endpoint and (asked.engine_command or asked.engine_args):
        raise BadInput("--endpoint runs already: leave --engine-command and --engine-args out")


def _tell(line: str) -> None:
    click.echo(line, err=True)


def _write(out: Path, loop_result: LoopResult) -> dict[str, Any]:
    """The report three ways, of one document."""
    made = report_document(loop_result)
    write_text(out / "report.json", json_text(made) + "\n")
    write_text(out / "report.md", write_markdown(loop_parts(made)))
    write_html(out / "report.html", made["title"], made, loop_parts(made))
    return made


def loop_parts(made: Mapping[str, Any]) -> Parts:
    yield made["title"]
    if made["emulated"]:
        yield caution("EMULATED: no GPU ran; how well the loop finds out what the emulator was told")
    verdicts = made["doctor"].get("verdicts", {})
    yield from (f"doctor: {name}: {verdict}" for name, verdict in verdicts.items())
    for finding in made["doctor"].get("findings", ()):
        if finding["severity"] in ("error", "warning"):
            yield caution(f"- {finding['severity']}: {finding['what']}")
    yield from (caution(f"- {note}") for note in made["notes"])
    starts = ", ".join(f"{start_s:.0f} s" for start_s in made["starts_s"])
    yield f"{made['spent_s'] / 60:.1f} minutes" + (f", the engine's start {starts}" if starts else "")
    yield from _points(made)
    yield from _questions(made)
    yield from _errors(made)
    yield from _plan(made)


def _points(made: Mapping[str, Any]) -> Parts:
    """A table a metric: points are compared within one."""
    yield Heading("Predicted, then measured")
    for name, title in _TITLES.items():
        rows = [
            [point["short"], _value(name, row["predicted"]["value"]), _between(name, row["predicted"]),
             _value(name, row["measured"]), f"{row['error']:+.0%}", "yes" if row["inside"] else "NO",
             _value(name, row["predicted_after"]["value"]) if row["predicted_after"] else "-"]
            for point in made["points"]
            for row in [point["metrics"].get(name)]
            if row
        ]  # fmt: skip
        columns = [title, ">predicted", ">80% interval", ">measured", ">error", "inside", ">predicted now"]
        yield Table(columns, rows)
    yield f"{made['inside']} of {made['rows']} inside their 80% intervals; loads are tokens in/out x clients"
    failed = sum(point["failed"] for point in made["points"])
    if failed:
        yield Line(f"{failed} requests failed", "red")
    yield from (caution(f"{why}: {', '.join(points)}") for why, points in made["doubtful"].items())
    if made["not_measured"]:
        yield f"not measured for want of time: {', '.join(made['not_measured'])}"


def _questions(made: Mapping[str, Any]) -> Parts:
    if not made["questions"]:
        return
    rows = [[question["short"], *map(_narrowed, question["widths"].values())] for question in made["questions"]]
    rows.append(["in the middle", *map(_narrowed, made["widths"].values())])
    columns = ["asked about", *(f">{_NAMES[name]}" for name in made["widths"])]
    yield Table(columns, rows, "What became surer: intervals, high over low, before and now")


def _narrowed(widths: Sequence[float]) -> str:
    return f"{widths[0]:.2f}x to {widths[1]:.2f}x"


def _errors(made: Mapping[str, Any]) -> Parts:
    if made["errors"]:
        rows = [
            [title, *(percent(table[m]["median_ape"]) if m in table else "-" for m in ("ttft", "tpot", "throughput"))]
            for title, table in made["errors"].items()
        ]
        yield Table(["median error", ">TTFT", ">TPOT", ">tok/s"], rows, "What was learnt")


def _plan(made: Mapping[str, Any]) -> Parts:
    plans = made["plan"]
    if made["not_planned"]:
        yield caution(f"not planned: {made['not_planned']}")
    if plans is None:
        return
    rows = []
    for when, title in (("before", "before"), ("after", "now")):
        plan = plans[when]
        ends = plan["interval_usd_per_hour"]
        rows.append([
            title, dollars(plan["usd_per_hour"]) if plan["answered"] else "no fleet",
            f"{dollars(ends[0])} to {dollars(ends[1])}" if ends else "-",
            dollars(plan["usd_per_million"]) if plan["usd_per_million"] is not None else "-",
            "; ".join(plan["pools"].values()) or "-",
        ])  # fmt: skip
    columns = ["", ">an hour", ">80% interval", ">a million tokens", "~fleet"]
    yield Table(columns, rows, f"The plan of {plans['workload']}")
    less = plans["usd_per_month_less"]
    if less is not None:
        fleet = "another fleet" if plans["before"]["pools"] != plans["after"]["pools"] else "the same fleet"
        bill = (
            f"{dollars(abs(less))} a month {'less' if less > 0 else 'more'}" if abs(less) >= 0.01 else "the same bill"
        )
        yield f"with what was measured: {fleet}, {bill}"


def _value(name: str, value: float) -> str:
    return milliseconds(value) if name in ("ttft_s", "tpot_s") else significant(value)


def _between(name: str, interval: Mapping[str, float]) -> str:
    return f"{_value(name, interval['low'])} to {_value(name, interval['high'])}"

"""`crosstie validate`: predictions against measured results."""

from pathlib import Path
from typing import Any

import click

from crosstie.catalog.library import Catalog
from crosstie.catalog.writing import write_text
from crosstie.cli.answer import Drawing, Wanted, answer_options, plot_option
from crosstie.cli.options import FILE, tool_options
from crosstie.cli.progress import progress
from crosstie.core.errors import BadInput
from crosstie.core.figures import percent, share
from crosstie.prove.calibration.validate import GROUPINGS, METRICS, Validation, document, predictions, validate
from crosstie.web.parts import Parts, Table, closing
from crosstie.web.reliability_chart import reliability_picture

_HEADLINES = {
    "by_accelerator": "accelerator",
    "by_engine": "engine",
    "by_model": "model",
    "by_source": "source",
    "by_nearness": "nearest measurement behind the estimate",
}
_SHOWN = ("tpot", "ttft", "throughput")
_DETAILS = "errors by engine, model, source and nearest measurement, and every reason why a row was not predicted"
_REASONS = 3
_ODD_ROWS = 5


@click.command("validate")
@click.argument("files", nargs=-1, required=True, metavar="RESULTS...", type=FILE)
@click.option("--predictions", "target", type=FILE, metavar="OUT.csv",
              help="Write every row with its prediction and interval, or the reason why there is none.")  # fmt: skip
@plot_option("Draw how far intervals hold")
@tool_options
@answer_options(_DETAILS, html=True)
def command(
    files: tuple[Path, ...], target: Path | None, plot: Drawing, wanted: Wanted,
    **given: str,
) -> int:  # fmt: skip
    """How far predictions are from measured results: coverage, error, rank and intervals.

    \b
    crosstie validate mine.csv
    crosstie validate results.csv.gz --predictions predicted.csv
    crosstie validate results.csv.gz --plot reliability.svg
    crosstie validate bench.json --accelerator mi300x --tp 8

    RESULTS are files of AIPerf, guidellm, `vllm bench serve`, `sglang.bench_serving`, InferenceX, `crosstie bench` and
    `crosstie replay`, or an mlperf_log_summary.txt, as they are; or CSV files, gzipped or not, with one metric a row
    and at least the columns accelerator, model, precision, engine, input_len, output_len, concurrency, metric, unit and
    value (docs/validate.md has all of them, and the metrics). Every row is predicted the way it was measured: a closed
    loop with its start burst, one batch, the most that memory or latency limits allow, or one step's GPU work. A row
    that cannot be predicted is counted with its reason.

    Errors are absolute percentage errors; the bias is the median of the signed error, negative where the
    prediction is too low. Exit status 1 when no row could be predicted.
    """
    if target and target.resolve() in [file.resolve() for file in files]:
        raise BadInput(f"--predictions {target} would replace the RESULTS")
    with progress("reading") as on_progress:
        validation = validate(Catalog(), files, on_progress, given)
    if target:
        write_text(target, predictions(validation))
    names = ", ".join(file.name for file in files)
    of = names if len(names) < 70 else f"{len(files)} files"
    plot.draw(lambda: reliability_picture(validation.outcomes, f"How far intervals hold: {of}"))
    wanted.give(
        lambda: {**document(validation), "emulated": _emulated(validation)},
        lambda details: parts(validation, details),
        title=f"Predicted against measured: {names}",
    )
    if target and not wanted.as_json:
        click.echo(f"predictions written to {target}", err=True)
    return 0 if validation.outcomes else 1


def _emulated(validation: Validation) -> int:
    """Rows that no GPU was measured for."""
    return sum(outcome.case.point["emulated"] == "yes" for outcome in validation.outcomes)


def parts(validation: Validation, verbose: bool) -> Parts:
    made = document(validation)
    yield f"{made['rows']:,} rows, {made['covered']:,} predicted ({share(made['coverage'])})"
    reasons = list(made["uncovered"].items())
    yield from (f"  {count:,} not: {reason}" for reason, count in reasons[: None if verbose else _REASONS])
    if not validation.outcomes:
        return
    if _emulated(validation):
        yield f"{_emulated(validation):,} of them are of emulated replicas: how well the model agrees with itself"
    cells = [
        [METRICS[name], f"{error['n']:,}", *(percent(error[key]) for key in ("median_ape", "p90_ape", "bias"))]
        for name, error in made["metrics"].items()
        if error["n"]
    ]
    yield Table(["~metric", ">rows", ">median error", ">90th percentile", ">bias"], cells)
    ranked, alike, held = made["rank"], made["rank"]["alike"], made["interval"]
    if ranked["pairs"]:
        right = f"{ranked['correct']:,} of {ranked['pairs']:,} pairs of accelerators in the right order"
        yield f"rank: {right} ({share(ranked['correct'] / ranked['pairs'])})"
    if alike["pairs"]:
        right = share(alike["correct"] / alike["pairs"])
        yield f"  at the same clients and GPUs: {alike['correct']:,} of {alike['pairs']:,} ({right})"
    if held["n"]:
        width = f"the middle one {held['width']:.2f}x from low to high"
        yield f"intervals meant to hold {share(held['level'])} hold {share(held['inside'])} of {held['n']:,}; {width}"
        for name, groups in made["intervals"].items() if verbose else ():
            yield from _sharpness(name, groups)
        yield from _odd(made["odd"], verbose)
    for key in GROUPINGS if verbose else ("by_accelerator",):
        yield from _group(_HEADLINES[key], made[key])
    if not verbose:
        yield closing(_DETAILS)


def _sharpness(title: str, groups: dict[str, Any]) -> Parts:
    """Shares within the intervals, and their width, side by side: neither says much without the other."""
    columns = [f"~{title}", ">TPOT inside", ">wide", ">TTFT inside", ">wide", ">tok/s inside", ">wide", ">rows"]
    cells = []
    for name, metrics in groups.items():
        line = [name]
        for metric in _SHOWN:
            coverage = metrics.get(metric)
            line += [share(coverage["inside"]), f"{coverage['width']:.2f}x"] if coverage else ["-", "-"]
        cells.append([*line, f"{sum(told['n'] for told in metrics.values()):,}"])
    yield Table(columns, cells)


def _odd(odd: dict[str, Any], verbose: bool) -> Parts:
    for name, table in odd["sources"].items():
        few = ", ".join(f"{metric} {share(inside)}" for metric, inside in table.items())
        yield f"odd: fewer than half of {name}'s rows lie within their intervals ({few})"
    for row in odd["rows"][:_ODD_ROWS] if verbose else ():
        between = f"{row['low']:.4g} to {row['high']:.4g}"
        yield f"odd: {row['file']} line {row['line']}: {row['metric']} {row['measured']:.4g}, 80% interval {between}"


def _group(title: str, groups: dict[str, Any]) -> Parts:
    """Median errors side by side, rows in small beside them."""
    columns = [f"~{title}", ">TPOT", ">rows", ">TTFT", ">rows", ">throughput", ">rows"]
    cells = []
    for name, metrics in groups.items():
        line = [name]
        for metric in _SHOWN:
            error = metrics.get(metric, {"n": 0})
            line += [percent(error["median_ape"]), f"{error['n']:,}"] if error["n"] else ["-", "-"]
        cells.append(line)
    yield Table(columns, cells)

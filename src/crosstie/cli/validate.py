"""`crosstie validate`: predictions against measured results."""

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from crosstie.catalog.library import Catalog
from crosstie.catalog.writing import write_text
from crosstie.cli.show import console, json_option, print_json, print_table, share, table
from crosstie.core.errors import BadInput
from crosstie.prove.calibration.results import read_results
from crosstie.prove.calibration.validate import GROUPINGS, METRICS, Validation, document, predictions, validate

_HEADLINES = {
    "by_accelerator": "accelerator",
    "by_engine": "engine",
    "by_model": "model",
    "by_source": "source",
    "by_nearness": "nearest measurement behind the estimate",
}
_SHOWN = ("tpot", "ttft", "throughput")


@click.command("validate")
@click.argument("files", nargs=-1, required=True, metavar="RESULTS...", type=click.Path(path_type=Path))
@click.option("--predictions", "target", type=click.Path(path_type=Path), metavar="OUT.csv",
              help="Write every row with its prediction and interval, or the reason why there is none.")  # fmt: skip
@json_option
def command(files: tuple[Path, ...], target: Path | None, as_json: bool) -> int:
    """How far predictions are from measured results: coverage, error, rank and intervals.

    \b
    crosstie validate mine.csv
    crosstie validate results.csv.gz --predictions predicted.csv

    RESULTS are CSV files, gzipped or not, with one metric a row and at least the columns accelerator, model,
    precision, engine, input_len, output_len, concurrency, metric, unit and value (docs/validate.md has all of
    them, and the metrics). Every row is predicted the way it was measured: a closed loop with its start burst, one
    batch, the most that memory or latency limits allow, or one step's GPU work. A row that cannot be predicted
    is counted with its reason.

    Errors are absolute percentage errors; the bias is the median of the signed error, negative where the
    prediction is too low. Exit status 1 when no row could be predicted.
    """
    if target and target.resolve() in [file.resolve() for file in files]:
        raise BadInput(f"--predictions {target} would replace the RESULTS")
    found = validate(Catalog(), read_results(*files))
    if target:
        write_text(target, predictions(found))
    if as_json:
        print_json(document(found))
    else:
        show(found)
        if target:
            click.echo(f"predictions written to {target}", err=True)
    return 0 if found.outcomes else 1


def show(found: Validation) -> None:
    out = console()
    made = document(found)
    out.print(f"{made['rows']:,} rows, {made['covered']:,} predicted ({share(made['coverage'])})")
    for reason, count in made["uncovered"].items():
        out.print(f"  {count:,} not: {reason}", soft_wrap=True)
    if not found.outcomes:
        return
    columns = [("", "left"), ("rows", "right"), ("median error", "right"), ("90th percentile", "right")]
    cells = [
        [METRICS[name], f"{error['n']:,}", *(percent(error[key]) for key in ("median_ape", "p90_ape", "bias"))]
        for name, error in made["metrics"].items()
        if error["n"]
    ]
    print_table(out, table("", [*columns, ("bias", "right")], cells))
    for key in GROUPINGS:
        _group(out, _HEADLINES[key], made[key])
    ranked, alike = made["rank"], made["rank"]["alike"]
    if ranked["pairs"]:
        out.print(
            f"rank: {ranked['correct']:,} of {ranked['pairs']:,} pairs of accelerators in the right order "
            f"({share(ranked['correct'] / ranked['pairs'])})"
        )
    if alike["pairs"]:
        right = share(alike["correct"] / alike["pairs"])
        out.print(f"  at the same clients and GPUs: {alike['correct']:,} of {alike['pairs']:,} ({right})")
    held = made["interval"]
    if held["n"]:
        out.print(f"intervals meant to hold {share(held['level'])} hold {share(held['inside'])} of {held['n']:,}")
    for fleet in made["fleets"]:
        ratio = share(fleet["measured_over_sum"])
        out.print(
            f"fleet {fleet['fleet']}, {fleet['model']} {fleet['scenario']}: {fleet['predicted']:,.0f} tok/s predicted, "
            f"{fleet['measured']:,.0f} measured, which is {ratio} of the {fleet['sum_of_parts']:,.0f} of its parts",
            soft_wrap=True,
        )


def _group(out: Console, title: str, groups: dict[str, Any]) -> None:
    """Median errors side by side, rows in small beside them."""
    columns = [(title, "left"), *((part, "right") for name in _SHOWN for part in (name.upper(), "rows"))]
    columns = [(heading.replace("THROUGHPUT", "throughput"), side) for heading, side in columns]
    cells = []
    for name, metrics in groups.items():
        line = [name]
        for metric in _SHOWN:
            error = metrics.get(metric, {"n": 0})
            line += [percent(error["median_ape"]), f"{error['n']:,}"] if error["n"] else ["-", "-"]
        cells.append(line)
    print_table(out, table("", columns, cells))


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"

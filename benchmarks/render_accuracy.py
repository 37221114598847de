"""Makes the tables of docs/accuracy.md anew from the shipped calibration and measurements.

python benchmarks/render_accuracy.py          (make accuracy)

The page is prose with places for tables, `<!-- name -->` to `<!-- end -->`; `fill` puts each table in its place.
"""

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crosstie.catalog.calibration import MODE_LEVELS, Calibration
from crosstie.catalog.library import Catalog
from crosstie.catalog.writing import write_text
from crosstie.core.errors import BadInput
from crosstie.prove.calibration.calibrate import SHIPPED_RESULTS
from crosstie.prove.calibration.validate import Validation, document, summary, validate
from interval_bar import LEAST, MOST, judged

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "accuracy.md"
PEER = ROOT / "benchmarks" / "results"
Errors = dict[str, dict[str, float]]
Row = dict[str, str]
_METRICS = ("tpot", "ttft", "throughput")
_HEADINGS = ("TPOT", "TTFT", "throughput", "rows of each")
_PLACE = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str, tables: dict[str, Callable[[], str]]) -> str:
    """The page with every table made anew; a place without a table, or a table without a place, is a fault."""
    places = [name for _, name, _ in _PLACE.findall(page)]
    for name in {*places} ^ {*tables}:
        raise BadInput(f"accuracy page: '{name}' is a {'place without a table' if name in places else 'table alone'}")
    return _PLACE.sub(lambda match: f"{match[1]}{tables[match[2]]()}\n{match[3]}", page)


def tables(catalog: Catalog, peer: Path) -> dict[str, Callable[[], str]]:
    """`peer`: the folder that benchmarks/aisimulate_points.py and aisimulate_accuracy.py write to."""
    made = catalog.calibration
    return {
        "left_out": lambda: left_out(made),
        "amd": lambda: listed(made, "a curve left out", ("mi300x", "mi325x", "mi350x", "mi355x")),
        "sources": lambda: listed(made, "a source left out", _sources(made)),
        "accelerators": lambda: listed(made, "a curve left out", sorted(catalog.accelerators)),
        "stacks": lambda: listed(made, "a curve left out", sorted(catalog.stacks)),
        "modes": lambda: modes(made),
        "best": lambda: best(made),
        "models": lambda: listed(made, "a model left out", sorted(catalog.models)),
        "new_accelerators": lambda: listed(made, "an accelerator left out", sorted(catalog.accelerators)),
        "intervals": lambda: intervals(made),
        "bar": lambda: bar(made),
        "worst": lambda: worst(made),
        "shipped": lambda: shipped(catalog),
        "peer": lambda: beside(peer),
        "peer_alone": lambda: alone(peer),
    }


def _sources(made: Calibration) -> list[str]:
    """Of those that were left out whole, not the accelerators."""
    begin = "a curve left out: "
    named = [title.removeprefix(begin) for title in made.errors if title.startswith(begin)]
    return [name for name in named if "_" in name]


def modes(made: Calibration) -> str:
    titles = [title for title in made.errors if " left out, " in title and ":" not in title]
    return _table(
        ("left out of the fit", *_HEADINGS),
        ((_in_words(title), *_cells(made.errors[title]), _rows(made.errors[title])) for title in titles),
    )


def _in_words(mode: str) -> str:
    """A mode as the documents call it; the calibration's keys keep their older word."""
    return mode.replace("apart", "disaggregated")


def best(made: Calibration) -> str:
    """Of every published curve the best tokens/s a GPU at equal tokens/s a user, with the curve left out."""
    lines = []
    for words, end in (("plain serving", ""), *((mode, f", {mode}") for mode in MODE_LEVELS)):
        curves, order = made.errors[f"best of a curve{end}"], made.errors[f"accelerators by it{end}"]
        error, pairs = curves["throughput"], order["pairs"]
        ordered = f"{_share(pairs['right'])} of {pairs['n']:,.0f}"
        lines.append((_in_words(words), f"{error['n']:,.0f}", _both(error), ordered))
    return _table(("", "curves", "error, median / p90", "accelerators ordered right"), lines)


def left_out(made: Calibration) -> str:
    titles = [title for title in made.errors if title.endswith("left out")]
    return _table(
        ("left out of the fit", *_HEADINGS),
        ((title, *_cells(made.errors[title]), _rows(made.errors[title])) for title in titles),
    )


def listed(made: Calibration, title: str, names: Sequence[str]) -> str:
    found = [(name, made.errors[f"{title}: {name}"]) for name in names if f"{title}: {name}" in made.errors]
    return _table((title, *_HEADINGS), ((name, *_cells(errors), _rows(errors)) for name, errors in found))


def bar(made: Calibration) -> str:
    """By what was left out: how many groups of rows hold what they should, and how many of the others it makes odd."""
    groups = judged(made.coverage)
    lines = []
    for title in ("", *(title for title in made.coverage if ": " not in title)):
        own = [group for group in groups if not title or group.title.partition(": ")[0] == title]
        odd = sum(not group.within and not group.likely for group in own)
        lines.append((title or "all", f"{len(own)}", f"{sum(group.within for group in own)}", f"{odd}"))
    heads = ("left out of the fit", "groups", f"{LEAST:.0%} to {MOST:.0%} inside", "not, and odd by chance")
    return _table(heads, lines)


def worst(made: Calibration) -> str:
    lines = [
        (group.title, group.metric, f"{group.rows}", f"{group.inside:.0%}", f"{group.width:.2f}x",
         f"{group.least:.0%} to {group.most:.0%}")
        for group in judged(made.coverage)[:8]
    ]  # fmt: skip
    return _table(("left out, and of it", "metric", "rows", "inside", "width", "in 99 of 100 cases"), lines)


def intervals(made: Calibration) -> str:
    """The share of left-out rows that intervals hold, beside how wide these are: neither says much alone."""
    titles = [title for title in made.coverage if ": " not in title]
    return _table(
        ("left out of the fit", *_HEADINGS[:3]),
        ((title, *(_held(made.coverage[title].get(metric)) for metric in _METRICS)) for title in titles),
    )


def _held(one: dict[str, float] | None) -> str:
    return f"{_share(one['inside'])}, {one['width']:.2f}x" if one else "-"


def shipped(catalog: Catalog) -> str:
    """Over the shipped results, which the calibration has seen: coverage and rank are what to read here."""
    first, second = (validate(catalog, file) for file in SHIPPED_RESULTS[:2])
    found = document(
        Validation(first.rows + second.rows, first.outcomes + second.outcomes, first.missed + second.missed)
    )
    ranked, alike = found["rank"], found["rank"]["alike"]
    energy = found["metrics"]["energy"]
    lines = [
        ("rows of 2024 to April 2026 predicted", f"{_share(first.coverage)} of {first.rows:,}"),
        ("rows of November 2026 predicted", f"{_share(second.coverage)} of {second.rows:,}"),
        ("joules of an output token, median / p90", f"{_both(energy)} of {energy['n']:,}"),
        (
            "pairs of accelerators ordered right",
            f"{_share(ranked['correct'] / ranked['pairs'])} of {ranked['pairs']:,}",
        ),
        ("at the same clients and GPUs", f"{_share(alike['correct'] / alike['pairs'])} of {alike['pairs']:,}"),
    ]
    return _table(("", ""), lines)


def joined(peer: Path) -> dict[str, list[Row]]:
    """Points with AISimulate's answers beside the measured and our left-out figures, by kind of serving.

    Those that it was not waited for are in none of them.
    """
    answers = {row["point"]: row for row in _read(peer / "aisimulate-answers.csv")}
    kinds: dict[str, list[Row]] = {
        "plain, NVIDIA": [], "speculative, NVIDIA": [], "apart, NVIDIA": [], "speculative and apart, NVIDIA": [],
        "all kinds, AMD": [],
    }  # fmt: skip
    for point in _read(peer / "aisimulate-points.csv"):
        if point["point"] in answers and not answers[point["point"]]["reason"].startswith("no end"):
            said = {f"peer_{name}": value for name, value in answers[point["point"]].items()}
            mode = "all kinds" if point["vendor"] == "AMD" else point["mode"] or "plain"
            kinds[f"{mode}, {point['vendor']}"].append(point | said)
    return kinds


def _read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


_WHO = {"Crosstie": "left_out_", "AISimulate": "peer_"}
_PEER_METRICS = ("tpot_s", "ttft_s", "tokens_per_s")


def answered(point: Row, who: str) -> bool:
    return bool(point["peer_attempt"]) if who == "AISimulate" else not point["reason"]


def peer_cells(points: list[Row], who: str) -> list[str]:
    cells = []
    for metric in _PEER_METRICS:
        pairs = [(point[_WHO[who] + metric], point[metric]) for point in points]
        errors = [float(said) / float(measured) - 1.0 for said, measured in pairs if said and measured]
        cells.append(f"{_both(summary(np.array(errors)))} of {len(errors)}" if errors else "-")
    return cells


def beside(peer: Path) -> str:
    """The points that both answer, so that neither is judged by what the other avoids."""
    rows = []
    for kind, points in joined(peer).items():
        both = [point for point in points if all(answered(point, who) for who in _WHO)]
        for who in _WHO:
            count = sum(answered(point, who) for point in points)
            formulas = sum(point["peer_attempt"] == "formulas" for point in points) if who == "AISimulate" else 0
            share = f"{count} of {len(points)}" + f", {formulas} by formulas" * (formulas > 0)
            rows.append((_in_words(kind), who, share, *peer_cells(both, who)))
    return _table(("points", "", "answered", *_HEADINGS[:3]), rows)


def alone(peer: Path) -> str:
    """All that each answers."""
    kinds = joined(peer)
    kinds["all kinds, NVIDIA"] = [point for points in kinds.values() for point in points if point["vendor"] != "AMD"]
    return _table(
        ("points", "", *_HEADINGS[:3]),
        (
            (_in_words(kind), who, *peer_cells([point for point in points if answered(point, who)], who))
            for kind, points in kinds.items()
            for who in _WHO
        ),
    )


def _both(error: dict[str, float]) -> str:
    return f"{100 * error['median_ape']:.1f} / {100 * error['p90_ape']:.0f} %"


def _cells(errors: Errors) -> list[str]:
    return [_both(errors[metric]) if metric in errors else "-" for metric in _METRICS]


def _rows(errors: Errors) -> str:
    return ", ".join(f"{errors[metric]['n']:,.0f}" if metric in errors else "-" for metric in _METRICS)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


if __name__ == "__main__":
    write_text(PAGE, fill(PAGE.read_text(encoding="utf-8"), tables(Catalog([]), PEER)))
    print(f"{PAGE.relative_to(ROOT)} rendered")

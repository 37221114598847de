"""What is measured, predicted and missed, by accelerator and model, beside the peer that answers too: a static site.

    python benchmarks/scoreboard.py [FOLDER]          (make scoreboard: site/scoreboard)

From the shipped data alone: the results that Crosstie ships, the calibration's errors on what it was not shown, and
AISimulate's answers (benchmarks/aisimulate_accuracy.py). index.html, and a page for each accelerator.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from crosstie.catalog.calibration import Calibration
from crosstie.catalog.library import Catalog
from crosstie.catalog.writing import write_folder
from crosstie.core.figures import share
from crosstie.prove.calibration.calibrate import SHIPPED_RESULTS
from crosstie.prove.calibration.results import read_results
from crosstie.prove.calibration.validate import Missed, PredictedRow, Validation, summary, validate
from crosstie.web.parts import Heading, Parts, Table, note
from crosstie.web.report import KeyNumber, report_of, write_report
from render_accuracy import PEER, ROOT, Row, answered, joined, peer_cells

_METRICS = {"tpot": "TPOT", "ttft": "TTFT", "throughput": "throughput"}
# Where the shades of an error end, as shares of what was measured.
_SHADES = (0.05, 0.1, 0.2, 0.4)
_HONEST = "Every measurement here was published by others; Crosstie has run nothing on AMD."
_SEEN = "error: median of |predicted / measured - 1|, over rows that the calibration has seen"
_PEER = "median / p90 of |predicted / measured - 1|, of so many; Crosstie's fit had not seen the curve"
_UNSEEN = "error: median / p90 of what was predicted by a fit that had not seen the curve"


def _error(outcomes: Iterable[PredictedRow]) -> float | None:
    errors = [one.error for one in outcomes if one.metric in _METRICS]
    return summary(np.array(errors))["median_ape"] if errors else None


def _tone(error: float | None) -> str:
    return "" if error is None else f"heat-{sum(error >= end for end in _SHADES)}"


def _place(one: PredictedRow) -> tuple[str, str]:
    deployment = one.case.deployment
    return deployment.accelerator.id, deployment.model.id


def _missed_at(one: Missed) -> tuple[str, str]:
    return (str(one.point["accelerator"]), str(one.point["model"])) if one.point else ("", "")


def _heat(
    found: dict[tuple[str, str], list[PredictedRow]], accelerators: Sequence[str], models: Sequence[str]
) -> Table:
    rows, tones = [], []
    for model in models:
        cells = [found.get((name, model), []) for name in accelerators]
        errors = [_error(cell) for cell in cells]
        rows.append([model, *("-" if each is None else f"{share(each)} of {len(own)}"
                            for each, own in zip(errors, cells, strict=True))])  # fmt: skip
        tones.append(["", *map(_tone, errors)])
    return Table(["model", *(f">{name}" for name in accelerators)], rows, "Error by model and accelerator", tones=tones)


def _median_and_p90(error: dict[str, float] | None) -> str:
    return f"{share(error['median_ape'])} / {share(error['p90_ape'])}" if error else "-"


def _left_out(made: Calibration, names: Sequence[str], what: str) -> Table:
    rows, tones = [], []
    for name in names:
        errors = made.errors.get(f"a curve left out: {name}")
        if errors:
            own = [errors.get(metric) for metric in _METRICS]
            rows.append([name, *map(_median_and_p90, own)])
            tones.append(["", *(_tone(one["median_ape"] if one else None) for one in own)])
    return Table([what, *(f">{word}" for word in _METRICS.values())], rows, f"Unseen, by {what}", tones=tones)


def _beside(points: Sequence[Row], what: str) -> Table:
    """Points that both answer: neither is judged by what the other avoids."""
    rows = []
    for name in sorted({point[what] for point in points}):
        own = [point for point in points if point[what] == name]
        both = [point for point in own if all(answered(point, who) for who in ("Crosstie", "AISimulate"))]
        for who in ("Crosstie", "AISimulate"):
            count = f"{sum(answered(point, who) for point in own)} of {len(own)}"
            rows.append([name, who, count, *peer_cells(both, who)])
    return Table([what, "", ">answered", *(f">{word}" for word in _METRICS.values())], rows,
                 f"Beside NVIDIA's AISimulate, by {what}, on what both answer")  # fmt: skip


def _reasons(missed: Sequence[Missed]) -> Parts:
    reasons = Counter(one.reason for one in missed).most_common()
    yield Table(["~reason", ">rows"], [[why, f"{rows:,}"] for why, rows in reasons], "What is not predicted, and why")


def _counts(found: Validation | tuple[list[PredictedRow], list[Missed]]) -> list[KeyNumber]:
    outcomes, missed = (found.outcomes, found.missed) if isinstance(found, Validation) else found
    held = [one.held for one in outcomes if one.has_interval]
    return [
        KeyNumber("rows measured", f"{len(outcomes) + len(missed):,}"),
        KeyNumber("predicted", f"{len(outcomes):,}", share(len(outcomes) / max(len(outcomes) + len(missed), 1))),
        KeyNumber("missed", f"{len(missed):,}"),
        KeyNumber("inside their 80% interval", share(sum(held) / len(held)) if held else "-"),
    ]


def _of_one(outcomes: Sequence[PredictedRow], missed: Sequence[Missed], points: Sequence[Row]) -> Parts:
    yield note(_SEEN)
    models = defaultdict(list)
    for one in outcomes:
        models[_place(one)[1]].append(one)
    unpredicted = Counter(_missed_at(one)[1] for one in missed)
    rows, tones = [], []
    for model in sorted(models.keys() | unpredicted.keys()):
        own = [[one for one in models[model] if one.metric == metric] for metric in _METRICS]
        errors = [_error(each) for each in own]
        cells = [f"{share(error)} of {len(each):,}" if error is not None else "-"
                 for each, error in zip(own, errors, strict=True)]  # fmt: skip
        rows.append([model, *cells, f"{len(models[model]):,}", f"{unpredicted[model]:,}"])
        tones.append(["", *map(_tone, errors), "", ""])
    columns = ["model", *(f">{word}" for word in _METRICS.values()), ">predicted", ">missed"]
    yield Table(columns, rows, "By model", tones=tones)
    if points:
        yield _beside(points, "model")
    if missed:
        yield from _reasons(missed)
    yield note(_HONEST)


def _index(found: Validation, catalog: Catalog, points: Sequence[Row]) -> Parts:
    places = defaultdict(list)
    for one in found.outcomes:
        places[_place(one)].append(one)
    accelerators, models = (sorted({place[at] for place in places}) for at in (0, 1))
    yield note(f"{_HONEST} {_SEEN}.")
    yield _heat(places, accelerators, models)
    yield Heading("On what the fit had not seen")
    yield note(_UNSEEN)
    yield _left_out(catalog.calibration, accelerators, "accelerator")
    yield _left_out(catalog.calibration, models, "model")
    yield _beside(points, "accelerator")
    yield note(_PEER)
    yield from _reasons(found.missed)


def pages(catalog: Catalog, results: Sequence[Path], peer: Path) -> dict[str, str]:
    found = validate(catalog, read_results(*results))
    points = [point for kind in joined(peer).values() for point in kind]
    names = sorted({_place(one)[0] for one in found.outcomes})
    links = [("index.html", "all"), *((f"{name}.html", name) for name in names)]
    made = {"index.html": write_report(report_of(
        "How well Crosstie predicts what was measured", list(_index(found, catalog, points)), facts=_counts(found),
        links=links,
    ))}  # fmt: skip
    for name in names:
        own = [one for one in found.outcomes if _place(one)[0] == name]
        missed = [one for one in found.missed if _missed_at(one)[0] == name]
        beside = [point for point in points if point["accelerator"] == name]
        title = f"{name}: measured and predicted"
        parts = list(_of_one(own, missed, beside))
        made[f"{name}.html"] = write_report(report_of(title, parts, facts=_counts((own, missed)), links=links))
    return made


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site" / "scoreboard"
    folder.parent.mkdir(exist_ok=True)
    write_folder("scoreboard", folder, pages(Catalog([]), SHIPPED_RESULTS[:2], PEER))
    print(f"{folder}/index.html written")

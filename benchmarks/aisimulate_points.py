"""Published serving points for a comparison with AISimulate, each with what Crosstie says when its curve is left out.

    python benchmarks/aisimulate_points.py        (minutes; writes benchmarks/results/aisimulate-points.csv)

Closed loops of clients are drawn from the shipped results with a fixed seed, so many of each kind of serving and
vendor; nightly repeats of a configuration count once. A row that does not say its layout stays in, with the reason.
`left_out_*`: our prediction by the shipped calibration without the point's whole curve (its configuration at all
concurrencies). `benchmarks/aisimulate_accuracy.py` asks AISimulate for the same points.
"""

import csv
import random
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import msgspec
import numpy as np

from crosstie.catalog.calibration import LEVELS, MODE_LEVELS
from crosstie.catalog.library import Catalog
from crosstie.core.estimate import CONSTANTS
from crosstie.prove.calibration.calibrate import SHIPPED_RESULTS, Inputs, read_inputs
from crosstie.prove.calibration.cases import Cases, MeasuredCase, measured_subject
from crosstie.prove.calibration.columns import SAYS_NO, UNPREDICTABLE, number, reason_of
from crosstie.prove.calibration.groups import left_out_groups
from crosstie.prove.calibration.predict import QUANTITIES, quantity_of
from crosstie.prove.calibration.regression import Regression, gather
from crosstie.prove.calibration.results import OperatingPoint, read_results

OUT = Path(__file__).parent / "results" / "aisimulate-points.csv"
SEED = 17
# Points of each kind, NVIDIA's and AMD's.
SIZES = {"": (100, 50), "speculative": (40, 25), "apart": (40, 25), "speculative and apart": (30, 20)}
MODES = tuple(SIZES)[1:]
COLUMNS = ("point", "mode", "vendor", "accelerator", "engine", "model", "experts", "precision", "kv_format",
           "input_tokens", "output_tokens", "shortest", "clients", "requests", "replicas", "tp", "pp", "dp", "ep",
           "prefill_replicas", "prefill_tp", "prefill_dp", "prefill_ep", "chunk_tokens", "max_sequences",
           "drafts", "depth", "kept", "source", "date",
           "ttft_statistic", "tpot_statistic", "ttft_s", "tpot_s", "tokens_per_s",
           "left_out_ttft_s", "left_out_tpot_s", "left_out_tokens_per_s", "reason")  # fmt: skip
Cells = dict[str, str | float]
Drawn = MeasuredCase | tuple[OperatingPoint, str]
_NAMES = {"ttft_mean": "ttft_s", "ttft_p50": "ttft_s", "tpot": "tpot_s", "output_tokens_per_s": "tokens_per_s"}


def unsaid(catalog: Catalog) -> Iterator[tuple[OperatingPoint, str]]:
    """Closed loops that the rows do not let one lay out, with the reason."""
    resolve = Cases(catalog)
    for point in read_results(*SHIPPED_RESULTS[:2]).points:
        try:
            resolve.of(point)
        except UNPREDICTABLE as error:
            if number(point["concurrency"]):
                yield point, reason_of(error)


def left_out(catalog: Catalog, inputs: Inputs) -> dict[tuple[str, str], float]:
    """By a point's conditions and quantity: our prediction with its curve left out."""
    made = catalog.calibration
    plain_scopes = {scope: parts for scope, parts in made.scopes.items() if scope.partition(" / ")[0] not in MODES}
    resolve = Cases(catalog.calibrated_by(msgspec.structs.replace(made, scopes=plain_scopes)))
    plain = [case for case in inputs.cases if not measured_subject(case).mode]
    others = [resolve.of(old.point) for old in inputs.cases if measured_subject(old).mode]
    found: dict[tuple[str, str], float] = {}
    for cases, kernels, levels in ((plain, inputs.kernels, LEVELS), (others, [], MODE_LEVELS)):
        evidence = gather(catalog, cases, kernels)
        fit = Regression(catalog, evidence, levels, more=cases is others)
        parts = np.array([made.scopes.get(scope, (0.0,) * len(CONSTANTS)) for scope in fit.scopes])
        (errors,) = fit.left_out(parts, left_out_groups(evidence)["curve"])
        for row in np.flatnonzero(~np.isnan(errors)):
            point = evidence.cases[evidence.origin[row]].point
            log = evidence.logs[row] - evidence.factor[row] + errors[row]
            found[key_of(point), QUANTITIES[evidence.quantity[row]]] = float(np.exp(log))
    return found


def key_of(point: OperatingPoint) -> str:
    return repr(sorted(point.conditions.items()))


def drawn(catalog: Catalog, cases: Sequence[MeasuredCase]) -> Iterator[Drawn]:
    """So many of each kind, in an order of which every beginning is a sample too."""
    kinds: dict[tuple[str, str], list[Drawn]] = {}
    for case in cases:
        kinds.setdefault((measured_subject(case).mode, case.deployment.accelerator.vendor), []).append(case)
    for point, reason in unsaid(catalog):
        kinds.setdefault((mode_of(point), catalog.accelerator(point["accelerator"]).vendor), []).append((point, reason))
    chosen: list[list[Drawn]] = []
    for mode, sizes in SIZES.items():
        for vendor, size in zip(("NVIDIA", "AMD"), sizes, strict=True):
            every = sorted(
                kinds[mode, vendor], key=lambda one: key_of(one.point if isinstance(one, MeasuredCase) else one[0])
            )
            print(f"{mode or 'plain'}, {vendor}: {size} of {len(every)}")
            chosen.append(random.Random(SEED).sample(every, size))
    for turn in zip_longest(*chosen):
        yield from (one for one in turn if one is not None)


def cells_of(case: MeasuredCase, ours: dict[tuple[str, str], float]) -> Cells:
    made, split = case.deployment, case.deployment.parallelism
    draft = made.speculation
    cells: Cells = {
        "mode": measured_subject(case).mode, "vendor": made.accelerator.vendor, "accelerator": made.accelerator.id,
        "engine": made.stack.id, "model": made.model.id, "experts": made.model.experts if made.model.is_moe else 0,
        "precision": case.point["precision"], "kv_format": made.kv_format, "input_tokens": case.input_tokens,
        "output_tokens": case.output_tokens, "shortest": case.shortest, "clients": case.clients,
        "requests": case.requests, "replicas": case.service.decode_replicas if case.service else case.replicas,
        "tp": split.tp, "pp": split.pp, "dp": split.dp, "ep": split.ep,
        "chunk_tokens": made.stack.chunk_tokens.value, "max_sequences": made.stack.max_sequences.value,
        "source": case.point["source_id"], "date": case.point["date"],
    }  # fmt: skip
    if draft is not None:
        cells |= {"drafts": draft.method, "depth": draft.depth, "kept": round(draft.acceptance_length - 1.0, 3)}
    if case.service is not None:
        own = case.service.prefill.parallelism
        cells |= {
            "prefill_replicas": case.service.prefill_replicas,
            "prefill_tp": own.tp,
            "prefill_dp": own.dp,
            "prefill_ep": own.ep,
        }
        cells["chunk_tokens"] = case.service.prefill.stack.chunk_tokens.value
    for row in case.point.rows:
        name, scale = quantity_of(case, row.metric)
        column = _NAMES.get(name)
        if not column or not scale or column in cells:
            continue
        cells[column] = float(f"{row.value / scale:.6g}")
        if row.metric.kind in ("ttft", "tpot"):
            cells[f"{row.metric.kind}_statistic"] = row.metric.statistic
        if (key_of(case.point), name) in ours:
            cells[f"left_out_{column}"] = float(f"{ours[key_of(case.point), name]:.6g}")
    return cells


def main() -> None:
    catalog = Catalog([])
    inputs = read_inputs(catalog, SHIPPED_RESULTS)
    chosen = list(drawn(catalog, [case for case in inputs.cases if case.method == "loop"]))
    write(chosen, left_out(catalog, inputs), catalog)


def write(chosen: Sequence[Drawn], ours: dict[tuple[str, str], float], catalog: Catalog) -> None:
    with OUT.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for index, one in enumerate(chosen):
            point = one.point if isinstance(one, MeasuredCase) else one[0]
            if "?" in point["spec_decode"] + point["disagg"]:
                # How it was served is a guess of whoever collected the row.
                continue
            writer.writerow(
                {"point": index} | (cells_of(one, ours) if isinstance(one, MeasuredCase) else bare(one, catalog))
            )
    print(f"of {len(chosen)} points those whose kind is known are in {OUT.name}")


def bare(one: tuple[OperatingPoint, str], catalog: Catalog) -> Cells:
    point, reason = one
    accelerator = catalog.accelerator(point["accelerator"])
    return {"mode": mode_of(point), "vendor": accelerator.vendor, "accelerator": accelerator.id, "reason": reason}


def mode_of(point: OperatingPoint) -> str:
    said = {"speculative": point["spec_decode"], "apart": point["disagg"]}
    return " and ".join(word for word, cell in said.items() if cell.casefold() not in SAYS_NO)


if __name__ == "__main__":
    main()

"""The best of published curves against what would be chosen there: is the layout that looks best as good as it looks?

    python benchmarks/best_layouts.py [--sure 0.8] [--json] [--worst 10]

A curve is one accelerator, model, precision, engine and kind of serving at one pair of lengths, in all layouts and
concurrencies that its publisher tried. Of its measured best (tokens/s a GPU at equal tokens/s a user) each point is
held against the best of the layouts that a plan offers there, by the shipped calibration, at the user's speed:

    published   layouts and loads a GPU that the publisher measured
    within      all layouts of at most the GPUs that were published, at loads a GPU between the least and the most
    free        all layouts, at any load

An optimiser takes what is overestimated most, so errors grow from line to line. The calibration has seen these points,
which makes the first line better than a forecast, and says nothing of the layouts that nobody measured. Of a free
choice a part of the difference is true: nobody publishes all that runs. Beyond the fastest that a layout of ours gives
a user, its tokens/s a GPU stand for it. `--sure`: estimates as slow as a plan that is to be so sure reads them.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment
from crosstie.core.disaggregated import Servable
from crosstie.core.errors import CrosstieError
from crosstie.core.estimate import METRICS
from crosstie.core.workload import Slice
from crosstie.decide.plan.apart import able, in_numbers
from crosstie.decide.plan.candidates import key_of
from crosstie.perf.fit import candidate_layouts, surely_fits
from crosstie.perf.hardware import Array
from crosstie.perf.worlds import world_logs
from crosstie.prove.calibration.cases import Cases, MeasuredCase
from crosstie.prove.calibration.groups import frontier
from crosstie.prove.calibration.predict import Predictor, quantity_of
from crosstie.prove.calibration.published import all_results

_CURVE = (
    "source_id",
    "accelerator",
    "engine",
    "model",
    "precision",
    "input_len",
    "output_len",
    "spec_decode",
    "disagg",
)
_FEWEST = 4
_LOADS = 10
_MOST_CLIENTS_A_GPU = 256.0


@dataclass
class Curve:
    """Cases with what was measured of each: tokens a second of a user, and of a GPU."""

    key: tuple[str, ...]
    cases: list[MeasuredCase]
    user: list[float]
    gpu: list[float]

    @property
    def kind(self) -> str:
        case = self.cases[0]
        drafts = "speculative" if case.deployment.speculation else ""
        return " and ".join(name for name in (drafts, "disaggregated" if case.service else "") if name) or "plain"


def curves(catalog: Catalog) -> list[Curve]:
    cases, found = Cases(catalog), dict[tuple[str, ...], Curve]()
    for point in all_results().points:
        try:
            case = cases.of(point)
        except (CrosstieError, ValueError):
            continue
        measured = dict[str, float]()
        for row in point.rows:
            try:
                name, factor = quantity_of(case, row.metric)
            except (CrosstieError, KeyError, ValueError):
                continue
            measured[name] = row.value / factor
        if case.method == "loop" and {"tpot", "output_tokens_per_s"} <= measured.keys():
            key = tuple(point[name] for name in _CURVE)
            curve = found.setdefault(key, Curve(key, [], [], []))
            curve.cases.append(case)
            curve.user.append(1.0 / measured["tpot"])
            curve.gpu.append(measured["output_tokens_per_s"] / case.gpus)
    return [curve for curve in found.values() if len(curve.cases) >= _FEWEST]


def offered(catalog: Catalog, curve: Curve) -> Iterator[Servable]:
    """The layouts that a plan would look at, of this model, precision, engine and drafts."""
    case = curve.cases[0]
    first, context = case.deployment, int(case.input_tokens + case.output_tokens)
    splits = [split for split in candidate_layouts(first.model, first.accelerator) if split.pp == 1]
    each = [msgspec.structs.replace(first, parallelism=split) for split in splits]
    held = [catalog.calibrated(one) for one in each if surely_fits(one, context)]
    if case.service is None:
        yield from held
        return
    inputs, outputs = int(case.input_tokens), int(case.output_tokens)
    of_all = Slice(
        share=1.0, input_tokens=float(inputs), output_tokens=float(outputs), longest_input=inputs,
        longest_output=outputs, sample=((inputs, outputs),),
    )  # fmt: skip
    for sides, connector in able(catalog, held, [of_all]):
        yield from in_numbers([(prefill, decode) for prefill in sides for decode in sides], connector, [of_all])


def loaded(case: MeasuredCase, one: Servable, loads: Iterable[float]) -> Iterator[MeasuredCase]:
    """A layout under so many requests in flight a GPU."""
    for clients in sorted({max(round(load * one.gpus), 1) for load in loads}):
        deployment = one if isinstance(one, Deployment) else one.decode
        service = None if isinstance(one, Deployment) else one
        yield replace(
            case, deployment=deployment, service=service, replicas=1.0, clients=float(clients), requests=10 * clients
        )


def chosen(user: Array, gpu: Array, at: Sequence[float]) -> list[float]:
    """The most tokens a second of a GPU at so many of a user; those of the fastest where none is so fast."""
    best = frontier(np.log(user), np.log(gpu))
    return [float(np.exp(best.at(np.log(speed)))) for speed in at]


def slower(cases: Sequence[MeasuredCase], sure: float) -> Array:
    """Factors on the speed of a user and of a GPU, as in the slowest of the worlds that one wants to be sure of."""
    known, found = dict[object, tuple[float, float]](), np.ones((len(cases), 2))
    for row, case in enumerate(cases):
        one = case.service or case.deployment
        key = key_of(one), case.input_tokens, case.output_tokens
        if key not in known:
            logs = world_logs([one], case.input_tokens, case.output_tokens)[0]
            ends = ("tpot", sure), ("throughput", 1.0 - sure)
            tpot, rate = (float(np.quantile(logs[:, METRICS.index(name)], end)) for name, end in ends)
            known[key] = float(np.exp(-tpot)), float(np.exp(rate))
        found[row] = known[key]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sure", type=float, default=0.5, help="as plans read estimates; 0.5: as they are")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worst", type=int, default=10, help="so many of the worst curves of each line")
    asked = parser.parse_args()
    catalog = Catalog([])
    asked_cases: list[MeasuredCase] = []
    places: list[tuple[int, str, int, int]] = []
    all_curves = curves(catalog)
    for number, curve in enumerate(all_curves):
        case = curve.cases[0]
        loads = [one.load for one in curve.cases]
        most = max(one.gpus for one in curve.cases)
        grid = np.geomspace(min(loads), max(loads), _LOADS)
        layouts = list(offered(catalog, curve))
        wide = np.geomspace(1.0 / max([one.gpus for one in layouts], default=1), _MOST_CLIENTS_A_GPU, _LOADS)
        begun = len(asked_cases)
        asked_cases += curve.cases
        places.append((number, "published", begun, len(asked_cases)))
        begun = len(asked_cases)
        asked_cases += [made for one in layouts if one.gpus <= most for made in loaded(case, one, grid)]
        places.append((number, "within", begun, len(asked_cases)))
        begun = len(asked_cases)
        asked_cases += [made for one in layouts for made in loaded(case, one, wide)]
        places.append((number, "free", begun, len(asked_cases)))
    got = Predictor(asked_cases).predict()
    gpus = np.array([case.gpus for case in asked_cases])
    user, gpu = 1.0 / got["tpot"], got["output_tokens_per_s"] / gpus
    if asked.sure != 0.5:
        factors = slower(asked_cases, asked.sure)
        user, gpu = user * factors[:, 0], gpu * factors[:, 1]
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    worst: dict[str, list[tuple[float, str, float, float, str]]] = defaultdict(list)
    unanswered = dict.fromkeys(("published", "within", "free"), 0)
    for number, line, begun, ended in places:
        curve = all_curves[number]
        best = frontier(np.log(curve.user), np.log(curve.gpu))
        at = np.exp(best.user)
        known = np.flatnonzero(np.isfinite(user[begun:ended] * gpu[begun:ended])) + begun
        if not len(known):
            unanswered[line] += len(at)
            continue
        predicted = chosen(user[known], gpu[known], list(at))
        for speed, measured, said in zip(at, np.exp(best.gpu), predicted, strict=True):
            error = float(said / measured - 1.0)
            errors[line, "all"].append(error)
            errors[line, curve.kind].append(error)
            fast = known[user[known] >= speed * 0.999]
            name = asked_cases[fast[np.argmax(gpu[fast])]] if len(fast) else None
            layout = "none" if name is None else (name.service or name.deployment).layout
            worst[line].append((error, " ".join(curve.key[:6]), float(speed), float(measured), layout))
    rows = [
        {
            "line": line,
            "kind": kind,
            "points": len(found),
            "median": round(float(np.median(np.abs(found))), 3),
            "p90": round(float(np.quantile(np.abs(found), 0.9)), 3),
            "bias": round(float(np.median(found)), 3),
        }
        for (line, kind), found in errors.items()
    ]
    if asked.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(
            f"{row['line']:10} {row['kind']:32} {row['points']:5} points  median {row['median']:.0%}"
            f"  p90 {row['p90']:.0%}  bias {row['bias']:+.0%}"
        )
    for line, found in worst.items():
        print(f"\n{line}: {unanswered[line]} points without any layout; the furthest off")
        for error, name, speed, measured, layout in sorted(found, key=lambda one: -abs(one[0]))[: asked.worst]:
            print(f"  {error:+8.0%}  {name}  at {speed:.0f} tokens/s a user, {measured:.0f} a GPU, chosen {layout}")


if __name__ == "__main__":
    main()

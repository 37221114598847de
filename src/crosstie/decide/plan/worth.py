"""Which one measurement would save most: estimates that are far from any measurement are counted with warily, and a
measurement that finds one as good as it looks would save the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crosstie.core.deployment import Deployment
from crosstie.decide.plan.optimise import Choice
from crosstie.decide.plan.programme import Solution
from crosstie.decide.plan.scaling import WorldScaling
from crosstie.decide.plan.solver import solve
from crosstie.perf.hardware import Array
from crosstie.port.preflight.readiness import Readiness

# Of what looks best without whole replicas, so many are worked out; and savings below this share are not told.
_TRIED = 3
_LEAST = 0.01
# Requests of a measurement, over those in flight: enough to be in a steady state for most of it.
_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Worth:
    """A replica to measure, under which load, and what the fleet would cost less if it were as fast as estimated."""

    deployment: Deployment
    input_tokens: int
    output_tokens: int
    in_flight: int
    saves_usd_per_hour: float
    # Of the fleet that would then be the answer.
    gpus: dict[str, int]
    # The mean of what is saved over all worlds: nothing where it turns out no faster than it is counted with now.
    expected_usd_per_hour: float = 0.0

    def commands(self, judged: Readiness) -> list[str]:
        """How to start it, to measure it and to learn from that; where the engine has no benchmark, by replay."""
        d = self.deployment
        flags = [setting for setting in judged.settings if setting.startswith("--")]
        variables = [setting for setting in judged.settings if not setting.startswith("--")]
        lengths = f"--random-input-len {self.input_tokens} --random-output-len {self.output_tokens}"
        load = f"--max-concurrency {self.in_flight} --num-prompts {self.in_flight * _ROUNDS}"
        if d.stack.id == "vllm":
            start = ["vllm serve MODEL", *_vllm_layout(d)]
            measure = f"vllm bench serve --model MODEL --dataset-name random {lengths} --ignore-eos {load}"
            measure += " --save-result"
        elif d.stack.id == "sglang":
            start = ["python -m sglang.launch_server --model-path MODEL", *_sglang_layout(d)]
            measure = f"python -m sglang.bench_serving --dataset-name random {lengths} --random-range-ratio 1.0 {load}"
            measure += " --output-file result.jsonl"
        else:
            start = []
            measure = f"crosstie replay requests.csv --url http://HOST:8000 --model {d.model.id} --json > result.json"
        begun = [" ".join([*variables, *start, *flags])] if start else []
        return [*begun, measure, "crosstie calibrate RESULT"]


def _vllm_layout(deployment: Deployment) -> list[str]:
    split, drafts = deployment.parallelism, deployment.speculation
    config = f'{{"method": "mtp", "num_speculative_tokens": {drafts.depth}}}' if drafts else ""
    return [
        f"--tensor-parallel-size {split.tp}",
        *([f"--pipeline-parallel-size {split.pp}"] if split.pp > 1 else []),
        *([f"--data-parallel-size {split.dp}"] if split.dp > 1 else []),
        *(["--enable-expert-parallel"] if split.ep > 1 else []),
        *([f"--speculative-config '{config}'"] if drafts and drafts.method == "mtp" else []),
    ]


def _sglang_layout(deployment: Deployment) -> list[str]:
    split, drafts = deployment.parallelism, deployment.speculation
    # SGLang counts attention replicas within the ranks of --tp.
    steps = f"--speculative-num-steps {drafts.depth} --speculative-eagle-topk 1" if drafts else ""
    return [
        f"--tp {split.tp * split.dp}",
        *([f"--pp-size {split.pp}"] if split.pp > 1 else []),
        *([f"--dp {split.dp} --enable-dp-attention"] if split.dp > 1 else []),
        *([f"--ep {split.ep}"] if split.ep > 1 else []),
        *([f"--speculative-algorithm NEXTN {steps}"] if drafts and drafts.method == "mtp" else []),
    ]


def worth_measuring(asked: Choice, hopeful: Choice, answer: Solution, scaling: WorldScaling) -> Worth | None:
    """`hopeful`: the same question by the estimates themselves; `scaling`: how they are read in the first. None where
    no measurement would save a percent."""
    base = _cost_by_part(asked)
    families: dict[tuple[str, str, str], list[int]] = {}
    for place, column in enumerate(hopeful.offers.columns):
        d = column.deployment
        if isinstance(d, Deployment) and d.correction.worlds:
            families.setdefault((d.model.id, d.accelerator.id, d.stack.id), []).append(place)
    at_best = _cost_by_column(hopeful)
    demand = asked.problem.demand
    saved = {
        family: float((base - np.minimum(base, at_best[places].min(axis=0))) @ demand)
        for family, places in families.items()
    }
    worths = [
        worth
        for family in sorted(saved, key=lambda f: -saved[f])[:_TRIED]
        if saved[family] > _LEAST * answer.usd_per_hour
        and (worth := _worth(asked, hopeful, answer, families[family], scaling)) is not None
    ]
    return max(worths, key=lambda one: one.saves_usd_per_hour, default=None)


def _cost_by_column(asked: Choice) -> Array:
    problem = asked.problem
    return problem.per_request(problem.replica_usd_per_hour)


def _cost_by_part(asked: Choice) -> Array:
    return np.asarray(_cost_by_column(asked).min(axis=0))


def _worth(
    asked: Choice, hopeful: Choice, answer: Solution, places: Sequence[int], scaling: WorldScaling
) -> Worth | None:
    measured = hopeful.offers.only(np.array(places, np.int64))
    first = len(asked.offers.columns)
    read = asked.with_offers(asked.offers.beside(measured))
    fleet = solve(read.problem, quickly=True)
    if fleet is None:
        return None
    saves = answer.usd_per_hour - fleet.usd_per_hour
    used = [place for place in np.flatnonzero(fleet.replicas).tolist() if place >= first]
    if not used or saves < _LEAST * answer.usd_per_hour:
        return None
    main = max(used, key=lambda place: fleet.replicas[place] * read.problem.replica_usd_per_hour[place])
    rate = read.problem.rate[main]
    load = np.divide(fleet.share[main] * read.problem.demand, rate, out=np.zeros_like(rate), where=rate > 0)
    part = int(np.argmax(load))
    piece = read.offers.parts[part].slice
    deployment = read.offers.columns[main].deployment
    assert isinstance(deployment, Deployment)
    return Worth(
        deployment=deployment,
        input_tokens=max(round(piece.input_tokens), 1),
        output_tokens=max(round(piece.output_tokens), 1),
        in_flight=max(round(float(read.offers.capacity.in_flight[main, part])), 1),
        saves_usd_per_hour=saves,
        gpus=read.gpus(fleet),
        expected_usd_per_hour=saves * _realised(deployment, scaling),
    )


def _realised(deployment: Deployment, scaling: WorldScaling) -> float:
    """The mean share of a saving that worlds have: all of it where a replica is as fast as estimated, none where it is
    no faster than it is counted with, and in proportion to what its requests cost between and beyond."""
    counted, rates = float(scaling([deployment]).rate[0]), scaling.in_worlds(deployment).rate
    if counted >= 1.0:
        return 0.0
    return float(np.maximum((1.0 - counted / rates) / (1.0 - counted), 0.0).mean())

"""Which one measurement would save most, and the commands that make it."""

import msgspec
import pytest
from tests.present import present

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.decide.plan.plan import Plan, plan
from crosstie.decide.plan.worth import Worth
from crosstie.port.preflight.readiness import Readiness

from .workloads import one_class, workload

CATALOG = Catalog([])
BIG = one_class("chat", 60.0, {"median": 800, "p95": 4000}, 250, model="llama-3.3-70b")


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(CATALOG, workload(BIG, accelerators=("mi355x",), sure=0.9, whole_nodes=False))


def test_it_saves_what_the_interval_costs(made: Plan) -> None:
    one = present(made.worth_measuring)
    # No single measurement saves more than all estimates turning out right would.
    everything = present(made.fleet).usd_per_hour - present(made.by_estimates).usd_per_hour
    assert 0.0 < one.saves_usd_per_hour <= everything * 1.03
    assert one.deployment.accelerator.id in one.gpus
    # Slower worlds save nothing and faster ones more.
    assert 0.2 * one.saves_usd_per_hour < one.expected_usd_per_hour < 2.0 * one.saves_usd_per_hour
    assert one.deployment.correction.worlds
    assert made.measure_commands[-1] == "crosstie calibrate RESULT"
    assert f"--random-input-len {one.input_tokens} " in made.measure_commands[1]


@pytest.mark.slow
def test_where_nothing_is_unsure_nothing_is_worth_measuring(uncalibrated: Catalog) -> None:
    assert plan(uncalibrated, workload(BIG, accelerators=("mi355x",), sure=0.9)).worth_measuring is None
    assert plan(CATALOG, workload(BIG, accelerators=("mi355x",), sizing="likely")).worth_measuring is None


def test_commands_start_the_engine_as_it_was_planned(made: Plan) -> None:
    one = present(made.worth_measuring)
    judged = Readiness(engine="sglang", release="0.5.18", verdict="ready", settings=("A=1", "--attention-backend x"))

    def commands(stack: str, **split: int) -> list[str]:
        changed = {
            "stack": CATALOG.stack(stack),
            "parallelism": Parallelism(**split),
            "model": CATALOG.model("qwen3-235b-a22b"),
        }
        return Worth(
            msgspec.structs.replace(one.deployment, **changed), 1000, 200, 16, 1.0, {"mi355x": 8}
        ).commands(judged)  # fmt: skip

    start, measure, _ = commands("sglang", tp=4, dp=2, ep=8)
    assert start == (
        "A=1 python -m sglang.launch_server --model-path MODEL --tp 8 --dp 2 --enable-dp-attention --ep 8 "
        "--attention-backend x"
    )
    assert "--max-concurrency 16 --num-prompts 160" in measure
    start, measure, _ = commands("vllm", tp=2, pp=2)
    assert start == "A=1 vllm serve MODEL --tensor-parallel-size 2 --pipeline-parallel-size 2 --attention-backend x"
    assert "--random-input-len 1000 --random-output-len 200 --ignore-eos --max-concurrency 16" in measure
    replay, learn = commands("atom", tp=1)
    assert replay.startswith("crosstie replay requests.csv --url ")
    assert learn == "crosstie calibrate RESULT"

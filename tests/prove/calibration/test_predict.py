"""Predictions the way things were measured: laws between their numbers, and limits that are known."""

import math

import numpy as np
import pytest
from tests.prove.calibration.rows import point

from crosstie.catalog.calibration import empty
from crosstie.catalog.library import Catalog
from crosstie.core.estimate import CONSTANTS
from crosstie.perf.hardware import Hardware
from crosstie.perf.steady_state import steady_state
from crosstie.perf.step import gpu_s, shape
from crosstie.prove.calibration import predict
from crosstie.prove.calibration.cases import Cases, MeasuredCase
from crosstie.prove.calibration.columns import NotPredicted
from crosstie.prove.calibration.predict import QUANTITIES, Predictor, quantity_of, schedule_of
from crosstie.prove.calibration.results import Metric
from crosstie.sim.schedule import Loop, Schedule, schedule


@pytest.fixture(scope="module")
def resolve(catalog: Catalog) -> Cases:
    return Cases(catalog)


def one(resolve: Cases, **changes: str) -> MeasuredCase:
    return resolve.of(point(**changes))


def predicted(*cases: MeasuredCase) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in Predictor(cases).predict().items()}


def test_one_client_has_a_step_a_token(resolve: Cases) -> None:
    case = one(resolve, concurrency="1")
    got = predicted(case)
    hardware = Hardware([case.deployment])
    alone = steady_state(hardware, 1, 1024, 128)
    assert got["tpot"][0] == pytest.approx(float(alone.tpot_s[0, 0]), rel=0.02)
    assert got["ttft_p50"][0] == pytest.approx(float(alone.ttft_s[0, 0]), rel=0.02)
    assert got["ttft_mean"][0] == pytest.approx(got["ttft_p99"][0])
    assert math.isnan(got["decode_step"][0])


def test_clients_that_have_settled_are_predicted_as_compare_does(resolve: Cases) -> None:
    """Steady arrivals beside a start burst and lock-step of equal requests: 128 clients wait many times as long."""
    steady = one(resolve, concurrency="128", arrivals="steady")
    burst = one(resolve, concurrency="128", arrivals="lockstep")
    got = predicted(steady, burst)
    found = steady_state(Hardware([steady.deployment]), 128, 1024, 128)
    assert got["ttft_p50"][0] == pytest.approx(float(found.ttft_s[0, 0]))
    assert got["tpot"][0] == pytest.approx(float(found.tpot_s[0, 0]))
    assert got["output_tokens_per_s"][0] == pytest.approx(float(found.output_tokens_per_s[0, 0]))
    assert got["ttft_p50"][1] > 3 * got["ttft_p50"][0]
    # Which share of the roofline that is, is what power is predicted by.
    ideal = Predictor([steady, burst]).ideal()["run"]
    reached = ideal / [got["run"][0], got["run"][1]]
    assert 0.1 < reached[0] < 1.0
    assert reached[0] == pytest.approx(reached[1], rel=0.3)
    alone = predicted(one(resolve, concurrency="1", arrivals="steady"))
    assert (alone["ttft_p99"], alone["tpot_p99"]) == (alone["ttft_p50"], alone["tpot"])


@pytest.mark.parametrize("clients", ["16", "128"])
def test_predictions_keep_littles_law(resolve: Cases, clients: str) -> None:
    """All rounds but the last keep every client inside."""
    case = one(resolve, concurrency=clients, num_prompts=str(20 * int(clients)))
    got = predicted(case)
    stay = got["ttft_mean"][0] + got["tpot"][0] * 127
    assert got["output_tokens_per_s"][0] * stay / 128 == pytest.approx(float(clients), rel=0.1)


def test_littles_law_of_one_client(resolve: Cases) -> None:
    case = one(resolve, concurrency="1", num_prompts="20", output_len="16")
    got = predicted(case)
    stay = got["ttft_mean"][0] + got["tpot"][0] * 15
    assert got["output_tokens_per_s"][0] == pytest.approx(16 / stay, rel=0.02)


def test_a_pipeline_serves_the_clients_that_it_has(resolve: Cases) -> None:
    few, many = (one(resolve, concurrency=n, parallelism="tp1 pp2", num_accelerators="2") for n in ("1", "64"))
    got = predicted(few, many)
    for case, rate, tpot in zip((few, many), got["output_tokens_per_s"], got["tpot"], strict=True):
        steady = steady_state(Hardware([case.deployment]), case.clients, 1024, 128)
        assert rate == pytest.approx(float(steady.output_tokens_per_s[0, 0]))
        assert tpot == pytest.approx(float(steady.tpot_s[0, 0]))
    assert got["output_tokens_per_s"][1] > 10 * got["output_tokens_per_s"][0]


def test_pipelines_and_full_loads_do_not_disturb_one_another(resolve: Cases) -> None:
    pipeline = one(resolve, concurrency="64", parallelism="tp1 pp2", num_accelerators="2")
    full = one(resolve, concurrency="max load")
    for quantity in ("output_tokens_per_s", "tpot"):
        together = predicted(pipeline, full)[quantity]
        assert together == pytest.approx([predicted(pipeline)[quantity][0], predicted(full)[quantity][0]])


def test_replicas_share_the_clients(resolve: Cases) -> None:
    single = one(resolve, concurrency="16", num_accelerators="1", tp="1")
    four = one(resolve, concurrency="64", num_accelerators="4", tp="1")
    got = predicted(single, four)
    assert got["tpot"][1] == pytest.approx(got["tpot"][0])
    assert got["output_tokens_per_s"][1] == pytest.approx(4 * got["output_tokens_per_s"][0])


def test_cases_do_not_depend_on_their_company(resolve: Cases) -> None:
    cases = [
        one(resolve),
        one(resolve, concurrency="200", model="qwen3-30b-a3b"),
        one(resolve, engine="sglang", input_len="4000"),
        one(resolve, scenario="one batch"),
        one(resolve, concurrency="max load"),
        one(resolve, concurrency="rate 3 req/s", num_prompts="50"),
        one(resolve, concurrency="", scenario="Server", notes="p99 limits TTFT 900 ms TPOT 30 ms"),
        one(resolve, metric="prefill_ms", unit="ms"),
    ]
    together = Predictor(cases).predict()
    for index, case in enumerate(cases):
        alone = Predictor([case]).predict()
        for name in QUANTITIES:
            np.testing.assert_allclose(
                together[name][index], alone[name][0], rtol=1e-9, err_msg=f"{name} {case.method}"
            )


def test_single_steps_are_the_gpu_s_work(resolve: Cases) -> None:
    case = one(resolve, metric="decode_step_ms", unit="ms", concurrency="8", input_len="2000")
    got = predicted(case)
    hardware = Hardware([case.deployment])
    assert got["decode_step"][0] == pytest.approx(float(gpu_s(hardware, shape(8, 2000))[0, 0]))
    assert got["prefill"][0] == pytest.approx(
        float(gpu_s(hardware, shape(prefill_tokens=16000, prefill_span=2000))[0, 0])
    )
    assert math.isnan(got["ttft_mean"][0])


def test_limits_hold_and_wider_limits_give_more() -> None:
    # A model that MLPerf does not have, and no calibration: nothing but the limits differs.
    resolve = Cases(Catalog([], calibration=empty()))
    note = "p99 limits TTFT {} ms TPOT {} ms"
    tight, wide, endless = (
        one(resolve, model="qwen3-8b", concurrency="", scenario="Server", notes=note.format(*limits))
        for limits in ((500, 15), (2000, 40), (100000, 100000))
    )
    got = predicted(tight, wide, endless)
    rate = got["output_tokens_per_s"]
    assert rate[0] < rate[1] < rate[2]
    for index, case in enumerate((tight, wide)):
        assert got["tpot_p99"][index] <= case.tpot_limit_s * 1.03
        assert got["ttft_p99"][index] <= case.ttft_limit_s * 1.03
    full = predicted(one(resolve, model="qwen3-8b", concurrency="max load"))["output_tokens_per_s"][0]
    assert rate[2] == pytest.approx(0.95 * full, rel=0.01)


def test_arrivals_by_the_clock(resolve: Cases) -> None:
    slow, fast = (one(resolve, concurrency=f"rate {n} req/s", num_prompts="200") for n in ("2", "100000"))
    got = predicted(slow, fast)
    assert got["output_tokens_per_s"][0] == pytest.approx(2 * 128, rel=0.02)
    full = predicted(one(resolve, concurrency="max load"))["output_tokens_per_s"][0]
    assert got["output_tokens_per_s"][1] == pytest.approx(full, rel=0.02)
    # More than can be served stand in a line.
    assert got["ttft_mean"][1] > 10 * got["ttft_mean"][0]


def test_arrivals_are_shared_by_replicas(resolve: Cases) -> None:
    one_gpu = one(resolve, concurrency="rate 5 req/s", num_prompts="100", tp="1", num_accelerators="1")
    two_gpus = one(resolve, concurrency="rate 10 req/s", num_prompts="200", tp="1", num_accelerators="2")
    got = predicted(one_gpu, two_gpus)
    assert got["tpot"][1] == pytest.approx(got["tpot"][0])
    assert got["ttft_mean"][1] == pytest.approx(got["ttft_mean"][0])
    assert got["output_tokens_per_s"][1] == pytest.approx(2 * got["output_tokens_per_s"][0])


def test_corrections_take_effect_and_can_be_taken_back(resolve: Cases) -> None:
    cases = [one(resolve), one(resolve, metric="decode_step_ms", unit="ms")]
    predictor = Predictor(cases)
    plain = {name: np.ones(2) for name in CONSTANTS}
    predictor.correct(plain)
    before = predictor.predict()
    predictor.correct({**plain, "kernel": np.array([3.0, 1.0]), "host_step": np.array([3.0, 1.0])})
    slower = predictor.predict()
    assert slower["tpot"][0] > 1.05 * before["tpot"][0]
    assert slower["decode_step"][1] == before["decode_step"][1]
    predictor.correct(plain)
    np.testing.assert_array_equal(predictor.predict()["tpot"], before["tpot"])


@pytest.mark.parametrize(
    ("metric", "name", "factor"),
    [
        (Metric("ttft", "p50"), "ttft_p50", 1.0),
        (Metric("ttft", "p95"), "ttft_p99", 1.0),
        (Metric("tpot", "p50"), "tpot", 1.0),
        (Metric("tpot", "p99"), "tpot_p99", 1.0),
        (Metric("throughput"), "output_tokens_per_s", 1.0),
        (Metric("throughput", per_gpu=True), "output_tokens_per_s", 0.25),
        (Metric("throughput", with_input=True), "output_tokens_per_s", 9.0),
        (Metric("throughput", per_gpu=True, with_input=True), "output_tokens_per_s", 2.25),
        (Metric("batch"), "run", 1.0),
        (Metric("step"), "run", 1 / 128),
        (Metric("prefill"), "prefill", 1.0),
    ],
)
def test_which_number_a_row_is_of(resolve: Cases, metric: Metric, name: str, factor: float) -> None:
    case = one(resolve, num_accelerators="4", tp="4")
    found, scale = quantity_of(case, metric)
    assert found == name
    assert scale == pytest.approx(factor)


def test_a_replica_s_schedule_has_its_share(resolve: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Loop] = []

    def spy(loop: Loop) -> Schedule:
        seen.append(loop)
        return real(loop)

    real = schedule
    monkeypatch.setattr(predict, "schedule", spy)
    schedule_of(one(resolve, model="qwen3-30b-a3b", concurrency="64", parallelism="tp1 attention_dp4 ep4",
                    num_accelerators="8", num_prompts="640", max_sequences="6"))  # fmt: skip
    # Two replicas of four attention replicas each; six sequences at once in each of these.
    assert (seen[0].clients, seen[0].slots, seen[0].requests) == (8, 6, 80)
    schedule_of(one(resolve, engine="sglang"))
    assert seen[1].prefill_first is not seen[0].prefill_first


def test_a_slip_of_clients_does_not_take_the_machine(resolve: Cases) -> None:
    with pytest.raises(NotPredicted, match="more clients than"):
        one(resolve, concurrency="1e9")

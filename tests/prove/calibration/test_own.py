"""Own measurements: they are met and make their pool surer, its neighbours less so, and what is far stays."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.conftest import Command
from tests.prove.calibration.rows import row, written
from tests.prove.calibration.test_calibrate import METRICS, cases_at, results

from crosstie.catalog.calibration import Calibration, calibration_text, empty, read_calibration
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.estimate import Estimate
from crosstie.perf.estimate import estimate
from crosstie.prove.calibration.cases import MeasuredCase
from crosstie.prove.calibration.kernels import KernelPredictor, MeasuredKernel, subject_of_kernel
from crosstie.prove.calibration.own import OWN, learn_own
from crosstie.prove.calibration.predict import Predictor, quantity_of
from crosstie.prove.calibration.results import MeasuredRow

SHIPPED = Catalog([])
FIVE = tuple((clients, 1024, 128) for clients in (1, 4, 16, 32, 64))
POOL = ("llama-3.1-8b", "mi300x", "vllm", 1)
NEIGHBOUR = ("llama-3.1-8b", "mi300x", "vllm", 2)
FAR = ("gpt-oss-120b", "b200", "tensorrt-llm", 1)


def at_speed(slower: Sequence[float]) -> list[MeasuredCase]:
    """Five loads of the pool, each so many times as slow as the shipped calibration predicts."""
    cases = cases_at(SHIPPED, FIVE, accelerator=POOL[1])
    columns = Predictor(cases).predict()
    for index, (case, times) in enumerate(zip(cases, slower, strict=True)):
        case.point.rows = []
        for metric in METRICS:
            name, scale = quantity_of(case, metric)
            value = float(columns[name][index]) * scale
            value = value / times if metric.kind == "throughput" else value * times
            case.point.rows.append(MeasuredRow("made.csv", index, metric, value))
    return cases


@pytest.fixture(scope="module")
def agreeing() -> Calibration:
    return learn_own(SHIPPED, at_speed([1.0] * 5), [], [])


@pytest.fixture(scope="module")
def slow() -> Calibration:
    return learn_own(SHIPPED, at_speed([1.2] * 5), [], [])


def estimated(calibration: Calibration, pool: tuple[str, str, str, int]) -> Estimate:
    model, accelerator, stack, tp = pool
    known = Catalog([], calibration=calibration)
    weights = "native" if model.startswith("gpt") else "bf16"
    one = known.deployment(
        known.model(model), known.accelerator(accelerator), Parallelism(tp=tp), weights, "bf16", stack
    )  # fmt: skip
    return estimate(one, concurrency=16, input_tokens=1024, output_tokens=128)


def narrowed(calibration: Calibration, pool: tuple[str, str, str, int]) -> float:
    """The width of TPOT's interval, as a logarithm, over what it was."""
    after, before = (estimated(one, pool).interval for one in (calibration, SHIPPED.calibration))
    assert after is not None
    assert before is not None
    return float(np.log(after.tpot_s[1] / after.tpot_s[0]) / np.log(before.tpot_s[1] / before.tpot_s[0]))


def moved(calibration: Calibration, pool: tuple[str, str, str, int]) -> float:
    return estimated(calibration, pool).tpot_s / estimated(SHIPPED.calibration, pool).tpot_s


@pytest.mark.slow
def test_five_rows_make_their_pool_surer_and_its_neighbour_less_so(agreeing: Calibration) -> None:
    pool, neighbour = narrowed(agreeing, POOL), narrowed(agreeing, NEIGHBOUR)
    print(f"TPOT interval, log width over before: {pool:.2f}, neighbour {neighbour:.2f}")
    assert pool <= 0.65
    assert pool < neighbour < 0.95


@pytest.mark.slow
def test_what_is_far_stays(agreeing: Calibration, slow: Calibration) -> None:
    for made in (agreeing, slow):
        assert narrowed(made, FAR) == pytest.approx(1.0, abs=0.05)
        assert moved(made, FAR) == pytest.approx(1.0, abs=0.01)


def test_rows_as_predicted_move_no_estimate(agreeing: Calibration) -> None:
    assert moved(agreeing, POOL) == pytest.approx(1.0, abs=0.005)
    assert agreeing.errors[OWN["before"]]["tpot"]["median_ape"] < 0.005


def test_slow_rows_move_the_estimate_towards_them(slow: Calibration) -> None:
    assert 1.1 < moved(slow, POOL) < 1.25
    assert 1.0 < moved(slow, NEIGHBOUR) < 1.25
    before, after = (slow.errors[OWN[one]]["tpot"]["median_ape"] for one in ("before", "model"))
    assert before == pytest.approx(1.0 - 1.0 / 1.2, abs=0.01)
    assert after < 0.6 * before


def test_one_wild_row_moves_little(agreeing: Calibration) -> None:
    wild = learn_own(SHIPPED, at_speed([1.0, 1.0, 10.0, 1.0, 1.0]), [], [])
    assert moved(wild, POOL) == pytest.approx(1.0, abs=0.05)
    assert narrowed(wild, POOL) > 0.95 * narrowed(agreeing, POOL)


@pytest.mark.parametrize("times", [0.1, 10.0])
def test_a_lone_wild_point_is_taken_for_a_slip(times: float) -> None:
    (lone,) = at_speed([times, *[1.0] * 4])[:1]
    made = learn_own(SHIPPED, [lone], [], [])
    assert 1.0 / 1.15 < moved(made, POOL) < 1.15
    assert narrowed(made, POOL) > 0.9


def test_a_lone_point_that_is_likely_is_learnt_from() -> None:
    (lone,) = at_speed([1.2, *[1.0] * 4])[:1]
    assert 1.07 < moved(learn_own(SHIPPED, [lone], [], []), POOL) < 1.25


def test_the_same_rows_give_the_same_to_the_bit(slow: Calibration) -> None:
    assert calibration_text(learn_own(SHIPPED, at_speed([1.2] * 5), [], [])) == calibration_text(slow)


def test_what_a_measured_configuration_is_off_by_besides_is_learnt(agreeing: Calibration) -> None:
    """Of that configuration alone; others are off by as much as any measurement is."""
    known, learnt = SHIPPED.calibration.posterior, agreeing.posterior
    assert known is not None
    assert learnt is not None
    (own,) = set(learnt.measured) - set(known.measured)
    assert "mi300x" in own
    scales = known.scales_of("", "vllm", "mi300x")
    assert learnt.metrics(own, scales).std() < 0.8 * known.metrics(own, scales).std()
    assert (learnt.metrics("another", scales) == known.metrics("another", scales)).all()


def test_what_was_known_before_is_kept(slow: Calibration) -> None:
    known = SHIPPED.calibration
    assert set(known.scopes) <= set(slow.scopes)
    assert sum(slow.points.values()) == sum(known.points.values()) + len(FIVE)
    assert len(slow.results) == len(known.results)
    assert "beside" in slow.made


def kernels_at_speed(slower: float) -> list[MeasuredKernel]:
    shapes = [
        MeasuredKernel(
            accelerator="h200", stack="pytorch", kind="gemm", format="bf16", seconds=1.0, m=m, n=4096.0, k=4096.0
        )
        for m in (1.0, 64.0, 4096.0)
    ]
    known = SHIPPED.calibration.factors(subject_of_kernel(SHIPPED, shapes[0]))
    predictor = KernelPredictor(SHIPPED, shapes)
    predictor.correct({name: np.full(len(shapes), factor) for name, factor in known.items()})
    return [
        msgspec.structs.replace(one, seconds=slower * float(seconds))
        for one, seconds in zip(shapes, predictor.predict(), strict=True)
    ]


def kernel_factors(slower: float) -> tuple[dict[str, float], dict[str, float]]:
    """Before and after kernels so much slower than is known."""
    kernels = kernels_at_speed(slower)
    subject = subject_of_kernel(SHIPPED, kernels[0])
    return SHIPPED.calibration.factors(subject), learn_own(SHIPPED, [], kernels, []).factors(subject)


def test_kernels_as_predicted_move_nothing() -> None:
    before, after = kernel_factors(1.0)
    assert after == pytest.approx(before, rel=1e-3)


def test_slow_kernels_are_met() -> None:
    before, after = kernel_factors(1.5)
    assert after["compute"] < 0.95 * before["compute"]


def test_rows_that_say_nothing_are_refused() -> None:
    with pytest.raises(BadInput, match="no row says anything"):
        learn_own(SHIPPED, [], [], [])


@pytest.mark.parametrize("change", [{"posterior": None}, {"constants": ("kernel",), "scopes": {}}], ids=str)
def test_a_calibration_of_another_version_is_fitted_again(change: dict[str, object]) -> None:
    old = msgspec.structs.replace(SHIPPED.calibration, **change)
    with pytest.raises(BadInput, match="learn with --full"):
        learn_own(Catalog([], calibration=old), at_speed([1.0] * 5), [], [])
    with pytest.raises(BadInput, match="learn with --full"):
        learn_own(Catalog([], calibration=empty()), at_speed([1.0] * 5), [], [])


def test_the_command_learns_quickly_and_starts_from_the_shipped_one_each_time(
    crosstie: Command, tmp_path: Path, uncalibrated: Catalog
) -> None:
    file = results(tmp_path / "mine.csv", uncalibrated)
    got = crosstie("calibrate", str(file))
    assert got.status == 0, got.err
    assert "mine.csv: 4 operating points" in got.out
    assert "as predicted before" in got.out
    assert "learnt, points left out" in got.out
    assert "--full fits everything again" in got.out
    own = tmp_path / "user-catalog" / "calibration.json"
    first = read_calibration(own)
    before = json.loads(crosstie("validate", str(file), "--json").out)["metrics"]["tpot"]["median_ape"]
    assert crosstie("calibrate", str(file)).status == 0
    again = read_calibration(own)
    assert again.scopes == first.scopes
    assert again.points == first.points
    assert json.loads(crosstie("validate", str(file), "--json").out)["metrics"]["tpot"]["median_ape"] == before
    refused = crosstie("calibrate", str(file), "--full", "--alone")
    assert refused.status == 2
    assert "give one of them" in refused.err
    tails = written(tmp_path / "tails.csv", row(metric="ttft_ms_p99", unit="ms"), row(concurrency="rate 2 req/s"))
    assert "no row says anything" in crosstie("calibrate", str(tails)).err

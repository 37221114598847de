"""What is learnt: corrections, scatter, lines, lengths; and the class of a request that names none."""

import math
from typing import Any

import pytest
from tests.route.fleets import MODEL, ask, chosen, fleet, live, pool, served, told

from crosstie.route.corrections import OnlineCorrection, Scatter, log_ratio
from crosstie.route.learnt import FittedLine
from crosstie.route.lengths import Classes, Lengths


def test_a_correction_follows_what_is_delivered_and_fades() -> None:
    one = OnlineCorrection(45.0)
    assert one.factor(0.0) == 1.0
    for index in range(12):
        one.teach(math.log(5.0), float(index))
    assert one.factor(12.0) == pytest.approx(5.0, rel=0.3)
    assert 1.0 < one.factor(150.0) < 2.5, "after minutes it is tried again"
    assert one.factor(1e6) == pytest.approx(1.0, abs=1e-3)
    for index in range(12):
        one.teach(0.0, 12.0 + index)
    assert one.factor(24.0) < 2.0


def test_one_outlier_does_not_decide() -> None:
    one = OnlineCorrection(45.0)
    for index in range(10):
        one.teach(0.0, float(index))
    one.teach(math.log(100.0), 10.0)
    assert one.factor(10.0) < 1.15


def test_corrections_are_bounded() -> None:
    for ratio in (-1e9, 1e9):
        one = OnlineCorrection(45.0)
        for _ in range(50):
            one.teach(ratio, 0.0)
        assert 0.05 < one.factor(0.0) < 50.0


def test_a_replica_starts_from_its_pool() -> None:
    shared = OnlineCorrection(600.0)
    known, new = OnlineCorrection(45.0, shared), OnlineCorrection(45.0, shared)
    for index in range(10):
        known.teach(math.log(3.0), float(index))
    assert 1.5 < new.factor(10.0) < 3.5
    for index in range(10):
        new.teach(0.0, 10.0 + index)
    assert new.factor(20.0) < known.factor(20.0)


def test_differences_that_do_not_matter_are_no_factors() -> None:
    assert log_ratio(0.003, 0.001, 0.02) < 0.1
    assert log_ratio(3.0, 1.0, 0.02) == pytest.approx(math.log(3.0), rel=0.02)


def test_scatter_widens_the_margin_and_narrows_it_again() -> None:
    one = Scatter()
    start = one.margin(1.64)
    for _ in range(100):
        one.teach(0.6)
    wide = one.margin(1.64)
    assert wide > 1.5 * start
    for _ in range(300):
        one.teach(-0.6)
    assert one.margin(1.64) == start, "sooner breaks nothing; a quiet hour does not use up the margin for a busy one"
    assert one.margin(0.0) == 1.0


def test_who_may_take_as_long_as_it_takes_says_nothing_of_scatter() -> None:
    one = Scatter()
    for _ in range(20):
        one.teach(0.6)
    wide = one.margin(1.64)
    for _ in range(100):
        one.teach(log_ratio(5.0, math.inf, 0.02))
        # As another gateway tells it.
        one.teach(-8.0)
    assert one.margin(1.64) == wide


def test_a_correction_may_start_with_what_others_have_learnt() -> None:
    one = OnlineCorrection(60.0)
    one.start(2.0, 0.0)
    assert one.factor(0.0) == pytest.approx(2.0, rel=0.11)
    for index in range(40):
        one.teach(0.0, float(index))
    assert one.factor(40.0) < 1.1


def test_a_line_is_found_and_followed() -> None:
    line = FittedLine(0.05, 2e-5, 1000.0)
    for index in range(200):
        size = 100.0 * (index % 30 + 1)
        line.add(size, 0.2 + 1e-4 * size)
    assert line.intercept == pytest.approx(0.2, rel=0.15)
    assert line.slope == pytest.approx(1e-4, rel=0.1)
    for index in range(400):
        size = 100.0 * (index % 30 + 1)
        line.add(size, 0.1 + 3e-4 * size)
    assert line.slope == pytest.approx(3e-4, rel=0.1)


def test_a_line_never_falls_and_stays_above_nothing() -> None:
    line = FittedLine(0.005, 0.001, 8.0)
    for index in range(100):
        line.add(float(index % 20), 0.5 - 0.02 * (index % 20))
    assert line.slope >= 0
    assert line.intercept > 0
    same = FittedLine(0.005, 0.001, 8.0)
    for _ in range(100):
        same.add(16.0, 0.08)
    assert same.intercept + 16 * same.slope == pytest.approx(0.08, rel=0.02)


def test_a_pool_of_unknown_speed_is_tried_and_then_known() -> None:
    both = live(pool("known", "h200"), pool("unknown", None), classes=())
    free: dict[str, Any] = {"class_name": None, "ttft_s": None, "tpot_s": None}
    assert chosen(both, "fastest", **free) == "unknown"
    for index in range(30):
        replica = both.pools[1].replicas[index % 2]
        flight = replica.start(ask(), told(), float(index))
        flight.first_token(index + 0.5)
        flight.end(index + 0.5 + 199 * 0.2, output_tokens=200, input_tokens=1000, completed=True)
    assert chosen(both, "fastest", now=31.0, **free) == "known"


def test_answers_are_expected_as_they_were_and_within_the_clients_limit() -> None:
    lengths = Lengths((served(output_tokens=200.0), served("code", output_tokens=30.0)))
    assert lengths.expected_output("chat", MODEL, None) == 200.0
    assert lengths.expected_output("chat", MODEL, 50) == 50.0
    assert lengths.expected_output("chat", MODEL, 0) == 1.0
    assert lengths.expected_output(None, MODEL, None) == 115.0
    assert lengths.expected_output("gone", "other", None) == 256.0
    for _ in range(1000):
        lengths.observe("chat", MODEL, output_tokens=400)
    assert lengths.expected_output("chat", MODEL, None) == pytest.approx(400.0, rel=0.05)
    assert lengths.expected_output("code", MODEL, None) == 30.0
    lengths.observe("chat", MODEL, output_tokens=None)


def test_bytes_of_a_token_are_learnt_from_usage() -> None:
    lengths = Lengths()
    assert lengths.input_tokens(MODEL, 4000) == 1000.0
    assert lengths.input_tokens(MODEL, 0) == 1.0
    for _ in range(200):
        lengths.observe(None, MODEL, output_tokens=1, input_tokens=1000, prompt_bytes=3000)
    assert lengths.input_tokens(MODEL, 3000) == pytest.approx(1000.0, rel=0.05)
    lengths.observe(None, MODEL, output_tokens=1, input_tokens=1, prompt_bytes=10**9)
    assert lengths.bytes_per_token(MODEL) == pytest.approx(3.0, rel=0.05), "no text has such tokens"
    assert lengths.bytes_per_token("other") == 4.0


def test_a_request_without_a_class_gets_the_nearest_or_the_default() -> None:
    classes = (
        served(input_tokens=1000.0),
        served("documents", input_tokens=20_000.0),
        served("else", model="qwen3-8b"),
    )
    plain = fleet(classes=classes)
    names = [one.name for size in (1, 1500, 4000, 5000, 10**6) if (one := Classes(plain).of(MODEL, size))]
    assert names == ["chat", "chat", "chat", "documents", "documents"]
    usual = fleet(classes=classes, default_class="documents")
    assert Classes(usual).of(MODEL, 10.0) == classes[1]
    assert Classes(usual).of("qwen3-8b", 10.0) == classes[2], "the default is of another model"
    assert Classes(plain).of("mistral-7b", 10.0) is None


def test_the_way_to_a_far_pool_is_expected_and_not_taken_for_slowness() -> None:
    found = live(pool("near", usd_per_gpu_hour=2.0), pool("far", network_s=0.2))
    assert chosen(found, ttft_s=1.0) == "far", "it is cheaper, and soon enough"
    assert chosen(found, ttft_s=0.2) == "near"
    near, far = (one.replicas[0] for one in found.pools)
    for replica, way_s in ((near, 0.0), (far, 0.2)):
        for index in range(20):
            flight = replica.start(ask(), told(ttft_s=0.05 + way_s), float(index))
            flight.prediction.raw_ttft_s = 0.05
            flight.first_token(index + 0.05 + way_s)
            flight.end(index + 0.9, output_tokens=None, input_tokens=None, completed=False)
    assert [far.ttft.factor(20.0), near.ttft.factor(20.0)] == pytest.approx([1.0, 1.0])
    assert far.advance(20.0).late_s == pytest.approx(0.2)

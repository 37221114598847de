"""Traffic now and soon."""

import pytest

from crosstie_gateway.scaler.learnt import DAY_S, Forecast, shape_at

DAY = (0.5,) * 12 + (1.0,) * 12


def fed(forecast: Forecast, minutes: int, rate: float, begin_s: float = 0.0) -> float:
    for minute in range(minutes):
        forecast.see(begin_s + 60.0 * minute, rate, 60.0)
    return begin_s + 60.0 * (minutes - 1)


def test_a_shape_goes_straight_between_the_middles_of_its_windows_and_round_the_day() -> None:
    assert shape_at((), 5.0) == 1.0
    assert shape_at((0.0, 1.0), DAY_S / 2) == pytest.approx(0.5)
    assert shape_at((0.0, 1.0), DAY_S * 0.75) == pytest.approx(1.0)
    assert shape_at((0.2, 1.0), 0.0) == shape_at((0.2, 1.0), DAY_S) == pytest.approx(0.6)


def test_the_level_is_what_is_seen_and_the_shape_says_what_follows() -> None:
    forecast = Forecast(shape=DAY)
    now = fed(forecast, 30, 5.0, 6 * 3600.0)
    assert forecast.now_per_s(now) == pytest.approx(5.0)
    assert forecast.at(now, 18 * 3600.0) == pytest.approx(10.0)
    assert forecast.peak(now, 18 * 3600.0) == pytest.approx(10.0)


def test_a_rise_that_no_day_has_is_followed_with_its_trend() -> None:
    forecast = Forecast()
    for minute in range(60):
        forecast.see(60.0 * minute, 10.0 + 0.2 * minute, 60.0)
    now = 59 * 60.0
    # Twelve a minute's fifth more each minute: in ten minutes two more than now.
    assert forecast.at(now, now + 600.0) == pytest.approx(23.8, rel=0.1)


def test_chance_is_no_trend() -> None:
    forecast = Forecast()
    now = fed(forecast, 60, 10.0)
    forecast.see(now + 60.0, 10.3, 60.0)
    assert forecast.at(now + 60.0, now + 660.0) < 10.2


def test_a_surge_counts_before_the_mean_has_noticed() -> None:
    forecast = Forecast()
    now = fed(forecast, 60, 10.0)
    forecast.see(now + 60.0, 30.0, 60.0)
    assert forecast.now_per_s(now + 60.0) < 15.0
    assert forecast.peak(now + 60.0, now + 660.0) > 25.0


def test_the_margin_grows_with_forecasts_that_were_wrong_and_shrinks_with_right_ones() -> None:
    right, wrong = Forecast(), Forecast()
    first = right.margin
    for minute in range(600):
        for forecast, rate in ((right, 10.0), (wrong, 10.0 + 5.0 * (minute // 60 % 2))):
            now = 60.0 * minute
            forecast.see(now, rate, 60.0)
            forecast.promise(now, now + 600.0)
    assert right.margin < first < wrong.margin


def test_another_clock_moves_the_day() -> None:
    here, there = Forecast(shape=DAY), Forecast(shape=DAY, offset_s=12 * 3600.0)
    for forecast in (here, there):
        forecast.see(6 * 3600.0, 5.0, 60.0)
    assert here.at(6 * 3600.0, 18 * 3600.0) == pytest.approx(10.0)
    assert there.at(6 * 3600.0, 18 * 3600.0) == pytest.approx(2.5)

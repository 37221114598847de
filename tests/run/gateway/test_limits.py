"""Limits by the minute: when one more fits, and how long to wait for it."""

from hypothesis import assume, given, strategies as st

from crosstie_gateway.gateway.limits import Window, rate_headers

COUNTS = st.integers(0, 10_000)


@given(st.integers(1, 5000), COUNTS, COUNTS, st.floats(0, 0.999), st.integers(1, 5000))
def test_who_waits_as_long_as_told_gets_in_and_not_much_sooner(
    limit: int, before: int, used: int, passed: float, more: int
) -> None:
    window = Window(limit, before, used, passed)
    assume(more <= limit)
    assume(not window.fits(more))

    def later(seconds: float) -> Window:
        at = passed + seconds / 60
        if at < 1:
            return Window(limit, before, used, at)
        return Window(limit, used, 0, at - 1) if at < 2 else Window(limit, 0, 0, 0.0)

    wait_s = window.wait_s(more)
    assert 0 < wait_s <= 120
    assert later(wait_s + 1e-6).fits(more)
    assert wait_s < 1 or not later(wait_s - 0.9).fits(more)


def test_a_burst_at_the_end_of_a_minute_is_not_forgotten_in_the_next() -> None:
    assert not Window(10, before=10, used=0, passed=0.01).fits(1)
    assert Window(10, before=10, used=0, passed=0.1).fits(1)
    assert not Window(10, before=10, used=5, passed=0.5).fits(1)
    assert Window(10, before=-5, used=-3, passed=0.5).now == 0


def test_headers_as_openai_writes_them() -> None:
    none = Window(0, 9, 9, 0.5)
    assert rate_headers(none, 1, none, 1) == b""
    said = rate_headers(Window(10, 0, 3, 0.25), 1, Window(1000, 500, 0, 0.5), 100)
    assert said.decode().splitlines() == [
        "x-ratelimit-limit-requests: 10", "x-ratelimit-remaining-requests: 6", "x-ratelimit-reset-requests: 1m45s",
        "x-ratelimit-limit-tokens: 1000", "x-ratelimit-remaining-tokens: 650", "x-ratelimit-reset-tokens: 1m30s",
    ]  # fmt: skip
    assert b"reset-requests: 0s" in rate_headers(Window(10, 0, 0, 0.5), 0, none, 0)
    assert b"remaining-requests: 0\r\n" in rate_headers(Window(10, 0, 30, 0.5), 0, none, 0)

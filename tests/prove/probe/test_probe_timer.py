"""The clocks: medians of device events, in a graph where there can be one."""

import pytest
from tests.prove.probe.fakes import FakeTorch

from crosstie.prove.probe.device import LEAST_SAMPLES, MOST_SAMPLES, GpuTimer, HostTimer, timing


def test_median_and_spread() -> None:
    found = timing([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 100.0], 2, True)
    assert found == (3.0, 11, 5.0, True)
    assert timing([0.0], 1, False).spread == 1.0


def test_a_short_kernel_is_repeated_inside_the_graph() -> None:
    torch = FakeTorch()
    found = GpuTimer(torch).time(lambda: torch.cuda.kernel(1e-5), budget_s=0.01)
    assert found.seconds == pytest.approx(1e-5)
    assert found.graph
    assert torch.cuda.captures == 2


def test_a_long_one_is_not() -> None:
    torch = FakeTorch()
    found = GpuTimer(torch).time(lambda: torch.cuda.kernel(0.5), operations=5, budget_s=0.0)
    assert found.seconds == pytest.approx(0.1)
    assert found.samples == LEAST_SAMPLES
    assert torch.cuda.captures == 1


def test_without_a_graph_it_says_so() -> None:
    torch = FakeTorch()
    torch.cuda.refuses_capture = True
    found = GpuTimer(torch).time(lambda: torch.cuda.kernel(1e-5), budget_s=10)
    assert found.seconds == pytest.approx(1e-5)
    assert not found.graph
    assert found.samples == MOST_SAMPLES
    torch.cuda.refuses_capture = False
    assert not GpuTimer(torch).time(lambda: torch.cuda.kernel(1e-5), graph=False, budget_s=0).graph


def test_an_interrupt_during_a_capture_is_not_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch()
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            try:
                raise KeyboardInterrupt
            finally:
                raise RuntimeError("capture_end failed")  # what PyTorch may say on the way out

    with pytest.raises(KeyboardInterrupt):
        GpuTimer(torch).time(run)


def test_the_host_clock_takes_the_fewest_samples_without_a_budget() -> None:
    calls = []
    found = HostTimer().time(lambda: calls.append(1), budget_s=0.0)
    assert found.samples == LEAST_SAMPLES
    assert len(calls) == LEAST_SAMPLES + 1
    assert GpuTimer(FakeTorch()).host(lambda: None, 10, budget_s=0.0).samples == LEAST_SAMPLES

"""The stand-in for a graph does what a graph does: acts at replay alone, on the same memory, with numbers built in."""

import subprocess
import sys

import pytest
import torch

from crosstie.port.split.graphs import recorder


def test_a_capture_does_nothing_and_a_replay_acts_once() -> None:
    state = torch.zeros(3)
    graph, _ = recorder(torch.device("cpu")).capture(lambda: state.add_(1))
    assert state.tolist() == [0, 0, 0]
    graph.replay()
    graph.replay()
    assert state.tolist() == [2, 2, 2]


def test_results_stay_where_they_are_and_follow_the_inputs() -> None:
    given = torch.ones(3)
    graph, out = recorder(torch.device("cpu")).capture(lambda: (given * 2).view(3, 1) + 1)
    where = out.data_ptr()
    given.fill_(5)
    graph.replay()
    assert out.tolist() == [[11], [11], [11]]
    assert out.data_ptr() == where


def test_a_number_of_python_is_stale_at_replay() -> None:
    given, step = torch.ones(1), 1
    graph, out = recorder(torch.device("cpu")).capture(lambda: given * step)
    step = 2
    given.fill_(10)
    graph.replay()
    assert out.item() == 10, "as on a GPU; a split must not build such a number in"


def test_an_error_passes_through() -> None:
    with pytest.raises(RuntimeError, match="size of tensor"):
        recorder(torch.device("cpu")).capture(lambda: torch.ones(2) + torch.ones(3))


@pytest.mark.slow
def test_importing_the_room_imports_no_torch() -> None:
    code = "import sys, crosstie.port.split; assert 'torch' not in sys.modules; crosstie.port.split.split; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_torch_one_line_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import crosstie.port.split as c; from crosstie.core.errors import BadInput\n"
        "try: c.split\nexcept BadInput as e: print(e)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said == "crosstie.port.split.split needs torch: pip install 'crosstie[preflight]'\n"

"""A forked copy of a process that has used all of its threads."""

import torch

from crosstie_port.capture.twin import Twin


def test_a_twin_multiplies_after_its_parent_has_with_all_threads() -> None:
    matrix = torch.randn(300, 300)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = matrix @ matrix
        with Twin(lambda: matrix @ matrix) as twin:
            got = twin.result()
    finally:
        torch.set_num_threads(threads)
    assert torch.allclose(got, expected, atol=1e-3)

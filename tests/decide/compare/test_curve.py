import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.decide.compare.curve import curve, curves, doublings
from crosstie.decide.compare.scorecard import Load, compare


def test_a_curve_trades_speed_for_throughput(catalog: Catalog) -> None:
    one = catalog.deployment(catalog.model("llama-3.1-70b"), catalog.accelerator("mi300x"), Parallelism(tp=8))
    got = curve(one, 4096, 1024)
    assert got.concurrency[0] == 1
    assert got.output_tokens_per_s_per_gpu == sorted(got.output_tokens_per_s_per_gpu)
    assert got.tokens_per_s_per_user == sorted(got.tokens_per_s_per_user, reverse=True)
    # Up to what fits: 164.7 GB over 8 GPUs at 320 KiB a token and a mean length of 4,608.
    assert got.concurrency[-1] == pytest.approx(8 * 164.7e9 / 327680 / 4608, rel=0.01)


def test_only_what_runs_gets_a_curve(catalog: Catalog) -> None:
    both = [catalog.accelerator(name) for name in ("mi300x", "h100-sxm")]
    card = compare(catalog, catalog.model("llama-3.1-70b"), both, Load(1, 100, 100), parallelism=Parallelism(tp=1))
    assert [c.accelerator for c in curves(card)] == ["mi300x"]


@pytest.mark.parametrize(("most", "steps"), [(0, [1]), (1, [1]), (8, [1, 2, 4, 8]), (11, [1, 2, 4, 8, 11])])
def test_batches_double_up_to_the_largest(most: int, steps: list[int]) -> None:
    assert doublings(most) == steps

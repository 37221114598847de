import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.decide.compare.curve import context_curves, curve, curves, doublings
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


def test_long_prompts_cost_speed_and_room(catalog: Catalog) -> None:
    card = compare(catalog, catalog.model("llama-3.1-70b"), [catalog.accelerator("mi300x")], Load(64, 4096, 1024))
    (got,) = context_curves(card)
    assert got.input_tokens[0] == 1024
    assert got.input_tokens == sorted(got.input_tokens)
    # As far as the model reaches, or memory.
    assert got.input_tokens[-1] <= 131072 - 1024
    assert got.output_tokens_per_s_per_gpu == sorted(got.output_tokens_per_s_per_gpu, reverse=True)
    assert got.running == sorted(got.running, reverse=True)
    assert got.running[0] == 64
    (entry,) = card.entries
    assert entry.estimate
    at = got.input_tokens.index(4096)
    assert got.output_tokens_per_s_per_gpu[at] == pytest.approx(entry.estimate.output_tokens_per_s_per_gpu, rel=0.01)


@pytest.mark.parametrize(("most", "steps"), [(0, [1]), (1, [1]), (8, [1, 2, 4, 8]), (11, [1, 2, 4, 8, 11])])
def test_batches_double_up_to_the_largest(most: int, steps: list[int]) -> None:
    assert doublings(most) == steps

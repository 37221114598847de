"""Splits that a model or a machine cannot have are refused, with the reason."""

import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadInput

CASES = [
    ("llama-3.1-70b", "h200", {"tp": 3}, "does not divide the 64 attention heads"),
    ("llama-3.1-70b", "h200", {"tp": 0}, "must be at least 1"),
    ("llama-3.1-70b", "h200", {"tp": 16}, "exceed the 8"),
    ("llama-3.1-70b", "h200", {"ep": 2}, "no experts"),
    ("llama-3.1-70b", "h200", {"dp": 2}, "attention replicas share experts"),
    ("llama-3.1-70b", "h200", {"pp": 81}, "exceeds the 80 layers"),
    ("llama-4-scout", "h200", {"tp": 5}, "do not divide one another"),
    ("qwen3-30b-a3b", "h200", {"tp": 8, "ep": 3}, "does not divide the 128 experts"),
    ("qwen3-30b-a3b", "h200", {"tp": 2, "ep": 4}, "does not divide the 2 GPUs"),
    ("llama-3.1-70b", "gh200", {"tp": 2}, "exceed the 1"),
]


@pytest.mark.parametrize(("model", "accelerator", "split", "reason"), CASES)
def test_impossible_splits_are_refused(
    catalog: Catalog, model: str, accelerator: str, split: dict[str, int], reason: str
) -> None:
    with pytest.raises(BadInput, match=reason):
        Parallelism(**split).check(catalog.model(model), catalog.accelerator(accelerator))


def test_possible_splits_are_not(catalog: Catalog) -> None:
    Parallelism(tp=8).check(catalog.model("llama-3.1-70b"), catalog.accelerator("mi300x"))
    # More ranks than KV heads: each head is kept by several ranks.
    Parallelism(tp=8).check(catalog.model("qwen3-30b-a3b"), catalog.accelerator("mi300x"))
    Parallelism(tp=64).check(catalog.model("deepseek-v3"), catalog.accelerator("gb200"))
    Parallelism(dp=8, ep=8).check(catalog.model("deepseek-v3"), catalog.accelerator("h200"))


def test_a_layout_says_its_gpus_and_its_name() -> None:
    assert Parallelism(tp=8, pp=2).gpus == 16
    assert str(Parallelism(tp=8, pp=2)) == "TP8·PP2"
    assert str(Parallelism(dp=8, ep=8)) == "DP8·EP8"
    assert str(Parallelism()) == "TP1"


def test_unknown_kv_format(catalog: Catalog) -> None:
    with pytest.raises(BadInput, match="unknown KV format 'fp7'"):
        catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator("h200"), kv_format="fp7")

"""What speculation gave others, against what it would give here: speculation was not fitted to these."""

import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.decide.compare.payoff import Payoff, payoff_of

TENSORRT = "NVIDIA/TensorRT-LLM docs/source/blogs/tech_blog blog02@000a01de"
SGLANG = "sgl-project/sglang@ba066ca0 docs"
# Model, accelerator, GPUs, way to draft, length where it is published, engine, precision, batch, times as fast, source.
PUBLISHED = [
    ("deepseek-r1", "b200", 8, "mtp:3", None, "tensorrt-llm", "nvfp4", 1, 2.16, TENSORRT),
    ("deepseek-v3", "h200", 8, "mtp:3", None, "sglang", None, 1, 1.8, SGLANG),
    ("deepseek-v3", "h200", 8, "mtp:3", None, "sglang", None, 32, 1.5, SGLANG),
    ("gpt-oss-120b", "h100-sxm", 1, "eagle3:3", 2.4, "vllm", None, 1, 1.34, "Dogacel/specdrift-gpt-oss-120b-eagle3"),
    ("gpt-oss-120b", "h100-sxm", 1, "eagle3:3", 2.4, "vllm", None, 8, 1.31, "Dogacel/specdrift-gpt-oss-120b-eagle3"),
    ("gpt-oss-120b", "h100-sxm", 1, "eagle3:3", 2.4, "vllm", None, 64, 1.44, "Dogacel/specdrift-gpt-oss-120b-eagle3"),
    ("deepseek-r1", "h200", 8, "mtp:1", None, "vllm", None, 1, 1.63, "vllm-project/vllm#12755"),
]


def payoff(
    catalog: Catalog, model: str, accelerator: str, gpus: int, way: str, length: float | None, stack: str,
    precision: str | None, batch: int,
) -> Payoff:  # fmt: skip
    noun = catalog.model(model)
    drafts = catalog.speculation(noun, way, length=length)
    on, split = catalog.accelerator(accelerator), Parallelism(tp=gpus)
    found = payoff_of(catalog.deployment(noun, on, split, precision, "bf16", stack, drafts), batch, 1000, 1000)
    assert found is not None
    return found


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: f"{case[0]} {case[1]} {case[3]} batch {case[7]}")
def test_speculation_gives_what_was_published(catalog: Catalog, case: tuple[str, ...]) -> None:
    *what, published, _ = case
    assert payoff(catalog, *what).faster == pytest.approx(published, rel=0.25)  # type: ignore[arg-type]


@pytest.mark.slow
def test_three_drafts_are_best_for_one_stream_of_deepseek_r1(catalog: Catalog) -> None:
    """As NVIDIA found on eight B200 in FP4."""
    by_depth = [
        payoff(catalog, "deepseek-r1", "b200", 8, f"mtp:{depth}", None, "tensorrt-llm", "nvfp4", 1).faster
        for depth in (1, 2, 3, 5)
    ]
    assert by_depth[2] > 0.97 * max(by_depth)
    assert by_depth[2] > by_depth[0]

"""What shipped results were measured with."""

import pytest

from crosstie.catalog.library import Catalog
from crosstie.catalog.measured import MeasuredWith, measured_with
from crosstie.core.deployment import Deployment, Parallelism

CATALOG = Catalog([])


def replica(model: str, accelerator: str, stack: str, precision: str = "fp8", tp: int = 1) -> Deployment:
    one, on = CATALOG.model(model), CATALOG.accelerator(accelerator)
    return CATALOG.deployment(one, on, Parallelism(tp=tp), precision, "bf16", stack)


def test_what_was_measured_is_named_by_layout_lengths_and_load() -> None:
    """All rows of DeepSeek-R1 on MI300X under SGLang are TP8."""
    found = measured_with(CATALOG, replica("deepseek-r1", "mi300x", "sglang", "native", 8))
    assert found is not None
    assert found.layouts == ("TP8",)
    assert found.words.startswith("layouts TP8; ")
    assert found.input_tokens is not None
    assert found.in_flight is not None
    assert found.misses("TP1", found.input_tokens[0], found.in_flight[0]) == ["this layout"]
    assert found.misses("TP8", found.input_tokens[1], found.in_flight[1]) == []
    assert found.misses("TP8", 100_000.0, 100_000.0) == ["prompts of this length", "this many in flight"]


def test_sources_have_several_words_for_plain_serving() -> None:
    found = measured_with(CATALOG, replica("deepseek-r1", "mi300x", "sglang", "native", 8))
    assert found is not None
    assert found.layouts == ("TP8",)


@pytest.mark.parametrize(
    "other",
    [
        replica("llama-3.3-70b", "l40s", "vllm"),
        replica("llama-3.3-70b", "mi300x", "sglang"),
        replica("llama-3.1-8b", "mi300x", "vllm"),
    ],
    ids=lambda one: f"{one.model.id} {one.label} {one.stack.id}",
)
def test_another_model_accelerator_or_stack_is_another_thing(other: Deployment) -> None:
    assert measured_with(CATALOG, other) is None


def test_what_sources_do_not_say_is_not_made_up() -> None:
    silent = MeasuredWith(3, ("",), None, None, (8.0, 8.0))
    assert silent.words == "layouts that are not said; 8 in flight"
    assert silent.misses("TP4", 1e6, 8.0) == ["this layout"]

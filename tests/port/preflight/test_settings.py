"""Settings of a config that engines refuse, or that contradict each other, are never part of a "ready"."""

from pathlib import Path
from typing import Any

import pytest
from tests.port.preflight import tiny

from crosstie.catalog.config import Config
from crosstie.catalog.library import Catalog
from crosstie.port.preflight.settings import setting_findings
from crosstie.port.preflight.stored import read_stored


def said(**changes: Any) -> list[str]:
    found = list(setting_findings(Config({**tiny.LLAMA, **changes}, Path("config.json"))))
    assert all(one.severity == "unknown" and one.remedy for one in found)
    return [one.what for one in found]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"rope_scaling": {"rope_type": "nonsense", "factor": 8}}, "rope_type 'nonsense' is none"),
        ({"rope_scaling": {"type": "odd"}}, "rope_type 'odd' is none"),
        ({"rope_parameters": {"full_attention": {"rope_type": "odd"}}}, "rope_type 'odd' is none"),
        ({"hidden_act": "gelu"}, "LlamaForCausalLM with the activation 'gelu'"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures says Qwen3ForCausalLM, and model_type says llama"),
    ],
)
def test_what_no_engine_was_seen_to_take(changes: dict[str, Any], what: str) -> None:
    assert [one for one in said(**changes) if what in one]


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"rope_scaling": None}, {"rope_scaling": {"rope_type": "llama3"}}, {"rope_scaling": {"factor": 2}},
        {"rope_scaling": "odd"}, {"hidden_act": "swish"}, {"hidden_act": "gelu", "architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
        {"architectures": []}, {"architectures": ["OwnForCausalLM"]}, {"model_type": "own"}, {"model_type": None},
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"},
    ],
)  # fmt: skip
def test_what_is_taken_or_not_known(changes: dict[str, Any]) -> None:
    assert said(**changes) == []


def test_models_of_the_catalog_contradict_nothing(catalog: Catalog) -> None:
    for name in catalog.models:
        assert list(setting_findings(read_stored(catalog, name).config)) == [], name

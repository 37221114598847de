"""The plan: shapes of catalog models, as data that needs no catalog to run."""

import json

import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie.prove.probe.kernels import KINDS, SHAPE_FIELDS
from crosstie.prove.probe.plan import PARTS, decoder_shape, head_shape, matrices, plan_of


@pytest.mark.parametrize("quick", [False, True])
def test_a_plan_is_plain_data_with_what_each_kind_needs(catalog: Catalog, quick: bool) -> None:
    plan = plan_of(catalog, quick=quick)
    assert json.loads(json.dumps(plan)) == plan
    assert plan["parts"] == list(PARTS)
    assert {case["kind"] for case in plan["cases"]} == set(KINDS)
    for case in plan["cases"]:
        assert case.keys() == {"part", "kind", "format", *SHAPE_FIELDS[case["kind"]]}
        assert case.get("model") in (None, *plan["models"])
    assert len(plan["cases"]) == len({tuple(sorted(case.items())) for case in plan["cases"]})
    assert plan["accelerators"]["h200"] == catalog.accelerator("h200").memory_bytes


def test_quick_is_a_fraction_of_it(catalog: Catalog) -> None:
    assert len(plan_of(catalog, quick=True)["cases"]) < len(plan_of(catalog)["cases"]) / 5


def test_parts_are_chosen_and_checked(catalog: Catalog) -> None:
    plan = plan_of(catalog, ["gemm", "copy"])
    assert plan["parts"] == ["copy", "gemm"]
    assert {case["part"] for case in plan["cases"]} == {"copy", "gemm"}
    assert plan["models"] == {}
    with pytest.raises(BadInput, match="unknown part 'gemms'; known: copy, launch, gemm"):
        plan_of(catalog, ["gemms"])


def test_shapes_come_from_the_catalog(catalog: Catalog) -> None:
    llama = catalog.model("llama-3.1-8b")
    assert list(matrices(llama, 1)) == [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
    assert list(matrices(catalog.model("llama-3.1-70b"), 8)) == [(1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)]
    assert head_shape(catalog.model("llama-3.1-70b"), 8) == {"heads": 8, "kv_heads": 1, "head_dim": 128}
    assert decoder_shape(llama) == {
        "layers": 32, "hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocabulary": 128256,
        "experts": 0, "experts_per_token": 0,
    }  # fmt: skip
    mixture = decoder_shape(catalog.model("qwen3-30b-a3b"))
    assert (mixture["inner"], mixture["experts"], mixture["experts_per_token"]) == (768, 128, 8)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "deepseek-v3"])
def test_other_models_are_refused(catalog: Catalog, name: str) -> None:
    with pytest.raises(BadInput, match=f"{name}: the probe times models of equal layers"):
        decoder_shape(catalog.model(name))

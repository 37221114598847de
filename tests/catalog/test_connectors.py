"""Connector files: every number sourced, every slip named."""

from pathlib import Path

import pytest

from crosstie.catalog.deployments import read_connectors
from crosstie.catalog.library import SHIPPED, Catalog
from crosstie.core.errors import BadData, BadInput


def test_every_connector_joins_a_stack_of_the_catalog(catalog: Catalog) -> None:
    for connector in catalog.connectors.values():
        for stack in connector.stacks:
            assert set(connector.vendors) <= set(catalog.stack(stack).vendors), connector.id


def test_the_one_made_for_a_vendor_comes_before_one_for_all(catalog: Catalog) -> None:
    assert catalog.connector_for(catalog.stack("vllm"), catalog.accelerator("mi300x")).id == "vllm-moriio"
    assert catalog.connector_for(catalog.stack("vllm"), catalog.accelerator("h200")).id == "vllm-nixl"
    with pytest.raises(BadInput, match="has no known way to hand a cache over on h200"):
        catalog.connector_for(catalog.stack("llama.cpp"), catalog.accelerator("h200"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('first_token = "prefill"', 'first_token = "nobody"', "'nobody' is not one of prefill, transfer, decode"),
        ("recomputes = false", "recomputes = true", 'recomputes: goes with first_token = "decode"'),
        ('vendors = ["NVIDIA"]', "vendors = []", "must name at least one vendor"),
        ("value = 0.87", "value = 87", "a slip of unit"),
        ("by_layer = false\n", "", "by_layer: missing"),
        ("by_layer = false", "by_layer = false\nfast = true", "fast"),
    ],
)
def test_slips_of_a_connector_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    whole = (SHIPPED / "connectors.toml").read_text()
    begin = whole.index("[tensorrt-llm]")
    section = whole[begin : whole.index("[atom-mooncake]")]
    assert old in section
    file = tmp_path / "connectors.toml"
    file.write_text(whole[:begin] + section.replace(old, new, 1) + whole[whole.index("[atom-mooncake]") :])
    with pytest.raises(BadData, match=message):
        read_connectors(file)

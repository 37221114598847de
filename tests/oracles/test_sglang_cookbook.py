"""SGLang's own cookbook against preflight: what docs/src/snippets/configs of sgl-project/sglang v0.5.18 (71de97b2, of
2026-08-20, Apache-2.0) calls verified, of models that the catalog has, as facts in a table."""

import csv
from pathlib import Path

import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.port.preflight.readiness import NOT_KNOWN, WILL_NOT_RUN, ReadinessCheck

FILE = Path(__file__).with_name("sglang_cookbook.csv")
CATALOG = Catalog()


def listed() -> list[dict[str, str]]:
    with FILE.open() as rows:
        return list(csv.DictReader(rows))


@pytest.mark.parametrize("row", listed(), ids=lambda row: "-".join(row.values()))
def test_what_sglang_verified_is_known_and_runs(row: dict[str, str]) -> None:
    model, accelerator = CATALOG.model(row["model"]), CATALOG.accelerator(row["accelerator"])
    split = Parallelism(tp=int(row["tp"]))
    deployment = CATALOG.deployment(model, accelerator, split, row["precision"], "bf16", "sglang")
    found = ReadinessCheck(CATALOG, {model.id: {"sglang": "0.5.18"}}).readiness(deployment)
    assert found.verdict not in (NOT_KNOWN, WILL_NOT_RUN), found.why

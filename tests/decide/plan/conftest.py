"""Reasons follow from the model by itself, without calibration."""

import json
from typing import Any

import pytest
from tests.small_workload import small

from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.cli.show import json_text
from crosstie.decide.plan.plan import plan
from crosstie.decide.plan.report import document as made_of, mark_of


@pytest.fixture(scope="session")
def catalog(uncalibrated: Catalog) -> Catalog:
    return uncalibrated


@pytest.fixture(scope="session")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A plan of the small workload as `--save` writes it, made once: with the shipped calibration."""
    shipped = Catalog([])
    made = plan(shipped, read_workload(shipped, small(tmp_path_factory.mktemp("document"))))
    found: dict[str, Any] = json.loads(json_text(made_of(made, mark_of(shipped.calibration))))
    return found

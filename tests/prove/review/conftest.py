"""A plan, and what the gateway of its fleet would have recorded of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.prove.review.recordings import Line, served
from tests.small_workload import small

from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.cli.show import json_text
from crosstie.decide.plan.plan import plan
from crosstie.decide.plan.report import document, mark_of

TWO_CLASSES = (
    # One accelerator: what is reviewed must not depend on which of two is cheaper today.
    ('accelerators = ["mi300x", "h200"]', 'accelerators = ["mi300x"]'),
    ("requests_per_s = 5\n", "requests_per_s = 20\n"),
    ("share = 1\ninput = 1000\noutput = 200\n", "share = 0.75\ninput = { median = 800, p95 = 3000 }\noutput = 200\n"),
    (
        "[constraints]",
        '[[class]]\nname = "batch"\nmodel = "llama-3.1-8b"\nshare = 0.25\ninput = 2000\noutput = 100\n[constraints]',
    ),
)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The saved plan of two classes, by closed forms."""
    folder = tmp_path_factory.mktemp("review")
    shipped = Catalog([])
    found = plan(shipped, read_workload(shipped, small(folder, *TWO_CLASSES)), today="2026-08-18")
    file = folder / "plan.json"
    file.write_text(json_text(document(found, mark_of(shipped.calibration))))
    return file


@pytest.fixture(scope="session")
def lines(made: Path) -> list[Line]:
    """Six hundred requests, served as the model says."""
    return served(Catalog([]), made, 600)


@pytest.fixture(scope="session")
def content(made: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(made.read_text())
    return found

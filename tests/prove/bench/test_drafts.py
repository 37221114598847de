"""An engine that drafts is not taken for one that does not: its own counters say so, and the file of its results."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command
from tests.run.emulate.running import LARGE, emulated_beside, fleet, pool

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.prove.bench.server_counts import ServerCounts
from crosstie.prove.calibration.validate import validate

DRAFTING = pool(model=LARGE, parallelism=Parallelism(tp=4), speculation="eagle3:3", acceptance=2.5)


def plain(file: Path) -> Path:
    """As if an engine had answered, since nothing is learnt of emulated replicas."""
    written: dict[str, Any] = json.loads(file.read_text())
    written["endpoints"][0]["emulated"] = False
    file.write_text(json.dumps(written))
    return file


@pytest.mark.parametrize("said", ["", "eagle3:3"])
def test_drafts_are_counted_and_how_they_were_made_is_asked(crosstie: Command, tmp_path: Path, said: str) -> None:
    file = tmp_path / "run.json"
    with emulated_beside(fleet(DRAFTING)) as running:
        url = running.fleet.pools[0].backends[0]
        got = crosstie(
            "bench", url, "--speed", "20", "--concurrency", "2", "--requests", "6", "--input", "200", "--output", "60",
            "--warmup", "0", "--vary", "0", "--accelerator", "mi300x", "--tp", "4", "--speculation", said,
            "-o", str(file),
        )  # fmt: skip
    assert got.status == 0, got.err
    (point,) = json.loads(file.read_text())["endpoints"][0]["points"]
    assert point["draft_tokens"] == 3
    assert point["acceptance_length"] == pytest.approx(2.5, abs=0.1)
    assert "tokens a step, of drafts of 3, by the engine's own counters" in got.out
    predicted = validate(Catalog([]), [plain(file)])
    if said:
        (case,) = {id(outcome.case): outcome.case for outcome in predicted.outcomes}.values()
        drafts = case.deployment.speculation
        assert drafts is not None
        assert (drafts.method, drafts.depth) == ("eagle3", 3)
        assert drafts.acceptance_length == pytest.approx(point["acceptance_length"], abs=0.01)
    else:
        assert not predicted.outcomes
        assert any("--speculation says how it drafted" in str(reason) for reason in predicted.missed)


def test_counts_of_a_run_are_those_after_less_those_before() -> None:
    run = ServerCounts(900.0, 500.0, 30.0, 90.0, 50.0).since(ServerCounts(400.0, 200.0, 10.0, 30.0, 10.0))
    assert run == ServerCounts(500.0, 300.0, 20.0, 60.0, 40.0)
    assert (run.depth, run.acceptance_length) == (3, 3.0)
    assert (ServerCounts().depth, ServerCounts().acceptance_length) == (0, 1.0)

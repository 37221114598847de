"""A model that no catalog has, planned from its folder: what is written of the plan is read again elsewhere."""

import json
from pathlib import Path

import pytest
from tests.conftest import Command

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "examples" / "results" / "h200-vllm-0.24-14b" / "config.json"
WORKLOAD = """
name = "desk"
[traffic]
requests_per_s = 5
[[class]]
name = "chat"
model = "models/tuned-14b"
input = { mean = 600 }
output = { mean = 100 }
ttft_ms = { p95 = 1500 }
tpot_ms = { p90 = 60 }
[constraints]
accelerators = ["h200"]
"""


def test_what_was_planned_from_a_folder_is_served_simulated_and_watched(
    crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "tuned-14b").mkdir(parents=True)
    (tmp_path / "models" / "tuned-14b" / "config.json").write_text(CONFIG.read_text())
    (tmp_path / "desk.toml").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    made = crosstie("plan", "desk.toml", "--quick", "--save", "plan.json", "--fleet", "fleet.toml")
    assert made.status == 0, made.err
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for asked in (
        ("simulate", "../fleet.toml", "--seeds", "1", "--requests", "100"),
        ("simulate", "../plan.json", "--seeds", "1", "--requests", "100"),
        ("plan", "--watch", "../plan.json"),
    ):
        got = crosstie(*asked)
        assert "tuned-14b" not in got.err, got.err
        assert got.status == 0, got.err
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert list(saved["workload"]["folders"]) == ["tuned-14b"]
    # Where it has gone, the key that names it is told.
    (tmp_path / "models" / "tuned-14b" / "config.json").unlink()
    gone = crosstie("simulate", "../plan.json")
    assert (gone.status, gone.err.count("\n")) == (2, 1)
    assert "workload.folders.tuned-14b" in gone.err

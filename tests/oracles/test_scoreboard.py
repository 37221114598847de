"""`make scoreboard`: pages from measured rows, what is missed among them, and the peer's answers."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from crosstie.catalog.library import Catalog

ROOT = Path(__file__).parents[2]
HEAD = ("accelerator,num_accelerators,engine,engine_version,model,precision,tp,input_len,output_len,concurrency,"
        "metric,value,unit,source_id,date\n")  # fmt: skip
ROWS = [
    "h200,1,vllm,0.11.0,llama-3.1-8b,bf16,1,1024,256,8,tpot_ms_mean,9,ms,somebody,2026-01-02",
    "h200,1,vllm,0.11.0,no-such-model,bf16,1,1024,256,8,tpot_ms_mean,9,ms,somebody,2026-01-02",
]


@pytest.fixture
def scoreboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A script, which imports the scripts beside it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield import_module("scoreboard")
    for name in ("scoreboard", "render_accuracy", "interval_bar"):
        sys.modules.pop(name, None)


def test_a_page_for_each_accelerator_with_what_is_missed(scoreboard: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(HEAD + "\n".join(ROWS) + "\n")
    made = scoreboard.pages(Catalog([]), [file], ROOT / "benchmarks" / "results")
    assert set(made) == {"index.html", "h200.html"}
    index, page = made["index.html"], made["h200.html"]
    assert 'href="h200.html"' in index
    assert "AISimulate" in index
    assert "is not in the catalog" in index
    assert "tone-heat-" in index
    # A row measured and predicted, and one that is missed.
    assert "no-such-model" in page
    assert "of 1</td>" in page
    assert "nothing on AMD" in page

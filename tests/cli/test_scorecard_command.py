"""`crosstie scorecard`: the screen, the page and the document say the same, and cells open their sources."""

import json
import re
from pathlib import Path

import pytest
from tests.conftest import Command

SMALL = ("scorecard", "--on", "mi300x,h200", "--part", "silicon", "--part", "export")


def test_the_document_has_every_cell_with_its_source(crosstie: Command) -> None:
    found = json.loads(crosstie(*SMALL, "--json").out)
    cells = [cell for axis in found["axes"] for cell in axis["cells"].values()]
    assert found["accelerators"] == ["mi300x", "h200"]
    assert all(cell["source"] for cell in cells)
    (tpp,) = (axis for axis in found["axes"] if axis["name"] == "TPP")
    assert tpp["cells"]["h200"]["value"] == pytest.approx(15_832)
    assert found["scenarios"] == []


def test_a_cell_of_the_page_opens_its_source(crosstie: Command, tmp_path: Path) -> None:
    page = tmp_path / "card.html"
    got = crosstie(*SMALL, "--html", str(page))
    assert got.status == 0
    text = page.read_text()
    linked = re.findall(r'<a class="source" href="#(source-\d+)" title="[^"]+">([^<]+)</a>', text)
    # Two accelerators: each cell of each axis.
    assert len(linked) == 2 * len(json.loads(crosstie(*SMALL, "--json").out)["axes"])
    assert {name for name, _ in linked} == set(re.findall(r'<li id="(source-\d+)">', text))
    where = next(name for name, cell in linked if cell == "192 GiB")
    assert re.search(rf'<li id="{where}">AMD, ROCm/ROCm@e396b4898f[^<]*2025-03-21', text)
    for _, cell in linked:
        assert cell in got.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--on", "mi300y"), "mi300y"),
        (("--part", "beauty"), "beauty"),
        (("--html", "card.pdf"), "--html card.pdf: the name must end in .html"),
    ],
)
def test_wrong_questions_are_one_line(crosstie: Command, arguments: tuple[str, ...], said: str) -> None:
    got = crosstie("scorecard", *arguments)
    assert got.status == 2
    assert said in got.err
    assert "Traceback" not in got.err

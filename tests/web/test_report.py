"""Pages of answers: what the screen says and nothing else, other people's words as words, the document whole."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.text import Text
from tests.conftest import Command
from tests.small_workload import small_text

from crosstie.cli.answer import Wanted
from crosstie.cli.show import show
from crosstie.web.parts import CommandLine, Heading, Line, Part, Table, across, caution, note
from crosstie.web.report import Report, write_markdown, write_report, write_sections

# What somebody could name a model, a class or a file.
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&quot;'"


class Page(HTMLParser):
    """The elements of a page, its words, and the document that it carries."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.words = ""
        self.carried = ""
        self._in_script = False
        self.feed(text)
        self.close()
        self.document = json.loads(self.carried)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self._in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.carried += data
        else:
            self.words += data


def page(parts: list[Part], title: str = "T", document: object = None) -> Page:
    made = Report(title=title, command="crosstie x", made="2026-01-01", version="1", parts=parts, document=document)
    return Page(write_report(made))


ANSWER: list[Part] = [
    "the answer",
    Heading("Why"),
    "- first",
    caution("- second | third"),
    CommandLine("crosstie fit llama-3.1-8b --on mi300x"),
    "    crosstie tco llama-3.1-8b --on mi300x",
    "",
    note("  only a remark"),
    Table(["pool", ">$/h", "~why"], [["a", "1.00", "it is cheap"]], "Pools"),
    across(["mi300x", "h200"], [["TPOT", "10 ms", "11 | 12 ms"]]),
]


def test_markdown_has_the_parts_of_an_answer_in_their_order() -> None:
    assert write_markdown(ANSWER).split("\n\n") == [
        "# the answer",
        "## Why",
        "- first\n- second | third",
        "```sh\ncrosstie fit llama-3.1-8b --on mi300x\ncrosstie tco llama-3.1-8b --on mi300x\n```",
        "only a remark",
        "## Pools",
        "| pool | $/h | why |\n| --- | ---: | --- |\n| a | 1.00 | it is cheap |",
        "|  | mi300x | h200 |\n| --- | ---: | ---: |\n| TPOT | 10 ms | 11 \\| 12 ms |\n",
    ]


def test_a_document_is_made_only_for_those_who_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[int] = []

    def document() -> dict[str, int]:
        made.append(1)
        return {"answer": 7}

    Wanted().give(document, lambda _: [])
    assert made == []
    Wanted(as_json=True, html=tmp_path / "r.html").give(document, lambda _: [], title="t")
    assert made == [1]
    assert '"answer": 7' in capsys.readouterr().out


def test_a_page_has_every_word_of_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    show(ANSWER)
    made = page(ANSWER)
    for word in re.findall(r"[\w.$/-]+\w", capsys.readouterr().out):
        assert word in made.words
    assert (made.tags.count("li"), made.tags.count("pre"), made.tags.count("table")) == (2, 1, 2)


def test_what_others_named_is_never_markup() -> None:
    hostile: list[Part] = [
        HOSTILE, Heading(HOSTILE), Line(f"- {HOSTILE}"), CommandLine(HOSTILE),
        Table([HOSTILE, "b"], [[HOSTILE, HOSTILE]]), Table([f"{HOSTILE}{n}" for n in range(9)], [[HOSTILE] * 9]),
    ]  # fmt: skip
    made = page(hostile, title=HOSTILE, document={"name": HOSTILE, HOSTILE: [HOSTILE]})
    assert made.tags.count("script") == 1
    assert "img" not in made.tags
    assert not [name for name in made.attributes if name.startswith("on")]
    assert made.document == {"name": HOSTILE, HOSTILE: [HOSTILE]}


def test_a_table_that_no_sheet_holds_becomes_blocks() -> None:
    narrow = Table(["pool", ">$/h"], [["a", "1"]])
    wide = Table([f"column {n}" for n in range(12)], [["eleven letters"] * 12])
    assert page([narrow]).tags.count("table") == 1
    made = page([wide])
    assert "table" not in made.tags
    assert made.words.count("eleven letters") == 12


@pytest.fixture
def workload(tmp_path: Path) -> str:
    file = tmp_path / "workload.toml"
    file.write_text(small_text())
    return str(file)


@pytest.mark.usefixtures("planned_once")
def test_a_plan_as_page_and_table(crosstie: Command, workload: str, tmp_path: Path) -> None:
    target, table = tmp_path / "report.html", tmp_path / "pools.csv"
    asked = ("plan", workload, "--quick", "--html", str(target), "--csv", str(table))
    printed = crosstie(*asked, "--json")
    assert printed.status == 0
    made = Page(target.read_text())
    document = json.loads(printed.out)
    assert made.document == document
    assert "What to demand in the contract" in made.words
    assert made.tags.count("svg") >= 1
    fleet = document["fleet"]
    assert f"${fleet['usd_per_hour']:,.2f}" in made.words
    head, *rows = [line.split(",") for line in table.read_text().splitlines()]
    assert [float(row[head.index("usd_per_hour")]) for row in rows] == [one["usd_per_hour"] for one in fleet["pools"]]
    assert [row[0] for row in rows] == [one["name"] for one in fleet["pools"]]
    # The screen's own lines, all of them, wherever the page puts them.
    flat = re.sub(r"\s+", " ", made.words)
    for line in crosstie("plan", workload, "--quick", "-v").out.splitlines():
        if line.startswith("- "):
            assert re.sub(r"\s+", " ", line[2:].strip()) in flat


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("compare", "llama-3.1-8b", "--on", "mi300x,h200"), marks=pytest.mark.slow),
        ("tco", "llama-3.1-8b", "--on", "mi300x,h200", "--samples", "200"),
        ("preflight", "model", "llama-3.1-8b", "--on", "mi300x"),
    ],
)
def test_other_answers_as_pages(crosstie: Command, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    target = tmp_path / "report.html"
    printed = crosstie(*arguments, "--html", str(target), "--json")
    assert Page(target.read_text()).document == json.loads(printed.out)
    assert f"report written to {target}" in printed.err


def test_a_page_that_is_none_is_refused_before_the_work(crosstie: Command, workload: str, tmp_path: Path) -> None:
    for arguments in (("plan", workload), ("compare", "llama-3.1-8b", "--on", "h200")):
        said = crosstie(*arguments, "--html", str(tmp_path / "report.pdf"))
        assert said.status == 2
        assert "report.pdf: the name must end in .html" in said.err


def sections(parts: list[Part]) -> str:
    return write_sections("T", [], parts)


def test_what_a_screen_sets_apart_stands_apart_on_a_page() -> None:
    finding = Text.assemble(("error   ", "bold red"), "no such layer")
    where = Text.assemble(("        where    ", "dim"), "model.py:3")
    made = sections([Line(finding, hang=8), Line(where, hang=17)])
    assert '<p class="bad"><b>error</b>   no such layer</p>' in made
    assert '<p class="under"><b>where</b>    model.py:3</p>' in made


def test_only_short_cells_are_kept_whole() -> None:
    made = sections([Table(["class", "TTFT", ">$"], [["a", "p95 294 ms of 1,000 ms", "1"], ["b", "-", "2"]])])
    assert made.count('<td class="whole">') == 2
    long = sections([Table(["class", "TTFT", ">$"], [["a", "p95 294 ms of 1,000 ms", "1"], ["b", "long " * 6, "2"]])])
    assert '<td class="whole">' not in long
    assert long.count('<td class="right">') == 2

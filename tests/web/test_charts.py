"""Pictures that are quoted: readable alone, by day and by night, told apart without colours, with source and date."""

import json
import re
import sys
from datetime import date
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command
from tests.prove.calibration.rows import row, written

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.decide.cost.curves import Curve
from crosstie.perf.estimate import estimate
from crosstie.perf.fit import place
from crosstie.perf.hardware import Hardware
from crosstie.perf.roofline import roofline
from crosstie.perf.step import shape, step
from crosstie.prove.calibration.published import PublishedPoint, published_points
from crosstie.prove.calibration.results import read_results
from crosstie.prove.calibration.validate import validate
from crosstie.web.chart import MARKERS, STYLES, curves_picture, finish, memory_picture, new_figure, save
from crosstie.web.reliability_chart import reliability_picture

matplotlib = pytest.importorskip("matplotlib")
to_hex = pytest.importorskip("matplotlib.colors").to_hex
ROWS = """accelerator,num_accelerators,model,precision,engine,input_len,output_len,concurrency,spec_decode,disagg,\
publisher,date,metric,unit,value
H200,2,Llama-3.1-8B,fp8,vllm,512,128,4,none,False,somebody,2026-01-02,tpot_ms_mean,ms,10
H200,2,Llama-3.1-8B,fp8,vllm,512,128,4,none,False,somebody,2026-01-02,output_tokens_per_s_total,tok/s,400
H200,2,Llama-3.1-8B,bf16,vllm,512,128,4,none,False,somebody,2026-01-02,tpot_ms_mean,ms,11
H200,2,Llama-3.1-8B,bf16,vllm,512,128,4,none,False,somebody,2026-01-02,output_tokens_per_s_total,tok/s,300
H200,2,Llama-3.1-8B,fp8,vllm,512,128,4,mtp,False,somebody,2026-01-02,tpot_ms_mean,ms,5
H200,2,Llama-3.1-8B,fp8,vllm,512,128,4,mtp,False,somebody,2026-01-02,output_tokens_per_s_total,tok/s,800
"""


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")


def curve(name: str, faster: float = 1.0) -> Curve:
    return Curve(f"1 x {name}", name, [1, 2], [0.1, 0.2], [50.0 * faster, 40.0 * faster], [50.0, 80.0])


def test_published_results_of_this_load_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(ROWS)
    catalog = Catalog()
    one = catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator("h200"), Parallelism(), "fp8")
    results = read_results(file)
    (found,) = published_points(results, [one], 512, 128)
    assert (found.accelerator, found.gpus, found.publisher, found.date) == ("h200", 2, "somebody", "2026-01-02")
    assert found.tokens_per_s_per_user == pytest.approx(100.0)
    assert found.output_tokens_per_s_per_gpu == pytest.approx(200.0)
    assert published_points(results, [one], 1024, 128) == []


@pytest.mark.usefixtures("words")
def test_a_curve_s_picture_has_published_points_with_who_and_when(tmp_path: Path) -> None:
    file = tmp_path / "c.svg"
    published = [PublishedPoint("h200", 2, 45, 60, "somebody", "2026-01-02")]
    curves_picture([curve("h200"), curve("mi300x", 2.0)], "T", published).draw(file)
    text = file.read_text()
    assert "h200, published, 2 GPUs" in text
    assert "1 published (somebody, 2026-01-02" in text
    assert f"{date.today().isoformat()}" in text


def test_lines_differ_in_more_than_colour() -> None:
    assert len(set(STYLES)) > 1
    assert len(set(MARKERS)) == len(MARKERS) >= 8


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize("dark", [False, True])
def test_ink_is_told_from_paper(tmp_path: Path, dark: bool) -> None:
    file = tmp_path / "c.svg"
    curves_picture([curve("h200")], "T").draw(file, dark=dark)
    text = file.read_text()
    paper = re.search(r'<g id="patch_1">.*?fill: (#\w+)', text, re.DOTALL)
    assert paper
    ink = "".join(re.findall(r"<text style=\"[^\"]*", text))
    if dark:
        assert paper.group(1) == "#0f0f0f"
        assert "fill: #ededed" in ink
    else:
        assert paper.group(1) == "#ffffff"
        assert "#ededed" not in ink


@pytest.mark.usefixtures("words")
def test_memory_s_parts_add_up_to_the_gpu(tmp_path: Path) -> None:
    catalog = Catalog()
    one = place(catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator("h200"), Parallelism()), 8192)
    plan = one.plan
    assert plan.weight_bytes + plan.cache_bytes + plan.engine_bytes == pytest.approx(plan.capacity_bytes)
    file = tmp_path / "m.svg"
    memory_picture([one], "T").draw(file)
    text = file.read_text()
    # A segment may be too narrow for its number, so all stand over the bar.
    engine = one.deployment.stack.reserved.si
    assert engine < 0.06 * plan.capacity_bytes
    sizes = (f"{plan.weight_bytes / 1e9:,.0f} + ", f" + {engine / 1e9:.1f} + ")
    for word in ("weights", "KV cache", "engine and activations", *sizes, "8,192 tokens"):
        assert word in text


@pytest.mark.parametrize(("model", "on", "gpus"), [("llama-3.1-8b", "h200", 1), ("deepseek-v3.2", "mi355x", 8)])
def test_a_roofline_s_operations_are_the_model_s_own(model: str, on: str, gpus: int) -> None:
    catalog = Catalog()
    one = catalog.deployment(catalog.model(model), catalog.accelerator(on), Parallelism(tp=gpus), "fp8")
    found = roofline(one, concurrency=16, input_tokens=2048, output_tokens=256)
    hardware = Hardware([one])
    for each in found.steps:
        decodes = each.kind == "decode"
        at = shape(each.size, each.context) if decodes else shape(0.0, 0.0, each.size, each.context)
        cost = step(hardware, at)
        assert each.seconds == pytest.approx(cost.total_s[0, 0])
        # With what is not on the axes they are the whole step, and at peak rates the ideal one.
        spent = sum(spot.share_of_step for spot in each.spots) + sum(each.elsewhere.values())
        assert spent == pytest.approx(1.0)
        peaks = {roof.format: roof.peak_flop_per_s for roof in found.roofs}
        roofs = [min(peaks[spot.format], spot.flop_per_byte * found.memory_bytes_per_s) for spot in each.spots]
        ideal = sum(spot.flop / roof for spot, roof in zip(each.spots, roofs, strict=True))
        assert ideal == pytest.approx(cost.ideal_s[0, 0], rel=0.01)
        assert all(spot.flop_per_s <= roof for spot, roof in zip(each.spots, roofs, strict=True))
    got = estimate(one, concurrency=16, input_tokens=2048, output_tokens=256)
    assert found.steps[1].size == pytest.approx(got.decoding)


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize("on", ["mi300x", pytest.param("mi300x,b200", marks=pytest.mark.slow)])
def test_a_roofline_says_what_its_json_says(crosstie: Command, tmp_path: Path, on: str) -> None:
    file = tmp_path / "r.svg"
    asked = ("compare", "gpt-oss-120b", "--on", on, "--plot-roofline", str(file), "--json")
    found = json.loads(crosstie(*asked).out)["roofline"]
    text = file.read_text()
    assert ",".join(one["deployment"]["accelerator"] for one in found) == on
    for one in found:
        shares: dict[str, list[str]] = {spot["name"]: [] for each in one["steps"] for spot in each["spots"]}
        for each in one["steps"]:
            for spot in each["spots"]:
                part = spot["share_of_step"]
                shares[spot["name"]].append(f"{part:.0%}" if part >= 0.01 else "&lt;1%")
        for name, parts in shares.items():
            assert f"{name}: {', '.join(parts)}" in text
    assert "1 x mi300x" in text
    assert "2025-03-21" in text
    assert "predicted, not measured" in text.replace("\n", " ")
    # Ticks as people write them.
    assert ">10,000<" in text
    assert "×" not in text


def test_commands_draw_them(crosstie: Command, tmp_path: Path) -> None:
    memory = tmp_path / "memory.svg"
    assert crosstie("fit", "llama-3.1-8b", "--on", "h200", "--plot", str(memory)).status == 0
    assert memory.exists()


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize("ending", ["svg", "png", "html"])
def test_pictures_of_cost_are_titled_with_what_they_assume(crosstie: Command, tmp_path: Path, ending: str) -> None:
    cost, context = tmp_path / f"cost.{ending}", tmp_path / f"context.{ending}"
    asked = ("compare", "llama-3.1-8b", "--on", "h200,mi325x", "--plot-cost", str(cost), "--plot-context", str(context))
    got = crosstie(*asked, "--dark", "--json")
    assert got.status == 0
    document = json.loads(got.out)
    if ending == "png":
        assert {file.read_bytes()[:4] for file in (cost, context)} == {b"\x89PNG"}
        return
    for key, file, assumed in (
        ("costs", cost, "4,096 tokens in, 1,024 out, the best layout and load at each TPOT"),
        ("context_sweep", context, "1,024 tokens out, 64 in flight"),
    ):
        said = " ".join(
            "".join(pair) for pair in re.findall(r"<text[^>]*>([^<]*)|<tspan[^>]*>([^<]*)", file.read_text())
        )
        curve, unpriced = document[key]
        assert (curve["accelerator"], unpriced["accelerator"]) == ("h200", "mi325x")
        assert "usd_per_mtok" not in unpriced
        assert len(curve["usd_per_mtok"]) == len(curve["usd_per_mtok_80"]) > 3
        for word in ("Llama 3.1 8B, native", assumed, "on-demand prices", "none for mi325x", "80% intervals"):
            assert word in said
        assert "predicted, not measured" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("compare", "llama-3.1-8b", "--on", "h200", "--plot-cost", "x.txt"), "must end in .svg"),
        (("fit", "llama-3.1-8b", "--on", "h200", "--plot", "x.txt"), "must end in .svg"),
        (("compare", "llama-3.1-8b", "--on", "h200", "--plot-roofline", "x.txt", "--json"), "must end in .svg"),
        (("compare", "qwen3-8b", "--on", "h200", "--plot-roofline", "/nowhere/x.svg"), "cannot be written"),
        (("compare", "llama-3.1-405b", "--on", "h200", "--tp", "1", "--plot-roofline", "x.svg"), "none of these"),
        (("compare", "qwen3-8b", "--on", "h100-sxm,h200,b200,mi300x,mi355x", "--plot-roofline", "x.svg"), "holds 4"),
        (
            ("compare", "deepseek-r1", "--on", "b200", "--tp=8", "--speculation=mtp:3", "--plot-roofline=x.svg"),
            "without",
        ),
        (("compare", "llama-3.1-8b", "--on", "mi300x,rtx-3090", "--plot-cost", "/nowhere/x.svg"), "cannot be written"),
        (("compare", "qwen3-8b", "--on", "rtx-3090", "--plot-cost", "x.svg"), "has a price by the hour"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(crosstie: Command, arguments: tuple[str, ...], said: str) -> None:
    got = crosstie(*arguments)
    assert got.status == 2
    assert said in got.err
    assert "Traceback" not in got.err


def predicted_rows(tmp_path: Path, *shares: float, name: str = "r.csv") -> Path:
    """Throughput of one point so often, measured at these shares of the way from low to high of its interval."""
    (one,) = validate(Catalog([]), written(tmp_path / "one.csv", row())).outcomes
    values = [one.low * (one.high / one.low) ** share for share in shares]
    return written(tmp_path / name, *(row(value=repr(value), source_ref=str(i)) for i, value in enumerate(values)))


@pytest.mark.usefixtures("words")
def test_a_reliability_picture_says_what_its_json_says(crosstie: Command, tmp_path: Path) -> None:
    """Thirty rows are a group, 12 of them inside; 29 are none, and the picture says that."""
    many = predicted_rows(tmp_path, *[0.5] * 12, *[1.5] * 18)
    few = predicted_rows(tmp_path, *[0.5] * 29, name="few.csv")
    drawn, less = tmp_path / "r.svg", tmp_path / "few.svg"
    got = crosstie("validate", str(many), "--plot", str(drawn), "--json")
    assert got.status == 0
    assert f"drawn as {drawn}" in got.err
    text = drawn.read_text()
    (one,) = json.loads(got.out)["intervals"]["accelerator and engine"].values()
    assert (one["throughput"]["n"], one["throughput"]["inside"]) == (30, pytest.approx(0.4))
    assert "h200, vllm, throughput: 40%" in text
    for word in ("r.csv", "level of the interval", ">68%<", ">80%<", ">92%<", "30 measured rows"):
        assert word in text
    assert "TTFT" not in text
    assert crosstie("validate", str(few), "--plot", str(less), "--dark").status == 0
    assert "no group has 30 rows" in less.read_text()


@pytest.mark.usefixtures("words")
def test_the_worst_groups_of_a_reliability_picture_do_not_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three groups at one place and one far from them: three numbers and three names, none upon another."""
    table = {"n": 30, "inside": 0.5, "width": 1.5}
    groups = {name: {"tpot": table} for name in ("a, vllm", "b, vllm", "c, vllm")}
    groups["d, vllm"] = {"tpot": {**table, "inside": 0.9, "width": 4.0}}
    monkeypatch.setattr("crosstie.web.reliability_chart.intervals", lambda *_: groups)
    rows = validate(Catalog([]), predicted_rows(tmp_path, 0.5)).outcomes
    picture = reliability_picture(rows, "T")
    figure = picture.make()
    finish(figure, picture.note)
    figure.draw_without_rendering()
    axes = figure.axes[1]
    labels = [*axes.texts, *axes.get_legend().get_texts()]
    assert [one.get_text() for one in labels] == ["1", "2", "3", *(f"{name}, vllm, TPOT: 50%" for name in "abc")]
    boxes = [one.get_window_extent() for one in labels]
    assert not [1 for one, other in combinations(boxes, 2) if one.overlaps(other)]
    assert max(box.x1 for box in boxes) <= axes.get_window_extent().x1


def test_a_reliability_picture_that_cannot_be_drawn_is_one_line(
    crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = str(written(tmp_path / "a.csv", row(metric="tpot_ms_p99", unit="ms", value="9")))
    for file, said in (("x.txt", "must end in .svg"), ("no/x.svg", "cannot be written"), ("x.svg", "has an interval")):
        got = crosstie("validate", rows, "--plot", str(tmp_path / file))
        assert got.status == 2
        assert said in got.err
        assert len(got.err.strip().splitlines()) == 1
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install '.[plot]'" in crosstie("validate", rows, "--plot", str(tmp_path / "x.svg")).err
    assert not (tmp_path / "x.svg").exists()


@pytest.mark.parametrize(
    ("library", "command"),
    [
        ("matplotlib.figure", ("plan", "assistant", "--plot", "x.svg")),
        ("matplotlib.figure", ("simulate", "assistant", "--plot", "x.html")),
    ],
)
def test_a_library_that_is_missing_is_said_before_the_work(
    library: str, command: tuple[str, ...], crosstie: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("the work had begun")

    monkeypatch.setattr("crosstie.cli.plan.plan", work)
    monkeypatch.setattr("crosstie.cli.simulate.read_subject", work)
    monkeypatch.setitem(sys.modules, library, None)
    got = crosstie(*command)
    assert (got.status, got.err.count("\n")) == (2, 1)
    assert "pip install '.[plot]'" in got.err


def test_a_page_is_made_without_what_draws_charts(
    crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = tmp_path / "c.html"
    assert crosstie("compare", "llama-3.1-8b", "--on", "h200", "--html", str(file)).status == 0
    text = file.read_text()
    assert "<svg" not in text
    assert "without its charts: pictures need matplotlib" in text


@pytest.mark.usefixtures("words")
def test_a_picture_as_a_page_is_drawn_for_desk_and_phone_in_the_pages_ink(tmp_path: Path) -> None:
    file = tmp_path / "c.html"
    curves_picture([curve("h200"), curve("mi300x")], "A title").draw(file)
    text = file.read_text()
    assert re.findall(r'<svg class="(\w+)"', text) == ["wide", "narrow"]
    widths = [float(one) for one in re.findall(r'<svg class="\w+"[^>]*? width="([\d.]+)pt"', text)]
    assert widths[0] > 1.5 * widths[1]
    # The title once, over the picture.
    assert text.count("A title<") == 2
    assert "<h1>A title</h1>" in text
    assert "<title>A title</title>" in text
    drawn = text[text.index("<svg") : text.rindex("</svg>")]
    pairs = dict(re.findall(r"light-dark\((#\w+),(#\w+)\)", drawn))
    assert {"#000000", "#d55e00", "#0072b2"} <= set(pairs)
    assert not re.findall(r": #[0-9a-f]{6}\b", drawn)


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize("colour", ["#332288", "#000000", "#0072b2", "0.1", "0.4"])
@pytest.mark.parametrize("kind", ["line", "band", "bar", "word"])
def test_by_night_nothing_of_a_picture_is_swallowed_by_its_paper(tmp_path: Path, colour: str, kind: str) -> None:
    figure = new_figure(4, 3)
    axes = figure.subplots()
    draw: dict[str, Any] = {"line": axes.plot, "band": axes.fill_between, "bar": axes.bar}
    axes.text(0, 0, "words", color=colour) if kind == "word" else draw[kind]([1, 2], [1, 2], color=colour)
    page, file = tmp_path / "c.html", tmp_path / "c.svg"
    save(figure, page, "", dark=True)
    for night in re.findall(r"light-dark\((?!#ffffff)#\w+,(#\w+)\)", page.read_text()):
        assert contrast(night, "#0d1117") > (1.0 if len(set(night[1::2])) == 1 else 4.4)
    save(figure, file, "", dark=True)
    own = to_hex(colour)
    assert own not in file.read_text()


def contrast(one: str, other: str) -> float:
    """As WCAG has it."""

    def luminance(colour: str) -> float:
        parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_numbers_of_an_axis_never_run_into_each_other(tmp_path: Path) -> None:
    figure = new_figure(4, 2)
    axes = figure.subplots()
    axes.set_xticks(range(9), [f"{at:02d}:00 o'clock" for at in range(9)])
    save(figure, tmp_path / "c.svg", "")
    shown = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_visible()]
    assert 1 < len(shown) < 9
    assert all(left.x1 < right.x0 for left, right in pairwise(shown))

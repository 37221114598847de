"""Pictures that are quoted: readable alone, by day and by night, told apart without colours, with source and date."""

import json
import re
from datetime import date
from pathlib import Path

import pytest
from tests.conftest import Command

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.decide.compare.curve import Curve
from crosstie.perf.estimate import estimate
from crosstie.perf.fit import place
from crosstie.perf.hardware import Hardware
from crosstie.perf.roofline import roofline
from crosstie.perf.step import shape, step
from crosstie.prove.calibration.published import PublishedPoint, published_points
from crosstie.prove.calibration.results import read_results
from crosstie.web.chart import MARKERS, STYLES, draw_curves, draw_memory

matplotlib = pytest.importorskip("matplotlib")
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
    draw_curves(
        [curve("h200"), curve("mi300x", 2.0)], "T", file, [PublishedPoint("h200", 2, 45, 60, "somebody", "2026-01-02")]
    )
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
    draw_curves([curve("h200")], "T", file, dark=dark)
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
    draw_memory([one], "T", file)
    text = file.read_text()
    # A segment that is too narrow for its number has it beside the bar.
    engine = one.deployment.stack.reserved.si
    assert engine < 0.06 * plan.capacity_bytes
    sizes = (f"{plan.weight_bytes / 1e9:,.0f}", f">{engine / 1e9:.1f}<")
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
    cost, memory = tmp_path / "cost.svg", tmp_path / "memory.svg"
    assert crosstie("compare", "llama-3.1-8b", "--on", "h200", "--plot-cost", str(cost), "--dark").status == 0
    assert crosstie("fit", "llama-3.1-8b", "--on", "h200", "--plot", str(memory)).status == 0
    assert cost.exists()
    assert memory.exists()


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

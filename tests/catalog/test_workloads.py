"""Workload files: what they mean, and one line with file and key for everything that they cannot mean."""

from pathlib import Path

import numpy as np
import pytest
from tests.small_workload import ALLOWED, SECOND, SMALL, Change, constrained, small, small_text, tables

from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import example_text, find_workload, read_workload
from crosstie.core.errors import BadData, BadInput
from crosstie.core.workload import Target

TOTAL = "requests_per_s = 5\n"
SHARE = "share = 1\n"
INPUT, OUTPUT = "input = 1000\n", "output = 200\n"
TTFT = "ttft_ms = { p95 = 1000 }\n"
LENGTHS = INPUT + OUTPUT
MODEL = '[models."llama-3.1-8b"]\n'


def test_a_small_file_means_what_it_says(catalog: Catalog, tmp_path: Path) -> None:
    got = read_workload(catalog, small(tmp_path))
    (one,) = got.classes
    assert (got.name, one.name, one.model, one.requests_per_s) == ("small", "chat", "llama-3.1-8b", 5.0)
    assert (one.input_tokens, one.output_tokens) == (1000.0, 200.0)
    assert one.ttft == Target(seconds=1.0, percentile=0.95)
    assert one.tpot == Target(seconds=0.05, percentile=0.9)
    assert got.constraints.accelerators == ("mi300x", "h200")
    assert got.notes == ("mean traffic is taken as half the peak (traffic.mean_over_peak)",)


@pytest.mark.parametrize(
    "content",
    ["\ufeff".encode() + SMALL.encode(), SMALL.replace("\n", "\r\n").encode()],
    ids=["byte order mark", "CRLF"],
)
def test_editors_of_other_systems_do_no_harm(catalog: Catalog, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "w.toml"
    file.write_bytes(content)
    assert read_workload(catalog, file).classes == read_workload(catalog, small(tmp_path)).classes


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (SMALL.replace("small", "größe").encode("latin-1"), "not UTF-8"),
        (SMALL.encode("utf-16"), "not UTF-8"),
        (b"\0" * 20, "not valid TOML"),
        (b"# Notes\n\nnot a workload", "not valid TOML"),
    ],
    ids=["latin-1", "utf-16", "zeros", "prose"],
)
def test_what_is_no_toml(catalog: Catalog, tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "w.toml"
    file.write_bytes(content)
    with pytest.raises(BadData, match=words) as caught:
        read_workload(catalog, file)
    assert caught.value.file == str(file)


UNKNOWN = [
    (('name = "small"', 'name = "small"\ncolour = 1'), "colour"),
    ((TOTAL, TOTAL + "mean_ofer_peak = 1\n"), "traffic.mean_ofer_peak"),
    ((SHARE, SHARE + "shre = 1\n"), "class[0].shre"),
    ((INPUT, "input = { mean = 10, p42 = 20 }\n"), "class[0].input.p42"),
    ((INPUT, "input = { histogram = [[1, 2, 1]], mean = 4 }\n"), "class[0].input.mean"),
    ((TTFT, "ttft_ms = { p94 = 1000 }\n"), "class[0].ttft_ms.p94"),
    (constrained("at_mots = {}"), "constraints.at_mots"),
    (tables("[prices]\nbais = 'rent'"), "prices.bais"),
    (tables(MODEL + "precison = ['fp8']"), 'models."llama-3.1-8b".precison'),
]

WRONG = [
    (("[traffic]\nrequests_per_s = 5", "traffic = 5"), "traffic", "table"),
    ((TOTAL, "requests_per_s = true\n"), "traffic.requests_per_s", "number"),
    ((TOTAL, "requests_per_s = nan\n"), "traffic.requests_per_s", "number"),
    ((TOTAL, "requests_per_s = 1e400\n"), "traffic.requests_per_s", "number"),
    ((TOTAL, "requests_per_s = 0\n"), "traffic.requests_per_s", "number"),
    ((TOTAL, TOTAL + "mean_over_peak = 1.2\n"), "traffic.mean_over_peak", "0.001 to 1"),
    ((TOTAL, TOTAL + "growth_per_year = -1\n"), "traffic.growth_per_year", "-0.9"),
    ((TOTAL, TOTAL + "horizon_years = 1.5\n"), "traffic.horizon_years", "whole number"),
    (('name = "small"', 'name = "small"\nsizing = ["safe"]'), "sizing", "safe, likely"),
    (('name = "small"', "name = 4"), "name", "string"),
    (("[[class]]", "[class]"), "class", "[[class]]"),
    (('name = "chat"\n', ""), "class[0].name", "missing"),
    (('name = "chat"', 'name = "..."'), "class[0].name", "letter or digit"),
    (('name = "chat"', f'name = "{"x" * 61}"'), "class[0].name", "60 characters"),
    (('name = "chat"', 'name = "a\\nb"'), "class[0].name", "line breaks"),
    (('model = "llama-3.1-8b"\n', ""), "class[0].model", "missing"),
    (('"llama-3.1-8b"', '"llama-3.1-80b"'), "class[0].model", "Did you mean"),
    (('"llama-3.1-8b"', '"./nowhere"'), "class[0].model", "no such file"),
    ((SHARE, "share = 0.5\n"), "class", "add up to 0.5"),
    ((SHARE, "share = -1\n"), "class[0].share", "0 to 1"),
    ((SHARE, "share = nan\n"), "class[0].share", "0 to 1"),
    ((SHARE, SHARE + "requests_per_s = 3\n"), "class[0].requests_per_s", "not both"),
    ((TOTAL, ""), "traffic.requests_per_s", "a share of what"),
    ((INPUT, ""), "class[0].input", "missing"),
    ((OUTPUT, "output = 0\n"), "class[0].output", "number of tokens"),
    ((INPUT, "input = 1e9\n"), "class[0].input", "100,000,000"),
    ((INPUT, "input = 131000\n"), "class[0]", "exceed the 131,072 tokens"),
    ((LENGTHS, "input = 131000\noutput = { median = 60, p95 = 500 }\n"), "class[0]", "exceed"),
    ((TTFT, "ttft_ms = 500\n"), "class[0].ttft_ms", "{ p90 = 500 }"),
    ((TTFT, "ttft_ms = { p95 = 1, p99 = 2 }\n"), "class[0].ttft_ms", "{ p90 = 500 }"),
    ((TTFT, "ttft_ms = { p95 = inf }\n"), "class[0].ttft_ms.p95", "number"),
    ((LENGTHS, INPUT + 'trace = "azure-2023-code"\n'), "class[0].input", "trace"),
    ((LENGTHS, "trace = 4\n"), "class[0].trace", "string"),
    (tables('[models."llama-9"]'), 'models."llama-9"', "unknown model"),
    (tables(MODEL + "precisions = []"), 'models."llama-3.1-8b".precisions', "empty"),
    (tables(MODEL + "kv = []"), 'models."llama-3.1-8b".kv', "empty"),
    (tables(MODEL + 'kv = ["fp3"]'), 'models."llama-3.1-8b".kv[0]', "bf16"),
    (tables(MODEL + "speculation = []"), 'models."llama-3.1-8b".speculation', "empty"),
    (tables(MODEL + 'speculation = ["mtp:3"]'), 'models."llama-3.1-8b".speculation', "has no prediction layer"),
    (tables(MODEL + 'speculation = ["magic"]'), 'models."llama-3.1-8b".speculation', "must be one of mtp"),
    (tables(MODEL + 'text = "verse"'), 'models."llama-3.1-8b".text', "is not one of chat"),
    (tables(MODEL + "acceptance = 2"), 'models."llama-3.1-8b".acceptance', "`speculation` must name"),
    (tables(MODEL + 'speculation = ["eagle3:3"]\nacceptance = 5'), 'models."llama-3.1-8b".speculation', "1 to 4"),
    (tables(MODEL + 'speculation = ["eagle3:3"]\nacceptance = 0.2'), 'models."llama-3.1-8b".acceptance', "1 to 33"),
    (tables(MODEL + 'precisions = ["fp3"]'), 'models."llama-3.1-8b".precisions', "unknown precision"),
    (tables(MODEL + 'stacks = ["vlm"]'), 'models."llama-3.1-8b".stacks', "unknown stack"),
    (tables(MODEL + '[models."LLAMA-3.1-8B"]'), 'models."LLAMA-3.1-8B"', "already"),
    ((ALLOWED, 'accelerators = ["mi999"]\n'), "constraints.accelerators[0]", "unknown accelerator"),
    ((ALLOWED, 'accelerators = "h200"\n'), "constraints.accelerators", "list"),
    (constrained('vendors = ["Intel"]'), "constraints.vendors[0]", "AMD, NVIDIA"),
    (constrained("at_most = { h200 = -1 }"), "constraints.at_most.h200", "whole number"),
    (constrained("at_most = { h200 = 1, H200 = 2 }"), "constraints.at_most.H200", "already"),
    (constrained("inventory = { h200 = nan }"), "constraints.inventory.h200", "whole number"),
    (constrained("inventory = { b200 = 8 }"), "constraints.inventory.b200", "not among"),
    (constrained("budget_usd_per_month = -1"), "constraints.budget_usd_per_month", "number"),
    (constrained("power_kw = inf"), "constraints.power_kw", "number"),
    (constrained("vendor_share = { AMD = 1.2 }"), "constraints.vendor_share.AMD", "0 to 1"),
    (constrained("vendor_share = { AMD = 0.7, NVIDIA = 0.7 }"), "constraints.vendor_share", "1.4"),
    (constrained("vendor_share = { AMD = 0.5, NVIDIA = 0.5 }"), "constraints.vendor_share", "nothing to choose"),
    (constrained("vendor_share = { AMD = 0.2, amd = 0.3 }"), "constraints.vendor_share.amd", "already"),
    (constrained("vendor_share = { Intel = 0.2 }"), "constraints.vendor_share.Intel", "no vendor"),
    (("whole_nodes = false", "whole_nodes = 1"), "constraints.whole_nodes", "true nor false"),
    (constrained("spare = nan"), "constraints.spare", "number"),
    (constrained("simplicity = 2"), "constraints.simplicity", "number"),
    (tables("[prices]\nkind = 1"), "prices.kind", "must be a list of strings"),
    (tables("[prices]\nkind = []"), "prices.kind", "is empty"),
    (tables("[prices]\ndiscount = { AMD = 1 }"), "prices.discount.AMD", "0.99"),
    (tables("[prices]\ndiscount = { AMD = 0.1, amd = 0.2 }"), "prices.discount.amd", "already"),
    (tables("[prices]\ndiscount = { Intel = 0.1 }"), "prices.discount.Intel", "unknown"),
    (tables("[prices]\nusd_per_gpu_hour = { h200 = 0 }"), "prices.usd_per_gpu_hour.h200", "number"),
    (tables("[prices]\nusd_per_gpu_hour = { h200 = 1, H200 = 2 }"), "prices.usd_per_gpu_hour.H200", "already"),
]


@pytest.mark.parametrize(("change", "key"), UNKNOWN, ids=[key for _, key in UNKNOWN])
def test_unknown_keys_are_named(catalog: Catalog, tmp_path: Path, change: Change, key: str) -> None:
    with pytest.raises(BadData, match="unknown key") as caught:
        read_workload(catalog, small(tmp_path, change))
    assert caught.value.key == key


@pytest.mark.parametrize(("change", "key", "words"), WRONG, ids=[f"{key}: {words}" for _, key, words in WRONG])
def test_what_makes_no_sense_is_named(catalog: Catalog, tmp_path: Path, change: Change, key: str, words: str) -> None:
    file = small(tmp_path, change)
    with pytest.raises(BadData) as caught:
        read_workload(catalog, file)
    assert (caught.value.file, caught.value.key) == (str(file), key)
    assert words in caught.value.reason
    # The place is said once, whatever the fault quotes.
    assert str(caught.value).count(str(file)) == 1


TWO = [
    ("share = 0.5", "share = 0.7", "class", "add up to 1.2"),
    ("share = 0.5", "requests_per_s = 3", "class[1].share", "so all must"),
    ('name = "second"', 'name = "chat"', "class[1].name", "is there twice"),
    ("share = 0.5", "share = 'half'", "class[1].share", "0 to 1"),
]


@pytest.mark.parametrize(("old", "new", "key", "words"), TWO, ids=[words for *_, words in TWO])
def test_faults_between_two_classes(catalog: Catalog, tmp_path: Path, old: str, new: str, key: str, words: str) -> None:
    file = tmp_path / "two.toml"
    file.write_text(small_text((SHARE, "share = 0.5\n"), tables(SECOND.replace(old, new))))
    with pytest.raises(BadData, match=words) as caught:
        read_workload(catalog, file)
    assert caught.value.key == key


def test_a_class_that_nobody_asks_for_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    """Nothing could be said of what its tokens cost."""
    with pytest.raises(BadData, match="leave out") as caught:
        read_workload(catalog, small(tmp_path, tables(SECOND.replace("share = 0.5", "share = 0"))))
    assert caught.value.key == "class[1].share"


def test_shares_are_of_the_total(catalog: Catalog, tmp_path: Path) -> None:
    got = read_workload(catalog, small(tmp_path, (SHARE, "share = 0.3\n"), tables(SECOND.replace("0.5", "0.7"))))
    assert [one.requests_per_s for one in got.classes] == pytest.approx([1.5, 3.5])


def test_the_only_class_has_all_of_the_traffic(catalog: Catalog, tmp_path: Path) -> None:
    (one,) = read_workload(catalog, small(tmp_path, (SHARE, ""))).classes
    assert one.requests_per_s == 5.0
    with pytest.raises(BadData, match="missing") as caught:
        read_workload(catalog, small(tmp_path, (SHARE, ""), (TOTAL, "")))
    assert caught.value.key == "class[0].requests_per_s"


def test_names_in_any_case_and_twice(catalog: Catalog, tmp_path: Path) -> None:
    got = read_workload(
        catalog,
        small(
            tmp_path,
            (ALLOWED, 'accelerators = ["MI300X", "mi300x", "H200"]\nvendors = ["amd", "AMD", "nvidia"]\n'
             "vendor_share = { amd = 0.2 }\n[prices]\ndiscount = { nvidia = 0.1, H200 = 0.2 }\n"),
        ),
    )  # fmt: skip
    assert got.constraints.accelerators == ("mi300x", "h200")
    assert got.constraints.vendors == ("AMD", "NVIDIA")
    assert got.constraints.vendor_share == {"AMD": 0.2}
    assert got.prices.discount == {"NVIDIA": 0.1, "h200": 0.2}


def test_a_model_that_no_class_asks_for_is_noted(catalog: Catalog, tmp_path: Path) -> None:
    got = read_workload(catalog, small(tmp_path, tables('[models."qwen3-8b"]\nprecisions = ["fp8"]')))
    assert any("no class asks for qwen3-8b" in note for note in got.notes)
    asked = read_workload(catalog, small(tmp_path, tables(MODEL + 'precisions = ["fp8"]')))
    assert not any("no class asks" in note for note in asked.notes)
    assert asked.choice("llama-3.1-8b").precisions == ("fp8",)


TRACES = [
    (None, "unknown trace"),
    ("", "is empty"),
    ("input_tokens,output_tokens\n", "has no requests"),
    ("a,b\n1,2\n", "needs a column"),
    ("input_tokens,output_tokens\n1,x\n", "line 2"),
    ("input_tokens,output_tokens\n1\n", "line 2"),
    (bytes(range(256)), "not UTF-8"),
]


@pytest.mark.parametrize(("content", "words"), TRACES, ids=[words for _, words in TRACES])
def test_broken_traces_say_who_asked_for_them(
    catalog: Catalog, tmp_path: Path, content: str | bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "t.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadData, match=words) as caught:
        read_workload(catalog, small(tmp_path, (LENGTHS, 'trace = "t.csv"\n')))
    assert caught.value.key == "class[0].trace"
    assert "t.csv" in caught.value.reason


def test_a_folder_is_no_trace(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="unknown trace") as caught:
        read_workload(catalog, small(tmp_path, (LENGTHS, 'trace = "."\n')))
    assert caught.value.key == "class[0].trace"


def _timed(tmp_path: Path, times: list[float]) -> None:
    rows = "".join(f"{t},{100 + i % 7},20\n" for i, t in enumerate(times))
    (tmp_path / "t.csv").write_text("timestamp,input_tokens,output_tokens\n" + rows)


def test_the_rate_of_a_trace_is_that_of_a_busy_minute(catalog: Catalog, tmp_path: Path) -> None:
    """Nineteen minutes of one request a second and one of ten."""
    times = [60.0 * minute + k * 60 / n for minute in range(20) for n in [600 if minute == 7 else 60] for k in range(n)]
    _timed(tmp_path, [*times, 1200.0])
    got = read_workload(catalog, small(tmp_path, (SHARE, ""), (TOTAL, ""), (LENGTHS, 'trace = "t.csv"\n')))
    expected = np.quantile([60] * 19 + [600], 0.95) / 60
    assert got.classes[0].requests_per_s == pytest.approx(expected)
    assert any("19 of 20 minutes" in note for note in got.notes)


@pytest.mark.parametrize("times", [[0, 3600, 7200], [0, 1, 2]], ids=["hardly anybody", "three seconds"])
def test_a_trace_that_tells_no_rate(catalog: Catalog, tmp_path: Path, times: list[float]) -> None:
    _timed(tmp_path, times)
    with pytest.raises(BadData, match="missing") as caught:
        read_workload(catalog, small(tmp_path, (SHARE, ""), (LENGTHS, 'trace = "t.csv"\n')))
    assert caught.value.key == "class[0].requests_per_s"


def test_a_few_requests_too_long_are_cut_and_counted(catalog: Catalog, tmp_path: Path) -> None:
    rows = "".join("500,50\n" for _ in range(995)) + "200000,50\n" * 5
    (tmp_path / "t.csv").write_text("input_tokens,output_tokens\n" + rows)
    got = read_workload(catalog, small(tmp_path, (LENGTHS, 'trace = "t.csv"\n')))
    assert any("0.50% of its requests exceed 131,072" in note for note in got.notes)
    assert max(one.context for one in got.classes[0].slices) <= 131_072


def test_finding_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_workload(Path("assistant")).name == "assistant.toml"
    with pytest.raises(BadInput, match="is a folder"):
        find_workload(tmp_path)
    with pytest.raises(BadInput, match="no such workload file; shipped examples: agents, assistant"):
        find_workload(tmp_path / "nowhere.toml")
    with pytest.raises(BadInput, match="cannot be read: File name too long"):
        find_workload(Path("x" * 5000))
    # A file of that name goes before the example.
    (tmp_path / "assistant").write_text(SMALL)
    assert find_workload(Path("assistant")) == Path("assistant")


def test_the_example_reads(catalog: Catalog, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(example_text())
    got = read_workload(catalog, file)
    assert [one.name for one in got.classes] == ["chat", "code", "documents", "batch"]
    assert sum(one.requests_per_s for one in got.classes) == pytest.approx(60)

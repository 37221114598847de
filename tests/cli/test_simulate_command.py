"""`crosstie simulate` as a user meets it: the answer, its JSON, its picture, and one line for every mistake."""

import json
import re
from pathlib import Path

import pytest
from tests.conftest import Command
from tests.small_workload import small

import crosstie as package
from crosstie.cli.simulate import outage
from crosstie.core.errors import BadInput
from crosstie.decide.plan.run_result import Outage

pytestmark = pytest.mark.usefixtures("planned_once")
FLEET = str(Path(package.__file__).parent / "catalog" / "data" / "fleets" / "two-vendors.toml")
QUICK = ("--requests", "700", "--seeds", "2", "--processes", "1")


def test_a_fleet_file(crosstie: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    got = crosstie("simulate", FLEET, *QUICK)
    assert got.status == 0, got.err
    lines = got.out.splitlines()
    assert lines[0].startswith("two-vendors: ")
    assert "targets hold" in " ".join(lines[:2])
    assert "$5.50 an hour" in got.out
    for word in ("class", "chat", "batch", "mi300x", "h200", "no routing could beat 100.0%"):
        assert word in got.out
    assert "its class's mean lengths" in " ".join(got.out.split())
    assert all(len(line) <= 80 for line in lines)
    more = crosstie("simulate", FLEET, *QUICK, "-v").out
    for word in ("Percentiles", "Where requests went", "Bounds by class"):
        assert word in more


def test_what_comes_from_other_memory_is_said_by_its_place(crosstie: Command, tmp_path: Path) -> None:
    file, log = tmp_path / "f.toml", tmp_path / "t.jsonl"
    content = (
        Path(FLEET).read_text().replace("accelerator = ", "nvme_gib_per_gpu = 500\nremote_gib = 900\naccelerator = ")
    )
    file.write_text(content)
    asked = [{"timestamp": 9000 * n, "input_length": 1100, "output_length": 20, "hash_ids": [n % 3, n % 3 + 9, 20 + n]}
             for n in range(60)]  # fmt: skip
    log.write_text("".join(json.dumps(one) + "\n" for one in asked))
    got = crosstie("simulate", str(file), "--trace", str(log), "--seeds", "1")
    said = " ".join(got.out.split())
    assert re.search(r"were in a cache \(\d+% loaded from its drives, \d+% loaded from what replicas share\)", said), (
        said
    )


BOUGHT = """
[[pool]]
name = "provider"
model = "llama-3.1-8b"
usd_per_million_input = 0.1
usd_per_million_output = 0.4
max_context = 100000
api_key_env = "PROVIDER_KEY"
backends = ["https://api.example.com/v1"]
"""


def test_what_is_paid_by_the_token_is_left_out_and_named(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "bought.toml"
    file.write_text(Path(FLEET).read_text() + BOUGHT)
    document = json.loads(crosstie("simulate", str(file), *QUICK, "--json").out)
    assert {pool["name"] for pool in document["runs"][0]["pools"]} == {"mi300x", "h200"}
    assert any("without provider, paid by the token" in note for note in document["notes"])
    file.write_text(f"format = 1\n{BOUGHT}")
    got = crosstie("simulate", str(file), *QUICK)
    assert got.status == 2
    assert "every pool is paid by the token" in got.err


@pytest.mark.slow
def test_a_workload_is_planned_and_a_saved_plan_gives_the_same(crosstie: Command, tmp_path: Path) -> None:
    work, saved = str(small(tmp_path)), str(tmp_path / "plan.json")
    assert crosstie("plan", work, "--quick", "--save", saved).status == 0
    documents = [json.loads(crosstie("simulate", one, *QUICK, "--json").out) for one in (work, saved)]
    for document in documents:
        for one in document["runs"]:
            one.pop("label")
    assert documents[0]["runs"] == documents[1]["runs"]
    (first, second) = documents[0]["runs"]
    assert (first["seed"], second["seed"]) == (0, 1)
    assert first["classes"] != second["classes"]
    assert documents[0]["interrupted"] is False


@pytest.mark.slow
def test_policies_loads_and_fleets_side_by_side(crosstie: Command, tmp_path: Path) -> None:
    other = tmp_path / "small-one.toml"
    other.write_text(Path(FLEET).read_text().replace(', "http://127.0.0.1:8002/v1"', ""))
    got = crosstie(
        "simulate", FLEET, *QUICK, "--fleet", str(other), "--policy", "cheapest-meeting-target,round-robin", "--load",
        "0.5,30",
    )  # fmt: skip
    assert got.status == 1, "thirty times the peak is too much"
    table = got.out[got.out.index("Side by side") :]
    assert table.count("round-robin") == 4
    assert table.count("small-one") == 4
    assert "no routing could beat" in table
    document = json.loads(crosstie("simulate", FLEET, *QUICK, "--load", "30", "--json").out)
    assert document["holds"] is False
    assert document["runs"][0]["unsteady"].startswith("no steady state")


@pytest.mark.slow
def test_a_trace_and_a_pool_that_dies(crosstie: Command, tmp_path: Path) -> None:
    page = tmp_path / "day.html"
    got = crosstie(
        "simulate", FLEET, "--trace", "azure-2023-conversation", "--requests", "300", "--seeds", "1", "--rate", "20",
        "--kill", "mi300x@5s+5s", "--plot", str(page),
    )  # fmt: skip
    assert "mi300x gone from 5,000 ms to 10 s: " in got.out
    assert "handed over" in got.out
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert text.rstrip().endswith("</html>")
    assert "<svg" in text


APART = """
format = 1
name = "apart"
[[pool]]
name = "r1"
model = "deepseek-r1"
accelerator = "mi355x"
prefill = { replicas = 1, tp = 8 }
decode = { replicas = 2, tp = 8 }
precision = "native"
kv = "fp8"
stack = "sglang"
usd_per_gpu_hour = 2.5
backends = ["http://proxy:8000/v1"]
[[class]]
name = "chat"
model = "deepseek-r1"
requests_per_s = 3
input_tokens = 2000
output_tokens = 300
ttft_ms = { p95 = 3000 }
tpot_ms = { p90 = 40 }
routes = [{ pool = "r1" }]
"""


def test_a_service_with_prefill_and_decode_apart(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "apart.toml"
    file.write_text(APART)
    document = json.loads(
        crosstie("simulate", str(file), "--requests", "200", "--seeds", "1", "--processes", "1", "--json").out
    )
    (run,), (bound,) = document["runs"], document["bounds"]
    (pool,), (kind,), (least,) = run["pools"], run["classes"], bound["classes"]
    assert 0.1 < pool["utilisation"] < 1.0
    assert all(0.0 <= share <= 1.0 for share in run["course"]["pools"]["r1"]["busy"])
    assert kind["ttft_s"]["at_target"] >= least["ttft_s"]
    assert kind["tpot_s"]["at_target"] >= least["tpot_s"]
    assert bound["usd_per_hour"] < run["usd_per_hour"] == 60.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["no-such-file.toml"], ["no-such-file"]),
        ([FLEET, "--policy", "guess"], ["unknown policy 'guess'; known: cheapest-meeting-target"]),
        ([FLEET, "--policy", ","], ["--policy names none"]),
        ([FLEET, "--load", "0"], ["must be above 0"]),
        ([FLEET, "--load", "much"], ["--load much: 'much' is not a number"]),
        ([FLEET, "--load", "1,1"], ["named twice"]),
        ([FLEET, "--requests", "7"], ["7 requests: at least 100"]),
        ([FLEET, "--kill", "mi300x"], ["--kill mi300x: write POOL@TIME"]),
        ([FLEET, "--kill", "mi300x@noon"], ["'noon' is no time"]),
        ([FLEET, "--kill", "a100@5"], ["--kill a100: fleet 'two-vendors' has mi300x, h200"]),
        ([FLEET, "--kill", "mi300x@300h"], ["the traffic lasts"]),
        ([FLEET, "--plot", "day.txt"], ["--plot day.txt: the name must end in .svg, .png, .pdf, .html"]),
        ([FLEET, "--class", "chat"], ["--class is for a trace"]),
        (
            [FLEET, "--trace", "azure-2023-code", "--class", "talk"],
            ["--class talk: fleet 'two-vendors' has chat, batch"],
        ),
        ([FLEET, "--trace", "azure-2023-code", "--workload", "assistant"], ["requests come from one of them"]),
        ([FLEET, "--workload", "assistant"], ["serves llama-3.3-70b", "which workload 'assistant' asks for"]),
        ([FLEET, "--fleet", FLEET], ["two fleets are called 'two-vendors'"]),
    ],
)
def test_mistakes_are_one_line(crosstie: Command, options: list[str], words: list[str]) -> None:
    got = crosstie("simulate", *options)
    assert (got.status, got.out) == (2, "")
    assert got.err.startswith("crosstie: ")
    assert got.err.count("\n") == 1
    for word in words:
        assert word in got.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"format": "crosstie plan 0", "workload": {}}', "format: is 'crosstie plan 0'; this version reads"),
        ('{"format": "crosstie plan 1", "workload": {}}', "is no saved plan"),
        ("{", "is no saved plan"),
    ],
)
def test_a_plan_that_is_none(crosstie: Command, tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(content)
    got = crosstie("simulate", str(file))
    assert got.status == 2
    assert f"{file}: {words}" in got.err


def test_times_as_people_write_them() -> None:
    assert outage("a@90") == Outage("a", 90.0)
    assert outage("a@1.5h+2m") == Outage("a", 5400.0, 120.0)
    assert outage("a@12:00+0:30:15") == Outage("a", 43200.0, 1815.0)
    assert outage("a-b@10s").pool == "a-b"
    for wrong in ("a@", "@5", "a@-5", "a@5+", "a@1:2:3:4", "a@5d"):
        with pytest.raises(BadInput, match="--kill"):
            outage(wrong)


def test_sure_steps_are_slower_and_said_to_be(crosstie: Command) -> None:
    def tpot(*more: str) -> float:
        got = json.loads(crosstie("simulate", FLEET, *QUICK, "--json", *more).out)
        assert any("80% sure" in note for note in got["notes"]) == bool(more)
        return float(got["runs"][0]["classes"][0]["tpot_s"]["mean"])

    assert tpot("--sure", "80") > 1.05 * tpot()
    refused = crosstie("simulate", FLEET, "--sure", "30")
    assert (refused.status, refused.out) == (2, "")

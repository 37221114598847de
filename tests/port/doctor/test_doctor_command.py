"""`crosstie doctor`, and `fit` and `plan` on a machine: what they print, and how they end."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from crosstie.cli.main import crosstie
from crosstie.core.errors import BadInput

DATA = Path(__file__).parent / "data"
MACHINES = Path(__file__).parents[3] / "examples" / "machines"
CARD = str(MACHINES / "rx-9070-xt")
CPX = "kfd-mi300x-cpx.json"


def run(*words: str) -> Result:
    return CliRunner().invoke(crosstie, list(words), standalone_mode=False)


def record_of(name: str, folder: Path) -> str:
    """A folder with one of the JSON files in it."""
    (folder / "facts.json").write_text("{}")
    for key, text in json.loads((DATA / name).read_text()).items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_text(text)
    return str(folder)


def test_a_recorded_machine_is_told_with_its_findings() -> None:
    done = run("doctor", "--from", CARD)
    assert done.return_value == 0
    assert "1 x AMD Radeon RX 9070 XT (rx-9070-xt, gfx1201), 17.1 GB" in done.output
    assert "rx-9070-xt  ready with settings" in done.output
    assert "remedy   Switch it off in the BIOS" in done.output
    assert "none of them on an AMD GPU" in " ".join(done.output.split())


def test_a_real_h200_is_ready() -> None:
    document = json.loads(run("doctor", "--from", str(MACHINES / "h200"), "--engine", "vllm==0.27.1", "--json").output)
    assert document["verdicts"] == {"h200": "ready"}
    assert {finding["check"] for finding in document["findings"]} == {"nofile", "host-memory"}
    document = json.loads(run("fit", "qwen3-32b", "--on", f"this:{MACHINES / 'h200'}", "--json").output)
    assert {(placed["gpus"], placed["fits"]) for placed in document["placements"]} == {(1, True)}


@pytest.mark.parametrize(("fail_on", "status"), [("error", 0), ("setting", 1), ("note", 1)])
def test_the_status_is_by_the_gravest(fail_on: str, status: int) -> None:
    assert run("doctor", "--from", CARD, "--fail-on", fail_on).return_value == status


def test_json_has_the_machine_and_the_findings() -> None:
    document = json.loads(run("doctor", "--from", CARD, "--engine", "vllm==0.26.0", "--json").output)
    assert document["verdicts"] == {"rx-9070-xt": "ready with settings"}
    assert document["engines"] == ["vllm 0.26.0"]
    assert document["machine"]["gpus"][0]["isa"] == "gfx1201"
    assert [finding["check"] for finding in document["findings"]] == ["integrated"]
    assert all(finding["rests_on"] for finding in document["findings"])


def test_this_machine_is_recorded_and_looked_at_alike(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    here = json.loads(run("doctor", "--json", "--record", str(folder)).output.partition("\n")[2])
    there = json.loads(run("doctor", "--json", "--from", str(folder)).output)
    assert here == there


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", CARD, "--record", "x"], "--from looks at a record"),
        (["--from", "/nowhere"], "no record of a machine"),
        (["--from", CARD, "--engine", "vlm"], "unknown engine 'vlm'"),
        (["--from", CARD, "--engine", ","], "--engine names no engine"),
        (["--python", "/bin/false"], "is no Python"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str) -> None:
    done = run("doctor", *words)
    assert isinstance(done.exception, BadInput)
    assert said in str(done.exception)


def test_fit_takes_the_memory_and_the_number_of_the_machine() -> None:
    document = json.loads(run("fit", "llama-3.1-8b", "--on", f"this:{CARD}", "--json").output)
    (placed,) = document["placements"]
    assert (placed["accelerator"], placed["memory_bytes"], placed["gpus"]) == ("rx-9070-xt", 16695296 * 1024, 1)
    assert not placed["fits"]


def test_fit_on_partitions_reckons_with_theirs(tmp_path: Path) -> None:
    folder = record_of(CPX, tmp_path)
    bank = "heap_type 1\nsize_in_bytes 25767706624\n"
    for node in range(2, 10):
        file = tmp_path / f"files/sys/class/kfd/kfd/topology/nodes/{node}/mem_banks/0/properties"
        file.parent.mkdir(parents=True)
        file.write_text(bank)
    document = json.loads(run("fit", "llama-3.1-8b", "--on", f"this:{folder}", "--json").output)
    assert {placed["memory_bytes"] for placed in document["placements"]} == {25767706624}
    assert max(placed["gpus"] for placed in document["placements"]) <= 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", f"this:{CARD},h200"], "this machine stands alone"),
        (["--on", f"this:{CARD}", "--tp", "2"], "TP2 takes 2 GPUs, and there are 1"),
        (["--on", "this:/nowhere"], "no record of a machine"),
    ],
)
def test_fit_refuses_what_the_machine_has_not(words: list[str], said: str) -> None:
    assert said in str(run("fit", "llama-3.1-8b", *words).exception)


WORKLOAD = """name = "desk"
[traffic]
requests_per_s = {rate}
[[class]]
name = "chat"
model = "llama-3.1-8b"
share = 1.0
input = 300
output = 60
"""


def planned(tmp_path: Path, rate: float, folder: str = CARD) -> Result:
    file = tmp_path / "desk.toml"
    file.write_text(WORKLOAD.format(rate=rate) + '[models."llama-3.1-8b"]\nprecisions = ["int4"]\n')
    return run("plan", str(file), "--on", f"this:{folder}", "--quick", "--json")


def test_plan_has_the_machine_s_gpus_and_no_others(tmp_path: Path) -> None:
    done = planned(tmp_path, 0.01)
    document = json.loads(done.output)
    assert done.return_value == 0
    assert document["workload"]["constraints"]["inventory"] == {"rx-9070-xt": 1}


@pytest.mark.slow
def test_plan_finds_no_fleet_where_the_machine_is_too_small(tmp_path: Path) -> None:
    assert planned(tmp_path, 500).return_value == 1


def test_plan_refuses_partitions(tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    folder = record_of(CPX, tmp_path / "record")
    assert "split into partitions" in str(planned(tmp_path, 0.01, folder).exception)

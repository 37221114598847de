"""`crosstie init`: files that the commands take, from options or answers; nothing is written that they would refuse."""

from pathlib import Path

import pytest
from tests.conftest import Command

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload

WORKLOAD = ("--model", "llama-3.1-8b", "--requests-per-s", "7", "--input", "900", "--output", "200", "--ttft-ms", "800")
FLEET = ("--model", "llama-3.1-8b", "--accelerator", "h200", "--backends", "http://a:1/v1,http://b:2/v1",
         "--usd-per-gpu-hour", "2.5", "--max-in-flight", "32")  # fmt: skip


def test_options_make_a_workload_that_plan_reads(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    got = crosstie("init", "workload", str(file), *WORKLOAD)
    assert (got.status, f"crosstie plan {file}" in got.out) == (0, True)
    (only,) = read_workload(Catalog(), file).classes
    assert (only.model, only.requests_per_s, only.input_tokens) == ("llama-3.1-8b", 7.0, 900.0)
    assert only.ttft is not None
    assert only.ttft.seconds == 0.8


def test_options_make_a_fleet_that_serve_reads(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    assert crosstie("init", "fleet", str(file), *FLEET).status == 0
    (pool,) = read_fleet(Catalog(), file).pools
    assert len(pool.backends) == 2


def test_answers_on_a_terminal_stand_for_options(
    crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answered(text: str, *, default: object, err: bool) -> object:
        asked.append(text)
        return default

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.prompt", answered)
    file = tmp_path / "w.toml"
    assert crosstie("init", "workload", str(file), *WORKLOAD[:2]).status == 0
    assert len(asked) == 4
    assert read_workload(Catalog(), file).classes[0].input_tokens == 1500.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("workload", *WORKLOAD[:-2]), "give --ttft-ms"),
        (("workload", "--model", "llama-3.1-8", *WORKLOAD[2:]), "class[0].model: unknown model"),
        (("workload", *WORKLOAD, "--accelerator", "h200"), "--accelerator does not go with `init workload`"),
        (("fleet", *FLEET[:3], "h2000", *FLEET[4:]), "unknown accelerator 'h2000'"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    options: tuple[str, ...], said: str, crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    got = crosstie("init", *options)
    assert (got.status, got.err.count("\n")) == (2, 1)
    assert said in got.err
    assert "/tmp" not in got.err
    assert not list(tmp_path.iterdir())


def test_what_is_there_stays(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    file.write_text("mine")
    assert "already there" in crosstie("init", "workload", str(file), *WORKLOAD).err
    assert file.read_text() == "mine"

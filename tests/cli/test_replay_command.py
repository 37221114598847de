"""`crosstie replay` as a user runs it: refusals in one line, and a replay that fails says so."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import Command
from tests.run.emulate.running import SMALL, emulated_beside, fleet, pool

from crosstie.catalog.fleet_text import fleet_text
from crosstie.core.fleet import Route, ServedClass
from crosstie.core.workload import Target

NOBODY = "http://127.0.0.1:9"
# A target that a machine which stands still for seconds holds as well: a second of the clock is 20 of the trace.
CHAT = ServedClass(
    name="chat", model=SMALL, requests_per_s=1.0, input_tokens=1000.0, output_tokens=200.0,
    ttft=Target(seconds=1000.0, percentile=0.95), tpot=None, routes=(Route(pool="one", share=1.0),),
)  # fmt: skip


@pytest.fixture(scope="module")
def replica() -> Iterator[str]:
    with emulated_beside() as made:
        yield made.fleet.pools[0].backends[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["azure-2023-conversatio", "--model", SMALL], "Did you mean azure-2023-conversation"),
        (["azure-2023-conversation"], "--model"),
        (["azure-2023-conversation", "--model", SMALL, "--url", "ftp://x"], "no http or https address"),
        (["azure-2023-conversation", "--model", SMALL, "--rate", "0"], "--rate"),
        (["azure-2023-conversation", "--model", SMALL, "--speed", "nan"], "speed"),
        (["azure-2023-conversation", "--model", SMALL, "--rate", "nan"], "--rate"),
        (["azure-2023-conversation", "--model", SMALL, "--requests", "0"], "--requests"),
        (["azure-2023-conversation", "--model", SMALL, "--start", "999999"], "none from"),
        (["azure-2023-conversation", "--model", SMALL, "--class", "a\nb"], "no header can carry"),
        (["azure-2023-conversation", "--model", SMALL, "--fleet", "none.toml"], "none.toml"),
    ],
)
def test_refusals_are_one_line(crosstie: Command, arguments: list[str], said: str) -> None:
    url = [] if "--url" in arguments else ["--url", NOBODY]
    seen = crosstie("replay", *arguments, *url)
    assert seen.status == 2
    assert said in seen.err
    assert seen.err.count("\n") == 1


def test_a_fleet_must_have_the_class_and_the_model(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(fleet(pool(), classes=(CHAT,))))
    asked = ["replay", "azure-2023-conversation", "--url", NOBODY, "--fleet", str(file)]
    assert "the fleet has chat" in crosstie(*asked, "--model", SMALL, "--class", "talk").err
    assert "no pool of the fleet serves it" in crosstie(*asked, "--model", "llama-3.3-70b").err


def test_where_nobody_answers_there_is_nothing_to_measure(crosstie: Command) -> None:
    seen = crosstie("replay", "azure-2023-conversation", "--url", NOBODY, "--model", SMALL, "--requests", "3")
    assert seen.status == 2
    assert NOBODY in seen.err
    assert seen.err.count("\n") == 1


def test_a_replay_says_what_it_measured(
    crosstie: Command, replica: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(fleet(pool(), classes=(CHAT,))))
    asked = ["--model", SMALL, "--class", "chat", "--speed", "20", "--rate", "10", "--for", "4", "--fleet", str(file)]
    seen = crosstie("replay", "azure-2023-conversation", "--url", replica, *asked, "-v")
    assert seen.status == 0, seen.err
    assert "p95 1,000 s" in seen.out
    assert "per million tokens" in seen.out
    assert not (tmp_path / "bench.json").exists()
    # The same of `bench`, which keeps its file.
    run = tmp_path / "run.json"
    said = json.loads(
        crosstie("bench", replica, "--trace", "azure-2023-conversation", *asked, "-o", str(run), "--json").out
    )
    assert said == json.loads(run.read_text())
    assert said["targets"]["by_class"]["chat"]["ttft"]["seconds"] == 1000.0
    (point,) = said["endpoints"][0]["points"]
    assert (point["requests"], point["failed"], point["kept"], point["holds"]) == (40, 0, 1.0, True)
    (chat,) = point["classes"]
    assert (chat["seen"]["name"], chat["ttft_kept"]) == ("chat", 1.0)
    # An engine keeps no accounts.
    assert point["attributed_usd_per_million_tokens"] is None
    assert point["fleet_usd_per_million_tokens_within_target"] > 0
    # The file of a run that was whole is gone on with: nothing is measured again.
    again = ["--trace", "azure-2023-conversation", *asked, "-o", str(run), "--resume", "--json"]
    assert json.loads(crosstie("bench", replica, *again).out)["endpoints"][0]["points"][0] == point


def test_a_limit_is_of_one_target(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(fleet(pool(), classes=(CHAT,))))
    seen = crosstie("bench", NOBODY, "--find-limit", "--ttft-ms", "100", "--fleet", str(file))
    assert (seen.status, "leave --fleet out" in seen.err) == (2, True)

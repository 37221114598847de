"""`crosstie keys` and `crosstie usage` as people type them."""

import csv
import io
import json
import re
from pathlib import Path
from time import time

import pytest
from tests.conftest import Command
from tests.run.ledger.test_store import at, batch, line, one

from crosstie.core.usage import hour_of
from crosstie_gateway.ledger.keys import digest
from crosstie_gateway.ledger.places import open_store
from crosstie_gateway.ledger.usage import UsageCounts

TOKEN = re.compile(r"ct-([0-9a-f]{12})-([A-Za-z0-9]{43})")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "crosstie.db"
    monkeypatch.setenv("CROSSTIE_STORE", str(file))
    return file


def test_a_key_is_shown_once_and_alone(crosstie: Command, store: Path) -> None:
    made = crosstie("keys", "create", "alice")
    assert made.status == 0
    found = TOKEN.fullmatch(made.out.strip())
    assert found
    assert "shown this once" in made.err
    secret = found[2]
    said = "".join(
        shown.out + shown.err
        for shown in (
            crosstie("keys", "list"), crosstie("keys", "list", "--json"), crosstie("keys", "show", "alice"),
            crosstie("keys", "show", found[1], "--json"), crosstie("keys", "update", "alice", "--rpm", "3", "--json"),
            crosstie("usage"), crosstie("keys", "revoke", "alice", "--json"), crosstie("keys", "list", "--all"),
        )
    )  # fmt: skip
    assert "alice" in said
    assert secret not in said
    assert digest(secret) not in said
    assert secret.encode() not in store.read_bytes()


def test_everything_that_a_key_can_be_given(crosstie: Command, store: Path) -> None:
    made = json.loads(
        crosstie(
            "keys", "create", "alice", "--model", "m1", "--model", "m2", "--model", "m1", "--class", "chat", "--priority", "high",
            "--rpm", "5", "--tpm", "1000", "--usd-per-day", "0.001", "--usd-per-month", "20", "--expires", "2099-12-31", "--json",
        ).out
    )  # fmt: skip
    assert TOKEN.fullmatch(made.pop("secret"))
    shown = json.loads(crosstie("keys", "show", "alice", "--json").out)
    assert {**made, "usd_today": 0.0, "usd_this_month": 0.0} == shown
    assert (shown["models"], shown["classes"], shown["priority"]) == (["m1", "m2"], ["chat"], "high")
    assert [shown[one] for one in ("rpm", "tpm", "usd_per_day", "usd_per_month")] == [5, 1000, 0.001, 20]
    assert shown["number"] == 1
    assert shown["expires"] == "2099-12-31T00:00:00Z"
    changed = json.loads(
        crosstie(
            "keys", "update", "alice", "--no-limit", "rpm", "--no-limit", "expires", "--any-model", "--class", "batch",
            "--usd-per-day", "3", "--priority", "low", "--json",
        ).out
    )  # fmt: skip
    assert (changed["rpm"], changed["expires"], changed["models"], changed["classes"]) == (None, None, [], ["batch"])
    assert (changed["usd_per_day"], changed["tpm"], changed["priority"]) == (3, 1000, "low")
    listed = crosstie("keys", "list").out
    assert "$0.00 of $3.00" in listed
    assert "batch" in listed


def test_revoked_keys_stay_in_the_books(crosstie: Command, store: Path) -> None:
    crosstie("keys", "create", "alice")
    assert crosstie("keys", "revoke", "alice").status == 0
    first = json.loads(crosstie("keys", "show", "alice", "--json").out)["revoked"]
    assert crosstie("keys", "revoke", "alice").status == 0
    assert json.loads(crosstie("keys", "show", "alice", "--json").out)["revoked"] == first
    assert json.loads(crosstie("keys", "list", "--json").out) == []
    assert [one["state"] for one in json.loads(crosstie("keys", "list", "--all", "--json").out)] == ["revoked"]
    for refused in (crosstie("keys", "rotate", "alice"), crosstie("keys", "update", "alice", "--rpm", "1")):
        assert refused.status == 2
        assert "was revoked" in refused.err
        assert refused.out == ""
    assert "'alice' already" in crosstie("keys", "create", "alice").err


def test_a_rotation_with_and_without_grace(crosstie: Command, store: Path) -> None:
    first = crosstie("keys", "create", "alice").out.strip()
    second = crosstie("keys", "rotate", "alice", "--grace", "1h")
    assert "the old one is good until" in second.err
    (key,) = open_store(str(store)).all_keys()
    assert key.digest == digest(second.out.strip().rpartition("-")[2])
    assert key.old_digest == digest(first.rpartition("-")[2])
    assert 3500 < (key.old_until or 0) - time() <= 3600
    assert second.out.rpartition("-")[0] == first.rpartition("-")[0]
    crosstie("keys", "rotate", "alice")
    (key,) = open_store(str(store)).all_keys()
    assert (key.old_digest, key.old_until) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["keys", "create", "two words"], "name: 'two words'"),
        (["keys", "create", "a", "--rpm", "0"], "rpm: 0"),
        (["keys", "create", "a", "--rpm", "many"], "--rpm"),
        (["keys", "create", "a", "--usd-per-day", "-1"], "usd-per-day: -1"),
        (["keys", "create", "a", "--usd-per-day", "nan"], "usd-per-day: nan"),
        (["keys", "create", "a", "--priority", "urgent"], "--priority"),
        (["keys", "create", "a", "--expires", "tomorrow"], "--expires: 'tomorrow'"),
        (["keys", "create", "a", "--expires", "2026-02-30"], "--expires: '2026-02-30'"),
        (["keys", "create", "a", "--expires", "2020-01-01"], "--expires: is over already"),
        (["keys", "create", "a", "--expires", "99999999d"], "--expires: '99999999d' is more than a thousand years"),
        (["keys", "create", "a\n"], "name: 'a\\n'"),
        (["keys", "create", "a", "--model", ""], "model: "),
        (["keys", "create", "a", "--store", "x.db", "--fleet", "y.toml"], "--store and --fleet"),
        (["keys", "create", "a", "--fleet", "no-such.toml"], "no-such.toml"),
        (["keys", "update", "alice"], "nothing to change"),
        (["keys", "update", "alice", "--rpm", "3", "--no-limit", "rpm"], "contradict"),
        (["keys", "update", "alice", "--model", "m", "--any-model"], "--any-model"),
        (["keys", "update", "alice", "--class", "m", "--any-class"], "--any-class"),
        (["keys", "update", "alicia", "--rpm", "3"], "Did you mean alice"),
        (["keys", "rotate", "alice", "--grace", "soon"], "--grace: 'soon'"),
        (["keys", "rotate", "alice", "--grace", "1" * 400 + "h"], "more than a thousand years"),
        (["keys", "show", "nobody"], "no key 'nobody'"),
        (["usage", "--by", "colour"], "--by: 'colour'"),
        (["usage", "--key", "nobody"], "no key 'nobody'"),
        (["usage", "--since", "yesterday"], "--since: 'yesterday'"),
        (["usage", "--until", "soon"], "--until: 'soon'"),
        (["usage", "--csv", "--json"], "--csv and --json"),
        (["usage", "--store", "/no/such/file.db"], "there is no store"),
        (["usage", "--store", "mysql://me:hunter2@x/y"], "neither a file"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(crosstie: Command, store: Path, arguments: list[str], said: str) -> None:
    crosstie("keys", "create", "alice")
    refused = crosstie(*arguments)
    assert refused.status == 2
    assert refused.out == ""
    assert refused.err.count("\n") == 1
    assert said in refused.err
    assert "hunter2" not in refused.err


def test_without_any_store_one_is_told_how_to_name_it(crosstie: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CROSSTIE_STORE", raising=False)
    assert "--store crosstie.db, --fleet fleet.toml or $CROSSTIE_STORE" in crosstie("keys", "list").err


def test_the_store_of_a_fleet_file(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(crosstie("serve", "--example").out)
    assert "state.store: missing" in crosstie("keys", "list", "--fleet", str(file)).err
    file.write_text(file.read_text() + '\n[state]\nstore = "here.db"\n')
    assert crosstie("keys", "create", "alice", "--fleet", str(file)).status == 0
    assert (tmp_path / "here.db").exists()
    odd = crosstie(
        "keys",
        "create",
        "bob",
        "--fleet",
        str(file),
        "--model",
        "llama-3.1-8",
        "--model",
        "llama-3.1-8b",
        "--class",
        "chit-chat",
    )
    assert TOKEN.fullmatch(odd.out.strip())
    assert "has no model 'llama-3.1-8' now. Did you mean llama-3.1-8b?" in odd.err
    assert "has no class 'chit-chat' now" in odd.err
    assert odd.err.count("has no") == 2
    assert "alice" in crosstie("keys", "list", "--fleet", str(file)).out


def test_usage_by_key_model_and_day(crosstie: Command, store: Path) -> None:
    crosstie("keys", "create", "alice", "--usd-per-month", "1000")
    crosstie("keys", "create", "bob")
    with_store = open_store(str(store))
    now = hour_of(time())
    with_store.write(
        batch(
            1,
            (line(at("2025-10-31T23:00")), one(1e-9)),
            (line(at("2025-11-15T12:00")), one(2.0)),
            (line(at("2025-11-15T13:00"), key_id=2, pool="nvidia"), one(4.0)),
            (
                line(at("2025-11-16T00:00"), key_id=0, outcome="refused", code="missing_api_key"),
                UsageCounts(requests=9),
            ),
            (line(now), one(250.0)),
        )
    )
    with_store.close()
    shown = crosstie("usage").out
    assert "no key" in shown
    assert "% of $1,000 this month" in shown
    assert "█" in shown
    # What is little is not nothing.
    assert "$0.000000001" in crosstie("usage", "--until", "2025-10-31").out

    said = json.loads(
        crosstie(
            "usage", "--by", "key,pool", "--by", "day", "--since", "2025-11-15", "--until", "2025-11-15", "--json"
        ).out
    )
    assert said["by"] == ["key", "pool", "day"]
    assert [(row["key"], row["pool"], row["day"], row["usd"]) for row in said["rows"]] == [
        ("alice", "amd", "2025-11-15", 2.0), ("bob", "nvidia", "2025-11-15", 4.0),
    ]  # fmt: skip
    assert (said["total"]["requests"], said["total"]["usd"]) == (2, 6.0)
    hours = json.loads(
        crosstie("usage", "--by", "hour", "--since", "2025-11-15T13:00", "--until", "2025-11-15T13:30Z", "--json").out
    )
    assert [row["hour"] for row in hours["rows"]] == ["2025-11-15T13"]
    recent = json.loads(crosstie("usage", "--since", "2h", "--key", "alice", "--json").out)
    assert recent["total"]["usd"] == 250.0

    table = list(csv.DictReader(io.StringIO(crosstie("usage", "--by", "day", "--csv").out)))
    assert float(table[0]["usd"]) == 1e-9
    assert {row["day"]: row["refused"] for row in table}["2025-11-16"] == "9"


def test_names_that_a_spreadsheet_would_compute(crosstie: Command, store: Path) -> None:
    crosstie("keys", "create", "alice")
    at_store = open_store(str(store))
    at_store.write(batch(1, ((at("2026-11-15T12:00"), 1, "=1+1", "@x", "-p", "served", ""), one())))
    at_store.close()
    row = next(csv.DictReader(io.StringIO(crosstie("usage", "--by", "model,class,pool", "--csv").out)))
    assert (row["model"], row["class"], row["pool"]) == ("'=1+1", "'@x", "'-p")


def test_the_end_of_the_calendar(crosstie: Command, store: Path) -> None:
    assert crosstie("keys", "create", "alice", "--expires", "9999-12-31").status == 0
    assert "9999-12-31" in crosstie("keys", "list").out
    assert crosstie("usage", "--until", "9999-12-31").status == 0


def test_nothing_used_yet(crosstie: Command, store: Path) -> None:
    crosstie("keys", "create", "alice")
    assert crosstie("usage").out.strip() == "nothing was used"
    assert json.loads(crosstie("usage", "--json").out)["rows"] == []
    assert crosstie("usage", "--csv").out.count("\n") == 1


def test_teams_as_people_type_them(crosstie: Command, store: Path) -> None:
    assert "was made" in crosstie("keys", "team", "research", "--usd-per-month", "5", "--rpm", "9").out
    assert "was changed" in crosstie("keys", "team", "research", "--no-limit", "rpm").out
    assert crosstie("keys", "create", "alice", "--team", "research").status == 0
    assert json.loads(crosstie("keys", "show", "alice", "--json").out)["team"] == 1
    (team,) = json.loads(crosstie("keys", "teams", "--json").out)
    assert (team["name"], team["keys"], team["rpm"], team["usd_per_month"]) == ("research", ["alice"], None, 5.0)
    shown = crosstie("keys", "teams").out
    assert "research" in shown
    assert "$0.00 of $5.00" in shown
    wrong = crosstie("keys", "create", "bob", "--team", "reserch")
    assert wrong.status == 2
    assert "there is no team 'reserch'. Did you mean research?" in wrong.err
    assert crosstie("keys", "update", "alice", "--team", "research", "--no-team").status == 2
    assert crosstie("keys", "team", "research", "--rpm", "5", "--no-limit", "rpm").status == 2
    assert crosstie("keys", "team", "research", "--usd-per-day", "-1").status == 2
    assert crosstie("keys", "update", "alice", "--no-team").status == 0
    assert json.loads(crosstie("keys", "teams", "--json").out)[0]["keys"] == []
    assert crosstie("usage", "--by", "team").status == 0

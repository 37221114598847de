"""Signals beside a saved plan: those that changed are named, those that did not are counted."""

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from tests.conftest import Command

from crosstie.catalog.library import Catalog
from crosstie.catalog.signals import read_signals
from crosstie.core.errors import BadData
from crosstie.port.preflight.engine import engines
from crosstie.port.preflight.rules import rules

HEAD = "accelerator,provider,kind,value,unit,basis,date,source,note\n"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The folder that the `crosstie` fixture has as the user's catalog."""
    folder = tmp_path / "user-catalog"
    folder.mkdir()
    return folder


def watch(crosstie: Command, tmp_path: Path, document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document))
    (one,) = json.loads(crosstie("plan", "--watch", str(file), "--json").out)
    return {sign["id"]: sign for sign in one["signals"]}


def signal(mine: Path, **keys: object) -> None:
    row = {"id": "mine", "what": "x", "changes": "what I buy", "how": "by looking", "source": "me", **keys}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in row.items())
    (mine / "signals.toml").write_text(f'[sources]\nme = {{ ref = "me", date = "2026-11-16" }}\n[[signal]]\n{lines}\n')


def test_only_what_concerns_a_plan_is_watched(crosstie: Command, tmp_path: Path, document: dict[str, Any]) -> None:
    found = watch(crosstie, tmp_path, document)
    # It weighs MI300X and H200 under the engine of its pool.
    assert found["price-mi300x"]["state"] == found["price-h200"]["state"] == "quiet"
    assert "price-b200" not in found
    (pool,) = document["fleet"]["pools"]
    assert f"release-{pool['stack']}" in found
    assert found["next-amd"]["state"] == "by hand"
    assert all(one["source"] and one["date"] for one in found.values())


@pytest.mark.slow
def test_what_is_unchanged_is_counted(crosstie: Command, tmp_path: Path, document: dict[str, Any]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document))
    got = crosstie("plan", "--watch", str(file))
    assert "watched and unchanged: " in got.out
    assert "signal " not in got.out.replace("signals", "")


def test_a_price_that_moved_or_appeared_is_a_change(
    crosstie: Command, tmp_path: Path, document: dict[str, Any], mine: Path
) -> None:
    (mine / "prices.csv").write_text(f"{HEAD}mi300x,mine,on-demand,2.0,USD/h,claimed,2026-11-10,my contract,\n")
    before = {**document, "prices": {name: one for name, one in document["prices"].items() if name != "h200"}}
    found = watch(crosstie, tmp_path, before)
    assert found["price-mi300x"]["state"] == "changed"
    assert "then, $2.00 now" in found["price-mi300x"]["now"]
    assert found["price-h200"]["now"].startswith("h200: no price then, $")


@pytest.mark.slow
def test_a_newer_release_is_a_change(crosstie: Command, tmp_path: Path, document: dict[str, Any]) -> None:
    old = json.loads(json.dumps(document))
    (pool,) = old["fleet"]["pools"]
    pool["release"] = "0.1.0"
    found = watch(crosstie, tmp_path, old)[f"release-{pool['stack']}"]
    assert found["state"] == "changed"
    assert found["now"].endswith("has been read, the plan has 0.1.0")
    got = crosstie("plan", "--watch", str(tmp_path / "plan.json"))
    assert f"signal release-{pool['stack']}: " in got.out


@pytest.mark.slow
def test_a_kernel_gap_is_open_until_its_row_speaks_of_the_newest_no_more(
    crosstie: Command, tmp_path: Path, document: dict[str, Any], mine: Path
) -> None:
    (pool,) = document["fleet"]["pools"]
    engine = next(name for name, one in engines().items() if one.stack == pool["stack"])
    newest = engines()[engine].newest
    ended = next(one for one in rules(engine) if not SpecifierSet(one.versions).contains(newest))
    signal(mine, kind="kernel", engine=engine, rule=ended.id)
    assert watch(crosstie, tmp_path, document)["mine"]["state"] == "changed"
    lasting = next(one for one in rules(engine) if SpecifierSet(one.versions).contains(newest))
    signal(mine, kind="kernel", engine=engine, rule=lasting.id)
    found = watch(crosstie, tmp_path, document)["mine"]
    assert (found["state"], found["now"].startswith(f"open in {engine} {newest}: ")) == ("quiet", True)


def test_every_shipped_signal_speaks_of_something_there_is() -> None:
    """A row of preflight that is gone would look like a gap that is closed."""
    shipped = Catalog([])
    assert {one.kind for one in shipped.signals.values()} == {"price", "release", "kernel", "by-hand"}
    for one in shipped.signals.values():
        assert set(one.accelerators) <= set(shipped.accelerators), one.id
        if one.engine:
            assert one.engine in engines(), one.id
        if one.rule:
            assert one.rule in {row.id for row in rules(one.engine)}, one.id


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"kind": "rumour"}, "'rumour' is not one of price, release, kernel, by-hand"),
        ({"kind": "kernel", "engine": "vllm"}, "rule: missing: a signal of kind kernel is looked at by it"),
        ({"kind": "price"}, "accelerators: missing"),
        ({"kind": "by-hand", "source": "nobody"}, "'nobody' is not in"),
        ({"kind": "by-hand", "when": "soon"}, "unknown key"),
    ],
)
def test_a_slip_in_a_row_is_named(mine: Path, keys: dict[str, object], words: str) -> None:
    signal(mine, **keys)
    with pytest.raises(BadData, match=words):
        read_signals(mine / "signals.toml")


def test_an_engine_that_nobody_knows_is_one_line(
    crosstie: Command, tmp_path: Path, document: dict[str, Any], mine: Path
) -> None:
    signal(mine, kind="release", engine="warp")
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(document))
    got = crosstie("plan", "--watch", str(file))
    assert got.status == 2
    assert "signal mine: unknown engine 'warp'" in got.err
    assert got.err.count("\n") == 1

"""Saved plans against a catalog that has moved on: which have flipped, and by what."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command
from tests.small_workload import Change, constrained, small

from crosstie.catalog.library import SHIPPED

HEAD = "accelerator,provider,kind,value,unit,basis,date,source,note\n"


@pytest.fixture
def saved(crosstie: Command, tmp_path: Path) -> Callable[..., Path]:
    def save(*changes: Change, name: str = "plan.json", options: tuple[str, ...] = ("--quick",)) -> Path:
        file = tmp_path / name
        crosstie("plan", str(small(tmp_path, *changes)), "--save", str(file), *options)
        assert file.exists()
        return file

    return save


@pytest.fixture
def user_catalog(tmp_path: Path) -> Path:
    """The folder that the `crosstie` fixture has as the user's catalog."""
    folder = tmp_path / "user-catalog"
    folder.mkdir(exist_ok=True)
    return folder


def priced(folder: Path, usd: float, date: str, accelerator: str = "mi300x") -> None:
    """The user's own price, which takes the place of the shipped ones of its kind."""
    (folder / "prices.csv").write_text(f"{HEAD}{accelerator},mine,on-demand,{usd},USD/h,claimed,{date},my contract,\n")


def written(folder: Path, document: dict[str, Any], **changes: object) -> Path:
    file = folder / "plan.json"
    file.write_text(json.dumps({**document, **changes}))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--quick",), ()], ids=["quick", "confirmed"])
def test_a_plan_holds_while_nothing_changes(
    crosstie: Command, saved: Callable[..., Path], options: tuple[str, ...]
) -> None:
    file = saved(options=options)
    assert (json.loads(file.read_text())["confirmed"] is None) == bool(options)
    got = crosstie("plan", "--watch", str(file))
    assert got.status == 0
    assert f"small  {file}" in got.out
    assert ": holds" in got.out
    assert "1 mi300x" in got.out
    (one,) = json.loads(crosstie("plan", "--watch", str(file), "--json").out)
    assert (one["flipped"], one["because"], one["prices"], one["recalibrated"]) == (False, "", [], False)
    assert one["then"] == one["now"]


@pytest.mark.slow
def test_prices_flip_it_and_are_said_to(
    crosstie: Command, tmp_path: Path, document: dict[str, Any], user_catalog: Path
) -> None:
    file = written(tmp_path, document, made="2026-11-01")
    priced(user_catalog, 9.0, "2026-11-10")
    got = crosstie("plan", "--watch", str(file))
    assert got.status == 1
    assert "FLIPPED by prices" in got.out
    assert "mi300x: $2.59 then, $9.00 now (+247%), of 2026-11-10: the plan is older than this price" in got.out


@pytest.mark.slow
def test_in_json_too(crosstie: Command, tmp_path: Path, document: dict[str, Any], user_catalog: Path) -> None:
    file = written(tmp_path, document, made="2026-11-01")
    priced(user_catalog, 9.0, "2026-11-10")
    answer = crosstie("plan", "--watch", str(file), "--json")
    assert answer.status == 1
    (one,) = json.loads(answer.out)
    assert (one["flipped"], one["because"]) == (True, "prices")
    assert (list(one["then"]["gpus"]), list(one["now"]["gpus"])) == (["mi300x"], ["h200"])
    assert [(move["accelerator"], move["dated"], move["newer_than_plan"]) for move in one["prices"]] == [
        ("mi300x", "2026-11-10", True)
    ]


@pytest.mark.parametrize(
    ("price", "made", "newer"),
    [
        pytest.param("2026-11-10", "2026-11-09", True, marks=pytest.mark.slow),
        pytest.param("2026-11-10", "2026-11-10", False, marks=pytest.mark.slow),
        pytest.param("2026-11-10", "2026-12-01", False, marks=pytest.mark.slow),
        pytest.param("2026-11", "2026-10-31", True, marks=pytest.mark.slow),
        # Of some day of the month in which the plan was made: not known to be newer.
        ("2026-11", "2026-11-01", False),
    ],
)
def test_which_prices_are_newer(
    crosstie: Command, tmp_path: Path, document: dict[str, Any], user_catalog: Path, price: str, made: str, newer: bool
) -> None:
    file = written(tmp_path, document, made=made)
    priced(user_catalog, 1.5, price)
    got = crosstie("plan", "--watch", str(file), "--json")
    assert got.status == 0
    (one,) = json.loads(got.out)
    assert [move["newer_than_plan"] for move in one["prices"]] == [newer]


@pytest.mark.slow
def test_a_price_that_lets_a_fleet_exist(crosstie: Command, saved: Callable[..., Path], user_catalog: Path) -> None:
    """No fleet then and one now is a flip, too, and by the price."""
    file = saved(constrained("budget_usd_per_month = 500"))
    assert json.loads(file.read_text())["fleet"] is None
    priced(user_catalog, 0.5, "2026-11-10")
    got = crosstie("plan", "--watch", str(file))
    assert got.status == 1
    assert "FLIPPED by prices" in got.out
    assert "then no fleet; now 1 mi300x, $0.50 an hour" in got.out


def calibration(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((SHIPPED / "calibration.json").read_text())
    change(document)
    (folder / "calibration.json").write_text(json.dumps(document))


def slower(document: dict[str, Any]) -> None:
    """All that was learnt of the MI300X makes it slow: a hundredth of every rate, and ten times every overhead."""
    rates = ("compute", "experts", "weights", "attention", "cache", "link")
    document["scopes"]["mi300x"] = [-4.6 if name in rates else 2.3 for name in document["constants"]]


def test_another_calibration_is_reported(
    crosstie: Command, tmp_path: Path, document: dict[str, Any], user_catalog: Path
) -> None:
    file = written(tmp_path, document)

    def a_little(document: dict[str, Any]) -> None:
        scope = next(iter(document["scopes"]))
        document["scopes"][scope][0] += 0.001

    calibration(user_catalog, a_little)
    got = crosstie("plan", "--watch", str(file))
    assert got.status == 0
    assert ": holds" in got.out
    assert "1 mi300x" in got.out
    assert "the calibration is another than it was" in got.out


@pytest.mark.slow
def test_the_same_calibration_of_another_day_is_the_same(
    crosstie: Command, tmp_path: Path, document: dict[str, Any], user_catalog: Path
) -> None:
    file = written(tmp_path, document)
    calibration(user_catalog, lambda document: document["made"].update(date="2027-01-01"))
    assert "the calibration is another" not in crosstie("plan", "--watch", str(file)).out


@pytest.mark.slow
def test_a_calibration_may_flip_it(crosstie: Command, saved: Callable[..., Path], user_catalog: Path) -> None:
    file = saved(("requests_per_s = 5\n", "requests_per_s = 500\n"))
    calibration(user_catalog, slower)
    got = crosstie("plan", "--watch", str(file), "--json")
    (one,) = json.loads(got.out)
    assert got.status == 1
    assert (one["because"], one["recalibrated"]) == ("the catalog or its calibration", True)
    # And together with a price that alone would have left it as it was.
    priced(user_catalog, 1.31, "2026-11-10")
    (both,) = json.loads(crosstie("plan", "--watch", str(file), "--json").out)
    assert both["because"] == "the catalog or its calibration"
    assert both["prices"]


@pytest.mark.slow
def test_folders_of_plans(
    crosstie: Command, saved: Callable[..., Path], document: dict[str, Any], user_catalog: Path, tmp_path: Path
) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "a.json").write_text(json.dumps(document))
    saved(
        ('name = "small"', 'name = "given"'),
        ("[constraints]", "[prices]\nusd_per_gpu_hour = { mi300x = 1.3 }\n[constraints]"),
        name="plans/b.json",
    )
    (tmp_path / "plans" / "notes.txt").write_text("not a plan")
    priced(user_catalog, 9.0, "2026-11-10")
    got = crosstie("plan", "--watch", str(tmp_path / "plans"))
    assert got.status == 1
    # A price of the user's own does not move.
    assert [line.split()[0] for line in got.out.splitlines() if "made" in line] == ["small", "given"]
    assert got.out.count("FLIPPED") == 1
    assert got.out.count(": holds") == 1


def test_what_cannot_be_watched(crosstie: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        ((), "--watch needs saved plans"),
        ((str(tmp_path / "empty"),), "no saved plan (*.json) in this folder"),
        ((str(tmp_path / "none.json"),), "none.json: cannot be read: No such file"),
        ((str(small(tmp_path)),), "small.toml: is no saved plan"),
    ):
        got = crosstie("plan", "--watch", *arguments)
        assert got.status == 2
        assert words in got.err
        assert got.err.count("\n") == 1


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda document: {name: value for name, value in document.items() if name != key}


def _within(**changes: object) -> Callable[[dict[str, Any]], Any]:
    return lambda document: {**document, "workload": {**document["workload"], **changes}}


def _first_class(**changes: object) -> Callable[[dict[str, Any]], Any]:
    return lambda document: _within(classes=[{**document["workload"]["classes"][0], **changes}])(document)


SPOILT: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "not an object": (lambda _: [], "Expected `object`"),
    "no format": (_without("format"), "`format`"),
    "another format": (lambda _: {"format": "crosstie plan 9", "new": 1}, "this version reads 'crosstie plan 1'"),
    "no workload": (_without("workload"), "`workload`"),
    "no day": (lambda document: {**document, "made": "yesterday"}, "made: 'yesterday' is not a date"),
    "a price without money": (lambda document: {**document, "prices": {"mi300x": {}}}, "`usd`"),
    "a price of nothing": (lambda document: {**document, "prices": {"mi300x": {"usd": 0}}}, "`$.prices[...].usd`"),
    "GPUs by the word": (lambda document: {**document, "fleet": {"gpus": {"h200": "few"}, "usd_per_hour": 1}}, "`$.fleet.gpus[...]`"),
    "a fleet without GPUs": (lambda document: {**document, "fleet": {}}, "`gpus`"),
    "no classes": (_within(classes=[]), "`$.workload.classes`"),
    "no slices": (_first_class(slices=[]), "slices"),
    "no requests": (_first_class(requests_per_s=0), "requests_per_s"),
    "an unknown model": (_first_class(model="llama-9"), "cannot be planned again: unknown model"),
    "an unknown accelerator": (_within(constraints={"accelerators": ["mi999"]}), "cannot be planned again: unknown accelerator"),
    "unknown prices": (_within(prices={"kinds": ["barter"]}), "prices.kind: 'barter' is not one of"),
    "no share": (_within(mean_over_peak=0), "mean_over_peak"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), SPOILT.values(), ids=SPOILT.keys())
def test_plans_that_were_tampered_with(
    crosstie: Command, tmp_path: Path, document: dict[str, Any], change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(change(document)))
    got = crosstie("plan", "--watch", str(file))
    assert got.status == 2
    assert got.err.startswith(f"crosstie: {file}: ")
    assert words in got.err
    assert got.err.count("\n") == 1


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b'{"format": "\\ud800"}'], ids=["empty", "cut off", "binary", "half a sign"]
)
def test_files_that_are_no_json(crosstie: Command, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    got = crosstie("plan", "--watch", str(file))
    assert got.status == 2
    assert got.err.startswith(f"crosstie: {file}: is no saved plan")


@pytest.mark.parametrize(
    "option",
    [("--save", "x.json"), ("--fleet", "x.toml"), ("--price", "mi300x=2"), ("--on", "h200"), ("--quick",)],
    ids=lambda option: option[0],
)
def test_options_that_a_saved_plan_has_no_use_for(
    crosstie: Command, tmp_path: Path, document: dict[str, Any], option: tuple[str, ...]
) -> None:
    file = written(tmp_path, document)
    got = crosstie("plan", "--watch", str(file), *option)
    assert got.status == 2
    assert f"{option[0]} cannot go with it" in got.err

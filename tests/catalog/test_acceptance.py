"""Acceptance by model, method and text: what is there, what is assumed where nothing is, and what a slip is told."""

import json
from pathlib import Path

import pytest
from tests.conftest import Command

from crosstie.catalog.acceptance import parse_speculation
from crosstie.catalog.library import Catalog, check_file
from crosstie.core.errors import BadData, BadInput, CrosstieError, UnknownName
from crosstie.core.speculation import TEXTS

COLUMNS = "model,method,text,lengths,low,high,basis,date,source,note"


def written(tmp_path: Path, row: str) -> Path:
    file = tmp_path / "acceptance.csv"
    file.write_text(f"{COLUMNS}\n{row}\n")
    return file


def test_every_shipped_curve_is_one_that_drafts_can_have(catalog: Catalog) -> None:
    assert len(catalog.acceptance_curves) > 20
    for curve in catalog.acceptance_curves:
        for depth in (1, 3, 8):
            assert all(0.0 <= share <= 1.0 for share in curve.by_position(depth))


def test_a_measured_curve_comes_back_at_every_depth(catalog: Catalog) -> None:
    model = catalog.model("deepseek-v4-pro")
    for depth, length in ((1, 1.79), (2, 2.27), (3, 2.49), (4, 2.54)):
        found = catalog.speculation(model, f"mtp:{depth}", text="coding")
        assert found.acceptance_length == pytest.approx(length)
        assert found.basis == "measured"
        assert found.range[0] < length < found.range[1]


def test_one_length_takes_its_decline_from_the_same_models_curve(catalog: Catalog) -> None:
    """2.39 at three drafts on random prompts: position by position below the curve on coding."""
    model = catalog.model("deepseek-v4-pro")
    random, coding = (catalog.speculation(model, "mtp:3", text=text) for text in ("random", "coding"))
    assert random.acceptance_length == pytest.approx(2.39)
    assert all(a < b for a, b in zip(random.acceptance, coding.acceptance, strict=True))
    assert random.acceptance[0] > random.acceptance[2]


def test_a_text_that_was_not_measured_is_less_sure(catalog: Catalog) -> None:
    model = catalog.model("kimi-k2.5")
    coding, chat = (catalog.speculation(model, "eagle3:3", text=text) for text in ("coding", "chat"))
    assert chat.basis == "derived"
    assert "measured on coding" in chat.source
    assert chat.range[0] < coding.range[0] < coding.range[1] < chat.range[1]


def test_a_model_that_nobody_measured_is_assumed_with_a_wide_range(catalog: Catalog) -> None:
    found = catalog.speculation(catalog.model("llama-3.1-8b"), "eagle3:3")
    assert found.basis == "assumed"
    low, high = found.range
    assert low - 1 < 0.5 * (found.acceptance_length - 1) < 0.5 * (high - 1)


def test_a_length_of_ones_own_is_taken_as_it_is(catalog: Catalog) -> None:
    found = catalog.speculation(catalog.model("deepseek-r1"), "mtp:3", length=3.1)
    assert found.acceptance_length == pytest.approx(3.1, abs=1e-6)
    assert found.acceptance[0] > found.acceptance[2]
    assert found.range == pytest.approx((3.1, 3.1))


@pytest.mark.parametrize("length", [0.9, 4.2, -1.0])
def test_a_length_that_drafts_cannot_give_is_refused(catalog: Catalog, length: float) -> None:
    with pytest.raises(BadInput, match="3 drafts give 1 to 4"):
        catalog.speculation(catalog.model("deepseek-r1"), "mtp:3", length=length)


def test_a_users_rows_come_first(tmp_path: Path) -> None:
    written(tmp_path, "deepseek-r1,mtp,chat,1:1.5,0.9,1.1,measured,2026-11-01,our own logs,")
    catalog = Catalog([tmp_path])
    assert catalog.speculation(catalog.model("deepseek-r1"), "mtp:1").acceptance_length == pytest.approx(1.5)
    assert check_file(tmp_path / "acceptance.csv") == "acceptance"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("mtp", "METHOD:DEPTH"),
        ("mtp:0", "METHOD:DEPTH"),
        ("mtp:x", "METHOD:DEPTH"),
        ("mtp:99", "1 to 32"),
        ("medusa:3", "must be one of mtp"),
        ("draft:3", "draft:DEPTH:MODEL"),
        ("mtp:3:llama-3.1-8b", "only draft takes a model"),
        ("draft:3:nobody", "nobody"),
    ],
)
def test_what_is_asked_for_must_make_sense(catalog: Catalog, asked: str, says: str) -> None:
    with pytest.raises(CrosstieError, match=says):
        catalog.speculation(catalog.model("deepseek-r1"), asked)


def test_unknown_texts_are_refused(catalog: Catalog) -> None:
    with pytest.raises(UnknownName, match="poetry"):
        catalog.speculation(catalog.model("deepseek-r1"), "mtp:3", text="poetry")
    assert "random" in TEXTS
    assert parse_speculation(" MTP:3 ") == ("mtp", 3, "")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("nobody,mtp,chat,1:1.8,0.9,1.1,measured,2026-11-01,x,", "model 'nobody' is not in the catalog"),
        ("deepseek-r1,magic,chat,1:1.8,0.9,1.1,measured,2026-11-01,x,", "method 'magic' is not one of"),
        ("deepseek-r1,mtp,verse,1:1.8,0.9,1.1,measured,2026-11-01,x,", "text 'verse' is not one of"),
        ("deepseek-r1,mtp,chat,1:2.8,0.9,1.1,measured,2026-11-01,x,", "1 drafts give 1 to 2 tokens"),
        ("deepseek-r1,mtp,chat,1.8,0.9,1.1,measured,2026-11-01,x,", "DEPTH:LENGTH"),
        ("deepseek-r1,mtp,chat,,0.9,1.1,measured,2026-11-01,x,", "lengths is empty"),
        ("deepseek-r1,mtp,chat,1:1.8,1.9,1.1,measured,2026-11-01,x,", "shares of the kept drafts"),
        ("deepseek-r1,mtp,chat,1:1.8,0.9,1.1,measured,2026-11-01,,", "source is empty"),
    ],
)
def test_a_bad_row_is_told_with_its_line(tmp_path: Path, row: str, says: str) -> None:
    written(tmp_path, row)
    with pytest.raises(BadData, match=rf"line 2.*{says}"):
        _ = Catalog([tmp_path]).acceptance_curves


def test_the_list_shows_every_curve(crosstie: Command) -> None:
    found = json.loads(crosstie("catalog", "list", "acceptance", "--json").out)
    first = next(row for row in found if (row["model"], row["text"]) == ("deepseek-v4-pro", "coding"))
    assert first["tokens a step by drafts"].startswith("1:1.79 2:2.27 3:2.49")
    assert any(row["model"] == "others" and row["basis"] == "assumed" for row in found)
    assert "deepseek-r1" in crosstie("catalog", "list", "acceptance").out

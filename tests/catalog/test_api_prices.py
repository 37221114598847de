from pathlib import Path

import pytest

from crosstie.catalog.library import SHIPPED, Catalog, check_everything, check_file
from crosstie.catalog.prices import API_COLUMNS as COLUMNS, read_api_prices
from crosstie.core.errors import BadData

ROW = "llama-3.1-8b,acme,0.05,0.08,claimed,2026-01,somebody,a note"


def table(folder: Path, *rows: str) -> Path:
    file = folder / "api_prices.csv"
    file.write_text("\n".join([",".join(COLUMNS), *rows, ""]))
    return file


def test_a_price_is_per_token_inside(tmp_path: Path, catalog: Catalog) -> None:
    (price,) = read_api_prices(table(tmp_path, ROW), catalog.models)
    assert (price.model, price.provider) == ("llama-3.1-8b", "acme")
    assert price.input.si == pytest.approx(0.05e-6)
    assert price.output.si == pytest.approx(0.08e-6)
    assert (price.output.value, price.output.unit) == (0.08, "USD/Mtoken")
    assert (price.input.basis, price.input.date, price.input.source) == ("claimed", "2026-01", "somebody")
    assert price.output.note == "a note"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (ROW.replace("llama-3.1-8b", "llama-9"), "model 'llama-9' is not in the catalog"),
        (ROW.replace("acme", " "), "provider is empty"),
        (ROW.replace("0.05", "cheap"), "usd_per_million_input 'cheap' is not a number"),
        (ROW.replace("0.08", ""), "usd_per_million_output '' is not a number"),
        (ROW.replace("0.05", "0.00000005"), "usd_per_million_input 5e-08 .* slip of unit"),
        (ROW.replace("0.08", "220000"), "usd_per_million_output 220000 .* slip of unit"),
        (ROW.replace("0.08", "nan"), "slip of unit"),
        (ROW.replace("0.05", "0"), "slip of unit"),
        (ROW.replace("claimed", "hoped"), "basis 'hoped'"),
        (ROW.replace("2026-01", "now"), "not a date"),
        (ROW.replace("somebody", ""), "source is empty"),
        (ROW + ",more", "must have 8 fields"),
        ("llama-3.1-8b,acme", "must have 8 fields"),
        (ROW.replace("a note", '"a note'), "not valid CSV"),
    ],
)
def test_a_bad_row_names_its_line(row: str, reason: str, tmp_path: Path, catalog: Catalog) -> None:
    with pytest.raises(BadData, match=reason) as error:
        read_api_prices(table(tmp_path, ROW, row), catalog.models)
    assert error.value.key == "line 3"


def test_columns_are_checked(tmp_path: Path, catalog: Catalog) -> None:
    file = tmp_path / "api_prices.csv"
    for text in ("", "model,price\n"):
        file.write_text(text)
        with pytest.raises(BadData, match="columns must be model,provider"):
            read_api_prices(file, catalog.models)


def test_a_file_that_is_no_text(tmp_path: Path, catalog: Catalog) -> None:
    file = tmp_path / "api_prices.csv"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadData, match="not UTF-8"):
        read_api_prices(file, catalog.models)
    with pytest.raises(BadData, match="cannot be read"):
        read_api_prices(tmp_path, catalog.models)


def test_a_users_rows_add_to_the_shipped_ones(tmp_path: Path, catalog: Catalog) -> None:
    table(tmp_path, ROW)
    mine = Catalog([tmp_path])
    assert mine.api_prices[: len(catalog.api_prices)] == catalog.api_prices
    assert [price.provider for price in mine.api_prices[len(catalog.api_prices) :]] == ["acme"]
    assert check_everything(mine)["api_prices"] == check_everything(catalog)["api_prices"] + 1


def test_a_file_is_checked_for_what_it_holds(tmp_path: Path) -> None:
    file = table(tmp_path, ROW).rename(tmp_path / "mine.csv")
    assert check_file(file) == "api_prices"
    assert check_file(SHIPPED / "prices.csv") == "prices"


def test_what_is_shipped(catalog: Catalog) -> None:
    """Every price once, in order; a token out never costs less than one in; most models have several providers."""
    rows = [(p.model, p.provider, p.input.value, p.output.value) for p in catalog.api_prices]
    assert rows == sorted(set(rows))
    assert all(out >= into for _, _, into, out in rows)
    for model in ("llama-3.1-8b", "llama-3.1-70b", "llama-3.3-70b", "deepseek-v3", "deepseek-r1", "gpt-oss-120b"):
        assert len({provider for name, provider, _, _ in rows if name == model}) >= 10
    # Read off the provider's entry in LiteLLM's list by eye.
    assert ("gpt-oss-120b", "groq", 0.15, 0.6) in rows
    assert ("llama-3.3-70b", "together", 0.88, 0.88) in rows

"""Claims about money: no article confirms itself, prices decide, and the comparison of ownership is the article's."""

from pathlib import Path

import pytest

from crosstie.catalog.library import SHIPPED, Catalog
from crosstie.prove.claims import questions as questions_module
from crosstie.prove.claims.check import CONDITIONAL, HOLDS, UNCHECKABLE, WRONG, Judgement, check_claims
from crosstie.prove.claims.questions import Questions, rests_on_article
from crosstie.prove.claims.reading import read_claims, select

HEADER = (SHIPPED / "prices.csv").read_text().splitlines()[0]


def finding_in(catalog: Catalog, name: str) -> Judgement:
    return check_claims(catalog, select(read_claims(), (name,)))[0]


def with_prices(folder: Path, *rows: str) -> Catalog:
    (folder / "prices.csv").write_text("\n".join((HEADER, *rows)) + "\n")
    return Catalog([folder])


def test_prices_that_rest_on_an_article_are_known_by_provider_or_source(catalog: Catalog) -> None:
    left_out = [price for price in catalog.prices if rests_on_article(price)]
    assert {(p.accelerator, p.amount.value) for p in left_out} == {("h200", 35_000), ("mi325x", 22_000)}
    assert not any(rests_on_article(price) for price in Questions(catalog, {}).prices)


def test_no_article_confirms_itself(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    found = finding_in(catalog, "c14")
    assert found.verdict == UNCHECKABLE
    assert "the article's own" in found.reason
    # The row would confirm it if it were let in.
    monkeypatch.setattr(questions_module, "rests_on_article", lambda price: False)
    assert finding_in(catalog, "c14").verdict == CONDITIONAL


@pytest.mark.parametrize(
    "row",
    [
        "mi325x,public article C,purchase,22000,USD,claimed,2026-11,somewhere,",
        'mi325x,a blog,purchase,22000,USD,claimed,2026-11,"copied from article A",',
        "mi325x,a blog,purchase,22000,USD,claimed,2026-11,catalog/data/claims (c14),",
    ],
)
def test_nor_does_a_row_of_another_article_or_under_another_name(tmp_path: Path, row: str) -> None:
    assert finding_in(with_prices(tmp_path, row), "c14").verdict == UNCHECKABLE


@pytest.mark.parametrize(("usd", "verdict"), [(21_000, CONDITIONAL), (12_000, WRONG)])
def test_prices_of_the_user_decide_price_claims(tmp_path: Path, usd: int, verdict: str) -> None:
    row = f"mi325x,us,purchase,{usd},USD,claimed,2026-11-01,our own quote,"
    assert finding_in(with_prices(tmp_path, row), "c14").verdict == verdict


def test_c15_rests_on_the_other_sources_alone(catalog: Catalog) -> None:
    found = finding_in(catalog, "c15")
    assert {one.value for one in found.tried} == {32_000, 40_000, 35_000}
    assert found.agreeing == 3
    assert "article A" not in " ".join(rest.what for rest in found.rests)


def test_c04_is_told_by_who_prices_both(catalog: Catalog) -> None:
    found = finding_in(catalog, "c04")
    assert found.verdict == CONDITIONAL
    assert "SemiAnalysis, hyperscaler's server: 23.53" in found.computed  # 1 - 18127 / 23705
    assert 'Hugging Face hardware page "MSRP": 50' in found.computed  # 1 - 15 / 30


def test_no_claim_about_a_price_holds_without_a_condition(catalog: Catalog) -> None:
    for name in ("c04", "c14", "c15", "c22", "c23", "c58", "c64"):
        assert finding_in(catalog, name).verdict != HOLDS

"""The article's comparison of 800 MI325X with 800 H200, worked step by step without the code under test.

Claims: 31% less per token over three years (c18), 19% with two more engineers (c19), robust to 20% (c20).
"""

import pytest

from crosstie.catalog.library import Catalog
from crosstie.prove.claims.check import CONDITIONAL, WRONG, Judgement, check_claims
from crosstie.prove.claims.reading import read_claims, select
from crosstie.prove.claims.uncertain import Uncertain

# Million USD: 800 x 22,000 and 800 x 35,000, less 14%.
MI325X, H200 = 17.6 * 0.86, 28.0 * 0.86
ENGINEERS = 2 * 0.28 * 3
# Depreciation is 60% of the H200's cost, so the whole is 40.13 and power and cooling 16.05.
H200_TOTAL = H200 / 0.6
POWER = H200_TOTAL * 0.4
SAME_BILL = MI325X + POWER


@pytest.fixture(scope="module")
def findings(catalog: Catalog) -> dict[str, Judgement]:
    found = check_claims(catalog, select(read_claims(), ("c18", "c19", "c20")))
    return {one.claim.id: one for one in found}


def values(finding: Judgement) -> list[object]:
    return [one.value for one in finding.readings]


def test_c18_the_price_alone_saves_37_percent_and_the_same_power_bill_leaves_22(findings: dict[str, Judgement]) -> None:
    """Own shares of 60 and 40: both totals are their hardware over 0.6, so the ratio stays."""
    assert pytest.approx(15.136) == MI325X
    own, same, *_ = values(findings["c18"])
    assert own == pytest.approx(100 * (1 - MI325X / H200)) == pytest.approx(100 * (1 - 22 / 35))
    assert same == pytest.approx(100 * (1 - SAME_BILL / H200_TOTAL)) == pytest.approx(60 * (1 - 22 / 35))
    # 31% then means 9% fewer tokens a GPU, or 13% more.
    assert round(22 / 35 / 0.69, 3) == 0.911
    assert round(SAME_BILL / H200_TOTAL / 0.69, 3) == 1.126
    assert "0.911 (own split) or 1.126 (same bill)" in findings["c18"].reason
    assert "states no tokens/s" in findings["c18"].reason
    assert findings["c18"].verdict == CONDITIONAL


def test_c18_by_tco_the_sign_turns_with_how_it_is_served(findings: dict[str, Judgement]) -> None:
    """One MI325X holds in FP8 what two H200 hold; where both need as many, the H200 is not dearer any more."""
    fewest, bf16, two, eight = (one for one in values(findings["c18"]) if isinstance(one, Uncertain))
    assert fewest.ends[0] < 31 < fewest.ends[1]
    assert two.value < 0 < eight.value < bf16.value < fewest.value
    assert two.ends[0] < two.value < two.ends[1] < 31


def test_c19_two_engineers_cost_four_points_not_twelve(findings: dict[str, Judgement]) -> None:
    """1.68 of 40.13 million are 4.2 points; at the tokens/s that give 31% they leave 26% or 27%, not 19%."""
    own, same = values(findings["c19"])
    for left, total in ((own, MI325X / 0.6), (same, SAME_BILL)):
        ratio = total / H200_TOTAL / 0.69
        assert left == pytest.approx(100 * (1 - (total + ENGINEERS) / ratio / H200_TOTAL))
    assert [round(one) for one in (own, same)] == [26, 27]  # type: ignore[call-overload]
    reason = findings["c19"].reason
    assert f"{100 * ENGINEERS / H200_TOTAL:.3f} points" in reason
    # 12 points are 4.816 million: 5.7 engineers, or 279 accelerators in place of 800.
    assert f"{0.12 * H200_TOTAL / (0.28 * 3):.3f} engineers" in reason
    assert f"a fleet of {800 * ENGINEERS / H200_TOTAL / 0.12:.1f}" in reason
    assert (findings["c19"].verdict, findings["c19"].contradicted_by) == (WRONG, ("c18",))


def test_c20_operation_moves_both_bills_and_tokens_or_a_price_one(findings: dict[str, Judgement]) -> None:
    """At the throughput that gives 31%: from 30% to 33% by power and cooling, 14% by tokens/s."""
    ratio = SAME_BILL / H200_TOTAL / 0.69
    less, more, ours, fewer, dearer = values(findings["c20"])
    assert less == pytest.approx(100 * (1 - (MI325X + 0.8 * POWER) / ratio / (H200 + 0.8 * POWER)))
    assert more == pytest.approx(100 * (1 - (MI325X + 1.2 * POWER) / ratio / (H200 + 1.2 * POWER)))
    assert [round(one) for one in (more, less)] == [30, 33]  # type: ignore[call-overload]
    assert fewer == pytest.approx(100 * (1 - 0.69 / 0.8))
    assert dearer == pytest.approx(100 * (1 - (SAME_BILL + 0.2 * MI325X) / ratio / H200_TOTAL))
    assert ours is True
    assert findings["c20"].verdict == CONDITIONAL

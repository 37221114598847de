"""Claims: what the well-known ones must come out as, that verdicts follow the catalog, and users' mistakes."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from tests.conftest import Command

from crosstie.catalog.library import SHIPPED, Catalog
from crosstie.core.errors import BadData, BadInput
from crosstie.prove.claims.check import (
    CONDITIONAL,
    CONTRADICTED,
    HOLDS,
    UNCHECKABLE,
    VERDICTS,
    WRONG,
    Judgement,
    check_claims,
    contradictions,
    judged,
    page,
    summarise,
    verdict_of,
)
from crosstie.prove.claims.questions import Questions
from crosstie.prove.claims.reading import Span, read_claims, select, spans_of
from crosstie.prove.claims.rests import read_public_facts

ROOT = Path(__file__).parents[3]
SAYS = 'says = { article = "A", kind = "spec", subject = "x", claim = "y", value = "1", unit = "GB" }'
ASKS = "readings = { \"by the catalog\" = \"fact('h200', 'chip.tdp')\" }"


@pytest.fixture(scope="module")
def found(catalog: Catalog) -> dict[str, Judgement]:
    return {one.claim.id: one for one in check_claims(catalog)}


def verdict_in(catalog: Catalog, name: str) -> str:
    claims = tuple(claim for claim in read_claims() if claim.id == name)
    return check_claims(catalog, claims)[0].verdict


def overriding(folder: Path, part: str, *changes: tuple[str, str], without: tuple[str, ...] = ()) -> Catalog:
    """The shipped catalog with one accelerator's file changed, as a user would override it."""
    text = (SHIPPED / "accelerators" / f"{part}.toml").read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    for section in without:
        text = re.sub(rf"^\[{section}\]\n(?:.+\n)*", "", text, flags=re.MULTILINE)
    # A source that nothing cites any more would be refused.
    for key in re.findall(r"^([\w-]+) = \{ ref", text, re.MULTILINE):
        if f'source = "{key}"' not in text:
            text = re.sub(rf"^{key} = .*\n", "", text, flags=re.MULTILINE)
    (folder / "accelerators").mkdir(parents=True, exist_ok=True)
    (folder / "accelerators" / f"{part}.toml").write_text(text)
    return Catalog([folder])


def test_every_claim_has_a_verdict_a_reason_and_something_it_rests_on(found: dict[str, Judgement]) -> None:
    assert len(found) == 72
    for one in found.values():
        assert one.verdict in VERDICTS
        assert one.computed.strip()
        assert one.reason.strip()
        assert one.rests, one.claim.id
        for rest in one.rests:
            assert rest.kind in ("catalog", "model", "measured", "arithmetic", "source")
            assert rest.what.strip()
            if rest.kind in ("catalog", "measured", "source"):
                assert rest.source, one.claim.id


@pytest.mark.parametrize(
    ("name", "verdict", "computed"),
    [
        ("c01", HOLDS, "192 GB"),
        ("c02", WRONG, "2.4 x"),  # 192 / 80
        ("c06", WRONG, "1,979"),  # 3,958 with 2:4 sparsity
        ("c07", WRONG, "0.7568"),  # 1979 / 2614.9
        ("c09", WRONG, "6 TB/s"),
        ("c10", HOLDS, "4.8"),
        ("c16", WRONG, "1,000 W"),
        ("c14", UNCHECKABLE, "no figure"),
        ("c18", CONDITIONAL, "37.14"),  # 1 - 22 / 35
        ("c19", WRONG, "26.4"),  # 1.68 of 40.13 million are 4.2 points
        ("c20", CONDITIONAL, "32.72"),
        ("c22", UNCHECKABLE, "no figure"),
        ("c27", WRONG, "below the threshold: no"),
        ("c34", HOLDS, "2.4 and 1.58"),
        ("c35", HOLDS, "141.1"),  # 70.55e9 * 2
        ("c41", CONDITIONAL, "mlperf_v4.1: 24.69"),  # 103182 / (32 * 2585.93)
        ("c43", WRONG, "163.4"),
        ("c44", WRONG, "989.4 and 1,979"),
        ("c45", CONDITIONAL, "38.13 and 24.1"),
        ("c50", WRONG, "10.74 GB"),  # 2 * 8 * 128 * 80 * 2 * 32768
        ("c51", HOLDS, "93.4"),
        ("c53", WRONG, "64 KB"),
        ("c57", WRONG, "card's own: no"),
        ("c60", CONDITIONAL, "180"),
        ("c61", CONDITIONAL, "146.9"),  # 288 - 141.1
        ("c62", WRONG, "1,000 W"),
        ("c69", HOLDS, "2 x"),
    ],
)
def test_well_known_claims(found: dict[str, Judgement], name: str, verdict: str, computed: str) -> None:
    assert found[name].verdict == verdict, found[name].reason
    assert computed in found[name].computed


def test_reasons_name_what_was_mixed_up(found: dict[str, Judgement]) -> None:
    assert "2:4 sparsity" in found["c06"].reason
    assert "MI300X" in found["c09"].reason
    assert "TF32 rate is 653.7" in found["c43"].reason
    assert "20,919" in found["c27"].reason  # 2614.9 * 8
    assert "int4: 2 and 4" in found["c37"].computed
    assert found["c02"].contradicted_by == ("c34",)
    assert "c58" in found["c04"].contradicted_by


def test_a_verdict_says_how_many_readings_agree_and_what_it_rests_on(found: dict[str, Judgement]) -> None:
    """c25's figure lies in one interval of nine; c29 mixes no kinds of prices; c48 is extrapolated; c67 splits no copy."""
    c25 = found["c25"]
    assert (c25.verdict, c25.agreeing, len(c25.tried), len(c25.readings)) == (CONDITIONAL, 1, 9, 12)
    assert c25.qualified == "holds under stated conditions (1 of 9 readings agree)"
    assert "Does not fit: bf16 on 1" in c25.reason
    c29 = found["c29"]
    assert (c29.agreeing, len(c29.tried)) == (0, 4)
    assert "quoted" not in " ".join(rest.what for rest in c29.rests)
    c48 = found["c48"]
    assert c48.extrapolated
    assert c48.qualified == "wrong (by extrapolation alone)"
    assert not c25.extrapolated
    # Five points of this model were measured on MI325X, as `tco` says; somebody's run speaks of c49, too.
    assert not found["c18"].extrapolated
    assert not found["c49"].extrapolated
    assert "as if their bytes were one memory: MI350X 34" in found["c67"].reason
    c65 = found["c65"]
    assert (c65.verdict, c65.tried[0].value) == (CONTRADICTED, None)


def test_what_agrees_lies_in_the_interval_that_is_shown(found: dict[str, Judgement]) -> None:
    """No claim holds by an interval that excludes it."""
    for name in ("c24", "c25"):
        one = found[name]
        low, high = (float(end.replace(",", "")) for end in re.findall(r"[(]([\d,]+) to ([\d,]+)[)]", one.computed)[0])
        assert (one.verdict != WRONG) == (low <= one.claim.spans[0].middle <= high)


def test_what_holds_under_conditions_names_one_under_which_it_does_not(found: dict[str, Judgement]) -> None:
    for one in found.values():
        if one.verdict == CONDITIONAL:
            assert re.search(r"\bNot as claimed|It does not hold", one.reason), one.claim.id


@pytest.mark.slow
def test_memory_of_mi300x_decides_c01_and_c02(tmp_path: Path) -> None:
    smaller = overriding(
        tmp_path,
        "mi300x",
        ("capacity = { value = 192", "capacity = { value = 120"),
        ("usable = { value = 206141652992", "usable = { value = 128849018880"),
    )
    assert verdict_in(smaller, "c01") == WRONG
    assert verdict_in(smaller, "c02") == HOLDS
    assert verdict_in(smaller, "c34") == WRONG
    assert verdict_in(smaller, "c36") == WRONG


@pytest.mark.slow
def test_other_facts_of_the_catalog_decide_their_claims(tmp_path: Path) -> None:
    slow = overriding(
        tmp_path / "a",
        "mi325x",
        ("bandwidth = { value = 6,", "bandwidth = { value = 5.3,"),
        ("value = 1000", "value = 750"),
    )
    assert verdict_in(slow, "c09") == HOLDS
    assert verdict_in(slow, "c16") == HOLDS
    # 290 x 16, 580 x 8 and 140 x 32 stay below 4,800; what is sparse or measured is left out, as it would exceed the peaks.
    peaks = [("value = 1307.4", "value = 290"), ("value = 2614.9", "value = 580"), ("value = 163.4", "value = 140")]
    small = overriding(tmp_path / "b", "mi300x", *peaks, without=("sparse", "measured"))
    assert verdict_in(small, "c27") == HOLDS
    assert verdict_in(small, "c43") == WRONG
    lds = overriding(tmp_path / "c", "mi300x", ("lds = { value = 64", "lds = { value = 32"))
    assert verdict_in(lds, "c53") == HOLDS


@pytest.mark.slow
def test_a_catalog_that_lacks_what_a_check_needs_is_no_traceback(tmp_path: Path) -> None:
    tiny = overriding(tmp_path / "a", "mi350x", ("capacity = { value = 288", "capacity = { value = 24"))
    one = check_claims(tiny, select(read_claims(), ("c61",)))[0]
    assert one.verdict == WRONG
    assert "Does not fit: as vLLM plans it" in one.reason
    assert all(one.reason for one in check_claims(tiny))
    bare = overriding(tmp_path / "b", "h100-sxm", without=("sparse", "measured"))
    assert verdict_in(bare, "c07") == UNCHECKABLE
    assert verdict_in(bare, "c06") == WRONG


def test_the_export_score_is_dense_rate_times_bits(catalog: Catalog) -> None:
    assert Questions(catalog, {}).tpp("mi300x") == pytest.approx(2614.9 * 8)
    assert Questions(catalog, {}).tpp("a100-80gb") == pytest.approx(312 * 16)


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("192", [(192, 192)]),
        ("18-22", [(18, 22)]),
        ("2 and 4-6", [(2, 2), (4, 6)]),
        ("1307 / 655 / 2614", [(1307, 1307), (655, 655), (2614, 2614)]),
        ("±20", [(20, 20)]),
        ("11.0.0", []),
        ("MI325X", []),
        ("yes", []),
    ],
)
def test_values_are_read_as_spans(text: str, spans: list[tuple[float, float]]) -> None:
    assert [(span.low, span.high) for span in spans_of(text)] == spans


def test_a_span_holds_within_its_tolerance() -> None:
    assert Span(18, 22).holds(22.4, 0.02)
    assert not Span(18, 22).holds(22.5, 0.02)
    assert verdict_of([True, True]) == HOLDS
    assert verdict_of([True, False]) == CONDITIONAL
    assert Span(31, 31).holds(29, points=2)
    assert not Span(31, 31).holds(28.9, points=2)


def test_a_verdict_follows_from_the_readings() -> None:
    assert verdict_of([False]) == WRONG
    # What nothing tells neither refutes nor confirms.
    assert verdict_of([True, None]) == CONDITIONAL
    assert verdict_of([False, None]) == UNCHECKABLE
    assert verdict_of([]) == UNCHECKABLE


def test_contradictions_are_found_among_claims() -> None:
    against = contradictions(read_claims())
    assert set(against["c65"]) == {"c30"}
    assert "14" in against["c23"]["c18"]
    changed = tuple(msgspec.structs.replace(c, value="2.4") if c.id == "c02" else c for c in read_claims())
    assert "c02" not in contradictions(changed)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"[c01]\n{SAYS.replace('unit', 'units')}\n{ASKS}", "c01.says.units: unknown key; did you mean unit"),
        (f"[c01]\n{SAYS}", "c01.readings: missing"),
        (f"[c01]\n{ASKS}", "c01.says: missing"),
        (f"[c01]\n{SAYS}\n{ASKS}\n[c01]\n", "not valid TOML"),
        (f"[c01]\n{SAYS.replace('spec', 'specs')}\n{ASKS}", "c01.says.kind: 'specs' is not one of spec,"),
        (f"[x1]\n{SAYS}\n{ASKS}", "x1: is not c and a number"),
        (f"[c01]\n{SAYS.replace('1', '')}\n{ASKS}", "c01.says.value: must be a non-empty string"),
        (f"[c01]\n{SAYS.replace('GB', 'bool')}\n{ASKS}", "c01.says.value: '1' must be yes or no"),
        (f"[c01]\n{SAYS}\n{ASKS}\ntolerence = 0.1", "c01.tolerence: unknown key; did you mean tolerance"),
        (f"[c01]\n{SAYS}\n{ASKS}\ntolerance = 2", "c01.tolerance: 2 must be a number from 0 to 1"),
        (f'[c01]\n{SAYS}\n{ASKS}\ncontradicts = ["c02"]', "c01.contradicts: there is no claim c02"),
        (f'[c01]\n{SAYS}\n{ASKS}\nnote = "{{1"', "c01.note: '{1': a brace without its other half"),
        (f"[c01]\n{SAYS}\nreadings = {{ a = 'facts(1)' }}", "c01.readings.a: 'facts(1)': facts is not known"),
        (f"[c01]\n{SAYS}\nlet = {{ a = 'b', b = 'a' }}\n{ASKS}", "c01.let.a: 'b': b is not known"),
        (f"[c01]\n{SAYS}\nlet = 1\n{ASKS}", "c01.let: must be a table"),
        (f"[c01]\n{SAYS}\nreadings = {{ a = '1 +' }}", "c01.readings.a: '1 +' is no expression"),
        (f"[c01]\n{SAYS}\nreadings = {{ a = 'fact.__class__' }}", "c01.readings.a: 'fact.__class__': Attribute is not"),
        (f"[c01]\n{SAYS}\nreadings = {{ a = '[1][0]()' }}", "only names of the vocabulary are called"),
        (f"[c01]\n{SAYS}\nreadings = {{ a = '2 ** 99' }}", "Pow is not allowed"),
        (
            f"[c01]\n{SAYS}\nfor = {{ n = [1] }}\nreadings = {{ a = 'n' }}",
            "c01.readings: 'a' uses n and does not name it",
        ),
    ],
)
def test_a_bad_claims_file_is_refused_with_claim_and_key(tmp_path: Path, body: str, message: str) -> None:
    file = tmp_path / "claims.toml"
    file.write_text(f"{body}\n")
    with pytest.raises(BadData, match=re.escape(message)):
        read_claims(file)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("fact(1)", "Questions.fact() missing"),
        ("fact('mi300x', 'chips.tdp')", "'Accelerator' object has no attribute 'chips'"),
        ("source('nobody')", "'nobody'"),
        ("1 / 0", "division by zero"),
    ],
)
def test_a_question_that_cannot_be_asked_is_named(catalog: Catalog, tmp_path: Path, asked: str, why: str) -> None:
    file = tmp_path / "claims.toml"
    file.write_text(f'[c01]\n{SAYS}\nreadings = {{ a = "{asked}" }}\n')
    with pytest.raises(BadData, match=re.escape(f"claims.toml: c01: '{asked}': {why}")):
        judged(Questions(catalog, {}), read_claims(file)[0])


def test_a_fact_without_a_source_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "claim_sources.toml"
    file.write_text('[sources]\na = { ref = "a", date = "2026-01" }\n[facts.x]\nvalue = 1\nsays = "one"\n')
    with pytest.raises(BadData, match="every number needs a source"):
        read_public_facts(file)
    assert all(fact.source and fact.date for fact in read_public_facts().values())


def test_claims_are_chosen_by_id_text_and_article() -> None:
    claims = read_claims()
    assert [c.id for c in select(claims, ("C27",))] == ["c27"]
    assert {c.article for c in select(claims, (), "e")} == {"E"}
    assert all("mi325x" in c.words.casefold() for c in select(claims, ("mi325x",)))
    with pytest.raises(BadInput, match="unknown article 'Z'"):
        select(claims, (), "Z")


def test_the_command_lists_and_filters(crosstie: Command) -> None:
    got = crosstie("claims", "--verdict", "wrong", "--article", "D")
    assert got.status == 0
    assert "c62" in got.out
    assert "c59" not in got.out
    full = crosstie("claims", "c53")
    assert "64 KB" in full.out
    assert "gpu-arch-specs" in full.out
    assert "nothing on AMD" in full.out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("c99",), "Did you mean c"),
        (("hipfy",), "Did you mean hipify"),
        (("nonsense-that-no-claim-mentions",), "lists them all"),
        (("--verdict", "wrng"), "Did you mean wrong"),
        (("--article", "Q"), "known: A, B, C, D, E"),
        (("--markdown", "c01"), "goes with nothing else"),
    ],
)
def test_mistakes_are_one_line_and_status_2(crosstie: Command, arguments: tuple[str, ...], hint: str) -> None:
    got = crosstie("claims", *arguments)
    assert got.status == 2
    assert hint in got.err
    assert got.err.count("\n") == 1


def test_claims_as_json_have_their_keys(crosstie: Command) -> None:
    got = crosstie("claims", "c02", "c27", "--json")
    answer = json.loads(got.out)
    assert set(answer) == {"summary", "claims", "assumptions"}
    assert answer["summary"]["counts"]["wrong"] == 2
    first = answer["claims"][0]
    assert first["id"] == "c02"
    assert first["contradicted_by"] == ["c34"]
    assert {"verdict", "computed", "reason", "claim", "value", "unit", "rests_on"} <= set(first)
    assert set(first["rests_on"][0]) == {"kind", "what", "source", "date"}


@pytest.mark.slow
def test_the_page_is_what_the_command_prints(crosstie: Command, found: dict[str, Judgement]) -> None:
    printed = crosstie("claims", "--markdown").out
    assert (ROOT / "docs" / "claims.md").read_text(encoding="utf-8") == printed, "run `make claims`"
    assert printed == page(list(found.values()))
    assert not re.search(r"\de\+\d", printed)


def test_counts_of_verdicts_add_up_to_all_claims(found: dict[str, Judgement]) -> None:
    summary = summarise(list(found.values()))
    assert sum(summary.counts.values()) == 72
    assert sum(total for total, _, _ in summary.articles.values()) == 72
    assert summary.best[0] == "B"

"""Rows of rules: what they match, what they refuse, and that the shipped ones can be read."""

from pathlib import Path

import pytest
from packaging.version import Version

from crosstie.core.errors import BadData
from crosstie.port.preflight.rules import FOLDER, EngineRule, covers, false_citations, read_rules, rules

ROW = """
engine = "vllm"
[sources]
main = { ref = "vllm-project/vllm@a014e35f38", date = "2026-08-22" }
[[rule]]
id = "one"
versions = ">=0.10,<=0.28"
operation = "attention"
on = ["gfx942"]
when = { head_dim = [64, 128], gqa_ratio = "<=16", kv = "!fp8", sinks = false }
outcome = "note"
implementation = "triton"
says = "runs"
source = "main"
at = "vllm/platforms/rocm.py:1"
"""
FACTS: dict[str, str | int | bool] = {"head_dim": 128, "gqa_ratio": 8, "kv": "bf16", "sinks": False}


def one(tmp_path: Path, text: str = ROW) -> EngineRule:
    file = tmp_path / "vllm-x.toml"
    file.write_text(text)
    (rule,) = read_rules(file)
    return rule


def test_a_row_that_speaks_of_the_case(tmp_path: Path) -> None:
    assert one(tmp_path).holds(Version("0.28.0"), "gfx942", FACTS)


@pytest.mark.parametrize(
    ("version", "isa", "changed"),
    [
        ("0.29.0", "gfx942", {}),
        ("0.9.2", "gfx942", {}),
        ("0.28.0", "gfx950", {}),
        ("0.28.0", "gfx942", {"head_dim": 96}),
        ("0.28.0", "gfx942", {"gqa_ratio": 17}),
        ("0.28.0", "gfx942", {"kv": "fp8"}),
        ("0.28.0", "gfx942", {"sinks": True}),
    ],
)
def test_a_row_is_silent_about_others(
    tmp_path: Path, version: str, isa: str, changed: dict[str, str | int | bool]
) -> None:
    assert not one(tmp_path).holds(Version(version), isa, {**FACTS, **changed})


def test_a_fact_that_is_not_known_matches_nothing(tmp_path: Path) -> None:
    missing = {key: value for key, value in FACTS.items() if key != "head_dim"}
    assert not one(tmp_path).holds(Version("0.28.0"), "gfx942", missing)


@pytest.mark.parametrize(
    ("condition", "holds", "fails"),
    [('"%16"', 32, 33), ('"!%16"', 33, 32), ('">=8"', 8, 7), ('"<8"', 7, 8), ('">8"', 9, 8), ("8", 8, 9)],
)
def test_conditions_on_numbers(tmp_path: Path, condition: str, holds: int, fails: int) -> None:
    rule = one(tmp_path, ROW.replace('"<=16"', condition))
    assert rule.holds(Version("0.28.0"), "gfx942", {**FACTS, "gqa_ratio": holds})
    assert not rule.holds(Version("0.28.0"), "gfx942", {**FACTS, "gqa_ratio": fails})


def test_a_rule_covers_the_targets_it_names() -> None:
    assert covers("any", "gfx942")
    assert covers("rocm", "gfx942")
    assert not covers("rocm", "sm_90")
    assert covers("cuda", "sm_90")
    assert not covers("cuda", "gfx950")
    assert not covers("gfx950", "gfx942")


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ('"note"', '"fine"', "outcome"),
        ('"note"', '"slow"', "only a note may do without"),
        ('">=0.10,<=0.28"', '"since 0.10"', "no set of versions"),
        ('["gfx942"]', '["mi300x"]', "no instruction set"),
        ('["gfx942"]', "[]", "must be a list"),
        ('"<=16"', '"<=many"', "compares with no whole number"),
        ('"<=16"', '"%0"', "compares with no whole number"),
        ('"triton"', '"magic"', "implementation"),
        ('"attention"', '"attend"', "operation"),
        ('source = "main"', 'source = "blog"', "not in \\[sources\\]"),
        ("says =", "tells =", "unknown key"),
        ("head_dim =", "head_size =", "no such fact"),
        ("head_dim =", '"model.clustering" =', "no such fact: .*model.routing"),
        ('at = "vllm/platforms/rocm.py:1"', "", "at: missing"),
        ("rocm.py:1", "rocm.py", "a path and a line"),
        ("rocm.py:1", "rocm.py:0", "a path and a line"),
        ("rocm.py:1", "rocm.py:one", "a path and a line"),
        ("vllm/platforms/rocm.py:1", "/vllm/rocm.py:1", "a path and a line"),
        ("vllm@a014e35f38", "vllm", "names no commit"),
        ("vllm-project/vllm@a014e35f38", "somebody's blog", "names no commit"),
    ],
)
def test_a_row_that_cannot_be_trusted_fails_by_name(tmp_path: Path, was: str, becomes: str, said: str) -> None:
    assert was in ROW
    with pytest.raises(BadData, match=said):
        one(tmp_path, ROW.replace(was, becomes))


def test_a_row_on_any_operation_may_ask_for_the_models(tmp_path: Path) -> None:
    rule = one(tmp_path, ROW.replace("head_dim =", '"model.routing" = "hash", head_dim ='))
    assert rule.holds(Version("0.28.0"), "gfx942", {**FACTS, "model.routing": "hash"})
    assert not rule.holds(Version("0.28.0"), "gfx942", {**FACTS, "model.routing": "top-k"})
    assert not rule.holds(Version("0.28.0"), "gfx942", FACTS)


def test_a_row_may_hold_unless_a_setting_is_set(tmp_path: Path) -> None:
    unless = 'unless = { "env.VLLM_ROCM_USE_AITER" = ["1", "true"] }\noutcome ='
    rule = one(tmp_path, ROW.replace("outcome =", unless))
    where = Version("0.28.0"), "gfx942"
    assert rule.holds(*where, FACTS)
    assert rule.holds(*where, {**FACTS, "env.VLLM_ROCM_USE_AITER": "0"})
    assert not rule.holds(*where, {**FACTS, "env.VLLM_ROCM_USE_AITER": "1"})
    with pytest.raises(BadData, match="no such fact"):
        one(tmp_path, ROW.replace("outcome =", unless.replace("env.", "")))


def test_a_citation_is_looked_up_where_the_source_is_at_hand(tmp_path: Path) -> None:
    rule = one(tmp_path, ROW.replace("rocm.py:1", "rocm.py:2; vllm/envs.py:1-3"))
    (tmp_path / "vllm" / "platforms").mkdir(parents=True)
    (tmp_path / "vllm" / "platforms" / "rocm.py").write_text("first\nsecond\n")
    assert false_citations([rule], tmp_path) == ["one: vllm/envs.py:1-3: no such file"]
    (tmp_path / "vllm" / "envs.py").write_text("first")
    assert false_citations([rule], tmp_path) == ["one: vllm/envs.py:1-3: the file has 1 lines"]
    (tmp_path / "vllm" / "envs.py").write_text("first\nsecond\nthird\n")
    assert false_citations([rule], tmp_path) == []


def test_an_id_stands_once(tmp_path: Path) -> None:
    file = tmp_path / "vllm-x.toml"
    file.write_text(ROW + ROW[ROW.index("[[rule]]") :])
    with pytest.raises(BadData, match="twice"):
        read_rules(file)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.toml")), ids=lambda file: file.stem)
def test_shipped_rows_can_be_read(file: Path) -> None:
    found = read_rules(file)
    assert found
    assert {rule.engine for rule in found} == {file.stem.rsplit("-", 1)[0].split("-")[0]}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
def test_ids_are_unique_in_an_engine(engine: str) -> None:
    names = [rule.id for rule in rules(engine)]
    assert len(names) == len(set(names)) > 20

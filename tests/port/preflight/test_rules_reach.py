"""The rows of all engines: well-formed, of releases that were read, and none dead: each decides some case, on facts as
whole as the check gives them."""

import re
import tomllib
from itertools import product
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from tests.port.preflight import test_rules_sglang, test_rules_vllm
from tests.port.preflight.reach import meeting

from crosstie.port.preflight.engine import engine_from
from crosstie.port.preflight.rules import FOLDER, EngineRule, Value, covers, decide, rules

ROWS = [rule for engine in ("vllm", "sglang", "llama.cpp") for rule in rules(engine)]
RELEASES = {
    "vllm": test_rules_vllm.RELEASES,
    **{engine: list(map(Version, named)) for engine, named in test_rules_sglang.RELEASES.items()},
}
ISAS = tuple(dict.fromkeys((*test_rules_vllm.ISAS, *test_rules_sglang.ISAS)))
# What few models have, for the rows that catch what no other row speaks of.
ODD: dict[str, Value] = {"activation": "gelu_tanh", "heads": 24, "head_dim": 160}
AT = re.compile(r"^[\w./-]+\.(py|toml|cu|cuh|cpp|txt|mdx|Dockerfile|csv|yaml):[1-9]\d*$")
# The last release before those that were read, where rows begin with one.
TOO_OLD = {"vllm": "0.9.1"}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.toml")), ids=lambda file: file.stem)
def test_every_source_is_cited_and_every_place_is_a_file_and_a_line(file: Path) -> None:
    raw = tomllib.loads(file.read_text())
    assert {row["source"] for row in raw["rule"]} == set(raw["sources"])
    for row in raw["rule"]:
        assert all(AT.match(place) for place in row["at"].split("; ")), row["id"]


@pytest.mark.parametrize("engine", RELEASES)
def test_rows_stand_once_and_speak_of_no_release_that_was_not_read(engine: str) -> None:
    rows = rules(engine)
    assert len({rule.id for rule in rows}) == len(rows) > (200 if engine == "vllm" else 50)
    unread = [f"{engine_from(engine).newest}.1", *([TOO_OLD[engine]] if engine in TOO_OLD else [])]
    for rule in rows:
        assert not any(SpecifierSet(rule.versions).contains(release, prereleases=True) for release in unread), rule.id


def decides(rule: EngineRule) -> bool:
    plain = (test_rules_vllm if rule.engine == "vllm" else test_rules_sglang).PLAIN[rule.operation]
    cases = product(
        [
            release
            for release in RELEASES[rule.engine]
            if SpecifierSet(rule.versions).contains(release, prereleases=True)
        ],
        [isa for isa in ISAS if any(covers(target, isa) for target in rule.on)],
        ({}, plain, {**plain, **ODD}),
        product(*(meeting(wanted) for wanted in rule.when.values())),
    )
    return any(
        decide(rule.engine, release, isa, rule.operation, {**facts, **dict(zip(rule.when, values, strict=True))})
        == rule
        for release, isa, facts, values in cases
    )


@pytest.mark.parametrize("engine", RELEASES)
def test_every_row_decides_something(engine: str) -> None:
    assert [rule.id for rule in ROWS if rule.engine == engine and not decides(rule)] == []

"""No row of any engine is dead: each decides some case, on facts as whole as the check gives them."""

from itertools import product

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from tests.port.preflight import test_rules_sglang, test_rules_vllm
from tests.port.preflight.reach import meeting

from crosstie.port.preflight.rules import EngineRule, Value, covers, decide, rules

ROWS = [rule for engine in ("vllm", "sglang", "llama.cpp") for rule in rules(engine)]
RELEASES = {
    "vllm": test_rules_vllm.RELEASES,
    **{engine: list(map(Version, named)) for engine, named in test_rules_sglang.RELEASES.items()},
}
ISAS = tuple(dict.fromkeys((*test_rules_vllm.ISAS, *test_rules_sglang.ISAS)))
# What few models have, for the rows that catch what no other row speaks of.
ODD: dict[str, Value] = {"activation": "gelu_tanh", "heads": 24, "head_dim": 160}


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

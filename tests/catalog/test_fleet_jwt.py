"""[jwt] of a fleet file: whose tokens are taken, and what is refused because it would let in too many."""

import re
from pathlib import Path

import msgspec
import pytest

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData
from crosstie.core.fleet import ASYMMETRIC, Fleet, JwtIdentity

PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"
KEYS = '[state]\nkeys = "required"\nstore = "a.db"\n'
LEAST = 'issuer = "https://login.example.com"\naudience = "crosstie"\n'
POOL = '[[pool]]\nname = "a"\nmodel = "m"\nreplicas = 1\n'


def fleet_with(folder: Path, jwt: str, state: str = KEYS) -> Fleet:
    file = folder / "fleet.toml"
    file.write_text(f"format = 1\n{state}[jwt]\n{jwt}\n{POOL}")
    return read_fleet(Catalog(), file)


def test_the_least_and_the_most_that_can_be_said(tmp_path: Path) -> None:
    least = fleet_with(tmp_path, LEAST)
    assert least.jwt == JwtIdentity(issuer="https://login.example.com", audience=("crosstie",))
    assert least.jwt.algorithms == ASYMMETRIC
    most = fleet_with(
        tmp_path,
        'issuer = "https://login.example.com"\naudience = ["a", "b"]\njwks = "keys.json"\nalgorithms = ["ES256"]\n'
        'leeway_s = 5\nteam_claim = "groups"\nteam = "guests"\nscope = "llm"\nexplain_scope = "llm.why"\n'
        'refresh_s = 60\nrefresh_unknown_s = 2\n[jwt.teams]\n"eng/ml" = "research"\n',
    )
    assert most.jwt is not None
    assert most.jwt.jwks == str(tmp_path / "keys.json")
    assert most.jwt.teams == {"eng/ml": "research"}
    for fleet in (least, most):
        again = tmp_path / "again.toml"
        again.write_text(fleet_text(fleet))
        assert read_fleet(Catalog(), again) == msgspec.structs.replace(fleet)


@pytest.mark.parametrize(
    ("jwt", "state", "key", "reason"),
    [
        (LEAST, "", "jwt", 'goes with keys = "required"'),
        ('audience = "a"', KEYS, "jwt.issuer", "missing"),
        ('issuer = "https://a"', KEYS, "jwt.audience", "missing"),
        ('issuer = "https://a"\naudience = []', KEYS, "jwt.audience", "tokens for anybody"),
        ('issuer = "http://login.example.com"\naudience = "a"', KEYS, "jwt.issuer", "no https address"),
        ('issuer = "login"\naudience = "a"', KEYS, "jwt.issuer", "no https address"),
        (LEAST + 'jwks = "ftp://a/keys"', KEYS, "jwt.jwks", "no https address"),
        (LEAST + 'algorithms = ["RS256", "HS256"]', KEYS, "jwt.algorithms[1]", "HS256"),
        (LEAST + 'algorithms = ["none"]', KEYS, "jwt.algorithms[0]", "none"),
        (LEAST + "algorithms = []", KEYS, "jwt.algorithms", "is empty"),
        (LEAST + "leeway_s = 86400", KEYS, "jwt.leeway_s", "86400"),
        (LEAST + 'teams = { a = "b" }', KEYS, "jwt.teams", "goes with team_claim"),
        (LEAST + 'secret = "x"', KEYS, "jwt.secret", "unknown key"),
    ],
)
def test_faults_are_named(tmp_path: Path, jwt: str, state: str, key: str, reason: str) -> None:
    with pytest.raises(BadData, match=re.escape(f"{key}: ")) as told:
        fleet_with(tmp_path, jwt, state)
    assert reason in str(told.value)


def test_the_page_has_every_key() -> None:
    documented = set(re.findall(r"^\| `(\w+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(JwtIdentity.__struct_fields__) <= documented

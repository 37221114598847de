"""What a user may write, and what a client gets, is where it must be: in the code that takes it and on its page."""

import re
from pathlib import Path
from typing import get_args

import click
import pytest
from tests.packages import ROOT, SOURCES
from tests.route.fleets import fleet as fleet_of

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.core.fleet import Policy
from crosstie.route.policies import POLICIES
from crosstie_gateway.cli.serve import command as serve
from crosstie_gateway.gateway.asks import HINTS
from crosstie_gateway.gateway.attempt import _NOT_FORWARDED, _NOT_RETURNED, OWN_HEADERS

DOCS = ROOT / "docs"
_WRITTEN = re.compile(rb"x-crosstie-[a-z][a-z-]*")


def first_column(page: str, heading: str) -> set[str]:
    """What is in code in the first column of the table with this heading."""
    lines = (DOCS / page).read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    found: set[str] = set()
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.update(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return found


def test_a_table_ends_where_it_ends() -> None:
    assert "x-crosstie-session" in first_column("gateway.md", "header of a request")
    assert "x-crosstie-session" not in first_column("gateway.md", "header of an answer")


def test_every_policy_is_in_the_registry_on_its_page_and_an_option() -> None:
    names = set(get_args(Policy))
    assert set(POLICIES) == names
    assert first_column("routing.md", "policy") == names
    (line,) = [one for one in (DOCS / "fleet.md").read_text().splitlines() if one.startswith("| `policy` |")]
    assert set(re.findall("`([^`]+)`", line.split("|")[3])) == names
    (option,) = [one for one in serve.params if one.name == "policy"]
    assert isinstance(option.type, click.Choice)
    assert set(option.type.choices) == names


@pytest.mark.parametrize("name", get_args(Policy))
def test_a_fleet_file_may_name_every_policy(name: Policy, tmp_path: Path) -> None:
    written = fleet_text(fleet_of())
    assert 'policy = "cheapest-meeting-target"' in written
    file = tmp_path / "fleet.toml"
    file.write_text(written.replace('policy = "cheapest-meeting-target"', f'policy = "{name}"'))
    assert read_fleet(Catalog([]), file).policy == name


def test_every_hint_is_documented_and_kept_from_backends() -> None:
    assert {name.decode() for name in HINTS} <= first_column("gateway.md", "header of a request")
    assert HINTS <= _NOT_FORWARDED


def test_every_header_of_an_answer_is_documented_and_never_a_backends() -> None:
    assert {name.decode() for name in OWN_HEADERS} == first_column("gateway.md", "header of an answer")
    assert set(OWN_HEADERS) <= _NOT_RETURNED


def test_the_gateway_writes_no_other_header_of_its_own() -> None:
    known = {*HINTS, *OWN_HEADERS}
    for path in sorted((SOURCES["crosstie_gateway"] / "gateway").glob("*.py")):
        written = set(_WRITTEN.findall(path.read_bytes()))
        assert written <= known, f"{path.name}: {written - known} is neither a hint nor one of the answer's"

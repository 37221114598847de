"""What to demand: filled with the plan's own numbers, and nothing left in braces."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from tests.conftest import Command

from crosstie.catalog.library import Catalog
from crosstie.cli.main import crosstie as crosstie_command
from crosstie.core.errors import BadData
from crosstie.core.figures import significant
from crosstie.prove.review.checklist import checklist
from crosstie.prove.review.figures import thresholds
from crosstie.prove.review.planned import read_planned


def test_a_contract_is_filled_with_the_plan_s_numbers(crosstie: Command, made: Path, content: dict[str, Any]) -> None:
    got = crosstie("review", str(made), "--checklist", "--json", "--within", "throughput=10%")
    assert got.status == 0
    demands = json.loads(got.out)["demands"]
    (pool,) = content["fleet"]["pools"]
    topics = {one["topic"] for one in demands}
    assert {"Acceptance", "Throughput warranty", "Latency warranty", "Energy", "Support", "People", "Exit"} <= topics
    assert not any(re.search(r"[{}]", one["ask"] + one["run"] + one["why"]) for one in demands)
    accept = next(one for one in demands if one["topic"] == "Acceptance")
    projected = pool["estimate"]["output_tokens_per_s"]
    assert significant(projected) in accept["ask"]
    assert significant(0.9 * projected) in accept["ask"]
    in_flight = round(pool["estimate"]["concurrency"])
    assert f"--concurrency {in_flight} " in accept["run"]
    assert f"--accelerator {pool['accelerator']} " in accept["run"]
    energy = next(one for one in demands if one["topic"] == "Energy")
    assert significant(content["fleet"]["power"]["mean"] / 1e3) in energy["ask"]
    latency = next(one for one in demands if one["topic"] == "Latency warranty")
    assert latency["of"] == "chat"
    assert "95% of requests with a TTFT of 1,000 ms" in latency["ask"]


def test_it_is_shown_and_written_for_a_meeting(crosstie: Command, made: Path) -> None:
    shown = crosstie("review", str(made), "--checklist")
    assert "what to demand, by the plan of 2026-08-18" in shown.out
    assert "proposals of ours" in shown.out
    written = crosstie("review", str(made), "--checklist", "--markdown")
    assert written.out.startswith("# small: what to demand")
    assert "- [ ] " in written.out
    assert "```sh\ncrosstie bench http://REPLICA:8000" in written.out


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('topic = "x"\nask = "{speed}"\nwhy = "y"', r"demand\[0\]: has 'speed' in braces, which nothing fills"),
        ('topic = "x"\nask = "{"\nwhy = "y"', r"demand\[0\]: has .* in braces"),
        ('topic = "x"\nwhy = "y"', r"demand\[0\].ask: missing"),
        ('topic = "x"\nask = "z"\nwhy = "y"\neach = "day"', r"'day' is not one of once, pool"),
    ],
)
def test_a_slip_in_the_data_is_named(made: Path, tmp_path: Path, row: str, words: str) -> None:
    file = tmp_path / "contract.toml"
    file.write_text(f"[[demand]]\n{row}\n")
    shipped = Catalog([])
    with pytest.raises(BadData, match=words):
        checklist(shipped, read_planned(shipped, made), thresholds(), file)


def test_the_commands_of_a_contract_are_commands_that_there_are(made: Path) -> None:
    shipped = Catalog([])
    runs = [shlex.split(one.run) for one in checklist(shipped, read_planned(shipped, made), thresholds()) if one.run]
    assert {words[1] for words in runs} == {"bench", "parity"}
    for program, name, *words in runs:
        assert program == "crosstie"
        command = crosstie_command.get_command(click.Context(crosstie_command), name)
        assert command is not None, name
        # Every option is known there, and every value is one that it takes.
        assert command.make_context(name, words).params

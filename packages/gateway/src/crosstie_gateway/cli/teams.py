"""`crosstie keys team` and `crosstie keys teams`: limits that several keys have in common."""

from pathlib import Path
from time import time
from typing import Any

import click
import msgspec

from crosstie.cli.options import json_option, option_group
from crosstie.cli.show import console, print_json, show_table
from crosstie.cli.times import stamp
from crosstie.core.errors import BadInput
from crosstie.core.figures import dollars, number
from crosstie_gateway.cli.store import opened, store_options
from crosstie_gateway.ledger.keys import Key, Team

LIMITS = ("rpm", "tpm", "usd_per_day", "usd_per_month")
limit_options = option_group(
    click.option("--rpm", type=int, metavar="N", help="Requests a minute."),
    click.option("--tpm", type=int, metavar="N", help="Tokens a minute, prompts and answers."),
    click.option("--usd-per-day", type=float, metavar="X", help="Budget in dollars, UTC days."),
    click.option("--usd-per-month", type=float, metavar="X", help="Budget in dollars, UTC months."),
)


def lifted_limits(lifted: tuple[str, ...], changes: dict[str, Any]) -> None:
    """Adds to the changes the limits that are to be no more."""
    for limit in lifted:
        field = "expires_at" if limit == "expires" else limit.replace("-", "_")
        if field in changes:
            raise BadInput(f"--no-limit {limit} and --{limit} contradict each other")
        changes[field] = None


@click.command("team", epilog="Example: crosstie keys team research --usd-per-month 500")
@click.argument("name")
@limit_options
@click.option("--no-limit", "lifted", multiple=True, type=click.Choice([limit.replace("_", "-") for limit in LIMITS]),
              help="Lift this limit; may be repeated.")  # fmt: skip
@store_options
@json_option
def team(name: str, lifted: tuple[str, ...], store: str | None, fleet: Path | None, as_json: bool, **given: Any) -> int:
    """Makes a team, or changes its limits; what is not named stays. They hold beside those of its keys."""
    changes = {limit: value for limit, value in given.items() if value is not None}
    lifted_limits(lifted, changes)
    with opened(store, fleet, create=True) as at:
        known = any(known_team.name == name for known_team in at.all_teams())
        made = at.put_team(name, lambda before: msgspec.structs.replace(before, **changes))
    done = "changed" if known else "made"
    print_json(_document(made, [], None)) if as_json else click.echo(f"team '{name}' was {done}")
    return 0


@click.command("teams", epilog="Example: crosstie keys teams")
@store_options
@json_option
def teams(store: str | None, fleet: Path | None, as_json: bool) -> int:
    """All teams, with their keys and what they have spent today and this month."""
    with opened(store, fleet) as at:
        known, keys, spent = at.all_teams(), at.all_keys(), at.spent(time())
    documents = [
        _document(of, [key for key in keys if key.team_id == of.id], spent.get(of.account_id, (0.0, 0.0)))
        for of in known
    ]
    if as_json:
        print_json(documents)
        return 0
    rows = [
        [
            said["name"], number(said["rpm"]), number(said["tpm"]), of_budget(said["usd_today"], said["usd_per_day"]),
            of_budget(said["usd_this_month"], said["usd_per_month"]), ", ".join(said["keys"]) or "-",
        ]
        for said in documents
    ]  # fmt: skip
    show_table(console(), ["team", ">requests/min", ">tokens/min", ">today", ">this month", "~keys"], rows)
    return 0


def of_budget(used: float, budget: float | None) -> str:
    return dollars(used) if budget is None else f"{dollars(used)} of {dollars(budget)}"


def _document(of: Team, keys: list[Key], spent: tuple[float, float] | None) -> dict[str, Any]:
    return {
        "name": of.name,
        "number": of.id,
        **{limit: getattr(of, limit) for limit in LIMITS},
        "created": stamp(of.created_at),
        **(
            {} if spent is None else {"usd_today": spent[0], "usd_this_month": spent[1], "keys": [k.name for k in keys]}
        ),
    }

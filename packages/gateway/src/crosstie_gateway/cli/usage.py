"""`crosstie usage`: what was used and what it cost, by key, model, pool, class or time."""

from pathlib import Path
from time import time
from typing import cast

import click

from crosstie.catalog.writing import csv_text
from crosstie.cli.options import json_option
from crosstie.cli.show import console, print_json, say, show_table
from crosstie.cli.times import moment, span
from crosstie.core.errors import BadInput
from crosstie.core.figures import dollars, share
from crosstie.core.usage import Used, hour_of, total
from crosstie_gateway.cli.store import named_key, opened, store_options
from crosstie_gateway.ledger.keys import Key
from crosstie_gateway.ledger.store import Store
from crosstie_gateway.ledger.usage import BYS, By

_NUMBERS = ("requests", "refused", "failed", "input_tokens", "output_tokens", "usd")
_TIMES = ("hour", "day", "month")
_BAR = 20
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@click.command("usage")
@click.option("--by", "by", multiple=True, metavar="WHAT",
              help=f"{', '.join(BYS)}; may be repeated. [default: key]")  # fmt: skip
@click.option("--key", "key_name", metavar="NAME", help="Of this key only.")
@click.option("--since", metavar="WHEN", help="From this day or hour on (UTC), or for the last 24h, 7d.")
@click.option("--until", metavar="WHEN", help="To the end of this day, or to this hour (UTC).")
@click.option("--csv", "as_csv", is_flag=True, help="Print the answer as CSV.")
@store_options
@json_option
def command(
    by: tuple[str, ...], key_name: str | None, since: str | None, until: str | None, as_csv: bool, store: str | None,
    fleet: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Requests, tokens and dollars from the gateway's store, at the pools' prices.

    \b
    crosstie usage --store crosstie.db                       # by key
    crosstie usage --by day --since 7d --fleet fleet.toml
    crosstie usage --by key --by model --since 2026-11-01 --csv > november.csv

    Hours, days and months are UTC; a request is counted in the hour in which it ended. Refused requests cost
    nothing and are counted apart. Exit status 0, or 2 when something was wrong.
    """
    if as_csv and as_json:
        raise BadInput("--csv and --json: give one of them")
    wanted = _bys(by)
    begins = None if since is None else hour_of(_since(since))
    ends = None if until is None else _until(until)
    with opened(store, fleet) as at:
        keys = at.all_keys()
        key_id = None if key_name is None else named_key(keys, key_name).id
        rows = at.used(wanted, key_id=key_id, since=begins, until=ends)
        shares = _budget_shares(at, keys) if wanted == ["key"] else {}
    if as_json:
        documents = [_document(wanted, row) for row in rows]
        print_json({"by": wanted, "rows": documents, "total": _document([], total(rows))})
    elif as_csv:
        click.echo(_csv(wanted, rows), nl=False)
    else:
        _show(wanted, rows, shares)
    return 0


def _bys(given: tuple[str, ...]) -> list[By]:
    said = [word.strip() for part in given for word in part.split(",")] or ["key"]
    for word in said:
        if word not in BYS:
            raise BadInput(f"--by: '{word}' is not one of {', '.join(BYS)}")
    return cast(list[By], list(dict.fromkeys(said)))


def _since(text: str) -> float:
    return time() - span("--since", text) if text[-1:].isalpha() and not text.endswith("Z") else moment("--since", text)


def _until(text: str) -> int:
    """The first hour that is not included; an hour that has begun is."""
    at = moment("--until", text, after=True)
    hour = hour_of(at)
    return hour if hour == at else hour + 3600


def _budget_shares(store: Store, keys: list[Key]) -> dict[str, str]:
    """By key with a budget, how much of it is spent now."""
    spent = store.spent(time())
    shares = {}
    for key in keys:
        today, month = spent.get(key.id, (0.0, 0.0))
        said = [
            f"{share(used / budget)} of {dollars(budget)} {period}"
            for budget, used, period in ((key.usd_per_day, today, "today"), (key.usd_per_month, month, "this month"))
            if budget
        ]
        if said:
            shares[key.name] = ", ".join(said)
    return shares


def _document(by: list[By], row: Used) -> dict[str, object]:
    return {**dict(zip(by, row.of, strict=True)), **{name: getattr(row, name) for name in _NUMBERS}}


def _csv(by: list[By], rows: list[Used]) -> str:
    # Never rounded: 17 significant give a double back.
    cells = ([*map(_harmless, row.of), *(getattr(row, name) for name in _NUMBERS[:-1]), repr(row.usd)] for row in rows)
    return csv_text([*by, *_NUMBERS], cells)


def _harmless(name: str) -> str:
    """Spreadsheets take what begins like this for a formula."""
    return f"'{name}" if name[:1] in ("=", "+", "-", "@") else name


def _show(by: list[By], rows: list[Used], shares: dict[str, str]) -> None:
    out, most = console(), max((row.usd for row in rows), default=0.0)
    if not rows:
        say(out, "nothing was used")
        return
    if by[0] not in _TIMES:
        rows = sorted(rows, key=lambda row: -row.usd)
    columns = [*by, ">requests", ">refused", ">failed", ">input tokens", ">output tokens", ">cost", ""]
    if shares:
        columns.append("~of the budget")
    cells = [
        [*map(_named, by, row.of), *_numbers(row), _bar(row.usd / most if most else 0.0),
         *([shares.get(row.of[0], "-")] if shares else [])]
        for row in rows
    ]  # fmt: skip
    if len(rows) > 1:
        cells.append(["all", *[""] * (len(by) - 1), *_numbers(total(rows)), "", *([""] if shares else [])])
    show_table(out, columns, cells)


def _named(by: By, value: str) -> str:
    return value or ("no key" if by == "key" else "-")


def _numbers(row: Used) -> list[str]:
    return [*(f"{getattr(row, name):,}" for name in _NUMBERS[:-1]), dollars(row.usd)]


def _bar(fraction: float) -> str:
    whole, part = divmod(round(fraction * _BAR * 8), 8)
    return "█" * whole + (_EIGHTHS[part] if part else "")

"""`crosstie keys`: who may use the gateway, which models, and how much; alone, and in teams."""

from collections.abc import Callable
from pathlib import Path
from time import time
from typing import Any

import click
import msgspec

from crosstie.cli.options import json_option, option_group
from crosstie.cli.show import console, print_json, say, show_table
from crosstie.cli.times import moment, span, stamp, when
from crosstie.core.errors import BadInput, did_you_mean, near_names
from crosstie.core.figures import dollars, number
from crosstie_gateway.cli.store import named_key, names_in, opened, store_options
from crosstie_gateway.ledger.keys import PRIORITIES, Key, Team, digest, new_public_id, new_secret, shown
from crosstie_gateway.ledger.store import Store, named_team

_TEAM_LIMITS = ("rpm", "tpm", "usd_per_day", "usd_per_month")
_limit_options = option_group(
    click.option("--rpm", type=int, metavar="N", help="Requests a minute."),
    click.option("--tpm", type=int, metavar="N", help="Tokens a minute, prompts and answers."),
    click.option("--usd-per-day", type=float, metavar="X", help="Budget in dollars, UTC days."),
    click.option("--usd-per-month", type=float, metavar="X", help="Budget in dollars, UTC months."),
)
_LIMITS = (*_TEAM_LIMITS, "max_open")


@click.group("keys")
def command() -> None:
    """Keys of the gateway: who may use it, which models and classes, how much a minute, a day and a month.

    \b
    crosstie keys create alice --store crosstie.db --model llama-3.1-8b --rpm 60
    crosstie keys list --store crosstie.db
    crosstie keys rotate alice --grace 1h

    A key is printed once, when it is made, and alone on standard output; the store has its hash. Gateways that use
    the store follow any change within a second or two. Exit status 0, or 2 when something was wrong.
    """


def _lifting(*limits: str) -> Callable[[Any], Any]:
    names = click.Choice([limit.replace("_", "-") for limit in limits])
    return click.option("--no-limit", "lifted", multiple=True, type=names, help="Lift this limit; may be repeated.")


_permissions = option_group(
    click.option("--model", "models", multiple=True, metavar="M", help="Only this model; may be repeated."),
    click.option("--class", "classes", multiple=True, metavar="C", help="Only this class; may be repeated."),
    click.option("--priority", type=click.Choice(PRIORITIES), help="The most it may ask for. [new keys: normal]"),
    _limit_options,
    click.option("--team", metavar="T", help="The team that it belongs to: its limits hold too."),
    click.option("--max-open", type=int, metavar="N", help="Requests at once, waiting ones included."),
    click.option("--explain/--no-explain", "explains", default=None, help="It may ask why. [new keys: not]"),
    click.option("--expires", metavar="DATE", help="A day or time in UTC, or from now on: 30d."),
)


@command.command("create", epilog="Example: crosstie keys create alice --rpm 60 --usd-per-day 5")
@click.argument("name")
@_permissions
@store_options
@json_option
def create(name: str, store: str | None, fleet: Path | None, as_json: bool, **given: Any) -> int:
    """A new key. What is not limited here it may do without limit."""
    public_id, secret = new_public_id(), new_secret()
    changes = _changes(given)
    now = time()
    if changes.get("expires_at", now + 1) <= now:
        raise BadInput("--expires: is over already")
    with opened(store, fleet, create=True) as at:
        _in_team(at, changes)
        key = Key(public_id=public_id, name=name, digest=digest(secret), created_at=now, **changes)
        made = at.add_key(key)
    _warn(made, fleet)
    _tell_secret(made, shown(public_id, secret), as_json, f"key '{name}' was made")
    return 0


@command.command("list", epilog="Example: crosstie keys list --all")
@click.option("--all", "all_", is_flag=True, help="Revoked ones too.")
@store_options
@json_option
def list_(all_: bool, store: str | None, fleet: Path | None, as_json: bool) -> int:
    """All keys, with what they may do and what they have spent today and this month."""
    now = time()
    with opened(store, fleet) as at:
        keys = [key for key in at.all_keys() if all_ or key.revoked_at is None]
        spent = at.spent(now)
    if as_json:
        print_json([_document(key, spent.get(key.id, (0.0, 0.0)), now) for key in keys])
        return 0
    rows = [_row(key, spent.get(key.id, (0.0, 0.0)), now) for key in keys]
    columns = [
        "key", "state", ">requests/min", ">tokens/min", ">today", ">this month", "expires", "priority", "~models",
        "~classes", ">#", "id",
    ]  # fmt: skip
    show_table(console(), columns, rows)
    return 0


@command.command("show", epilog="Example: crosstie keys show alice")
@click.argument("name")
@store_options
@json_option
def show(name: str, store: str | None, fleet: Path | None, as_json: bool) -> int:
    """One key; NAME may also be its public id."""
    now = time()
    with opened(store, fleet) as at:
        key = named_key(at.all_keys(), name)
        spent = at.spent(now).get(key.id, (0.0, 0.0))
    said = _document(key, spent, now)
    if as_json:
        print_json(said)
        return 0
    out = console()
    for field, value in said.items():
        text = ", ".join(value) or "any" if isinstance(value, list) else "-" if value is None else str(value)
        say(out, f"{field.replace('_', ' '):>24}  {text}", hang=26)
    return 0


@command.command("update", epilog="Example: crosstie keys update alice --tpm 20000 --no-limit rpm")
@click.argument("name")
@_permissions
@click.option("--any-model", is_flag=True, help="No longer limited to models.")
@click.option("--any-class", is_flag=True, help="No longer limited to classes.")
@click.option("--no-team", is_flag=True, help="No longer of a team.")
@_lifting(*_LIMITS, "expires")
@store_options
@json_option
def update(
    name: str, any_model: bool, any_class: bool, no_team: bool, lifted: tuple[str, ...], store: str | None,
    fleet: Path | None, as_json: bool, **given: Any,
) -> int:  # fmt: skip
    """Changes what a key may do; what is not named stays. Models and classes are replaced by those given here."""
    changes = _changes(given)
    for flag, field, option in ((any_model, "models", "model"), (any_class, "classes", "class")):
        if flag and field in changes:
            raise BadInput(f"--any-{option} and --{option} contradict each other")
        if flag:
            changes[field] = ()
    _lifted_limits(lifted, changes)
    if no_team and "team" in changes:
        raise BadInput("--no-team and --team contradict each other")
    if no_team:
        changes["team_id"] = None
    if not changes:
        raise BadInput("nothing to change: name what should be")
    with opened(store, fleet) as at:
        _in_team(at, changes)
        key = at.change_key(name, lambda key: msgspec.structs.replace(_alive(key), **changes))
    _warn(key, fleet)
    _tell(key, as_json, f"key '{key.name}' was changed")
    return 0


@command.command("revoke", epilog="Example: crosstie keys revoke alice")
@click.argument("name")
@store_options
@json_option
def revoke(name: str, store: str | None, fleet: Path | None, as_json: bool) -> int:
    """Ends a key for good. Its usage is kept; requests in flight are finished."""
    now = time()

    def ended(key: Key) -> Key:
        # Twice is once.
        return key if key.revoked_at is not None else msgspec.structs.replace(key, revoked_at=now)

    with opened(store, fleet) as at:
        key = at.change_key(name, ended)
    _tell(key, as_json, f"key '{key.name}' is revoked")
    return 0


@command.command("rotate", epilog="Example: crosstie keys rotate alice --grace 1h")
@click.argument("name")
@click.option("--grace", default="0s", metavar="TIME", help="So long the old one is still good: 30m, 1h, 7d. [none]")
@store_options
@json_option
def rotate(name: str, grace: str, store: str | None, fleet: Path | None, as_json: bool) -> int:
    """A new secret for a key, which keeps its limits and its usage."""
    secret, now = new_secret(), time()
    seconds = span("--grace", grace)

    def turned(key: Key) -> Key:
        old, until = (key.digest, now + seconds) if seconds else (None, None)
        return msgspec.structs.replace(_alive(key), digest=digest(secret), old_digest=old, old_until=until)

    with opened(store, fleet) as at:
        key = at.change_key(name, turned)
    until = f"; the old one is good until {when(key.old_until)} UTC" if key.old_until else ""
    _tell_secret(key, shown(key.public_id, secret), as_json, f"key '{key.name}' has a new secret{until}")
    return 0


def _changes(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of a key, of the options that were given."""
    expires = given.pop("expires")
    changes = {name: value for name, value in given.items() if value not in (None, ())}
    for name in ("models", "classes"):
        if name in changes:
            changes[name] = tuple(dict.fromkeys(changes[name]))
    if expires is not None:
        is_span = expires[-1:].isalpha() and not expires.endswith("Z")
        changes["expires_at"] = time() + span("--expires", expires) if is_span else moment("--expires", expires)
    return changes


def _in_team(at: Store, changes: dict[str, Any]) -> None:
    """The team's number in the place of its name."""
    name = changes.pop("team", None)
    if name is not None:
        changes["team_id"] = named_team(at.all_teams(), name).id


def _warn(key: Key, fleet: Path | None) -> None:
    """Warns of names that the fleet does not have: slips, or models yet to come."""
    if fleet is None or not (key.models or key.classes):
        return
    models, classes = names_in(fleet)
    for kind, given, known in (("model", key.models, models), ("class", key.classes, classes)):
        for name in given:
            if name not in known:
                hint = did_you_mean(near_names(name, known)[:1])
                click.echo(f"key '{key.name}': {fleet} has no {kind} '{name}' now.{hint}", err=True)


def _alive(key: Key) -> Key:
    if key.revoked_at is not None:
        raise BadInput(f"key '{key.name}' was revoked {when(key.revoked_at)} UTC, which is for good")
    return key


def _tell_secret(key: Key, secret: str, as_json: bool, sentence: str) -> None:
    """Standard output has the secret alone, so that it can be piped to where secrets are kept."""
    if as_json:
        print_json({"secret": secret, **_document(key, None, time())})
        return
    click.echo(f"{sentence}. It is shown this once:", err=True)
    click.echo(secret)


def _tell(key: Key, as_json: bool, sentence: str) -> None:
    print_json(_document(key, None, time())) if as_json else click.echo(sentence)


def _document(key: Key, spent: tuple[float, float] | None, now: float) -> dict[str, Any]:
    return {
        "name": key.name,
        # As the log of requests has it.
        "number": key.id,
        "id": key.public_id,
        "state": key.state(now),
        "models": list(key.models),
        "classes": list(key.classes),
        # Its number: `keys teams` has its name.
        "team": key.team_id,
        "priority": key.priority,
        **{limit: getattr(key, limit) for limit in _LIMITS},
        "explains": key.explains,
        "created": stamp(key.created_at),
        "expires": stamp(key.expires_at),
        "revoked": stamp(key.revoked_at),
        "old_secret_until": stamp(key.old_until) if key.old_until and key.old_until > now else None,
        **({} if spent is None else {"usd_today": spent[0], "usd_this_month": spent[1]}),
    }


def _row(key: Key, spent: tuple[float, float], now: float) -> list[str]:
    return [
        key.name, key.state(now), number(key.rpm), number(key.tpm), _of_budget(spent[0], key.usd_per_day),
        _of_budget(spent[1], key.usd_per_month), when(key.expires_at), key.priority, ", ".join(key.models) or "any",
        ", ".join(key.classes) or "any", str(key.id), key.public_id,
    ]  # fmt: skip


def _lifted_limits(lifted: tuple[str, ...], changes: dict[str, Any]) -> None:
    """Adds to the changes the limits that are to be no more."""
    for limit in lifted:
        field = "expires_at" if limit == "expires" else limit.replace("-", "_")
        if field in changes:
            raise BadInput(f"--no-limit {limit} and --{limit} contradict each other")
        changes[field] = None


# Teams


@command.command("team", epilog="Example: crosstie keys team research --usd-per-month 500")
@click.argument("name")
@_limit_options
@_lifting(*_TEAM_LIMITS)
@store_options
@json_option
def team(name: str, lifted: tuple[str, ...], store: str | None, fleet: Path | None, as_json: bool, **given: Any) -> int:
    """Makes a team, or changes its limits; what is not named stays. They hold beside those of its keys."""
    changes = {limit: value for limit, value in given.items() if value is not None}
    _lifted_limits(lifted, changes)
    with opened(store, fleet, create=True) as at:
        known = any(known_team.name == name for known_team in at.all_teams())
        made = at.put_team(name, lambda before: msgspec.structs.replace(before, **changes))
    done = "changed" if known else "made"
    print_json(_team_document(made, [], None)) if as_json else click.echo(f"team '{name}' was {done}")
    return 0


@command.command("teams", epilog="Example: crosstie keys teams")
@store_options
@json_option
def teams(store: str | None, fleet: Path | None, as_json: bool) -> int:
    """All teams, with their keys and what they have spent today and this month."""
    with opened(store, fleet) as at:
        known, keys, spent = at.all_teams(), at.all_keys(), at.spent(time())
    documents = [
        _team_document(of, [key for key in keys if key.team_id == of.id], spent.get(of.account_id, (0.0, 0.0)))
        for of in known
    ]
    if as_json:
        print_json(documents)
        return 0
    rows = [
        [
            said["name"], number(said["rpm"]), number(said["tpm"]), _of_budget(said["usd_today"], said["usd_per_day"]),
            _of_budget(said["usd_this_month"], said["usd_per_month"]), ", ".join(said["keys"]) or "-",
        ]
        for said in documents
    ]  # fmt: skip
    show_table(console(), ["team", ">requests/min", ">tokens/min", ">today", ">this month", "~keys"], rows)
    return 0


def _of_budget(used: float, budget: float | None) -> str:
    return dollars(used) if budget is None else f"{dollars(used)} of {dollars(budget)}"


def _team_document(of: Team, keys: list[Key], spent: tuple[float, float] | None) -> dict[str, Any]:
    return {
        "name": of.name,
        "number": of.id,
        **{limit: getattr(of, limit) for limit in _TEAM_LIMITS},
        "created": stamp(of.created_at),
        **(
            {} if spent is None else {"usd_today": spent[0], "usd_this_month": spent[1], "keys": [k.name for k in keys]}
        ),
    }

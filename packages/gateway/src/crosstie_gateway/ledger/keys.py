"""API keys: what one may do, how its secret is made, and how it is told from others without being kept.

A key reads `ct-<public id>-<secret>`; only the secret's SHA-256 is stored. A slow hash, as for passwords, would gain
nothing: nobody guesses 256 random bits.
"""

import hashlib
import re
import secrets
import string
from typing import Literal, get_args

import msgspec

from crosstie.core.errors import BadInput

Priority = Literal["low", "normal", "high"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
_LETTERS = string.ascii_letters + string.digits
# Letters and digits only, so that a double click takes all of it: 62 ** 43 is more than 2 ** 256.
_SECRET_LENGTH = 43
_PUBLIC_BYTES = 6
_NAME = re.compile(r"[^\W_][\w.@+-]{0,99}")
# More than anybody means; beyond it a number is a slip, and may not fit a column.
_MOST_A_MINUTE, _LEAST_USD, _MOST_USD = 10**12, 1e-6, 1e12
# More keys than there will ever be.
TEAMS_FROM = 2**40
# Where numbers of token subjects begin, above all numbers of teams.
SUBJECTS_FROM = 2**50


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds since the epoch; None: never, or no limit. Empty `models` and `classes`: any."""

    # 0 until the store has given it one.
    id: int = 0
    public_id: str
    name: str
    digest: str
    # The secret before the last rotation, and how long it is still good.
    old_digest: str | None = None
    old_until: float | None = None
    models: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    # The most that it may ask for; requests that ask for nothing get normal, or this where it is less.
    priority: Priority = "normal"
    # Requests and tokens a minute, US dollars a day and a month (UTC).
    rpm: int | None = None
    tpm: int | None = None
    usd_per_day: float | None = None
    usd_per_month: float | None = None
    # Requests that it may have open at once; and whether it may ask for explanations of decisions.
    max_open: int | None = None
    explains: bool = False
    # The number of the team that it belongs to, whose limits hold beside its own.
    team_id: int | None = None
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None

    def state(self, now: float) -> str:
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"


class Team(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that several keys have in common."""

    # 0 until the store has given it one.
    id: int = 0
    name: str
    rpm: int | None = None
    tpm: int | None = None
    usd_per_day: float | None = None
    usd_per_month: float | None = None
    created_at: float = 0.0

    @property
    def account_id(self) -> int:
        """The number that its dollars and minutes are counted under, beside those of keys."""
        return TEAMS_FROM + self.id


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def new_public_id() -> str:
    return secrets.token_hex(_PUBLIC_BYTES)


def new_secret() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(_SECRET_LENGTH))


def shown(public_id: str, secret: str) -> str:
    """The key as its holder sends it."""
    return f"ct-{public_id}-{secret}"


def check(key: Key) -> Key:
    """The key itself, if it makes sense. Raises BadInput."""
    _check_name(key.name)
    for kind, names in (("model", key.models), ("class", key.classes)):
        if any(not name or name != name.strip() or not name.isprintable() for name in names):
            raise BadInput(f"{kind}: a name is empty, or has spaces around it or control characters in it")
    _check_limits(key, (("rpm", key.rpm), ("tpm", key.tpm), ("max-open", key.max_open)))
    return key


def check_team(team: Team) -> Team:
    _check_name(team.name)
    _check_limits(team, (("rpm", team.rpm), ("tpm", team.tpm)))
    return team


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise BadInput(f"name: {name!r} must be letters and digits, with . - _ @ + between, at most 100")


def _check_limits(of: Key | Team, by_number: tuple[tuple[str, int | None], ...]) -> None:
    for option, limit in by_number:
        if limit is not None and not 1 <= limit <= _MOST_A_MINUTE:
            raise BadInput(f"{option}: {limit} is not from 1 to {_MOST_A_MINUTE:,}; to end a key, revoke it")
    for option, budget in (("usd-per-day", of.usd_per_day), ("usd-per-month", of.usd_per_month)):
        if budget is not None and not _LEAST_USD <= budget <= _MOST_USD:
            raise BadInput(f"{option}: {budget:g} is not from {_LEAST_USD:g} to {_MOST_USD:g}; to end a key, revoke it")

"""Secrets, what a key may be given, and the calendar of budgets."""

import hashlib
import re
from datetime import UTC, datetime
from math import log2
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tests.run.ledger.test_store import key

from crosstie.core.errors import BadInput
from crosstie.core.usage import hour_of
from crosstie_gateway.ledger.keys import check, digest, new_public_id, new_secret, shown
from crosstie_gateway.ledger.tally import LocalTally
from crosstie_gateway.ledger.usage import day_end, day_name, month_end, month_name


def test_a_secret_has_256_bits_and_is_one_word() -> None:
    made = {new_secret() for _ in range(50)}
    assert len(made) == 50
    assert all(re.fullmatch(r"[A-Za-z0-9]{43}", one) for one in made)
    assert 43 * log2(62) >= 256
    token = shown(new_public_id(), new_secret())
    assert re.fullmatch(r"ct-[0-9a-f]{12}-[A-Za-z0-9]{43}", token)
    assert digest("x") == hashlib.sha256(b"x").hexdigest()


@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""}, {"name": "two words"}, {"name": "-x"}, {"name": "a" * 101}, {"name": "a\nb"}, {"name": "a\n"},
        {"name": "a/b"},
        {"models": ("",)}, {"models": (" m",)}, {"classes": ("a\tb",)},
        {"rpm": 0}, {"rpm": -1}, {"tpm": 10**13}, {"usd_per_day": 0.0}, {"usd_per_day": -1.0},
        {"usd_per_month": float("nan")}, {"usd_per_month": float("inf")},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_its_name(fields: dict[str, Any]) -> None:
    (field,) = fields
    said = {"models": "model", "classes": "class"}.get(field, field.replace("_", "-"))
    with pytest.raises(BadInput, match=f"^{said}: "):
        check(key(**fields))


@pytest.mark.parametrize("name", ["alice", "a", "team-1.prod_eu", "me@example.org", "Ærø", "7"])
def test_names_that_people_give(name: str) -> None:
    assert check(key(name)).name == name


def test_the_state_of_a_key() -> None:
    assert key().state(5.0) == "active"
    assert key(expires_at=5.0).state(4.9) == "active"
    assert key(expires_at=5.0).state(5.0) == "expired"
    assert key(expires_at=5.0, revoked_at=1.0).state(9.0) == "revoked"


@given(st.datetimes(datetime(1990, 1, 1), datetime(2090, 1, 1)))
def test_days_and_months_end_when_the_calendar_says(said: datetime) -> None:
    now = said.replace(tzinfo=UTC).timestamp()
    assert 0 < day_end(now) - now <= 86_400
    assert 0 < month_end(now) - now <= 31 * 86_400
    assert day_name(day_end(now) - 1) == day_name(now) != day_name(day_end(now))
    assert month_name(month_end(now) - 1) == month_name(now) != month_name(month_end(now))
    assert 0 <= now - hour_of(now) < 3600
    assert hour_of(now) % 3600 == 0


def test_the_end_of_a_year() -> None:
    at = datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()
    assert month_end(at) == day_end(at) == datetime(2027, 1, 1, tzinfo=UTC).timestamp()


def test_a_tally_counts_by_key_and_minute_and_forgets() -> None:
    tally = LocalTally()
    tally.add(1, 100, 1, 50)
    tally.add(1, 100, 1, -20)
    tally.add(2, 100, 1, 5)
    tally.add(1, 101, 1, 7)
    assert (tally.total(1, 100), tally.total(2, 100), tally.total(1, 101)) == ((2, 30), (1, 5), (1, 7))
    assert tally.total(3, 100) == tally.total(1, 99) == (0, 0)
    tally.add(1, 103, 1, 1)
    assert tally.total(1, 100) == (0, 0)
    assert tally.total(1, 101) == (1, 7)

"""Keys and usage in a store, the same on SQLite and PostgreSQL."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from crosstie.core.errors import BadInput, StoreFailed
from crosstie.core.usage import Used, total
from crosstie_gateway.ledger.keys import Key
from crosstie_gateway.ledger.schema import SCHEMA
from crosstie_gateway.ledger.store import News, Store
from crosstie_gateway.ledger.usage import Line, UsageBatch, UsageCounts

Opens = Callable[[], Store]


def key(name: str = "alice", **fields: Any) -> Key:
    usual: dict[str, Any] = {"name": name, "public_id": f"id-{name}", "digest": "00" * 32}
    return Key(**{**usual, **fields})


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


NOON = at("2026-11-15T12:00")


def batch(sequence: int, *lines: tuple[Line, UsageCounts], process: str = "p") -> UsageBatch:
    return UsageBatch(process, sequence, dict(lines))


def line(hour: int = NOON, key_id: int = 1, pool: str = "amd", outcome: str = "served", code: str = "") -> Line:
    return (hour, key_id, "m", "chat", pool, outcome, code)


def one(usd: float = 0.25) -> UsageCounts:
    return UsageCounts(requests=1, counted=1, input_tokens=10, output_tokens=5, usd=usd)


# Keys


def test_a_key_comes_back_as_it_was(store: Store, opens: Opens) -> None:
    full = key(
        old_digest="11" * 32, old_until=5.5, models=("a", "b'; DROP TABLE crosstie_keys"), classes=("é",),
        priority="high", rpm=1, tpm=10**12, usd_per_day=1e-6, usd_per_month=0.1, max_open=3,
        explains=True, created_at=1.25, expires_at=9e9,
    )  # fmt: skip
    made = store.add_key(full)
    assert made.id > 0
    assert made == msgspec.structs.replace(full, id=made.id)
    bare = store.add_key(key("bob"))
    assert bare.id not in (0, made.id)
    assert opens().all_keys() == [made, bare]


def test_a_name_is_used_once_even_after_it_was_revoked(store: Store) -> None:
    store.add_key(key(revoked_at=1.0))
    before = store.news(-1, 0.0).version
    with pytest.raises(BadInput, match="'alice' already"):
        store.add_key(key(public_id="another"))
    assert store.news(-1, 0.0).version == before


def test_a_change_is_seen_by_others_by_its_version(store: Store, opens: Opens) -> None:
    other = opens()
    seen = [other.news(-1, 0.0).version]
    store.add_key(key())
    seen.append(other.news(-1, 0.0).version)
    changed = store.change_key("alice", lambda old: msgspec.structs.replace(old, rpm=7))
    seen.append(other.news(-1, 0.0).version)
    assert len(set(seen)) == 3
    assert other.all_keys() == [changed]
    assert changed.rpm == 7
    # By its public id too, but a name goes first.
    assert store.change_key("id-alice", lambda old: msgspec.structs.replace(old, rpm=8)).rpm == 8
    store.add_key(key("id-alice", public_id="x"))
    assert store.change_key("id-alice", lambda old: old).name == "id-alice"


def test_a_change_that_makes_no_sense_changes_nothing(store: Store) -> None:
    made = store.add_key(key())
    with pytest.raises(BadInput, match="rpm: 0"):
        store.change_key("alice", lambda old: msgspec.structs.replace(old, rpm=0))
    with pytest.raises(BadInput, match=r"no key 'alic'\. Did you mean alice"):
        store.change_key("alic", lambda old: old)
    assert store.all_keys() == [made]


def test_changes_of_two_at_once_are_both_kept(store: Store, opens: Opens) -> None:
    store.add_key(key(rpm=1000))

    def count(own: Store) -> None:
        for _ in range(10):
            own.change_key("alice", lambda old: msgspec.structs.replace(old, rpm=(old.rpm or 0) + 1))

    _all_at_once(count, opens)
    assert store.all_keys()[0].rpm == 1030


# Teams


def test_a_team_is_made_changed_and_charged_for_what_its_keys_use(store: Store, opens: Opens) -> None:
    made = store.put_team("research", lambda one: msgspec.structs.replace(one, usd_per_day=5.0, rpm=3))
    other = store.put_team("sales", lambda one: one)
    assert (made.id, other.id) == (1, 2)
    assert made.account_id != other.account_id
    version = store.news(-1, NOON).version
    changed = store.put_team("research", lambda one: msgspec.structs.replace(one, rpm=None, tpm=7))
    assert (changed.id, changed.usd_per_day, changed.rpm, changed.tpm) == (1, 5.0, None, 7)
    assert opens().all_teams() == [changed, other]
    # Gateways hear of it.
    news = store.news(version, NOON)
    assert news.teams == [changed, other]
    assert news.keys == []
    alice, bob = store.add_key(key(team_id=made.id)), store.add_key(key("bob"))
    assert opens().all_keys()[0].team_id == made.id
    store.write(batch(1, (line(key_id=alice.id), one()), (line(key_id=bob.id), one())))
    # From now on it is another's.
    store.change_key("alice", lambda old: msgspec.structs.replace(old, team_id=other.id))
    store.write(batch(2, (line(key_id=alice.id), one(usd=1.0))))
    spent = store.news(-1, NOON).spent
    assert (spent[made.account_id], spent[other.account_id]) == ((0.25, 0.25), (1.0, 1.0))
    assert [(row.of, row.requests, row.usd) for row in store.used(["team"])] == [
        (("",), 1, 0.25),
        (("sales",), 2, 1.25),
    ]
    with pytest.raises(BadInput, match="usd-per-day"):
        store.put_team("research", lambda one: msgspec.structs.replace(one, usd_per_day=0.0))
    with pytest.raises(BadInput, match="name"):
        store.put_team("no name", lambda one: one)
    assert store.all_teams() == [changed, other]


# Usage


def test_a_batch_is_counted_once_however_often_it_is_tried(store: Store, opens: Opens) -> None:
    assert store.write(batch(1, (line(), one())))
    assert not opens().write(batch(1, (line(), one())))
    assert store.write(batch(2, (line(), one())))
    # One that comes late is an old one that was tried again.
    assert not store.write(batch(1, (line(), one())))
    assert store.write(batch(1, (line(), one()), process="q"))
    assert total(store.used(["key"])) == Used((), 3, 0, 0, 30, 15, 0.75)


def test_a_batch_that_fails_half_way_has_left_nothing(store: Store) -> None:
    store.write(batch(1, (line(), one())))
    broken = one()
    broken.counted = None  # type: ignore[assignment]
    with pytest.raises(StoreFailed):
        store.write(batch(2, (line(), one()), (line(pool="nvidia"), broken)))
    assert total(store.used(["key"])).requests == 1
    # And its number is not used up.
    assert store.write(batch(2, (line(), one()), (line(pool="nvidia"), one())))
    assert total(store.used(["key"])).requests == 3


def test_many_writers_lose_and_invent_nothing(store: Store, opens: Opens) -> None:
    """Each tries every batch twice, rows in different orders."""
    names = iter("abc")

    def write(own: Store) -> None:
        process = next(names)
        for sequence in range(1, 16):
            lines = [(line(pool=f"pool-{i}"), one(usd=0.5)) for i in range(6)]
            made = batch(sequence, *(lines if process == "a" else reversed(lines)), process=process)
            own.write(made)
            own.write(made)

    _all_at_once(write, opens)
    assert total(store.used(["pool"])) == Used((), 270, 0, 0, 2700, 1350, 135.0)
    assert {row.requests for row in store.used(["pool"])} == {45}


def _all_at_once(work: Callable[[Store], None], opens: Opens) -> None:
    failures: list[BaseException] = []

    def run(own: Store) -> None:
        try:
            work(own)
        except BaseException as error:  # noqa: BLE001 (told to the test, which fails)
            failures.append(error)

    threads = [threading.Thread(target=run, args=(opens(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_dollars_of_a_day_and_a_month(store: Store) -> None:
    store.add_key(key(usd_per_day=1.0))
    store.add_key(key("free"))
    store.write(
        batch(
            1,
            (line(at("2026-10-31T23:00")), one(1.0)),
            (line(at("2026-11-01T00:00")), one(2.0)),
            (line(at("2026-11-15T00:00")), one(4.0)),
            (line(at("2026-11-15T23:00")), one(8.0)),
            (line(at("2026-11-15T23:00"), key_id=2), one(16.0)),
            (line(at("2026-11-15T23:00"), key_id=0), one(32.0)),
        )
    )
    now = at("2026-11-15T12:34")
    assert store.spent(now) == {0: (32.0, 32.0), 1: (12.0, 14.0), 2: (16.0, 16.0)}
    assert store.spent(at("2026-10-31T01:00")) == {1: (1.0, 1.0)}
    assert store.spent(at("2026-12-01T00:00")) == {}


def test_news_are_of_budgets_and_of_keys_that_changed(store: Store) -> None:
    made = [store.add_key(key(usd_per_month=1.0)), store.add_key(key("free"))]
    store.write(batch(1, (line(key_id=1), one(1.0)), (line(key_id=2), one(2.0))))
    told = store.news(-1, NOON)
    assert (told.keys, told.spent) == (made, {1: (1.0, 1.0)})
    again = store.news(told.version, NOON)
    assert again == News(told.version, None, {1: (1.0, 1.0)})
    store.change_key("free", lambda old: msgspec.structs.replace(old, usd_per_day=5.0))
    changed = store.news(told.version, NOON)
    assert changed.keys is not None
    assert changed.keys[1].usd_per_day == 5.0
    assert changed.spent == {1: (1.0, 1.0), 2: (2.0, 2.0)}


def test_usage_by_anything_and_over_any_time(store: Store) -> None:
    store.add_key(key())
    store.write(
        batch(
            1,
            (line(at("2026-11-14T23:00")), one(1e-9)),
            (line(at("2026-11-15T00:00"), pool="nvidia", outcome="cut", code="upstream_cut"), one(2.0)),
            (
                line(at("2026-11-15T00:00"), key_id=0, outcome="refused", code="missing_api_key"),
                UsageCounts(requests=7),
            ),
            (line(at("2026-12-01T00:00"), key_id=9), one(4.0)),
        )
    )
    assert [(row.of, row.requests, row.refused, row.failed) for row in store.used(["key"])] == [
        (("",), 0, 7, 0), (("#9",), 1, 0, 0), (("alice",), 2, 0, 1),
    ]  # fmt: skip
    assert [row.of for row in store.used(["day", "pool"])] == [
        ("2026-11-14", "amd"), ("2026-11-15", "amd"), ("2026-11-15", "nvidia"), ("2026-12-01", "amd"),
    ]  # fmt: skip
    assert [(row.of, row.usd) for row in store.used(["month"])] == [(("2026-11",), 2.0 + 1e-9), (("2026-12",), 4.0)]
    assert store.used(["hour"])[0].of == ("2026-11-14T23",)
    assert [row.of[0] for row in store.used(["code"])] == ["", "missing_api_key", "upstream_cut"]
    # From an hour on, up to another that is not included.
    assert total(store.used(["key"], since=at("2026-11-15T00:00"), until=at("2026-12-01T00:00"))).requests == 1
    assert total(store.used(["key"], key_id=1)).usd == 2.0 + 1e-9
    assert store.used(["key"], since=at("2027-01-01T00:00")) == []
    assert store.used([], since=at("2027-01-01T00:00")) == []


def test_a_store_of_a_later_version_is_refused(store: Store, opens: Opens) -> None:
    with store.session(writes=True) as session:
        session.change("UPDATE crosstie_meta SET value = ? WHERE name = 'schema'", (SCHEMA + 1,))
    with pytest.raises(BadInput, match=f"its format is {SCHEMA + 1}, this one reads {SCHEMA}"):
        opens()


def test_a_store_of_another_format_is_refused(opens: Opens) -> None:
    with opens().session(writes=True) as session:
        session.change("UPDATE crosstie_meta SET value = 4 WHERE name = 'schema'")
    with pytest.raises(BadInput, match="made by another Crosstie: its format is 4, this one reads 5"):
        opens()


def test_a_store_is_made_by_many_at_once(opens: Opens) -> None:
    _all_at_once(lambda own: None, opens)
    made: list[Store] = []
    threads = [threading.Thread(target=lambda: made.append(opens())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert made[0].all_keys() == []

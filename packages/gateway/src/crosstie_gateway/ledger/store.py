"""All that is asked of a store of keys and usage, in SQL that `sqlite` and `postgres` share.

Several processes and machines write at once. Each write is one transaction and may be tried again: a batch of usage is
counted once.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, field, replace
from time import time
from typing import Any

import msgspec

from crosstie.core.errors import BadInput, StoreFailed, did_you_mean, near_names
from crosstie.core.usage import Used, total
from crosstie_gateway.ledger.keys import SUBJECTS_FROM, TEAMS_FROM, Key, Team, check, check_team
from crosstie_gateway.ledger.schema import SCHEMA, Transaction, create, meta, new_number
from crosstie_gateway.ledger.usage import DAY_S, By, UsageBatch, day_name, month_name

# For so long the last batch of a process that is no more is remembered, in case it was only away.
_REMEMBERED_S = 30 * DAY_S
_COLUMNS = Key.__struct_fields__
_TEAM_COLUMNS = Team.__struct_fields__
_LISTS = ("models", "classes")
_ADD_USAGE = """INSERT INTO crosstie_usage AS kept (hour, key_id, model, class, pool, outcome, code,
    requests, counted, input_tokens, output_tokens, usd) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (hour, key_id, model, class, pool, outcome, code) DO UPDATE SET
    requests = kept.requests + excluded.requests, counted = kept.counted + excluded.counted,
    input_tokens = kept.input_tokens + excluded.input_tokens,
    output_tokens = kept.output_tokens + excluded.output_tokens, usd = kept.usd + excluded.usd"""
_NAME_SUBJECT = """INSERT INTO crosstie_subjects AS kept (id, name, team_id) VALUES (?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET name = excluded.name, team_id = excluded.team_id"""
_TEAMS_OF = """SELECT id, team_id FROM crosstie_keys WHERE team_id IS NOT NULL
    UNION ALL SELECT id, team_id FROM crosstie_subjects WHERE team_id IS NOT NULL"""
_ADD_SPENT = """INSERT INTO crosstie_spent AS kept (period, key_id, usd) VALUES (?, ?, ?)
    ON CONFLICT (period, key_id) DO UPDATE SET usd = kept.usd + excluded.usd"""
_CLAIM = """INSERT INTO crosstie_batches AS kept (process, sequence, written_at) VALUES (?, ?, ?)
    ON CONFLICT (process) DO UPDATE SET
    sequence = excluded.sequence, written_at = excluded.written_at WHERE kept.sequence < excluded.sequence"""
_GROUPS: dict[By, str] = {
    "key": "u.key_id", "team": "u.key_id", "model": "u.model", "pool": "u.pool", "class": "u.class",
    "outcome": "u.outcome", "code": "u.code", "hour": "u.hour", "day": "u.hour / 86400 * 86400",
    "month": "u.hour / 86400 * 86400",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class News:
    """What a gateway hears of its store: the version of the keys, the keys if it is another, and dollars by key."""

    version: int
    # None: as they were.
    keys: list[Key] | None
    # By key, and by `Team.account_id`.
    spent: dict[int, tuple[float, float]]
    teams: list[Team] = field(default_factory=list)
    # Of tokens: their numbers, names and teams' numbers.
    subjects: list[tuple[int, str, int | None]] = field(default_factory=list)


class Store:
    """For one thread at a time. Every call raises StoreFailed where the store is away."""

    # How a column says that it numbers its rows, and how a row is kept from others until the transaction ends.
    identity = ""
    locked = ""
    # Which store it is that was opened: a number that was drawn when it was made.
    _number = 0

    def session(self, *, writes: bool) -> AbstractContextManager[Transaction]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def made(self, session: Transaction) -> bool:
        """Whether there are tables; nobody else makes any before this transaction has ended."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Makes the tables where there are none. Raises BadInput where they have another format."""
        try:
            with self.session(writes=True) as session:
                if not self.made(session):
                    create(session, self.identity)
                said = meta(session)
                if said["schema"] != SCHEMA:
                    kept = f"its format is {said['schema']}, this one reads {SCHEMA}"
                    raise BadInput(f"the store was made by another Crosstie: {kept}")
                self._number = said["store"]
        except BaseException:
            self.close()
            raise

    def _check_same(self, session: Transaction) -> dict[str, int]:
        """What the store says of itself. Raises StoreFailed where it is not the one that was opened, in which numbers
        of keys mean others."""
        said = meta(session)
        if said["store"] != self._number:
            raise StoreFailed(
                "another store is in the place of the one that was there at the start, which takes a new start"
            )
        return said

    # Keys

    def all_keys(self) -> list[Key]:
        with self.session(writes=False) as session:
            return _keys(session)

    def news(self, version: int, at: float) -> News:
        """What a gateway wants to hear, at once: keys if they are of another version, and what those with a budget have
        spent."""
        with self.session(writes=False) as session:
            now = self._check_same(session)["keys"]
            spent = _spent(session, at, with_budget=True)
            if now == version:
                return News(now, None, spent)
            return News(now, _keys(session), spent, _teams(session), _subjects(session))

    def add_key(self, key: Key) -> Key:
        check(key)
        with self.session(writes=True) as session:
            columns = _COLUMNS[1:]
            made = session.rows(
                f"INSERT INTO crosstie_keys ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "
                "ON CONFLICT (name) DO NOTHING RETURNING id",
                _values(key),
            )
            if not made:
                raise BadInput(
                    f"name: there is a key '{key.name}' already; usage is told by name, so each is used once"
                )
            _bump(session)
            return _key((made[0][0], *_values(key)))

    def change_key(self, name: str, edit: Callable[[Key], Key]) -> Key:
        with self.session(writes=True) as session:
            sql = f"SELECT {', '.join(_COLUMNS)} FROM crosstie_keys WHERE name = ? OR public_id = ?"
            rows = session.rows(sql + self.locked, (name, name))
            if not rows:
                raise unknown_key(name, [row[0] for row in session.rows("SELECT name FROM crosstie_keys")])
            # A name may be another's public id.
            key = next((key for key in map(_key, rows) if key.name == name), _key(rows[0]))
            changed = check(edit(key))
            columns = ", ".join(f"{column} = ?" for column in _COLUMNS[1:])
            session.change(f"UPDATE crosstie_keys SET {columns} WHERE id = ?", (*_values(changed), key.id))
            _bump(session)
            return changed

    # Teams

    def all_teams(self) -> list[Team]:
        with self.session(writes=False) as session:
            return _teams(session)

    def put_team(self, name: str, edit: Callable[[Team], Team]) -> Team:
        """Changes a team, or makes one without limits and changes that."""
        with self.session(writes=True) as session:
            known = _teams(session)
            before = next((team for team in known if team.name == name), None)
            # None is ever taken away, so the next number is nobody's.
            team = before or Team(id=max((team.id for team in known), default=0) + 1, name=name, created_at=time())
            changed = check_team(edit(team))
            if before is not None:
                session.change("DELETE FROM crosstie_teams WHERE id = ?", (before.id,))
            columns = ", ".join(_TEAM_COLUMNS)
            session.change(
                f"INSERT INTO crosstie_teams ({columns}) VALUES ({', '.join('?' * len(_TEAM_COLUMNS))})",
                msgspec.structs.astuple(changed),
            )
            _bump(session)
            return changed

    # Subjects of tokens

    def name_subjects(self, subjects: Sequence[tuple[int, str, int | None]]) -> None:
        """Keeps their names in usage and their teams, new ones and changed ones."""
        with self.session(writes=True) as session:
            self._check_same(session)
            known = set(_subjects(session))
            new = sorted(subject for subject in subjects if subject not in known)
            if new:
                session.each(_NAME_SUBJECT, new)
                # Other processes may be asked to go on with what they began here.
                _bump(session)

    # Usage

    def write(self, batch: UsageBatch) -> bool:
        """Counts a batch; False where it had been counted before."""
        # In one order everywhere, so that two who write the same rows do not wait for each other for ever.
        lines = sorted(batch.lines.items(), key=lambda item: item[0])
        spent: dict[tuple[str, int], float] = defaultdict(float)
        for (hour, key_id, *_), counts in lines:
            for period in (day_name(hour), month_name(hour)):
                spent[period, key_id] += counts.usd
        now = time()
        with self.session(writes=True) as session:
            self._check_same(session)
            if not session.change(_CLAIM, (batch.process, batch.sequence, now)):
                return False
            # A team is charged for what its keys have used while they were its.
            teams = dict(session.rows(_TEAMS_OF))
            for (period, key_id), usd in list(spent.items()):
                if key_id in teams:
                    spent[period, TEAMS_FROM + teams[key_id]] += usd
            session.each(_ADD_USAGE, [(*line, *astuple(counts)) for line, counts in lines])
            session.each(_ADD_SPENT, [(*of, usd) for of, usd in sorted(spent.items()) if usd])
            if batch.sequence == 1:
                session.change("DELETE FROM crosstie_batches WHERE written_at < ?", (now - _REMEMBERED_S,))
        return True

    def spent(self, at: float) -> dict[int, tuple[float, float]]:
        """Dollars of that day and that month by key."""
        with self.session(writes=False) as session:
            return _spent(session, at, with_budget=False)

    def used(
        self, by: Sequence[By], *, key_id: int | None = None, since: int | None = None, until: int | None = None
    ) -> list[Used]:
        """Sums by these, in the order of their values; `since` and `until` are hours, the latter not included."""
        asked = {"u.key_id = ?": key_id, "u.hour >= ?": since, "u.hour < ?": until}
        where = {condition: value for condition, value in asked.items() if value is not None}
        groups = [_GROUPS[group] for group in by]
        sums = (
            "SUM(CASE WHEN u.outcome = 'refused' THEN 0 ELSE u.requests END), "
            "SUM(CASE WHEN u.outcome = 'refused' THEN u.requests ELSE 0 END), "
            "SUM(CASE WHEN u.outcome IN ('failed', 'cut') THEN u.requests ELSE 0 END), "
            "SUM(u.input_tokens), SUM(u.output_tokens), SUM(u.usd)"
        )
        sql = (
            f"SELECT {', '.join([*groups, sums])} FROM crosstie_usage AS u "
            f"{'WHERE ' + ' AND '.join(where) if where else ''} "
            f"{'GROUP BY ' + ', '.join(groups) if groups else ''}"
        )
        with self.session(writes=False) as session:
            rows = session.rows(sql, list(where.values()))
            names = dict(
                session.rows("SELECT id, name FROM crosstie_keys UNION ALL SELECT id, name FROM crosstie_subjects")
            )
            sql = f"SELECT k.id, t.name FROM ({_TEAMS_OF}) AS k JOIN crosstie_teams AS t ON t.id = k.team_id"
            teams = dict(session.rows(sql)) if "team" in by else {}
        merged: dict[tuple[str, ...], list[Used]] = {}
        for row in rows:
            if row[len(by)] is None:
                # Sums over nothing.
                continue
            of = tuple(_said(group, value, names, teams) for group, value in zip(by, row, strict=False))
            requests, refused, failed, inputs, outputs, usd = row[len(by) :]
            used = Used(of, int(requests), int(refused), int(failed), int(inputs), int(outputs), float(usd))
            merged.setdefault(of, []).append(used)
        # Several rows are one where two of the store's values are said alike: days of a month, keys of a team.
        return [replace(total(alike), of=of) for of, alike in sorted(merged.items())]


def named_team(teams: Sequence[Team], name: str) -> Team:
    for team in teams:
        if team.name == name:
            return team
    known = [team.name for team in teams]
    raise BadInput(f"there is no team '{name}'.{did_you_mean(near_names(name, known)[:1])}")


def unknown_key(name: str, known: list[str]) -> BadInput:
    return BadInput(f"there is no key '{name}'.{did_you_mean(near_names(name, known)[:1])}")


def _said(by: By, value: Any, names: dict[int, str], teams: dict[int, str]) -> str:
    if by == "team":
        return teams.get(value, "")
    if by == "key":
        return names.get(value, "" if value == 0 else f"#{value}")
    if by == "hour":
        return f"{day_name(value)}T{value % DAY_S // 3600:02}"
    if by == "day":
        return day_name(value)
    return month_name(value) if by == "month" else str(value)


def _keys(session: Transaction) -> list[Key]:
    return [_key(row) for row in session.rows(f"SELECT {', '.join(_COLUMNS)} FROM crosstie_keys ORDER BY id")]


def _subjects(session: Transaction) -> list[tuple[int, str, int | None]]:
    rows = session.rows("SELECT id, name, team_id FROM crosstie_subjects")
    return [(int(number), name, team_id) for number, name, team_id in rows]


def _teams(session: Transaction) -> list[Team]:
    rows = session.rows(f"SELECT {', '.join(_TEAM_COLUMNS)} FROM crosstie_teams ORDER BY id")
    return [Team(**dict(zip(_TEAM_COLUMNS, row, strict=True))) for row in rows]


def _spent(session: Transaction, at: float, *, with_budget: bool) -> dict[int, tuple[float, float]]:
    day, month = day_name(at), month_name(at)
    those = (
        "AND (key_id IN (SELECT id FROM crosstie_keys WHERE usd_per_day IS NOT NULL OR usd_per_month IS NOT NULL) "
        f"OR (key_id > {TEAMS_FROM} AND key_id < {SUBJECTS_FROM}))"
    )
    rows = session.rows(
        f"SELECT key_id, period, usd FROM crosstie_spent WHERE period IN (?, ?) {those if with_budget else ''}",
        (day, month),
    )
    spent: dict[int, tuple[float, float]] = {}
    for key_id, period, usd in rows:
        before = spent.get(key_id, (0.0, 0.0))
        spent[key_id] = (usd, before[1]) if period == day else (before[0], usd)
    return spent


def _bump(session: Transaction) -> None:
    session.change("UPDATE crosstie_meta SET value = ? WHERE name = 'keys'", (new_number(),))


def _values(key: Key) -> tuple[Any, ...]:
    """All columns but the id."""
    said = {**msgspec.structs.asdict(key), **{column: json.dumps(getattr(key, column)) for column in _LISTS}}
    return tuple(said[column] if column != "explains" else int(key.explains) for column in _COLUMNS[1:])


def _key(row: tuple[Any, ...]) -> Key:
    said = dict(zip(_COLUMNS, row, strict=True))
    said["explains"] = bool(said["explains"])
    return Key(**{**said, **{column: tuple(json.loads(said[column])) for column in _LISTS}})


def failed(place: str, error: Exception) -> StoreFailed:
    return StoreFailed(f"{place}: {' '.join(str(error).split()) or type(error).__name__}")

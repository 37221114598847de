"""Keeps a gateway's keys and usage in step with a store: a component of its process.

The loop adds up what has ended. Twice a second a thread writes it in one transaction and looks what others changed. A
batch that failed, or may have, is tried again as it is: the store counts it once.
"""

import asyncio
import queue
import threading
import uuid
from time import monotonic, time

from crosstie.core.errors import StoreFailed
from crosstie.core.fleet import Fleet
from crosstie.core.histogram import Family, Samples
from crosstie_gateway.gateway.guard import Guard
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.gateway.record import Accounts
from crosstie_gateway.ledger.places import open_store
from crosstie_gateway.ledger.store import News, Store
from crosstie_gateway.ledger.usage import UsageBatch
from crosstie_gateway.service.process import Component, GatewayProcess
from crosstie_gateway.share.tally import BoardTally

# By number: a subject of tokens with what usage calls it, and the number of its team.
Subjects = dict[int, tuple[int, str, int | None]]
_EVERY_S = 0.5
_MOST_BACK_OFF_S = 5.0
# A store that has not answered for so long is reported, though it may yet do so.
_SILENT_S = 10.0
# What the last batch may take when the gateway ends.
_LAST_S = 10.0


class _Round:
    """One turn of the thread: what it is to write, and what it found."""

    def __init__(self, batch: UsageBatch | None, version: int, subjects: Subjects | None = None):
        self.batch, self.version, self.subjects = batch, version, subjects or {}
        self.began = monotonic()
        self.written = False
        self.failure: str | None = None
        self.news: News | None = None
        self.at = 0.0

    def run(self, store: Store) -> None:
        try:
            if self.subjects:
                # Before what they have used, so that it is charged to their teams.
                store.name_subjects(list(self.subjects.values()))
            if self.batch is not None:
                store.write(self.batch)
            self.written = True
        except Exception as error:  # noqa: BLE001 (a thread that ended would take all usage with it)
            self.failure = str(error) or type(error).__name__
        try:
            self.at = time()
            self.news = store.news(self.version, self.at)
        except Exception as error:  # noqa: BLE001 (as above)
            self.failure = self.failure or str(error) or type(error).__name__


class Ledger(Component):
    """For the store that the fleet file names; without one it does nothing."""

    def __init__(self, *, create: bool = True) -> None:
        """`create`: a SQLite file that is not there yet is made."""
        self._create = create
        self.accounts = Accounts()
        self.failures = 0
        self._store: Store | None = None
        self._rounds: queue.SimpleQueue[_Round | None] = queue.SimpleQueue()
        self._running: _Round | None = None
        self._batch: UsageBatch | None = None
        self._written: dict[int, float] = {}
        # Subjects of tokens that the store has not heard of, or not of their team.
        self._subjects: Subjects = {}
        self._process_id = ""
        self._sequence = 0
        self._version = -1
        self._back_off_s = 0.0
        self._not_before = 0.0
        self._failing = False

    async def start(self, process: GatewayProcess) -> None:
        self._process, gateway = process, process.gateway
        place = process.fleet.state.store
        if place is None:
            return
        self._loop = asyncio.get_running_loop()
        store = open_store(place, create=self._create)
        self._store = store
        # One for each process, also after a fork.
        self._process_id = uuid.uuid4().hex
        board = process.board
        self._guard = Guard(gateway.router, BoardTally(board, process.row) if board is not None else None)
        first = _Round(None, self._version)
        first.run(store)
        if first.failure is not None:
            raise StoreFailed(first.failure)
        self._took(first)
        self._heed(process.fleet)
        if gateway.context.guard is not None and not self._guard.keys:
            line = "keys are required and there are none yet: `crosstie keys create NAME` makes one"
            process.notify(Notice("no_keys", "warning", line))
        # What was estimated of a request becomes what it was, and what it was is written down.
        gateway.listeners += [self._guard.settle, self.accounts.add]
        self._thread = threading.Thread(target=self._work, args=(store,), name="ledger", daemon=True)
        self._thread.start()
        self._tick()

    def reloaded(self, fleet: Fleet) -> None:
        if self._store is not None:
            self._heed(fleet)

    def _heed(self, fleet: Fleet) -> None:
        self._process.gateway.context.guard = self._guard if fleet.state.keys else None

    @property
    def pending(self) -> int:
        """Requests that have ended and are not in the store yet."""
        return self.accounts.requests + (self._batch.requests if self._batch is not None else 0)

    # The loop's side

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_EVERY_S, self._tick)
        running, now = self._running, monotonic()
        if running is None:
            if now >= self._not_before:
                self._begin()
        elif now - running.began > _SILENT_S and not self._failing:
            self._fail("it does not answer")

    def _begin(self) -> None:
        if self._batch is None and self.accounts.requests:
            self._sequence += 1
            self._batch = UsageBatch(self._process_id, self._sequence, self.accounts.take())
        self._subjects |= self._guard.take_subjects()
        self._running = _Round(self._batch, self._version, dict(self._subjects))
        self._rounds.put(self._running)

    def _took(self, done: _Round) -> None:
        """What a turn of the thread has come to."""
        self._running, news = None, done.news
        if news is not None and news.keys is not None:
            self._guard.know(news.keys, news.teams, news.subjects)
            self._version = news.version
        if done.written:
            for subject, named in done.subjects.items():
                if self._subjects.get(subject) == named:
                    del self._subjects[subject]
        if done.written and done.batch is not None:
            self._batch = None
            for key_id, usd in done.batch.usd_by_key().items():
                self._written[key_id] = self._written.get(key_id, 0.0) + usd
        if news is not None and done.written:
            # Not while a batch is in doubt: it would be counted there and here.
            self._guard.spent(news.spent, self._written, done.at)
            self._written = {}
        if done.failure is not None:
            self._fail(done.failure)
            self._back_off_s = min(max(2 * self._back_off_s, _EVERY_S), _MOST_BACK_OFF_S)
            self._not_before = monotonic() + self._back_off_s
        elif self._failing:
            self._failing, self._back_off_s = False, 0.0
            line = "keys and usage: the store answers again, and nothing was lost"
            self._process.notify(Notice("ledger_recovered", "info", line))

    def _fail(self, why: str) -> None:
        self.failures += 1
        if not self._failing:
            self._failing = True
            line = f"keys and usage cannot be kept in step with their store, which is tried again: {why}"
            self._process.notify(Notice("ledger_failing", "error", line, why=why))

    # The thread's side

    def _work(self, store: Store) -> None:
        while (turn := self._rounds.get()) is not None:
            turn.run(store)
            try:
                self._loop.call_soon_threadsafe(self._took, turn)
            except RuntimeError:
                # The loop has ended without waiting: it was in too great a hurry to be told.
                break
        store.close()

    async def stop(self) -> None:
        if self._store is None:
            return
        self._timer.cancel()
        deadline = monotonic() + _LAST_S
        while (self.pending or self._running is not None) and monotonic() < deadline:
            if self._running is None and monotonic() >= self._not_before:
                self._begin()
            await asyncio.sleep(0.005)
        if self.pending:
            line = f"usage of {self.pending} requests is lost: the store could not be written to"
            self._process.notify(Notice("usage_lost", "error", line, requests=self.pending))
        self._rounds.put(None)
        if self._running is None:
            self._thread.join()

    def families(self) -> list[Family]:
        if self._store is None:
            return []
        refused = [({"code": code}, float(count)) for code, count in self._guard.refused.items()]
        pending: Samples = [({}, float(self.pending))]
        teams = [({"team": team.name}, team) for team in self._guard.teams]
        requests = [(of, float(team.requests)) for of, team in teams]
        tokens = [(of, float(team.tokens)) for of, team in teams]
        usd = [(of, team.usd) for of, team in teams]
        return [
            ("crosstie_team_requests_total", "counter", "Requests of a team's keys that have ended.", requests),
            ("crosstie_team_tokens_total", "counter", "Tokens of a team's keys, prompts and answers.", tokens),
            ("crosstie_team_usd_total", "counter", "Dollars that a team's keys were charged for.", usd),
            ("crosstie_key_refused_total", "counter", "Requests refused because of their key, by code.", refused),
            ("crosstie_ledger_pending", "gauge", "Requests whose usage is not in the store yet.", pending),
            ("crosstie_ledger_failures_total", "counter", "Times that the store failed.", [({}, float(self.failures))]),
        ]

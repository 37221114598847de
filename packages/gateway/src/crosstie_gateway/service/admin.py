"""The administrator's part of a gateway: changes over the fleet file, in every process, each reported. They hold until
undone, `reset`, or not allowed by the file any more; a restart forgets them."""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from crosstie.catalog.addresses import ON_SOCKET, is_found, read_address
from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.pools import read_pool
from crosstie.core.errors import BadInput, CrosstieError
from crosstie.core.fleet import REACH_FILES, Fleet, Pool
from crosstie.core.histogram import Family
from crosstie_gateway.gateway.notices import Level, Notice
from crosstie_gateway.service.admin_view import DecisionView, FleetView, RecentDecisions, fleet_view, merged
from crosstie_gateway.service.history import History
from crosstie_gateway.service.overlay import Action, Change, Laid, laid_over, pool_named, pool_of, with_change
from crosstie_gateway.service.process import GatewayProcess
from crosstie_gateway.service.served_view import DayCounts
from crosstie_gateway.service.worker_link import (
    Changes,
    ChangesRequest,
    Decisions,
    DecisionsRequest,
    Done,
    Failed,
    FleetAnswer,
    FleetRequest,
    HistoryAnswer,
    HistoryRequest,
    ReloadRequest,
    WorkerAnswer,
)

# What a reader's complaint calls the request that it was reading.
_REQUEST = Path("request")
# A command would run as the gateway's user, who would also read the file; a proxy would be sent any variable. KV events
# need a tokenizer.
_FILES = (*REACH_FILES, "tokenizer", "chat_template")
_FILE_ONLY = {"load_hook": "command", **dict.fromkeys(_FILES, "file"), "proxy": "proxy"}
_MOST_SAID = 400
# How long decisions name all pools after somebody has asked; who follows asks several times a second.
_EXPLAINED_S = 2.0
# Larger ones may be no float at all.
_MOST_WHOLE = 2**53
# What an action is called in reports, and the changes that hold after it; None: the same, over the file as it is now.
_Outcome = tuple[str, tuple[Change, ...] | None]


class Administration:
    """What may be asked of a running gateway; `door` is how it is reached."""

    def __init__(self, process: GatewayProcess):
        self.process, self.gateway = process, process.gateway
        self.recent, self.day = RecentDecisions(process.gateway), DayCounts(process.gateway)
        self.history = History(process.gateway, self.recent.sample)
        self.base = process.fleet
        self.changes: tuple[Change, ...] = ()
        # Grows with every change: the process that has the larger one knows better.
        self.revision = 0
        self.left_out: tuple[tuple[Change, str], ...] = ()
        self._drained = laid_over(self.base, ()).drained
        # What a fleet that is being loaded was made from; see `reloaded`.
        self._coming: tuple[Fleet, Laid] | None = None
        self._one_at_a_time = asyncio.Lock()
        # Asked for, by (action, done or refused).
        self.counts: Counter[tuple[str, str]] = Counter()
        read, process.prepared = process.prepared, lambda fleet: self._lay(read(fleet), self.changes)
        process.on(Changes, self._on_changes)
        process.on(ReloadRequest, lambda _: self._read_again())
        process.on(ChangesRequest, lambda _: Changes(self.revision, self.changes))
        process.on(HistoryRequest, self._look_back)
        process.on(DecisionsRequest, self._decisions_here)
        self._explaining: asyncio.TimerHandle | None = None

    async def join(self) -> None:
        """Takes over the other processes' changes, as after a restart."""
        for answer in await self.process.ask_others(ChangesRequest()):
            if isinstance(answer, Changes) and answer.revision > self.revision:
                with contextlib.suppress(CrosstieError):
                    self._on_changes(answer)
                    # While it starts it is no component yet that hears of the fleet which has been loaded.
                    self.reloaded()
        # Who is not counted among the processes yet has not taken over what only one other may know.
        self.process.on(FleetRequest, lambda _: FleetAnswer(fleet_view(self.gateway, self.base, self.day)))

    # What there is to see

    async def look(self) -> FleetView:
        """The fleet as all processes have it; workers that have not got so far yet answer otherwise."""
        return merged([answer.fleet for answer in await self.process.ask_all(FleetRequest(), FleetAnswer)])

    def document(self, view: FleetView) -> dict[str, Any]:
        return {
            **msgspec.structs.asdict(view),
            "changes": [change.words for change in self.changes],
            "dropped": [{"change": change.words, "why": why} for change, why in self.left_out],
        }

    async def decisions(self, request: DecisionsRequest) -> list[Decisions]:
        return await self.process.ask_all(request, Decisions)

    async def rows(self, request: DecisionsRequest) -> list[DecisionView]:
        """Those decisions of all processes, oldest first."""
        rows = [row for answer in await self.decisions(request) for row in answer.rows]
        return sorted(rows, key=lambda row: row.at)

    def _decisions_here(self, request: DecisionsRequest) -> Decisions:
        recent, name = self.recent, str(os.getpid())
        if request.explain:
            self._explain_for_a_while()
        if request.why:
            return Decisions(name, recent.taken, 0, recent.why(request.why))
        if request.moment is not None:
            return Decisions(name, recent.taken, 0, recent.of_moment(*request.moment, request.most))
        if request.after is None:
            return Decisions(name, recent.taken, 0, recent.rows(0, request.most))
        after = request.after.get(name, recent.taken)
        rows = recent.rows(after, request.most)
        return Decisions(name, recent.taken, max(recent.taken - after, 0) - len(rows), rows)

    def _explain_for_a_while(self) -> None:
        """Has decisions name all pools, which costs more, while someone goes on asking."""
        if self._explaining is not None:
            self._explaining.cancel()
        self.recent.follow(wanted=True)
        loop = asyncio.get_running_loop()
        self._explaining = loop.call_later(_EXPLAINED_S, lambda: self.recent.follow(wanted=False))

    def _look_back(self, asked: HistoryRequest) -> HistoryAnswer:
        slots = (asked.width_s, asked.end, asked.count)
        # The asking worker may have looked at the clock a moment earlier.
        self.history.turn()
        return HistoryAnswer(self.history.requests(*slots), self.history.pools(*slots))

    def close(self) -> None:
        self.day.close()
        self.history.close()

    # The fleet, with the changes over it

    def _lay(self, base: Fleet, changes: tuple[Change, ...]) -> Fleet:
        """The fleet with these changes, which hold once it is loaded."""
        laid = laid_over(base, changes)
        self._coming = (base, laid)
        return laid.fleet

    def reloaded(self) -> None:
        if self._coming is not None:
            (self.base, laid), self._coming = self._coming, None
            self._drained, self.changes, self.left_out = laid.drained, laid.kept, laid.left_out
            for change, why in laid.left_out:
                sentence = f"admin: dropped: {change.words}: {_one_line(why)}"
                self.process.notify(Notice("admin_dropped", "warning", sentence, change=change.words))
        for pool in self.gateway.live.pools:
            pool.draining = pool.name in self._drained
        for replica in self.gateway.live.replicas():
            replica.drain(replica.key in self._drained)

    def _adopt(self, changes: tuple[Change, ...]) -> None:
        """Serves the file's fleet with these changes. Raises CrosstieError before anything has changed."""
        try:
            self.process.load(self._lay(self.base, changes))
        except CrosstieError:
            self._coming = None
            raise

    def _on_changes(self, changes: Changes) -> WorkerAnswer:
        """Another worker has made these hold."""
        if changes.revision <= self.revision:
            return Failed("another change was made at the same moment")
        self._adopt(changes.changes)
        self.revision = changes.revision
        return Done()

    # Actions

    async def act(self, who: str, action: str, body: dict[str, Any]) -> dict[str, Any]:
        """One of `ACTIONS`; raises CrosstieError. Done or refused, it is reported."""
        link = self.process.link
        # Two workers that changed something at once would each hold what the other does not know of.
        async with self._one_at_a_time, contextlib.nullcontext() if link is None else link.turn():
            words = action
            try:
                await self.join()
                words, changes = _ACTIONS[action](self, body)
                answer = await self._hold(changes)
            except CrosstieError as error:
                self._report(who, action, words, f"refused: {error}")
                raise
            self._report(who, action, words, "done" if answer["changed"] else "nothing to change")
            return {"action": action, "what": words, **answer}

    def _report(self, who: str, action: str, words: str, result: str) -> None:
        came_to = "refused" if result.startswith("refused") else "done"
        self.counts[action, came_to] += 1
        # Numbered, since the supervisor takes equal lines of two processes for one.
        number = f"{os.getpid()}-{sum(self.counts.values())}"
        sentence = f"admin: key {who}: {_one_line(words)}: {_one_line(result)} [{number}]"
        level: Level = "warning" if came_to == "refused" else "info"
        self.process.notify(Notice("admin_change", level, sentence, key=who, action=action, result=came_to))

    def families(self) -> list[Family]:
        samples = [({"action": action, "result": result}, float(n)) for (action, result), n in self.counts.items()]
        return [("crosstie_admin_changes_total", "counter", "Changes that administrators asked for.", samples)]

    async def _hold(self, changes: tuple[Change, ...] | None) -> dict[str, Any]:
        """Makes these changes hold in all processes; None: reads the file again."""
        if changes is None:
            self._read_again()
            return self._done(self.left_out, await self.process.ask_others(ReloadRequest()))
        if changes == self.changes:
            return self._done() | {"changed": False}
        laid = laid_over(self.base, changes)
        for change, why in laid.left_out:
            # What was drained may go with its pool; any other change is not given up for a new one.
            if change.action != "drain":
                raise BadInput(why if change not in self.changes else f"it would undo `{change.words}`: {why}")
        self._adopt(laid.kept)
        self.revision += 1
        return self._done(laid.left_out, await self.process.ask_others(Changes(self.revision, self.changes)))

    def _done(
        self, left_out: tuple[tuple[Change, str], ...] = (), answers: Sequence[WorkerAnswer] = ()
    ) -> dict[str, Any]:
        """`answers`: of the other workers, which have been asked to do the same."""
        return {
            "changed": True,
            "dropped": [change.words for change, _ in left_out],
            "warnings": self._warnings(),
            "processes": 1 + len(answers),
            "refused_by": [answer.why for answer in answers if isinstance(answer, Failed)],
        }

    def _warnings(self) -> list[str]:
        return [
            f"no backend is left for {model}: all of them are drained"
            for model, pools in self.gateway.live.by_model.items()
            if all(pool.draining or all(replica.draining for replica in pool.replicas) for pool in pools)
        ]

    def _with(self, wanted: Change) -> _Outcome:
        return wanted.words, with_change(self.changes, wanted)

    def _undrain(self, body: dict[str, Any]) -> _Outcome:
        drained = self._target("drain", body)
        # By its address alone: the file may have given a backend to another pool since.
        left = [change for change in self.changes if change.action != "drain" or change.words != drained.words]
        if drained.backend is None and pool_named(self.gateway.live.fleet, drained.pool or "").drained:
            left.append(Change(action="admit", pool=drained.pool))
        return f"un{drained.words}", tuple(left)

    def _target(self, action: Literal["drain", "remove"], body: dict[str, Any]) -> Change:
        """An existing pool by name or backend by address; anything else is a slip."""
        given, fleet = _only(body, "pool", "backend"), self.gateway.live.fleet
        if len(given) != 1:
            raise BadInput(f"name what to {action}: a pool, or a backend")
        if given[0] == "pool":
            pool, backend = pool_named(fleet, _text(body, "pool")), None
        else:
            backend = _text(body, "backend")
            if not any(backend in each.backends for each in fleet.pools):
                # In another form than the file's, perhaps.
                backend = read_address(_REQUEST, "backend", backend)
            pool = pool_of(fleet, backend)
        removes: Action = "remove-backend" if backend else "remove-pool"
        return Change(action="drain" if action == "drain" else removes, pool=pool.name, backend=backend)

    def _add(self, body: dict[str, Any]) -> _Outcome:
        given = _only(body, "pool", "backend")
        if isinstance(body.get("pool"), dict):
            if len(given) > 1:
                raise BadInput("a pool that is added names its backends itself: leave `backend` out")
            made = self._read_pool(body["pool"])
            return self._with(Change(action="add-pool", pool=made.name, made=made))
        if set(given) != {"pool", "backend"}:
            raise BadInput("give a pool's name and a backend's address, or a pool as a table of the fleet file")
        at = read_address(_REQUEST, "backend", _text(body, "backend"))
        _check_named(at)
        return self._with(Change(action="add-backend", pool=_text(body, "pool"), backend=at))

    def _read_pool(self, raw: dict[str, Any]) -> Pool:
        for key, kind in _FILE_ONLY.items():
            if key in raw:
                raise BadInput(f"pool.{key}: only the fleet file may name a {kind}")
        made = read_pool(self.process.catalog, _REQUEST, "pool", raw)
        of_models = [at for hosted in made.hosts for at in hosted.backends]
        for at in (*made.backends, *made.led_backends, *of_models):
            _check_named(at)
        named = {pool.api_key_env for pool in self.base.pools}
        if made.api_key_env is not None and made.api_key_env not in named:
            # Or any variable of this process could be sent to any address.
            raise BadInput("pool.api_key_env: names a variable that no pool of the fleet file names")
        return made

    def _weight(self, body: dict[str, Any]) -> _Outcome:
        _only(body, "weights")
        given = body.get("weights")
        if not isinstance(given, dict) or not given:
            raise BadInput('weights: give them by pool, as {"weights": {"chat-mi300x": 3}}')
        for name, weight in given.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise BadInput(f"weights.{name}: is no number")
            if isinstance(weight, int) and abs(weight) > _MOST_WHOLE:
                raise BadInput(f"weights.{name}: is too large")
        return self._with(Change(action="weight", weights={name: float(weight) for name, weight in given.items()}))

    def _reset(self, body: dict[str, Any]) -> _Outcome:
        _only(body)
        self.left_out = ()
        return f"reset of {len(self.changes)} changes", ()

    def _reload(self, body: dict[str, Any]) -> _Outcome:
        _only(body)
        return "reload", None

    def _read_again(self) -> WorkerAnswer:
        if self.process.file is None:
            raise BadInput("this gateway was started without a fleet file")
        self.process.read_again(self.process.file)
        return Done()

    def config(self) -> str:
        """The fleet as it is served, as a file; comments name the changes."""
        said = [f"# Changed by an administrator: {change.words}" for change in self.changes]
        return "\n".join([*said, fleet_text(self.gateway.live.fleet)])


def _check_named(address: str) -> None:
    if address.startswith(ON_SOCKET):
        raise BadInput(f"{address}: only the fleet file may name a socket of this machine")
    if is_found(address):
        raise BadInput(f"{address}: names that are looked up again and again are the fleet file's; give addresses")


def _only(body: dict[str, Any], *keys: str) -> list[str]:
    for key in body:
        if key not in keys:
            known = f"it takes {', '.join(keys)}" if keys else "it takes nothing"
            raise BadInput(f"'{key}' is unknown here: {known}")
    return list(body)


def _text(body: dict[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise BadInput(f"{key}: {'missing' if value is None else 'is no text'}")
    return value


def _one_line(text: str) -> str:
    """A request's words as one line, so that they cannot forge another in the log."""
    flat = "".join(sign if sign.isprintable() else " " for sign in text)
    return flat if len(flat) <= _MOST_SAID else flat[:_MOST_SAID] + "..."


_ACTIONS: dict[str, Callable[[Administration, dict[str, Any]], _Outcome]] = {
    "drain": lambda admin, body: admin._with(admin._target("drain", body)),
    "undrain": Administration._undrain,
    "add": Administration._add,
    "remove": lambda admin, body: admin._with(admin._target("remove", body)),
    "weight": Administration._weight,
    "reload": Administration._reload,
    "reset": Administration._reset,
}
ACTIONS = tuple(_ACTIONS)

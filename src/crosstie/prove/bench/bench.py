"""A benchmark: several loads on several endpoints in turn, repeated, each after a warm-up; and the limit of each."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from crosstie.catalog.tokenizer import Tokenizer
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet
from crosstie.core.progress import OnProgress, no_progress
from crosstie.prove.bench.endpoint import BenchEndpoint, texts_by_engine, texts_by_file, words_by_engine
from crosstie.prove.bench.gpus import GpuUse, GpuWatch
from crosstie.prove.bench.limit import FoundLimit, find_limit
from crosstie.prove.bench.loads import BenchLengths, BenchLoad, by_phase, made, phases_of
from crosstie.prove.bench.measure import BenchRun, Giving, Interrupt, SenderJob, Senders, run_sessions, senders_for
from crosstie.prove.bench.resume import EarlierRun
from crosstie.prove.bench.server_counts import server_counts
from crosstie.prove.bench.summary import PointResult, of_runs
from crosstie.prove.replay.outcomes import ClassTargets, targets_of
from crosstie.prove.replay.prompts import Sizing, Wording, cut_text, text
from crosstie.prove.replay.texts import PromptTexts
from crosstie.prove.replay.traffic import TimedRequest

# Requests of each client, and seconds of arrivals, where nobody says.
_ROUNDS, _SECONDS = 10, 60.0
_FEWEST = 20
# A request takes at least so long: bounds what a closed loop may send in a time.
_SHORTEST_S = 0.02
# Prompts from which bytes a token are learnt: by share of the usual length, with answers of a few tokens.
_SIZED = (0.25, 0.5, 0.75, 1.0)
_SIZED_TOKENS = 4
# Warm-up that nobody asked for otherwise: a request of each client, or these seconds of arrivals, up to so many.
_WARM_S, _MOST_WARM = 5.0, 64
# Requests one by one before a limit is looked for, and the share of their rate below which requests hardly ever meet.
_ALONE, _RARELY = 6, 0.05
# Requests of each client from which on there are some in the middle of a run: neither its first nor its last.
_SETTLING_ROUNDS = 3
# Requests that a percentile must have beyond it to be told.
_BEYOND = 10


@dataclass(frozen=True)
class Settings:
    """How loads are made and what answers are held against; None is "nobody said"."""

    lengths: BenchLengths = field(default_factory=BenchLengths)
    requests: int | None = None
    seconds: float | None = None
    repeats: int = 1
    warm_up: int | None = None
    targets: ClassTargets = field(default_factory=ClassTargets)
    speed: float = 1.0
    seed: int = 0
    senders: int | None = None
    api_key: str | None = None
    # Counts answers of servers that do not, and bytes a token.
    tokenizer: str | None = None
    chat: bool = True
    ignore_eos: bool = True
    # All clients of a closed loop begin at once, as most benchmarks have it.
    lockstep: bool = False
    more: Mapping[str, object] = field(default_factory=dict)
    # What prompts are cut from; None: filler.
    prompts: PromptTexts | None = None
    # Whose bill the answers are held against.
    fleet: Fleet | None = None
    # Nothing is sent but these requests: whoever records or bills them has no others.
    alone: bool = False

    @property
    def told(self) -> dict[str, object]:
        """What a file says of how its points were measured, besides lengths, targets and speed."""
        names = ("requests", "seconds", "repeats", "warm_up", "seed", "chat", "ignore_eos", "lockstep")
        own = {"more": dict(self.more), "prompts_sha256": self.prompts.sha256 if self.prompts else None}
        return {name: getattr(self, name) for name in names} | own

    def count(self, load: BenchLoad) -> int | None:
        """Requests of one run; None where the clock decides."""
        if self.requests is not None:
            return self.requests
        if load.clients is None:
            return None
        if self.seconds is None:
            return max(_ROUNDS * load.clients, _FEWEST)
        return max(round(load.clients * self.seconds / _SHORTEST_S), _FEWEST)

    def run_seconds(self, load: BenchLoad) -> float | None:
        if load.clients is not None or self.requests is not None:
            return None
        return self.seconds or (None if load.requests_per_s is None else _SECONDS)


@dataclass
class Measured:
    """What one endpoint showed."""

    endpoint: BenchEndpoint
    sizing: Sizing
    points: list[PointResult] = field(default_factory=list)
    limit: FoundLimit | None = None


@dataclass
class Bench:
    settings: Settings
    measured: list[Measured]
    interrupted: bool = False
    # All that was asked for was measured.
    finished: bool = False
    # What watched the GPUs of each endpoint; empty: nothing.
    gpus: tuple[str, ...] = ()


class _Session:
    """What runs share: senders, GPUs, and numbers of runs, so that no two have the same text."""

    def __init__(
        self, settings: Settings, senders: Senders, interrupt: Interrupt, watches: Mapping[str, GpuWatch],
        on_progress: OnProgress,
    ):  # fmt: skip
        """`watches`: by URL of the endpoint whose GPUs they watch."""
        self.settings, self.senders, self.interrupt, self.watches = settings, senders, interrupt, watches
        self.on_progress = on_progress
        # Of this process and this moment of it: a server's cache may still hold what another benchmark sent.
        self._salt = int.from_bytes(os.urandom(4))
        self._runs = 0
        # By URL: about how long a request took when last asked.
        self._request_s: dict[str, float] = {}

    def sized(self, endpoint: BenchEndpoint, sizing: Sizing) -> Sizing:
        """Learnt from a few prompts of several lengths: what the engine counted of them."""
        if self.settings.prompts is not None:
            sizing = self._texts_sized(endpoint, sizing, self.settings.prompts)
        elif not sizing.words and (words := words_by_engine(endpoint, self.settings.api_key)):
            sizing = sizing.with_words(words, "the engine's /tokenize")
        usual = made(BenchLoad(clients=1), self.settings.lengths, _FEWEST, None, self.settings.seed)
        tokens = max(round(sum(request.input_tokens for request in usual) / len(usual)), 8)
        asked = [TimedRequest(0.0, max(round(tokens * share), 8), _SIZED_TOKENS) for share in _SIZED]
        run = self._sent(endpoint, sizing, BenchLoad(clients=1), asked, f"{endpoint.name}: how long prompts are")
        wording = self._wording(endpoint, sizing)
        served = [(number, outcome) for number, outcome in enumerate(run.outcomes) if outcome.served]
        if not served and not run.interrupted:
            raise BadInput(f"{endpoint.url}: {run.outcomes[0].error if run.outcomes else 'no answer'}")
        write = text if sizing.texts is None else cut_text
        sizes = [len(write(outcome.request, number, wording.salt, sizing)) for number, outcome in served]
        later = self.settings.lengths.output_tokens - 1
        self._note_time(endpoint, [outcome.ttft_s + outcome.tpot_s * later for _, outcome in served])
        asked_for = [outcome.request.input_tokens for _, outcome in served]
        return sizing.settled(sizes, asked_for, [outcome.input_tokens for _, outcome in served])

    def _texts_sized(self, endpoint: BenchEndpoint, sizing: Sizing, texts: PromptTexts) -> Sizing:
        if self.settings.tokenizer:
            counted, by = texts_by_file(Tokenizer(Path(self.settings.tokenizer)), texts), "the tokenizer's file"
        else:
            self.on_progress(0, 0, f"{endpoint.name}: tokens of {len(texts.pieces):,} pieces of text")
            counted, by = texts_by_engine(endpoint, self.settings.api_key, texts), "the engine's /tokenize"
        return sizing._replace(words=(), texts=counted, counted_by=by if counted.tokens else sizing.counted_by)

    def warm(self, endpoint: BenchEndpoint, sizing: Sizing, load: BenchLoad) -> None:
        count = self.settings.warm_up
        if count is None:
            usual = load.clients or round((load.requests_per_s or 1.0) * _WARM_S)
            count = min(max(usual, 1), _MOST_WARM)
        if count and not self.interrupt.asked:
            clients = min(load.clients or count, count)
            asked = made(BenchLoad(clients=clients), self.settings.lengths, count, None, self.settings.seed + 1_000_003)
            run = self._sent(endpoint, sizing, BenchLoad(clients=clients), asked, f"{endpoint.name}: warm-up")
            self._note_time(endpoint, [outcome.e2e_s for outcome in run.outcomes if outcome.served])

    def _note_time(self, endpoint: BenchEndpoint, seconds: Sequence[float]) -> None:
        """The median: an engine may take long over the first one."""
        known = [value for value in seconds if not math.isnan(value)]
        if known:
            self._request_s[endpoint.url] = median(known)

    def _starts_s(self, endpoint: BenchEndpoint, load: BenchLoad, requests: int) -> list[float]:
        """Clients begin one by one over about the time of a request, as if they had been at it before."""
        clients = load.clients or 0
        if self.settings.lockstep or clients < 2 or requests < _SETTLING_ROUNDS * clients:
            return []
        return [self._request_s.get(endpoint.url, 0.0) * number / clients for number in range(clients)]

    def measured(
        self, endpoint: BenchEndpoint, sizing: Sizing, load: BenchLoad, repeat: int, *, count: int | None = None,
        giving: bool = False, told: str = "",
    ) -> BenchRun:  # fmt: skip
        """One run, with what the server counted and GPUs did meanwhile."""
        send = self._conversed if load.turns is not None else self._requested
        sent = partial(send, endpoint, sizing, load, repeat, told, count=count, giving=giving)
        run = _counted(sent, endpoint.url, self.settings.api_key)
        watch = self.watches.get(endpoint.url)
        return replace(run, gpus=_serving(endpoint, watch.over(*run.watched(self.settings.speed)))) if watch else run

    def _requested(
        self, endpoint: BenchEndpoint, sizing: Sizing, load: BenchLoad, repeat: int, told: str, *,
        count: int | None, giving: bool,
    ) -> BenchRun:  # fmt: skip
        """Requests that know nothing of each other."""
        settings = self.settings
        count = settings.count(load) if count is None else count
        asked = made(load, settings.lengths, count, settings.run_seconds(load), settings.seed + repeat)
        senders = settings.senders or senders_for(load, asked, settings.speed, self.senders.most + 1)
        until = settings.seconds if load.clients is not None and settings.requests is None else None
        run = self._sent(
            endpoint, sizing, load, asked, f"{endpoint.name}, {load.name}{told}", senders=senders,
            starts_s=self._starts_s(endpoint, load, len(asked)), until_s=until or math.inf,
            giving=Giving(settings.targets, len(asked)) if giving else None,
        )  # fmt: skip
        if load.schedule:
            run = replace(run, phases=by_phase(phases_of(load.schedule), run.outcomes))
        return run

    def _conversed(
        self, endpoint: BenchEndpoint, sizing: Sizing, load: BenchLoad, repeat: int, told: str, **_: object
    ) -> BenchRun:
        settings, sessions, turns = self.settings, load.clients or 1, load.turns or 1
        new = made(BenchLoad(clients=1), settings.lengths, sessions * turns, None, settings.seed + repeat)
        return run_sessions(
            self._job(endpoint, sizing, load), [new[at::sessions] for at in range(sessions)], load.pause_s,
            lambda: self.interrupt.asked,
            lambda done: self.on_progress(done, len(new), f"{endpoint.name}, {load.name}{told}"),
        )  # fmt: skip

    def _sent(
        self, endpoint: BenchEndpoint, sizing: Sizing, load: BenchLoad, asked: Sequence[TimedRequest], told: str, *,
        senders: int = 1, **more: Any,
    ) -> BenchRun:  # fmt: skip
        """`more`: of the job."""
        job = self._job(endpoint, sizing, load, requests=list(enumerate(asked)), **more)

        def on_progress(done: int, total: int, _what: str) -> None:
            # How many a closed loop will send in its time, nobody knows.
            self.on_progress(done, total if math.isinf(job.until_s) else 0, told)

        return self.senders.run(job, senders, on_progress)

    def _job(self, endpoint: BenchEndpoint, sizing: Sizing, load: BenchLoad, **more: Any) -> SenderJob:
        settings = self.settings
        self._runs += 1
        return SenderJob(
            endpoint.url, self._wording(endpoint, sizing), load, speed=settings.speed, api_key=settings.api_key,
            tokenizer=settings.tokenizer, **more,
        )  # fmt: skip

    def _wording(self, endpoint: BenchEndpoint, sizing: Sizing) -> Wording:
        settings = self.settings
        return Wording(
            endpoint.model, sizing, (self._salt + self._runs) & 0xFFFFFFFF, settings.chat, settings.ignore_eos,
            tuple(settings.more.items()),
        )  # fmt: skip


def _counted(send: Callable[[], BenchRun], url: str, api_key: str | None) -> BenchRun:
    """A run with what the server counts of it."""
    before, run, after = server_counts(url, api_key), send(), server_counts(url, api_key)
    return run if before is None or after is None else replace(run, counted=after.since(before))


def _serving(endpoint: BenchEndpoint, uses: list[GpuUse]) -> list[GpuUse]:
    """Of all GPUs of a machine, those that drew most: as many as the endpoint has, where that is known."""
    said = endpoint.conditions.get("num_accelerators") or endpoint.conditions.get("tp") or ""
    count = int(said) if said.isdigit() else len(uses)
    return sorted(uses, key=lambda use: -use.power_w)[:count]


def fitted(settings: Settings, endpoints: Sequence[BenchEndpoint]) -> Settings:
    """What one of the endpoints would refuse as too long, none is asked."""
    lengths = settings.lengths
    said = [lengths.longest, *(endpoint.longest for endpoint in endpoints)]
    longest = min((value for value in said if value is not None), default=None)
    if longest is None:
        return settings
    room = (longest - 2.0) / (lengths.input_tokens + lengths.output_tokens) - 1.0
    vary = min(lengths.vary, max(room, 0.0)) if lengths.trace is None else 0.0
    return replace(settings, lengths=replace(lengths, longest=longest, vary=vary))


def bench(
    endpoints: Sequence[BenchEndpoint],
    loads: Sequence[BenchLoad],
    settings: Settings,
    *,
    limit: bool = False,
    sizing: Sizing | None = None,
    gpus: Sequence[str] = (),
    earlier: EarlierRun | None = None,
    on_progress: OnProgress = no_progress,
    on_point: Callable[[Bench], object] = lambda bench: None,
) -> Bench:
    """`limit`: look for the highest rate within targets instead, from the first load's rate on. `sizing`: where a
    tokenizer has said already how long tokens are. `gpus`: as GpuWatch, one for all endpoints or one for each.
    `earlier`: points that are not measured again. `on_point`: told after every load."""
    if len(gpus) not in (0, 1, len(endpoints)):
        raise BadInput(f"{len(gpus)} sources of GPU metrics for {len(endpoints)} endpoints: give one, or one for each")
    if limit and not (settings.targets.ttft or settings.targets.tpot):
        raise BadInput("a limit needs a target to be within: --ttft-ms p95=1000 or --tpot-ms p90=50")
    settings = fitted(settings, endpoints)
    with ExitStack() as held:
        interrupt = held.enter_context(Interrupt())
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        senders = held.enter_context(Senders(interrupt, settings.senders or max(processors - 1, 1)))
        opened = {source: held.enter_context(GpuWatch(source)) for source in dict.fromkeys(gpus)}
        of_each = list(gpus) * (len(endpoints) if len(gpus) == 1 else 1)
        watches = {watched.url: opened[source] for watched, source in zip(endpoints, of_each, strict=False)}
        session = _Session(settings, senders, interrupt, watches, on_progress)
        made = Bench(settings, [], gpus=tuple(gpus))
        earlier = earlier or EarlierRun()
        for endpoint in endpoints:
            learnt = sizing or Sizing()
            if not settings.alone:
                learnt = session.sized(endpoint, learnt)
            made.measured.append(Measured(endpoint, learnt))
        if limit:
            for measured in made.measured:
                known = earlier.points(measured.endpoint.name, whole=False)
                measured.limit = _limit(session, measured, loads[0] if loads else None, known, lambda: on_point(made))
                on_point(made)
        else:
            known_loads = earlier.shared([bench_endpoint.name for bench_endpoint in endpoints])
            for measured in made.measured:
                by_load = {point.load: point for point in earlier.points(measured.endpoint.name, whole=True)}
                measured.points += [by_load[load] for load in known_loads]
            for load in loads:
                if not interrupt.asked and load not in known_loads:
                    _points(session, made.measured, load)
                    on_point(made)
        made.interrupted, made.finished = interrupt.asked, not interrupt.asked
    return made


def _points(session: _Session, measured: Sequence[Measured], load: BenchLoad) -> None:
    """Endpoints take turns within each repeat, every other time the other way round: what drifts, drifts for all."""
    runs: list[list[BenchRun]] = [[] for _ in measured]
    settings = session.settings
    for server in measured:
        session.warm(server.endpoint, server.sizing, load)
    for repeat in range(settings.repeats):
        told = f", {repeat + 1} of {settings.repeats}" if settings.repeats > 1 else ""
        for server, own in list(zip(measured, runs, strict=True))[:: 1 if repeat % 2 == 0 else -1]:
            if not session.interrupt.asked:
                own.append(session.measured(server.endpoint, server.sizing, load, repeat, told=told))
    for server, own in zip(measured, runs, strict=True):
        # A run that was cut short is kept where there is no whole one.
        whole = [run for run in own if not run.interrupted] or own[:1]
        if any(run.outcomes for run in whole):
            server.points.append(_result(settings, load, whole))


def _result(settings: Settings, load: BenchLoad, runs: Sequence[BenchRun]) -> PointResult:
    return of_runs(
        load, runs, settings.targets, speed=settings.speed, seed=settings.seed, lockstep=settings.lockstep,
        fleet=settings.fleet,
    )  # fmt: skip


def _limit(
    session: _Session, measured: Measured, first: BenchLoad | None, known: Sequence[PointResult],
    on_trial: Callable[[], object],
) -> FoundLimit:  # fmt: skip
    """`known`: trials of an earlier run, which this one would make in the same order."""
    settings = session.settings
    percentiles = [target.percentile for target in (settings.targets.ttft, settings.targets.tpot) if target]
    fewest = round(_BEYOND / (1.0 - max(percentiles)))
    start = first.requests_per_s if first and first.requests_per_s else None
    by_trace = bool(first and first.by_trace)
    lone = session.measured(measured.endpoint, measured.sizing, BenchLoad(clients=1), 0, count=_ALONE, told=", alone")
    served = [outcome.e2e_s for outcome in lone.outcomes if outcome.served]
    if not served or not _result(settings, BenchLoad(clients=1), [lone]).holds:
        # A request that misses with no other beside it keeps the targets at no rate.
        return FoundLimit()
    alone = len(served) / sum(served)
    start = known[0].load.requests_per_s if known else start or alone
    assert start is not None

    def trial(rate: float, number: int) -> PointResult | None:
        load = BenchLoad(requests_per_s=rate, by_trace=by_trace)
        if number < len(known) and known[number].load == load:
            measured.points.append(known[number])
            return known[number]
        seconds = settings.seconds or _SECONDS
        count = max(settings.requests or round(rate * seconds), fewest)
        tried = session.measured(measured.endpoint, measured.sizing, load, number + 1, count=count, giving=True)
        if session.interrupt.asked:
            return None
        result = _result(settings, load, [tried])
        measured.points.append(result)
        on_trial()
        return result

    session.warm(measured.endpoint, measured.sizing, BenchLoad(requests_per_s=start))
    return find_limit(start, trial, lambda result: result.holds, lowest=min(_RARELY * alone, start))


def replayed(
    url: str, model: str, requests: Sequence[TimedRequest], fleet: Fleet, *, speed: float = 1.0,
    api_key: str | None = None, on_progress: OnProgress = no_progress,
) -> PointResult:  # fmt: skip
    """Requests at their times against one server, as they are: nothing is asked of it before."""
    load = BenchLoad(by_trace=True)
    job = SenderJob(url, Wording(model), load, requests=list(enumerate(requests)), speed=speed, api_key=api_key)
    with Interrupt() as interrupt, Senders(interrupt) as senders:
        run = _counted(lambda: senders.run(job, on_progress=on_progress), url, api_key)
    if run.interrupted:
        raise KeyboardInterrupt
    return of_runs(load, [run], targets_of(fleet), speed=speed, fleet=fleet)

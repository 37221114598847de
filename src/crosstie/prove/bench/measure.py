"""One run of a load against one endpoint: requests in, their outcomes and the client's own account out.

A sender is one event loop. Where one processor could not keep up with the stream, several processes share the requests,
begin together, and each sends its own at their times.

Conversations: each prompt is the last one, the answer to it and something new, so that a prefix cache has work.
Sessions run side by side and wait between their turns, as somebody who reads does.
"""

import asyncio
import json
import math
import multiprocessing
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, perf_counter, process_time
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import msgspec

from crosstie.catalog.tokenizer import Tokenizer
from crosstie.core.progress import OnProgress, no_progress
from crosstie.prove.bench.gpus import GpuUse
from crosstie.prove.bench.loads import BenchLoad, shares
from crosstie.prove.bench.server_counts import ServerCounts
from crosstie.prove.replay.outcomes import ClassTargets, kept_targets
from crosstie.prove.replay.prompts import Wording, corpus, text
from crosstie.prove.replay.replay import CHAT, COMPLETIONS, NOT_AWAITED, Replay, RequestOutcome
from crosstie.prove.replay.traffic import TimedRequest
from crosstie.wire.files import allow_many_connections
from crosstie.wire.loops import run_on_loop

# Pieces of answers a second that one sender takes with half a processor of a few years ago.
_PIECES_PER_SENDER = 15_000.0
# That a quick stream has of them a second.
_PIECES_PER_CLIENT = 100.0
_BARRIER_S = 120.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Giving:
    """Up, once so many have missed a target that the percentile cannot be kept any more."""

    targets: ClassTargets
    requests: int

    def up(self, outcomes: Sequence[RequestOutcome]) -> bool:
        ended = [outcome for outcome in outcomes if outcome.error or not math.isnan(outcome.e2e_s)]
        kept = [kept_targets(outcome, self.targets) for outcome in ended]
        pairs = ((self.targets.ttft, 0), (self.targets.tpot, 1))
        return any(
            sum(not pair[index] for pair in kept) > (1.0 - target.percentile) * self.requests + 1e-9
            for target, index in pairs
            if target is not None
        )


@dataclass(frozen=True)
class SenderJob:
    """What a sender is told."""

    url: str
    wording: Wording
    load: BenchLoad
    # Each with its number.
    requests: Sequence[tuple[int, TimedRequest]] = ()
    speed: float = 1.0
    api_key: str | None = None
    # A file that counts answers whose server does not.
    tokenizer: str | None = None
    silence_s: float = 120.0
    until_s: float = math.inf
    giving: Giving | None = None
    # When each client begins, on the server's clock; all at once where nothing is said.
    starts_s: Sequence[float] = ()


class Sent(msgspec.Struct):
    """By one sender: numbers of requests, how they ended, processor time, and how late its loop was, both real."""

    numbers: list[int]
    outcomes: list[RequestOutcome]
    cpu_s: float
    lags_s: list[float]


@dataclass(frozen=True)
class BenchRun:
    """Requests in the order of their numbers, and what the client was up to meanwhile."""

    outcomes: list[RequestOutcome]
    # On this machine's monotonic clock.
    began: float
    ended: float
    client_cpu_s: float
    lags_s: list[float]
    # Ended before its time: by whoever asked for it, or because its targets were lost.
    interrupted: bool
    gave_up: bool
    # Of clients that began one by one.
    settled: "SettledTime | None" = None
    staggered: bool = False
    # By the name of each part of the run that is told apart: turns of conversations, phases of a schedule.
    phases: Mapping[str, Sequence[RequestOutcome]] = field(default_factory=dict)
    # By the server's own counters; None where it has none.
    counted: ServerCounts | None = None
    # What each GPU did meanwhile, where they were watched.
    gpus: Sequence[GpuUse] = ()
    senders: int = 1

    @property
    def settled_outcomes(self) -> list[RequestOutcome]:
        """Those that had all the others beside them from their first moment to their last; of any other run, all."""
        if self.settled is None:
            return self.outcomes
        return [outcome for outcome in self.outcomes if self.settled.begin_s <= outcome.due_s <= self.settled.last_s]

    def watched(self, speed: float) -> tuple[float, float]:
        """The part of it that counts, on this machine's clock."""
        ends = [outcome.due_s + outcome.e2e_s for outcome in self.outcomes if outcome.served]
        if self.settled is None or not ends:
            return self.began, self.ended
        begin, end = (self.ended - (max(ends) - at) / speed for at in (self.settled.begin_s, self.settled.end_s))
        return begin, end


class SettledTime(NamedTuple):
    """Seconds of a run, on the server's clock, in which all clients were at work; requests that were sent until
    `last_s` are no client's last one."""

    begin_s: float
    end_s: float
    last_s: float


def settled_time(due_s: Sequence[Sequence[float]], starts_s: Sequence[Sequence[float]]) -> SettledTime | None:
    """From when the last client has begun to when the first finds nothing more to send. Both by sender, whose clients
    share its requests. None where no request was sent and answered between them."""
    parts = [(sorted(due), len(starts)) for due, starts in zip(due_s, starts_s, strict=True) if starts]
    if sum(clients for _, clients in parts) < 2 or any(len(due) <= clients for due, clients in parts):
        return None
    begin, end = max(max(starts) for starts in starts_s if starts), min(due[-1] for due, _ in parts)
    last = min(due[-clients - 1] for due, clients in parts)
    return SettledTime(begin, end, last) if begin <= last < end else None


class Interrupt:
    """Ctrl-C asks for an end, and what was measured is kept; a second one is meant."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def senders_for(load: BenchLoad, requests: Sequence[TimedRequest], speed: float, processors: int) -> int:
    """As many as the pieces that will come keep half busy, with one processor left for the rest of the machine."""
    if not requests:
        return 1
    if load.clients is not None:
        pieces = load.clients * _PIECES_PER_CLIENT * speed
    else:
        span = requests[-1].arrival_s - requests[0].arrival_s
        pieces = sum(request.output_tokens + 2.0 for request in requests) / max(span, 1.0) * speed
    return max(min(math.ceil(pieces / _PIECES_PER_SENDER), processors - 1), 1)


async def _send(job: SenderJob, ends: Any, on_progress: OnProgress, interrupt: Interrupt | None = None) -> Sent:
    """`ends`: an event, set once the run is to end; in the process that is interrupted, `interrupt` says it too."""
    numbers = [number for number, _ in job.requests]
    count = None
    if job.tokenizer:
        reader = Tokenizer(Path(job.tokenizer))
        count = lambda text: len(reader.encode(text))  # noqa: E731 (a tokenizer per sender, made once)

    def goes_on(outcomes: Sequence[RequestOutcome]) -> bool:
        if job.giving is not None and job.giving.up(outcomes):
            ends.set()
        return not (ends.is_set() or (interrupt is not None and interrupt.asked))

    sender = Replay(
        asyncio.get_running_loop(), job.url, job.wording.model, speed=job.speed, silence_s=job.silence_s,
        api_key=job.api_key, clients=job.load.clients, starts_s=job.starts_s, until_s=job.until_s, count=count,
        goes_on=goes_on,
        path=CHAT if job.wording.chat else COMPLETIONS, on_progress=on_progress,
        body=lambda request, index: job.wording.body(request, numbers[index]),
    )  # fmt: skip
    cpu = process_time()
    outcomes = await sender.run([request for _, request in job.requests])
    return Sent(numbers[: len(outcomes)], outcomes, process_time() - cpu, sender.lags_s)


_shared: dict[str, Any] = {}


def _share(barrier: Any, ends: Any, done: Any) -> None:
    """In a process of its own, before its first job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    allow_many_connections()
    corpus()
    _shared.update(barrier=barrier, ends=ends, done=done)


def _sent_apart(index: int, job: SenderJob) -> Sent:
    def on_progress(done: int, _total: int, _what: str) -> None:
        _shared["done"][index] = done

    _shared["barrier"].wait(_BARRIER_S)
    return run_on_loop(_send(job, _shared["ends"], on_progress))


class Senders:
    """One in this process, or several in processes of their own, which are kept from run to run."""

    def __init__(self, interrupt: Interrupt, most: int = 1):
        self._interrupt, self.most = interrupt, most
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Senders":
        allow_many_connections()
        corpus()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, job: SenderJob, senders: int = 1, on_progress: OnProgress = no_progress) -> BenchRun:
        began = monotonic()
        senders = max(min(senders, self.most, len(job.requests), job.load.clients or senders), 1)
        if senders == 1:
            parts = [run_on_loop(_send(job, threading.Event(), on_progress, self._interrupt))]
        else:
            parts = self._apart(job, senders, on_progress)
        numbered = sorted(
            (pair for part in parts for pair in zip(part.numbers, part.outcomes, strict=True)), key=lambda pair: pair[0]
        )
        cut = any(outcome.error == NOT_AWAITED for _, outcome in numbered) or len(numbered) < len(job.requests)
        outcomes = [outcome for _, outcome in numbered if outcome.error != NOT_AWAITED]
        return BenchRun(
            outcomes=outcomes,
            began=began,
            ended=monotonic(),
            client_cpu_s=sum(part.cpu_s for part in parts),
            lags_s=[lag for part in parts for lag in part.lags_s],
            interrupted=self._interrupt.asked,
            gave_up=cut and not self._interrupt.asked and math.isinf(job.until_s),
            settled=settled_time(
                [[outcome.due_s for outcome in part.outcomes] for part in parts],
                [job.starts_s[index::senders] if index < senders else () for index in range(len(parts))],
            ),
            staggered=len(job.starts_s) > 1,
            senders=senders,
        )

    def _apart(self, job: SenderJob, senders: int, on_progress: OnProgress) -> list[Sent]:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._ends, self._done = context.Event(), context.Array("q", self.most)
            # All of them take part in every run, those without requests too.
            barrier = context.Barrier(self.most)
            self._pool = ProcessPoolExecutor(self.most, context, _share, (barrier, self._ends, self._done))
        self._ends.clear()
        dealt = shares([request for _, request in job.requests], senders, job.load.clients)
        futures: list[Future[Sent]] = []
        for index in range(self.most):
            mine = dealt[index] if index < senders else []
            own = replace(
                job, requests=mine, load=job.load.part(index, senders),
                starts_s=job.starts_s[index::senders] if index < senders else (),
                giving=job.giving and replace(job.giving, requests=len(mine)),
            )  # fmt: skip
            futures.append(self._pool.submit(_sent_apart, index, own))
        waiting: set[Future[Sent]] = set(futures)
        while waiting:
            _, waiting = wait(waiting, _POLL_S)
            on_progress(sum(self._done[:]), len(job.requests), f"{senders} senders")
            if self._interrupt.asked:
                self._ends.set()
        return [future.result() for future in futures]


def run_sessions(
    job: SenderJob, parts: list[list[TimedRequest]], pause_s: float, stopped: Callable[[], bool],
    on_ended: Callable[[int], object] = lambda done: None,
) -> BenchRun:  # fmt: skip
    """`parts`: by session, what is new in each of its turns. Outcomes are in the order of turns, first ones first."""
    began, cpu = monotonic(), process_time()
    held = run_on_loop(_all(job, parts, pause_s, stopped, on_ended))
    turns = max(map(len, parts))
    by_turn = {f"turn {turn + 1}": [session[turn] for session in held if turn < len(session)] for turn in range(turns)}
    outcomes = [outcome for some in by_turn.values() for outcome in some if outcome.error != NOT_AWAITED]
    return BenchRun(
        outcomes, began, monotonic(), process_time() - cpu, [], interrupted=stopped(), gave_up=False, phases=by_turn
    )


async def _all(
    job: SenderJob, parts: list[list[TimedRequest]], pause_s: float, stopped: Callable[[], bool],
    on_ended: Callable[[int], object],
) -> list[list[RequestOutcome]]:  # fmt: skip
    began, done = perf_counter(), list[int]()
    # One by one over a pause, or they would all ask at once for ever.
    spread_s = max(pause_s, 1.0) / job.speed / len(parts)

    async def session(number: int, turns: list[TimedRequest]) -> list[RequestOutcome]:
        await asyncio.sleep(number * spread_s)
        messages: list[dict[str, str]] = []
        outcomes: list[RequestOutcome] = []
        for turn, part in enumerate(turns):
            if stopped():
                break
            said = text(part, number * len(turns) + turn, job.wording.salt, job.wording.sizing)
            messages.append({"role": "user", "content": json.loads(b'"' + said + b'"')})
            asked_s = (perf_counter() - began) * job.speed
            outcome, answer = await _turn(job, messages, part, stopped)
            outcome.due_s = asked_s
            outcomes.append(outcome)
            done.append(1)
            on_ended(len(done))
            if not outcome.served:
                break
            messages.append({"role": "assistant", "content": answer})
            if turn + 1 < len(turns):
                await asyncio.sleep(pause_s / job.speed)
        return outcomes

    return list(await asyncio.gather(*(session(number, turns) for number, turns in enumerate(parts))))


async def _turn(
    job: SenderJob, messages: list[dict[str, str]], part: TimedRequest, stopped: Callable[[], bool]
) -> tuple[RequestOutcome, str]:
    """One request of its own connection, and the answer's text."""
    answers: list[str] = []
    sender = Replay(
        asyncio.get_running_loop(), job.url, job.wording.model, speed=job.speed, silence_s=job.silence_s,
        api_key=job.api_key, path=CHAT, goes_on=lambda outcomes: not stopped(), on_answer=answers.append,
        body=lambda request, index: job.wording.conversation(messages, part.output_tokens),
    )  # fmt: skip
    (outcome,) = await sender.run([part])
    return outcome, answers[0] if answers else ""

"""Conversations: each prompt is the last one, the answer to it and something new, so that a prefix cache has work.

Sessions run side by side and wait between their turns, as somebody who reads does.
"""

import asyncio
import json
from collections.abc import Callable
from time import monotonic, perf_counter, process_time

from crosstie.prove.bench.measure import BenchRun, SenderJob
from crosstie.prove.replay.prompts import text
from crosstie.prove.replay.replay import CHAT, NOT_AWAITED, Replay, RequestOutcome
from crosstie.prove.replay.traffic import TimedRequest
from crosstie.wire.loops import run_on_loop


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

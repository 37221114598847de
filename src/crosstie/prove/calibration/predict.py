"""What a benchmark would show: every case predicted the way it was measured.

Cases of one model and precision go through the model together. Their schedules are made once, so that
predicting again with other constants costs one evaluation of the steps.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from crosstie.catalog.benchmarks import SessionBenchmark
from crosstie.core.progress import OnProgress, no_progress
from crosstie.perf.disaggregated import Sides, disaggregated_state
from crosstie.perf.hardware import Array, Hardware, Mask
from crosstie.perf.memory import cache_sequences
from crosstie.perf.steady_state import HOST_S_PER_CACHED_TOKEN, SteadyState, steady_state
from crosstie.perf.step import Shape, gpu_s, shape, step, step_s
from crosstie.prove.calibration.cached import held_tokens
from crosstie.prove.calibration.cases import MeasuredCase
from crosstie.prove.calibration.results import Metric
from crosstie.prove.calibration.stages import StageReplica, stage
from crosstie.sim.schedule import Loop, Schedule, schedule

# Columns of a prediction: seconds, and output tokens per second of all replicas.
QUANTITIES = ("ttft_mean", "ttft_p50", "ttft_p99", "tpot", "tpot_p99", "run", "output_tokens_per_s",
              "decode_step", "prefill", "e2e", "ttft_p90", "tpot_p90", "e2e_p90", "hit")  # fmt: skip
_SCHEDULED = QUANTITIES[:6]
# Methods whose requests come when they come, so that queues decide their latencies.
BY_THE_CLOCK = ("limits", "rate")
# Clients that a load is looked for among, from one to as many as memory holds.
_LOADS = 24
# A p99 over a median, of TPOT and TTFT under arrivals by chance: medians of 270 MLPerf Server and Interactive runs.
_TPOT_TAIL, _TTFT_TAIL = 1.13, 2.38
# What live sessions on a GPU add to a p90 of TTFT each: prompts of other sessions that begin or are summarised.
_CROWDING = 0.2
# A p90 over the mean, of a queue and of TPOT of sessions.
_QUEUE_TAIL, _SESSION_TPOT_TAIL = 2.3, 1.4
# Most of a replica's steady rate that arrivals by chance may use.
_USED = 0.95


class _Scheduled:
    """Closed loops and single batches: exact schedules."""

    def __init__(self, cases: Sequence[MeasuredCase]):
        self.hardware = Hardware([case.deployment for case in cases])
        schedules = [schedule_of(case) for case in cases]
        width = max(len(course.run) for course in schedules)

        def padded(name: str) -> Array:
            table = np.zeros((len(schedules), width))
            for row, course in zip(table, schedules, strict=True):
                values = getattr(course, name)
                row[: len(values)] = values
            return table

        replicas = self.hardware.dp
        self.at = Shape(
            padded("decode_sequences") * replicas,
            padded("decode_context"),
            padded("prefill_tokens") * replicas,
            padded("prefill_start"),
            padded("prefill_span"),
        )
        self.weights = {name: padded(name) for name in _SCHEDULED}
        tokens = [course.output_tokens * case.replicas for course, case in zip(schedules, cases, strict=True)]
        self.tokens = np.array(tokens) * replicas[:, 0]
        # Requests that a client sends one after the other, each with what the host takes before its first token.
        self.rounds = np.array([max(case.requests / max(case.clients, 1.0), 1.0) for case in cases])
        self.first_wave_s = self._first_wave_s = np.array([case.first_wave_s for case in cases])

    def tell_first_waves(self, told: Mask) -> None:
        """Whether what first requests waited for is known of each case."""
        self.first_wave_s = np.where(told, self._first_wave_s, 0.0)

    def predict(self) -> dict[str, Array]:
        columns = self._over(step_s(self.hardware, self.at))
        request = self.hardware.host_request_s[:, 0]
        for name in ("ttft_mean", "ttft_p50", "ttft_p99"):
            columns[name] = columns[name] + request
        # A mean has the first wave's share of all requests, and a 99th percentile is of that wave.
        columns["ttft_mean"] = columns["ttft_mean"] + self.first_wave_s / self.rounds
        columns["ttft_p99"] = columns["ttft_p99"] + self.first_wave_s
        columns["run"] = columns["run"] + request * self.rounds + self.first_wave_s
        columns["output_tokens_per_s"] = self.tokens / columns["run"]
        return columns

    def ideal(self) -> dict[str, Array]:
        """The same schedule, each step at peak rates and with no host, launch or network in its way."""
        columns = self._over(step(self.hardware, self.at).ideal_s)
        columns["output_tokens_per_s"] = self.tokens / columns["run"]
        return columns

    def _over(self, seconds: Array) -> dict[str, Array]:
        """What the schedule makes of the seconds of its steps."""
        return {name: (weights * seconds).sum(axis=1) for name, weights in self.weights.items()}


class _Steady:
    """Loads that are looked for: the most that memory holds, that limits allow, or that arrivals bring."""

    def __init__(self, cases: Sequence[MeasuredCase]):
        self.hardware = Hardware([case.deployment for case in cases])
        self.inputs, self.outputs = _column(cases, "input_tokens"), _column(cases, "output_tokens")
        self.cases, self.replicas = list(cases), np.array([case.replicas for case in cases])
        most = np.array([[_most_clients(case)] for case in cases])
        self.cached, self.load_s = _column(cases, "cached_tokens"), _column(cases, "load_s")[:, 0]
        self.shared = _column(cases, "shared_tokens")
        known = all(case.method in ("full", "loop") for case in cases)
        self.clients = most ** (np.ones((1, 1)) if known else np.linspace(0.0, 1.0, _LOADS)[None, :])
        # Closed loops that have settled or go through pipelines come here too: their clients are given, at every load.
        loops = np.array([[case.method == "loop"] for case in cases])
        self.given = given = np.where(loops, _column(cases, "clients") / _column(cases, "replicas"), 0.0)
        self.clients = np.where(given > 0.0, np.maximum(given, 1.0), self.clients)
        self.alone = np.array([case.steady and case.clients == 1.0 for case in cases])

        self.full = np.array([[case.method in ("full", "loop")] for case in cases])
        self.limited = np.array([[case.method == "limits"] for case in cases])
        self.ttft_limit, self.tpot_limit = _column(cases, "ttft_limit_s"), _column(cases, "tpot_limit_s")
        self.rate = _column(cases, "requests_per_s") / self.replicas[:, None]
        self.lasts_s = _column(cases, "lasts_s")[:, 0]
        self.sessions = MeasuredSessions(cases)
        self.requests = _column(cases, "requests")[:, 0] / self.replicas

    def _settled(self) -> tuple[SteadyState, Array]:
        """Every load that is tried, and which of them it is."""
        steady = steady_state(self.hardware, self.clients, self.inputs, self.outputs, cached_tokens=self.cached,
                              shared_tokens=self.shared)  # fmt: skip
        # How far each load is from what decides, falling through zero: then the load is between two of them.
        over_limits = np.minimum(
            np.log(self.tpot_limit.clip(1e-9) / (steady.tpot_s * _TPOT_TAIL)),
            np.log(self.ttft_limit.clip(1e-9) / (steady.ttft_s * _TTFT_TAIL)),
        )
        over_rate = np.log(self.rate.clip(1e-9) / steady.requests_per_s)
        room = np.where(self.full, 1.0, np.where(self.limited, over_limits, over_rate))
        later = self.sessions.later_s(steady.tpot_s, self.outputs)
        room = np.where(self.sessions.live > 0, self.sessions.room(self.clients, steady.requests_per_s, later), room)
        return steady, _crossing(room)

    def predict(self) -> dict[str, Array]:
        steady, at = self._settled()
        used = np.where(self.limited[:, 0], _USED, 1.0)
        ttft, tpot = _pick(steady.ttft_s, at), _pick(steady.tpot_s, at) * self.sessions.pace[:, 0]
        # More arrivals than a replica serves wait in a line that grows to the end of the run.
        behind = 1.0 / _pick(steady.requests_per_s, at) - 1.0 / self.rate[:, 0].clip(1e-9)
        line = np.where(self.rate[:, 0] > 0, 0.5 * self.requests * np.maximum(behind, 0.0), 0.0)
        ttft = ttft + line
        rate = _pick(steady.output_tokens_per_s, at) * self.replicas * used
        ttft = ttft + self.load_s
        answered = ttft + tpot * (self.outputs[:, 0] - 1.0)
        rate = self.sessions.rate(answered, rate, self.outputs[:, 0])
        columns = dict.fromkeys(("ttft_mean", "ttft_p50"), ttft)
        room = np.minimum(_pick(steady.found_room_s, at), ttft)
        columns |= self.sessions.tails(room, ttft - room, tpot)
        # One client alone waits for nobody.
        ttft_tail, tpot_tail = np.where(self.alone, 1.0, _TTFT_TAIL), np.where(self.alone, 1.0, _TPOT_TAIL)
        columns |= {"ttft_p99": ttft * ttft_tail, "tpot": tpot, "tpot_p99": tpot * tpot_tail}
        columns |= {"run": ttft + tpot * (self.outputs[:, 0] - 1.0), "output_tokens_per_s": rate}
        self._in_stages(steady, columns)
        return columns

    def _in_stages(self, steady: SteadyState, columns: dict[str, Array]) -> None:
        """Stages of arrivals, which are too short to settle."""
        held = self.inputs - self.shared
        room = steady.concurrency_that_fits * (held + self.hardware.held_share * self.outputs)
        for i in np.flatnonzero(self.lasts_s > 0).tolist():
            replica = StageReplica(
                steady.decoding[i], steady.tpot_s[i], steady.found_room_s[i], float(steady.service_s[i, -1]),
                float(room[i, 0]), partial(held_tokens, self.cases[i]), float(self.hardware.max_sequences[i, 0]),
            )  # fmt: skip
            requests = max(round(self.requests[i]), 1)
            seen = stage(replica, requests, self.lasts_s[i], self.outputs[i, 0])
            ttft = seen.ttft_mean_s + self.load_s[i]
            for name, value in (
                ("ttft_mean", ttft), ("ttft_p50", ttft), ("ttft_p90", seen.ttft_p90_s + self.load_s[i]),
                ("tpot", seen.tpot_s), ("run", ttft + seen.tpot_s * (self.outputs[i, 0] - 1.0)),
                ("output_tokens_per_s", requests * self.outputs[i, 0] / seen.lasts_s * self.replicas[i]),
            ):  # fmt: skip
                columns[name][i] = value

    def ideal(self) -> dict[str, Array]:
        """Throughput at the steady state's batch. A latency follows from the batch, which such results do not tell."""
        steady, at = self._settled()
        hardware, outputs = self.hardware, self.outputs[:, 0]
        # Prompts go through in full budgets, which read the weights least often; stages share the work of a step.
        budget, span = hardware.chunk_tokens * hardware.dp, np.minimum(self.inputs, hardware.chunk_tokens)
        prompts = step(hardware, shape(0.0, 0.0, budget, 0.5 * (self.inputs - span), span)).ideal_s
        prefill = (prompts * self.inputs / budget / hardware.pp)[:, 0]
        batch = _pick(np.maximum(steady.decoding, hardware.pp), at)
        request = prefill + (outputs - 1.0) * _pick(steady.decode.ideal_s, at) / batch
        # Arrivals that an engine keeps up with leave it idle, which says nothing about its speed.
        idle = (self.rate > 0.0)[:, 0] & (at < steady.decoding.shape[1] - 1)
        # Of a closed loop, a round of its clients: what the steps of a run take is then known, too.
        run = np.where(self.given[:, 0] > 0.0, self.clients[:, 0] * request, np.nan)
        return {"output_tokens_per_s": np.where(idle, np.nan, self.replicas * outputs / request), "run": run}


class MeasuredSessions:
    """Live sessions of closed loops, which pause between two requests; zeros where cases have none."""

    def __init__(self, cases: Sequence[MeasuredCase]):
        def column(of: Callable[[SessionBenchmark], float]) -> Array:
            return np.array([[of(case.benchmark) if isinstance(case.benchmark, SessionBenchmark) else 0.0]
                             for case in cases])  # fmt: skip

        self.all_live = live = np.array([[case.clients if case.method == "sessions" else 0.0] for case in cases])
        self.live = live / _column(cases, "replicas")
        self.pause_s = column(lambda benchmark: benchmark.pause_s)
        self.pause_alone_s = column(lambda bench: bench.pause_s if bench.pause_alone_s is None else bench.pause_alone_s)
        self.any = bool((live > 0).any())
        self.streams = column(lambda benchmark: benchmark.streams)
        # Sessions that a client runs one after the other, where rows say how many requests there were.
        turns = np.maximum(column(lambda benchmark: fmean(benchmark.shape.turns)), 1.0)
        rounds = _column(cases, "requests") / turns / np.maximum(live, 1.0)
        self.drains = np.where(rounds > 0, rounds / (rounds + 1.0), 1.0)[:, 0]
        self.cached = _column(cases, "cached_tokens")[:, 0]
        self.pace = np.array([
            [case.benchmark.pace.get(case.deployment.accelerator.id, 1.0)
             if isinstance(case.benchmark, SessionBenchmark) else 1.0]
            for case in cases
        ])  # fmt: skip
        self.crowd = live[:, 0] / _column(cases, "gpus")[:, 0]
        self.later = _column(cases, "output_tokens")[:, 0] - 1.0
        self.wordier = column(lambda benchmark: benchmark.wordier)[:, 0]
        own = [case.benchmark for case in cases if isinstance(case.benchmark, SessionBenchmark)]
        self.parts = np.array([benchmark.parts for benchmark in own]) if len(own) == len(cases) else None

    def pauses_s(self, answered_s: Array) -> Array:
        """The mean pause: cut where all other sessions happen to pause too."""
        paused = self.pause_s / np.maximum(self.pause_s + answered_s, 1e-9)
        alone = paused ** np.maximum(self.streams * (self.all_live - 1.0), 0.0)
        return np.asarray(self.pause_s + alone * (self.pause_alone_s - self.pause_s))

    def later_s(self, tpot_s: Array, outputs: Array) -> Array:
        """What an answer takes beyond what steps say that it does."""
        return np.asarray((self.pace - 1.0) * tpot_s * (outputs - 1.0))

    def room(self, at_work: Array, requests_per_s: Array, later_s: Array) -> Array:
        """How many times more are live than would have so many of them wait for an answer."""
        answered = at_work / requests_per_s + later_s
        pausing = at_work / answered * self.pauses_s(answered)
        return np.asarray(np.log(np.maximum(self.live, 1e-9)) - np.log(at_work + pausing))

    def rate(self, answered_s: Array, otherwise: Array, outputs: Array) -> Array:
        """Output tokens a second of all replicas; at the end of a run some clients have no session left."""
        each = answered_s + self.pauses_s(answered_s[:, None])[:, 0]
        closed = self.drains * self.all_live[:, 0] * outputs / np.maximum(each, 1e-9)
        return np.where(self.all_live[:, 0] > 0, closed, otherwise)

    def tails(self, own_s: Array, waited_s: Array, tpot: Array) -> dict[str, Array]:
        """Median and p90 of TTFT over the benchmark's prompts, of which those that bring much that is new are seldom
        the longest, and by queues; p90 of others. Not a number of cases without.

        `own_s`: TTFT of a prompt that finds room, and `waited_s` what it waits beyond.
        """
        if self.parts is None:
            return dict.fromkeys(("ttft_p90", "tpot_p90", "e2e_p90"), np.full_like(own_s, np.nan))
        host = HOST_S_PER_CACHED_TOKEN * self.cached
        found, new = self.parts[:, 0], self.parts[:, 1]
        median, longer = np.quantile(host[:, None] * found + (own_s - host)[:, None] * new, (0.5, 0.9), axis=1)
        longer = (longer + waited_s * _QUEUE_TAIL) * (1.0 + _CROWDING * self.crowd)
        return {"ttft_p50": median + waited_s, "ttft_p90": longer, "tpot_p90": tpot * _SESSION_TPOT_TAIL,
                "e2e_p90": longer + tpot * self.later * self.wordier}  # fmt: skip


class _Apart:
    """Prefill and decode on replicas of their own: the steady state, and the burst that a benchmark begins with."""

    def __init__(self, cases: Sequence[MeasuredCase]):
        self.hardware = Sides([case.service for case in cases if case.service])
        mean = np.array([[(1.0 + case.shortest) / 2.0] for case in cases])
        self.inputs = np.maximum(_column(cases, "input_tokens") * mean, 1.0)
        self.outputs = np.maximum(_column(cases, "output_tokens") * mean, 1.0)
        self.clients = _column(cases, "clients")
        self.rounds = np.array([[max(case.requests / max(case.clients, 1.0), 1.0)] for case in cases])
        self.cached, self.load_s = _column(cases, "cached_tokens"), _column(cases, "load_s")
        self.sessions = MeasuredSessions(cases)

    def predict(self) -> dict[str, Array]:
        return self._predict_sessions() if self.sessions.any else self._predict_loop()

    def _predict_sessions(self) -> dict[str, Array]:
        """The load of those sessions that wait for an answer, in a loop that has settled."""
        loads = self.clients ** np.linspace(0.0, 1.0, _LOADS)[None, :]
        state = disaggregated_state(self.hardware, loads, self.inputs, self.outputs, cached_tokens=self.cached)
        later = self.sessions.later_s(state.tpot_s, self.outputs)
        at = _crossing(self.sessions.room(loads, state.requests_per_s, later))
        ttft = _pick(state.ttft_s, at) + self.load_s[:, 0]
        tpot = _pick(state.tpot_s, at) * self.sessions.pace[:, 0]
        answered = ttft + tpot * (self.outputs[:, 0] - 1.0)
        rate = self.sessions.rate(answered, answered, self.outputs[:, 0])
        # All that a prompt waits for counts as its own: what prefill replicas are busy with is others' new tokens.
        tails = self.sessions.tails(ttft, np.zeros_like(ttft), tpot)
        columns = dict.fromkeys(("ttft_mean", "ttft_p50"), ttft) | tails
        return columns | {"ttft_p99": ttft * _TTFT_TAIL, "tpot": tpot, "tpot_p99": tpot * _TPOT_TAIL, "run": answered,
                          "output_tokens_per_s": rate}  # fmt: skip

    def _predict_loop(self) -> dict[str, Array]:
        state = disaggregated_state(self.hardware, self.clients, self.inputs, self.outputs)
        burst = np.maximum(state.ttft_burst_s - state.ttft_s, 0.0)
        mean = state.ttft_s + (state.ttft_burst_s - state.ttft_s) / self.rounds
        later = self.outputs - 1.0
        # The last requests of a run leave one by one, for about half of one's time.
        run = (self.rounds + 0.5) * (mean + later * state.tpot_s)
        columns = {
            "ttft_mean": mean,
            "ttft_p50": state.ttft_s,
            "ttft_p99": state.ttft_s + burst * 2.0 * np.clip(1.0 - 0.01 * self.rounds, 0.0, 1.0),
            "tpot": state.tpot_s,
            "tpot_p99": state.tpot_s,
            "run": run,
            "output_tokens_per_s": self.clients * self.rounds * self.outputs / run,
        }
        return {name: values[:, 0] for name, values in columns.items()}

    def ideal(self) -> dict[str, Array]:
        """A roofline of two pools that wait for each other says nothing about either."""
        return {}


class _Alone:
    """One step without host or network."""

    def __init__(self, cases: Sequence[MeasuredCase]):
        self.hardware = Hardware([case.deployment for case in cases])
        batch, tokens = _column(cases, "clients"), _column(cases, "input_tokens")
        prompt = shape(prefill_tokens=batch * tokens, prefill_span=tokens)
        self.at = {"decode_step": shape(batch, tokens), "prefill": prompt}

    def predict(self) -> dict[str, Array]:
        return {name: gpu_s(self.hardware, at)[:, 0] for name, at in self.at.items()}

    def ideal(self) -> dict[str, Array]:
        return {name: step(self.hardware, at).ideal_s[:, 0] for name, at in self.at.items()}


def _column(cases: Sequence[MeasuredCase], name: str) -> Array:
    return np.array([[getattr(case, name)] for case in cases])


def schedule_of(case: MeasuredCase) -> Schedule:
    """Attention replicas have their own clients, slots and budget."""
    deployment, split = case.deployment, case.deployment.parallelism
    stack, share = deployment.stack, case.replicas * split.dp
    clients = max(round(case.clients / share), 1)
    return schedule(
        Loop(
            clients=clients,
            slots=max(min(round(_most_clients(case) / split.dp), clients), 1),
            requests=max(round(case.requests / share), clients),
            input_tokens=round(case.input_tokens),
            output_tokens=round(case.output_tokens),
            chunk_tokens=round(stack.chunk_tokens_on(deployment.accelerator.memory_bytes)),
            prefill_first=stack.scheduling == "prefill-first",
            shortest=case.shortest,
            receive_every=case.receive_every,
            tokens_per_step=deployment.speculation.acceptance_length if deployment.speculation else 1.0,
            queries=deployment.speculation.queries if deployment.speculation else 1,
            ready_ahead=stack.host.overlapped and case.point["date"][:7] >= stack.host.overlapped_since,
        )
    )


def _most_clients(case: MeasuredCase) -> float:
    """Requests that a replica runs at once: memory or the engine sets the limit; of sessions all may wait for that."""
    if case.method == "sessions":
        return max(case.clients / case.replicas, 1.0)
    deployment, stack = case.deployment, case.deployment.stack
    held = (case.input_tokens + stack.held_share * case.output_tokens) * (1.0 + case.shortest) / 2.0
    room = float(cache_sequences(deployment, held, case.shared_tokens))
    return max(min(room, deployment.max_sequences), 1.0)


def _crossing(room: Array) -> Array:
    """Position along each row where it first falls to zero, between two columns; the last if it never does."""
    short = room <= 0.0
    first = np.where(short.any(axis=1), short.argmax(axis=1), room.shape[1] - 1)
    before = np.maximum(first - 1, 0)
    rows = np.arange(len(room))
    high, low = room[rows, before], room[rows, first]
    share = np.where(short.any(axis=1) & (first > 0), high / np.maximum(high - low, 1e-12), 1.0)
    return np.asarray(np.where(first > 0, before + share, 0.0))


def _pick(values: Array, at: Array) -> Array:
    """Values at positions between columns, in proportion."""
    rows = np.arange(len(values))
    left = np.minimum(at.astype(int), values.shape[1] - 1)
    right = np.minimum(left + 1, values.shape[1] - 1)
    share = at - left
    return np.asarray(np.exp((1.0 - share) * np.log(values[rows, left]) + share * np.log(values[rows, right])))


_Group = _Scheduled | _Steady | _Apart | _Alone
_GROUPS: dict[str, type[_Group]] = {
    "loop": _Scheduled, "batch": _Scheduled, "full": _Steady, "limits": _Steady, "rate": _Steady, "alone": _Alone,
    "sessions": _Steady,
}  # fmt: skip


class Predictor:
    """Cases in their order; `predict` again after `correct`."""

    def __init__(self, cases: Sequence[MeasuredCase], on_progress: OnProgress = no_progress):
        self.cases = list(cases)
        self._later = np.array([case.mean_output_tokens - 1.0 for case in self.cases])
        members: dict[tuple[type[_Group], bool, bool, str, str, str], list[int]] = {}
        for index, case in enumerate(self.cases):
            deployment = case.deployment
            settled = case.method == "loop" and (case.steady or deployment.parallelism.pp > 1)
            kind = _Apart if case.service else _GROUPS["full" if settled else case.method]
            # What memory holds needs no looking for, and sessions pause.
            load = case.method in BY_THE_CLOCK, case.method == "sessions"
            key = (kind, *load, deployment.model.id, deployment.precision.id, deployment.kv_format)
            members.setdefault(key, []).append(index)
        self._groups: list[tuple[Any, _Group]] = []
        done = 0
        for (kind, *_), indices in members.items():
            on_progress(done, len(self.cases), "how each measurement was loaded")
            self._groups.append((np.array(indices), kind([self.cases[i] for i in indices])))
            done += len(indices)

    def correct(self, factors: Mapping[str, Array], more: bool = False) -> None:
        """Factors of shape (cases,): of the catalog's constants, or `more`, of those that deployments have."""
        for indices, group in self._groups:
            columns = {name: values[indices][:, None] for name, values in factors.items()}
            (group.hardware.correct_more if more else group.hardware.correct)(columns)

    def tell_first_waves(self, told: Mask) -> None:
        """Of which cases it is known what first requests waited for; of the others, nothing."""
        for indices, group in self._groups:
            if isinstance(group, _Scheduled):
                group.tell_first_waves(told[indices])

    def predict(self) -> dict[str, Array]:
        return self._columns(lambda group: group.predict())

    def ideal(self) -> dict[str, Array]:
        """The same work at the datasheet's peak rates, not a number where a roofline says nothing."""
        return self._columns(lambda group: group.ideal())

    def _columns(self, of: Callable[[_Group], Mapping[str, Array]]) -> dict[str, Array]:
        columns = {name: np.full(len(self.cases), np.nan) for name in QUANTITIES}
        for indices, group in self._groups:
            for name, values in of(group).items():
                columns[name][indices] = values
        columns["e2e"] = columns["ttft_p50"] + columns["tpot"] * self._later
        for kind, otherwise in (("ttft", "ttft_p99"), ("tpot", "tpot_p99"), ("e2e", "e2e")):
            unsaid = np.isnan(columns[f"{kind}_p90"])
            columns[f"{kind}_p90"] = np.where(unsaid, columns[otherwise], columns[f"{kind}_p90"])
        columns["hit"] = np.array([case.cached_tokens / case.input_tokens for case in self.cases])
        return columns


def quantity_of(case: MeasuredCase, metric: Metric) -> tuple[str, float]:
    """The column that a row's number is of, and the factor between them."""
    if metric.kind == "ttft":
        name = {"mean": "ttft_mean", "p50": "ttft_p50", "p90": "ttft_p90"}.get(metric.statistic, "ttft_p99")
        return name, 1.0
    if metric.kind == "tpot":
        return {"mean": "tpot", "p50": "tpot", "p90": "tpot_p90"}.get(metric.statistic, "tpot_p99"), 1.0
    if metric.kind == "throughput":
        counted = (case.input_tokens + case.output_tokens) / case.output_tokens if metric.with_input else 1.0
        return "output_tokens_per_s", counted / (case.gpus_counted(metric) if metric.per_gpu else 1.0)
    if metric.kind in ("batch", "step"):
        return "run", 1.0 if metric.kind == "batch" else 1.0 / case.output_tokens
    return ("e2e_p90" if metric.kind == "e2e" and metric.statistic == "p90" else metric.kind), 1.0

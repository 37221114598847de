"""What a benchmark would show: every case predicted the way it was measured.

Cases of one model and precision go through the model together. Their schedules are made once, so that
predicting again with other constants costs one evaluation of the steps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from crosstie.core.progress import OnProgress, no_progress
from crosstie.perf.disaggregated import Sides, disaggregated_state
from crosstie.perf.hardware import Array, Hardware, Mask
from crosstie.perf.memory import cache_sequences
from crosstie.perf.steady_state import SteadyState, steady_state
from crosstie.perf.step import Shape, gpu_s, shape, step, step_s
from crosstie.prove.calibration.cases import MeasuredCase
from crosstie.prove.calibration.results import Metric
from crosstie.sim.schedule import Loop, Schedule, schedule

# Columns of a prediction: seconds, and output tokens per second of all replicas.
QUANTITIES = ("ttft_mean", "ttft_p50", "ttft_p99", "tpot", "tpot_p99", "run", "output_tokens_per_s",
              "decode_step", "prefill", "e2e")  # fmt: skip
_SCHEDULED = QUANTITIES[:6]
# Methods whose requests come when they come, so that queues decide their latencies.
BY_THE_CLOCK = ("limits", "rate")
# Clients that a load is looked for among, from one to as many as memory holds.
_LOADS = 24
# A p99 over a median, of TPOT and TTFT under arrivals by chance: medians of 270 MLPerf Server and Interactive runs.
_TPOT_TAIL, _TTFT_TAIL = 1.13, 2.38
# Most of a replica's steady rate that arrivals by chance may use.
_USED = 0.95


class _Scheduled:
    """Closed loops and single batches: exact schedules."""

    def __init__(self, cases: Sequence[MeasuredCase]):
        self.hardware = Hardware([case.deployment for case in cases])
        schedules = [schedule_of(case) for case in cases]
        width = max(len(found.run) for found in schedules)

        def padded(name: str) -> Array:
            table = np.zeros((len(schedules), width))
            for row, found in zip(table, schedules, strict=True):
                values = getattr(found, name)
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
        tokens = [found.output_tokens * case.replicas for found, case in zip(schedules, cases, strict=True)]
        self.tokens = np.array(tokens) * replicas[:, 0]
        # Requests that a client sends one after the other, each with what the host takes before its first token.
        self.rounds = np.array([max(case.requests / max(case.clients, 1.0), 1.0) for case in cases])
        self.first_wave_s = self._first_wave_s = np.array([case.first_wave_s for case in cases])

    def tell_first_waves(self, told: Mask) -> None:
        """Whether what first requests waited for is known of each case."""
        self.first_wave_s = np.where(told, self._first_wave_s, 0.0)

    def predict(self) -> dict[str, Array]:
        found = self._over(step_s(self.hardware, self.at))
        request = self.hardware.host_request_s[:, 0]
        for name in ("ttft_mean", "ttft_p50", "ttft_p99"):
            found[name] = found[name] + request
        # A mean has the first wave's share of all requests, and a 99th percentile is of that wave.
        found["ttft_mean"] = found["ttft_mean"] + self.first_wave_s / self.rounds
        found["ttft_p99"] = found["ttft_p99"] + self.first_wave_s
        found["run"] = found["run"] + request * self.rounds + self.first_wave_s
        found["output_tokens_per_s"] = self.tokens / found["run"]
        return found

    def ideal(self) -> dict[str, Array]:
        """The same schedule, each step at peak rates and with no host, launch or network in its way."""
        found = self._over(step(self.hardware, self.at).ideal_s)
        found["output_tokens_per_s"] = self.tokens / found["run"]
        return found

    def _over(self, seconds: Array) -> dict[str, Array]:
        """What the schedule makes of the seconds of its steps."""
        return {name: (weights * seconds).sum(axis=1) for name, weights in self.weights.items()}


class _Steady:
    """Loads that are looked for: the most that memory holds, that limits allow, or that arrivals bring."""

    def __init__(self, cases: Sequence[MeasuredCase]):
        self.hardware = Hardware([case.deployment for case in cases])
        self.inputs, self.outputs = _column(cases, "input_tokens"), _column(cases, "output_tokens")
        self.replicas = np.array([case.replicas for case in cases])
        most = np.array([[_most_clients(case)] for case in cases])
        known = all(case.method in ("full", "loop") for case in cases)
        self.clients = most ** (np.ones((1, 1)) if known else np.linspace(0.0, 1.0, _LOADS)[None, :])
        # Closed loops that have settled or go through pipelines come here too: their clients are given, at every load.
        self.given = given = np.array(
            [[case.clients / case.replicas if case.method == "loop" else 0.0] for case in cases]
        )
        self.clients = np.where(given > 0.0, np.maximum(given, 1.0), self.clients)
        self.alone = np.array([case.steady and case.clients == 1.0 for case in cases])

        self.full = np.array([[case.method in ("full", "loop")] for case in cases])
        self.limited = np.array([[case.method == "limits"] for case in cases])
        self.ttft_limit, self.tpot_limit = _column(cases, "ttft_limit_s"), _column(cases, "tpot_limit_s")
        self.rate = _column(cases, "requests_per_s") / self.replicas[:, None]
        self.requests = _column(cases, "requests")[:, 0] / self.replicas

    def _settled(self) -> tuple[SteadyState, Array]:
        """Every load that is tried, and which of them it is."""
        steady = steady_state(self.hardware, self.clients, self.inputs, self.outputs)
        # How far each load is from what decides, falling through zero: then the load is between two of them.
        over_limits = np.minimum(
            np.log(self.tpot_limit.clip(1e-9) / (steady.tpot_s * _TPOT_TAIL)),
            np.log(self.ttft_limit.clip(1e-9) / (steady.ttft_s * _TTFT_TAIL)),
        )
        over_rate = np.log(self.rate.clip(1e-9) / steady.requests_per_s)
        room = np.where(self.full, 1.0, np.where(self.limited, over_limits, over_rate))
        return steady, _crossing(room)

    def predict(self) -> dict[str, Array]:
        steady, at = self._settled()
        used = np.where(self.limited[:, 0], _USED, 1.0)
        ttft, tpot = _pick(steady.ttft_s, at), _pick(steady.tpot_s, at)
        # More arrivals than a replica serves wait in a line that grows to the end of the run.
        behind = 1.0 / _pick(steady.requests_per_s, at) - 1.0 / self.rate[:, 0].clip(1e-9)
        ttft = ttft + np.where(self.rate[:, 0] > 0, 0.5 * self.requests * np.maximum(behind, 0.0), 0.0)
        rate = _pick(steady.output_tokens_per_s, at) * self.replicas * used
        found = dict.fromkeys(("ttft_mean", "ttft_p50"), ttft)
        # One client alone waits for nobody.
        ttft_tail, tpot_tail = np.where(self.alone, 1.0, _TTFT_TAIL), np.where(self.alone, 1.0, _TPOT_TAIL)
        found |= {"ttft_p99": ttft * ttft_tail, "tpot": tpot, "tpot_p99": tpot * tpot_tail}
        found |= {"run": ttft + tpot * (self.outputs[:, 0] - 1.0), "output_tokens_per_s": rate}
        return found

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


class _Full(_Steady):
    """As much load as memory takes, which needs no looking for."""


class _Apart:
    """Prefill and decode on replicas of their own: the steady state, and the burst that a benchmark begins with."""

    def __init__(self, cases: Sequence[MeasuredCase]):
        self.hardware = Sides([case.service for case in cases if case.service])
        mean = np.array([[(1.0 + case.shortest) / 2.0] for case in cases])
        self.inputs = np.maximum(_column(cases, "input_tokens") * mean, 1.0)
        self.outputs = np.maximum(_column(cases, "output_tokens") * mean, 1.0)
        self.clients = _column(cases, "clients")
        self.rounds = np.array([[max(case.requests / max(case.clients, 1.0), 1.0)] for case in cases])

    def predict(self) -> dict[str, Array]:
        found = disaggregated_state(self.hardware, self.clients, self.inputs, self.outputs)
        burst = np.maximum(found.ttft_burst_s - found.ttft_s, 0.0)
        mean = found.ttft_s + (found.ttft_burst_s - found.ttft_s) / self.rounds
        later = self.outputs - 1.0
        # The last requests of a run leave one by one, for about half of one's time.
        run = (self.rounds + 0.5) * (mean + later * found.tpot_s)
        columns = {
            "ttft_mean": mean,
            "ttft_p50": found.ttft_s,
            "ttft_p99": found.ttft_s + burst * 2.0 * np.clip(1.0 - 0.01 * self.rounds, 0.0, 1.0),
            "tpot": found.tpot_s,
            "tpot_p99": found.tpot_s,
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
        self.decode = shape(batch, tokens)
        self.prefill = shape(prefill_tokens=batch * tokens, prefill_span=tokens)

    def predict(self) -> dict[str, Array]:
        return {
            "decode_step": gpu_s(self.hardware, self.decode)[:, 0],
            "prefill": gpu_s(self.hardware, self.prefill)[:, 0],
        }

    def ideal(self) -> dict[str, Array]:
        return {
            "decode_step": step(self.hardware, self.decode).ideal_s[:, 0],
            "prefill": step(self.hardware, self.prefill).ideal_s[:, 0],
        }


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
        )
    )


def _most_clients(case: MeasuredCase) -> float:
    """Requests that a replica runs at once: memory or the engine sets the limit."""
    deployment, stack = case.deployment, case.deployment.stack
    held = (case.input_tokens + stack.held_share * case.output_tokens) * (1.0 + case.shortest) / 2.0
    return max(min(float(cache_sequences(deployment, held)), deployment.max_sequences), 1.0)


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
    "loop": _Scheduled, "batch": _Scheduled, "full": _Full, "limits": _Steady, "rate": _Steady, "alone": _Alone,
}  # fmt: skip


class Predictor:
    """Cases in their order; `predict` again after `correct`."""

    def __init__(self, cases: Sequence[MeasuredCase], on_progress: OnProgress = no_progress):
        self.cases = list(cases)
        self._later = np.array([case.mean_output_tokens - 1.0 for case in self.cases])
        members: dict[tuple[type[_Group], str, str, str], list[int]] = {}
        for index, case in enumerate(self.cases):
            deployment = case.deployment
            settled = case.method == "loop" and (case.steady or deployment.parallelism.pp > 1)
            kind = _Apart if case.service else _GROUPS["full" if settled else case.method]
            key = (kind, deployment.model.id, deployment.precision.id, deployment.kv_format)
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
        return columns


def quantity_of(case: MeasuredCase, metric: Metric) -> tuple[str, float]:
    """The column that a row's number is of, and the factor between them."""
    if metric.kind == "ttft":
        name = {"mean": "ttft_mean", "p50": "ttft_p50"}.get(metric.statistic, "ttft_p99")
        return name, 1.0
    if metric.kind == "tpot":
        return ("tpot" if metric.statistic in ("mean", "p50") else "tpot_p99"), 1.0
    if metric.kind == "throughput":
        counted = (case.input_tokens + case.output_tokens) / case.output_tokens if metric.with_input else 1.0
        return "output_tokens_per_s", counted / (case.gpus_counted(metric) if metric.per_gpu else 1.0)
    if metric.kind in ("batch", "step"):
        return "run", 1.0 if metric.kind == "batch" else 1.0 / case.output_tokens
    return metric.kind, 1.0

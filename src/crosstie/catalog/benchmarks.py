"""Benchmarks of agents' sessions and of shared prefixes: what their prompts are, where rows do not say it."""

import math
import re
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Annotated

import msgspec
import numpy as np

from crosstie.catalog.reading import Sources, only_keys, read_record, read_toml, table
from crosstie.catalog.reuse import Reuse, reuse
from crosstie.catalog.sessions import SESSIONS_AT_ONCE, read_shape, session_trace
from crosstie.catalog.traces import Floats, Trace
from crosstie.core.workload import SessionShape

_Count = Annotated[int, msgspec.Meta(ge=1, le=10**7)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Pace = Annotated[float, msgspec.Meta(ge=0.1, le=10)]
_SEED = 7
# Prompts of a benchmark of sessions that are looked at one by one.
_DRAWN = 400
# The most that a session may grow to where its benchmark sets no limit.
_LONGEST = 10**7


class _Described(msgspec.Struct, kw_only=True, dict=True):
    """Whose rows they are: a pattern of their scenario, and the models, where not all."""

    name: str
    scenario: str
    source: str
    date: str
    models: tuple[str, ...] = ()

    def describes(self, scenario: str, model: str) -> bool:
        return bool(re.search(self.scenario, scenario)) and (not self.models or model in self.models)


class SessionBenchmark(_Described):
    """Sessions replayed in a closed loop: so many are live at once."""

    # What a session is, with the keys of a class's `sessions`.
    session: dict[str, object]
    # A pause during which no other session waits for an answer is cut to this.
    pause_alone_s: _Seconds | None = None
    # Requests of a session and its sub-agents that may be under way at once.
    streams: Annotated[float, msgspec.Meta(ge=1, le=100)] = 1.0
    # Of what memory holds, the share that engines find again.
    finds: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    # By accelerator, TPOT as measured over that of steps as they were calibrated, on prompts a tenth as long.
    pace: dict[str, _Pace] = {}
    # The whole set was replayed before the measurement, which so found every prompt but for what is new to it.
    warm: bool = False

    @cached_property
    def shape(self) -> SessionShape:
        return read_shape(_FILE, "session", self.session, _LONGEST)

    @property
    def pause_s(self) -> float:
        return fmean(self.shape.pause_s)

    @property
    def lengths(self) -> tuple[float, float]:
        """Mean tokens of a prompt and of an answer."""
        return float(self.trace.input_tokens.mean()), float(self.trace.output_tokens.mean())

    @cached_property
    def trace(self) -> Trace:
        """Answers take as long as pauses: what decides is only the order in which turns come."""
        return session_trace(self.name, self.shape, max(self.pause_s, 1.0))[0]

    @cached_property
    def _reuse(self) -> Reuse:
        return reuse(self.trace)

    @cached_property
    def parts(self) -> tuple[Floats, Floats]:
        """Of prompts, evenly drawn, what is found and what is new where memory is endless, over the means of all."""
        inputs = self.trace.input_tokens
        found = np.bincount(self._reuse.request, self._reuse.tokens, len(inputs))
        new = inputs - found
        drawn = np.linspace(0, len(inputs) - 1, _DRAWN).astype(int)
        return found[drawn] / max(found.mean(), 1.0), new[drawn] / new.mean()

    @cached_property
    def wordier(self) -> float:
        """p90 over mean of an answer's tokens."""
        return float(np.quantile(self.trace.output_tokens, 0.9) / self.trace.output_tokens.mean())

    def cached_share(self, tokens_a_session: float) -> float:
        """Share of prompt tokens that a cache with so many tokens for each live session has."""
        if self.warm:
            return self.finds
        cached = self._reuse.cached_tokens(tokens_a_session * SESSIONS_AT_ONCE)
        return self.finds * cached / float(self.trace.input_tokens.sum())


class PrefixBenchmark(_Described):
    """Prompts in groups that begin alike, the same ones again and again, in stages of so many requests a second."""

    groups: _Count
    prompts: _Count
    shared: _Count
    question: _Count
    output: _Count
    # Seconds of a stage by its requests a second; of rates between them the nearest.
    stage_s: dict[str, _Seconds]

    @property
    def lengths(self) -> tuple[float, float]:
        return float(self.shared + self.question), float(self.output)

    def lasts_s(self, rate: float) -> float:
        return self.stage_s[min(self.stage_s, key=lambda rate_word: abs(float(rate_word) - rate))]

    @cached_property
    def trace(self) -> Trace:
        """Every prompt twice: what the first round leaves, the second finds."""
        block = math.gcd(self.shared, self.question)
        shared, own = self.shared // block, self.question // block
        chance, count = np.random.default_rng(_SEED), self.groups * self.prompts
        order = np.concatenate([chance.permutation(count) for _ in range(2)])
        first_own = self.groups * shared

        def blocks(prompt: int) -> tuple[int, ...]:
            group, begins = prompt // self.prompts * shared, first_own + prompt * own
            return (*range(group, group + shared), *range(begins, begins + own))

        same = np.ones(len(order), np.int64)
        return Trace(
            self.name, np.arange(len(order), dtype=np.float64), same * (self.shared + self.question),
            same * self.output, blocks=tuple(map(blocks, order.tolist())), block_tokens=block,
        )  # fmt: skip

    def held_tokens(self, requests: float, replicas: float) -> float:
        """Tokens of the distinct prompts and beginnings of so many requests at once on one of the replicas that share
        out the groups."""
        groups = max(self.groups / replicas, 1.0)

        def distinct(kinds: float) -> float:
            return kinds * (1.0 - math.pow(1.0 - 1.0 / max(kinds, 1.0 + 1e-9), requests))

        return distinct(groups) * self.shared + distinct(groups * self.prompts) * self.question

    def cached_share(self, cache_tokens: float, replicas: int) -> float:
        """Share of prompt tokens that each replica finds where requests go to any of so many."""
        if replicas not in self._reuse:
            self._reuse[replicas] = reuse(self.trace, replicas)
        again = np.arange(len(self.trace)) >= len(self.trace) // 2
        return float(self._reuse[replicas].curve(np.array([cache_tokens]), again)[0]) / (self.shared + self.question)

    @cached_property
    def _reuse(self) -> dict[int, Reuse]:
        return {}


Benchmark = SessionBenchmark | PrefixBenchmark
# The upper end of a usual 80% interval over its middle.
_FAR_SLOWER = 1.25
# No agent's prompts are shorter, so nothing needs to be looked up.
_SHORT = 20_000
_FILE = Path(str(files("crosstie.catalog") / "data" / "benchmarks.toml"))


def read_benchmarks(file: Path) -> tuple[Benchmark, ...]:
    raw = dict(read_toml(file))
    sources = Sources(file, raw.pop("sources", None))
    only_keys(file, "", raw, {"sessions", "prefixes"})
    read: list[Benchmark] = []
    for name, entry in table(file, "sessions", raw.get("sessions", {})).items():
        where = f"sessions.{name}"
        described = {**table(file, where, entry), "name": name}
        session = table(file, f"{where}.session", described.pop("session", None))
        read_shape(file, f"{where}.session", session, _LONGEST)
        read.append(read_record(file, where, described, SessionBenchmark, sources, session=session))
    for name, entry in table(file, "prefixes", raw.get("prefixes", {})).items():
        where = f"prefixes.{name}"
        read.append(read_record(file, where, {**table(file, where, entry), "name": name}, PrefixBenchmark, sources))
    return tuple(read)


@cache
def shipped_benchmarks() -> tuple[Benchmark, ...]:
    return read_benchmarks(_FILE)


def at_length(accelerator: str, input_tokens: float) -> str:
    """What agents' runs say of steps at such prompts, where they took far longer than shorter ones let expect; "" else.

    Estimates do not count it: these runs are of one model, and leave open whether the engine or the GPU is slow.
    """
    for bench in shipped_benchmarks() if input_tokens > _SHORT else ():
        if isinstance(bench, SessionBenchmark) and bench.pace.get(accelerator, 0.0) > _FAR_SLOWER:
            measured = bench.lengths[0]
            if input_tokens > 0.5 * measured:
                return (
                    f"beyond calibration: agents' runs with prompts of {round(measured, -3):,.0f} tokens took "
                    f"{bench.pace[accelerator]:g} times as long a token as the model says (benchmark {bench.name}, "
                    "docs/accuracy.md); not counted here"
                )
    return ""

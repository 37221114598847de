"""How published benchmarks were run where their rows do not say: agents' sessions, shared prefixes, rules, data sets
and MLPerf's layouts."""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Annotated

import msgspec
import numpy as np

from crosstie.catalog.acceptance import parse_speculation
from crosstie.catalog.reading import Sources, only_keys, read_record, read_records, read_toml, table, text, text_of
from crosstie.catalog.reuse import Reuse, reuse
from crosstie.catalog.sessions import SESSIONS_AT_ONCE, read_shape, session_trace
from crosstie.catalog.traces import Floats, Trace
from crosstie.core.deployment import kv_bytes_per_element
from crosstie.core.errors import BadData, BadInput
from crosstie.core.fact import Word
from crosstie.core.speculation import Text
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


_COLUMNS = (
    "rows", "engines", "vendors", "accelerators", "models", "bits", "lengths", "attention", "sides", "load", "prompts",
)  # fmt: skip
_Column = Annotated[str, Word("what a rule may be narrowed by", _COLUMNS)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Amount = Annotated[float, msgspec.Meta(gt=0, le=1e7)]
Steps = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class BenchmarkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a benchmark set; None where it kept the engine's default."""

    kv_format: str | None = None
    # The shortest request over the nominal length: lengths are uniform between the two.
    shortest: Share | None = None
    requests_per_client: Amount | None = None
    # Tokens of a step's prompts: the larger of a number and a multiple of the prompt.
    chunk_tokens: Amount | None = None
    chunk_inputs: Amount | None = None
    max_sequences: Amount | None = None
    memory_fraction: Share | None = None
    # Steps between two looks at arrivals, with many clients and with few.
    receive_every: Steps | None = None
    receive_every_few: Steps | None = None
    few_clients: Amount | None = None
    # How rows that speculate did so, such as mtp:3, and on which kind of text.
    speculation: str | None = None
    text: Text | None = None
    # Memory of the host for each GPU that keeps what the GPU's cache drops.
    host_gib_per_gpu: Amount | None = None
    # Live sessions a GPU from which on recipes replicate attention, where rows do not say that they did.
    replicated_from: Amount | None = None
    # What the first request of each client waits for beside its prompt: kernels that are compiled when they are met.
    first_wave_s: Amount | None = None

    def over(self, other: "BenchmarkSettings") -> "BenchmarkSettings":
        """These settings, and the other's where these say nothing."""
        mine = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(other, **mine)


class ProtocolRule(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    when: dict[_Column, tuple[str, ...]]
    set: BenchmarkSettings
    source: str
    date: str

    def holds(self, of: Mapping[str, str]) -> bool:
        return all(of[key] in allowed for key, allowed in self.when.items())


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """Mean lengths of a data set in tokens; the basis is that of the input length."""

    input_mean: float
    output_mean: float | None
    basis: str
    # (round, scenario) to the p99 limits of TTFT and TPOT in seconds.
    limits: dict[tuple[str, str], tuple[float, float]]


class Protocols:
    def __init__(self, folder: Path | None = None):
        self._folder = folder or Path(str(files("crosstie.catalog") / "data"))

    @cached_property
    def rules(self) -> tuple[ProtocolRule, ...]:
        return read_rules(self._folder / "protocols.toml")

    @cached_property
    def datasets(self) -> dict[str, Dataset]:
        return read_datasets(self._folder / "datasets.toml")

    @cached_property
    def layouts(self) -> dict[tuple[str, str, str], dict[str, str]]:
        """(accelerator, model, scenario), folded, to the layout that most submissions have."""
        splits: dict[tuple[str, str, str], Counter[tuple[tuple[str, str], ...]]] = {}
        file = self._folder / "mlperf_layouts.csv"
        rows = list(csv.DictReader(io.StringIO(text_of(file))))
        needed = {"accelerator", "model", "scenario", "tp", "pp", "ep", "attention_dp", "weights"}
        missing = sorted(needed - set(rows[0] if rows else needed))
        if missing:
            raise BadData(file, "", f"lacks the column {missing[0]}")
        for row in rows:
            if None not in row.values():
                key = (row["accelerator"].casefold(), row["model"].casefold(), row["scenario"].casefold())
                layout = {name: row[name].partition("|")[0] for name in ("tp", "pp", "ep", "attention_dp", "weights")}
                if layout["tp"]:
                    splits.setdefault(key, Counter())[tuple(layout.items())] += 1
        return {key: dict(counts.most_common(1)[0][0]) for key, counts in splits.items()}

    def settings(self, of: Mapping[str, str]) -> tuple[BenchmarkSettings, tuple[str, ...]]:
        """What the rules say about a row, and the names of those that spoke."""
        result, spoke = BenchmarkSettings(), []
        for rule in self.rules:
            if rule.holds(of):
                result = rule.set.over(result)
                spoke.append(rule.name)
        return result, tuple(spoke)


@cache
def shipped_protocols() -> Protocols:
    return Protocols()


def read_rules(file: Path) -> tuple[ProtocolRule, ...]:
    raw = read_toml(file)
    only_keys(file, "", raw, {"sources", "rule"})
    sources = Sources(file, raw.get("sources"))
    rules = read_records(file, "rule", raw["rule"], ProtocolRule, sources) if "rule" in raw else ()
    for index, rule in enumerate(rules):
        try:
            if rule.set.kv_format:
                kv_bytes_per_element(rule.set.kv_format)
            if rule.set.speculation:
                parse_speculation(rule.set.speculation)
        except BadInput as error:
            raise BadData(file, f"rule[{index}].set", str(error)) from None
    return rules


_DATASET = {"dataset", "samples", "input_mean", "input_min", "input_max", "output_mean", "output_mean_submitted",
            "output_max", "limits"}  # fmt: skip


def read_datasets(file: Path) -> dict[str, Dataset]:
    raw = dict(read_toml(file))
    Sources(file, raw.pop("sources", None))
    datasets = {}
    for name, entry in raw.items():
        entry = table(file, name, entry)
        only_keys(file, name, entry, _DATASET)
        mean = table(file, f"{name}.input_mean", entry.get("input_mean"))
        if not isinstance(mean.get("value"), int | float):
            raise BadData(file, f"{name}.input_mean.value", "must be a number")
        try:
            limits = {
                (day, limit["scenario"].casefold()): (limit["ttft_ms"] / 1e3, limit["tpot_ms"] / 1e3)
                for limit in entry.get("limits", [])
                for day in limit["rounds"]
            }
        except (KeyError, TypeError, AttributeError):
            raise BadData(file, f"{name}.limits", "needs rounds, scenario, ttft_ms and tpot_ms") from None
        output = table(file, f"{name}.output_mean", entry.get("output_mean", {}))
        if not isinstance(output.get("value", 0.0), int | float):
            raise BadData(file, f"{name}.output_mean.value", "must be a number")
        datasets[name.casefold()] = Dataset(
            input_mean=float(mean["value"]),
            output_mean=float(output["value"]) if "value" in output else None,
            basis=text(file, f"{name}.input_mean.basis", mean.get("basis")),
            limits=limits,
        )
    return datasets

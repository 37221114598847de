"""Operating points as cases that the model can predict: names resolved, lengths and layout made plain."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from crosstie.catalog.benchmarks import (
    Benchmark,
    BenchmarkSettings,
    PrefixBenchmark,
    Protocols,
    SessionBenchmark,
    shipped_benchmarks,
    shipped_protocols,
)
from crosstie.catalog.calibration import CalibrationSubject, subject_of
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator, Deployment, Parallelism, Stack
from crosstie.core.disaggregated import Disaggregated
from crosstie.core.errors import UnknownName
from crosstie.core.fact import Fact
from crosstie.core.model import Model
from crosstie.perf.fit import smallest_layout
from crosstie.perf.memory import cache_sequences, gpu_weight_bytes, memory_plan
from crosstie.prove.calibration.cached import with_cached
from crosstie.prove.calibration.columns import (
    DECIMAL,
    SAYS_NO,
    NotPredicted,
    checkpoint_of,
    engine_of,
    in_nodes,
    layout_of,
    length,
    number,
    positive,
    precision_of,
    row_settings,
    sides_of,
    speculation_of,
    whole,
)
from crosstie.prove.calibration.results import Metric, OperatingPoint

Method = Literal["loop", "batch", "full", "limits", "rate", "alone", "sessions"]


@dataclass(frozen=True)
class MeasuredCase:
    """A deployment under a load, and how that was measured.

    method: loop (clients that send again), batch (all at once, none after), full (as many as memory takes),
    limits (the most within latency limits), rate (arrivals by the clock), alone (one step's GPU work),
    sessions (clients are live sessions, which pause between two requests)
    """

    point: OperatingPoint
    deployment: Deployment
    method: Method
    replicas: float
    # Over all replicas; 0 where the method decides.
    clients: float
    input_tokens: float
    output_tokens: float
    requests: int = 0
    shortest: float = 1.0
    receive_every: int = 1
    first_wave_s: float = 0.0
    # Clients of a loop that have been at it for long: no start burst, and no lock-step of equal requests.
    steady: bool = False
    requests_per_s: float = 0.0
    # Of a stage with a rate; 0 where nobody says how long it was.
    lasts_s: float = 0.0
    ttft_limit_s: float = 0.0
    tpot_limit_s: float = 0.0
    # Prompt tokens that a cache has, and what loading those takes that another memory keeps.
    cached_tokens: float = 0.0
    load_s: float = 0.0
    # Of these, what a replica's memory holds once for all of its requests.
    shared_tokens: float = 0.0
    # Whose prompts these are, where they are sessions' or begin alike.
    benchmark: Benchmark | None = None
    # What the row did not say: rules that spoke, and what was assumed.
    assumed: tuple[str, ...] = ()
    # Prefill and decode apart; `deployment` is then the decode side's.
    service: Disaggregated | None = None

    @property
    def gpus(self) -> float:
        return self.service.gpus if self.service else self.deployment.parallelism.gpus * self.replicas

    @property
    def load(self) -> float:
        """Requests in flight a GPU; 0 where the method decides."""
        return self.clients / self.gpus

    def gpus_counted(self, metric: Metric) -> float:
        """Those that a rate per GPU is divided by: InferenceX divides output tokens by the decode side's alone."""
        if self.service and not metric.with_input and _OWN_COUNT in self.point["notes"]:
            return self.service.decode_gpus
        return self.gpus

    @property
    def mean_output_tokens(self) -> float:
        return self.output_tokens * (1.0 + self.shortest) / 2.0


# What notes say of such rows; their Little's law closes over the decode GPUs, that of tokens in and out over all.
_OWN_COUNT = "per-GPU normalisation is InferenceX own"
_LIMITS = re.compile(rf"p99 limits TTFT ({DECIMAL}) ms TPOT ({DECIMAL}) ms")
_RATE = re.compile(rf"(?:rate|open loop,) ({DECIMAL}) req(?:uest)?s?/s")
# Scenarios whose prompts begin alike: how much of them the cache served decides everything.
_ALIKE = re.compile(r"shared[- ]prefix|prefix groups")
_SEQUENCES = re.compile(r"max_num_seqs (\d+)")
# The engine's own number, not that of the system that its container is built on.
_RELEASE = re.compile(
    r"(?:atom|vllm[:-]v?|sglang[:-]v?)(\d+\.\d+(?:\.\d+)?)|^\D*?(?<!rocm)(?<!ROCm )(\d+\.\d+(?:\.\d+)?)"
)
_MONTH = re.compile(r"\b(20\d\d)-(\d\d)")
_NIGHTLY = re.compile(r"nightly_(20\d\d)(\d\d)")
_ALONE = ("decode_step", "prefill")
_ROUNDS = 10.0
_MOST_CLIENTS = 100_000
# Shares of memory that recipes give an engine whose weights nearly fill the GPUs (InferenceX: 0.95 for DeepSeek-R1 in
# FP8 on four B200 and for DeepSeek-V4-Pro on eight H200), and the most that a driver leaves.
_MORE_MEMORY = (0.95, 0.99)
# Requests in flight a GPU from which on recipes draft less.
_HEAVY = 20


class Cases:
    """Resolves points; deployments that many points share are made once."""

    def __init__(self, catalog: Catalog, protocols: Protocols | None = None):
        self.catalog, self.protocols = catalog, protocols or shipped_protocols()
        self.benchmarks = shipped_benchmarks()
        self._deployments: dict[tuple[str, ...], Deployment] = {}

    def of(self, point: OperatingPoint) -> MeasuredCase:
        """Raises a CrosstieError with the reason why there is none."""
        name, gpus = point["accelerator"], whole(point, "num_accelerators", default=whole(point, "tp", default=1))
        for given in (name, point["model"]):
            # On the command line a name may be a file; a row of somebody's table may not have files read.
            if given.endswith((".toml", ".json")) or given.startswith((".", "/", "~")):
                raise NotPredicted(f"'{given[:40]}' is no name of the catalog")
        accelerator, (model, stored) = self.catalog.accelerator(name), checkpoint_of(self.catalog, point)
        alone = any(row.metric.kind in _ALONE for row in point.rows)
        engine = engine_of(self.catalog, point, alone)
        scenario = point["scenario"].casefold()
        layout = self.protocols.layouts.get((name.casefold(), point["model"].casefold(), scenario), {})
        published = layout if is_mlperf(point) else {}
        precision = precision_of(published.get("weights") or point["precision"] or stored, model, accelerator)
        assumed: list[str] = []
        if published.get("weights") and published["weights"] != point["precision"].casefold():
            assumed.append(f"precision {published['weights']}, as the submission's configuration says")
        if not point["engine"] and not alone:
            assumed.append("engine")
        benchmark = self._benchmark(scenario, model)
        inputs, outputs = self._lengths(point, model, alone, assumed, benchmark)
        if benchmark is None and _ALIKE.search(scenario):
            raise NotPredicted("prompts share prefixes, and the row does not say how much of them the cache served")
        plain = self._deployment(model, accelerator, Parallelism(), precision, "bf16", engine, BenchmarkSettings(), 0.0)
        apart = point["disagg"].casefold() not in SAYS_NO
        split = None if apart else layout_of(point, published, model, gpus)
        settings, spoke = self.protocols.settings(
            {
                "rows": point["protocol"] or point["source_id"],
                "engines": plain.stack.id,
                "vendors": accelerator.vendor,
                "accelerators": accelerator.id,
                "models": model.id,
                "bits": plain.weight_width,
                "lengths": f"{point['input_len']}/{point['output_len']}",
                "attention": "replicas" if split is not None and split.dp > 1 else "shared",
                "sides": "apart" if apart else "together",
                "load": "heavy" if (number(point["concurrency"]) or 0.0) >= _HEAVY * gpus else "light",
                "prompts": benchmark.name if benchmark else "",
            }
        )
        settings = row_settings(point).over(settings)
        if split is not None and _unsaid(point, model, split, settings):
            split = Parallelism(dp=split.tp, ep=split.tp)
            assumed.append("attention in replicas")
        speculation, drafting = speculation_of(self.catalog, point, model, plain.stack.id, settings)
        assumed += drafting

        def laid_out(split: Parallelism, share: float | None) -> Deployment:
            given = msgspec.structs.replace(settings, memory_fraction=share) if share else settings
            kv_format = settings.kv_format or "bf16"
            made = self._deployment(model, accelerator, split, precision, kv_format, engine, given, inputs)
            return msgspec.structs.replace(made, speculation=speculation)

        context = inputs if alone else inputs + outputs
        if apart:
            prefill, decode, said = sides_of(point, model, gpus, accelerator.domain)
            if not said:
                assumed.append("layout of both sides")
            pools = _fitting(laid_out, (prefill.split, decode.split), context, assumed)
            service = self._service(point, (pools[0], pools[1]), (prefill.replicas, decode.replicas), assumed)
            if service.gpus != gpus:
                assumed.append(f"{service.gpus} GPUs, as the layout has them")
            deployment, replicas = service.decode, 1.0
        else:
            if split is None:
                split = self._smallest(model, accelerator, precision, engine, inputs, outputs)
                assumed.append("layout")
            pieces = in_nodes(split, model, accelerator.domain)
            if pieces != split:
                split = pieces
                assumed.append("attention in a piece for each node")
            if gpus and not point["num_accelerators"]:
                gpus = max(gpus, split.gpus)
            if 0 < split.gpus <= gpus and gpus % split.gpus:
                raise NotPredicted(f"{gpus} GPUs are no whole number of replicas of {split}")
            if split.gpus > gpus:
                raise NotPredicted(f"{split} needs {split.gpus} GPUs and the row has {gpus}")
            (deployment,) = _fitting(laid_out, (split,), context, assumed)
            service, replicas = None, gpus / split.gpus
        case = MeasuredCase(
            point=point, deployment=deployment, method="alone" if alone and not apart else "loop", replicas=replicas,
            clients=0.0, input_tokens=inputs, output_tokens=outputs, shortest=settings.shortest or 1.0,
            first_wave_s=0.0 if apart else settings.first_wave_s or 0.0, assumed=(*assumed, *spoke), service=service,
            steady=point["arrivals"] == "steady", benchmark=benchmark,
        )  # fmt: skip
        return self._corrected(with_cached(self._loaded(case, settings), settings))

    def _benchmark(self, scenario: str, model: Model) -> Benchmark | None:
        return next((benchmark for benchmark in self.benchmarks if benchmark.describes(scenario, model.id)), None)

    def _corrected(self, case: MeasuredCase) -> MeasuredCase:
        """With what calibration says of the measurement's own scopes; both sides of a service have theirs."""

        def corrected(deployment: Deployment) -> Deployment:
            subject = measured_subject(replace(case, deployment=deployment))
            return msgspec.structs.replace(deployment, correction=self.catalog.correction(subject))

        service = case.service
        if service:
            prefill, decode = corrected(service.prefill), corrected(service.decode)
            service = msgspec.structs.replace(service, prefill=prefill, decode=decode)
        return replace(case, deployment=corrected(case.deployment), service=service)

    def _service(
        self, point: OperatingPoint, pools: tuple[Deployment, Deployment], replicas: tuple[int, int], assumed: list[str]
    ) -> Disaggregated:
        prefill, decode = pools
        try:
            connector = self.catalog.connector(point["engine"])
        except UnknownName:
            connector = self.catalog.connector_for(decode.stack, decode.accelerator)
            assumed.append("connector")
        service = Disaggregated(
            prefill=prefill,
            prefill_replicas=replicas[0],
            decode=decode,
            decode_replicas=replicas[1],
            connector=connector,
        )
        # Inside a rack that one fabric joins, the cache takes that way.
        joined = service.gpus <= decode.accelerator.domain
        return msgspec.structs.replace(service, link="fabric") if joined else service

    def _loaded(self, case: MeasuredCase, settings: BenchmarkSettings) -> MeasuredCase:
        """The case under its load, as the row describes it."""
        point, scenario = case.point, case.point["scenario"].casefold()
        clients = number(point["concurrency"])
        sequences = _SEQUENCES.search(point["concurrency"])
        rate = _RATE.search(point["concurrency"])

        def with_load(method: Method, **load: float) -> MeasuredCase:
            return replace(case, method=method, **load)  # type: ignore[arg-type]

        if clients is not None and not 1 <= clients <= _MOST_CLIENTS:
            short = "less than one client" if clients < 1 else "more clients than a schedule is made for"
            raise NotPredicted(f"concurrency {point['concurrency'][:40]} is {short}")
        if case.method == "alone":
            if clients is None and point["concurrency"]:
                raise NotPredicted("concurrency is no number")
            return with_load("alone", clients=clients or 1.0)
        prompts = positive(point, "num_prompts")
        whole_batch = any(row.metric.kind in ("batch", "step") for row in point.rows)
        if clients is not None and ("batch" in scenario or whole_batch):
            return with_load("batch", clients=clients, requests=round(clients))
        if clients is not None and isinstance(case.benchmark, SessionBenchmark):
            return with_load("sessions", clients=clients, requests=round(prompts or 0))
        if clients is not None:
            prompts = prompts or (settings.requests_per_client or _ROUNDS) * clients
            every = settings.receive_every or 1
            if settings.few_clients is not None and clients <= settings.few_clients:
                every = settings.receive_every_few or every
            return with_load("loop", clients=clients, requests=round(prompts), receive_every=every)
        if sequences:
            prompts = prompts or float(sequences[1])
            return with_load("batch", clients=prompts, requests=round(prompts))
        if rate:
            if not float(rate[1]) > 0:
                raise NotPredicted("a rate of no requests is no load")
            lasts = case.benchmark.lasts_s(float(rate[1])) if isinstance(case.benchmark, PrefixBenchmark) else 0.0
            prompts = prompts or lasts * float(rate[1])
            return with_load("rate", requests_per_s=float(rate[1]), requests=round(prompts), lasts_s=lasts)
        if scenario == "offline" or "max load" in point["concurrency"] or "rate inf" in scenario:
            return with_load("full")
        if scenario in ("server", "interactive"):
            ttft, tpot = self._limits(point, case.deployment.model)
            return with_load("limits", ttft_limit_s=ttft, tpot_limit_s=tpot)
        raise NotPredicted("concurrency is no number" if point["concurrency"] else "concurrency is missing")

    def _limits(self, point: OperatingPoint, model: Model) -> tuple[float, float]:
        if said := _LIMITS.search(point["notes"]):
            return float(said[1]) / 1e3, float(said[2]) / 1e3
        dataset = self.protocols.datasets.get(model.id)
        limits = dataset.limits if dataset else {}
        known = {day: limit for (day, name), limit in limits.items() if name == point["scenario"].casefold()}
        if not known:
            raise NotPredicted("the latency limits are not known")
        # The row's own round, or the last one that had the scenario.
        own = [limit for day, limit in known.items() if day in point["source_id"]]
        return (own or list(known.values()))[-1]

    def _lengths(
        self, point: OperatingPoint, model: Model, alone: bool, assumed: list[str], benchmark: Benchmark | None
    ) -> tuple[float, float]:
        inputs, outputs = length(point, "input_len"), length(point, "output_len")
        if benchmark and inputs is None and outputs is None:
            inputs, outputs = benchmark.lengths
            assumed.append(f"lengths of {benchmark.name} ({benchmark.date})")
        dataset = self.protocols.datasets.get(model.id) if is_mlperf(point) else None
        if inputs is None and dataset:
            inputs = dataset.input_mean
            assumed.append(f"input length of the data set ({dataset.basis})")
        if outputs is None and dataset:
            outputs = dataset.output_mean
        if alone:
            outputs = outputs or 1.0
        if inputs is None:
            raise NotPredicted("input_len is no number" if point["input_len"] else "input_len is missing")
        if outputs is None:
            raise NotPredicted("output_len is no number" if point["output_len"] else "output_len is missing")
        model.check_context(round(inputs + (0 if alone else outputs)), "input plus output")
        return inputs, outputs

    def _smallest(
        self, model: Model, accelerator: Accelerator, precision: str, engine: str | None, inputs: float, outputs: float
    ) -> Parallelism:
        """The fewest GPUs that hold a fair batch, as one would deploy replicas."""
        smallest = smallest_layout(
            self.catalog, model, accelerator, context=round(inputs + outputs), sequences=32, precision=precision,
            kv_format="fp8", stack=engine,
        )  # fmt: skip
        if smallest is None:
            raise NotPredicted("the model fits no layout of this accelerator by the memory model")
        return smallest.deployment.parallelism

    def _deployment(
        self, model: Model, accelerator: Accelerator, split: Parallelism, precision: str, kv_format: str,
        engine: str | None, settings: BenchmarkSettings, inputs: float,
    ) -> Deployment:  # fmt: skip
        key = (model.id, accelerator.id, precision, engine or "", kv_format)
        if key not in self._deployments:
            self._deployments[key] = self.catalog.deployment(
                model, accelerator, Parallelism(), precision, kv_format, engine
            )
        first = self._deployments[key]
        return msgspec.structs.replace(first, parallelism=split, stack=set_stack(first, settings, inputs))


def _unsaid(point: OperatingPoint, model: Model, split: Parallelism, settings: BenchmarkSettings) -> bool:
    """Whether recipes replicate attention at such a load, where a row does not say it."""
    at, plain = settings.replicated_from, split.dp == split.ep == 1 < split.tp
    return at is not None and model.is_moe and plain and (number(point["concurrency"]) or 0.0) >= at * split.gpus


def _fitting(
    laid_out: Callable[[Parallelism, float | None], Deployment], splits: tuple[Parallelism, ...], context: float,
    assumed: list[str],
) -> tuple[Deployment, ...]:  # fmt: skip
    """It ran, so it fitted: where the usual share of memory is too small, who ran it gave the engine more."""
    made: tuple[Deployment, ...] = ()
    for share in (None, *_MORE_MEMORY):
        made = tuple(laid_out(split, share) for split in splits)
        # What was measured served at least one request at a time.
        if all(memory_plan(each).fits and float(cache_sequences(each, context)) >= 1.0 for each in made):
            assumed.extend([f"memory fraction {share:g}"] if share else [])
            return made
    if any(gpu_weight_bytes(deployment) >= deployment.accelerator.memory_bytes for deployment in made):
        raise NotPredicted("the weights alone exceed the memory of the GPUs that the row has")
    raise NotPredicted("the weights leave no room for the cache by the memory model")


def is_mlperf(point: OperatingPoint) -> bool:
    """By its scenarios, whoever collected the row: lengths are then the data set's."""
    return point["scenario"].casefold() in ("offline", "server", "interactive")


def measured_subject(case: MeasuredCase) -> CalibrationSubject:
    campaign = campaign_of(case)
    source = "" if campaign else case.point["source_id"]
    return subject_of(
        case.deployment, release=release_of(case), campaign=campaign, source=source, month=month_of(case),
        apart=case.service is not None,
    )  # fmt: skip


def month_of(case: MeasuredCase) -> str:
    """When it was measured, "2026-05"; the middle of the time that a median is over."""
    # "published (dump; runs from to)": the runs count.
    months = [int(year) * 12 + int(month) - 1 for year, month in _MONTH.findall(case.point["date"])][-2:]
    if not months:
        return ""
    middle = sum(months) // len(months)
    return f"{middle // 12}-{middle % 12 + 1:02d}"


def release_of(case: MeasuredCase) -> str:
    """Number of the engine's release; MLPerf's rounds stand for releases of its submitters' stacks."""
    if campaign_of(case):
        return case.point["source_id"]
    said = case.point["engine_version"]
    if nightly := _NIGHTLY.search(said):
        return f"nightly {nightly[1]}-{nightly[2]}"
    release = _RELEASE.search(said)
    return release[1] or release[2] if release else ""


def campaign_of(case: MeasuredCase) -> str:
    """MLPerf's submissions are tuned by hand for one load, each scenario in its own way."""
    if not is_mlperf(case.point):
        return ""
    return "MLPerf " + ("with limits" if case.method == "limits" else "offline")


def set_stack(deployment: Deployment, settings: BenchmarkSettings, inputs: float) -> Stack:
    """The stack with what the benchmark set; facts keep their source, so that nobody takes them for defaults."""
    stack = deployment.stack
    chunk = max(settings.chunk_tokens or 0.0, (settings.chunk_inputs or 0.0) * inputs)
    changes: dict[str, Fact] = {}
    for name, value in (
        ("chunk_tokens", chunk or None),
        ("max_sequences", settings.max_sequences),
        ("memory_fraction", settings.memory_fraction),
    ):
        if value is not None:
            changes[name] = msgspec.structs.replace(getattr(stack, name), value=value, note="set by the benchmark")
    if not changes:
        return stack
    # What sets the limit sets it with speculation too.
    own = stack.speculative_sequences if settings.max_sequences is None else None
    return msgspec.structs.replace(stack, **changes, small=None, speculative_sequences=own)

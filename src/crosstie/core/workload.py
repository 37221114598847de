"""What users ask of a fleet: models, classes of requests with their lengths, rates and latency targets.

A class is cut into slices by the length of the prompt, so that long prompts may go to another pool than
short ones, and so that a target at a percentile knows which requests it may miss.
"""

import math
from typing import Annotated, ClassVar, Literal, get_args

import msgspec

from crosstie.core.deployment import LoraTargets, known_kv_format
from crosstie.core.fact import FileKey, Form, KeyRule, NounName
from crosstie.core.images import Encoder
from crosstie.core.question import USUAL
from crosstie.core.schedule import ScheduleRequest
from crosstie.core.speculation import DEEPEST, Text

# A percentile target leaves a share of requests that may miss it. Half of that share goes to the longest
# prompts, half to moments of high load: by the union bound the rest meets it.
_LENGTH_SHARE = 0.5

# What a workload that comes from a saved plan is held to; files are held to more by their reader.
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Tokens = Annotated[float, msgspec.Meta(ge=1)]
_Cached = Annotated[float, msgspec.Meta(ge=0)]
_WholeTokens = Annotated[int, msgspec.Meta(ge=1)]
_Rate = Annotated[float, msgspec.Meta(ge=1e-6)]
_Years = Annotated[int, msgspec.Meta(ge=1, le=10)]
_Gpus = Annotated[int, msgspec.Meta(ge=0, le=10**7)]
_UsdPerGpuHour = Annotated[float, msgspec.Meta(ge=0.001, le=1000)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Accelerator = Annotated[str, NounName("accelerator")]
_Vendor = Annotated[str, NounName("vendor")]
# Off a price; what is free is no price.
MOST_DISCOUNT = 0.99
_Some = msgspec.Meta(min_length=1)

# Where the weights of a model that shares replicas come from: the host's memory (vLLM's sleep, level 1), a disk into an
# engine that is kept (level 2), or a disk into an engine that is started for it.
LoadFrom = Literal["host", "disk", "start"]

# What competes in a plan: "any" that fits; "stack": of a model on an accelerator the stacks that somebody has measured
# with it there, else those measured with models of its kind; "layout": of these the layouts measured with it.
Evidence = Literal["any", "stack", "layout"]
EVIDENCE: tuple[str, ...] = get_args(Evidence)

_SURE = {"safe": USUAL.sure, "likely": 0.5}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A latency that this share of a class's requests must keep."""

    seconds: _Positive
    percentile: Annotated[float, msgspec.Meta(gt=0, lt=1)]

    @property
    def longest_exempt(self) -> float:
        """Share of requests, those with the longest prompts, that may miss it by their length alone."""
        return (1.0 - self.percentile) * _LENGTH_SHARE


class Pictures(msgspec.Struct, frozen=True, kw_only=True):
    """What an encoder has to look at for a request: parts of its pictures, and the patches of each."""

    encoder: Encoder
    patches: _Tokens
    parts: _Positive


class HitCurve(msgspec.Struct, frozen=True, kw_only=True):
    """What a cache has of a slice's prompts on average, measured on a trace: tokens by the size of the cache.

    A row for each number of replicas that requests are spread over without regard to what they hold; the first is one
    replica, or conversations that stay together. Sizes are of each replica, at the trace's own rate.
    """

    # Tokens of prompts and answers, of the trace and of the class that the slice belongs to.
    tokens_per_s: _Rate
    class_tokens_per_s: _Rate
    cache_tokens: Annotated[tuple[_Tokens, ...], _Some]
    replicas: Annotated[tuple[_WholeTokens, ...], _Some]
    cached_tokens: Annotated[tuple[tuple[_Cached, ...], ...], _Some]


# Sizes of the memory beside the GPU's that keeps prefixes, the quickest first, each with the rate of loading from it.
TIERS = {"host_gib_per_gpu": "host_gb_per_s", "nvme_gib_per_gpu": "nvme_gb_per_s", "remote_gib": "remote_gb_per_s"}
TIER_RULES = tuple(KeyRule("needs", (rate,), (size,), f"has no meaning without {size}") for size, rate in TIERS.items())


class PrefixReuse(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a class's prompts engines have computed before, and where that is kept meanwhile."""

    rules: ClassVar[tuple[KeyRule, ...]] = TIER_RULES

    # Share of prompt tokens; None: what `shared_tokens` or the trace says.
    hit_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    # Tokens that every prompt begins with, such as a system prompt; each replica holds them once.
    shared_tokens: Annotated[int, msgspec.Meta(ge=0, le=10**8)] = 0
    # Seconds between an answer and the next turn, during which both must stay in memory to be found again.
    idle_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    # Measured on the class's trace, for the memory that each replica has.
    measured: bool = False
    # Whether requests go where their prefix is held, as the gateway sends them, or anywhere.
    routing: Literal["gathered", "spread"] = "gathered"
    # Memory beside the GPU's that keeps what was dropped there: the host's and its drives' for each GPU, and one that
    # all share.
    host_gib_per_gpu: Annotated[float, msgspec.Meta(ge=0, le=1e5)] = 0.0
    nvme_gib_per_gpu: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    remote_gib: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    # Rates at which each GPU loads from there; None: the catalog's.
    host_gb_per_s: Annotated[float, msgspec.Meta(ge=0.1, le=1e4)] | None = None
    nvme_gb_per_s: Annotated[float, msgspec.Meta(ge=0.01, le=1e4)] | None = None
    remote_gb_per_s: Annotated[float, msgspec.Meta(ge=0.01, le=1e4)] | None = None


class SubAgents(msgspec.Struct, frozen=True, kw_only=True):
    """What a session sends off at once after some of its turns, and waits for: each a conversation of its own, or with
    one turn each a call of several at once. Values as in `SessionShape`."""

    # Of turns that another follows, those after which there are any; and how many at once.
    share: float
    count: Annotated[tuple[float, ...], _Some]
    # Whether their prompts go on from the whole conversation, or begin with what all sessions begin with.
    forks: bool
    turns: Annotated[tuple[float, ...], _Some]
    first: Annotated[tuple[float, ...], _Some]
    added: Annotated[tuple[float, ...], _Some]
    output: Annotated[tuple[float, ...], _Some]
    pause_s: Annotated[tuple[float, ...], _Some]


class SessionShape(msgspec.Struct, frozen=True, kw_only=True):
    """One session: values that each turn draws from, evenly; lengths in tokens."""

    turns: Annotated[tuple[float, ...], _Some]
    # What every session of the class begins with: system prompt and tools.
    system: float
    # The user's first message; what a tool or the user adds to each later prompt; the model's answers.
    first: Annotated[tuple[float, ...], _Some]
    added: Annotated[tuple[float, ...], _Some]
    output: Annotated[tuple[float, ...], _Some]
    # From an answer's end to the next prompt.
    pause_s: Annotated[tuple[float, ...], _Some]
    # Prompt and answer at most; what the conversation is summarised to when they would exceed it.
    context: float
    compact_to: float
    subagents: SubAgents | None = None

    @property
    def requests(self) -> float:
        """Of a session, its sub-agents' among them: the mean."""
        turns, helpers = math.fsum(self.turns) / len(self.turns), self.subagents
        if helpers is None:
            return turns
        each = math.fsum(helpers.count) / len(helpers.count) * math.fsum(helpers.turns) / len(helpers.turns)
        return turns + max(turns - 1.0, 0.0) * helpers.share * each


class SessionTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Agents or chats whose turns a class's requests are; means over sessions and turns."""

    # At work at once at the peak, pausing or waiting for an answer.
    live: _Positive
    # Requests of a session, those of its sub-agents among them.
    turns: Annotated[float, msgspec.Meta(ge=1)]
    # Between an answer's end and the next prompt, and what an answer may take by its TPOT target.
    pause_s: Annotated[float, msgspec.Meta(ge=0)]
    answer_s: Annotated[float, msgspec.Meta(ge=0)]
    # Of sessions, those that solve their task; None: nobody said.
    success_rate: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    shape: SessionShape


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters that the requests of a class ask for, one each."""

    rules: ClassVar[tuple[KeyRule, ...]] = (
        KeyRule(
            "excludes",
            ("zipf", "adapters"),
            ("popularity",),
            "has no meaning beside popularity, which has a weight an adapter",
        ),
    )

    adapters: Annotated[int, msgspec.Meta(ge=1, le=100_000)]
    # The largest rank, which every slot has room for.
    rank: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    targets: LoraTargets = "all"
    # The n-th most popular is asked for in proportion to n^-zipf, unless each has a weight of its own.
    zipf: Annotated[float, msgspec.Meta(ge=0, le=5)] = 1.0
    popularity: tuple[Annotated[float, msgspec.Meta(ge=0, le=1e12)], ...] = ()
    # Adapters that a step may have (vLLM's max_loras; 0: all, up to 64), and that hosts keep (max_cpu_loras; 0: all).
    slots: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    host_slots: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a class whose prompts are up to so long: their share of it, means and upper ends."""

    share: _Positive
    input_tokens: _Tokens
    output_tokens: _Tokens
    longest_input: _WholeTokens
    longest_output: _WholeTokens
    # Some of its requests, evenly drawn: (input, output).
    sample: Annotated[tuple[tuple[_WholeTokens, _WholeTokens], ...], _Some]
    # Whether its requests are among those that may miss the class's TTFT target.
    exempt: bool = False
    # Of a prompt, the tokens that are in the cache when it comes: on average, those that all requests of the class have
    # in common, and those of each request of the sample; nothing, where it is empty.
    cached_tokens: _Cached = 0.0
    shared_tokens: _Cached = 0.0
    cached_sample: tuple[_Cached, ...] = ()
    prefix: PrefixReuse | None = None
    # Where the cached tokens follow from a replica's memory: the others are then what endless memory would give.
    hits: HitCurve | None = None
    # Their tokens are among the prompt's.
    pictures: Pictures | None = None

    @property
    def context(self) -> int:
        return self.longest_input + self.longest_output

    @property
    def input_dispersion(self) -> float:
        """Mean square of the prompts' lengths over the square of their mean: 1 where all are equal."""
        lengths = [one for one, _ in self.sample]
        mean = math.fsum(lengths) / len(lengths)
        return math.fsum(length * length for length in lengths) / len(lengths) / mean**2


class RequestClass(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    # At the peak, today.
    requests_per_s: _Rate
    slices: Annotated[tuple[Slice, ...], _Some]
    ttft: Target | None = None
    tpot: Target | None = None
    lora: Lora | None = None
    sessions: SessionTraffic | None = None

    @property
    def input_tokens(self) -> float:
        return math.fsum(one.share * one.input_tokens for one in self.slices)

    @property
    def output_tokens(self) -> float:
        return math.fsum(one.share * one.output_tokens for one in self.slices)

    @property
    def cached_tokens(self) -> float:
        """Prompt tokens of a request that are in the cache already, on average."""
        return math.fsum(one.share * one.cached_tokens for one in self.slices)

    @property
    def prefix(self) -> PrefixReuse | None:
        """None: every prompt is computed whole."""
        return self.slices[0].prefix


class ModelChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How a model may be served. Empty stacks: every one that was measured on the accelerator.

    `releases`: by stack, where another than the newest that preflight has read will run; files have them among the
    stacks, such as vllm==0.32.0.
    """

    rules: ClassVar[tuple[KeyRule, ...]] = (
        KeyRule("needs", ("acceptance",), ("speculation",), "is of a way to draft, which `speculation` must name"),
    )

    precisions: tuple[str, ...] = (USUAL.precision, "fp8")
    kv_formats: Annotated[tuple[Annotated[str, Form(known_kv_format)], ...], FileKey("kv")] = (USUAL.kv_format,)
    stacks: tuple[str, ...] = ()
    releases: dict[str, str] = {}
    # Ways to speculate, such as mtp:3, and "none"; None: its own prediction layer, where somebody has measured how many
    # of its drafts are kept, or none. On which kind of text; and tokens a step that are kept, if measured.
    speculation: tuple[str, ...] | None = None
    text: Text = "chat"
    acceptance: Annotated[float, msgspec.Meta(ge=1, le=1 + DEEPEST)] | None = None
    # Disaggregated prefill and decode, or on replicas that do both; None: whichever is cheaper when simulated.
    apart: bool | None = None


class Constraints(msgspec.Struct, frozen=True, kw_only=True):
    # Empty: all that the catalog has a price for.
    accelerators: tuple[_Accelerator, ...] = ()
    vendors: tuple[_Vendor, ...] = ()
    # GPUs on hand, which cost only their running; and the most of a kind that can be had.
    inventory: dict[_Accelerator, _Gpus] = {}
    at_most: dict[_Accelerator, _Gpus] = {}
    budget_usd_per_month: Annotated[float, msgspec.Meta(ge=0, le=1e12)] | None = None
    power_kw: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    # Least share of the fleet by value, each GPU at its price, by vendor.
    vendor_share: dict[_Vendor, _Share] = {}
    # Capacity kept free: the fleet carries the peak and this share of it more.
    spare: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    # Whether GPUs come in whole nodes, or trays of a rack.
    whole_nodes: bool = True
    # Only what preflight knows to run, or what somebody has measured.
    only_known: bool = False
    # What must have been measured to be preferred: see EVIDENCE.
    evidence: Evidence = USUAL.evidence
    # Pools are given up as long as the fleet gets no dearer than by this share.
    simplicity: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Which prices to plan by, the user's own, and discounts by accelerator or vendor."""

    # Of each accelerator the first of these that it has a price of.
    kinds: Annotated[tuple[str, ...], _Some] = (USUAL.price,)
    usd_per_gpu_hour: dict[_Accelerator, _UsdPerGpuHour] = {}
    # Under contract, for the base of a day.
    reserved_usd_per_gpu_hour: dict[_Accelerator, _UsdPerGpuHour] = {}
    discount: dict[
        Annotated[str, NounName("vendor or accelerator")], Annotated[float, msgspec.Meta(ge=0, le=MOST_DISCOUNT)]
    ] = {}


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """Models that share replicas: loaded when they are asked for, put away when others need the room."""

    models: Annotated[tuple[str, ...], _Some]
    # Always resident.
    pinned: tuple[str, ...] = ()
    # Share of requests that may find their model absent, at the peak.
    cold_share: Annotated[float, msgspec.Meta(ge=1e-6, le=1)] = 0.05
    load_from: LoadFrom = "host"
    # Requests of the longest contexts that a resident model has a cache for.
    sequences: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 8
    # In place of the catalog's.
    host_gb_per_s: Annotated[float, msgspec.Meta(ge=0.1, le=1e4)] | None = None
    disk_gb_per_s: Annotated[float, msgspec.Meta(ge=0.001, le=1e4)] | None = None
    start_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] | None = None


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    classes: Annotated[tuple[RequestClass, ...], _Some]
    models: dict[str, ModelChoice] = {}
    # Mean traffic over the peak that the fleet is sized for, and what the peak grows by in a year.
    mean_over_peak: Annotated[float, msgspec.Meta(ge=0.001, le=1)] = 0.5
    # By the hour over the peak, 24 of them; empty: not known.
    day: tuple[Annotated[float, msgspec.Meta(ge=0, le=1)], ...] = ()
    growth_per_year: Annotated[float, msgspec.Meta(ge=-0.9, le=20)] = 0.0
    horizon_years: _Years = round(USUAL.horizon_years)
    # How often the fleet should be enough, given how wrong its estimates may be; or by name, "likely" being even odds.
    sure: Annotated[float, msgspec.Meta(ge=0.5, le=0.99)] | None = None
    sizing: Literal["safe", "likely"] = "safe"
    constraints: Constraints = Constraints()
    prices: Prices = Prices()
    # Which models share replicas; None: each has its own.
    sharing: Sharing | None = None
    # How it is bought over time: `crosstie schedule`.
    schedule: ScheduleRequest = ScheduleRequest()
    # Where models lie that no catalog has, by id: what is written of this workload is read elsewhere.
    folders: dict[str, str] = {}
    # Where it was read from, and what had to be assumed on the way.
    file: str = ""
    notes: tuple[str, ...] = ()

    @property
    def sureness(self) -> float:
        return self.sure or _SURE[self.sizing]

    def choice(self, model: str) -> ModelChoice:
        return self.models.get(model, ModelChoice())

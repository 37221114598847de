"""The tools of `crosstie mcp`: typed questions in, the documents that the commands' `--json` prints out.

A question is a record whose fields are the tool's parameters; its document is made by what the command of that name
calls. An answer is that document, or a part of it with a word on what was left out. Nothing here knows the protocol.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

import crosstie
from crosstie.catalog.describe import overview
from crosstie.catalog.library import Catalog
from crosstie.catalog.precision import PRECISIONS
from crosstie.catalog.workloads import find_workload, read_workload
from crosstie.cli import (
    catalog as of_catalog,
    compare as of_compare,
    fit as of_fit,
    mcp_answers,
    simulate as of_simulate,
)
from crosstie.cli.explain import asked_of, body_of
from crosstie.cli.findings_show import to_json as findings_json
from crosstie.cli.plan import Overrides, overridden
from crosstie.cli.preflight_model import about
from crosstie.cli.replica import ReplicaOptions, layout_from
from crosstie.cli.this_machine import folder_in
from crosstie.core.deployment import KV_FORMATS, Parallelism
from crosstie.core.errors import BadInput, UnknownName
from crosstie.core.fleet import Policy
from crosstie.core.progress import OnProgress
from crosstie.core.question import USUAL
from crosstie.core.workload import Evidence, Workload
from crosstie.decide.compare.scorecard import Load
from crosstie.decide.plan.plan import plan
from crosstie.decide.plan.report import document, mark_of
from crosstie.port.preflight.model import ScanDepth, preflight

Document = dict[str, Any]

EXAMPLE = """\
[traffic]
requests_per_s = 20
[[class]]
name = "chat"
model = "llama-3.3-70b"
share = 1
input = 1500
output = 300
ttft_ms = { p95 = 1000 }
tpot_ms = { p90 = 50 }
[constraints]
accelerators = ["mi300x", "h200"]
"""
Name = Annotated[str, Meta(max_length=1000)]
Names = Annotated[list[Name], Meta(min_length=1, max_length=64)]
Tokens = Annotated[int, Meta(ge=1, le=10**7)]
_MODEL = "Name in the catalog, or a model's folder or config.json beneath --root."
Model = Annotated[Name, Meta(description=_MODEL)]
On = Annotated[Names, Meta(description="Accelerators by their names in the catalog, such as mi300x and h200.")]
Kv = Annotated[str, Meta(description="Format of the KV cache.", extra_json_schema={"enum": list(KV_FORMATS)})]
Stack = Annotated[Name | None, Meta(description="Engine: vllm, sglang, tensorrt-llm, llama.cpp.")]
Stored = Annotated[Name, Meta(description=f"How weights are stored: {', '.join(PRECISIONS)}.")]
Toml = Annotated[
    str,
    Meta(max_length=200_000, description="Instead of a file: the text of a workload file.", examples=[EXAMPLE]),
]
Ranks = Annotated[int, Meta(ge=1, le=1024)]
Split = Annotated[
    dict[Literal["tp", "pp", "ep", "dp"], Ranks],
    Meta(description="Ranks of tensor, pipeline, expert and attention-data parallelism; the fewest GPUs unless given."),
]
PerGpuHour = Annotated[dict[str, float], Meta(description="USD a GPU-hour by accelerator, in place of the catalog's.")]


class ToolQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Its docstring is what an assistant is told."""

    # What its answer is, for the schema.
    answers: ClassVar[Any]
    # Whether it asks anything but the catalog and files.
    asks_others: ClassVar[bool] = False

    def document(self, gateway: str, on_progress: OnProgress) -> Document:
        raise NotImplementedError

    def answer(self, gateway: str, on_progress: OnProgress) -> Document:
        return self.document(gateway, on_progress)


class LongQuestion(ToolQuestion, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One whose document has more than most readers want."""

    full: Annotated[bool, Meta(description="The whole document, as --json prints it.")] = False

    def shorten(self, whole: Document) -> tuple[Document, list[str]]:
        """What is worth a reader's attention, and what was left out of it."""
        raise NotImplementedError

    def answer(self, gateway: str, on_progress: OnProgress) -> Document:
        whole = self.document(gateway, on_progress)
        if self.full:
            return whole
        kept, gone = self.shorten(whole)
        return {**kept, "shortened": gone} if gone else kept


class Fit(LongQuestion, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model sits in memory on each accelerator: weights, KV cache, the fewest GPUs, sequences that fit."""

    answers = mcp_answers.Fit
    model: Model
    on: Annotated[On | None, Meta(description="Accelerators; all of the catalog unless named.")] = None
    precisions: Annotated[list[Stored], Meta(min_length=1, max_length=16)] = msgspec.field(
        default_factory=lambda: [USUAL.precision]
    )
    context: Annotated[Tokens | None, Meta(description="Tokens a sequence; 8192 or the model's limit.")] = None
    layout: Split = {}
    kv_format: Kv = USUAL.kv_format
    stack: Stack = None

    def document(self, gateway: str, on_progress: OnProgress) -> Document:
        fit = crosstie.fit(
            self.model, self.on, context=self.context, precisions=self.precisions, kv_format=self.kv_format,
            stack=self.stack, layout=_split(self.layout),
        )  # fmt: skip
        return of_fit.to_json(fit)

    def shorten(self, whole: Document) -> tuple[Document, list[str]]:
        least = {(p["accelerator"], p["precision"]) for p in whole["placements"] if p["fewest"]}
        return _only(
            whole, "placements", lambda p: p["fewest"] or (p["accelerator"], p["precision"]) not in least,
            "layouts of more than the fewest GPUs",
        )  # fmt: skip


class Compare(ToolQuestion, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model under one load on several accelerators: TTFT, TPOT, throughput with its interval, and why one wins.

    Predictions; each entry's estimate.basis says which measurements stand behind it.
    """

    answers = mcp_answers.Compare
    model: Model
    on: On
    input_tokens: Tokens = USUAL.input_tokens
    output_tokens: Tokens = USUAL.output_tokens
    concurrency: Annotated[int, Meta(ge=1, le=10**6, description="Requests in flight on a replica.")] = (
        USUAL.in_flight or 1
    )
    precision: Stored = USUAL.precision
    layout: Split = {}
    kv_format: Kv = USUAL.kv_format
    stack: Stack = None
    speculation: Annotated[Name | None, Meta(description="mtp:3, eagle3:3, ngram:4 or draft:4:MODEL.")] = None

    def document(self, gateway: str, on_progress: OnProgress) -> Document:
        replica = ReplicaOptions(
            Load(self.concurrency, self.input_tokens, self.output_tokens), _split(self.layout), self.precision,
            self.kv_format, self.stack, self.speculation,
        )  # fmt: skip
        return of_compare.to_json(replica.scorecard(Catalog(), self.model, ",".join(self.on)))


class OnWorkload(LongQuestion, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workload by name, or as a text."""

    workload_toml: Toml | None = None

    def either(self, key: str, given: str | None) -> Path | Workload:
        if (given is None) == (self.workload_toml is None):
            raise BadInput(f"give {key} or workload_toml: one of them")
        if self.workload_toml is not None:
            return read_workload(Catalog(), Path("workload_toml"), self.workload_toml)
        return Path(str(given))


class Plan(OnWorkload, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cheapest fleet for a workload: accelerators, pools, cost, what each vendor alone would cost, what would
    change it, and the reasons.

    The fleet is confirmed by simulation, which takes from seconds to minutes; quick leaves that out.
    """

    answers = mcp_answers.Plan
    workload: Annotated[Name | None, Meta(description="A shipped one (assistant, demo), or a file.")] = None
    on: Annotated[On | None, Meta(description="Only these accelerators.")] = None
    usd_per_gpu_hour: PerGpuHour = {}
    reserved_usd_per_gpu_hour: PerGpuHour = {}
    discount: Annotated[dict[str, float], Meta(description="Share off the price, by accelerator or vendor.")] = {}
    price_kinds: Annotated[Names | None, Meta(description="Which prices to plan by: on-demand, reserved, ...")] = None
    single_gpus: Annotated[bool, Meta(description="GPUs one by one, not in whole nodes.")] = False
    sure: Annotated[float, Meta(ge=50, le=99, description="How sure, in percent; 80 unless said.")] | None = None
    evidence: Annotated[Evidence | None, Meta(description="What must be measured to be preferred.")] = None
    only_known: Annotated[bool, Meta(description="Only what preflight knows to run, or what was measured.")] = False
    quick: Annotated[bool, Meta(description="By closed forms alone, without simulation.")] = False

    def document(self, gateway: str, on_progress: OnProgress) -> Document:
        catalog, on = Catalog(), _joined(self.on)
        given = self.either("workload", self.workload)
        workload = given if isinstance(given, Workload) else read_workload(catalog, find_workload(given))
        asked = overridden(catalog, workload, Overrides(
            price=_assigned(self.usd_per_gpu_hour), discount=_assigned(self.discount), kinds=_joined(self.price_kinds),
            reserved=_assigned(self.reserved_usd_per_gpu_hour), accelerators=on, single_gpus=self.single_gpus,
            sure=self.sure, evidence=self.evidence, only_known=self.only_known,
        ))  # fmt: skip
        return document(
            plan(catalog, asked, confirm=not self.quick, on_progress=on_progress), mark_of(catalog.calibration)
        )

    def shorten(self, whole: Document) -> tuple[Document, list[str]]:
        gone = ["workload", "fleet_file", "target_prices", "passed_over_unmeasured", "apart_looked_at"]
        kept = {key: value for key, value in whole.items() if key not in gone}
        if kept["fleet"]:
            kept["fleet"] = {**kept["fleet"], "pools": _without("estimate", kept["fleet"]["pools"])}
            gone.append("fleet.pools.estimate")
        return kept, gone


class Simulate(OnWorkload, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fleet, a saved plan or a workload (planned first) under traffic in virtual time: percentiles, cost, queues.

    Nothing is measured: replicas take the time that the performance model predicts.
    """

    answers = mcp_answers.Simulate
    what: Annotated[Name | None, Meta(description="Fleet file, saved plan, or a workload as in plan.")] = None
    workload: Annotated[Name | None, Meta(description="Its classes and lengths, where `what` brings none.")] = None
    fleets: Annotated[list[Name], Meta(max_length=8, description="Others beside it.")] = []
    trace: Annotated[Name | None, Meta(description="Recorded requests: a shipped trace or a file.")] = None
    class_name: Annotated[Name | None, Meta(description="The class of all requests of a trace.")] = None
    rate: Annotated[float, Meta(gt=0, le=1e9, description="Requests/s; else the peak, or the trace's.")] | None = None
    load: Annotated[list[float], Meta(min_length=1, max_length=8, description="Times that rate.")] = msgspec.field(
        default_factory=lambda: [1.0]
    )
    policies: Annotated[list[Policy], Meta(description="Instead of the fleet's.")] = []
    seeds: Annotated[int, Meta(ge=1, le=20, description="Runs of each.")] = 1
    requests: Annotated[int, Meta(ge=1, le=1_000_000, description="Of each run.")] | None = None
    kill: Annotated[list[Name], Meta(max_length=16, description="POOL@TIME[+FOR], such as mi300x@90s+60s.")] = []

    def document(self, gateway: str, on_progress: OnProgress) -> Document:
        if self.trace is not None and self.workload is not None:
            raise BadInput("trace and workload: requests come from one of them")
        if self.class_name is not None and self.trace is None:
            raise BadInput("class_name is for a trace; a workload has its own")
        simulation = crosstie.simulate(
            self.either("what", self.what), self.workload, fleets=self.fleets, trace=self.trace,
            class_name=self.class_name, rate=self.rate, load=self.load, policy=self.policies or None,
            requests=self.requests, seeds=self.seeds, kill=[of_simulate.outage(text) for text in self.kill],
            processes=1, on_progress=on_progress,
        )  # fmt: skip
        return of_simulate.to_json(simulation)

    def shorten(self, whole: Document) -> tuple[Document, list[str]]:
        return {**whole, "runs": _without("course", whole["runs"])}, ["runs.course: the fleet by moment"]


class Preflight(LongQuestion, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What breaks when a model moves to these accelerators under an engine: findings with evidence and remedy, and a
    verdict each. Nothing is run on an accelerator.

    Of a folder beneath --root it reads config.json, the quantisation config, the index and headers of safetensors or
    GGUF files, and of the tensors scales and FP8 weights (`scan`). It does not ask the Hugging Face hub.
    """

    answers = mcp_answers.Preflight
    model: Model
    on: On
    engine: Annotated[Name, Meta(description="vllm, sglang or llama.cpp, with a release or without.")] = "vllm"
    tp: Annotated[Ranks | None, Meta(description="Tensor-parallel ranks; the fewest that hold it.")] = None
    ep: Annotated[bool, Meta(description="Experts are spread over the ranks instead of being cut.")] = False
    kv: Literal["auto", "bf16", "fp8", "fp8_e5m2"] = "auto"
    context: Annotated[Tokens | None, Meta(description="Tokens a sequence, for memory.")] = None
    features: Annotated[list[Name], Meta(description="That must work: lora, speculative-mtp, ...")] = []
    environment: Annotated[dict[str, str], Meta(description="Variables of the engine.")] = {}
    flags: Annotated[dict[str, str], Meta(description="Flags of the engine.")] = {}
    scan: Annotated[ScanDepth, Meta(description="How much of FP8 weights to read.")] = "sample"

    def document(self, gateway: str, on_progress: OnProgress) -> Document:
        catalog = Catalog()
        if "/" in self.model and not Path(self.model).expanduser().exists():
            try:
                catalog.model(self.model)
            except UnknownName as error:
                raise BadInput(f"{error} There is no such folder, and the hub is not asked from here.") from None
        report = preflight(
            self.model, on=self.on, engine=self.engine, tp=self.tp, ep=self.ep,
            kv=None if self.kv == "auto" else self.kv, context=self.context, features=self.features,
            environment=self.environment, flags=self.flags, scan=self.scan, catalog=catalog, on_progress=on_progress,
        )  # fmt: skip
        return findings_json(report.findings, report.verdicts, about(self.model, report))

    def shorten(self, whole: Document) -> tuple[Document, list[str]]:
        return _only(whole, "findings", lambda row: row["severity"] != "note", "notes: what was found to be in order")


class Explain(ToolQuestion, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the running gateway would send a request now, and why: every pool with its prediction or what dropped it.

    The gateway is the one that the server was started for. Nothing is sent to any backend.
    """

    answers = mcp_answers.Explain
    asks_others = True
    model: Annotated[Name, Meta(description="As clients name it.")]
    input_tokens: Tokens = 1000
    output_tokens: Annotated[Tokens | None, Meta(description="The most to answer.")] = None
    class_name: Annotated[Name | None, Meta(description="The class of the request.")] = None
    ttft_ms: Annotated[float, Meta(gt=0)] | None = None
    tpot_ms: Annotated[float, Meta(gt=0)] | None = None
    priority: Literal["low", "normal", "high"] | None = None
    pool: Annotated[Name | None, Meta(description="Only this one.")] = None

    def document(self, gateway: str, on_progress: OnProgress) -> Document:
        hints = {key: getattr(self, key) for key in ("ttft_ms", "tpot_ms", "priority", "pool")}
        for name, value in (("class_name", self.class_name), ("pool", self.pool)):
            if value is not None and not value.isprintable():
                raise BadInput(f"{name}: must be one line of text")
        body = body_of(self.model, self.input_tokens, self.output_tokens)
        return asked_of(gateway, body, {"name": self.class_name, **hints})


class CatalogShow(ToolQuestion, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything known of an accelerator, a model or an engine, prices included: each number with its basis, date,
    source, and other sources that differ. `costs` is what owning assumes."""

    answers = mcp_answers.CatalogShow
    name: Annotated[Name, Meta(description="Such as mi300x, llama-3.1-70b, vllm or costs.")]
    key: Annotated[Name | None, Meta(description="Only this one and those under it: memory, dense.fp8, price.")] = None

    def document(self, gateway: str, on_progress: OnProgress) -> Document:
        return of_catalog.facts_json(*of_catalog.facts(self.name, self.key))


class CatalogList(LongQuestion, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the catalog holds, a row each; prices with seller, kind, date and source. catalog_show has the sources of
    an accelerator's, a model's or an engine's numbers."""

    answers = mcp_answers.CatalogList
    kind: Annotated[str, Meta(extra_json_schema={"enum": list(of_catalog.LISTS)})] = "accelerators"
    search: Annotated[Name, Meta(description="Only rows with this text in some cell.")] = ""
    on: Annotated[On | None, Meta(description="Only these accelerators' prices.")] = None
    limit: Annotated[int, Meta(ge=1, le=1000, description="Rows, unless full.")] = 50

    def document(self, gateway: str, on_progress: OnProgress) -> Document:
        if self.kind not in of_catalog.LISTS:
            raise BadInput(f"kind '{self.kind}' is not one of {', '.join(of_catalog.LISTS)}")
        if self.on and self.kind != "prices":
            raise BadInput("on goes with prices")
        catalog = Catalog()
        only = [accelerator.id for accelerator in catalog.accelerators_named(self.on)] if self.on else None
        wanted = self.search.casefold()
        rows = overview(catalog, self.kind, only)
        return {"rows": [row for row in rows if any(wanted in str(cell).casefold() for cell in row.values())]}

    def shorten(self, whole: Document) -> tuple[Document, list[str]]:
        rows = whole["rows"]
        more = len(rows) - self.limit
        return {"rows": rows[: self.limit]}, [f"rows: {more} more"] if more > 0 else []


TOOLS: dict[str, type[ToolQuestion]] = {
    "fit": Fit,
    "compare": Compare,
    "plan": Plan,
    "simulate": Simulate,
    "preflight": Preflight,
    "explain": Explain,
    "catalog_show": CatalogShow,
    "catalog_list": CatalogList,
}


def schema_of(kind: Any) -> dict[str, Any]:
    """JSON Schema of a record, with the record itself at its root, as the protocol wants it."""
    (root,), parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    made = dict(parts.pop(root["$ref"].rpartition("/")[2]))
    made.pop("description", None)
    return {**made, "$defs": parts} if parts else made


def described(kind: type[ToolQuestion]) -> str:
    return " ".join((kind.__doc__ or "").split())


def _only(
    whole: Document, key: str, wanted: Callable[[Mapping[str, Any]], bool], what: str
) -> tuple[Document, list[str]]:
    kept = [entry for entry in whole[key] if wanted(entry)]
    more = len(whole[key]) - len(kept)
    return {**whole, key: kept}, [f"{key}: {more} {what}"] if more else []


def _without(key: str, rows: Iterable[Mapping[str, Any]]) -> list[Document]:
    return [{name: value for name, value in row.items() if name != key} for row in rows]


def _split(layout: Mapping[Any, int]) -> Parallelism | None:
    return layout_from(*(layout.get(name) for name in ("tp", "pp", "ep", "dp")))


def _joined(names: Iterable[str] | None) -> str | None:
    text = None if names is None else ",".join(names)
    if folder_in(text):
        raise BadInput("on this: no machine is looked at from here; name accelerators")
    return text


def _assigned(values: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(f"{name}={value!r}" for name, value in values.items())

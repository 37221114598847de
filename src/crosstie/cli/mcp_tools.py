"""The tools of `crosstie mcp`: commands of this command line, of which an assistant may give some of the parameters.

Types, limits and words are those of the command's own options. An answer is the document that the command's `--json`
prints, or a part of it with a word on what was left out. Nothing here knows the protocol.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import click
import msgspec
from msgspec import Meta

from crosstie.catalog.describe import FactLine
from crosstie.catalog.library import Catalog
from crosstie.cli import catalog, compare, explain, fit, plan, preflight_model, simulate
from crosstie.cli.main import as_typed
from crosstie.cli.progress import Caller
from crosstie.cli.this_machine import folder_in
from crosstie.core.errors import BadInput, BadParameter, UnknownName
from crosstie.core.estimate import Estimate
from crosstie.core.finding import Finding
from crosstie.core.progress import OnProgress
from crosstie.core.question import BuyersQuestion, Reckoning
from crosstie.decide.compare.scorecard import Load
from crosstie.decide.plan.pools import Guided
from crosstie.decide.plan.run_result import ClassResult, PoolResult
from crosstie.perf.fit import Sizes

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
# Parameters that commands have not.
_TOML = Annotated[
    str,
    Meta(max_length=200_000, description="Instead of a file: the text of a workload file.", examples=[EXAMPLE]),
]
_FULL = Annotated[bool, Meta(description="The whole document, as --json prints it.")]
_ROWS = 50
Word = Annotated[str, Meta(max_length=1000)]
Value = Word | int | float
# Arguments have no help of their own.
_ARGUMENTS = {
    "model": "Name in the catalog, or a model's folder or config.json beneath --root.",
    "what": "Fleet file, saved plan, or a workload as in plan.",
    "name": "Such as mi300x, llama-3.1-70b, vllm or costs.",
    "key": "Only this one and those under it: memory, dense.fp8, price.",
    "workload": "A shipped one (assistant, demo), or a file.",
}

# What tools answer, for their schemas: the keys of the documents that a reader needs first. Documents have more. Where
# a part of one is a noun of the library, its type is that noun.
Rows = list[dict[str, Any]]


class Shortened(TypedDict):
    shortened: NotRequired[Annotated[list[str], Meta(description="What was left out; full=true has it.")]]


class Assuming(TypedDict):
    assumptions: Annotated[BuyersQuestion, Meta(description="What it rests on, the same keys in every answer.")]
    reckoned: Annotated[list[Reckoning], Meta(description="By accelerator: how it serves, what a GPU gives and costs.")]


class FitAnswer(Shortened, Assuming):
    model: str
    parameters: float
    active_parameters: float
    context: int
    sizes: list[Sizes]
    placements: Annotated[Rows, Meta(description="`fewest`: whether no layout of fewer GPUs holds it.")]
    problems: dict[str, str]


class ComparedOn(TypedDict):
    accelerator: str
    estimate: Estimate | None
    problem: str | None


class CompareAnswer(Assuming):
    model: str
    load: Load
    entries: list[ComparedOn]
    verdicts: Annotated[list[str], Meta(description="A sentence a pair: who wins and why.")]


class PlannedFleet(TypedDict):
    usd_per_hour: float
    usd_per_month: float
    uncertainty: dict[str, Any] | None
    gpus: dict[str, int]
    pools: Annotated[Rows, Meta(description="`carries`: classes of requests that go here, each with its why.")]


class PlanAnswer(Shortened, Assuming):
    made: str
    feasible: bool
    obstacles: list[Any]
    fleet: PlannedFleet | None
    prices: Annotated[dict[str, Any], Meta(description="What was counted with: seller, kind and date.")]
    single_vendor: dict[str, Any]
    runner_up: dict[str, Any] | None
    flips: Annotated[Rows, Meta(description="Prices and speeds at which the answer is another.")]
    guide: Annotated[list[Guided], Meta(description="Where requests go, by length, and why.")]
    simulated: Rows


class SimulatedRun(TypedDict):
    label: str
    policy: str
    within: Annotated[float, Meta(description="Share of requests that kept their targets.")]
    classes: list[ClassResult]
    pools: list[PoolResult]
    holds: bool


class SimulateAnswer(Shortened, Assuming):
    holds: Annotated[bool, Meta(description="Whether every class kept its targets in every run.")]
    notes: list[str]
    bounds: Rows
    runs: list[SimulatedRun]


class ShownFinding(Finding, frozen=True, kw_only=True):
    rests_on: Annotated[str, Meta(description="None of these is a run on an AMD GPU.")]


class PreflightAnswer(Shortened):
    model: str
    engine: str
    verdicts: Annotated[dict[str, str], Meta(description="By accelerator: ready ... will not run.")]
    settings: dict[str, list[str]]
    findings: list[ShownFinding]
    effort: dict[str, Any]


class ExplainAnswer(TypedDict):
    outcome: str
    pool: str | None
    replica: str | None
    policy: str
    reason: str
    considered: Annotated[Rows, Meta(description="Each pool: its prediction, or what dropped it.")]


class CatalogShowAnswer(TypedDict):
    name: str
    facts: list[FactLine]


class CatalogListAnswer(Shortened):
    rows: Rows


@dataclass(frozen=True)
class Tool:
    """`says`: what an assistant is told; `offers`: the parameters of the command that it may give."""

    says: str
    command: click.Command
    offers: str
    # What its answer is, for the schema.
    answers: Any
    # Of documents that have more than most readers want: what is worth their attention, and what was left out.
    shorten: Callable[[Document], tuple[Document, list[str]]] | None = None
    # What every question has.
    fixed: tuple[str, ...] = ()
    # Whether it asks anything but the catalog and files.
    asks_others: bool = False

    @cached_property
    def parameters(self) -> dict[str, click.Parameter]:
        every = {max(own.opts, key=len).lstrip("-").replace("-", "_"): own for own in self.command.params}
        return {name: every[name] for name in self.offers.split()}

    @cached_property
    def question(self) -> type[msgspec.Struct]:
        """What may be asked, as a record."""
        fields: list[Any] = []
        for name, parameter in self.parameters.items():
            told = _ARGUMENTS.get(name) or getattr(parameter, "help", None) or ""
            kind: Any = Annotated[_kind(parameter), Meta(description=told)]
            fields.append((name, kind) if parameter.required else (name, kind | None, None))
        if self.command is plan.command:
            fields.append(("workload_toml", _TOML | None, None))
        if self.shorten:
            fields.append(("full", _FULL, False))
        return msgspec.defstruct("Question", fields, frozen=True, kw_only=True, forbid_unknown_fields=True)

    def answer(self, given: Mapping[str, Any], gateway: str, on_progress: OnProgress) -> Document:
        asked = msgspec.to_builtins(msgspec.convert(given, self.question))
        text = asked.get("workload_toml")
        if self.command is plan.command and (asked["workload"] is None) == (text is None):
            raise BadInput("give workload or workload_toml: one of them")
        if text is not None:
            asked["workload"] = "workload_toml"
        caller = Caller(on_progress, text)
        try:
            self.command.main(self._typed(asked, gateway), standalone_mode=False, obj=caller)
        except BadParameter as error:
            raise BadInput(as_typed(error)) from None
        except click.UsageError as error:
            raise BadInput(error.format_message()) from None
        whole = caller.document if isinstance(caller.document, dict) else {"rows": caller.document}
        kept, gone = (whole, []) if asked.get("full") or not self.shorten else self.shorten(whole)
        return {**kept, "shortened": gone} if gone else kept

    def _typed(self, asked: Document, gateway: str) -> list[str]:
        """The question as words of a command line."""
        options, arguments = ["--json", *self.fixed, *(["--url", gateway] if self.asks_others else [])], []
        for name, parameter in self.parameters.items():
            value = asked[name]
            if value is None or value is False:
                continue
            _check(name, value, asks_hub=self.command is preflight_model.command)
            words = _words(value, joined=not parameter.multiple)
            if isinstance(parameter, click.Argument):
                arguments += words
            else:
                flag = max(parameter.opts, key=len)
                options += [flag] if value is True else [f"{flag}={word}" for word in words]
        return [*options, "--", *arguments]


def _kind(parameter: click.Parameter) -> Any:
    """Options that name several things take a list, and NAME=VALUE an object."""
    kind, form = parameter.type, parameter.metavar or ""
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return bool
    if re.search(r"\w=\w", form):
        return dict[Word, Value]
    if parameter.multiple or "," in form:
        return Annotated[list[Value], Meta(min_length=1, max_length=64)]
    if isinstance(kind, click.Choice):
        return Literal[tuple(kind.choices)]
    if kind.name.startswith(("integer", "float")):
        limits = {"ge": getattr(kind, "min", None), "le": getattr(kind, "max", None)}
        return Annotated[int if kind.name.startswith("integer") else float, Meta(**limits)]
    return Word


def _words(value: Any, *, joined: bool) -> list[str]:
    if isinstance(value, dict):
        return [f"{name}={each}" for name, each in value.items()]
    if isinstance(value, list):
        return [",".join(map(str, value))] if joined else list(map(str, value))
    return [str(value)]


def _check(name: str, value: Any, *, asks_hub: bool) -> None:
    """What a command at a terminal may look at, and this process may not."""
    if name == "on" and folder_in(",".join(map(str, value))):
        raise BadInput("on this: no machine is looked at from here; name accelerators")
    if name == "model" and asks_hub and "/" in value and not Path(value).expanduser().exists():
        try:
            Catalog().model(value)
        except UnknownName as error:
            raise BadInput(f"{error} There is no such folder, and the hub is not asked from here.") from None


def _short_fit(whole: Document) -> tuple[Document, list[str]]:
    least = {(place["accelerator"], place["precision"]) for place in whole["placements"] if place["fewest"]}
    return _only(
        whole, "placements",
        lambda place: place["fewest"] or (place["accelerator"], place["precision"]) not in least,
        "layouts of more than the fewest GPUs",
    )  # fmt: skip


def _short_plan(whole: Document) -> tuple[Document, list[str]]:
    gone = ["workload", "fleet_file", "target_prices", "passed_over_unmeasured", "apart_looked_at"]
    kept = {key: value for key, value in whole.items() if key not in gone}
    if kept["fleet"]:
        kept["fleet"] = {**kept["fleet"], "pools": _without("estimate", kept["fleet"]["pools"])}
        gone.append("fleet.pools.estimate")
    return kept, gone


def _short_simulation(whole: Document) -> tuple[Document, list[str]]:
    return {**whole, "runs": _without("course", whole["runs"])}, ["runs.course: the fleet by moment"]


def _short_preflight(whole: Document) -> tuple[Document, list[str]]:
    return _only(whole, "findings", lambda row: row["severity"] != "note", "notes: what was found to be in order")


def _short_list(whole: Document) -> tuple[Document, list[str]]:
    more = len(whole["rows"]) - _ROWS
    return {"rows": whole["rows"][:_ROWS]}, [f"rows: {more} more"] if more > 0 else []


def _only(
    whole: Document, key: str, wanted: Callable[[Mapping[str, Any]], bool], what: str
) -> tuple[Document, list[str]]:
    kept = [entry for entry in whole[key] if wanted(entry)]
    more = len(whole[key]) - len(kept)
    return {**whole, key: kept}, [f"{key}: {more} {what}"] if more else []


def _without(key: str, rows: list[Document]) -> list[Document]:
    return [{name: value for name, value in row.items() if name != key} for row in rows]


_REPLICA = "precision tp pp ep dp kv stack"
TOOLS = {
    "fit": Tool(
        "How a model sits in memory on each accelerator: weights, KV cache, the fewest GPUs, sequences that fit.",
        fit.command, f"model on context {_REPLICA}", FitAnswer, _short_fit,
    ),
    "compare": Tool(
        "One model under one load on several accelerators: TTFT, TPOT, throughput with its interval, and why one wins. "
        "Predictions; each entry's estimate.basis says which measurements stand behind it.",
        compare.command, f"model on input output concurrency {_REPLICA} speculation", CompareAnswer,
    ),
    "plan": Tool(
        "The cheapest fleet for a workload: accelerators, pools, cost, what each vendor alone would cost, what would "
        "change it, and the reasons. The fleet is confirmed by simulation, which takes from seconds to minutes; quick "
        "leaves that out.",
        plan.command, "workload on price reserved discount prices single_gpus sure evidence only_known quick",
        PlanAnswer, _short_plan,
    ),
    "simulate": Tool(
        "A fleet, a saved plan or a workload (planned first) under traffic in virtual time: percentiles, cost, queues. "
        "Nothing is measured: replicas take the time that the performance model predicts.",
        simulate.command, "what workload fleet trace class rate load policy seeds requests kill", SimulateAnswer,
        _short_simulation, fixed=("--processes=1",),
    ),
    "preflight": Tool(
        "What breaks when a model moves to these accelerators under an engine: findings with evidence and remedy, and "
        "a verdict each. Nothing is run on an accelerator. Of a folder beneath --root it reads config.json, the "
        "quantisation config, the index and headers of safetensors or GGUF files, and of the tensors scales and FP8 "
        "weights (`scan`). It does not ask the Hugging Face hub.",
        preflight_model.command, "model on engine tp ep kv context with env flag scan", PreflightAnswer,
        _short_preflight,
    ),
    "explain": Tool(
        "Where the running gateway would send a request now, and why: every pool with its prediction or what dropped "
        "it. The gateway is the one that the server was started for. Nothing is sent to any backend.",
        explain.command, "model input output class ttft_ms tpot_ms priority pool", ExplainAnswer,
        asks_others=True,
    ),
    "catalog_show": Tool(
        "Everything known of an accelerator, a model or an engine, prices included: each number with its basis, date, "
        "source, and other sources that differ. `costs` is what owning assumes.",
        catalog.show_command, "name key", CatalogShowAnswer,
    ),
    "catalog_list": Tool(
        "What the catalog holds, a row each; prices with seller, kind, date and source. catalog_show has the sources "
        "of an accelerator's, a model's or an engine's numbers.",
        catalog.list_command, "kind on search", CatalogListAnswer, _short_list,
    ),
}  # fmt: skip


def described(name: str) -> Document:
    tool = TOOLS[name]
    schemas = {"input_schema": schema_of(tool.question), "output_schema": schema_of(tool.answers)}
    return {"name": name, "description": tool.says, **schemas}


def schema_of(kind: Any) -> Document:
    """JSON Schema of a record, with the record itself at its root, as the protocol wants it."""
    (root,), parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    made = dict(parts.pop(root["$ref"].rpartition("/")[2]))
    made.pop("description", None)
    return {**made, "$defs": parts} if parts else made

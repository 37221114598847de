"""What a verdict rests on, in words: facts of the catalog, estimates, measured rows, prices, arithmetic, sources."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from crosstie.catalog.library import SHIPPED
from crosstie.catalog.reading import read_record, sourced_file, table
from crosstie.core.deployment import Deployment
from crosstie.core.estimate import Estimate
from crosstie.core.fact import Fact, Label
from crosstie.core.figures import significant
from crosstie.core.model import Model
from crosstie.decide.compare.scorecard import Load
from crosstie.decide.cost.prices import Quote
from crosstie.prove.calibration.results import OperatingPoint

SHIPPED_SOURCES = SHIPPED / "claim_sources.toml"


@dataclass(frozen=True, slots=True)
class Rest:
    """One thing that a verdict rests on: a fact of the catalog, the model, measured rows, arithmetic or a source."""

    kind: str
    what: str
    source: str = ""
    date: str = ""


class PublicFact(msgspec.Struct, frozen=True, kw_only=True):
    """A figure or a word of a public source, in this project's words."""

    value: float | str
    unit: str = ""
    says: str
    source: str
    date: str

    @property
    def rest(self) -> Rest:
        value = f"{self.value:,.10g}" if isinstance(self.value, float) else self.value
        return Rest("source", f"{self.says}: {value} {self.unit}".rstrip(), self.source, self.date)


def read_public_facts(file: Path = SHIPPED_SOURCES) -> dict[str, PublicFact]:
    with sourced_file(file, ["facts"]) as (raw, sources):
        facts = table(file, "facts", raw.get("facts"))
        return {name: read_record(file, f"facts.{name}", entry, PublicFact, sources) for name, entry in facts.items()}


def fact_rest(owner: str, path: str, fact: Fact | Label) -> Rest:
    note = f"; {fact.note}" if fact.note else ""
    return Rest("catalog", f"{owner} {path} {fact} ({fact.basis}{note})", fact.source, fact.date)


def run_rest(deployment: Deployment, estimate: Estimate, load: Load) -> Rest:
    at = f"{load.concurrency} in flight, {load.input_tokens:,} in, {load.output_tokens:,} out"
    what = f"{deployment.label}, {at}: {significant(estimate.output_tokens_per_s_per_gpu)} tok/s per GPU"
    if estimate.interval:
        low, high = map(significant, estimate.interval.per_gpu(deployment.parallelism.gpus))
        what += f", 80% {low} to {high}"
    return Rest("model", f"{what}; {estimate.basis}")


def rows_rest(points: Sequence[OperatingPoint], what: str) -> Rest:
    sources = sorted({p["source_id"] for p in points})
    dates = sorted({p["date"] for p in points if p["date"][:2] == "20"})
    span = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""
    return Rest("measured", what, f"shipped results: {', '.join(sources)}", span)


def model_rest(model: Model, what: str) -> Rest:
    told = f"{model.name}, {model.parameters / 1e9:.2f} B parameters from its config: {what}"
    return Rest("catalog", told, model.source, model.date)


def quote_rest(quote: Quote) -> Rest:
    usd = f"{quote.usd:,.0f} USD" if quote.kind == "purchase" else f"{significant(quote.usd)} USD/h"
    what = f"{quote.accelerator} {quote.kind} {usd} ({quote.origin})"
    return Rest("catalog", what, "prices.csv, sources by row: crosstie catalog list prices", quote.date)

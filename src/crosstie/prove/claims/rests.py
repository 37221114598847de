"""What a verdict rests on, in words: facts of the catalog, estimates, measured rows, prices, arithmetic, sources."""

from collections.abc import Sequence
from dataclasses import dataclass

from crosstie.core.fact import Fact, Label
from crosstie.decide.cost.prices import Quote
from crosstie.prove.calibration.results import OperatingPoint
from crosstie.prove.claims.evidence import EstimatedRun, Evidence


def percent(fraction: float) -> str:
    return f"{round(100.0 * fraction) + 0:d}%"


def between(low: float, high: float, unit: str = "") -> str:
    return f"{low:,.3g} to {high:,.3g}{unit}" if high < 1000 else f"{low:,.0f} to {high:,.0f}{unit}"


@dataclass(frozen=True, slots=True)
class Rest:
    """One thing that a verdict rests on: a fact of the catalog, the model, measured rows, arithmetic or a source."""

    kind: str
    what: str
    source: str = ""
    date: str = ""


def fact_rest(owner: str, path: str, fact: Fact | Label) -> Rest:
    note = f"; {fact.note}" if fact.note else ""
    return Rest("catalog", f"{owner} {path} {fact} ({fact.basis}{note})", fact.source, fact.date)


def fact_rests(evidence: Evidence, *fields: str) -> list[Rest]:
    """Of the catalog, each as `mi300x memory.capacity`."""
    pairs = [tuple(field.split()) for field in fields]
    return [fact_rest(owner, path, evidence.named(owner, path)) for owner, path in pairs]


def source_rests(evidence: Evidence, *names: str) -> list[Rest]:
    found = []
    for fact in map(evidence.fact, names):
        value = f"{fact.value:,.10g}" if isinstance(fact.value, float) else fact.value
        found.append(Rest("source", f"{fact.says}: {value} {fact.unit}".rstrip(), fact.source, fact.date))
    return found


def run_rest(run: EstimatedRun) -> Rest:
    low, high = run.interval
    what = f"{run.point}: {run.per_gpu:,.0f} tok/s per GPU, 80% {between(low, high)}"
    return Rest("model", f"{what}; {run.estimate.basis}")


def rows_rest(points: Sequence[OperatingPoint], what: str) -> Rest:
    sources = sorted({p["source_id"] for p in points})
    dates = sorted({p["date"] for p in points if p["date"][:2] == "20"})
    return Rest(
        "measured",
        what,
        f"shipped results: {', '.join(sources)}",
        " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "",
    )


def model_rest(evidence: Evidence, model: str, what: str) -> Rest:
    found = evidence.catalog.model(model)
    return Rest(
        "catalog",
        f"{found.name}, {found.parameters / 1e9:.2f} B parameters from its config: {what}",
        found.source,
        found.date,
    )


def quote_rest(quote: Quote) -> Rest:
    usd = f"{quote.usd:,.0f} USD" if quote.kind == "purchase" else f"{quote.usd:,.3g} USD/h"
    what = f"{quote.accelerator} {quote.kind} {usd}"
    if quote.prices > 1:
        what += f", {between(quote.low, quote.high)} over {quote.prices} prices"
    what += f" ({quote.provider})"
    return Rest("catalog", what, "prices.csv, sources by row: crosstie catalog list prices", quote.date)

"""A plan's page: what the screen says with its details, the numbers of the meeting, where each comes from, and what
to demand in the contract. And its pools as a table for spreadsheets."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from crosstie.catalog.library import Catalog
from crosstie.catalog.writing import csv_text, write_text
from crosstie.cli.answer import write_html
from crosstie.cli.plan_show import plan_parts
from crosstie.cli.review_show import checklist_parts
from crosstie.cli.show import json_text
from crosstie.core.figures import dollars, significant
from crosstie.core.units import HOURS_PER_MONTH
from crosstie.core.workload import RequestClass
from crosstie.decide.plan.plan import Plan
from crosstie.decide.plan.report import horizon_usd
from crosstie.prove.review.checklist import checklist
from crosstie.prove.review.figures import changed
from crosstie.prove.review.planned import read_planned
from crosstie.web.parts import Heading, Line, Parts, Table
from crosstie.web.report import KeyNumber

# What a meeting needs: what would flip the answer, and the bill. The rest is folded.
LEADING = ("What would change it", "Cost by class")


def write_page(file: Path, catalog: Catalog, plan: Plan, document: dict[str, Any]) -> None:
    write_html(
        file,
        f"Fleet for {plan.workload.name}",
        document,
        [*plan_parts(plan, verbose=True), *_appendix(catalog, plan, document)],
        facts=plan_facts(plan),
        leading=LEADING,
    )


def plan_facts(plan: Plan) -> list[KeyNumber]:
    fleet = plan.fleet
    if fleet is None:
        return []
    facts = [KeyNumber("GPUs", ", ".join(f"{count} {name}" for name, count in fleet.gpus.items()))]
    doubt = plan.uncertainty
    low, high = (doubt.low_usd_per_hour or 0.0, doubt.high_usd_per_hour or 0.0) if doubt else (0.0, 0.0)

    def between(times: float) -> str:
        """Nothing where the interval has no width that anyone could see."""
        ends = dollars(low * times), dollars(high * times)
        return f"{ends[0]} to {ends[1]}, 80%" if ends[0] != ends[1] else ""

    facts.append(KeyNumber("an hour", dollars(fleet.usd_per_hour), between(1.0)))
    facts.append(KeyNumber("a month", dollars(fleet.usd_per_hour * HOURS_PER_MONTH), between(HOURS_PER_MONTH)))
    over = horizon_usd(plan)
    if over:
        # The interval is of today's fleet; growth scales it with the bill.
        facts.append(
            KeyNumber(f"over {plan.workload.horizon_years} years", dollars(over), between(over / fleet.usd_per_hour))
        )
    facts.append(KeyNumber("a million tokens", dollars(fleet.cost.usd_per_million)))
    held = f"{sum(kind.holds for kind in plan.simulated)} of {len(plan.simulated)} classes within targets"
    # As large as the money: a fleet that nobody simulated is a first answer.
    seen = ("yes", held) if plan.confirmed else ("no", "by closed forms alone")
    return [*facts, KeyNumber("simulated", *seen)]


def _appendix(catalog: Catalog, plan: Plan, document: dict[str, Any]) -> Parts:
    work = plan.workload
    rows = [[kind.name, kind.model, significant(kind.requests_per_s), *_lengths(kind), *_targets(kind)]
            for kind in work.classes]  # fmt: skip
    columns = ["class", "model", ">requests/s", ">tokens in", ">tokens out", "TTFT", "TPOT"]
    yield Table(columns, rows, "Assumed: the traffic")
    yield f"the mean of a day is {work.mean_over_peak:.0%} of its peak; growth {work.growth_per_year:+.0%} a year"
    priced = [
        [item.id, dollars(item.quote.usd), item.quote.kind, item.quote.origin, item.quote.date or "-",
         f"{dollars(item.quote.low)} to {dollars(item.quote.high)}"]
        for item in plan.market.items
    ]  # fmt: skip
    yield Table(["accelerator", ">$/GPU-h", "kind", "~source", "date", "sources ask"], priced, "Assumed: prices")
    yield Heading("Assumed: how fast engines are")
    mark = document["calibration"]
    yield f"- predictions are corrected by {mark.get('by', 'a calibration')}, {mark.get('date', 'no date')}"
    for pool in plan.fleet.pools if plan.fleet else ():
        yield f"- {pool.name}: {pool.estimate.basis}; {plan.measured[pool.name]}"
    if plan.fleet and not plan.shared:
        yield from _contract(catalog, document)


def _contract(catalog: Catalog, document: dict[str, Any]) -> Parts:
    # The checklist reads plans as they are saved.
    with TemporaryDirectory() as folder:
        saved = Path(folder) / "plan.json"
        write_text(saved, json_text(document))
        planned = replace(read_planned(catalog, saved), file="plan.json")
    yield Heading("What to demand in the contract")
    for part in checklist_parts(planned, checklist(catalog, planned, changed({}))):
        # All of it is folded as one.
        yield Line(part.text, "bold") if isinstance(part, Heading) else part


def _lengths(request_class: RequestClass) -> list[str]:
    return [f"{request_class.input_tokens:,.0f}", f"{request_class.output_tokens:,.0f}"]


def _targets(kind: RequestClass) -> list[str]:
    return [f"p{t.percentile * 100:g} {significant(t.seconds)} s" if t else "-" for t in (kind.ttft, kind.tpot)]


_OF_POOL = (
    "pool", "model", "accelerator", "vendor", "layout", "precision", "stack", "release", "replicas", "gpus",
    "usd_per_gpu_hour", "usd_per_hour", "usd_per_month", "utilisation", "ttft_s", "tpot_s", "output_tokens_per_s",
    "limited_by", "preflight",
)  # fmt: skip


def pools_csv(document: dict[str, Any]) -> str:
    """A row a pool, by the document's own numbers."""
    rows = []
    for pool in (document["fleet"] or {"pools": []})["pools"]:
        split = pool["parallelism"]
        layout = "".join(f"{name.upper()}{split[name]}" for name in ("tp", "pp", "ep", "dp") if split[name] > 1)
        own = {"pool": pool["name"], "layout": layout or "TP1", "preflight": pool["preflight"]["verdict"]}
        own |= {name: pool["estimate"][name] for name in ("ttft_s", "tpot_s", "output_tokens_per_s")}
        rows.append({**pool, **own, "usd_per_month": pool["usd_per_hour"] * HOURS_PER_MONTH})
    return csv_text(_OF_POOL, rows)

"""A review and a checklist as `--json` prints them."""

import math
from dataclasses import asdict
from typing import Any

from msgspec import to_builtins

from crosstie.prove.review.again import Again
from crosstie.prove.review.checklist import Demand
from crosstie.prove.review.figures import LEVEL, ReviewFigure
from crosstie.prove.review.planned import Planned
from crosstie.prove.review.review import Review


def review_document(found: Review, learnt: Again | None) -> dict[str, Any]:
    planned, production = found.planned, found.production
    return {
        "plan": {"file": planned.file, "name": planned.workload.name, "made": planned.saved.made},
        "today": found.today,
        "age_days": planned.age_days(found.today),
        "recorded": {
            "file": production.trace.file,
            "requests": len(production.classes),
            "span_s": production.span_s,
            "simulated_requests": len(found.expected.rows) if found.expected else 0,
        },
        "holds": found.holds,
        "beyond": len(found.beyond),
        "unsure": len(found.unsure),
        "level": LEVEL,
        "figures": [_figure(one) for one in found.figures],
        "notes": found.notes,
        "assumptions": planned.assumptions or None,
        "again": None if learnt is None else asdict(learnt),
    }


def _figure(one: ReviewFigure) -> dict[str, Any]:
    return {
        "check": one.check or None,
        "of": one.of or None,
        "what": one.what,
        "unit": one.unit,
        "predicted": one.predicted,
        "planned": one.planned,
        "seen": one.seen.value,
        "interval": [one.seen.low, one.seen.high],
        "requests": one.seen.requests,
        "few": one.seen.few,
        "difference": one.difference if one.difference is not None and math.isfinite(one.difference) else None,
        "limit": None if one.limit is None else {"share": one.limit.share, "side": one.limit.side},
        "verdict": one.verdict,
        "note": one.note or None,
    }


def checklist_document(planned: Planned, items: list[Demand]) -> dict[str, Any]:
    return {
        "plan": {"file": planned.file, "name": planned.workload.name, "made": planned.saved.made},
        "demands": to_builtins(items),
        "assumptions": planned.assumptions or None,
    }

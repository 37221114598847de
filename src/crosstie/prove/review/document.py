"""A review and a checklist as `--json` prints them."""

import math
from dataclasses import asdict
from typing import Any

from msgspec import to_builtins

from crosstie.core.document import picked
from crosstie.prove.review.again import Again
from crosstie.prove.review.checklist import Demand
from crosstie.prove.review.figures import LEVEL, ReviewFigure
from crosstie.prove.review.planned import Planned
from crosstie.prove.review.review import Review

_PLAN = "file name=workload.name made=saved.made"


def review_document(review: Review, learnt: Again | None) -> dict[str, Any]:
    planned, production = review.planned, review.production
    return {
        "plan": picked(planned, _PLAN),
        "today": review.today,
        "age_days": planned.age_days(review.today),
        "recorded": {
            "file": production.trace.file,
            "requests": len(production.classes),
            "span_s": production.span_s,
            "simulated_requests": len(review.expected.rows) if review.expected else 0,
        },
        "holds": review.holds,
        "beyond": len(review.beyond),
        "unsure": len(review.unsure),
        "level": LEVEL,
        "figures": [_figure(figure) for figure in review.figures],
        "notes": review.notes,
        "assumptions": planned.assumptions or None,
        "again": None if learnt is None else asdict(learnt),
    }


def _figure(figure: ReviewFigure) -> dict[str, Any]:
    made = picked(
        figure,
        "check of what unit predicted planned seen=seen.value interval=seen.low requests=seen.requests few=seen.few "
        "difference limit verdict note",
    )
    known = figure.difference is not None and math.isfinite(figure.difference)
    return {
        **made,
        **{key: made[key] or None for key in ("check", "of", "note")},
        "interval": [figure.seen.low, figure.seen.high],
        "difference": figure.difference if known else None,
        "limit": figure.limit and picked(figure.limit, "share side"),
    }


def checklist_document(planned: Planned, items: list[Demand]) -> dict[str, Any]:
    return {
        "plan": picked(planned, _PLAN),
        "demands": to_builtins(items),
        "assumptions": planned.assumptions or None,
    }

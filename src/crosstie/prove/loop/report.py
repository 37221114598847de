"""The report of a loop as a document: what was predicted, what was measured, and what that changes."""

from statistics import median
from typing import Any

import msgspec

from crosstie.core.document import picked
from crosstie.core.units import HOURS_PER_MONTH
from crosstie.decide.plan.plan import Plan
from crosstie.prove.calibration.own import OWN
from crosstie.prove.loop.design import METRICS, LoopPoint, PredictedMetric
from crosstie.prove.loop.loop import LoopResult

# Names of METRICS as files of `bench` have them.
_MEASURED = {"ttft_s": "ttft_s_p50", "tpot_s": "tpot_s_p50", "output_tokens_per_s": "output_tokens_per_s"}


def report_document(found: LoopResult) -> dict[str, Any]:
    state = found.state
    assert state.prepared is not None
    questions = _questions(found)
    points = [_point(found, point) for point in state.design if point.name in found.measured]
    rows = [row for point in points for row in point["metrics"].values()]
    return {
        "crosstie_loop": 1,
        "title": f"The loop: {state.prepared.replica}",
        **picked(state.prepared, "emulated replica"),
        "conditions": {k: v for k, v in state.prepared.conditions.items() if k != "model_config"},
        **picked(state, "command=prepared.command doctor=prepared.doctor notes=prepared.notes"),
        **picked(state, "spent_s starts_s calibration_before=calibration"),
        "inside": sum(row["inside"] for row in rows),
        "rows": len(rows),
        "points": points,
        "doubtful": _doubtful(found),
        "not_measured": [one.short for one in found.dropped],
        "questions": questions,
        "widths": _middle(questions),
        "errors": _errors(found),
        "plan": _plans(found),
        "not_planned": found.unplanned,
    }


def _point(found: LoopResult, one: LoopPoint) -> dict[str, Any]:
    measured = found.measured[one.name]
    metrics = {}
    for name in METRICS:
        before, value = one.predicted[name], (measured["metrics"].get(_MEASURED[name]) or {}).get("value")
        if value is None:
            continue
        after = found.after.get(one.name, {}).get(name)
        metrics[name] = {
            "predicted": msgspec.to_builtins(before), "measured": value,
            "error": before.value / value - 1.0, "inside": before.low <= value <= before.high,
            "predicted_after": msgspec.to_builtins(after) if after else None,
        }  # fmt: skip
    return {
        **picked(one, "name short input_tokens output_tokens clients"),
        **{key: measured[key] for key in ("requests", "failed", "arrivals")},
        "width_left": one.width_left, "metrics": metrics,
    }  # fmt: skip


def _doubtful(found: LoopResult) -> dict[str, list[str]]:
    """Why, and which points: what of them is not learnt."""
    known = [(point.short, found.measured[point.name]) for point in found.state.design if point.name in found.measured]
    reasons = {
        "the client was too slow for their TTFT, which is not learnt": [name for name, one in known if one["bent"]],
        "clients were never all at work, so nothing of them is learnt": [
            name for name, one in known if one["arrivals"] == "unsettled"
        ],
    }
    return {why: points for why, points in reasons.items() if points}


def _questions(found: LoopResult) -> list[dict[str, Any]]:
    """Of every load that is asked about, by metric: the interval's width, high over low, before and now."""
    pairs = zip(found.state.questions, found.questions_after, strict=False)
    return [
        {
            "short": one.short,
            "before": msgspec.to_builtins(one.predicted),
            "after": msgspec.to_builtins(after),
            "widths": {name: [_width(one.predicted[name]), _width(after[name])] for name in METRICS},
        }
        for one, after in pairs
        if set(one.predicted) == set(after) == set(METRICS)
    ]


def _width(one: PredictedMetric) -> float:
    return one.high / one.low


def _middle(questions: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The median of the widths, before and now."""
    if not questions:
        return {}
    widths = [question["widths"] for question in questions]
    return {name: [median(own[name][when] for own in widths) for when in (0, 1)] for name in METRICS}


def _errors(found: LoopResult) -> dict[str, Any]:
    """Median errors of the measured rows: as predicted, and by what was learnt from the others."""
    known = found.learnt.calibration.errors if found.learnt else {}
    return {title: known[title] for title in OWN.values() if title in known}


def _plans(found: LoopResult) -> dict[str, Any] | None:
    if found.plans is None:
        return None
    before, after = found.plans
    return {
        "workload": before.workload.name,
        "before": _plan(before),
        "after": _plan(after),
        "usd_per_month_less": HOURS_PER_MONTH * (before.usd_per_hour - after.usd_per_hour)
        if before.answered and after.answered
        else None,
    }


def _plan(one: Plan) -> dict[str, Any]:
    return {
        **picked(one, "answered holds"),
        "usd_per_hour": one.usd_per_hour if one.answered else None,
        **picked(one, "usd_per_million=fleet.cost.usd_per_million gpus"),
        "pools": {
            pool.name: f"{pool.replicas} x {pool.deployment.label}, {pool.deployment.model.id}"
            for pool in (one.fleet.pools if one.fleet else ())
        },
        "interval_usd_per_hour": _ends(one),
    }


def _ends(one: Plan) -> list[float] | None:
    known = one.uncertainty
    if known is None or known.low_usd_per_hour is None or known.high_usd_per_hour is None:
        return None
    return [known.low_usd_per_hour, known.high_usd_per_hour]

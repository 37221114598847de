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


def report_document(loop_result: LoopResult) -> dict[str, Any]:
    state = loop_result.state
    assert state.prepared is not None
    questions = _questions(loop_result)
    points = [_point(loop_result, point) for point in state.design if point.name in loop_result.measured]
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
        "doubtful": _doubtful(loop_result),
        "not_measured": [loop_point.short for loop_point in loop_result.dropped],
        "questions": questions,
        "widths": _middle(questions),
        "errors": _errors(loop_result),
        "plan": _plans(loop_result),
        "not_planned": loop_result.unplanned,
    }


def _point(loop_result: LoopResult, point: LoopPoint) -> dict[str, Any]:
    measured = loop_result.measured[point.name]
    metrics = {}
    for name in METRICS:
        before, value = point.predicted[name], (measured["metrics"].get(_MEASURED[name]) or {}).get("value")
        if value is None:
            continue
        after = loop_result.after.get(point.name, {}).get(name)
        metrics[name] = {
            "predicted": msgspec.to_builtins(before), "measured": value,
            "error": before.value / value - 1.0, "inside": before.low <= value <= before.high,
            "predicted_after": msgspec.to_builtins(after) if after else None,
        }  # fmt: skip
    return {
        **picked(point, "name short input_tokens output_tokens clients"),
        **{key: measured[key] for key in ("requests", "failed", "arrivals")},
        "width_left": point.width_left, "metrics": metrics,
    }  # fmt: skip


def _doubtful(ended: LoopResult) -> dict[str, list[str]]:
    """Why, and which points: what of them is not learnt."""
    known = [(point.short, ended.measured[point.name]) for point in ended.state.design if point.name in ended.measured]
    reasons = {
        "the client was too slow for their TTFT, which is not learnt": [name for name, point in known if point["bent"]],
        "clients were never all at work, so nothing of them is learnt": [
            name for name, point in known if point["arrivals"] == "unsettled"
        ],
    }
    return {why: points for why, points in reasons.items() if points}


def _questions(loop_result: LoopResult) -> list[dict[str, Any]]:
    """Of every load that is asked about, by metric: the interval's width, high over low, before and now."""
    pairs = zip(loop_result.state.questions, loop_result.questions_after, strict=False)
    return [
        {
            "short": point.short,
            "before": msgspec.to_builtins(point.predicted),
            "after": msgspec.to_builtins(after),
            "widths": {name: [_width(point.predicted[name]), _width(after[name])] for name in METRICS},
        }
        for point, after in pairs
        if set(point.predicted) == set(after) == set(METRICS)
    ]


def _width(metric: PredictedMetric) -> float:
    return metric.high / metric.low


def _middle(questions: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The median of the widths, before and now."""
    if not questions:
        return {}
    widths = [question["widths"] for question in questions]
    return {name: [median(own[name][when] for own in widths) for when in (0, 1)] for name in METRICS}


def _errors(loop_result: LoopResult) -> dict[str, Any]:
    """Median errors of the measured rows: as predicted, and by what was learnt from the others."""
    known = loop_result.learnt.calibration.errors if loop_result.learnt else {}
    return {title: known[title] for title in OWN.values() if title in known}


def _plans(loop_result: LoopResult) -> dict[str, Any] | None:
    if loop_result.plans is None:
        return None
    before, after = loop_result.plans
    return {
        "workload": before.workload.name,
        "before": _plan(before),
        "after": _plan(after),
        "usd_per_month_less": HOURS_PER_MONTH * (before.usd_per_hour - after.usd_per_hour)
        if before.answered and after.answered
        else None,
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        **picked(plan, "answered holds"),
        "usd_per_hour": plan.usd_per_hour if plan.answered else None,
        **picked(plan, "usd_per_million=fleet.cost.usd_per_million gpus"),
        "pools": {
            pool.name: f"{pool.replicas} x {pool.deployment.label}, {pool.deployment.model.id}"
            for pool in (plan.fleet.pools if plan.fleet else ())
        },
        "interval_usd_per_hour": _ends(plan),
    }


def _ends(plan: Plan) -> list[float] | None:
    known = plan.uncertainty
    if known is None or known.low_usd_per_hour is None or known.high_usd_per_hour is None:
        return None
    return [known.low_usd_per_hour, known.high_usd_per_hour]

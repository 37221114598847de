"""The result file of a benchmark: JSON that `validate` and `calibrate` read as it is."""

import platform
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from crosstie.core.version import __version__
from crosstie.prove.bench.bench import Bench, Measured
from crosstie.prove.bench.loads import BenchLengths, spread_note
from crosstie.prove.bench.summary import PointResult, ratio
from crosstie.prove.replay.outcomes import ClassTargets, plain

FORMAT = 1


def document(bench: Bench) -> dict[str, Any]:
    settings, lengths = bench.settings, bench.settings.lengths
    return {
        "crosstie_bench": FORMAT,
        "by": f"crosstie {__version__} bench",
        "date": date.today().isoformat(),
        "client": platform.node(),
        "latencies": "seconds of the server's clock, from when a request was due; intervals are of 95%",
        "speed": settings.speed,
        "lengths": {
            "input_tokens": None if lengths.trace else lengths.input_tokens,
            "output_tokens": None if lengths.trace else lengths.output_tokens,
            "shortest": lengths.shortest,
            "vary": round(lengths.vary, 6),
            "trace": lengths.trace.file if lengths.trace else None,
        },
        # Of what the prompts are made: never the text itself.
        "prompts": settings.prompts.told if settings.prompts else {"kind": "filler"},
        "targets": _targets(settings.targets),
        "settings": plain(settings.told),
        "gpus_watched_by": list(bench.gpus),
        "complete": bench.finished,
        "endpoints": [_endpoint(measured, bench.measured[0], lengths) for measured in bench.measured],
    }


def _targets(targets: ClassTargets) -> dict[str, Any]:
    made: dict[str, Any] = plain(targets)
    return made if made["by_class"] else {"ttft": made["ttft"], "tpot": made["tpot"]}


def _endpoint(own: Measured, first: Measured, lengths: BenchLengths) -> dict[str, Any]:
    limit = plain(own.limit)
    return {
        "name": own.endpoint.name,
        "url": own.endpoint.url,
        "model": own.endpoint.model,
        "emulated": own.endpoint.emulated,
        "conditions": dict(own.endpoint.conditions),
        "bytes_per_token": round(own.sizing.bytes_per_token, 4),
        "template_tokens": round(own.sizing.template_tokens, 2),
        "prompts_counted_by": own.sizing.counted_by,
        "prompts_exact": bool(own.sizing.words),
        "limit": limit,
        "points": [
            _point(point, own, lengths, _over(point, first.points[index : index + 1]) if own is not first else None)
            for index, point in enumerate(own.points)
        ],
    }


def _over(point: PointResult, beside: Sequence[PointResult]) -> dict[str, Any] | None:
    """`beside`: the first endpoint's point, if it has one; where a limit was looked for it may be of another load."""
    if not beside or beside[0].load != point.load:
        return None
    return {name: plain(ratio(point, beside[0], name)) for name in ("output_tokens_per_s", "ttft_s_p50", "tpot_s_p50")}


def _point(
    point: PointResult, own: Measured, lengths: BenchLengths, over_first: dict[str, Any] | None
) -> dict[str, Any]:
    made: dict[str, Any] = plain(point)
    watched = len(point.gpus)
    if watched and "power_w" in point.metrics:
        made["metrics"]["power_w_per_gpu"] = {"value": point.metrics["power_w"].value / watched}
    said = columns(point, lengths, own.endpoint.conditions)
    return {"name": point.load.name, "columns": said, **made, "over_first": over_first}


def columns(point: PointResult, lengths: BenchLengths, conditions: Mapping[str, str]) -> dict[str, str]:
    """As results have them: what was counted, on average; but of a closed loop that begins all at once, whose schedule
    is predicted request by request, the most of lengths that vary."""
    if not point.metrics:
        return {}
    load = point.load
    rate = load.requests_per_s
    if load.clients is None and rate is None:
        rate = point.metrics["requests_per_s"].value
    inputs, outputs = point.input_tokens, point.output_tokens
    note = spread_note(lengths) if point.arrivals == "lockstep" else ""
    if note:
        mean = (1.0 + lengths.least) / 2.0
        inputs, outputs = inputs / mean, outputs / mean
    return {
        "concurrency": str(load.clients) if load.clients is not None else f"rate {rate:g} req/s",
        "num_prompts": str(max(round(point.requests / point.repeats), 1)),
        "input_len": str(max(round(inputs), 1)),
        "output_len": str(max(round(outputs), 1)),
        "arrivals": point.arrivals,
        **_drafts(point, conditions),
        **({"notes": note} if note else {}),
    }


def _drafts(point: PointResult, conditions: Mapping[str, str]) -> dict[str, str]:
    """An engine that drafted serves no plain answers, whether its user said how it drafts or not."""
    if point.acceptance_length is None:
        return {}
    said = conditions.get("spec_decode") or f"drafts of {point.draft_tokens}"
    return {"spec_decode": said, "spec_accept_len": f"{point.acceptance_length:.3f}"}

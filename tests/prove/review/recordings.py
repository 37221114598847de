"""Recordings as a gateway writes them, of a plan's fleet in virtual time: the same on every machine."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.decide.plan.subject import read_subject
from crosstie.decide.plan.traffic import poisson
from crosstie.sim.fleet import FleetSimulator

Line = dict[str, Any]


def served(catalog: Catalog, plan: Path, requests: int, *, load: float = 1.0, seed: int = 3) -> list[Line]:
    """What the gateway of a plan's fleet would record of the plan's own traffic, at its peak."""
    subject = read_subject(catalog, plan)
    assert subject.workload is not None
    traffic = poisson(subject.workload, requests, None, load, seed)
    answers = FleetSimulator(catalog, subject.fleet, prefixes=False).run(traffic.requests())
    return sorted(
        (
            {
                "timestamp": round(one.request.arrival_s * 1e3),
                "input_length": one.request.input_tokens,
                "output_length": one.request.output_tokens,
                "hash_ids": [],
                "model": one.request.model,
                "class": one.request.class_name,
                "pool": one.pool,
                "ttft_ms": one.ttft_s * 1e3,
                "tpot_ms": one.tpot_s * 1e3,
            }
            for one in answers
            if one.pool is not None
        ),
        key=lambda line: line["timestamp"],
    )


def written(file: Path, lines: Iterable[Line]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def each(lines: list[Line], change: Callable[[Line], Line]) -> list[Line]:
    return [change(dict(line)) for line in lines]


def slower(lines: list[Line], by: float) -> list[Line]:
    """As fleets that take longer for everything answer them, while as many requests come."""
    return each(lines, lambda line: {**line, "ttft_ms": line["ttft_ms"] * by, "tpot_ms": line["tpot_ms"] * by})


def thinned(lines: list[Line], share: float, seed: int = 5) -> list[Line]:
    kept = np.random.default_rng(seed).random(len(lines)) < share
    return [line for line, keep in zip(lines, kept, strict=True) if keep]

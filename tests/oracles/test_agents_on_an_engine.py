"""Agents in a closed loop on a real engine: what `simulate`'s engine makes of the very same sessions.

Measured on one H200 with vLLM 0.24.0 (docs/notes/measurements.md). Below the knee, at it and far beyond: what runs keeps
its memory, so that sessions which pause lose theirs long before all contexts together are as large as the cache.
"""

import json
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np
import pytest
from tests.route.fleets import CATALOG

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.sessions import session_turns
from crosstie.catalog.workloads import read_workload
from crosstie.sim.fleet import FleetSimulator, SimulatedAnswer
from crosstie.sim.sessions import ClosedLoop, SessionLoad

pytestmark = pytest.mark.slow

BESIDE = Path(__file__).parents[2] / "examples" / "results" / "h200-vllm-0.24-agents" / "beside"
MEASURED = json.loads((BESIDE / "measured.json").read_text())
# As the client that measured drew them: sessions of the file, and how they began.
DRAWN_WITH, SESSIONS, RAMP_S, WARM_UP = 5, 900, 25.0, 0.4


@pytest.mark.parametrize("run", ["24", "64", "88"])
def test_hits_turns_and_waiting_are_the_engine_s(run: str) -> None:
    seen = MEASURED[run]
    got = simulated(seen["live"], seen["seconds"], seen["seed"])
    assert got["hit_rate"] == pytest.approx(seen["hit_rate"], abs=0.05)
    assert got["turns_per_s"] == pytest.approx(seen["turns_per_s"], rel=0.12)
    assert got["running"] == pytest.approx(seen["running"], rel=0.12)
    assert got["ttft_s"] == pytest.approx(seen["ttft_s"]["mean"], rel=0.35)
    assert got["tpot_s"] == pytest.approx(seen["tpot_s"]["mean"], rel=0.2)


def simulated(live: int, seconds: float, seed: int) -> dict[str, float]:
    shape = read_workload(CATALOG, BESIDE / "agents.toml").classes[0].sessions
    assert shape is not None
    chance = np.random.default_rng(DRAWN_WITH)
    drawn = [list(session_turns(shape.shape, chance, number, tuple(range(8)), 512)) for number in range(SESSIONS)]
    order = Random(seed)
    order.shuffle(drawn)
    left = iter(drawn)
    load = SessionLoad("coders", "qwen3-8b", 0, shape.turns, 9.0, lambda number, chance: iter(next(left)))
    answers: list[SimulatedAnswer] = []

    def tell(answer: SimulatedAnswer) -> None:
        answers.append(answer)
        loop.ended(answer)

    fleet = read_fleet(CATALOG, BESIDE / "fleet.toml")
    simulator = FleetSimulator(CATALOG, fleet, "round-robin", seed, prefixes=True, tell=tell)
    loop = ClosedLoop(simulator, [load], RAMP_S, seed)
    for begins_s in sorted(RAMP_S * (place + order.random()) / live for place in range(live)):
        turns = next(left)
        first = order.randrange(len(turns))
        # The client drew a session's tokens and its name, too.
        order.random(), order.randrange(10**12)
        loop._open(load, turns[first:], first + 1, begins_s)
    (engine,) = simulator.engines.values()
    running, since = [], WARM_UP * seconds
    for second in range(1, int(seconds) + 1):
        loop.advance(float(second))
        running += [engine.running] if second > since else []
    columns = loop.columns
    ended = np.array(columns.ended_s) > since
    inputs, cached = np.array(columns.input_tokens)[ended], np.array(columns.cached_tokens)[ended]
    late = [answer for answer in answers if answer.request.arrival_s + answer.finished_s > since]
    return {
        "hit_rate": float(cached.sum() / inputs.sum()),
        "turns_per_s": int(ended.sum()) / (seconds - since),
        "running": fmean(running),
        "ttft_s": float(np.array(columns.ttft_s)[ended].mean()),
        "tpot_s": fmean(answer.tpot_s for answer in late if answer.request.output_tokens > 1),
    }

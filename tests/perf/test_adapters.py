"""Adapters: memory by hand, misses against a cache that is replayed, and what a replica with them gives."""

import math
from collections import OrderedDict

import msgspec
import numpy as np
import pytest

from crosstie.catalog.library import Catalog
from crosstie.catalog.lora import missing_share, most_in_flight, zipf
from crosstie.core.deployment import Adapters, Deployment, Parallelism
from crosstie.perf.hardware import Hardware
from crosstie.perf.memory import gpu_adapter_bytes, memory_plan
from crosstie.perf.steady_state import steady_state


def adapted(catalog: Catalog, given: Adapters | None, model: str = "llama-3.1-8b", **split: int) -> Deployment:
    one = catalog.deployment(catalog.model(model), catalog.accelerator("h200"), Parallelism(**split))
    return msgspec.structs.replace(one, adapters=given)


def test_slots_by_hand(catalog: Catalog) -> None:
    """Llama-3.1-8B, 32 layers: q and o 4,096 each way, k and v 4,096 to 1,024, gate, up and down 4,096 and 14,336."""
    attention = 2 * (4096 + 4096) + 2 * (4096 + 1024)
    forward = 3 * (4096 + 14336)
    one = Adapters(slots=4, rank=16, targets="attention")
    assert gpu_adapter_bytes(adapted(catalog, one)) == 4 * 16 * 32 * attention * 2
    both = Adapters(slots=4, rank=16)
    assert gpu_adapter_bytes(adapted(catalog, both)) == 4 * 16 * 32 * (attention + forward) * 2
    # Two ranks share the side that the weights are split along.
    halved = 2 * (4096 + 2048) + 2 * (4096 + 512) + 2 * (4096 + 7168) + (7168 + 4096)
    assert gpu_adapter_bytes(adapted(catalog, both, tp=2)) == 4 * 16 * 32 * halved * 2


def test_slots_are_taken_from_the_cache(catalog: Catalog) -> None:
    held = Adapters(slots=16, rank=64)
    without, with_them = (memory_plan(adapted(catalog, given)) for given in (None, held))
    assert without.cache_bytes - with_them.cache_bytes == pytest.approx(gpu_adapter_bytes(adapted(catalog, held)))
    assert without.weight_bytes == with_them.weight_bytes


def test_slower_steps_and_fewer_at_once(catalog: Catalog) -> None:
    plain, slow, narrow = (
        steady_state(Hardware([adapted(catalog, given)]), np.array([1, 64]), 500, 200)
        for given in (
            None,
            Adapters(slots=1, rank=8, slowdown=1.5),
            Adapters(slots=1, rank=8, max_sequences=4.0),
        )
    )
    assert float(slow.decode.gpu_s[0, 0]) == pytest.approx(1.5 * float(plain.decode.gpu_s[0, 0]), rel=0.01)
    assert float(slow.requests_per_s[0, 1]) < float(plain.requests_per_s[0, 1])
    assert float(narrow.concurrency_that_fits[0, 1]) == 4.0
    assert narrow.engine_binds[0, 1]
    assert float(narrow.tpot_s[0, 0]) == pytest.approx(float(plain.tpot_s[0, 0]), rel=1e-6)


def replayed(popularity: list[float], slots: int, requests: int = 40_000) -> float:
    """Of the later half, the share that finds its adapter gone."""
    chosen = np.random.default_rng(4).choice(len(popularity), requests, p=popularity)
    held: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for number, one in enumerate(chosen):
        missed += one not in held and number >= requests // 2
        held[one] = None
        held.move_to_end(one)
        if len(held) > slots:
            held.popitem(last=False)
    return missed / (requests - requests // 2)


@pytest.mark.parametrize(
    ("adapters", "exponent", "slots"), [(50, 1.0, 8), (200, 0.8, 32), (20, 0.0, 5), (1000, 1.2, 16)]
)
def test_misses_are_those_of_a_replayed_cache(adapters: int, exponent: float, slots: int) -> None:
    popularity = zipf(adapters, exponent)
    assert missing_share(popularity, slots) == pytest.approx(replayed(popularity, slots), abs=0.012)


def test_enough_slots_for_all() -> None:
    assert missing_share(zipf(8, 1.0), 8) == 0.0
    assert most_in_flight(zipf(8, 1.0), 8) == math.inf


def test_as_many_run_as_have_a_slot() -> None:
    """Of equally popular ones n requests ask for E (1 - (1 - 1/E)^n); one slot is one adapter at a time."""
    even = zipf(100, 0.0)
    most = most_in_flight(even, 10)
    assert 100 * (1 - 0.99**most) == pytest.approx(10)
    assert most_in_flight(even, 1) == pytest.approx(1.0, abs=1e-6)
    assert most_in_flight(zipf(100, 2.0), 10) > 3 * most, "favourites share a slot"

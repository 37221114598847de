"""The benchmark of thirty models: what it is made of, and that a seed gives the same day."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from crosstie.catalog.library import Catalog

FILE = Path(__file__).parents[2] / "benchmarks" / "hosting.py"


@pytest.fixture(scope="module")
def hosting() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hosting_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_thirty_models_from_one_billion_parameters_to_120(hosting: ModuleType, catalog: Catalog) -> None:
    every = hosting.models(catalog)
    assert len({model.id for model in every}) == 30
    sizes = sorted(model.parameters for model in every)
    assert 1e9 < sizes[0] < 2e9
    assert 1e11 < sizes[-1] < 1.3e11


def test_both_accelerators_hold_any_of_them_and_the_larger_more(hosting: ModuleType, catalog: Catalog) -> None:
    room = {}
    for name in hosting.ACCELERATORS:
        hosted, room[name] = hosting.hosted_on(catalog, name, "host")
        assert max(one.taken_bytes for one in hosted) < room[name]
    assert room["mi350x"] > 1.5 * room["b200"]


def test_a_seed_is_a_day_and_another_seed_another(hosting: ModuleType) -> None:
    one, again, other = (hosting.shifting(30, seed, 6.0) for seed in (1, 1, 2))
    assert np.array_equal(one.at_s, again.at_s)
    assert np.array_equal(one.model, again.model)
    assert not np.array_equal(one.model[:100], other.model[:100])
    assert np.all(np.diff(one.at_s) >= 0)
    assert len(one.at_s) == pytest.approx(6 * 3600 * hosting.REQUESTS_PER_S, rel=0.1)
    # The ranking drifts: the favourites of the first hour are not those of the last.
    first, last = (np.bincount(one.model[part], minlength=30) for part in (one.at_s < 3600, one.at_s > 5 * 3600))
    assert list(np.argsort(-first)[:5]) != list(np.argsort(-last)[:5])

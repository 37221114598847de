"""Step times from tables: one by one and many at once."""

import numpy as np
import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.perf.tabulated import StepTimes

CONTEXT = 3000.0
# On the tables' lines, between them and beyond.
SEQUENCES = (0.0, 0.5, 1.0, 3.0, 64.0, 700.0, 1500.0)
TOKENS = (0.0, 1.0, 16.0, 100.0, 5000.0, 60000.0)


@pytest.mark.parametrize(
    ("model", "split"),
    [("llama-3.1-8b", Parallelism()), ("deepseek-r1", Parallelism(tp=1, dp=8, ep=8))],
    ids=["one replica of attention", "eight"],
)
@pytest.mark.parametrize("share", [1.0, 0.125])
def test_many_steps_at_once_take_what_each_takes(
    catalog: Catalog, model: str, split: Parallelism, share: float
) -> None:
    times = StepTimes(catalog.deployment(catalog.model(model), catalog.accelerator("h200"), split), CONTEXT)
    asked = [(n, t) for n in SEQUENCES for t in TOKENS]
    one_by_one = [times.seconds(n, n * CONTEXT, t, share * t, 0.5 * (share * t) ** 2) for n, t in asked]
    sequences, tokens = np.array(asked).T
    assert times.seconds_at(sequences, tokens, share * tokens).tolist() == pytest.approx(one_by_one, rel=1e-12)
    assert len(set(one_by_one)) > len(asked) / 2

"""A real engine, llama.cpp's: prompts of the length asked for in its own tokens, answers of just theirs."""

import pytest
from tests.run.start.test_local import real

from crosstie.catalog.library import Catalog
from crosstie.prove.bench.bench import Settings, bench
from crosstie.prove.bench.endpoint import described
from crosstie.prove.bench.loads import BenchLengths, BenchLoad
from crosstie_gateway.start.local import start_local

pytestmark = pytest.mark.engines


@real
def test_lengths_are_right_in_the_engine_s_own_tokens() -> None:
    with start_local(threads=1) as engine:
        one = described(engine.url, None, None, True, {}, Catalog([]))
        assert one.conditions["engine"] == "llama.cpp"
        assert not one.emulated
        found = bench([one], [BenchLoad(clients=1)], Settings(lengths=BenchLengths(160, 5), requests=3, warm_up=0))
    (point,) = found.measured[0].points
    assert (point.failed, point.output_tokens) == (0, 5)
    # It counts words itself, so that lengths are exact.
    assert point.input_tokens == 160
    assert found.measured[0].sizing.counted_by == "the engine's /tokenize"
    # A chat has a template, and words of ours are longer than four bytes a token.
    assert found.measured[0].sizing.overhead > 5
    assert found.measured[0].sizing.bytes_per_token > 4.0

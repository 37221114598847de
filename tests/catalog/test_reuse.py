"""Hits of a trace at every size of cache, against a cache that is replayed."""

import numpy as np
import pytest

from crosstie.catalog.reuse import reuse
from crosstie.catalog.traces import Trace, read_trace, shipped_traces
from crosstie.sim.prefix_cache import PrefixCache


def made(prompts: list[tuple[int, tuple[int, ...]]], outputs: int = 100) -> Trace:
    lengths = np.array([tokens for tokens, _ in prompts])
    arrivals = np.arange(len(prompts), dtype=np.float64)
    return Trace("", arrivals, lengths, np.full(len(prompts), outputs), blocks=tuple(blocks for _, blocks in prompts))


def conversations(count: int, seed: int = 5) -> Trace:
    """Turns that grow, of some conversations at a time; all begin alike."""
    draw = np.random.default_rng(seed)
    blocks: dict[int, list[int]] = {}
    prompts, fresh = [], 1
    for _ in range(count):
        one = blocks.setdefault(int(draw.integers(0, 40)), [0])
        more = int(draw.integers(1, 6))
        one += range(fresh, fresh + more)
        fresh += more
        # A last block that is not full is not the one that the next turn has there.
        prompts.append((len(one) * 512 + int(draw.integers(1, 512)), (*one, -fresh)))
        if len(one) > 60:
            del one[1:]
    return made(prompts)


def replayed(trace: Trace, cache_tokens: float, places: np.ndarray | None = None) -> int:
    """Hits of caches that are asked request by request, as an engine asks its own."""
    where = np.zeros(len(trace), np.int64) if places is None else places
    caches = [PrefixCache(cache_tokens, 512) for _ in range(int(where.max()) + 1)]
    assert trace.blocks is not None
    for row, blocks in enumerate(trace.blocks):
        cache = caches[where[row]]
        cache.look_up(blocks, int(trace.input_tokens[row]))
        cache.keep_answer(int(trace.output_tokens[row]))
        cache.keep(blocks, int(trace.input_tokens[row]))
    return sum(cache.hits for cache in caches)


def test_a_turn_finds_what_the_one_before_it_had_if_the_cache_still_holds_it() -> None:
    """1,024 tokens of a conversation, 612 of another request between its turns."""
    found = reuse(made([(1024, (1, 2)), (512, (9,)), (1500, (1, 2, 3))]))
    assert found.request.tolist() == [2, 2]
    # The beginning was used after the end: less lies between. The first answer is older still.
    assert found.needs.tolist() == [612 + 512, 612 + 1024]
    assert [found.cached_tokens(size) for size in (1123, 1124, 1635, 1636)] == [0, 512, 512, 1024]


def test_the_block_of_a_prompts_last_token_is_computed_again() -> None:
    found = reuse(made([(1024, (1, 2)), (1024, (1, 2)), (600, (7, 8)), (600, (7, 8))]))
    assert found.cached_tokens(1e9) == 1024 - 16 + 592


@pytest.mark.parametrize("cache_tokens", [600, 5_000, 40_000, 150_000, 10**9])
def test_one_pass_is_the_replay_at_every_size(cache_tokens: int) -> None:
    trace = conversations(600)
    assert reuse(trace).cached_tokens(cache_tokens) == replayed(trace, cache_tokens) > 0


def test_requests_that_are_spread_find_less() -> None:
    trace = conversations(600)
    places = np.random.default_rng(7).integers(0, 4, len(trace))
    for size in (5_000, 40_000, 10**9):
        assert reuse(trace, 4).cached_tokens(size) == replayed(trace, size, places)
    assert reuse(trace, 4).cached_tokens(1e9) < 0.9 * reuse(trace).cached_tokens(1e9)


def test_the_curve_of_some_requests() -> None:
    trace = conversations(300)
    late = np.arange(len(trace)) >= 150
    sizes = np.array([10.0, 20_000.0, 1e9])
    found = reuse(trace)
    parts = [found.curve(sizes, chosen) * chosen.sum() for chosen in (late, ~late)]
    np.testing.assert_allclose(sum(parts), [found.cached_tokens(size) for size in sizes])
    assert parts[0][-1] > parts[1][-1]


def test_a_trace_where_nothing_comes_again() -> None:
    found = reuse(made([(600, (1, 2)), (500, (3,)), (10, ())]))
    assert found.cached_tokens(1e9) == 0
    assert found.curve(np.array([1.0, 1e9]), np.ones(3, np.bool_)).tolist() == [0, 0]


@pytest.mark.slow
def test_what_an_endless_cache_has_of_the_conversations_of_mooncake() -> None:
    """37.4% of the prompts' tokens, as was computed elsewhere from the same trace."""
    trace = read_trace(shipped_traces()["mooncake-conversation"])
    found, tokens = reuse(trace), float(trace.input_tokens.sum())
    assert found.cached_tokens(1e12) / tokens == pytest.approx(0.374, abs=0.0005)
    for size in (300_000, 3_000_000):
        assert found.cached_tokens(size) == replayed(trace, size)

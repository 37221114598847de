"""The cache of an engine: whole blocks, the least recently used dropped first, and its end of a prompt before its beginning."""

from collections import OrderedDict

import msgspec
import numpy as np
import pytest
from tests.route.fleets import CATALOG as SESSION_CATALOG
from tests.sim.test_sessions import small, workload

from crosstie.catalog.library import Catalog
from crosstie.catalog.loading import CacheTier
from crosstie.core.deployment import Parallelism
from crosstie.decide.plan.run_result import Run, SimulatedCase
from crosstie.decide.plan.sweep import RequestSource, one_run
from crosstie.sim.engine import Engine, Token
from crosstie.sim.prefix_cache import PrefixCache


def test_whole_blocks_from_the_beginning_are_found() -> None:
    cache = PrefixCache(1000, 64)
    assert cache.look_up("abc", 200) == 0
    cache.keep("abc", 192)
    assert cache.look_up("abcd", 250) == 192
    assert cache.look_up("abx", 192) == 128
    assert cache.look_up("xbc", 192) == 0, "without its beginning the rest is no use"
    assert (cache.queries, cache.hits) == (834, 320)


def test_the_block_of_the_last_token_is_computed_again() -> None:
    cache = PrefixCache(1000, 64)
    cache.keep("abc", 192)
    assert cache.look_up("abc", 192) == 176
    assert cache.look_up("abc", 190) == 176


def test_the_end_of_a_prompt_is_dropped_before_its_beginning() -> None:
    cache = PrefixCache(256, 64)
    cache.keep("abc", 192)
    cache.keep("xy", 128)
    assert len(cache) == 4
    assert cache.held_tokens == 256
    assert cache.look_up("abcd", 250) == 128


def test_answers_take_room() -> None:
    cache = PrefixCache(256, 64)
    cache.keep("abc", 180)
    cache.keep_answer(100)
    assert cache.held_tokens == 228
    assert cache.look_up("abcd", 250) == 128


def test_what_is_used_again_stays() -> None:
    cache = PrefixCache(256, 64)
    cache.keep("ab", 128)
    cache.keep("xy", 128)
    cache.look_up("abz", 190)
    cache.keep("pq", 128)
    assert cache.look_up("abz", 190) == 128
    assert cache.look_up("xyz", 190) == 0


def test_a_prompt_larger_than_the_cache_leaves_nothing_over() -> None:
    cache = PrefixCache(100, 64)
    cache.keep("abc", 192)
    assert cache.held_tokens == 64
    cache.keep_answer(101)
    assert len(cache) == 0


@pytest.fixture
def engine(catalog: Catalog) -> Engine:
    one = catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator("h200"), Parallelism(tp=1))
    return Engine(one, 2000.0, prefix_tokens=512)


def test_an_engine_finds_what_it_computed_and_answers_sooner(engine: Engine) -> None:
    engine.add("first", 8192, 10, 0.0, prefix=range(16))
    ends = {token.id: token for token in engine.advance(100.0) if token.tokens == 1}
    engine.add("again", 8200, 10, 100.0, prefix=(*range(16), 99))
    engine.add("other", 8200, 10, 200.0, prefix=(*range(100, 116), 99))
    ends |= {token.id: token for token in engine.advance(300.0) if token.tokens == 1}
    (cache,) = engine.caches
    assert (cache.queries, cache.hits) == (8192 + 2 * 8200, 8192)
    assert ends["again"].at - 100.0 < 0.5 * (ends["other"].at - 200.0)


def test_requests_of_one_moment_share_nothing_yet(engine: Engine) -> None:
    """Both begin in the same step, before either is computed."""
    for name in "ab":
        engine.add(name, 2048, 10, 0.0, prefix=range(4))
    engine.advance(100.0)
    assert engine.caches[0].hits == 0


def test_an_engine_without_keys_believes_what_it_is_told(engine: Engine) -> None:
    engine.add("told", 4000, 5, 0.0, cached_tokens=3000)
    engine.advance(100.0)
    (cache,) = engine.caches
    assert cache.queries == 0
    assert cache.held_tokens == 0, "nobody can ask for it, and there is nobody to take room from"
    engine.add("keyed", 512, 5, 100.0, prefix=(1,))
    engine.advance(200.0)
    held = cache.held_tokens
    engine.add("told again", 4000, 5, 200.0, cached_tokens=3000)
    engine.advance(300.0)
    assert cache.held_tokens == held + 4005


def test_attention_replicas_have_caches_of_their_own(catalog: Catalog) -> None:
    one = catalog.deployment(catalog.model("qwen3-30b-a3b"), catalog.accelerator("h200"), Parallelism(dp=2, ep=2))
    engine = Engine(one, 2000.0, prefix_tokens=512)
    engine.add("a", 2048, 500, 0.0, prefix=range(4))
    # The second goes to the other one, which has nothing to do.
    engine.add("b", 2100, 500, 0.5, prefix=range(5))
    engine.advance(100.0)
    assert [cache.queries for cache in engine.caches] == [2048, 2100]
    assert sum(cache.hits for cache in engine.caches) == 0


def test_it_agrees_with_the_plainest_cache_there_is() -> None:
    """Against a list of blocks that is searched and cut, over random conversations."""
    draw = np.random.default_rng(3)
    cache, plain, size = PrefixCache(40 * 64, 64), OrderedDict[tuple[int, int], None](), 40
    for _ in range(2000):
        who, length = int(draw.integers(0, 30)), int(draw.integers(1, 12))
        keys = [(who, place) for place in range(length)]
        known = next((place for place, key in enumerate(keys) if key not in plain), length)
        tokens = length * 64 + 1
        assert cache.look_up(keys, tokens) == known * 64
        for key in [*reversed(keys[:known]), *reversed(keys)]:
            plain.pop(key, None)
            plain[key] = None
        while len(plain) > size:
            plain.popitem(last=False)
        cache.keep(keys, length * 64)
        assert cache.held_tokens == 64 * len(plain)


def with_tiers(catalog: Catalog, *tiers: CacheTier, shared: dict[str, PrefixCache] | None = None) -> Engine:
    one = catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator("h200"), Parallelism(tp=1))
    return Engine(one, 4096.0, prefix_tokens=512, tiers=tiers, shared=shared)


def host(gib: float, bytes_per_s: float = 55.6e9) -> CacheTier:
    return CacheTier("host", gib * 2**30, False, bytes_per_s, 0.0)


def test_what_the_gpu_dropped_comes_back_from_the_host_while_others_go_on(catalog: Catalog) -> None:
    size = 16_384

    def turns(host_gib: float) -> tuple[Engine, list[Token]]:
        engine = with_tiers(catalog, *([host(host_gib)] if host_gib else []))
        crowd = int(engine.cache_tokens // size) + 2
        tokens: list[Token] = []
        # Each is computed alone, the first one last of all once more, with somebody who decodes beside it.
        for number in [*range(crowd), 0]:
            keys = [(number, block) for block in range(size // 512)]
            now = 1000.0 * (len(tokens) + 1)
            if number == 0 and tokens:
                engine.add("beside", 100, 400, now - 0.5)
            engine.add((number, now), size, 1, now, prefix=keys)
            tokens += [token for token in engine.advance(now + 900.0) if token.id != "beside"]
        return engine, tokens

    without, computed = turns(0.0)
    engine, loaded = turns(500.0)
    assert without.caches[0].hits == 0
    assert loaded[-1].cached == engine.caches[0].hits == size - 16
    (tier,) = engine._ranks[0].tiers
    assert engine.loaded_tokens == {"host": size - 16}
    took = [answers[-1].at - 1000.0 * len(answers) for answers in (computed, loaded)]
    # 2.1 GB over the link, and then one short step; 16,384 tokens take 8B's GPU far longer.
    load_s = tier.load_s_per_token * (size - 16)
    assert load_s < took[1] < load_s + 0.1 < took[0]
    assert engine.idle


def test_a_request_that_waits_for_the_host_can_be_cancelled(catalog: Catalog) -> None:
    engine = with_tiers(catalog, host(500.0, 1e6))
    keys = [(0, block) for block in range(8)]
    engine.add("first", 4096, 1, 0.0, prefix=keys)
    engine.advance(10.0)
    engine.caches[0].capacity_tokens = 0.0
    engine.caches[0].keep_answer(0)
    engine.add("again", 4096, 1, 20.0, prefix=keys)
    # A megabyte a second: its own come after minutes.
    assert engine.advance(30.0) == []
    assert engine.waiting == 1
    assert engine.cancel("again")
    assert engine.idle
    assert engine.kv_used_fraction == 0.0


def test_each_memory_is_asked_for_what_the_quicker_ones_have_not(catalog: Catalog) -> None:
    """The host keeps the beginning of a prompt that was longer, a drive all of it; both links work at once."""
    size, drive = 16_384, CacheTier("nvme", 500.0 * 2**30, False, 5e9, 0.5)
    engine = with_tiers(catalog, host(500.0), drive)
    keys = [(0, block) for block in range(size // 512)]
    engine.add("first", size, 1, 0.0, prefix=keys)
    engine.advance(100.0)
    for cache, kept in ((engine.caches[0], 0.0), (engine._ranks[0].tiers[0].cache, size / 2)):
        cache.capacity_tokens = kept
        cache.keep_answer(0)
    engine.add("again", size, 1, 200.0, prefix=keys)
    (token,) = engine.advance(300.0)
    assert token.cached == size - 16
    assert engine.loaded_tokens == {"host": size / 2, "nvme": size / 2 - 16}
    loads_s = [tier.latency_s + tier.load_s_per_token * size / 2 for tier in engine._ranks[0].tiers]
    assert loads_s[0] < loads_s[1] < token.at - 200.0 < loads_s[1] + 0.1


def test_what_replicas_share_has_what_one_of_them_computed(catalog: Catalog) -> None:
    store = CacheTier("remote", 500.0 * 2**30, True, 12e9, 0.025)
    shared: dict[str, PrefixCache] = {}
    first, other = (with_tiers(catalog, store, host(100.0), shared=shared) for _ in range(2))
    keys = [(0, block) for block in range(8)]
    first.add("first", 4096, 1, 0.0, prefix=keys)
    first.advance(100.0)
    other.add("moved", 4096, 1, 200.0, prefix=keys)
    assert [token.cached for token in other.advance(300.0)] == [4080]
    assert other.loaded_tokens == {"remote": 4080, "host": 0}


def test_host_memory_takes_a_fleet_of_sessions_further() -> None:
    few = small(1)
    (one,) = few.pools
    asked = RequestSource(workload(), sessions=120, requests=500)

    def run(**tiers: float) -> Run:
        made = msgspec.structs.replace(few, pools=(msgspec.structs.replace(one, **tiers),))
        return one_run(SESSION_CATALOG, asked, SimulatedCase(label="x", fleet=made, policy=made.policy, seed=0))

    plain, more, drives = (
        run(),
        run(host_gib_per_gpu=400.0),
        run(host_gib_per_gpu=20.0, nvme_gib_per_gpu=400.0, nvme_gb_per_s=25.0),
    )
    slow = run(host_gib_per_gpu=20.0, nvme_gib_per_gpu=400.0, nvme_gb_per_s=0.05)
    for kept in (more, drives):
        assert kept.sessions[0].hit_rate > plain.sessions[0].hit_rate + 0.05
        assert kept.sessions[0].mean_turn_s < plain.sessions[0].mean_turn_s
    assert (set(plain.loaded_shares), set(drives.loaded_shares)) == (set(), {"host", "nvme"})
    assert drives.loaded_shares["nvme"] > 0.05
    assert slow.sessions[0].mean_turn_s > plain.sessions[0].mean_turn_s


def running(catalog: Catalog, prefixes: list[tuple[int, ...]], answer: int = 400) -> Engine:
    """An engine with 1,000 blocks (16,000 tokens) that is given these prompts of blocks of 512 tokens at once."""
    engine = with_tiers(catalog)
    engine.blocks, engine.caches[0].capacity_tokens = 1000, 16_000.0
    for name, prefix in enumerate(prefixes):
        engine.add(name, 512 * len(prefix), answer, 0.01 * name, prefix=prefix)
    return engine


def test_what_prompts_share_is_in_memory_once(catalog: Catalog) -> None:
    shared = tuple(range(16))
    # Each is 8,704 tokens: two that share nothing do not fit, nine that share 8,192 do.
    alone = running(catalog, [(*range(100 * n, 100 * n + 17),) for n in range(2)])
    alone.advance(1.0)
    assert (alone.running, alone.waiting) == (1, 1)
    together = running(catalog, [(*shared, 100 + n) for n in range(9)])
    together.advance(1.5)
    assert (together.running, together.waiting) == (9, 0)
    # The nine own blocks, and their answers so far, beside the shared ones.
    taken = together.kv_used_fraction * 16_000
    assert 16 * 512 + 9 * 512 < taken < 16 * 512 + 9 * (512 + 400)
    together.advance(1000.0)
    assert together.kv_used_fraction == 0.0
    assert together.caches[0].look_up(shared, 16 * 512 + 1) == 16 * 512


def test_what_runs_keeps_its_memory_and_others_lose_theirs(catalog: Catalog) -> None:
    first, second = tuple(range(15)), tuple(range(100, 117))
    engine = running(catalog, [first], answer=5)
    engine.advance(50.0)
    assert engine.caches[0].look_up(first, 15 * 512 + 1) == 15 * 512
    # 8,704 tokens that run leave room for no more than 7,296, and the first prompt has 7,680.
    engine.add("second", 512 * 17, 2000, 50.0, prefix=second)
    engine.advance(52.0)
    assert engine.running == 1
    assert 0 < engine.caches[0].find(first, 15 * 512 + 1) < 15 * 512
    assert engine.caches[0].find(second, 17 * 512 + 1) == 17 * 512


def test_whoever_leaves_early_leaves_what_others_run_with(catalog: Catalog) -> None:
    shared = tuple(range(16))
    engine = running(catalog, [(*shared, 100 + n) for n in range(4)])
    engine.advance(1.0)
    for name in range(3):
        assert engine.cancel(name)
    engine.advance(1.1)
    assert engine.running == 1
    assert engine.kv_used_fraction * 16_000 == pytest.approx(17 * 512, abs=400)
    engine.advance(1000.0)
    assert engine.idle
    assert engine.kv_used_fraction == 0.0
    assert engine.caches[0].running_tokens == 0


def test_a_preempted_request_finds_what_is_left_of_its_own(catalog: Catalog) -> None:
    prefixes = [(*range(100 * n, 100 * n + 5),) for n in range(6)]
    engine = running(catalog, prefixes, answer=600)
    ended = [token.id for token in engine.advance(1000.0) if token.finished]
    assert engine.preemptions > 0
    assert sorted(ended) == list(range(6))
    assert engine.kv_used_fraction == 0.0
    assert engine.caches[0].running_tokens == 0

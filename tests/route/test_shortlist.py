"""Of a large pool a decision looks at some replicas: what it loses by that, and what it never loses."""

from random import Random

import pytest
from tests.route.fleets import CATALOG, MODEL, ask, fleet, live, load, pool

from crosstie.core.fleet import Pool
from crosstie.route.live import WHOLE, LiveFleet, Replica
from crosstie.route.policies import make_policy
from crosstie.route.policy import predict
from crosstie.route.router import Router
from crosstie.route.shortlist import HOLDERS, LOOKED_AT, looked_at
from crosstie.sim.fleet import FleetSimulator, SimulatedRequest

PREDICTING = ("cheapest-meeting-target", "fastest")
# A few of them in a quick run.
SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))]


def mixed(random: Random, *sizes: int) -> LiveFleet:
    """Pools of such sizes whose replicas have all sorts of loads, faults and prefixes."""
    kinds = ("mi300x", "h200", "mi325x", "h100-sxm")
    pools = [
        pool(f"p{n}", kinds[n % 4], size, usd_per_gpu_hour=random.uniform(1.0, 4.0)) for n, size in enumerate(sizes)
    ]
    found = live(*pools)
    for replica in found.replicas():
        load(replica, random.randrange(40), 0.0, decoding=random.random() < 0.9)
        draw = random.random()
        if draw < 0.1:
            replica.went_down("tried")
        elif draw < 0.2:
            replica.full(0.0, 5.0)
        elif draw < 0.25:
            replica.drain(True)
        elif draw < 0.6:
            replica.prefixes.add(tuple(range(random.randrange(1, 9))))
    return found


def whole(found: LiveFleet) -> LiveFleet:
    """Every replica is looked at from now on."""
    for one in found.pools:
        one.holders = None
    return found


def able(pool_of: LiveFleet, at: int, now: float) -> list[Replica]:
    return [
        one
        for one in pool_of.pools[at].replicas
        if one.up and not one.draining and one.busy_until <= now and one.in_flight < one.advance(now).limit
    ]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", PREDICTING)
def test_where_few_may_take_it_the_choice_is_that_of_looking_at_all(policy: str, seed: int) -> None:
    random = Random(seed)
    found = mixed(random, 40, 7, 60)
    for pool_of in found.pools:
        for replica in pool_of.replicas[:-LOOKED_AT]:
            replica.went_down("tried")
    asks = [ask(input_tokens=random.uniform(50, 8000), prefix=tuple(range(random.randrange(9)))) for _ in range(8)]
    asks += [ask(ttft_s=None, tpot_s=None), ask(ttft_s=1e-3, patience_s=9.0)]
    some = [Router(found, make_policy(policy)).decide(one, 0.1) for one in asks]  # type: ignore[arg-type]
    every = [Router(whole(found), make_policy(policy)).decide(one, 0.1) for one in asks]  # type: ignore[arg-type]
    for few, many in zip(some, every, strict=True):
        assert (few.outcome, few.meets) == (many.outcome, many.meets)
        assert (few.replica and few.replica.pool.name) == (many.replica and many.replica.pool.name)
        if few.prediction and many.prediction:
            assert few.prediction.finish_s(200.0) == many.prediction.finish_s(200.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_is_chosen_is_as_good_as_so_many_others_of_its_pool(seed: int) -> None:
    random = Random(seed)
    found = mixed(random, 60, 90)
    router = Router(found, make_policy("fastest"))
    for _ in range(6):
        one = ask(input_tokens=random.uniform(50, 8000), ttft_s=None, tpot_s=None)
        replica = router.decide(one, 0.1).replica
        assert replica is not None
        others = able(found, found.pools.index(replica.pool), 0.1)
        finish = {other.key: predict(found, other, one).finish_s(one.output_tokens) for other in others}
        worse = [key for key, seconds in finish.items() if seconds >= finish[replica.key]]
        assert len(worse) >= LOOKED_AT


@pytest.mark.parametrize("seed", SEEDS)
def test_who_holds_most_of_the_prompt_is_always_looked_at(seed: int) -> None:
    random = Random(seed)
    found = mixed(random, 200)
    replicas, prefix = found.pools[0].replicas, tuple(range(1000, 1032))
    for depth, holder in zip((32, 24, 16, 8), random.sample(able(found, 0, 0.1), 4), strict=True):
        holder.prefixes.add(prefix[:depth])
    most = sorted(replicas, key=lambda one: -one.prefixes.match(prefix))[:4]
    for turn in range(20):
        seen = looked_at(found.pools[0], ask(prefix=prefix), 0.1, (), False, turn)
        assert set(most) <= set(seen)
        assert len(seen) <= LOOKED_AT + HOLDERS


def test_the_conversation_s_replica_is_always_looked_at() -> None:
    found = live(pool(replicas=100))
    load(found.pools[0].replicas[77], 1, session="s")
    again = ask(session="s")
    again.under_way = found.sessions.find(again)
    for turn in range(20):
        assert found.pools[0].replicas[77] in looked_at(found.pools[0], again, 0.0, (), False, turn)


@pytest.mark.parametrize("every", [1, 2, 3, 16])
def test_all_have_their_turn_whoever_else_takes_turns(every: int) -> None:
    """Another model's requests may have each second turn of the policy."""
    found = live(pool(replicas=64))
    seen: set[str] = set()
    for turn in range(0, 64 * every, every):
        seen |= {one.key for one in looked_at(found.pools[0], ask(), 0.0, (), False, turn)}
    assert len(seen) == 64


def test_a_small_pool_is_looked_at_whole_and_a_large_one_in_part() -> None:
    small, large = live(pool(replicas=WHOLE)).pools[0], live(pool(replicas=WHOLE + 1)).pools[0]
    assert looked_at(small, ask(), 0.0, (), False, 0) == small.replicas
    assert len(looked_at(large, ask(), 0.0, (), False, 0)) == LOOKED_AT


def test_the_one_that_is_left_is_found() -> None:
    for policy in ("cheapest-meeting-target", "fastest", "least-loaded", "round-robin", "weighted", "prefix"):
        found = live(pool(replicas=100))
        for replica in found.pools[0].replicas[:-1]:
            replica.went_down("tried")
        chosen = Router(found, make_policy(policy)).decide(ask(), 0.0)
        assert chosen.replica is found.pools[0].replicas[-1]


def test_what_is_known_of_holders_follows_what_replicas_hold() -> None:
    one = live(pool(replicas=40)).pools[0]
    prefix, holders = tuple(range(50, 60)), one.holders
    assert holders is not None
    one.replicas[7].prefixes.add(prefix)
    one.replicas[9].prefixes.add(prefix[:4])
    assert (holders.depth(prefix), holders.most(prefix, 8, 8)) == (10, [7, 9])
    assert holders.most(prefix, 1, 8) == [7]
    assert holders.most(prefix, 8, 1) == [7], "what two hold is no reason"
    one.replicas[7].went_down("tried")
    assert (holders.depth(prefix), holders.most(prefix, 8, 8)) == (4, [9])
    few = live(pool(replicas=40, max_in_flight=4)).pools[0]
    few.replicas[0].prefixes.most = 12
    for start in range(0, 100, 10):
        few.replicas[0].prefixes.add(tuple(range(start, start + 10)))
    assert few.holders is not None
    assert [few.holders.depth(tuple(range(start, start + 10))) for start in (0, 70, 80, 90)] == [0, 0, 2, 10]


def test_a_pool_that_grows_or_shrinks_keeps_what_its_replicas_hold() -> None:
    one = live(pool(replicas=20)).pools[0]
    prefix, more = (1, 2, 3), live(pool(replicas=40)).pools[0].replicas[20:]
    one.replicas[3].prefixes.add(prefix)
    assert one.holders is None
    one.staff([*more, *one.replicas])
    assert one.holders is not None
    assert one.holders.most(prefix, 4, 4) == [23]
    one.staff(one.replicas[10:30])
    assert one.holders is None
    one.replicas[0].prefixes.add(prefix)


def _mean_finish(exhaustive: bool) -> tuple[float, float]:
    """Of a pool of 48 at three quarters of what it carries: mean seconds, and the share within the targets."""
    one: Pool = pool("amd", "mi300x", 48)
    simulator = FleetSimulator(CATALOG, fleet(one))
    if exhaustive:
        whole(simulator.live)
    random, at, sent = Random(5), 0.0, []
    for _ in range(1500):
        at += random.expovariate(400.0)
        tokens = int(random.lognormvariate(6.5, 0.8)) + 20
        sent.append(SimulatedRequest(at, MODEL, tokens, random.randrange(20, 380), "chat"))
    answers = simulator.run(sent)
    kept = sum(one.ttft_s <= 1.0 and one.tpot_s <= 0.05 for one in answers)
    return sum(one.finished_s for one in answers) / len(answers), kept / len(answers)


@pytest.mark.slow
def test_in_simulation_it_costs_little() -> None:
    some, every = _mean_finish(False), _mean_finish(True)
    assert some[0] <= 1.03 * every[0], "requests end at most 3% later"
    assert some[1] >= every[1] - 0.01, "and at most 1% fewer are within the targets"

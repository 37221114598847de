"""What engines tell of their caches: how it is read, followed through gaps and restarts, and what routing makes of it."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engines.streams import post
from tests.route.fleets import MODEL, live, pool as route_pool
from tests.run.emulate.running import CATALOG, CHAT, SMALL, fleet, pool
from tests.run.gateway.fakes import Running, in_folder, running, until
from tests.run.service.processes import comes_true, serving
from tests.tokens import written
from tests.waiting import LIMIT_S

from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Serving
from crosstie.route.ask import Ask
from crosstie.route.decision import Decision
from crosstie.route.held import HeldBlocks, PromptTokens
from crosstie.route.policy import predict
from crosstie_gateway.emulate.faults import Fault
from crosstie_gateway.emulate.fleet import EmulatedFleet, start
from crosstie_gateway.service.kv_batches import BadBatch, take
from crosstie_gateway.service.kv_events import Following, KvEvents, _library
from crosstie_gateway.service.process import Component
from crosstie_gateway.service.tokenizing import TokenizerFiles

pack = msgspec.msgpack.encode
PROMPT = list(range(100, 112))


def stored(names: list[Any], ids: list[int], after: Any = None, size: int = 4, **more: Any) -> dict[str, Any]:
    fields = {"block_hashes": names, "parent_block_hash": after, "token_ids": ids, "block_size": size}
    return {"type": "BlockStored", **fields, "lora_id": None, "medium": "GPU", "lora_name": None, **more}


def removed(*names: Any, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", **more}


def batch(*events: Any) -> bytes:
    return pack([1.5, list(events), 0])


def told(*payloads: bytes) -> HeldBlocks:
    held = HeldBlocks()
    held.forget(complete=True)
    for one in payloads:
        take(held, one)
    return held


def match(held: HeldBlocks, ids: list[int], tenant: int = 0) -> int:
    """Of a prompt that has a token more: the last one is always computed."""
    return held.match(PromptTokens([*ids, 0]), tenant)


# Batches


def test_blocks_are_known_by_the_tokens_up_to_them() -> None:
    held = told(batch(stored([1, 2], PROMPT[:8])), batch(stored([b"\x03"], PROMPT[8:], after=2)))
    assert match(held, PROMPT) == 12
    assert match(held, [*PROMPT, 7, 7, 7]) == 12
    assert match(held, PROMPT[:11]) == held.match(PromptTokens(PROMPT), 0) == 8
    assert match(held, [*PROMPT[:4], *PROMPT[:4]]) == 4
    assert match(held, PROMPT[4:]) == 0
    take(held, batch(removed(b"\x03")))
    assert match(held, PROMPT) == 8
    take(held, batch({"type": "AllBlocksCleared"}))
    assert (match(held, PROMPT), len(held), held.complete) == (0, 0, True)


@pytest.mark.parametrize("shape", ["arrays", "older arrays", "maps"])
def test_every_shape_that_engines_publish_is_read(shape: str) -> None:
    if shape == "maps":
        held = told(pack({"ts": 1.5, "events": [stored([1, 2, 3], PROMPT), removed(3)], "data_parallel_rank": 0}))
    else:
        more = [None, "GPU", None] if shape == "arrays" else [None]
        drop: list[Any] = ["BlockRemoved", [3], "GPU"] if shape == "arrays" else ["BlockRemoved", [3]]
        held = told(pack([1.5, [["BlockStored", [1, 2, 3], None, PROMPT, 4, *more], drop]]))
    assert match(held, PROMPT) == 8


def test_what_is_told_again_is_dropped_once() -> None:
    held = told(batch(stored([1, 2], PROMPT[:8]), stored([1, 2], PROMPT[:8]), removed(2)))
    assert match(held, PROMPT) == 4
    take(held, batch(stored([1, 2], PROMPT[:8])))
    assert match(held, PROMPT) == 8


def test_layers_that_tell_of_the_same_tokens_hold_them_until_the_last_has_dropped_them() -> None:
    held = told(batch(stored([1], PROMPT[:4]), stored([1], PROMPT[:4], group_idx=1), removed(1)))
    assert match(held, PROMPT) == 4
    take(held, batch(removed(1, group_idx=1)))
    assert match(held, PROMPT) == 0


@pytest.mark.parametrize(
    "more",
    [
        {"lora_id": 3},
        {"lora_name": "tuned"},
        {"medium": "CPU"},
        {"extra_keys": [["salt"], None, None]},
        {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 128},
        {"kv_cache_spec_kind": "mamba"},
    ],
)
def test_blocks_that_tokens_alone_do_not_tell_are_nobodys(more: dict[str, Any]) -> None:
    assert match(told(batch(stored([1, 2, 3], PROMPT, **more))), PROMPT) == 0


def test_what_is_told_of_other_memory_or_layers_changes_nothing_here() -> None:
    held = told(batch(stored([1, 2, 3], PROMPT), removed(3, medium="CPU"), removed(2, group_idx=1), ["BlockMoved", 1]))
    assert match(held, PROMPT) == 12
    assert match(told(batch(stored([1, 2, 3], PROMPT, extra_keys=[None, ["picture"], None]))), PROMPT) == 4


def test_a_block_behind_one_that_was_never_told_is_not_known() -> None:
    assert match(told(batch(stored([2], PROMPT[4:8], after=1))), PROMPT) == 0


def test_another_size_of_blocks_is_another_cache_and_a_part_of_a_block_is_none() -> None:
    held = told(batch(stored([1, 2, 3], PROMPT), stored([9], PROMPT[:2], size=2)))
    assert match(held, PROMPT) == 12
    take(held, batch(stored([9], PROMPT[:6], size=6)))
    assert match(held, PROMPT) == 6
    take(held, batch({"type": "AllBlocksCleared"}, stored([9, 10], PROMPT[:4], size=2)))
    assert match(held, PROMPT) == 4


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"{}",
        pack(7),
        pack([1.5]),
        pack([1.5, "events"]),
        pack([1.5, [7]]),
        pack([1.5, [[]]]),
        pack({"events": {}}),
        batch(["BlockStored"]),
        batch(stored("ab", PROMPT)),  # type: ignore[arg-type]
        batch(stored([1.5], PROMPT)),
        batch(stored([1, 2, 3, 4], PROMPT)),
        batch(stored([1], [-1, 2, 3, 4])),
        batch(stored([1], [2**40, 2, 3, 4])),
        batch(stored([1], ["a", "b", "c", "d"])),  # type: ignore[list-item]
        batch(stored([1], PROMPT, size=0)),
        batch(stored([1], PROMPT, size=10**9)),
        batch(stored([1], PROMPT, after=[1])),
        batch(removed([1])),
        b"\x91" * 5000,
        pytest.param(batch(stored([1], [10**6] * 600_000)), id="too long"),
    ],
)
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(BadBatch):
        told(payload)


def test_what_is_kept_of_a_replica_is_bounded() -> None:
    held = HeldBlocks(most=10)
    for first in range(0, 4000, 40):
        take(held, batch(stored(list(range(first, first + 10)), list(range(first, first + 40)))))
    assert len(held) == len(held._names) == 10
    assert match(held, list(range(40))) == 40
    take(held, batch(removed(*range(4000))))
    assert (len(held), len(held._names)) == (0, 0)


def test_requests_that_are_there_count_until_they_have_ended() -> None:
    held, tokens = told(batch(stored([1], PROMPT[:4]))), PromptTokens(PROMPT)
    held.expect(tokens, 0)
    held.expect(tokens, 0)
    assert match(held, PROMPT) == 12
    held.settle(tokens)
    assert match(held, PROMPT) == 12
    held.settle(tokens)
    held.settle(tokens)
    assert match(held, PROMPT) == 4


def test_a_tenant_is_told_no_more_than_it_has_sent_itself() -> None:
    held = told(batch(stored([1, 2, 3], PROMPT)))
    assert match(held, PROMPT) == 12
    assert match(held, PROMPT, tenant=7) == 0
    own = PromptTokens(PROMPT[:8])
    held.expect(own, 7)
    held.settle(own)
    assert match(held, PROMPT, tenant=7) == 8
    assert match(held, PROMPT, tenant=8) == 0
    # And no more than is there.
    take(held, batch(removed(3), removed(2)))
    assert match(held, PROMPT, tenant=7) == 4


# Numbers


def following(*, can_replay: bool = False) -> Following:
    made = Following(HeldBlocks(), can_replay=can_replay)
    made.connected()
    return made


ONE, TWO, THREE = (batch(stored([n], PROMPT[4 * n : 4 * n + 4], after=n - 1 if n else None)) for n in range(3))


def test_an_engine_that_is_followed_from_its_first_batch_is_known_wholly() -> None:
    one = following()
    one.came(0, ONE)
    one.came(1, TWO)
    assert (match(one.held, PROMPT), one.held.complete) == (8, True)


def test_one_that_is_joined_later_is_known_in_part() -> None:
    one = following()
    one.came(5, ONE)
    one.came(6, TWO)
    assert (match(one.held, PROMPT), one.held.complete) == (8, False)


def test_a_gap_without_a_replay_is_forgotten_and_gone_on_from() -> None:
    one = following()
    one.came(0, ONE)
    one.came(2, THREE)
    assert (match(one.held, PROMPT), one.held.complete) == (0, False)
    one.came(3, batch({"type": "AllBlocksCleared"}, stored([1], PROMPT[:4])))
    assert (match(one.held, PROMPT), one.held.complete) == (4, True)


def test_an_engine_that_begins_anew_holds_nothing_of_before() -> None:
    one = following()
    for number, payload in enumerate((ONE, TWO, THREE)):
        one.came(number, payload)
    one.came(0, ONE)
    assert (match(one.held, PROMPT), one.held.complete) == (4, True)


def test_one_that_began_anew_unseen_is_known_in_part() -> None:
    one = following()
    for number, payload in enumerate((ONE, TWO, THREE)):
        one.came(number, payload)
    one.came(1, ONE)
    assert (match(one.held, PROMPT), one.held.complete) == (4, False)


def test_a_replay_fills_a_gap_and_what_comes_twice_counts_once() -> None:
    one = following(can_replay=True)
    one.replay_asked()
    assert not one.replayed(0, ONE)
    assert one.replayed(-1, b"")
    assert (match(one.held, PROMPT), one.held.complete, one.wants_replay) == (4, True, None)
    one.came(2, THREE)
    assert one.wants_replay == 1
    one.replay_asked()
    for number, payload in ((1, TWO), (2, THREE)):
        one.replayed(number, payload)
    assert one.replayed(-1, b"")
    one.came(3, batch(removed(2)))
    assert (match(one.held, PROMPT), one.held.complete) == (8, True)


def test_batches_that_wait_while_they_are_replayed_are_passed_over() -> None:
    one = following(can_replay=True)
    one.replay_asked()
    for number, payload in enumerate((ONE, TWO)):
        one.replayed(number, payload)
    one.replayed(-1, b"")
    one.came(0, ONE)
    one.came(1, TWO)
    one.came(2, THREE)
    assert one.wants_replay is None
    take(one.held, batch(removed(0)))
    assert len(one.held) == 2


def test_an_engine_that_has_told_nothing_yet_holds_nothing() -> None:
    one = following(can_replay=True)
    one.replay_asked()
    assert one.replayed(-1, b"")
    assert one.held.complete
    one.came(0, ONE)
    assert match(one.held, PROMPT) == 4


def test_a_replay_that_has_not_everything_any_more_leaves_it_in_part() -> None:
    one = following(can_replay=True)
    one.replay_asked()
    one.replayed(7, ONE)
    one.replayed(-1, b"")
    assert (match(one.held, PROMPT), one.held.complete) == (4, False)
    one.came(9, THREE)
    one.replay_asked()
    one.replayed(-1, b"")
    assert (match(one.held, PROMPT), one.held.complete, one.wants_replay) == (0, False, None)
    one.came(10, ONE)
    assert match(one.held, PROMPT) == 4


def test_where_nobody_answers_replays_what_comes_is_taken_all_the_same() -> None:
    one = following(can_replay=True)
    one.replay_asked()
    one.replay_failed()
    one.came(5, ONE)
    one.came(6, TWO)
    assert (match(one.held, PROMPT), one.held.complete, one.wants_replay) == (8, False, None)
    # A gap is asked for again, and a new connection from the beginning.
    one.came(8, THREE)
    assert one.wants_replay == 7
    one.connected()
    assert one.wants_replay == 0


def test_a_lost_connection_is_forgotten_at_once() -> None:
    one = following(can_replay=True)
    one.replay_asked()
    one.replayed(0, ONE)
    one.replayed(-1, b"")
    one.lost()
    assert (match(one.held, PROMPT), one.held.complete) == (0, False)
    one.connected()
    assert one.wants_replay == 0


def test_garbage_costs_what_was_known_and_nothing_else() -> None:
    one = following()
    one.came(0, ONE)
    one.came(1, b"\xc1")
    assert (one.refused, match(one.held, PROMPT), one.held.complete) == (1, 0, False)
    one.came(2, ONE)
    assert match(one.held, PROMPT) == 4


def test_routing_and_prices_are_the_same_for_what_another_has_sent_and_for_what_nobody_has() -> None:
    fleet_, tokens = live(route_pool()), PromptTokens(list(range(3200)))
    holder, other = fleet_.replicas()
    for replica in (holder, other):
        replica.held = HeldBlocks()
        replica.held.forget(complete=True)
    take(holder.held, batch(stored(list(range(200)), list(range(3200)), size=16)))  # type: ignore[arg-type]
    take(other.held, batch(stored([9], [7] * 16, size=16)))  # type: ignore[arg-type]

    def asks(tenant: int, tokens: PromptTokens) -> Ask:
        made = Ask(model=MODEL, class_name=None, input_tokens=float(tokens.count), output_tokens=10.0)
        made.tokens, made.cache_tenant, made.counted = tokens, tenant, True
        return made

    fleet_.advance(1.0, MODEL)
    unknown = PromptTokens(list(range(7000, 10200)))
    seen = [predict(fleet_, holder, one) for one in (asks(7, tokens), asks(7, unknown), asks(0, tokens))]
    for name in ("cached_tokens", "ttft_s", "tpot_s", "predicted_usd"):
        assert getattr(seen[0], name) == getattr(seen[1], name)
    assert seen[0].cached_tokens == 0
    assert seen[2].cached_tokens == 3184
    # What a tenant has sent there itself it may know of.
    holder.start(asks(7, tokens), seen[0], 1.0).end(2.0, output_tokens=1, input_tokens=3200, completed=True)
    fleet_.advance(3.0, MODEL)
    assert predict(fleet_, holder, asks(7, tokens)).cached_tokens == 3184
    assert predict(fleet_, holder, asks(8, tokens)).cached_tokens == 0


# From emulated engines to decisions

CACHE_TOKENS = 3000
SYSTEMS = [f"You are assistant {n} and " + f"answer briefly about {n} ships. " * (20 + 8 * n) for n in range(6)]


def telling(folder: Path, *, replay: bool = True, **changes: Any) -> Fleet:
    more: dict[str, Any] = {"kv_replay": ("tcp://{host}:5558",)} if replay else {}
    made = pool(replicas=2, tokenizer=str(written(folder)), kv_events=("tcp://{host}:5557",), max_context=8000, **more)
    serving = Serving(lame_duck_s=0.0, health_every_s=0.1, metrics_every_s=0.1, slow_start_s=0.0)
    return fleet(made, policy="prefix", serving=serving, **changes)


class Watched:
    """Requests through a gateway, with the cached tokens that it counted on and that engines reported."""

    def __init__(self, at: Running, engines: EmulatedFleet):
        self.at, self.engines = at, engines
        self.predicted: list[float] = []
        self.reported: list[int] = []
        at.gateway.context.on_decision = self._decided

    def _decided(self, request_id: bytes, attempts: int, ask: Ask, decision: Decision) -> None:
        if decision.prediction is not None and not attempts:
            self.predicted.append(decision.prediction.cached_tokens)

    async def ask(self, system: str, user: str, **more: Any) -> None:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        answer = await self.at.ask(CHAT, model=SMALL, messages=messages, max_tokens=8, **more)
        assert answer.status == 200, answer.body
        said = msgspec.json.decode(answer.body)
        self.reported.append(said["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def in_step(self) -> None:
        """All that engines have told has arrived."""
        for one in self.engines.replicas:
            held = next(r.held for r in self.at.gateway.live.replicas() if r.key == one.url)
            if held is not None:
                blocks = one.replica.cache.blocks
                await until(lambda: len(held) == len(blocks))  # noqa: B023 (awaited here)

    @property
    def error(self) -> float:
        """Of predicted cached tokens, over all that were reported."""
        off = sum(abs(p - r) for p, r in zip(self.predicted, self.reported, strict=True))
        return off / sum(self.reported)


async def traffic(watched: Watched, requests: int, chance: random.Random) -> None:
    for _ in range(requests):
        user = " ".join(chance.choices(["fleet", "pool", "ship", "What", "briefly"], k=chance.randint(5, 60)))
        await watched.ask(chance.choice(SYSTEMS), user)
        await watched.in_step()


def make_small(engines: EmulatedFleet) -> None:
    """Caches that drop what was used longest ago after a few requests."""
    for one in engines.replicas:
        one.replica.cache_tokens = CACHE_TOKENS
        one.replica.cache.blocks.capacity_tokens = CACHE_TOKENS


async def whole(at: Running) -> None:
    await until(lambda: all(r.held is not None and r.held.complete for r in at.gateway.live.replicas()))


@asynccontextmanager
async def over(served: Fleet, *, listens: bool = True) -> AsyncIterator[Running]:
    parts: list[Component] = [TokenizerFiles(patience_s=LIMIT_S), *([KvEvents()] if listens else [])]
    try:
        async with running(served, components=parts) as at:
            yield at
    finally:
        for one in parts:
            await one.stop()


@in_folder
async def test_predicted_and_reported_cached_tokens_agree_through_evictions_and_restarts(folder: Path) -> None:
    engines = await start(CATALOG, telling(folder), speed=200.0)
    try:
        make_small(engines)
        async with over(engines.fleet) as at:
            watched, chance = Watched(at, engines), random.Random(7)
            await whole(at)
            await traffic(watched, 120, chance)
            assert sum(watched.reported) > 10_000
            assert watched.error <= 0.05
            # One engine crashes, and comes back with nothing.
            first = engines.replicas[0]
            # Until that was seen: a machine that stands still could miss a crash of so many milliseconds.
            first.inject(Fault(kind="crash"))
            make_small(engines)
            replica = next(r for r in at.gateway.live.replicas() if r.key == first.url)
            await until(lambda: not replica.up)
            first.clear("crash")
            await until(lambda: replica.up)
            await whole(at)
            await traffic(watched, 60, chance)
            # Another has its cache emptied, and events that get lost are asked for again.
            engines.replicas[1].inject(Fault(kind="empty-cache"))
            await watched.in_step()
            for one in engines.replicas:
                one.inject(Fault(kind="lose-events"))
            await watched.ask(SYSTEMS[0], "ship")
            for one in engines.replicas:
                one.clear("lose-events")
            await watched.ask(SYSTEMS[1], "pool")
            await watched.ask(SYSTEMS[2], "fleet")
            await traffic(watched, 60, chance)
            assert watched.error <= 0.05
    finally:
        await engines.close()


@in_folder
async def test_without_events_evictions_are_not_seen(folder: Path) -> None:
    """What the test above would show if the gateway went by what it has sent."""
    engines = await start(CATALOG, telling(folder), speed=200.0)
    try:
        make_small(engines)
        async with over(engines.fleet, listens=False) as at:
            watched = Watched(at, engines)
            await traffic(watched, 60, random.Random(7))
            assert watched.error > 0.05
    finally:
        await engines.close()


@in_folder
async def test_a_gap_that_nobody_can_fill_is_known_as_one(folder: Path) -> None:
    engines = await start(CATALOG, telling(folder, replay=False), speed=200.0)
    try:
        async with over(engines.fleet) as at:
            watched = Watched(at, engines)
            replicas = at.gateway.live.replicas()
            # Whoever listens too late knows a part: there is nobody to ask again.
            engines.replicas[0].inject(Fault(kind="empty-cache"))
            engines.replicas[1].inject(Fault(kind="empty-cache"))
            while not all(r.held is not None and r.held.complete for r in replicas):
                await watched.ask(SYSTEMS[0], "What")
                for one in engines.replicas:
                    one.inject(Fault(kind="empty-cache"))
            await watched.ask(SYSTEMS[0], "What")
            await watched.in_step()
            used = next(r for r in replicas if r.held is not None and len(r.held))
            engine = next(one for one in engines.replicas if one.url == used.key)
            # On a busy machine one or the other may go elsewhere, where nothing is lost.
            turns = itertools.count()
            while used.held is not None and used.held.complete:
                engine.inject(Fault(kind="lose-events"))
                await watched.ask(SYSTEMS[0], f"briefly {next(turns)} " * 40)
                engine.clear("lose-events")
                await watched.ask(SYSTEMS[0], f"fleet {next(turns)} " * 40)
                await asyncio.sleep(0.05)
            assert used.held is not None, "it is still listened to"
            # What was sent there is still a guess.
            assert used.cached_tokens(_ask_of(at, SYSTEMS[5]), 500.0) == 0.0
            # Until the engine says that it holds nothing.
            engine.inject(Fault(kind="empty-cache"))
            await until(lambda: used.held is not None and used.held.complete)
    finally:
        await engines.close()


def _ask_of(at: Running, text: str) -> Ask:
    return Ask(model=SMALL, class_name=None, input_tokens=len(text) / 4, output_tokens=8.0)


@in_folder
async def test_replays_are_understood_in_both_forms(folder: Path) -> None:
    engines = await start(CATALOG, telling(folder), speed=200.0)
    publishers = [one.replica.publisher for one in engines.replicas]
    try:
        for frames in ((), (b"",)):
            for one in publishers:
                assert one is not None
                one.replays_with = frames
            async with over(engines.fleet) as at:
                await whole(at)
                watched = Watched(at, engines)
                await watched.ask(SYSTEMS[0], "What")
                await watched.in_step()
    finally:
        await engines.close()


@in_folder
async def test_a_reload_follows_whom_the_file_names_and_keeps_what_is_known(folder: Path) -> None:
    engines = await start(CATALOG, telling(folder), speed=200.0)
    try:
        async with over(engines.fleet) as at:
            await whole(at)
            watched = Watched(at, engines)
            await watched.ask(SYSTEMS[0], "What")
            await watched.in_step()
            known = [r.held for r in at.gateway.live.replicas()]
            assert await at.metric("crosstie_kv_known") == 2
            assert await at.metric("crosstie_kv_blocks") == sum(len(held) for held in known if held is not None) > 0
            at.process.load(engines.fleet)
            assert [r.held for r in at.gateway.live.replicas()] == known
            (served,) = engines.fleet.pools
            quiet = msgspec.structs.replace(served, kv_events=(), kv_replay=())
            at.process.load(msgspec.structs.replace(engines.fleet, pools=(quiet,)))
            assert [r.held for r in at.gateway.live.replicas()] == [None, None]
            await watched.ask(SYSTEMS[0], "What")
            at.process.load(engines.fleet)
            await whole(at)
            await watched.in_step()
            assert any(r.held for r in at.gateway.live.replicas())
    finally:
        await engines.close()


@in_folder
async def test_whoever_publishes_garbage_is_told_of_once_and_served_as_before(folder: Path) -> None:
    zmq: Any = _library()
    context = zmq.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.setsockopt(zmq.LINGER, 0)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    engines = await start(CATALOG, telling(folder), speed=200.0)
    try:
        (served,) = engines.fleet.pools
        places = (f"tcp://127.0.0.1:{port}", served.kv_events[1])
        given = msgspec.structs.replace(served, kv_events=places, kv_replay=())
        async with over(msgspec.structs.replace(engines.fleet, pools=(given,))) as at:
            await until(lambda: bool(publisher.poll(0)))
            for number in range(50):
                publisher.send_multipart([b"", number.to_bytes(8, "big"), b"\xc1garbage"])
                publisher.send_multipart([b"one frame"])
            await until(lambda: any("are no KV events" in one for one in at.notices))
            # Of each number its batch, and as many messages that were not even numbered.
            await until(lambda: at.gateway.metrics_page().count("crosstie_kv_refused_total{") == 2)
            assert await at.metric("crosstie_kv_refused_total", backend=engines.replicas[0].url) > 0
            assert await at.metric("crosstie_kv_known", backend=engines.replicas[0].url) == 0
            watched = Watched(at, engines)
            for _ in range(4):
                await watched.ask(SYSTEMS[0], "What")
            assert sum("are no KV events" in one for one in at.notices) == 1
    finally:
        publisher.close()
        context.destroy(linger=0)
        await engines.close()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("crosstie_gateway.service.kv_events.import_module", missing)
    with pytest.raises(BadInput, match=r"packages/gateway\[kv-events\]"):
        KvEvents().check(telling(Path("/tmp")))


FILE = """
format = 1
policy = "prefix"
[serve]
lame_duck_s = 0
[[pool]]
name = "one"
model = "llama-3.1-8b"
accelerator = "mi300x"
precision = "fp8"
stack = "vllm"
usd_per_gpu_hour = 1.3
replicas = 2
tokenizer = "tokenizer.json"
kv_events = "tcp://{host}:5557"
kv_replay = "tcp://{host}:5558"
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_every_worker_of_a_served_fleet_knows_what_engines_hold(tmp_path: Path, workers: str) -> None:
    written(tmp_path)
    (tmp_path / "fleet.toml").write_text(FILE)
    asked = {"model": SMALL, "messages": [{"role": "user", "content": SYSTEMS[5]}], "max_tokens": 4}
    with serving(tmp_path, tmp_path / "fleet.toml", "--emulate", "--speed", "20", "--workers", workers) as at:
        first = msgspec.json.decode(post(at.url, CHAT, asked).text)
        prompt = first["usage"]["prompt_tokens"]

        def counted_on() -> float:
            said = msgspec.json.decode(post(at.url, "/crosstie/explain", asked).text)
            assert said["request"]["input_tokens"] == prompt
            found: float = said["considered"][0]["predicted"]["cached_tokens"]
            return found

        # Connections are spread over the workers; each comes to know it, though one alone has sent it.
        held = (prompt - 1) // 16 * 16
        comes_true(lambda: all(counted_on() == held for _ in range(8)))
        again = msgspec.json.decode(post(at.url, CHAT, asked).text)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == held
        assert at.ends() == 0
        assert "Traceback" not in at.errors

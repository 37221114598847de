"""What a gateway has to do beside requests when its fleet is large: memory, pages, and what gateways tell each other.

    python benchmarks/large_fleet.py [--replicas 1000] [--pools 20] [--json]

Nothing is sent: the reading of a page that a real vLLM has written (tests/engines/data/vllm_metrics.txt) is timed, the
HTTP of health checks and of such pages is not. Ten million additions in plain Python are timed beside it: 0.45 s on the
quiet machine that docs/notes/internet-scale.md speaks of.
"""

import argparse
import asyncio
import functools
import gc
import json
import time
import tracemalloc
from array import array
from collections.abc import Callable
from math import inf
from pathlib import Path

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.core.fleet import Fleet
from crosstie.route.held import HeldBlocks, PromptTokens
from crosstie.route.live import LiveFleet
from crosstie_gateway.gateway.backend import engine_load
from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.service.admin_view import fleet_view
from crosstie_gateway.share.board import Board
from crosstie_gateway.share.learnt import Learnt, LearntReport
from crosstie_gateway.share.peers import PeerReport, Peers
from route_speed import QUIET_S, additions_s, fleet_of, least_s

PAGE = Path(__file__).parents[1] / "tests" / "engines" / "data" / "vllm_metrics.txt"


def grown(make: Callable[[], object]) -> tuple[object, int]:
    """What is made, and bytes that it takes."""
    gc.collect()
    tracemalloc.start()
    made = make()
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return made, taken


def memory(catalog: Catalog, pools: int, each: int) -> dict[str, float]:
    """Bytes of a replica: with nothing, with all the prefixes that its cache has room for, and with its KV events."""
    few, base = grown(lambda: fleet_of(catalog, pools, 1))
    live, taken = grown(lambda: fleet_of(catalog, pools, each))
    assert isinstance(live, LiveFleet)
    empty = (taken - base) / (pools * (each - 1))
    some = [pool.replicas[n] for pool in live.pools[:2] for n in range(min(each, 20))]

    def fill() -> int:
        for n, replica in enumerate(some):
            for block in range(min(replica.prefixes.most, 2000)):
                replica.prefixes.add((10**6 * n + block,))
        return sum(len(replica.prefixes) for replica in some)

    blocks, of_blocks = grown(fill)
    assert isinstance(blocks, int)

    def events() -> HeldBlocks:
        held = HeldBlocks()
        for prompt in range(200):
            ids = list(range(prompt * 1600, (prompt + 1) * 1600))
            held.store([prompt * 100 + n for n in range(100)], None, ids, 16)
        return held

    held, of_events = grown(events)
    assert isinstance(held, HeldBlocks)
    del few
    most = sum(replica.prefixes.most for replica in some) / len(some)
    tokens = sum(min(pool.speed.cache_tokens, 1e8) for pool in live.pools) / len(live.pools)
    return {
        "replica_bytes": empty, "prefix_block_bytes": of_blocks / blocks, "prefix_blocks": most,
        "kv_block_bytes": of_events / len(held), "kv_blocks": tokens / 16,
    }  # fmt: skip


def kv_events_us() -> float:
    """A block stored, of prompts of 100 blocks."""
    held = HeldBlocks()
    ids = [list(range(prompt * 1600, (prompt + 1) * 1600)) for prompt in range(200)]

    def store() -> None:
        for prompt, tokens in enumerate(ids):
            held.store([(prompt, n) for n in range(100)], None, tokens, 16)
        held.forget(complete=True)

    return 1e6 * least_s(store) / 20_000


def sharing(keys: list[str], peers: int) -> dict[str, float]:
    """Of one replica that has changed: bytes, and CPU to tell and to hear it, with so many others that tell of it."""
    board = Board(1)
    told = Peers(board, "", time.monotonic, time.monotonic)
    told.replicas(keys)
    cells = board.cells(keys, 0)
    for cell in cells.values():
        cell.write((12, 2, 1700.0, 11_000.0, 9_000.0, 4000.0, time.monotonic(), 1.0, 20.0, inf, 0.0, -inf))
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(PeerReport).decode

    def tell() -> bytes:
        for cell in cells.values():
            cell.write((12, 2, 1700.0, 11_000.0, 9_000.0, 4000.0, time.monotonic(), 1.0, 20.0, inf, 0.0, -inf))
        return encode(told.news(False, 0))

    message = tell()
    report = decode(message)
    for n in range(peers - 1):
        told.hear(msgspec.structs.replace(report, machine=f"peer-{n}"), 0)
    other = encode(msgspec.structs.replace(report, machine="another"))
    count = len(keys)
    return {
        "entry_bytes": len(message) / count, "tell_us": 1e6 * least_s(tell) / count,
        "hear_us": 1e6 * least_s(lambda: told.hear(decode(other), 0)) / count,
    }  # fmt: skip


def learning(live: LiveFleet, blocks: int = 16) -> dict[str, float]:
    """Of one request: bytes of what is told of it, so that others learn from it, and CPU to tell and to hear it."""
    told, heard = Learnt("one", ""), Learnt("other", "")
    heard.serve(live)
    keys = [one.key for one in live.replicas()]
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(LearntReport).decode
    count, base = 200, [10**6]

    def tell() -> bytes:
        seen = told.observations
        for n in range(count):
            key = keys[n * 7919 % len(keys)]
            base[0] += blocks
            seen.sent.append((key, tuple(range(base[0], base[0] + blocks))))
            seen.first.append((key, 0.1, 0.1, 2000.0, 0.2))
            seen.decoded.append((key, 0.1, 0.1, 12.0, 0.02))
            seen.lengths.append(("chat", live.pools[0].pool.model, 200, 1000, 4000))
        return encode(told.news())

    message = tell()
    tell_s = least_s(tell)
    # Numbers go up: what comes twice is heard once.
    messages = [tell() for _ in range(5)]
    hear_s = inf
    for one in messages:
        report = decode(one)
        hear_s = min(hear_s, least_s(functools.partial(heard.hear, report, 1.0), 1))
    return {
        "learnt_bytes": len(message) / count, "learnt_tell_us": 1e6 * tell_s / count,
        "learnt_hear_us": 1e6 * hear_s / count,
    }  # fmt: skip


async def pages(catalog: Catalog, fleet: Fleet) -> dict[str, float]:
    gateway = Gateway(asyncio.get_running_loop(), catalog, fleet)
    try:
        page = gateway.metrics_page()
        view = msgspec.json.encode(fleet_view(gateway, fleet))
        return {
            "metrics_page_ms": 1e3 * least_s(gateway.metrics_page), "metrics_page_bytes": float(len(page)),
            "admin_page_ms": 1e3 * least_s(lambda: msgspec.json.encode(fleet_view(gateway, fleet))),
            "admin_page_bytes": float(len(view)), "ready_us": 1e6 * least_s(lambda: gateway.ready),
        }  # fmt: skip
    finally:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--pools", type=int, default=20)
    parser.add_argument("--peers", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    catalog, each = Catalog([]), given.replicas // given.pools
    before = additions_s()
    fleet = fleet_of(catalog, given.pools, each).fleet
    keys = [key for pool in fleet.pools for key in pool.backends]
    page = PAGE.read_bytes()
    ids = array("I", range(1600))
    found = {
        **memory(catalog, given.pools, each),
        "kv_block_us": kv_events_us(),
        "prompt_keys_us": 1e6 * least_s(lambda: [PromptTokens(ids).keys(16) for _ in range(20)]) / 20,
        **sharing(keys, given.peers),
        **learning(fleet_of(catalog, given.pools, each)),
        "engine_page_us": 1e6 * least_s(lambda: [engine_load(page) for _ in range(50)]) / 50,
        "engine_page_bytes": float(len(page)),
        **asyncio.run(pages(catalog, fleet)),
    }
    after = additions_s()
    slower = 0.5 * (before + after) / QUIET_S
    found["ten_million_additions_s"] = 0.5 * (before + after)
    if given.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        timed = name.endswith(("_us", "_ms"))
        quiet = f"   on the quiet machine {value / slower:.2f}" if timed else ""
        print(f"{name:26} {value:12.2f}{quiet}")


if __name__ == "__main__":
    main()

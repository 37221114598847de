"""Everything at once: streams, clients that leave, faults that come and go. In the end nothing is held."""

import asyncio
import random

import pytest
from tests.run.emulate.running import CHAT, chat, emulating
from tests.waiting import LIMIT_S

from crosstie.wire.loops import run_on_loop
from crosstie_gateway.emulate.faults import read_fault

pytestmark = pytest.mark.storm

FAULTS = (
    b'{"kind": "slow", "factor": 3, "for_s": 2}', b'{"kind": "cut", "after_tokens": 5, "share": 0.3, "for_s": 2}',
    b'{"kind": "hang", "for_s": 2}', b'{"kind": "error", "share": 0.3, "for_s": 2}', b'{"kind": "crash", "for_s": 1}',
    b'{"kind": "refuse", "share": 0.3, "for_s": 1}', b'{"kind": "reject", "share": 0.3, "for_s": 2}',
)  # fmt: skip


def test_nothing_is_left_behind() -> None:
    chance = random.Random(5)

    async def body() -> None:
        async with emulating(speed=50.0) as (made, client):
            (server,) = made.replicas

            async def ask(index: int) -> None:
                await asyncio.sleep(chance.random())
                asked = chat(
                    f"{index} " + "x" * chance.randrange(8000), max_tokens=1 + chance.randrange(300), ignore_eos=True
                )
                try:
                    if chance.random() < 0.4:
                        connection, reader = await client.begin(CHAT, asked)
                        await asyncio.wait({reader.done}, timeout=chance.random() * 0.2)
                        connection.abort()
                    elif chance.random() < 0.5:
                        await client.stream(asked)
                    else:
                        await client.post(CHAT, asked, 10.0)
                except OSError:
                    pass

            async def upset() -> None:
                for _ in range(25):
                    await asyncio.sleep(0.04)
                    server.inject(read_fault(chance.choice(FAULTS)))

            await asyncio.gather(upset(), *(ask(index) for index in range(150)))
            server.clear()
            await asyncio.sleep(0.2)
            replica = server.replica
            async with asyncio.timeout(LIMIT_S):
                while not replica.engine.idle:
                    await asyncio.sleep(0.02)
            assert not replica._active
            assert not replica._streams
            assert not replica._began
            assert replica.engine.kv_used_fraction == 0
            assert (await client.post(CHAT, chat(max_tokens=3))).status == 200

    run_on_loop(body())

"""A gateway whose PostgreSQL goes away under its traffic, and comes back."""

import uuid
from pathlib import Path

import pytest
from tests.run.gateway.fakes import until
from tests.run.gateway.keyed import code_of, keyed
from tests.run.ledger.postgres_server import PostgresServer

from crosstie.core.usage import total
from crosstie.wire.loops import run_on_loop

pytestmark = pytest.mark.database


def test_traffic_goes_on_and_everything_is_counted_once(postgres: PostgresServer, tmp_path: Path) -> None:
    async def check() -> None:
        async with keyed(tmp_path, postgres.fresh(f"t{uuid.uuid4().hex}")) as at:
            token, slow = await at.key(), await at.key("slow", rpm=1)
            assert (await at.ask(token)).status == 200
            postgres.kill()
            try:
                for _ in range(3):
                    assert (await at.ask(token)).status == 200
                await until(lambda: at.part.failures >= 2)
                # Keys and limits are those that were known.
                assert [(await at.ask(slow)).status for _ in range(2)] == [200, 429]
                assert code_of(await at.ask(None)) == (401, "missing_api_key")
                assert at.part.pending >= 4
            finally:
                postgres.start()
            await until(lambda: at.part.pending == 0)
            at.store.close()
            found = total(await at.written())
            assert (found.requests, found.refused, found.output_tokens) == (5, 2, 25)
            assert sum("which is tried again" in line for line in at.at.notices) == 1

    run_on_loop(check())

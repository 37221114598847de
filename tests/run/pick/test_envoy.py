"""Requests through a real Envoy that asks the picker: where they go, what comes back, and what is learnt from it."""

from pathlib import Path

import pytest
from tests.run.gateway.fakes import MODEL, fakes, fleet_of, in_folder, pool_of
from tests.run.pick.envoys import behind_envoy, said

pytestmark = pytest.mark.engines


@in_folder
async def test_requests_go_where_the_picker_says_and_are_counted(tmp_path: Path) -> None:
    async with fakes(2) as [dear, cheap]:
        fleet = fleet_of(pool_of("dear", dear.url, usd_per_gpu_hour=9.0), pool_of("cheap", cheap.url))
        async with behind_envoy(tmp_path, fleet) as at:
            for _ in range(6):
                answer = await at.ask()
                assert answer.status == 200
                assert said(answer)["served_by"] == cheap.name
            assert (len(cheap.hit), len(dear.hit)) == (6, 0)
            request, body = cheap.hit[0]
            assert body["model"] == MODEL

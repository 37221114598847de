"""`crosstie parity` on a real vLLM: all three ways of teacher forcing, whose answers must agree with each other."""

import asyncio

import pytest
from tests.engines.vllm_server import VllmServer

from crosstie.prove.parity.endpoint import WAYS, Asking, ParityEndpoint, Party, Way, ask_all, cuts
from crosstie.prove.parity.prompts import read_prompts
from crosstie.prove.parity.samples import SampledToken, least_kl
from crosstie.prove.parity.verdict import judged

pytestmark = pytest.mark.vllm_cpu

TEXT = "A gateway sends each request to the cheapest pool that is fast enough for it."
PROMPTS = tuple(one for one in read_prompts().prompts if not one.tools)[:3]


@pytest.mark.parametrize("way", WAYS)
def test_the_same_server_is_the_same_model_in_every_way(small_vllm: VllmServer, way: Way) -> None:
    party = Party(url=small_vllm.url)
    asking = Asking(tokens=4, positions=3)
    # It refuses what does not fit into its short queue.
    (passes,) = asyncio.run(ask_all(party, [party], PROMPTS, asking, concurrency=1, way=way))
    found = judged("A", "B", passes)
    assert (found.verdict, found.left_out, found.unanswered) == ("same", (), ())
    assert found.positions >= 3 * len(PROMPTS)


def test_the_ways_tell_the_same_of_the_same_places(small_vllm: VllmServer) -> None:
    async def asked() -> dict[Way, tuple[SampledToken, ...]]:
        end = ParityEndpoint(small_vllm.url, asking=Asking(positions=4))
        try:
            assert await end.begin() == WAYS
            return {way: await end.force(TEXT, way) for way in WAYS}
        finally:
            end.close()

    found = asyncio.run(asked())
    whole, echoed, steps = (found[way] for way in WAYS)
    # The echo goes on with one token more, and has no ids.
    assert [step.position for step in echoed[: len(whole)]] == [step.position for step in whole]
    for one, other in zip(whole, echoed, strict=False):
        # Tokens of the same text are one there.
        assert max(one.top.values()) == pytest.approx(max(other.top.values()), abs=1e-3)
        assert all(min(abs(p - q) for q in one.top.values()) < 1e-3 for p in other.top.values())
    assert [step.at for step in steps] == cuts(TEXT, 4)
    assert max(least_kl(step.top, echoed[-1].top) for step in steps[-1:]) < 1e-3

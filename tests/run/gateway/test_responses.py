"""Requests that go on from a response: they go to where it lives, or are told that nobody has it."""

import json
import re
from typing import Any

import pytest
from tests.run.gateway.fakes import Running, fakes, fleet_of, pool_of, running, until
from tests.wire.test_server import on_loop

from crosstie.wire.fetch import Answer
from crosstie_gateway.gateway.responses import KeptResponses

PATH = "/v1/responses"


async def respond(at: Running, **body: Any) -> Answer:
    return await at.ask(PATH, input="hello", **body)


def id_of(answer: Answer) -> str:
    assert answer.status == 200
    found = re.search(r'"id": "(resp_[^"]+)"', answer.body.decode())
    assert found is not None
    return found[1]


@pytest.mark.parametrize("stream", [True, False])
def test_a_conversation_stays_where_its_responses_live(stream: bool) -> None:
    @on_loop
    async def test() -> None:
        async with fakes(3) as made:
            for one in made:
                one.mode = "responds"
            fleet = fleet_of(pool_of("p", *(one.url for one in made)), policy="round-robin")
            async with running(fleet) as at:
                begun = [id_of(await respond(at, stream=stream)) for _ in range(3)]
                # Turned in turns, and then each where it began.
                assert len({name.split("_")[1] for name in begun}) == 3
                for _ in range(2):
                    for at_home, previous in enumerate(begun):
                        said = id_of(await respond(at, stream=stream, previous_response_id=previous))
                        assert said.split("_")[1] == previous.split("_")[1]
                        begun[at_home] = said
                assert [len(one.hit) for one in made] == [3, 3, 3]

    test()


@on_loop
async def test_what_nobody_has_is_told_as_openai_tells_it() -> None:
    async with fakes(2) as made:
        fleet = fleet_of(pool_of("p", *(one.url for one in made)))
        async with running(fleet) as at:
            # Another tenant's.
            at.gateway.context.responses.learn(7, "resp_theirs", made[0].url)
            for unknown in ("resp_unknown", "resp_theirs"):
                answer = await respond(at, previous_response_id=unknown)
                assert answer.status == 400
                error = json.loads(answer.body)["error"]
                assert error["message"] == f"Previous response with id '{unknown}' not found."
                assert error["code"] == "previous_response_not_found"
                assert (error["type"], error["param"]) == ("invalid_request_error", "previous_response_id")
            assert not any(one.hit for one in made)
            # Elsewhere the field means nothing.
            assert (await at.ask(previous_response_id="resp_unknown")).status == 200


@on_loop
async def test_the_only_replica_is_asked_itself() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("p", fake.url))) as at:
        fake.mode = "responds"
        assert (await respond(at, previous_response_id="resp_fake-0_9")).status == 200


@on_loop
async def test_a_response_whose_home_is_down_is_not_asked_for_elsewhere() -> None:
    async with fakes(2) as made, running(fleet_of(pool_of("p", *(one.url for one in made)))) as at:
        home, other = made
        at.gateway.context.responses.learn(0, "resp_1", home.url)
        home.crash()
        await until(lambda: not at.gateway.backends[home.url].replica.up)
        answer = await respond(at, previous_response_id="resp_1")
        assert answer.status == 503
        assert not other.hit
        # A reload that leaves it out: nobody has it.
        at.process.load(fleet_of(pool_of("p", other.url), pool_of("q", "http://127.0.0.1:9/v1")))
        assert (await respond(at, previous_response_id="resp_1")).status == 400


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosstie_gateway.gateway.responses._MOST", 2)
    kept = KeptResponses()
    for name in ("a", "b", "a", "c"):
        kept.learn(0, name, f"home of {name}")
    assert [kept.home(0, name) for name in ("a", "b", "c")] == ["home of a", None, "home of c"]
    assert kept.home(1, "a") is None

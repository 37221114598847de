"""Paths as clients write them, and bodies that are not read."""

import gzip
import json

import msgspec
import pytest
from tests.run.gateway.fakes import CALM, MODEL, fakes, fleet_of, pool_of, running
from tests.waiting import LIMIT_S
from tests.wire.test_server import on_loop

from crosstie.wire.fetch import fetch

ORG = "org/Name 7B"


@pytest.mark.parametrize(
    "path",
    ["/v1//chat/completions", "/v1/chat/completions/", "//v1/chat//completions//", "/openai/v1/chat/completions"],
)
def test_slashes_to_spare_make_no_difference(path: str) -> None:
    @on_loop
    async def test() -> None:
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
            assert (await at.ask(path)).status == 200
            (request, _), *_ = fake.hit
            assert request.path == "/v1/chat/completions"

    test()


@on_loop
async def test_a_path_that_is_none_is_none_with_slashes_too() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        assert (await at.ask("//")).status == 405, "the page that says where things are takes no POST"
        for path in ("/v1/", "/v2//chat/completions", "/openai/deployments/x", "/openai/deployments//chat"):
            assert (await at.ask(path)).status == 404
        assert (await at.get("//health/")).status == 200


@pytest.mark.parametrize("model", [MODEL, "another", None])
def test_azure_s_clients_name_the_model_in_the_path(model: str | None) -> None:
    @on_loop
    async def test() -> None:
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url, served_as=ORG))) as at:
            said = {"messages": [{"role": "user", "content": "hi"}], **({"model": model} if model else {})}
            for name in (MODEL, "org%2FName%207B"):
                path = f"/openai/deployments/{name}/chat/completions?api-version=2024-10-21&x=1"
                answer = await fetch(at.origin, "POST", path, body=json.dumps(said).encode(), timeout_s=LIMIT_S)
                assert answer.status == 200
                request, body = fake.hit[-1]
                assert (request.path, request.query, body["model"]) == ("/v1/chat/completions", "x=1", ORG)
            unknown = "/openai/deployments/gpt-4o/chat/completions"
            answer = await fetch(at.origin, "POST", unknown, body=json.dumps(said).encode(), timeout_s=LIMIT_S)
            assert (answer.status, b"model_not_found" in answer.body) == (404, True)
            answer = await fetch(at.origin, "POST", path, body=b"[1", timeout_s=LIMIT_S)
            assert answer.status == 400

    test()


@pytest.mark.parametrize("name", ["org%2FName%207B", "org/Name%207B", "org%2fName%207B"])
def test_a_model_with_a_slash_in_its_name_is_found(name: str) -> None:
    @on_loop
    async def test() -> None:
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url, served_as=ORG))) as at:
            answer = await at.get(f"/v1/models/{name}")
            assert (answer.status, json.loads(answer.body)["id"]) == (200, ORG)
            assert (await at.get("/v1/models/org%2FOther")).status == 404

    test()


@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("br", 415), ("identity", 200), (" Identity", 200)])
def test_a_compressed_body_is_refused_as_that(coding: str, status: int) -> None:
    @on_loop
    async def test() -> None:
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
            body = json.dumps({"model": MODEL, "messages": []}).encode()
            answer = await fetch(
                at.origin, "POST", "/v1/chat/completions", headers=[(b"content-encoding", coding.encode())],
                body=gzip.compress(body) if coding == "gzip" else body, timeout_s=LIMIT_S,
            )  # fmt: skip
            assert answer.status == status
            assert len(fake.hit) == (status == 200)
            if status != 200:
                assert answer.header(b"accept-encoding") == b"identity"
                assert json.loads(answer.body)["error"]["code"] == "unsupported_encoding"

    test()


@on_loop
async def test_an_alias_is_a_name_like_any_other() -> None:
    async with fakes() as [fake]:
        fleet = fleet_of(pool_of("one", fake.url, served_as=ORG), aliases={"gpt-4o": MODEL})
        async with running(fleet) as at:
            assert (await at.ask(model="gpt-4o")).status == 200
            assert fake.hit[-1][1]["model"] == ORG
            listed = json.loads((await at.get("/v1/models")).body)["data"]
            assert {one["id"] for one in listed} == {MODEL, ORG, "gpt-4o"}
            assert json.loads((await at.get("/v1/models/gpt-4o")).body)["pools"] == ["one"]


PAGE = [(b"origin", b"https://app.example.com")]
PREFLIGHT = [*PAGE, (b"access-control-request-method", b"POST"), (b"access-control-request-headers", b"authorization")]


@pytest.mark.parametrize(
    ("origins", "said"),
    [
        ((), None),
        (("https://other.example.com",), None),
        (("https://other.example.com", "https://app.example.com"), b"https://app.example.com"),
        (("*",), b"*"),
    ],
)
def test_browsers_are_told_whose_pages_may_ask(origins: tuple[str, ...], said: bytes | None) -> None:
    @on_loop
    async def test() -> None:
        async with fakes() as [fake]:
            serving = msgspec.structs.replace(CALM, cors_origins=origins)
            async with running(fleet_of(pool_of("one", fake.url), serving=serving)) as at:
                path, allow = "/v1/chat/completions", b"access-control-allow-origin"
                asked = await fetch(at.origin, "OPTIONS", path, headers=PREFLIGHT, timeout_s=LIMIT_S)
                assert asked.status == (204 if origins else 405)
                assert asked.header(allow) == said
                assert asked.header(b"access-control-allow-headers") == (b"authorization" if said else None)
                for mode in ("ok", "error"):
                    fake.mode = mode
                    for stream in (True, False):
                        answer = await at.ask(headers={"origin": "https://app.example.com"}, stream=stream)
                        assert [value for name, value in answer.headers if name == allow] == ([said] if said else [])
                assert (await at.get("/v1/models")).header(allow) is None

    test()

"""A gateway that was given a tokenizer: what it counts, who waits for that, and what it does without."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.run.gateway.fakes import MODEL, Running, fakes, fleet_of, in_folder, pool_of, running, until
from tests.tokens import written
from tests.waiting import LIMIT_S

from crosstie.catalog.tokenizer import Tokenizer
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.service.tokenizing import PromptReader, TokenizerFiles

SHORT, LONG, BOOK = "What is a fleet? ", "What is a fleet? " * 300, "What is a fleet? " * 6000


def counting(folder: Path, *urls: str, **changes: Any) -> Fleet:
    return fleet_of(pool_of("one", *urls, tokenizer=str(written(folder)), **changes))


def tokens(folder: Path, text: str) -> int:
    body = {"messages": [{"role": "user", "content": text}]}
    found = Tokenizer(folder / "tokenizer.json").read(json.dumps(body).encode())
    assert found is not None
    return len(found[0])


async def counted(at: Running, text: str) -> float:
    answer = await at.ask("/crosstie/explain", messages=[{"role": "user", "content": text}])
    assert answer.status == 200
    found: float = json.loads(answer.body)["request"]["input_tokens"]
    return found


@in_folder
async def test_prompts_are_counted_to_the_token(folder: Path) -> None:
    async with (
        fakes() as (fake,),
        running(counting(folder, fake.url, max_context=10**6), components=[TokenizerFiles(patience_s=LIMIT_S)]) as at,
    ):
        for text in (SHORT, LONG, BOOK):
            assert await counted(at, text) == tokens(folder, text)
        message: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": LONG}]}
        answer = await at.ask("/v1/messages/count_tokens", **message)
        assert json.loads(answer.body) == {"input_tokens": tokens(folder, LONG)}
        for text in (SHORT, LONG):
            assert (await at.ask(messages=[{"role": "user", "content": text}])).status == 200
        assert (await at.ask("/v1/messages", **message)).status == 200
        # A model's other names mean the same tokenizer, and what cannot be read is for others to refuse.
        assert (await at.ask("/v1/messages/count_tokens", model=MODEL, messages=5)).status == 400
        assert (await at.ask(model="nobody", messages=[])).status == 404


@in_folder
async def test_a_context_is_refused_by_the_token(folder: Path) -> None:
    written(folder)
    exactly = tokens(folder, LONG)
    async with (
        fakes() as (fake,),
        running(
            counting(folder, fake.url, max_context=exactly + 5), components=[TokenizerFiles(patience_s=LIMIT_S)]
        ) as at,
    ):
        said = [{"role": "user", "content": LONG}]
        assert (await at.ask(messages=said, max_tokens=5)).status == 200
        refused = await at.ask(messages=said, max_tokens=6)
        assert refused.status == 400
        assert json.loads(refused.body)["error"]["code"] == "context_length_exceeded"


@in_folder
async def test_nobody_waits_behind_a_prompt_that_is_being_read(folder: Path) -> None:
    let_go, entered = threading.Event(), threading.Event()

    class Slow(Tokenizer):
        def read(self, body: bytes, path: str = "") -> tuple[list[int], bool] | None:
            if len(body) > 64 * 2**10:
                entered.set()
                let_go.wait()
            return super().read(body, path)

    files = TokenizerFiles(patience_s=LIMIT_S)
    async with fakes() as (fake,), running(counting(folder, fake.url), components=[files]) as at:
        assert files.reader is not None
        files.reader.tokenizers = {MODEL: Slow(folder / "tokenizer.json")}
        book = asyncio.ensure_future(at.ask(messages=[{"role": "user", "content": BOOK}], max_tokens=1))
        await until(entered.is_set)
        for text in (SHORT, LONG):
            assert await counted(at, text) == tokens(folder, text)
        assert not book.done()
        let_go.set()
        # More than its context, as is known to the token.
        assert (await book).status == 400
        assert files.reader._waiting_bytes == 0


@in_folder
async def test_who_would_wait_too_long_goes_by_the_estimate(folder: Path) -> None:
    let_go = threading.Event()

    class Stuck(Tokenizer):
        def read(self, body: bytes, path: str = "") -> tuple[list[int], bool] | None:
            let_go.wait()
            return super().read(body, path)

    files = TokenizerFiles(patience_s=LIMIT_S)
    async with fakes() as (fake,), running(counting(folder, fake.url), components=[files]) as at:
        reader = files.reader
        assert reader is not None
        reader.tokenizers = {MODEL: Stuck(folder / "tokenizer.json")}
        reader._patience_s = 0.01
        estimated = await counted(at, LONG)
        assert estimated not in (0.0, tokens(folder, LONG))
        # The thread still has the first; as long as too much waits for it, nobody asks it.
        reader._waiting_bytes += 16 * 2**20
        assert await counted(at, LONG) == estimated
        let_go.set()
        await until(lambda: reader._waiting_bytes == 16 * 2**20)


@in_folder
async def test_a_client_that_goes_while_its_prompt_is_read_is_told_of_once(folder: Path) -> None:
    let_go, entered = threading.Event(), threading.Event()

    class Slow(Tokenizer):
        def read(self, body: bytes, path: str = "") -> tuple[list[int], bool] | None:
            entered.set()
            let_go.wait()
            return super().read(body, path)

    files, ended = TokenizerFiles(patience_s=LIMIT_S), list[RequestRecord]()
    async with fakes() as (fake,), running(counting(folder, fake.url), components=[files]) as at:
        at.gateway.listeners.append(ended.append)
        assert files.reader is not None
        files.reader.tokenizers = {MODEL: Slow(folder / "tokenizer.json")}
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": LONG}]}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", at.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await until(entered.is_set)
        writer.transport.abort()
        await until(lambda: not at.process.server.connections)
        let_go.set()
        await until(lambda: len(ended) == 1)
        assert ended[0].how == "client gone"
        assert not fake.hit


@in_folder
async def test_a_failure_after_the_prompt_was_read_is_answered(folder: Path) -> None:
    files = TokenizerFiles(patience_s=LIMIT_S)
    async with fakes() as (fake,), running(counting(folder, fake.url), components=[files]) as at:
        failures: list[Any] = []
        at.gateway.loop.set_exception_handler(lambda loop, said: failures.append(said["exception"]))

        def fails(*given: Any) -> Any:
            raise ZeroDivisionError

        at.gateway.context.on_decision = fails
        answer = await at.ask(messages=[{"role": "user", "content": LONG}])
        assert answer.status == 500
        assert [type(one) for one in failures] == [ZeroDivisionError]
        at.gateway.loop.set_exception_handler(None)


@in_folder
async def test_a_fleet_whose_tokenizer_is_none_is_refused_and_the_old_one_goes_on(folder: Path) -> None:
    async with (
        fakes() as (fake,),
        running(counting(folder, fake.url), components=[TokenizerFiles(patience_s=LIMIT_S)]) as at,
    ):
        process, (pool,) = at.process, at.process.fleet.pools
        for given, said in (
            (str(folder / "nowhere"), "nowhere: cannot be read"),
            (str(folder / "tokenizer_config.json"), "is no tokenizer.json"),
        ):
            bad = fleet_of(msgspec.structs.replace(pool, tokenizer=given))
            with pytest.raises(BadInput, match=f"pool one: tokenizer: .*{said}"):
                process.load(bad)
        other = folder / "other"
        other.mkdir()
        two = pool_of("two", "http://127.0.0.1:9/v1", tokenizer=str(written(other)))
        with pytest.raises(BadInput, match="pool two: tokenizer: another pool of"):
            process.load(fleet_of(pool, two))
        assert await counted(at, SHORT) == tokens(folder, SHORT)
        # And one without any is served by estimates, until there is one again.
        process.load(fleet_of(msgspec.structs.replace(pool, tokenizer=None)))
        assert at.gateway.context.tokenizing is None
        process.load(fleet_of(pool))
        assert isinstance(at.gateway.context.tokenizing, PromptReader)
        assert await counted(at, LONG) == tokens(folder, LONG)

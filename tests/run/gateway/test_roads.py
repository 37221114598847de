"""Paths of which the gateway reads the model and passes the rest, whatever it is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.lazily import Lazily
from tests.run.gateway.fakes import MODEL, Fake, Running, fakes, fleet_of, pool_of, running, until
from tests.waiting import LIMIT_S
from tests.wire.test_server import on_loop

from crosstie.wire.fetch import fetch
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.gateway.roads import FORMS, PASSED
from crosstie_gateway.wire.multipart import read_form
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

if TYPE_CHECKING:
    import openai
else:
    openai = Lazily("openai")


class Passing(Fake):
    """Answers anything, and keeps how it was asked."""

    answer, kind, status = b'{"results": []}', b"application/json", 200

    def _handle(self, request: Request, reply: Reply) -> None:
        if request.method == "GET":
            super()._handle(request, reply)
            return
        self.hit.append((request, {}))
        reply.send(self.status, self.answer, content_type=self.kind)


def client(at: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{at.port}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)


@on_loop
async def test_each_path_reaches_its_engine_beside_or_under_v1() -> None:
    fake = Passing()
    await fake.start()
    async with running(fleet_of(pool_of("one", fake.url))) as at:
        for path in sorted(PASSED - FORMS):
            assert (await at.ask(path)).status == 200
            assert fake.hit[-1][0].path == path
        for path in ("/v1/load_lora_adapter", "/sleep", "/update_weights", "/v1/fine_tuning/jobs"):
            assert (await at.ask(path)).status == 404
        assert len(fake.hit) == len(PASSED - FORMS)
    fake.crash()


@on_loop
async def test_a_sound_in_and_a_sound_out_with_the_pool_s_own_name_of_the_model() -> None:
    fake = Passing()
    await fake.start()
    async with running(fleet_of(pool_of("one", fake.url, served_as="whisper"))) as at, client(at) as ours:
        fake.answer = b'{"text": "hello"}'
        got = await ours.audio.transcriptions.create(
            model=MODEL, file=("a.wav", b'RIFF\r\n--\r\nname="model"\r\n\r\nx' * 9), prompt="names"
        )
        assert got.text == "hello"
        passed = fake.hit[-1][0]
        form = read_form(passed.headers[b"content-type"], passed.body)
        assert (form["model"].file, form["model"].content(passed.body)) == ("", b"whisper")
        assert form["file"].file == "a.wav"
        assert form["file"].content(passed.body) == b'RIFF\r\n--\r\nname="model"\r\n\r\nx' * 9
        fake.answer, fake.kind = bytes(range(256)) * 40, b"audio/mpeg"
        sound = await ours.audio.speech.create(model=MODEL, voice="alloy", input="hello")
        assert sound.content == fake.answer
    fake.crash()


@on_loop
async def test_a_large_sound_is_no_long_prompt() -> None:
    fake = Passing()
    await fake.start()
    async with running(fleet_of(pool_of("one", fake.url, max_context=1000))) as at, client(at) as ours:
        fake.answer = b'{"text": "hello"}'
        got = await ours.audio.transcriptions.create(model=MODEL, file=("a.wav", b"\0" * 3_000_000))
        assert got.text == "hello"
    fake.crash()


@on_loop
async def test_an_engine_without_the_path_is_not_at_fault_and_another_has_it() -> None:
    lacking, having = Passing("lacking"), Passing("having")
    for one in (lacking, having):
        await one.start()
    lacking.status = 404
    pools = (pool_of("a", lacking.url, usd_per_gpu_hour=1.0), pool_of("b", having.url, usd_per_gpu_hour=9.0))
    async with running(fleet_of(*pools)) as at:
        for _ in range(9):
            assert (await at.ask("/v1/rerank")).status == 200
        assert at.gateway.backends[lacking.url].replica.up
        having.status = 404
        answer = await at.ask("/v1/rerank")
        assert answer.status == 404
        assert at.gateway.backends[having.url].replica.up
    for one in (lacking, having):
        one.crash()


@on_loop
async def test_scores_are_no_tokens_and_a_transcript_is() -> None:
    fake = Passing()
    await fake.start()
    async with running(fleet_of(pool_of("one", fake.url))) as at, client(at) as ours:
        records: list[RequestRecord] = []
        at.gateway.listeners.append(records.append)
        fake.answer = b'{"results": [{"text": "%b"}]}' % (b"word " * 400)
        assert (await at.ask("/v1/rerank")).status == 200
        fake.answer = b'{"text": "%b"}' % (b"word " * 400)
        await ours.audio.transcriptions.create(model=MODEL, file=("a.wav", b"0"))
        await until(lambda: len(records) == 2)
        assert [one.output_tokens > 100 for one in records] == [False, True]
        assert records[0].output_tokens == 0
    fake.crash()


@on_loop
async def test_a_login_page_is_no_answer_here_either() -> None:
    fake = Passing()
    await fake.start()
    fake.answer, fake.kind = b"<html>", b"text/html"
    async with running(fleet_of(pool_of("one", fake.url))) as at:
        assert (await at.ask("/v1/audio/speech")).status == 502
    fake.crash()


@on_loop
async def test_what_should_be_a_form_and_is_none_is_refused() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        answer = await at.ask("/v1/audio/transcriptions")
        assert answer.status == 400
        assert "multipart/form-data" in json.loads(answer.body)["error"]["message"]
        kind = [(b"content-type", b"multipart/form-data; boundary=x")]
        form = b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n1\r\n--x--\r\n'
        answer = await fetch(at.origin, "POST", "/v1/audio/transcriptions", headers=kind, body=form, timeout_s=LIMIT_S)
        assert answer.status == 400
        assert "names no model" in json.loads(answer.body)["error"]["message"]
        assert not fake.hit


@on_loop
async def test_a_form_names_one_model_and_no_engine_sees_another() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        kind = [(b"content-type", b"multipart/form-data; boundary=x")]
        field = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n'
        form = field % b"another" + field % MODEL.encode() + b"--x--\r\n"
        answer = await fetch(at.origin, "POST", "/v1/audio/transcriptions", headers=kind, body=form, timeout_s=LIMIT_S)
        assert answer.status == 400
        assert "two fields 'model'" in json.loads(answer.body)["error"]["message"]
        assert not fake.hit

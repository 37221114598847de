"""`crosstie serve` and `crosstie explain` as a user has them: real processes, sockets, engines and clients."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.engines.streams import get, post
from tests.lazily import Lazily
from tests.run.emulate.running import SMALL, fleet, pool
from tests.run.service.processes import Running, comes_true, command, environment, gone, serving
from tests.run.start.test_local import real

from crosstie.catalog.fleet_text import fleet_text

if TYPE_CHECKING:
    import anthropic
    import openai
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
else:
    anthropic = Lazily("anthropic")
    openai = Lazily("openai")

LOCAL = "smollm2-135m"
FRANCE: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TWO_POOLS = fleet_text(
    fleet(
        pool("amd", max_context=8192),
        pool("nvidia", accelerator="h100-sxm", usd_per_gpu_hour=2.5, max_context=8192),
        policy="cheapest-meeting-target",
    )
)


@contextlib.contextmanager
def client_of(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.url, api_key="not-needed", max_retries=0, timeout=60) as client:
        yield client


def metrics_of(url: str) -> dict[str, float]:
    """Read as Prometheus reads them, summed over labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(get(url, "/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


# Without a fleet file: llama.cpp on this machine


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("local")) as running:
        yield running
        (engine,) = running.children()
        assert running.ends(signal.SIGTERM) == 0
        assert gone(engine)
        assert "Traceback" not in running.errors


@pytest.fixture(scope="module")
def local_client(local: Running) -> Iterator[openai.OpenAI]:
    with client_of(local) as client:
        yield client


@real
def test_a_chat_with_a_real_model(local_client: openai.OpenAI) -> None:
    raw = local_client.chat.completions.with_raw_response.create(
        model=LOCAL, messages=FRANCE, temperature=0, max_tokens=24
    )
    assert raw.headers["x-crosstie-pool"] == "local"
    assert raw.headers["x-crosstie-reason"]
    answer = raw.parse()
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


@real
@pytest.mark.parametrize("asked", [True, False], ids=["with usage", "without usage"])
def test_a_stream_from_a_real_model(local_client: openai.OpenAI, asked: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if asked else {}
    chunks = list(
        local_client.chat.completions.create(
            model=LOCAL, messages=FRANCE, temperature=0, max_tokens=24, stream=True, **options
        )
    )
    words = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "Paris" in "".join(words)
    assert len([word for word in words if word]) > 3
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [asked]
    assert all(chunk.choices for chunk in chunks[:-1])
    assert bool(chunks[-1].choices) != asked


@real
def test_anthropic_s_client_with_a_real_model(local: Running) -> None:
    said: Any = {"model": LOCAL, "max_tokens": 24, "messages": FRANCE, "extra_body": {"temperature": 0}}
    base = local.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base, api_key="not-needed", max_retries=0, timeout=60) as client:
        whole = client.messages.create(**said)
        with client.messages.stream(**said) as stream:
            pieces = list(stream.text_stream)
            streamed = stream.get_final_message()
    assert "Paris" in whole.content[0].text
    assert "".join(pieces) == streamed.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert len(pieces) > 3
    assert whole.stop_reason == streamed.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens > 0
    assert streamed.usage.input_tokens + (streamed.usage.cache_read_input_tokens or 0) > 10


@real
def test_completions_models_and_tools_of_a_real_model(local_client: openai.OpenAI) -> None:
    text = local_client.completions.create(model=LOCAL, prompt="One, two, three,", max_tokens=4, temperature=0)
    assert text.choices[0].text
    listed = list(local_client.models.list())
    assert [model.id for model in listed] == [LOCAL]
    assert local_client.models.retrieve(LOCAL).owned_by == "crosstie"
    answer = local_client.chat.completions.create(
        model=LOCAL, messages=FRANCE, temperature=0, max_tokens=24, tools=[WEATHER]
    )
    assert answer.choices[0].finish_reason in ("stop", "tool_calls", "length")


@real
def test_what_the_gateway_says_of_its_engine_s_context_is_true(local: Running, local_client: openai.OpenAI) -> None:
    (listed,) = json.loads(get(local.said["pools"]["local"]["backends"][0], "/v1/models").text)["data"]
    (model,) = json.loads(get(local.url, "/v1/models").text)["data"]
    assert model["max_model_len"] == listed["meta"]["n_ctx"]
    with pytest.raises(openai.BadRequestError, match="context"):
        local_client.completions.create(model=LOCAL, prompt=[1] * 5000, max_tokens=1)


@real
def test_unknown_models_and_bad_bodies_are_openai_s_errors(local: Running, local_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no pool serves 'gpt-9'; there are smollm2-135m") as refused:
        local_client.chat.completions.create(model="gpt-9", messages=FRANCE)
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        local_client.models.retrieve("gpt-9")
    assert post(local.url, "/v1/chat/completions", {"messages": []}).status == 400
    assert get(local.url, "/v1/chat/completions").status == 405


@real
def test_what_an_engine_cannot_do_is_its_own_word_and_no_fault(local: Running, local_client: openai.OpenAI) -> None:
    """llama.cpp answers 501 to embeddings; as many of them as open a breaker must leave it in service."""
    before = metrics_of(local.url)
    for _ in range(6):
        with pytest.raises(openai.InternalServerError, match="does not support embeddings") as refused:
            local_client.embeddings.create(model=LOCAL, input="hello")
        assert refused.value.status_code == 501
    assert local_client.completions.create(model=LOCAL, prompt="One,", max_tokens=1).choices
    after = metrics_of(local.url)
    assert after.get("crosstie_backend_faults_total") == before.get("crosstie_backend_faults_total")
    assert after["crosstie_breaker_open"] == 0


@real
def test_more_requests_than_an_engine_s_connection_lasts(local: Running) -> None:
    """llama.cpp ends a connection after its hundredth request; nobody may notice."""
    before = metrics_of(local.url)
    with client_of(local) as client:
        for _ in range(120):
            assert client.completions.create(model=LOCAL, prompt="One,", max_tokens=1).choices
    after = metrics_of(local.url)
    assert after.get("crosstie_backend_faults_total") == before.get("crosstie_backend_faults_total")


@real
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_reads_answers_and_streams(local: Running) -> None:
    body = {"model": LOCAL, "messages": FRANCE, "temperature": 0, "max_tokens": 24}
    asked = ["curl", "-sS", "--max-time", "60", f"{local.url}/chat/completions", "-H", "content-type: application/json"]
    whole = subprocess.run([*asked, "-d", json.dumps(body)], capture_output=True, text=True)
    assert (whole.returncode, whole.stderr) == (0, "")
    assert "Paris" in json.loads(whole.stdout)["choices"][0]["message"]["content"]
    streamed = subprocess.run(
        [*asked, "-N", "-i", "-d", json.dumps({**body, "stream": True})], capture_output=True, text=True
    )
    assert (streamed.returncode, streamed.stderr) == (0, "")
    head, _, events = streamed.stdout.partition("\n\n")
    assert "x-crosstie-pool: local" in head
    assert events.endswith("data: [DONE]\n\n")
    assert '"usage"' not in events


@real
def test_the_engine_ends_with_a_gateway_that_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        (engine,) = running.children()
        assert not gone(engine)
        assert running.ends(signal.SIGKILL) == -signal.SIGKILL
        assert comes_true(lambda: gone(engine))


# An emulated fleet


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("emulated")
    file = folder / "fleet.toml"
    file.write_text(TWO_POOLS)
    with serving(folder, file, "--emulate", "--speed", "20") as running:
        yield running
        (child,) = running.children()
        assert running.ends(signal.SIGTERM) == 0
        assert gone(child)
        assert "Traceback" not in running.errors


@pytest.fixture(scope="module")
def client(emulated: Running) -> Iterator[openai.OpenAI]:
    with client_of(emulated) as made:
        yield made


def test_an_emulated_fleet_says_that_it_is_one_and_why_it_chose(emulated: Running, client: openai.OpenAI) -> None:
    assert emulated.said["emulated"] is True
    raw = client.chat.completions.with_raw_response.create(model=SMALL, messages=FRANCE, max_tokens=10)
    assert raw.headers["x-crosstie-pool"] in ("amd", "nvidia")
    assert "a million such requests" in raw.headers["x-crosstie-reason"]
    assert raw.headers["x-crosstie-emulated"]
    usage = raw.parse().usage
    assert usage is not None
    assert usage.completion_tokens == 10
    pinned = client.chat.completions.with_raw_response.create(
        model=SMALL, messages=FRANCE, max_tokens=5, extra_headers={"x-crosstie-pool": "nvidia"}
    )
    assert pinned.headers["x-crosstie-pool"] == "nvidia"
    with pytest.raises(openai.BadRequestError, match="'intel' is no pool of this fleet"):
        client.chat.completions.create(model=SMALL, messages=FRANCE, extra_headers={"x-crosstie-pool": "intel"})


@pytest.mark.slow
def test_every_endpoint_of_an_emulated_fleet(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=SMALL, messages=FRANCE, max_tokens=12, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)
    assert client.completions.create(model=SMALL, prompt="Once", max_tokens=5).usage is not None
    texts = client.completions.create(model=SMALL, prompt="Once", max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in texts)
    assert len(client.embeddings.create(model=SMALL, input=["one", "two"]).data) == 2
    response = client.responses.create(model=SMALL, input="Say something.", max_output_tokens=20)
    assert response.output_text
    assert response.usage is not None
    assert response.usage.output_tokens == 20
    events = list(client.responses.create(model=SMALL, input="Again.", max_output_tokens=20, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert any(event.type == "response.output_text.delta" for event in events)


@pytest.mark.slow
def test_prometheus_reads_its_metrics(emulated: Running, client: openai.OpenAI) -> None:
    client.completions.create(model=SMALL, prompt="Once", max_tokens=5)
    families = {family.name: family for family in text_string_to_metric_families(get(emulated.url, "/metrics").text)}
    served = [s for s in families["crosstie_requests"].samples if s.labels["outcome"] == "served"]
    assert sum(sample.value for sample in served) >= 1
    assert {sample.labels["model"] for sample in served} == {SMALL}
    assert families["crosstie_ttft_seconds"].type == "histogram"
    assert [sample.value for sample in families["crosstie_backend_up"].samples] == [1.0, 1.0]
    assert metrics_of(emulated.url)["crosstie_usd_total"] > 0


def explain(running: Running, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    asked = command("explain", "--url", running.url, *arguments)
    return subprocess.run(asked, capture_output=True, text=True, env=environment(folder), timeout=60)


@pytest.mark.slow
def test_explain_says_where_a_request_would_go_and_why(emulated: Running, tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"model": SMALL, "messages": FRANCE, "max_tokens": 50}))
    with ThreadPoolExecutor(2) as hands:
        table = hands.submit(explain, emulated, "--model", SMALL, "--input", "3000", "--output", "200", folder=tmp_path)
        said = hands.submit(explain, emulated, str(request), "--json", folder=tmp_path)
        long = hands.submit(explain, emulated, "--model", SMALL, "--input", "12000", folder=tmp_path)
        unknown = hands.submit(explain, emulated, "--model", "gpt-9", folder=tmp_path)
    assert table.result().returncode == 0
    assert all(
        name in table.result().stdout for name in (f"{SMALL}, class none: 3,000 tokens in", "amd", "nvidia", "chosen")
    )
    document = json.loads(said.result().stdout)
    assert (said.result().returncode, document["outcome"]) == (0, "send")
    assert {one["pool"] for one in document["considered"]} == {"amd", "nvidia"}
    assert long.result().returncode == 1
    assert "exceed the 8192 of the longest context" in " ".join(long.result().stdout.split())
    assert unknown.result().returncode == 2
    assert "no pool serves 'gpt-9'" in unknown.result().stderr


# Bad command lines

FAULTS = {
    "no file to emulate": (["serve", "--emulate"], "--emulate needs a fleet file"),
    "no file to check": (["serve", "--dry-run"], "--dry-run needs a fleet file"),
    "speed of real engines": (["serve", "fleet.toml", "--speed", "20"], "--speed goes with --emulate"),
    "speed of nothing": (["serve", "fleet.toml", "--emulate", "--speed", "0"], "--speed"),
    "port taken": (["serve", "fleet.toml", "--port", "TAKEN"], "cannot listen on 127.0.0.1:TAKEN"),
    "not our address": (["serve", "fleet.toml", "--host", "192.0.2.1", "--port", "0"], "cannot listen on 192.0.2.1:0"),
    "no backends": (["serve", "planned.toml", "--port", "0"], "pool amd has no backends: add their addresses"),
    "no key": (["serve", "key.toml", "--port", "0"], "pool one: api_key_env names CROSSTIE_TEST_KEY, which is not set"),
    "no such file": (["serve", "none.toml"], "none.toml: "),
    "no TOML": (["serve", "broken.toml"], "broken.toml: "),
    "unknown key": (["serve", "typo.toml"], "typo.toml: serve.drain: "),
    "unknown policy": (["serve", "fleet.toml", "--policy", "luck"], "'luck'"),
    "nobody to explain": (["explain", "--model", SMALL, "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9: no gateway answers there"),
    "nothing to explain": (["explain"], "name a request file, or --model"),
}  # fmt: skip


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """All of them at once: most of the time that each takes is Python's to start."""
    folder = tmp_path_factory.mktemp("refusals")
    one = fleet_text(fleet(pool(backends=("http://127.0.0.1:9/v1",))))
    for name, text in {
        "fleet": one,
        "planned": TWO_POOLS,
        "key": one.replace('name = "one"', 'name = "one"\napi_key_env = "CROSSTIE_TEST_KEY"'),
        "broken": "format = 1\n[[pool]\n",
        "typo": one.replace("[serve]\n", "[serve]\ndrain = 5\n"),
    }.items():
        (folder / f"{name}.toml").write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as taken, ThreadPoolExecutor(2) as hands:
        port = str(taken.getsockname()[1])

        def refused(arguments: list[str]) -> subprocess.CompletedProcess[str]:
            said = subprocess.run(
                command(*(part.replace("TAKEN", port) for part in arguments)), cwd=folder, env=environment(folder),
                capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            said.stderr = said.stderr.replace(port, "TAKEN")
            return said

        yield {name: hands.submit(refused, arguments) for name, (arguments, _) in FAULTS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_command_line_is_one_line_and_status_2(
    refusals: dict[str, Future[subprocess.CompletedProcess[str]]], name: str
) -> None:
    seen = refusals[name].result()
    # Before it listens it looks at its backends, and says what it sees.
    *seen_before, last = seen.stderr.splitlines()
    assert FAULTS[name][1] in last
    assert last.startswith("crosstie: ")
    assert all(line.startswith("pool one: http://127.0.0.1:9/v1 is down") for line in seen_before)
    assert (seen.returncode, seen.stdout) == (2, "")

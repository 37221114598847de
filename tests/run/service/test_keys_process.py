"""Keys and usage with real processes: OpenAI's own client, two gateways on one store, and kill -9."""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import openai
import pytest
from tests.engines.streams import get, metric
from tests.run.emulate.running import SMALL, fleet, pool
from tests.run.service.processes import Running, comes_true, command, environment, serving

from crosstie.catalog.fleet_text import fleet_text
from crosstie.core.fleet import SharedState
from crosstie.core.usage import total
from crosstie_gateway.ledger.places import open_store

pytestmark = pytest.mark.slow


def keys(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        command("keys", *arguments, "--fleet", folder / "fleet.toml"), env=environment(folder), capture_output=True,
        check=True, text=True,
    )  # fmt: skip
    return done.stdout.strip()


def write_fleet(folder: Path) -> Path:
    file = folder / "fleet.toml"
    state = SharedState(keys=True, store="crosstie.db")
    file.write_text(
        fleet_text(
            fleet(
                pool("amd"),
                pool("big", "llama-3.3-70b", precision="fp8"),
                policy="cheapest-meeting-target",
                state=state,
            )
        )
    )
    return file


@contextlib.contextmanager
def gateway(folder: Path) -> Iterator[Running]:
    with serving(folder, write_fleet(folder), "--emulate", "--speed", "1000", "--ops-port", "0") as running:
        yield running
        assert "Traceback" not in running.errors


def client_of(running: Running, token: str, retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url, api_key=token, max_retries=retries, timeout=60)


def asked(client: openai.OpenAI, model: str = SMALL, prompt: str = "hello") -> int:
    done = client.chat.completions.create(model=model, messages=[{"role": "user", "content": prompt}], max_tokens=4)
    assert done.usage is not None
    return done.usage.completion_tokens


def test_openais_client_understands_every_refusal(tmp_path: Path) -> None:
    write_fleet(tmp_path)
    limited = keys(tmp_path, "create", "limited", "--model", SMALL, "--rpm", "2")
    poor = keys(tmp_path, "create", "poor", "--usd-per-month", "0.000001")
    asking = keys(tmp_path, "create", "asking", "--explain", "--max-open", "2")
    with gateway(tmp_path) as at, contextlib.ExitStack() as stack:

        def client(token: str, retries: int = 0) -> openai.OpenAI:
            return stack.enter_context(client_of(at, token, retries))

        with pytest.raises(openai.AuthenticationError) as wrong:
            asked(client("sk-of-somebody-else"))
        assert wrong.value.code == "invalid_api_key"
        with pytest.raises(openai.PermissionDeniedError) as denied:
            asked(client(limited), "llama-3.3-70b")
        assert denied.value.code == "model_not_allowed"
        assert [one.id for one in client(limited).models.list()] == [SMALL]

        assert [asked(client(limited)) for _ in range(2)] == [4, 4]
        with pytest.raises(openai.RateLimitError) as limit:
            asked(client(limited))
        assert limit.value.code == "rate_limit_exceeded"
        assert int(limit.value.response.headers["retry-after"]) >= 1
        assert limit.value.response.headers["x-ratelimit-remaining-requests"] == "0"

        # Its budget does not cover one request: a client that would try again is told not to, and does not.
        with pytest.raises(openai.RateLimitError) as spent:
            asked(client(poor, retries=5), "llama-3.3-70b", "word " * 20_000)
        assert spent.value.code == "insufficient_quota"
        assert spent.value.request.headers["x-stainless-retry-count"] == "0"

        # And so does `crosstie explain`.
        explain = command("explain", "--model", SMALL, "--url", at.url.removesuffix("/v1"))
        for token, status in ((asking, 0), (limited, 2), ("", 2)):
            env = environment(tmp_path, OPENAI_API_KEY=token)
            done = subprocess.run(explain, env=env, capture_output=True, text=True)
            assert done.returncode == status
            assert ("no API key" in done.stderr) == (token == "")
            assert ("may not ask for explanations" in done.stderr) == (token == limited)

        # A key of the moment: made, and used by the running gateway; then revoked, and refused.
        late = keys(tmp_path, "create", "late")

        def works() -> bool:
            try:
                return asked(client(late)) == 4
            except openai.AuthenticationError:
                return False

        assert comes_true(works)
        keys(tmp_path, "revoke", "late")
        assert comes_true(lambda: not works())
        for secret in (limited, poor, late):
            assert secret.rpartition("-")[2] not in at.errors
        assert at.ends() == 0
    store = open_store(str(tmp_path / "crosstie.db"))
    rows = {row.of: row for row in store.used(["key", "code"])}
    store.close()
    assert (rows["limited", ""].requests, rows["limited", ""].output_tokens) == (2, 8)
    assert rows["limited", "rate_limit_exceeded"].refused == 1
    assert rows["poor", "insufficient_quota"].refused == 1
    assert rows["late", ""].requests >= 1
    # Who is refused for his key has none, as far as the books are concerned.
    assert rows["", "api_key_revoked"].refused >= 1


class Load:
    """Clients that ask one request after the other and note which they sent and which were answered in full."""

    def __init__(self, running: Running, token: str, clients: int = 4):
        self.sent = self.answered = 0
        self._lock, self._enough = threading.Lock(), threading.Event()
        self._port, self._token = running.port, token
        self._threads = [threading.Thread(target=self._client) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _client(self) -> None:
        body = json.dumps({"model": SMALL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4})
        headers = {"Authorization": f"Bearer {self._token}"}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            while not self._enough.is_set():
                with self._lock:
                    self.sent += 1
                connection.request("POST", "/v1/chat/completions", body, headers)
                answer = connection.getresponse()
                if answer.status == 200 and json.loads(answer.read())["usage"]["completion_tokens"] == 4:
                    with self._lock:
                        self.answered += 1

    def goes_well(self) -> bool:
        return comes_true(lambda: self.answered >= 20)

    def ends(self) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join()


def pending(at: Running) -> float:
    return metric(get(at.said["ops_url"], "/metrics").text, "crosstie_ledger_pending")


def killed_under_load(folder: Path, token: str) -> tuple[int, int]:
    """Requests that must be in the store, and those that may be."""
    with gateway(folder) as at:
        first = Load(at, token)
        assert first.goes_well()
        first.ends()
        # Once nothing is pending all of it is in the store, whatever happens next.
        assert comes_true(lambda: pending(at) == 0)
        second = Load(at, token)
        assert second.goes_well()
        at.send(signal.SIGKILL)
        at.process.wait()
        second.ends()
    return first.answered, first.sent + second.sent


def test_usage_survives_kill_9_and_is_never_more_than_was_served(tmp_path: Path) -> None:
    write_fleet(tmp_path)
    token = keys(tmp_path, "create", "alice")
    before = 0
    for _ in range(3):
        least, most = killed_under_load(tmp_path, token)
        store = open_store(str(tmp_path / "crosstie.db"))
        days = store.used(["day"], key_id=1)
        found = total(days)
        assert before + least <= found.requests <= before + most
        # Whole batches: never half of what a request came to, and the budget's books say the same.
        assert found.output_tokens == 4 * found.requests
        for day in days:
            at = datetime.fromisoformat(day.of[0]).replace(tzinfo=UTC).timestamp()
            assert store.spent(at)[1][0] == pytest.approx(day.usd)
        store.close()
        before = found.requests


def test_two_gateways_keep_one_account_and_one_budget(tmp_path: Path) -> None:
    write_fleet(tmp_path)
    token = keys(tmp_path, "create", "alice")
    with gateway(tmp_path) as one, gateway(tmp_path) as other:
        for at in (one, other, one):
            with client_of(at, token) as client:
                assert asked(client) == 4
        store = open_store(str(tmp_path / "crosstie.db"))
        assert comes_true(lambda: total(store.used(["key"])).requests == 3)
        # What both have spent together is too much for either.
        usd = total(store.used(["key"])).usd
        store.close()
        keys(tmp_path, "update", "alice", "--usd-per-day", f"{max(usd / 2, 1e-6):.12f}")

        def refused(at: Running) -> bool:
            with client_of(at, token) as client:
                try:
                    asked(client)
                except openai.RateLimitError as error:
                    return error.code == "insufficient_quota"
            return False

        assert comes_true(lambda: refused(one))
        assert comes_true(lambda: refused(other))
        assert one.ends() == other.ends() == 0


def test_the_store_of_a_gateway_that_cannot_be_had_is_said_in_one_line(tmp_path: Path) -> None:
    file = write_fleet(tmp_path)
    (tmp_path / "crosstie.db").write_bytes(b"not a store" * 1000)
    done = subprocess.run(
        command("serve", file, "--emulate", "--port", "0"), env=environment(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert re.search(r"crosstie: .*crosstie\.db: is no SQLite file\n$", done.stderr)
    assert "Traceback" not in done.stderr

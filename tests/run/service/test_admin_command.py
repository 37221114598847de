"""`crosstie admin` against a `crosstie serve` process, as an administrator would use them."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from tests.conftest import Command
from tests.run.service.processes import END_S, Running, comes_true, command, environment, put, serving

KEY = "the-key-of-these-tests"
FLEET = """
format = 1
name = "administered"
[serve]
slow_start_s = 0
[[pool]]
name = "one"
model = "llama-3.1-8b"
accelerator = "mi300x"
precision = "fp8"
stack = "vllm"
replicas = 2
usd_per_gpu_hour = 1
[[pool]]
name = "two"
model = "llama-3.1-8b"
accelerator = "h200"
precision = "fp8"
stack = "vllm"
replicas = 1
usd_per_gpu_hour = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("admin")
    (made / "fleet.toml").write_text(FLEET)
    (made / "key").write_text(KEY + "\n")
    return made


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Iterator[Running]:
    os.environ["CROSSTIE_ADMIN_KEY"] = KEY
    try:
        with serving(folder, folder / "fleet.toml", "--emulate", "--speed", "100", "--admin-port", "0") as found:
            yield found
    finally:
        del os.environ["CROSSTIE_ADMIN_KEY"]


def admin(folder: Path, gateway: Running, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    url = str(gateway.said["admin_url"])
    settings = environment(folder, **{"CROSSTIE_ADMIN_URL": url, "CROSSTIE_ADMIN_KEY": KEY, **more})
    return subprocess.run(
        command("admin", *arguments), env=settings, capture_output=True, text=True, timeout=END_S, check=False
    )


@pytest.fixture
def here(gateway: Running, crosstie: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command in this process, with that gateway and its key."""
    monkeypatch.setenv("CROSSTIE_ADMIN_URL", str(gateway.said["admin_url"]))
    monkeypatch.setenv("CROSSTIE_ADMIN_KEY", KEY)
    return crosstie


def test_a_pool_is_drained_shown_and_let_back(folder: Path, gateway: Running) -> None:
    drained = admin(folder, gateway, "drain", "one", "--wait")
    assert (drained.returncode, drained.stdout, drained.stderr) == (0, "drain pool one: done\n", "")
    said = json.loads(admin(folder, gateway, "pools", "--json").stdout)
    assert [pool["state"] for pool in said["pools"]] == ["drained", "up"]
    shown = admin(folder, gateway, "pools").stdout
    assert "changed: drain pool one" in shown
    assert admin(folder, gateway, "undrain", "one").returncode == 0
    assert "nothing to change" in admin(folder, gateway, "reset").stdout
    assert "admin: key" in gateway.errors
    assert KEY not in gateway.errors


@pytest.mark.slow
def test_a_backend_and_a_pool_are_added_and_saved(folder: Path, gateway: Running) -> None:
    assert admin(folder, gateway, "add", "two", "http://127.0.0.1:1/v1").returncode == 0
    new = folder / "pool.toml"
    new.write_text('[[pool]]\nname = "new"\nmodel = "anything"\nbackends = ["http://127.0.0.1:2/v1"]\n')
    assert admin(folder, gateway, "add", "--file", str(new)).returncode == 0
    saved = folder / "saved.toml"
    assert admin(folder, gateway, "config", "--save", str(saved)).returncode == 0
    text = saved.read_text()
    assert text == admin(folder, gateway, "config").stdout
    check = subprocess.run(
        command("serve", saved, "--dry-run", "--json"),
        env=environment(folder),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(check.stdout)["pools"]["new"]["backends"] == ["http://127.0.0.1:2/v1"]
    assert admin(folder, gateway, "remove", "new").returncode == 0
    assert admin(folder, gateway, "remove", "http://127.0.0.1:1/v1").returncode == 0
    assert json.loads(admin(folder, gateway, "reset", "--json").stdout)["changed"] is False


def test_a_file_that_is_wrong_is_refused_in_its_readers_words(folder: Path, gateway: Running) -> None:
    file = folder / "fleet.toml"
    put(file, FLEET.replace("mi300x", "mi3000x"))
    try:
        refused = admin(folder, gateway, "reload")
        assert refused.returncode == 1
        assert "pool[0].accelerator" in refused.stderr
        assert refused.stderr.count("\n") == 1
    finally:
        put(file, FLEET)
    assert admin(folder, gateway, "reload").returncode == 0


@pytest.mark.slow
def test_decisions_are_listed_and_followed(folder: Path, gateway: Running) -> None:
    url = str(gateway.said["admin_url"])
    settings = environment(folder, CROSSTIE_ADMIN_URL=url, CROSSTIE_ADMIN_KEY=KEY)
    lines = folder / "followed"
    with lines.open("wb") as out:
        follower = subprocess.Popen(command("admin", "decisions", "--follow", "--json"), env=settings, stdout=out)
    try:

        def asked() -> bool:
            body = json.dumps({"model": "llama-3.1-8b", "max_tokens": 2, "prompt": "x"}).encode()
            head = {"content-type": "application/json", "x-request-id": "followed-one"}
            with urlopen(Request(f"{gateway.url}/completions", body, head), timeout=END_S) as answer:
                answer.read()
            return "followed-one" in lines.read_text()

        assert comes_true(asked)
        listed = admin(folder, gateway, "decisions", "--last", "1")
        assert "followed-one" in listed.stdout
        assert " -> " in listed.stdout
    finally:
        follower.kill()
        follower.wait()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("drain", "nope"), 1, "there is no pool 'nope'"),
        (("drain", "http://[x/v1"), 2, "is no address"),
        (("remove", "http://127.0.0.1:9/v1"), 1, "no pool has the backend"),
        (("weight", "one"), 2, "write NAME=VALUE"),
        (("weight", "one=much"), 2, "not a number"),
        (("add", "one"), 2, "name a pool and the address"),
        (("add", "--file", "missing.toml"), 2, "cannot be read"),
        (("decisions", "--alternatives"), 2, "goes with --follow"),
        (("decisions", "--last", "0"), 2, "0 is not in the range"),
        (("pools", "--url", "http://127.0.0.1:1"), 2, "no gateway answers there"),
        (("pools", "--url", "nonsense"), 2, "--url 'nonsense' is no http or https address"),
        (("pools", "--key-file", "missing"), 2, "cannot be read"),
    ],
)
def test_slips_are_one_line(here: Command, arguments: tuple[str, ...], status: int, said: str) -> None:
    done = here("admin", *arguments)
    assert done.status == status
    assert said in done.err
    assert done.err.count("\n") == 1


def test_the_wrong_key_and_none(folder: Path, gateway: Running, here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    # The port of the API is not the administrator's.
    api = here("admin", "pools", "--url", gateway.url.removesuffix("/v1"))
    assert (api.status, api.err.count("\n")) == (2, 1)
    monkeypatch.setenv("CROSSTIE_ADMIN_KEY", "not-the-key-of-these-tests")
    wrong = here("admin", "pools")
    assert (wrong.status, "administrator's key" in wrong.err) == (2, True)
    monkeypatch.setenv("CROSSTIE_ADMIN_KEY", "")
    none = here("admin", "pools")
    assert (none.status, "no key" in none.err) == (2, True)
    assert here("admin", "pools", "--key-file", str(folder / "key")).status == 0


@pytest.mark.slow
def test_every_worker_takes_a_change_and_so_does_one_that_comes_later(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSTIE_ADMIN_KEY", KEY)
    (tmp_path / "fleet.toml").write_text(FLEET)
    options = (
        "--emulate",
        "--speed",
        "100",
        "--admin-port",
        "0",
        "--workers",
        "2",
        "--record",
        tmp_path / "trace.jsonl",
    )
    with serving(tmp_path, tmp_path / "fleet.toml", *options) as together:
        with urlopen(f"{together.url.removesuffix('/v1')}/metrics", timeout=END_S) as page:
            assert "\ncrosstie_record_failed 0\n" in page.read().decode()
        done = json.loads(admin(folder, together, "drain", "one", "--json").stdout)
        assert (done["processes"], done["refused_by"]) == (2, [])
        # The emulator, which was started first, and the workers.
        assert comes_true(lambda: len(together.children()) == 3)
        os.kill(together.children()[-1], signal.SIGKILL)
        assert comes_true(lambda: "takes its place" in together.errors)

        def all_drained() -> bool:
            """Whichever process answers; the new one may not be there yet."""
            said = json.loads(admin(folder, together, "pools", "--json").stdout)
            return said["processes"] == 2 and said["pools"][0]["state"] == "drained" and len(said["changes"]) == 1

        assert comes_true(lambda: len(together.children()) == 3 and all_drained())
        for _ in range(10):
            said = json.loads(admin(folder, together, "pools", "--json").stdout)
            assert (said["processes"], said["pools"][0]["state"], said["changes"]) == (2, "drained", ["drain pool one"])

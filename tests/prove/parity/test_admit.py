"""`crosstie parity --pool --admit` against a gateway process: a drained pool is let in if it gives the same model."""

import json
from collections.abc import Iterator

import pytest
from tests.conftest import Command
from tests.prove.parity.fake_engine import Engine, served
from tests.run.service.processes import Running, comes_true, serving

KEY = "the-key-of-these-tests"
FLEET = """
format = 1
name = "waiting"
[[pool]]
name = "old"
model = "toy"
backends = ["{old}/v1"]
[[pool]]
name = "new"
model = "toy"
drained = true
backends = ["{new}/v1"]
"""
QUICKLY = ("--limit", "4", "--tokens", "6", "--concurrency", "2")


@pytest.fixture(scope="module")
def old() -> Iterator[Engine]:
    with served(Engine()) as engine:
        yield engine


@pytest.fixture(scope="module")
def new() -> Iterator[Engine]:
    with served(Engine(sharp=2.0)) as engine:
        yield engine


@pytest.fixture(scope="module")
def gateway(old: Engine, new: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("admit")
    (folder / "fleet.toml").write_text(FLEET.format(old=old.url, new=new.url))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSTIE_ADMIN_KEY", KEY)
        with serving(folder, folder / "fleet.toml", "--admin-port", "0") as running:
            yield running


@pytest.mark.slow
def test_a_pool_is_admitted_once_it_gives_the_same_model(
    gateway: Running, old: Engine, new: Engine, crosstie: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSTIE_ADMIN_KEY", KEY)
    monkeypatch.setenv("CROSSTIE_ADMIN_URL", str(gateway.said["admin_url"]))

    def state(name: str = "new") -> str:
        pools = json.loads(crosstie("admin", "pools", "--json").out)["pools"]
        return str(next(one["state"] for one in pools if one["pool"] == name))

    assert comes_true(lambda: state("old") == "up")
    assert state() == "drained"
    refused = crosstie("parity", "old", "--pool", "new", "--admit", *QUICKLY)
    assert refused.status == 1, refused.err
    assert "NOT the same model" in refused.out
    assert "pool new stays drained" in refused.out
    assert state() == "drained"

    new.sharp = 1.0
    # Without --admit it is only looked at.
    assert crosstie("parity", old.url, "--pool", "new", *QUICKLY).status == 0
    assert state() == "drained"
    admitted = crosstie("parity", old.url, "--pool", "new", "--admit", *QUICKLY)
    assert admitted.status == 0
    assert "pool new is admitted" in admitted.out
    assert state() == "up"
    again = crosstie("parity", old.url, "--pool", "new", "--admit", *QUICKLY)
    assert (again.status, "pool new has requests already" in again.err) == (2, True)
    unknown = crosstie("parity", old.url, "--pool", "nwe", *QUICKLY)
    assert (unknown.status, "no pool 'nwe'; there are old, new" in unknown.err) == (2, True)

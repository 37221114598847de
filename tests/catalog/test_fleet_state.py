"""[state] of a fleet file: where keys, usage and shared load are kept, without a password in the file."""

from pathlib import Path

import pytest

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData
from crosstie.core.fleet import SharedState

POOL = '[[pool]]\nname = "a"\nmodel = "m"\nreplicas = 1\n'


def state_of(catalog: Catalog, folder: Path, text: str) -> SharedState:
    file = folder / "fleet.toml"
    file.write_text(f"format = 1\n[state]\n{text}\n{POOL}")
    return read_fleet(catalog, file).state


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog()


def test_without_it_nothing_is_kept(catalog: Catalog, tmp_path: Path) -> None:
    assert state_of(catalog, tmp_path, "") == SharedState(keys=False, store=None, redis=None)


def test_a_file_lies_beside_the_fleet_file(catalog: Catalog, tmp_path: Path) -> None:
    found = state_of(catalog, tmp_path, 'keys = "required"\nstore = "usage.db"')
    assert found == SharedState(keys=True, store=str(tmp_path / "usage.db"))
    assert state_of(catalog, tmp_path, 'store = "/var/lib/usage.db"').store == "/var/lib/usage.db"


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("store", "postgresql://crosstie@db.example.com/crosstie"),
        ("store", "postgresql://crosstie:${DB_PASSWORD}@db/crosstie"),
        ("store", "${CROSSTIE_DATABASE}"),
        ("redis", "redis://127.0.0.1:6379/0"),
        ("redis", "rediss://:${REDIS_PASSWORD}@cache:6380/1"),
        ("redis", "${CROSSTIE_REDIS}"),
    ],
)
def test_addresses_stay_as_they_are(catalog: Catalog, tmp_path: Path, key: str, place: str) -> None:
    assert getattr(state_of(catalog, tmp_path, f'{key} = "{place}"'), key) == place


def test_it_is_written_and_read_back(catalog: Catalog, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(f'format = 1\n[state]\nkeys = "required"\nstore = "a.db"\nredis = "redis://h/0"\n{POOL}')
    fleet = read_fleet(catalog, file)
    again = tmp_path / "again.toml"
    again.write_text(fleet_text(fleet))
    assert read_fleet(catalog, again).state == fleet.state


def test_a_copy_elsewhere_has_the_same_store(catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path("here/fleet.toml").write_text(f'format = 1\n[state]\nstore = "a.db"\n{POOL}')
    fleet = read_fleet(catalog, Path("here/fleet.toml"))
    Path("here/copy.toml").write_text(fleet_text(fleet))
    assert read_fleet(catalog, Path("here/copy.toml")).state.store == str(tmp_path / "here" / "a.db")


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("keys = true", "state.keys", "is not one of off, required"),
        ('keys = "required"', "state.store", "missing"),
        ('store = "mysql://db/x"', "state.store", "postgresql"),
        ('redis = "localhost:6379"', "state.redis", "redis://"),
        ('redis = ""', "state.redis", ""),
        ("store = 3", "state.store", ""),
        ('stor = "x"', "state.stor", ""),
    ],
)
def test_slips_are_named(catalog: Catalog, tmp_path: Path, text: str, key: str, words: str) -> None:
    with pytest.raises(BadData) as caught:
        state_of(catalog, tmp_path, text)
    assert key in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("store", "postgresql://me:hunter2@host/0"),
        ("store", "postgresql://host/db?user=me&password=hunter2"),
        ("redis", "redis://:hunter2@host/0"),
    ],
)
def test_a_password_is_refused_and_not_repeated(catalog: Catalog, tmp_path: Path, key: str, place: str) -> None:
    with pytest.raises(BadData) as caught:
        state_of(catalog, tmp_path, f'{key} = "{place}"')
    assert "hunter2" not in str(caught.value)
    assert "${" in str(caught.value)

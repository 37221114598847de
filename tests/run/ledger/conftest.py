"""The same tests on both kinds of store."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.run.ledger.postgres_server import PostgresServer, postgres_server

from crosstie_gateway.ledger.places import open_store
from crosstie_gateway.ledger.store import Store


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.database)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store's address."""
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.fresh(f"t{uuid.uuid4().hex}")


@pytest.fixture
def opens(place: str) -> Iterator[Callable[[], Store]]:
    """Another connection to the same store, each time."""
    made: list[Store] = []

    def open_one() -> Store:
        made.append(open_store(place, create=True))
        return made[-1]

    yield open_one
    for store in made:
        store.close()


@pytest.fixture
def store(opens: Callable[[], Store]) -> Store:
    return opens()

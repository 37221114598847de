"""A store in a server: what may happen to it, and what is not told of its address."""

import sys
import uuid

import pytest
from tests.run.ledger.postgres_server import PostgresServer
from tests.run.ledger.test_store import batch, key, line, one

from crosstie.core.errors import BadInput, StoreFailed
from crosstie.core.usage import total
from crosstie_gateway.ledger.places import open_store

pytestmark = pytest.mark.database


def test_a_server_that_is_gone_for_a_while(postgres: PostgresServer) -> None:
    store = open_store(postgres.fresh(f"t{uuid.uuid4().hex}"))
    store.write(batch(1, (line(), one())))
    postgres.kill()
    try:
        for _ in range(2):
            with pytest.raises(StoreFailed, match="PostgreSQL"):
                store.write(batch(2, (line(), one())))
    finally:
        postgres.start()
    assert store.write(batch(2, (line(), one())))
    assert total(store.used(["key"])).requests == 2
    store.close()


def test_a_connection_that_was_cut_is_made_anew(postgres: PostgresServer) -> None:
    store = open_store(postgres.fresh(f"t{uuid.uuid4().hex}"))
    with pytest.raises(StoreFailed), store.session(writes=True) as session:
        session.rows("SELECT pg_terminate_backend(pg_backend_pid())")
    assert store.add_key(key()).id > 0
    store.close()


@pytest.mark.parametrize(
    "address",
    ["postgresql://me:hunter%2@host/db", "postgresql://me:hunter2@host:port/db", "postgresql://host/db?hunter2=1"],
)
def test_an_address_that_cannot_be_read_is_not_repeated(address: str) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises((BadInput, StoreFailed)) as told:
        open_store(address)
    assert "hunter" not in str(told.value)


def test_a_server_that_is_not_there_is_told_without_its_password() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StoreFailed, match="PostgreSQL") as told:
        open_store("postgresql://me:hunter2@127.0.0.1:1/db")
    assert "hunter" not in str(told.value)
    assert "\n" not in str(told.value)


def test_without_its_library_one_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(BadInput, match=r"pip install '\./packages/gateway\[postgres\]'"):
        open_store("postgresql://host/db")

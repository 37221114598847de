"""A gateway that asks for keys, with its store and its ledger."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.run.gateway.fakes import MODEL, Fake, Running, fakes, fleet_of, pool_of, running, until

from crosstie.core.fleet import ServedClass, SharedState
from crosstie.core.usage import Used
from crosstie.core.workload import Target
from crosstie.wire.fetch import Answer, fetch
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.ledger.keys import Key, digest, new_public_id, new_secret, shown
from crosstie_gateway.ledger.places import open_store
from crosstie_gateway.ledger.store import Store
from crosstie_gateway.service import ledger as ledger_module
from crosstie_gateway.service.ledger import Ledger

OTHER = "qwen3-8b"
# For requests that have to be in flight while something else happens.
CLASSES = tuple(
    ServedClass(
        name=name, model=model, requests_per_s=1.0, input_tokens=length, output_tokens=20.0,
        ttft=Target(seconds=ttft, percentile=0.95), tpot=None, routes=(),
    )
    for name, model, length, ttft in (
        ("chat", MODEL, 1.0, 1.0), ("batch", MODEL, 9000.0, 60.0), ("other", OTHER, 1.0, 2.0),
    )
)  # fmt: skip


class Keyed:
    """A gateway with keys, its store and its ledger."""

    def __init__(self, at: Running, store: Store, part: Ledger, fake: Fake):
        self.at, self.store, self.part, self.fake = at, store, part, fake

    async def key(self, name: str = "alice", **fields: Any) -> str:
        """Makes a key, and waits until the gateway knows it."""
        public_id, secret = new_public_id(), new_secret()
        self.store.add_key(Key(name=name, public_id=public_id, digest=digest(secret), created_at=1.0, **fields))
        await self.followed()
        return shown(public_id, secret)

    async def change(self, name: str = "alice", **fields: Any) -> None:
        self.store.change_key(name, lambda key: msgspec.structs.replace(key, **fields))
        await self.followed()

    async def followed(self) -> None:
        version = self.store.news(-1, 0.0).version
        await until(lambda: self.part._version == version)

    async def ask(self, token: str | None, headers: dict[str, str] | None = None, **body: Any) -> Answer:
        own = {} if token is None else {"Authorization": f"Bearer {token}"}
        return await self.at.ask(headers={**own, **(headers or {})}, **body)

    async def get(self, path: str, token: str | None) -> Answer:
        lines = [] if token is None else [(b"authorization", b"Bearer " + token.encode())]
        return await fetch(self.at.origin, "GET", path, headers=lines)

    async def written(self) -> list[Used]:
        await until(lambda: self.part.pending == 0)
        return self.store.used(["key", "outcome", "code"])


@contextlib.asynccontextmanager
async def keyed(folder: Path, place: str | None = None, every_s: float = 0.02, **changes: Any) -> AsyncIterator[Keyed]:
    """`place`: of the store; a file in the folder where none is given. `every_s`: how often it is read and written,
    which nearly every test waits for."""
    place = place or str(folder / "store.db")
    store = open_store(place, create=True)
    part = Ledger()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_module, "_EVERY_S", every_s)
        async with fakes() as [fake]:
            fleet = fleet_of(
                pool_of("one", fake.url), pool_of("two", fake.url.replace("127.0.0.1", "localhost"), model=OTHER),
                classes=CLASSES, state=SharedState(keys=True, store=place),
            )  # fmt: skip
            async with running(msgspec.structs.replace(fleet, **changes), components=[part]) as at:
                try:
                    yield Keyed(at, store, part, fake)
                finally:
                    await part.stop()
                    store.close()


def code_of(answer: Answer) -> tuple[int, str]:
    return answer.status, json.loads(answer.body)["error"]["code"]


def message_of(answer: Answer) -> str:
    return str(json.loads(answer.body)["error"]["message"])


Test = Callable[[Path], Any]


def on_loop(test: Test) -> Callable[[Path], None]:
    def runs(tmp_path: Path) -> None:
        run_on_loop(test(tmp_path))

    runs.__name__ = test.__name__
    return runs

"""What the service keeps for clients: `crosstie serve --batches FOLDER`, `--responses FILE`."""

import asyncio
from pathlib import Path

from crosstie.catalog.writing import in_words
from crosstie_gateway.batch.api import BatchApi
from crosstie_gateway.batch.responses import StoredResponses
from crosstie_gateway.batch.runner import BatchRunner
from crosstie_gateway.batch.store import BatchStore
from crosstie_gateway.service.process import Component, GatewayProcess


class BatchService(Component):
    """Every worker answers for the folder; one of them runs what is in it."""

    def __init__(self, folder: Path, *, in_flight: int, most_gib: float):
        self._in_flight = in_flight
        self._store = BatchStore(folder, int(most_gib * 2**30))

    async def start(self, process: GatewayProcess) -> None:
        with in_words(f"--batches {self._store.folder}"):
            await asyncio.to_thread(self._store.index.known)
        self._api = BatchApi(self._store, process.gateway)
        self.runner = BatchRunner(self._store, process.gateway, process.server, self._in_flight)
        process.gateway.context.batches = self._api
        self.runner.start()

    async def drain(self, within_s: float) -> None:
        await self.runner.drain(within_s)

    async def stop(self) -> None:
        await self.runner.stop()
        await self._api.stop()
        await asyncio.to_thread(self._store.index.close)


class ResponseService(Component):
    """Every worker reads and writes the file."""

    def __init__(self, file: Path):
        self._file = file

    async def start(self, process: GatewayProcess) -> None:
        self._kept = StoredResponses(self._file, process.gateway, process.server.limits)
        with in_words(f"--responses {self._file}"):
            await asyncio.to_thread(self._kept.store.rows, "SELECT 1 FROM held")
        process.gateway.context.responses = self._kept

    async def stop(self) -> None:
        await self._kept.stop()
        await asyncio.to_thread(self._kept.store.close)

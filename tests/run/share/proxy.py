"""Between a gateway and its Redis: cut, as a partition does it, silent, or slow."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Proxy:
    def __init__(self, port: int):
        self._to, self.port = port, 0
        self.silent = False
        self.delay_s = 0.0
        self._refuses = False
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cut(self) -> None:
        """Those who are connected are cut off, and nobody gets through until `mend`."""
        self._refuses = True
        for writer in list(self._open):
            writer.transport.abort()

    def mend(self) -> None:
        self._refuses = self.silent = False
        self.delay_s = 0.0

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, back}
        for one, other in ((reader, back), (there, writer)):
            task = asyncio.get_running_loop().create_task(self._carry(one, other))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if not self.silent:
                    writer.write(data)
                    await writer.drain()
        writer.transport.abort()
        self._open.discard(writer)

    async def close(self) -> None:
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def proxy(port: int) -> AsyncIterator[Proxy]:
    made = Proxy(port)
    server = await asyncio.start_server(made._accept, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        await made.close()

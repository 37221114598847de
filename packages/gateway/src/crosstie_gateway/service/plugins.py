"""Plugins of other packages (docs/plugins.md): guards that pass, change or refuse a request, filters and policies.

Each runs in its own process: one that hangs, throws, ends or holds Python's lock costs a request its patience at most.
It is then killed and started again, later each time; meanwhile its `on_failure` holds.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import msgspec

from crosstie.core.errors import BadInput, did_you_mean, near_names
from crosstie.core.histogram import Family
from crosstie_gateway.gateway.interfaces import PluginQuestion, Plugins, PluginVerdict, Told
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.service.plugin_child import GROUP, PluginHello, PluginReply, PluginRequest
from crosstie_gateway.service.process import Component, GatewayProcess
from crosstie_gateway.wire.frames import framed, read_frame
from crosstie_gateway.wire.tasks import Tasks

# How long a plugin may take to be loaded; models of moderation are large.
_LOAD_S = 120.0
# Beyond its patience a plugin that has not answered anything for so long is killed.
_HUNG_S = 1.0
# Between a plugin's end and its next start, doubled each time, until it has answered again.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 60.0
# Requests, and bytes of them, that wait for one plugin: as much as one process answers within a patience, generously.
_MOST_WAITING, _MOST_WAITING_BYTES = 256, 2**26
_decode_hello = msgspec.msgpack.Decoder(PluginHello).decode
_decode_reply = msgspec.msgpack.Decoder(PluginReply).decode


class PluginFailed(Exception):
    """It gave no answer, or none that can be used; why, in a word for metrics."""


class PluginLink(NamedTuple):
    """A plugin's process, and the socket that is its standard input and output."""

    process: "subprocess.Popen[bytes]"
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def end(self) -> None:
        """Kills it, whatever it is doing."""
        self.writer.close()
        self.process.kill()
        self.process.wait()


class PluginProcess:
    """One plugin. `say` is told when it is lost, and when it is back."""

    def __init__(self, name: str, say: Any):
        self.name, self._say = name, say
        self.hello: PluginHello | None = None
        self.counts: Counter[str] = Counter()
        self._link: PluginLink | None = None
        self._waiting: dict[int, tuple[asyncio.Future[PluginReply], int]] = {}
        self._bytes = self._number = 0
        self._wait_s = _FIRST_WAIT_S
        # When it last answered, or was asked while nothing waited.
        self._heard_at = 0.0

    @property
    def up(self) -> bool:
        return self._link is not None

    async def load(self) -> PluginHello:
        """Raises PluginFailed."""
        # -P: no folder that the user happens to be in is searched for modules.
        command = (sys.executable, "-P", "-m", "crosstie_gateway.service.plugin_child", self.name)
        ours, theirs = socket.socketpair()
        with theirs:
            at = theirs.fileno()
            process = subprocess.Popen(command, stdin=at, stdout=at, start_new_session=True)
        link = PluginLink(process, *await asyncio.open_connection(sock=ours))
        try:
            async with asyncio.timeout(_LOAD_S):
                hello = _decode_hello(await read_frame(link.reader))
            if hello.error:
                raise PluginFailed(hello.error)
        except BaseException as error:
            link.end()
            if isinstance(error, (EOFError, OSError, TimeoutError, msgspec.MsgspecError)):
                raise PluginFailed(f"its process ended with status {process.returncode}") from None
            raise
        self.hello, self._link = hello, link
        return hello

    async def run(self) -> None:
        """Until it is cancelled: takes its answers, and starts it again."""
        while True:
            link = self._link
            if link is None:
                await asyncio.sleep(self._wait_s)
                self._wait_s = min(2.0 * self._wait_s, _LONGEST_WAIT_S)
                with contextlib.suppress(PluginFailed, OSError):
                    await self.load()
                    self._say(f"plugin {self.name} is back", back=True)
                continue
            try:
                await self._until_lost(link)
            except (EOFError, OSError, TimeoutError, msgspec.MsgspecError) as error:
                why = "it hangs" if isinstance(error, TimeoutError) else "its process ended"
                self._lose(link)
                self._say(f"plugin {self.name} is lost, {why}; until it is back on_failure holds", back=False)

    async def _until_lost(self, link: PluginLink) -> None:
        """Takes answers and watches for hangs; raises what either raises first."""
        both = [asyncio.ensure_future(work) for work in (self._take(link), self._watch())]
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _take(self, link: PluginLink) -> None:
        while True:
            reply = _decode_reply(await read_frame(link.reader))
            self._heard_at, self._wait_s = asyncio.get_running_loop().time(), _FIRST_WAIT_S
            future, size = self._waiting.pop(reply.number, (None, 0))
            self._bytes -= size
            if future is not None and not future.done():
                future.set_result(reply)

    async def _watch(self) -> None:
        """Raises TimeoutError where it hangs."""
        assert self.hello is not None
        loop, hung_s = asyncio.get_running_loop(), self.hello.patience_s + _HUNG_S
        while not self._waiting or loop.time() - self._heard_at <= hung_s:
            await asyncio.sleep(hung_s / 4.0)
        raise TimeoutError

    def _lose(self, link: PluginLink) -> None:
        self._link = None
        link.end()
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(PluginFailed("lost"))

    async def ask(self, method: str, request: dict[str, Any], pools: list[dict[str, Any]]) -> Any:
        """Raises PluginFailed."""
        link, hello, loop = self._link, self.hello, asyncio.get_running_loop()
        if link is None or hello is None:
            raise PluginFailed("down")
        self._number += 1
        message = framed(PluginRequest(self._number, method, request, pools))
        if len(self._waiting) >= _MOST_WAITING or self._bytes + len(message) > _MOST_WAITING_BYTES:
            raise PluginFailed("busy")
        if not self._waiting:
            self._heard_at = loop.time()
        future: asyncio.Future[PluginReply] = loop.create_future()
        self._waiting[self._number] = future, len(message)
        self._bytes += len(message)
        try:
            link.writer.write(message)
            reply = await asyncio.wait_for(future, hello.patience_s)
        except TimeoutError:
            raise PluginFailed("late") from None
        except OSError:
            raise PluginFailed("lost") from None
        if reply.error:
            raise PluginFailed("error")
        return reply.answer

    def stop(self) -> None:
        if self._link is not None:
            self._link.end()


class PluginProcesses(Plugins, Component):
    """`names`: entry points of the group, asked in this order."""

    def __init__(self, names: Sequence[str]):
        known = sorted(entry_points(group=GROUP).names)
        for name in names:
            if name not in known:
                there = did_you_mean(near_names(name, known)) or f" There are {', '.join(known) or 'none'}."
                raise BadInput(f"--plugin {name}: no installed package has a plugin of that name.{there}")
        self._names = names
        self.plugins: list[PluginProcess] = []
        self._tasks = Tasks()
        self.wants_pools = False

    async def start(self, process: GatewayProcess) -> None:
        self._process, gateway = process, process.gateway
        self.plugins = [PluginProcess(name, self._say) for name in self._names]
        for plugin in self.plugins:
            try:
                hello = await plugin.load()
            except (PluginFailed, OSError) as error:
                await self.stop()
                raise BadInput(f"--plugin {plugin.name}: {error}") from None
            self.wants_pools = self.wants_pools or "pools" in hello.methods
            self._tasks.spawn(plugin.run())
        gateway.context.plugins = self

    async def stop(self) -> None:
        await self._tasks.cancel()
        for plugin in self.plugins:
            plugin.stop()

    def _say(self, sentence: str, *, back: bool) -> None:
        kind, level = ("plugin_back", "info") if back else ("plugin_lost", "error")
        self._process.notify(Notice(kind, level, sentence))  # type: ignore[arg-type]

    def consult(self, question: PluginQuestion, on_verdict: Told) -> None:
        self._tasks.spawn(self._consult(question, on_verdict))

    async def _consult(self, question: PluginQuestion, on_verdict: Told) -> None:
        body, pools = question.body, question.pools
        for plugin in self.plugins:
            hello = plugin.hello
            for method in hello.methods if hello is not None else ():
                request = {
                    "path": question.path, "model": question.model, "class": question.class_name,
                    "key": question.key_id, "body": body,
                }  # fmt: skip
                try:
                    answer = await plugin.ask(method, request, pools if method == "pools" else [])
                    if method == "check":
                        refusal, body = _checked(answer, body)
                        if refusal:
                            plugin.counts["refused"] += 1
                            on_verdict(PluginVerdict(refusal=refusal[:500]))
                            return
                    else:
                        pools = _chosen(answer, pools)
                except PluginFailed as error:
                    plugin.counts[str(error)] += 1
                    if hello is None or hello.on_failure == "refuse":
                        on_verdict(PluginVerdict(refusal=f"plugin {plugin.name} gives no answer", failed=True))
                        return
                else:
                    plugin.counts["answered"] += 1
        names = None if pools is question.pools else tuple(pool["name"] for pool in pools)
        on_verdict(PluginVerdict(body=body if body is not question.body else None, pools=names))

    def families(self) -> list[Family]:
        counts = [
            ({"plugin": plugin.name, "outcome": how}, float(n))
            for plugin in self.plugins
            for how, n in plugin.counts.items()
        ]
        up = [({"plugin": plugin.name}, float(plugin.up)) for plugin in self.plugins]
        return [
            ("crosstie_plugin_up", "gauge", "1 while a plugin's process answers.", up),
            ("crosstie_plugin_calls_total", "counter", "Calls of plugins by what came of them.", counts),
        ]


def _checked(answer: Any, body: bytes) -> tuple[str, bytes]:
    """Why a request is refused, if it is, and its body from here on."""
    if answer is None:
        return "", body
    if isinstance(answer, str) and answer:
        return "".join(sign if sign.isprintable() else " " for sign in answer), body
    if isinstance(answer, bytes) and answer:
        return "", answer
    raise PluginFailed("odd")


def _chosen(answer: Any, pools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pools that it names; other names are ignored."""
    if not isinstance(answer, (list, tuple)) or not all(isinstance(name, str) for name in answer):
        raise PluginFailed("odd")
    return [pool for pool in pools if pool["name"] in answer]

"""A plugin in a process of its own: questions over standard input, answers over standard output, one at a time; its
prints go to standard error. It ends when its input closes. docs/plugins.md has the contract."""

import os
import sys
import threading
import time
from importlib.metadata import entry_points
from typing import Any

import msgspec

from crosstie_gateway.wire.frames import framed, read_frame_now

GROUP = "crosstie.plugins"
# How often a plugin's process looks whether its parent is there.
_CHECK_S = 2.0


class PluginHello(msgspec.Struct):
    """What a plugin says once it is loaded: its methods and settings, or why it was not loaded."""

    methods: list[str] = []
    patience_s: float = 0.1
    on_failure: str = "refuse"
    error: str = ""


class PluginRequest(msgspec.Struct):
    number: int
    method: str
    request: dict[str, Any]
    pools: list[dict[str, Any]]


class PluginReply(msgspec.Struct):
    """`answer`: what the method returned; `error`: how it failed, by the kind of its exception alone."""

    number: int
    answer: Any = None
    error: str = ""


def hello_of(plugin: Any) -> PluginHello:
    """Raises ValueError where it is no plugin."""
    methods = [name for name in ("check", "pools") if callable(getattr(plugin, name, None))]
    patience_s, on_failure = getattr(plugin, "patience_s", 0.1), getattr(plugin, "on_failure", "refuse")
    hello = PluginHello(methods, float(patience_s), str(on_failure))
    if not methods:
        raise ValueError("it has neither check nor pools")
    if not 0.001 <= hello.patience_s <= 60.0:
        raise ValueError(f"patience_s {hello.patience_s:g} is not from 0.001 to 60")
    if hello.on_failure not in ("refuse", "pass"):
        raise ValueError(f"on_failure '{hello.on_failure}' is neither refuse nor pass")
    return hello


def answered(plugin: Any, asked: PluginRequest) -> PluginReply:
    try:
        given = (asked.request,) if asked.method == "check" else (asked.request, asked.pools)
        answer = getattr(plugin, asked.method)(*given)
        msgspec.msgpack.encode(answer)
        return PluginReply(asked.number, answer)
    except Exception as error:  # noqa: BLE001 (whatever a plugin does wrong is its own, and is told)
        return PluginReply(asked.number, error=type(error).__name__)


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended, whatever the plugin does."""
    while os.getppid() == parent:
        time.sleep(_CHECK_S)
    os._exit(0)


def main() -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # Nothing that the plugin prints may come between the answers.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    (point,) = entry_points(group=GROUP, name=sys.argv[1])
    try:
        plugin = point.load()()
        hello = hello_of(plugin)
    except Exception as error:  # noqa: BLE001 (whatever it was: the gateway says it in a line)
        hello = PluginHello(error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
    out.write(framed(hello))
    out.flush()
    if hello.error:
        return
    decode = msgspec.msgpack.Decoder(PluginRequest).decode
    while body := read_frame_now(sys.stdin.buffer):
        out.write(framed(answered(plugin, decode(body))))
        out.flush()


if __name__ == "__main__":
    main()

"""A run of nodes as a Python function: one line an operation, called without any look-up on the way."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx


def compiled(
    graph: fx.GraphModule, nodes: Sequence[fx.Node], takes: Sequence[fx.Node], leaves: Sequence[fx.Node]
) -> Callable[..., Any]:
    """Takes the values of `takes`, gives those of `leaves`; values that nobody needs any more are let go at once."""
    names: dict[fx.Node, str] = {node: f"v{number}" for number, node in enumerate(takes)}
    space: dict[str, Any] = {}

    def constant(value: Any) -> str:
        name = f"c{len(space)}"
        space[name] = value
        return name

    def written(value: Any) -> str:
        if isinstance(value, fx.Node):
            if value.op == "get_attr" and value not in names:
                names[value] = constant(getattr(graph, str(value.target)))
            return names[value]
        if isinstance(value, list | tuple):
            inside = "".join(f"{written(item)}, " for item in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        if isinstance(value, dict):
            return "{" + "".join(f"{key!r}: {written(item)}, " for key, item in value.items()) + "}"
        return repr(value) if type(value) in (int, bool, type(None), str) else constant(value)

    last = {arg: node for node in nodes for arg in node.all_input_nodes}
    ending: dict[fx.Node, list[fx.Node]] = {}
    for arg, node in last.items():
        if arg.op != "get_attr" and arg not in leaves:
            ending.setdefault(node, []).append(arg)
    lines = [f"def piece({', '.join(names[node] for node in takes)}):"]
    for number, node in enumerate(nodes):
        target = node.target._op if isinstance(node.target, torch._ops.OpOverload) else node.target
        given = [written(arg) for arg in node.args] + [f"{key}={written(arg)}" for key, arg in node.kwargs.items()]
        names[node] = f"r{number}"
        lines.append(f"    {names[node]} = {constant(target)}({', '.join(given)})")
        gone = [names[arg] for arg in ending.get(node, [])]
        if not node.users:
            gone.append(names[node])
        if gone:
            lines.append(f"    del {', '.join(gone)}")
    lines.append(f"    return ({''.join(f'{names[node]}, ' for node in leaves)})")
    exec("\n".join(lines), space)
    piece: Callable[..., Any] = space["piece"]
    return piece

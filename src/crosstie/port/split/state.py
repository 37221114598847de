"""What a module keeps in Python: saved and put back around a trace, and watched for changes between calls.

A graph has numbers, switches and addresses of tensors built in. Whoever changes one of them from outside must find
the graph thrown away, not a stale answer.
"""

from collections.abc import Iterable
from operator import getitem, is_
from typing import Any

import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# What PyTorch itself keeps in a module and does not compute with.
_OF_EVERY_MODULE = {name for name, value in vars(nn.Module()).items() if name != "training"} | {"forward"}


def holders(root: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """The dictionaries of all modules, and of the plain objects and dictionaries that they hold (a config, a cache)."""
    found: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
    for module in root.modules():
        found.setdefault(id(module.__dict__), (module, module.__dict__))
        for value in module.__dict__.values():
            inner = value if isinstance(value, dict) else getattr(value, "__dict__", None)
            if type(inner) is dict and not isinstance(value, nn.Module | torch.Tensor | type) and not callable(value):
                found.setdefault(id(inner), (module, inner))
    return list(found.values())


class PythonState:
    """Everything but the contents of tensors: attributes, and lists, dictionaries and sets that they hold."""

    def __init__(self, root: nn.Module):
        self.root = root
        self.saved = [(module, held, dict(held)) for module, held in holders(root)]
        self.contents = [
            (module, name, value, value.copy())
            for module, held, _ in self.saved
            for name, value in held.items()
            if type(value) in (list, set)
        ]

    def changed(self) -> list[tuple[nn.Module, dict[str, Any], str]]:
        """Module, dictionary and name of whatever is another object than it was."""
        found = []
        for module, held, before in self.saved:
            for name in held.keys() | before.keys():
                now, then = held.get(name, self), before.get(name, self)
                if now is not then and not (isinstance(now, _PLAIN) and same_plain(now, then)):
                    found.append((module, held, name))
        for module, name, value, before in self.contents:
            if len(value) != len(before) or not all(map(is_, value, before)):
                found.append((module, module.__dict__, name))
        return found

    def put_back(self) -> None:
        for _, held, before in self.saved:
            if held.keys() != before.keys() or not all(map(is_, held.values(), before.values())):
                held.clear()
                held.update(before)
        for _, _, value, before in self.contents:
            value.clear()
            if isinstance(value, list):
                value.extend(before)
            else:
                value.update(before)


class Guard:
    """Holds as long as what graphs have built in is what the module has.

    `living` names what changes in every call by the module's own doing: (dictionary's id, name).
    """

    def __init__(self, root: nn.Module, constants: Iterable[torch.Tensor], living: set[tuple[int, str]]):
        places = [
            (held, name)
            for _, held in holders(root)
            for name, value in held.items()
            if isinstance(value, (*_PLAIN, torch.Tensor, nn.Module))
            and name not in _OF_EVERY_MODULE
            and (id(held), name) not in living
        ]
        # Two flat lists, so that a check is two loops in C: it runs in every call.
        self.held, self.names = [held for held, _ in places], [name for _, name in places]
        self.values = list(map(getitem, self.held, self.names))
        # The root's own hooks run around its graph.
        modules = [module for module in root.modules() if module is not root]
        self.hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.hook_count = sum(map(len, self.hooks))
        self.constants = list(constants)
        self.addresses = list(map(torch.Tensor.data_ptr, self.constants))

    def holds(self) -> bool:
        try:
            return (
                (all(map(is_, map(getitem, self.held, self.names), self.values)) or self._equal())
                and list(map(torch.Tensor.data_ptr, self.constants)) == self.addresses
                and sum(map(len, self.hooks)) == self.hook_count
            )
        except KeyError:
            return False

    def _equal(self) -> bool:
        """Another object is no change where it is the same number."""
        now = list(map(getitem, self.held, self.names))
        return all(
            a is b or (isinstance(a, _PLAIN) and same_plain(a, b)) for a, b in zip(now, self.values, strict=True)
        )


def same_plain(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)

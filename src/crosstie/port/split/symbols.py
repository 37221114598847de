"""`int(count.item())` in a trace: Python's `int` insists on a number, where a symbol is at hand.

While a module is traced, `int` and `float` in the files of its classes are stand-ins that let symbols through and are
the real ones for everything else.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_STANDING_IN = ("int", "float")


class _Standing(type):
    """Answers for the built-in type in `isinstance` and in everything that is asked of the type itself."""

    real: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.real)

    def __eq__(cls, other: object) -> bool:
        return other is cls.real or other is cls

    def __hash__(cls) -> int:
        return hash(cls.real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.real, name)


def _symbol(args: Any) -> Any:
    """What stands for a number that is not known yet: the argument, or what a tensor's value is; else None."""
    value = args[0].item() if args and isinstance(args[0], torch.Tensor) else args[0] if args else None
    return value if isinstance(value, torch.SymInt | torch.SymFloat) else None


class _Int(metaclass=_Standing):
    real = int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        symbol = _symbol(args)
        if symbol is not None:
            return torch.sym_int(symbol)
        return int(*args, **kwargs)


class _Float(metaclass=_Standing):
    real = float

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        symbol = _symbol(args)
        if symbol is not None:
            return torch.sym_float(symbol)
        return float(*args, **kwargs)


@contextmanager
def symbolic_numbers(root: nn.Module) -> Iterator[None]:
    names = {type(module).__module__ for module in root.modules()}
    files = [sys.modules[name] for name in names if name in sys.modules and name.partition(".")[0] != "torch"]
    # A file that has its own `int` keeps it.
    spaces = [vars(file) for file in files if not any(name in vars(file) for name in _STANDING_IN)]
    try:
        for space in spaces:
            space.update({"int": _Int, "float": _Float})
        yield
    finally:
        for space in spaces:
            for name in _STANDING_IN:
                del space[name]

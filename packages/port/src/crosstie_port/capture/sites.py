"""Where in the user's code something happened."""

import inspect
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Site:
    file: str
    line: int | None
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


NOWHERE = Site("<unknown>", None, "")


def call_users(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls the user's code. `user_site` looks no further out than this frame."""
    return function(*args, **kwargs)


def user_site() -> Site:
    """The innermost frame outside PyTorch, numpy, the standard library and this checker."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not call_users.__code__:
        if _is_users(frame.f_code.co_filename):
            return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    return NOWHERE


def site_of(error: BaseException) -> Site:
    """The innermost frame of the user's code that the error passed."""
    site, step = NOWHERE, error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if _is_users(code.co_filename):
            site = Site(code.co_filename, step.tb_lineno, code.co_qualname)
        step = step.tb_next
    return site


def definition(function: Any) -> Site:
    """Where a function, or a module's forward, begins."""
    inner = function if inspect.isroutine(function) else getattr(function, "forward", function)
    code = getattr(inspect.unwrap(inner), "__code__", None) if callable(inner) else None
    return Site(code.co_filename, code.co_firstlineno, code.co_qualname) if code else NOWHERE


def one_line(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


@cache
def _is_users(file: str) -> bool:
    if file.startswith((*_libraries(), "<frozen")):
        return False
    # What users install stands inside the standard library's folder.
    return "/site-packages/" in file or not file.startswith(f"{sysconfig.get_path('stdlib')}/")


@cache
def _libraries() -> tuple[str, ...]:
    import numpy
    import torch

    return tuple(f"{Path(str(file)).parent}/" for file in (torch.__file__, numpy.__file__, Path(__file__).parent))

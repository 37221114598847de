"""Libraries that few tests use and that take seconds to import: imported when first asked, not as tests are collected.

if TYPE_CHECKING:
    import openai
else:
    openai = Lazily("openai")
"""

import importlib
from typing import Any


class Lazily:
    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        # pytest asks everything in a module for marks of its own, and whether it wraps a fixture.
        if name.startswith("_") or name in ("func", "fget"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)

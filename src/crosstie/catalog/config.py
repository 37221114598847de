"""A Hugging Face config.json that answers with a clear error and remembers what was asked of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstie.core.errors import BadData


class Config:
    """Reads keys of the language model, whether they stand at the top or under `text_config`."""

    def __init__(self, raw: Mapping[str, Any], file: Path | str, prefix: str = ""):
        self.file, self.prefix = file, prefix
        self.outer = raw
        text = raw.get("text_config")
        self.nested = isinstance(text, Mapping)
        self.raw: Mapping[str, Any] = text if isinstance(text, Mapping) else raw
        self.asked: set[str] = set()
        self.asked_outer: set[str] = set()

    def get(self, *names: str) -> Any:
        """The first of these keys that is there and not null; families spell the same thing apart."""
        found = None
        for name in names:
            self.asked.add(name)
            if found is None and self.raw.get(name) is not None:
                found = self.raw[name]
        return found

    def get_outer(self, name: str) -> Any:
        """A key that multimodal configs keep at the top or beside the language model."""
        self.asked_outer.add(name)
        inner = self.get(name)
        return self.outer.get(name) if inner is None else inner

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(*names)
        if value is None:
            if default is None:
                raise BadData(self.file, self._where(names[0]), "missing: this config.json lacks the field")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadData(
                self.file, self._where(names[0]), f"must be a whole number of at least {least}, not {value!r}"
            )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BadData(self.file, self._where(name), f"must be true or false, not {value!r}")
        return value

    def words(self, name: str, length: int) -> list[str] | None:
        return self._list(name, length, str)

    def counts(self, name: str, length: int | None) -> list[int] | None:
        return self._list(name, length, int)

    def _list(self, name: str, length: int | None, kind: type) -> list[Any] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise BadData(self.file, self._where(name), f"must be a list of {kind.__name__}")
        if length is not None and len(value) < length:
            raise BadData(self.file, self._where(name), f"has {len(value)} entries for {length} layers")
        return value

    def kept(self) -> dict[str, Any]:
        """The keys that were asked for and are there: what a catalog file needs to keep."""
        inner = {key: value for key, value in self.raw.items() if key in self.asked and value is not None}
        if not self.nested:
            outer = {k: v for k, v in self.outer.items() if k in self.asked_outer and v is not None}
            return {**inner, **outer}
        outer = {
            key: value
            for key, value in self.outer.items()
            if key in self.asked_outer and value is not None and key != "text_config"
        }
        return {**outer, "text_config": inner}

    def unknown(self) -> list[str]:
        """Keys that nothing asked for, as a strict data file must not have them."""
        inner = [self._where(key) for key in self.raw if key not in self.asked | self.asked_outer]
        if not self.nested:
            return inner
        outer = [key for key in self.outer if key not in self.asked_outer and key != "text_config"]
        return outer + inner

    def _where(self, name: str) -> str:
        return f"{self.prefix}{'text_config.' if self.nested else ''}{name}"

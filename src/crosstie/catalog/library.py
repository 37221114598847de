"""The catalog as one object: every file read once, every name looked up exactly.

Directories are layered: the shipped data first, then each user directory, whose files replace
shipped ones of the same id. Only what is asked for is read.
"""

import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from crosstie.catalog.accelerators import read_accelerator
from crosstie.catalog.models import read_model_file, read_model_path
from crosstie.catalog.precision import resolve as resolve_precision
from crosstie.catalog.prices import Price, read_prices
from crosstie.catalog.reading import read_toml
from crosstie.catalog.stacks import read_efficiency, read_stack, resolve_efficiency
from crosstie.core.accelerator import Accelerator
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import BadData, BadInput, UnknownName, near_names
from crosstie.core.formats import Format, Precision
from crosstie.core.model import Model
from crosstie.core.stack import Efficiency, Stack

SHIPPED = Path(__file__).parent / "data"


class _Named(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...


Noun = TypeVar("Noun", bound=_Named)


def user_directory() -> Path:
    """Where `crosstie catalog add` writes unless told otherwise."""
    given = os.environ.get("CROSSTIE_CATALOG")
    if given:
        return Path(given.split(os.pathsep)[0])
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "crosstie" / "catalog"


def user_directories() -> list[Path]:
    given = os.environ.get("CROSSTIE_CATALOG")
    if given:
        return [Path(part) for part in given.split(os.pathsep) if part]
    return [user_directory()]


class Catalog:
    """Accelerators, models, stacks, formats and prices by name."""

    def __init__(self, directories: Iterable[Path] | None = None):
        extra = user_directories() if directories is None else list(directories)
        self.directories = [SHIPPED, *extra]

    @cached_property
    def accelerators(self) -> dict[str, Accelerator]:
        return _by_id(read_accelerator(file) for file in self._files("accelerators"))

    @cached_property
    def models(self) -> dict[str, Model]:
        return _by_id(read_model_file(file) for file in self._files("models"))

    @cached_property
    def stacks(self) -> dict[str, Stack]:
        return _by_id(read_stack(file) for file in self._files("stacks"))

    @cached_property
    def formats(self) -> dict[str, Format]:
        formats: dict[str, Format] = {}
        for directory in self.directories:
            file = directory / "formats.toml"
            if file.exists():
                for key, raw in read_toml(file).items():
                    try:
                        formats[key] = msgspec.convert({"id": key, **raw}, Format)
                    except (msgspec.ValidationError, TypeError) as error:
                        raise BadData(file, key, str(error)) from None
        return formats

    @cached_property
    def prices(self) -> tuple[Price, ...]:
        found: list[Price] = []
        for directory in self.directories:
            file = directory / "prices.csv"
            if file.exists():
                found += read_prices(file, self.accelerators)
        return tuple(found)

    @cached_property
    def _efficiency_layers(self) -> dict[str, dict[str, Any]]:
        return {file.stem: read_efficiency(file) for file in self._files("efficiency")}

    def accelerator(self, name: str) -> Accelerator:
        """By id, alias, or the path of an accelerator file."""
        if name.endswith(".toml"):
            return read_accelerator(_existing(name, "accelerator file"))
        quick = self._quick("accelerators", name)
        return read_accelerator(quick) if quick else _find("accelerator", name, self.accelerators)

    def model(self, name: str) -> Model:
        """By id, alias, or the path of a model directory, config.json or catalog file."""
        path = Path(name).expanduser()
        if path.suffix == ".toml":
            return read_model_file(_existing(name, "model file"))
        if path.suffix == ".json" or path.is_dir():
            return read_model_path(path)
        quick = self._quick("models", name)
        return read_model_file(quick) if quick else _find("model", name, self.models)

    def stack(self, name: str) -> Stack:
        return _find("stack", name, self.stacks)

    def stack_for(self, accelerator: Accelerator, name: str | None = None) -> Stack:
        """The named stack, if it runs on this vendor; without a name, vLLM."""
        stack = self.stack(name or "vllm")
        if accelerator.vendor not in stack.vendors and "any" not in stack.vendors:
            fitting = [s.id for s in self.stacks.values() if accelerator.vendor in s.vendors]
            raise BadInput(
                f"{stack.name} does not run on {accelerator.id} ({accelerator.vendor}); these do: {', '.join(fitting)}"
            )
        return stack

    def precision(self, model: Model, name: str | None = None) -> Precision:
        return resolve_precision(model, name or "native", self.formats)

    def efficiency(self, accelerator: Accelerator) -> Efficiency:
        return resolve_efficiency(self._efficiency_layers, accelerator)

    def deployment(
        self,
        model: Model,
        accelerator: Accelerator,
        parallelism: Parallelism | None = None,
        precision: str | None = None,
        kv_format: str = "bf16",
        stack: str | None = None,
    ) -> Deployment:
        return Deployment(
            model=model,
            accelerator=accelerator,
            parallelism=parallelism or Parallelism(),
            precision=self.precision(model, precision),
            kv_format=kv_format,
            stack=self.stack_for(accelerator, stack),
            efficiency=self.efficiency(accelerator),
        )

    def _files(self, kind: str) -> list[Path]:
        """Files of one kind; a later directory's file replaces an earlier one of the same name."""
        by_name: dict[str, Path] = {}
        for directory in self.directories:
            for file in sorted((directory / kind).glob("*.toml")):
                by_name[file.stem] = file
        return list(by_name.values())

    def _quick(self, kind: str, name: str) -> Path | None:
        """The one file that an id names, so that a command need not read the whole catalog."""
        wanted = f"{name.casefold()}.toml"
        if "/" in wanted or "\\" in wanted:
            return None
        for directory in reversed(self.directories):
            file = directory / kind / wanted
            if file.is_file():
                return file
        return None


def check_everything(catalog: Catalog) -> str:
    """Reads every file and resolves every constant; what was found, or the first fault."""
    for accelerator in catalog.accelerators.values():
        catalog.efficiency(accelerator)
    parts = {
        "accelerators": len(catalog.accelerators),
        "models": len(catalog.models),
        "stacks": len(catalog.stacks),
        "formats": len(catalog.formats),
        "prices": len(catalog.prices),
    }
    return ", ".join(f"{count} {name}" for name, count in parts.items())


def _by_id(nouns: Iterable[Noun]) -> dict[str, Noun]:
    found: dict[str, Noun] = {}
    owners: dict[str, str] = {}
    for noun in nouns:
        found[noun.id] = noun
        for name in (noun.id, *noun.aliases):
            owner = owners.setdefault(name.casefold(), noun.id)
            if owner != noun.id:
                raise BadData(getattr(noun, "file", "") or noun.id, "aliases", f"'{name}' already names {owner}")
    return dict(sorted(found.items()))


def _find(kind: str, name: str, known: Mapping[str, Noun]) -> Noun:
    wanted = name.casefold()
    for noun in known.values():
        if wanted == noun.id.casefold() or wanted in (alias.casefold() for alias in noun.aliases):
            return noun
    # Aliases are long and many: offer one only where no id looks like the name.
    raise UnknownName(kind, name, known if near_names(name, known) else _aliases(known))


def _aliases(known: Mapping[str, Noun]) -> list[str]:
    return [alias for noun in known.values() for alias in noun.aliases]


def _existing(name: str, what: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise BadInput(f"{name}: no such {what}")
    return path

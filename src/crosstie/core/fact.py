"""A number with its reason. Nothing enters the catalog without a basis, a source and a date."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import msgspec

from crosstie.core.figures import with_unit
from crosstie.core.units import UNITS

Basis = Literal["spec", "measured", "derived", "claimed", "assumed"]
BASES: tuple[str, ...] = get_args(Basis)


class OtherSource(msgspec.Struct, frozen=True, kw_only=True):
    """What another source says of the same thing, kept beside the value that was chosen."""

    value: float | str
    unit: str = ""
    basis: Basis
    source: str
    date: str


class Sourced(msgspec.Struct, frozen=True, kw_only=True):
    """Why anyone should believe something, and what other sources say."""

    basis: Basis
    source: str
    date: str
    note: str = ""
    chosen_because: str = ""
    alternatives: tuple[OtherSource, ...] = ()


class Fact(Sourced, frozen=True, kw_only=True):
    """A measured or published quantity: `value` in `unit`."""

    value: float
    unit: str

    @property
    def si(self) -> float:
        return self.value * UNITS[self.unit].si

    def __str__(self) -> str:
        return with_unit(self.value, self.unit)


class Label(Sourced, frozen=True, kw_only=True):
    """A sourced word, such as an instruction set or a number dialect."""

    value: str

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a `Fact` may be, as the annotation of its field: a dimension, and the SI range beyond which it is a slip."""

    dimension: str
    low: float
    high: float
    meaning: str
    bases: tuple[str, ...] = BASES


@dataclass(frozen=True, slots=True)
class Word:
    """What a `Label` or a key may be, likewise: the choices, where they are closed."""

    meaning: str
    choices: tuple[str, ...] = ()
    bases: tuple[str, ...] = BASES


NounKind = Literal["accelerator", "announced accelerator", "vendor", "vendor or accelerator"]


@dataclass(frozen=True, slots=True)
class NounName:
    """What a string may be, likewise: any name that the catalog has of such a noun, which is read as its id."""

    kind: NounKind


@dataclass(frozen=True, slots=True)
class Form:
    """How a string is written, likewise: `read` gives it in its one form, or raises BadInput with what is wrong."""

    read: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class BesideFile:
    """A path, likewise, that is meant from where the file lies which names it."""


@dataclass(frozen=True, slots=True)
class Flat:
    """Of a struct in a struct: its keys stand in the table of the outer one."""


@dataclass(frozen=True, slots=True)
class FileKey:
    """What a file calls the field, where that is something else."""

    name: str


class KeyRule(NamedTuple):
    """Keys of a file's table that need another (`needs`), do not go with others (`excludes`), or leave something to be
    said (`demands`: one of them is there, so the other must be)."""

    kind: Literal["needs", "excludes", "demands"]
    keys: tuple[str, ...]
    others: tuple[str, ...]
    # OTHER: the one that is there; at `demands` it stands behind "missing: ".
    reason: str

"""How sure the corrections of a calibration are: a Gaussian posterior over the parts of all scopes, and draws of it.

Before anything is measured, the part of a constant in a scope is normal around nothing with the width of its level.
Rows of one cell (a set of scopes that occur together) say something about a few combinations of constants; each
such combination is an entry e with unit noise,

    y_e = sum over constants of entries[e, constant] x (sum of the parts of the cell's scopes) + noise

With X the entries by part, V the prior variances and C = 1 + X V X', the parts given the entries are the prior's
less V X' C^-1 (X part + noise): a draw of the prior becomes one of the posterior (Matheron's rule). `pulls` holds
C^-1 (X part + noise) of every world, so that a draw for any deployment is a sum over its scopes. A scope that nobody
measured keeps the prior's draw: less known is wider.
"""

import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from crosstie.core.errors import BadInput
from crosstie.core.estimate import CONSTANTS, METRICS
from crosstie.core.worlds import WORLDS

Array = NDArray[np.float64]
Reals = TypeVar("Reals", NDArray[np.float32], NDArray[np.float64])
PAIRS = WORLDS // 2
# What is not explained of a measurement has heavier tails than a normal distribution: Student's t.
FREEDOM = 4.0
# In place of a mode: latencies under arrivals by the clock.
CLOCK = "arrivals by the clock"
# In place of a mode: how many times as much a layout is off by that nobody measured.
NEW_LAYOUT = "a new layout"
# Rows of a matrix that are worked on at once.
_BLOCK = 128
# No constant is e^3 times as far as its estimate.
_FURTHEST = 3.0


class _Packed(msgspec.Struct, frozen=True):
    """Arrays as bytes: names of scopes in lines, then those of each cell, and so on."""

    scopes: str
    levels: str
    sizes: bytes
    members: bytes
    owners: bytes
    entries: bytes
    pulls: bytes


class Cells(msgspec.Struct, frozen=True, dict=True):
    """What was measured, as the posterior needs it."""

    # Names of scopes and of their levels, and by cell the places of its scopes among them.
    scopes: tuple[str, ...]
    levels: tuple[str, ...]
    members: tuple[NDArray[np.int16], ...]
    # By entry: its cell, and its combination of constants (entries, CONSTANTS).
    owners: NDArray[np.int16]
    entries: NDArray[np.float32]

    def variances(self, widths: Mapping[str, Sequence[float]]) -> Array:
        """(scopes, CONSTANTS), from the widths of each level."""
        return np.array([widths[level] for level in self.levels]).reshape(-1, len(CONSTANTS)) ** 2

    @cached_property
    def belongs(self) -> Array:
        """(cells, scopes): whether a cell is of a scope."""
        table = np.zeros((len(self.members), len(self.scopes)))
        for row, own in zip(table, self.members, strict=True):
            row[own] = 1.0
        return table

    def shared(self, variances: Array) -> "list[AlikeConstants]":
        return SharedScopes(self.belongs, self.levels).alike(variances)

    def drawn(self, variances: Array, first: int = 0) -> Array:
        """(entries from `first` on, PAIRS): what each world's prior parts and noise make of the entries."""
        owners, place = np.unique(self.owners[first:], return_inverse=True)
        belongs = self.belongs[owners]
        used = np.flatnonzero(belongs.any(axis=0))
        parts = np.stack([prior_draws(self.scopes[scope]) for scope in used]) * np.sqrt(variances[used])[:, :, None]
        by_cell = np.tensordot(belongs[:, used], parts, axes=1)
        noise = _seeded(f"noise of {first} to {len(self.owners)}").standard_normal((len(place), PAIRS))
        return np.asarray(np.einsum("ek,ekw->ew", self.entries[first:], by_cell[place]) + noise)


class Posterior(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    # Level, in its words, to the prior width of each constant there.
    widths: dict[str, tuple[float, ...]]
    # Mode, or mode and stack, and accelerator, to metric to the scale of what a measurement is off by besides.
    scales: dict[str, dict[str, float]]
    packed: str
    # What was measured here, in the words of `Calibration.points`, to metric to its own scale.
    measured: dict[str, dict[str, float]] = {}

    @cached_property
    def _unpacked(self) -> tuple[Cells, NDArray[np.float16]]:
        try:
            raw = msgspec.msgpack.decode(zlib.decompress(base64.b64decode(self.packed)), type=_Packed)
        except (ValueError, zlib.error, msgspec.MsgspecError):
            raise BadInput("the calibration's posterior cannot be unpacked: make the calibration again") from None
        sizes, members = np.frombuffer(raw.sizes, np.int16), np.frombuffer(raw.members, np.int16)
        owners = np.frombuffer(raw.owners, np.int16)
        cells = Cells(
            scopes=tuple(raw.scopes.split("\n")) if raw.scopes else (),
            levels=tuple(raw.levels.split("\n")) if raw.levels else (),
            members=tuple(np.split(members, np.cumsum(sizes)[:-1])) if len(sizes) else (),
            owners=owners,
            entries=np.frombuffer(raw.entries, np.float32).reshape(len(owners), len(CONSTANTS)),
        )
        return cells, np.frombuffer(raw.pulls, np.float16).reshape(len(owners), PAIRS)

    @property
    def cells(self) -> Cells:
        return self._unpacked[0]

    @property
    def pulls(self) -> Array:
        return self._unpacked[1].astype(np.float64)

    @cached_property
    def _draws(self) -> dict[str, Array]:
        return {}

    @cached_property
    def _places(self) -> dict[str, NDArray[np.intp]]:
        """By scope: its entries."""
        cells = self.cells
        of_cell: dict[int, list[int]] = {}
        for entry, owner in enumerate(cells.owners.tolist()):
            of_cell.setdefault(owner, []).append(entry)
        by_scope: dict[str, list[int]] = {}
        for cell, members in enumerate(cells.members):
            for scope in members.tolist():
                by_scope.setdefault(cells.scopes[scope], []).extend(of_cell.get(cell, ()))
        return {scope: np.array(entries, np.intp) for scope, entries in by_scope.items()}

    def scope_draws(self, scope: str, level: str) -> Array:
        """(CONSTANTS, PAIRS): by how much the part of a scope is off in each world."""
        if scope not in self._draws:
            width = np.array(self.widths[level])
            draws = prior_draws(scope) * width[:, None]
            entries = self._places.get(scope)
            if entries is not None and len(entries):
                cells, pulls = self._unpacked
                # By BLAS hundreds of such small products take longer to share out than to multiply.
                told = np.einsum(
                    "ec,ep->cp", cells.entries[entries].astype(np.float64), pulls[entries].astype(np.float64)
                )
                draws = draws - (width**2)[:, None] * told
            self._draws[scope] = draws
        return self._draws[scope]

    def factor(self, shared: "Sequence[AlikeConstants]") -> NDArray[np.float32]:
        """The Cholesky factor of how its entries vary together, in single precision, which is a thousandth of what is
        not known and half of the time; seconds of work, done once. `shared`: of its own cells first, then any."""
        if "_lower" not in self.__dict__:
            cells = self.cells
            self.__dict__["_lower"] = np.linalg.cholesky(
                covariance(cells.entries, cells.owners.astype(np.intp), shared)
            )
        lower: NDArray[np.float32] = self.__dict__["_lower"]
        return lower

    def constants(self, scopes: list[tuple[str, str]]) -> Array:
        """(WORLDS, CONSTANTS) of a deployment that falls in these scopes, each with its level."""
        half = np.sum([self.scope_draws(scope, level) for scope, level in scopes if level in self.widths], axis=0)
        return mirrored(np.clip(half, -_FURTHEST, _FURTHEST).T)

    def scales_of(self, mode: str, stack: str, accelerator: str) -> dict[str, float]:
        """By metric, from the nearest that was learnt."""
        names = ("", mode, scale_name(mode, stack), scale_name(mode, stack, accelerator))
        return {metric: scale for name in names for metric, scale in self.scales.get(name, {}).items()}

    def metrics(self, name: str, scales: Mapping[str, float], seen: bool = True) -> Array:
        """(WORLDS, METRICS): what measurements of one configuration are off by besides its constants; `seen`: others
        measured its layout."""
        more = {} if seen else self.scales.get(NEW_LAYOUT, {})
        known = {metric: scale * more.get(metric, 1.0) for metric, scale in scales.items()}
        known |= self.measured.get(name, {})
        rng = _seeded(f"metrics of {name}")
        half = rng.standard_t(FREEDOM, (PAIRS, len(METRICS))) * [known.get(metric, 0.0) for metric in METRICS]
        return mirrored(np.clip(half, -_FURTHEST, _FURTHEST))

    def acceptance(self, name: str) -> Array:
        return mirrored(_seeded(f"acceptance of {name}").standard_normal(PAIRS))


def mirrored(half: Array) -> Array:
    """Draws come in pairs of opposite sign."""
    return np.concatenate([half, -half])


def scale_name(*words: str) -> str:
    return " / ".join(words)


class AlikeConstants(NamedTuple):
    """Constants whose variances are the same in all scopes, and (cells, cells) the variance of what cells share."""

    constants: list[int]
    between: NDArray[np.float32]


class SharedScopes:
    """How many scopes of each level two cells share."""

    def __init__(self, belongs: Array, levels: Sequence[str]):
        names = np.array(levels)
        self._first = [levels.index(level) for level in dict.fromkeys(levels)]
        self._shared = np.zeros((len(self._first), len(belongs), len(belongs)), np.float32)
        for shared, first in zip(self._shared, self._first, strict=True):
            scopes = np.flatnonzero(names == names[first])
            cells = np.flatnonzero(belongs[:, scopes].any(axis=1))
            own = belongs[np.ix_(cells, scopes)].astype(np.float32)
            shared[np.ix_(cells, cells)] = own @ own.T

    def alike(self, variances: Array) -> list[AlikeConstants]:
        """From the variances of scopes, which are those of their levels."""
        by_level = variances[self._first].astype(np.float32)
        constants: dict[bytes, list[int]] = {}
        for i in np.flatnonzero(by_level.any(axis=0)):
            constants.setdefault(by_level[:, i].tobytes(), []).append(int(i))
        together = np.tensordot(by_level[:, [same[0] for same in constants.values()]].T, self._shared, axes=1)
        return [AlikeConstants(same, between) for same, between in zip(constants.values(), together, strict=True)]


def covariance(entries: Reals, owners: NDArray[np.integer[Any]], shared: Sequence[AlikeConstants]) -> Reals:
    """C: how entries vary together, noise and all, in the precision of the entries. Block by block, which a processor's
    cache holds."""
    covaried = np.eye(len(owners), dtype=entries.dtype)
    tables = [(entries[:, same.constants], same.between.astype(entries.dtype)) for same in shared]
    for begin in range(0, len(owners), _BLOCK):
        rows, before = slice(begin, begin + _BLOCK), slice(0, begin + _BLOCK)
        for told, between in tables:
            cells = np.take(between[owners[rows]], owners[before], axis=1)
            covaried[rows, before] += cells * (told[rows] @ told[before].T)
        covaried[:begin, rows] = covaried[rows, :begin].T
    return covaried


def solve_lower(lower: Reals, right: Reals, transposed: bool = False) -> Reals:
    """A triangular system, or that of its transpose, which numpy alone has no function for."""
    solved = right.copy()
    begins = range(0, len(lower), _BLOCK)
    for begin in reversed(begins) if transposed else begins:
        own = slice(begin, begin + _BLOCK)
        if transposed:
            rest = slice(begin + _BLOCK, None)
            solved[own] = np.linalg.solve(lower[own, own].T, solved[own] - lower[rest, own].T @ solved[rest])
        else:
            solved[own] = np.linalg.solve(lower[own, own], solved[own] - lower[own, :begin] @ solved[:begin])
    return solved


def pack(
    widths: dict[str, tuple[float, ...]],
    scales: dict[str, dict[str, float]],
    cells: Cells,
    pulls: Array,
    measured: dict[str, dict[str, float]] | None = None,
) -> Posterior:
    raw = _Packed(
        scopes="\n".join(cells.scopes),
        levels="\n".join(cells.levels),
        sizes=np.array([len(member) for member in cells.members], np.int16).tobytes(),
        members=np.concatenate(cells.members).astype(np.int16).tobytes() if cells.members else b"",
        owners=cells.owners.astype(np.int16).tobytes(),
        entries=cells.entries.astype(np.float32).tobytes(),
        pulls=pulls.astype(np.float16).tobytes(),
    )
    text = base64.b64encode(zlib.compress(msgspec.msgpack.encode(raw), 6)).decode()
    return Posterior(widths=widths, scales=scales, packed=text, measured=measured or {})


def prior_draws(scope: str) -> Array:
    """(CONSTANTS, PAIRS) standard normal numbers of a scope: the same wherever it is asked about."""
    return _seeded(scope).standard_normal((len(CONSTANTS), PAIRS))


def _seeded(name: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]))

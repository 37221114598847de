"""The calibration: corrections of constants by scope, made by `crosstie calibrate` and applied here.

A constant's correction is a sum of parts, one for each scope that a deployment falls in: its family, its
accelerator, its stack, its model and so on. Scopes without measurements have no part, so a deployment
inherits what is known nearest to it.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from crosstie.catalog.posterior import Posterior
from crosstie.catalog.reading import read_toml
from crosstie.catalog.writing import json_rows
from crosstie.core.deployment import Deployment
from crosstie.core.errors import BadData
from crosstie.core.estimate import CONSTANTS, DRAFTING, Correction
from crosstie.core.model import Model
from crosstie.core.worlds import Worlds

FORMAT = 3
_WORDS_OF_POINTS = ("family", "accelerator", "stack", "bits", "model", "layout", "gpus")
_WIDTHS = ("4-bit", "8-bit", "16-bit")
# What an estimate has in place of a release, a campaign and a publisher: those of whoever asks. Own measurements have
# the same, so they tell of it; where there are none, it is as little known as any new publisher's.
HERE = {"release": "release here", "campaign": "campaign here", "source": "source here"}
Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
# A constant that is e^20 times the catalog's is a slip.
_FURTHEST = 20.0


class CalibrationSubject(NamedTuple):
    """What a measurement or an estimate is of, in the words that scopes are made of."""

    vendor: str
    family: str
    accelerator: str
    stack: str
    bits: str
    kind: str
    model: str
    layout: str
    # Of a measurement only: the engine's release, the kind of campaign it belongs to, and who published it.
    release: str = ""
    campaign: str = ""
    source: str = ""
    gpus: str = "1"
    # Of a measurement: its month, "2026-05". An estimate is of today's software.
    month: str = ""
    # What it does beyond plain serving, "speculative" or "apart"; corrections of that leave plain serving alone.
    mode: str = ""

    @property
    def speculative(self) -> str:
        return "speculative" if self.mode.startswith("speculative") else ""

    @property
    def apart(self) -> str:
        return "apart" if self.mode.endswith("apart") else ""

    @property
    def both(self) -> str:
        return self.mode if self.speculative and self.apart else ""


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of scope: the words that tell its scopes apart, and how far a constant may move in one.

    `width` is the standard deviation of the logarithm that is expected before anything is measured.
    """

    words: tuple[str, ...]
    width: float

    @property
    def name(self) -> str:
        return " / ".join(self.words) or "all"

    def moves(self, constant: str) -> bool:
        """Scopes of speculation move what only speculation has, and others what all serving has: so that no
        calibration makes a step faster for having drafts."""
        return (constant in DRAFTING) == bool({"speculative", "both"} & set(self.words))


def _levels(rows: list[dict[str, Any]]) -> tuple[Level, ...]:
    return tuple(Level(tuple(row["words"]), row["width"]) for row in rows)


_DATA = read_toml(Path(__file__).parent / "data" / "levels.toml")
LEVELS = _levels(_DATA["serving"])
MODE_LEVELS = {mode: _levels(rows) for mode, rows in _DATA["modes"].items()}
ALL_LEVELS = (*LEVELS, *(level for levels in MODE_LEVELS.values() for level in levels))

# Software gets faster with time. What it gained since each of these counts for everything measured later, so that an
# estimate, which is of today's, has all of it.
SINCE = ("2025-01", "2025-07", "2026-01", "2026-07")


def scopes(subject: CalibrationSubject) -> list[str]:
    """The scopes that a subject falls in, in the order of LEVELS; none for a word that is not known."""
    return [scope for level in ALL_LEVELS for scope in scopes_of(level, subject)]


def scopes_of(level: Level, subject: CalibrationSubject) -> list[str]:
    """One, or none; of a level with "since", one for each time that has passed."""
    words = [getattr(subject, word) for word in level.words if word != "since"]
    if any(value == "" for value in words):
        return []
    if "since" not in level.words:
        return [" / ".join(words) or "all"]
    return [" / ".join((*words, f"since {mark}")) for mark in SINCE if not subject.month or subject.month >= mark]


def here(subject: CalibrationSubject) -> CalibrationSubject:
    """What an estimate does not say of itself is its user's own."""
    return subject._replace(**{word: getattr(subject, word) or own for word, own in HERE.items()})


def leveled_scopes(subject: CalibrationSubject) -> list[tuple[str, str]]:
    """Every scope of a subject with its level's name."""
    return [(scope, level.name) for level in ALL_LEVELS for scope in scopes_of(level, here(subject))]


def subject_of(
    deployment: Deployment,
    release: str = "",
    campaign: str = "",
    source: str = "",
    month: str = "",
    apart: bool = False,
) -> CalibrationSubject:
    accelerator, split = deployment.accelerator, deployment.parallelism
    spread = [name for name, n in (("experts spread", split.ep), ("attention replicas", split.dp)) if n > 1]
    return CalibrationSubject(
        vendor=accelerator.vendor,
        family=accelerator.family,
        accelerator=accelerator.id,
        stack=deployment.stack.id,
        bits=f"{deployment.weight_width}-bit",
        kind=kind_of(deployment.model),
        model=architecture_of(deployment.model),
        layout=" and ".join(spread) or "plain layout",
        release=release,
        campaign=campaign,
        source=source,
        gpus=str(split.gpus),
        month=month,
        mode=" and ".join(["speculative"] * (deployment.speculation is not None) + ["apart"] * apart),
    )


def kind_of(model: Model) -> str:
    """Models that run through the same kinds of kernels."""
    if not model.is_moe:
        return "dense"
    latent = any(scan.kv_heads == 1 and scan.query_heads > 1 for layer in model.layers for scan in layer.scans)
    return "latent mixture" if latent else "mixture"


def architecture_of(model: Model) -> str:
    """Models of equal shape run equally fast: fine-tunes and later checkpoints share one name."""
    return f"{model.layer_count} x {model.hidden}, {model.parameters / 1e9:.0f}B"


# Points by the first words of their keys: family; accelerator; stack; bits, or "" for any, and model; or the whole key.
Counted = Mapping[tuple[str, ...], int]


def counted(points: Mapping[str, int]) -> Counted:
    counts: Counter[tuple[str, ...]] = Counter()
    for key, count in points.items():
        for some in _beginnings(key):
            counts[some] += count
    return counts


def _beginnings(key: str) -> tuple[tuple[str, ...], ...]:
    words = tuple(key.split(" / "))
    here, model = words[:3], words[4]
    return here[:1], here[:2], here, words[:5], (*here, "", model), words


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """What was learnt from measured results; `empty()` where nothing was."""

    format: int
    made: dict[str, str]
    results: list[dict[str, str | int]]
    constants: tuple[str, ...]
    # Scope to the logarithms of the factors, in the order of `constants`.
    scopes: dict[str, tuple[float, ...]]
    # "family / accelerator / stack / bits / model / layout / gpus" to the number of points measured there.
    points: dict[str, int]
    # How sure all of it is; None where nothing was learnt.
    posterior: Posterior | None = None
    # As `points`, to the fewest and most requests in flight a GPU there.
    loads: dict[str, tuple[float, float]] = {}
    # Cross-validated errors, as printed by `crosstie calibrate`.
    errors: dict[str, dict[str, dict[str, float]]] = {}
    # What was left out, by metric: rows, the share that 80% intervals hold, and how wide these are, high over low.
    coverage: dict[str, dict[str, dict[str, float]]] = {}

    def correction(self, subject: CalibrationSubject) -> Correction:
        nearness, points, basis = self.evidence(subject)
        return Correction(
            factors=self.factors(subject),
            worlds=self.worlds(subject),
            nearness=nearness,
            points=points,
            basis=basis,
            loads=self._loads_near(subject),
        )

    def worlds(self, subject: CalibrationSubject) -> Worlds | None:
        posterior = self.posterior
        if posterior is None:
            return None

        words = _point_words(subject)
        scales = posterior.scales_of(subject.mode, subject.stack, subject.accelerator)

        def make() -> tuple[Array, Array, Array]:
            return (
                posterior.constants(leveled_scopes(subject)),
                posterior.metrics(" / ".join(words), scales, seen=bool(self._counted.get(words))),
                posterior.acceptance(f"{subject.model} {subject.mode}"),
            )

        return Worlds(make)

    def knows_kind(self, subject: CalibrationSubject) -> bool:
        """Whether the stack was measured on the accelerator with models of that kind, in weights of any width."""
        names = (f"{subject.stack} / {subject.kind} / {bits} / {subject.accelerator}" for bits in _WIDTHS)
        return any(name in self.scopes for name in names)

    def factors(self, subject: CalibrationSubject) -> dict[str, float]:
        # No scope is of so many GPUs: layouts of one kind share their factors.
        kind = here(subject)._replace(gpus="")
        if kind not in self._factors:
            parts = [
                (level, self.scopes[scope])
                for level in ALL_LEVELS
                for scope in scopes_of(level, kind)
                if scope in self.scopes
            ]
            self._factors[kind] = {
                name: math.exp(sum(part[i] for level, part in parts if level.moves(name)))
                for i, name in enumerate(self.constants)
            }
        return self._factors[kind]

    @cached_property
    def _factors(self) -> dict[CalibrationSubject, dict[str, float]]:
        return {}

    def evidence(self, subject: CalibrationSubject) -> tuple[str, int, str]:
        """How near the measurements are, how many they are, and both in words."""
        return evidence(self._counted, subject)

    @cached_property
    def _counted(self) -> Counted:
        return counted(self.points)

    def _loads_near(self, subject: CalibrationSubject) -> tuple[float, float] | None:
        """The fewest and most requests in flight a GPU of the points nearest to a subject."""
        own = _point_words(subject)
        ways = (own, own[:5], (*own[:3], "", own[4]), own[:3], own[:2], own[:1])
        near = next((words for words in ways if self._counted.get(words)), None)
        return self._load_ranges.get(near) if near else None

    @cached_property
    def _load_ranges(self) -> dict[tuple[str, ...], tuple[float, float]]:
        ranges: dict[tuple[str, ...], tuple[float, float]] = {}
        for key, (low, high) in self.loads.items():
            for some in _beginnings(key):
                least, most = ranges.get(some, (low, high))
                ranges[some] = min(least, low), max(most, high)
        return ranges


def evidence(points: Counted, subject: CalibrationSubject) -> tuple[str, int, str]:
    """How near the measured points are to a subject, how many they are, and both in words."""
    family, a, s, bits, model = subject.family, subject.accelerator, subject.stack, subject.bits, subject.model
    here = points.get((family, a, s), 0)
    width = (
        f"{subject.layout}{', ' * bool(subject.mode)}{subject.mode} on {subject.gpus} GPU{'s' * (subject.gpus != '1')}"
    )
    own = points.get(_point_words(subject), 0)
    if own:
        said = f"{own} measured points of this model in {bits} weights on {a} with {s}, of {here} there"
        return "model", own, said
    # From near to far: how many, to what they are extrapolated, and what they are of.
    for nearness, count, to, of in (
        ("layout", points.get((family, a, s, bits, model)), width, f"this model in {bits} weights on {a} with {s}"),
        ("stack", points.get((family, a, s, "", model)), f"{bits} weights", f"this model in others on {a} with {s}"),
        ("stack", here, "this model", f"others on {a} with {s}"),
        ("accelerator", points.get((family, a)), s, f"{a} with other stacks"),
        ("family", points.get((family,)), a, f"the {family} family"),
    ):
        if count:
            return nearness, count, f"extrapolated to {to} from {count} measured points of {of}"
    return "nothing", 0, f"extrapolated: no measured point of {a} or its family"


def points_key(subject: CalibrationSubject) -> str:
    return " / ".join(_point_words(subject))


def _point_words(subject: CalibrationSubject) -> tuple[str, ...]:
    if subject.mode:
        subject = subject._replace(layout=f"{subject.layout}, {subject.mode}")
    return tuple(getattr(subject, word) for word in _WORDS_OF_POINTS)


def empty() -> Calibration:
    return Calibration(format=FORMAT, made={}, results=[], constants=CONSTANTS, scopes={}, points={})


def read_calibration(file: Path) -> Calibration:
    try:
        read = msgspec.json.decode(file.read_bytes(), type=Calibration)
    except OSError as error:
        raise BadData(file, "", f"cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise BadData(file, "", f"is no calibration: {error}") from None
    if read.format != FORMAT:
        raise BadData(file, "format", f"is {read.format}; this version reads {FORMAT}. Make it again with calibrate")
    if len(set(read.constants)) != len(read.constants):
        raise BadData(file, "constants", "has a constant twice")
    unknown = [name for name in read.constants if name not in CONSTANTS]
    if unknown:
        raise BadData(file, "constants", f"'{unknown[0]}' is no constant of this version; make the file again")
    for scope, parts in read.scopes.items():
        if len(parts) != len(read.constants) or max(map(abs, parts), default=0.0) > _FURTHEST:
            raise BadData(file, f"scopes.{scope}", f"must have {len(read.constants)} numbers from -20 to 20")
    for key, count in read.points.items():
        if len(key.split(" / ")) != len(_WORDS_OF_POINTS) or count < 1:
            raise BadData(file, f"points.{key}", f"must be a count of {' / '.join(_WORDS_OF_POINTS)}")
    for key, (low, high) in read.loads.items():
        if key not in read.points or not 0.0 < low <= high:
            raise BadData(file, f"loads.{key}", "must be the fewest and most requests a GPU of a key of points")
    for level, widths in read.posterior.widths.items() if read.posterior else ():
        if len(widths) != len(CONSTANTS) or not all(0.0 <= width <= _FURTHEST for width in widths):
            raise BadData(file, f"posterior.widths.{level}", f"must have {len(CONSTANTS)} numbers from 0 to 20")
    return read


def calibration_text(calibration: Calibration) -> str:
    """One scope a line, so that a change of the file can be read."""
    return json_rows(msgspec.to_builtins(calibration))

"""The folder of a loop: what was asked, prepared, designed and measured so far, each file there whole or not at all.

loop.json          what was asked, how the engine is started, the design with its predictions, seconds spent
points/NAME.json   a file of `crosstie bench` for each point that was measured to its end
engine.log         what the engine said
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from crosstie.catalog.reading import text_of
from crosstie.catalog.writing import in_words, write_text
from crosstie.core.errors import BadData, BadInput
from crosstie.prove.loop.design import LoopPoint

FORMAT = 1
# What may be asked otherwise when a loop goes on: none of it changes what was measured.
_MAY_CHANGE = ("minutes", "workload", "quick")


class LoopAsked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As the options of the command have it; "" and None: nobody said."""

    model: str = ""
    accelerator: str = ""
    engine: str = ""
    engine_command: str = ""
    engine_args: str = ""
    precision: str = ""
    tp: int | None = None
    context: int | None = None
    endpoint: str = ""
    emulate: str = ""
    speed: float = 1.0
    prompts: str = ""
    points: int = 8
    minutes: float = 20.0
    workload: str = ""
    quick: bool = False

    def gone_on_with(self, given: dict[str, Any], folder: Path) -> "LoopAsked":
        """With what may change; what else was given must be what it was begun with."""
        for name, value in given.items():
            was = getattr(self, name)
            if name not in _MAY_CHANGE and was != value:
                option = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
                raise BadInput(f"{folder}: was begun with {option} {was!r}, not {value!r}: use another --out")
        return msgspec.structs.replace(self, **{name: given[name] for name in _MAY_CHANGE if name in given})


class PreparedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured and how it is started; worked out once, so that a loop that goes on measures the same."""

    # As results have them: accelerator, model, precision, engine, tp.
    conditions: dict[str, str]
    # In words, for reports.
    replica: str
    # What requests are told to ask for: a folder where the model is one; None for the only one served.
    asks_for: str | None = None
    emulated: bool = False
    # Tokens of a request that it takes.
    longest: int = 0
    # Nothing where an engine runs already.
    command: list[str] = []
    variables: dict[str, str] = {}
    health: str = "/health"
    start_s: float = 0.0
    doctor: dict[str, Any] = {}
    # What the recipe and preflight have to say.
    notes: list[str] = []


class LoopState(msgspec.Struct, kw_only=True):
    format: int = FORMAT
    asked: LoopAsked
    prepared: PreparedReplica | None = None
    # What the plan or everybody asks, with what was predicted of it before.
    questions: list[LoopPoint] = []
    design: list[LoopPoint] = []
    # Real seconds in all, and until the engine was healthy, each time that it was started.
    spent_s: float = 0.0
    starts_s: list[float] = []
    # Of the calibration that predictions are by.
    calibration: dict[str, Any] = {}


class LoopFolder:
    def __init__(self, path: Path):
        self.path = path
        self.points = path / "points"
        self.log = path / "engine.log"
        self.state = path / "loop.json"

    @contextmanager
    def held(self) -> Iterator[None]:
        """By one loop at a time; the lock goes with its process, however that ends."""
        with in_words(f"--out {self.path}: cannot be written"):
            self.points.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadInput(f"--out {self.path}: another loop is at work there") from None
            yield

    def read(self) -> LoopState | None:
        """None where nothing was begun."""
        if not self.state.exists():
            return None
        try:
            loop_state = msgspec.json.decode(text_of(self.state), type=LoopState)
        except msgspec.DecodeError as error:
            raise BadData(str(self.state), "", f"cannot be gone on with: {error}") from None
        if loop_state.format != FORMAT:
            raise BadData(str(self.state), "format", f"is {loop_state.format}; this version reads {FORMAT}")
        return loop_state

    def write(self, file: Path, document: object) -> None:
        write_text(file, msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")

    def point_file(self, point: LoopPoint) -> Path:
        return self.points / f"{point.name}.json"

    def measured(self, state: LoopState) -> dict[str, dict[str, Any]]:
        """By name of the point: what was measured to its end."""
        by_name = {}
        for point in state.design:
            file = self.point_file(point)
            if file.exists():
                document = msgspec.json.decode(text_of(file))
                if document.get("complete"):
                    by_name[point.name] = document["endpoints"][0]["points"][0]
        return by_name

"""What a gateway's workers say to each other, decoded strictly, over sockets in a folder of their own."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from crosstie.core.errors import CrosstieError
from crosstie.route.load import State
from crosstie_gateway.gateway.errors import RequestRejected
from crosstie_gateway.service.admin_view import DecisionView, FleetView
from crosstie_gateway.service.history import SeriesRows
from crosstie_gateway.service.overlay import Change
from crosstie_gateway.service.trial_view import TrialView
from crosstie_gateway.wire.frames import framed, read_frame

# What a worker may take to answer; one that is busy for longer is left out.
_PATIENCE_S = 2.0
# How long a change waits for that of another worker, and how often it tries.
_TURN_S, _TRY_S = 15.0, 0.005


class _Message(msgspec.Struct, frozen=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    """Its class is its tag."""


# Metrics


class MetricsRequest(_Message, frozen=True):
    """Answered by `MetricsPage`."""


class MetricsPage(_Message, frozen=True):
    row: int
    page: str


# Administration


class ChangesRequest(_Message, frozen=True):
    """Answered by `Changes`."""


class Changes(_Message, frozen=True):
    """What administrators have changed, all of it. As a request, these hold from now on: answered by `Done`."""

    revision: int
    changes: tuple[Change, ...]


class ReloadRequest(_Message, frozen=True):
    """The fleet file is to be read again: answered by `Done`."""


class FleetRequest(_Message, frozen=True):
    """Answered by `FleetAnswer`."""


class FleetAnswer(_Message, frozen=True):
    fleet: FleetView


class DecisionsRequest(_Message, frozen=True):
    """Answered by `Decisions`: the latest `most` of them."""

    most: int
    # How many of each process are known already; those of others from now on.
    after: dict[str, int] | None = None
    # Whether someone wants to know of the alternatives too.
    explain: bool = False
    # The id of a request: its own decision alone, with what each pool would be worth to it now.
    why: str = ""
    # Of the sampled ones, those taken from the first of these times up to the second.
    moment: tuple[float, float] | None = None


class Decisions(_Message, frozen=True):
    process: str
    # How many it has ever taken, and how many of those that were asked for it has no more.
    taken: int
    skipped: int
    rows: list[DecisionView]


class HistoryRequest(_Message, frozen=True):
    """Answered by `HistoryAnswer`: the `count` slots of that width before the slot `end`."""

    width_s: int
    end: int
    count: int


class HistoryAnswer(_Message, frozen=True):
    requests: list[SeriesRows]
    pools: list[SeriesRows]


class SessionEnded(_Message, frozen=True):
    """Somebody has signed out: answered by `Done`."""

    name: str
    ends_at: int


class WrongKey(_Message, frozen=True):
    """Somebody tried one at the page of operators: answered by `Done`."""

    address: str


# Responses


class ResponseKept(_Message, frozen=True):
    """A backend keeps a response of a key: answered by `Done`."""

    key_id: int
    response: str
    home: str


# Pools on trial


class TrialsRequest(_Message, frozen=True):
    """Answered by `TrialsAnswer`."""


class TrialsAnswer(_Message, frozen=True):
    trials: tuple[TrialView, ...]


class TrialStopped(_Message, frozen=True):
    """A canary has ended: answered by `Done`."""

    pool: str
    why: str


# Models of shared pools


class LeaderState(_Message, frozen=True):
    """Of each replica its state and why; of each model loaded nowhere why, and when to ask again. `FollowerLoad`
    answers it."""

    states: dict[str, tuple[State, str]]
    absent: dict[str, tuple[str, float]]


class FollowerReport(_Message, frozen=True):
    """Requests by model since the last one, and the models that somebody waits for. A leader answers `LeaderState`."""

    process: int
    asked: dict[str, int]
    waiting: list[str]


class FollowerLoad(_Message, frozen=True):
    """Requests in flight by backend."""

    in_flight: dict[str, int]


class Done(_Message, frozen=True):
    """It was done, or there was nothing to do."""


class Failed(_Message, frozen=True):
    why: str


WorkerRequest = (
    MetricsRequest | ChangesRequest | Changes | ReloadRequest | FleetRequest | DecisionsRequest | HistoryRequest
    | LeaderState | FollowerReport | ResponseKept | SessionEnded | WrongKey | TrialsRequest | TrialStopped
)  # fmt: skip
WorkerAnswer = (
    MetricsPage | Changes | FleetAnswer | Decisions | HistoryAnswer | LeaderState | FollowerLoad | TrialsAnswer | Done
    | Failed
)  # fmt: skip
# What a worker can be asked, by the class of the request.
Handlers = dict[type, Callable[[Any], WorkerAnswer]]
decode_request: Callable[[bytes], WorkerRequest] = msgspec.msgpack.Decoder(WorkerRequest).decode
decode_answer: Callable[[bytes], WorkerAnswer] = msgspec.msgpack.Decoder(WorkerAnswer).decode


class WorkerLink:
    """To the other workers. `handlers` is what this one can be asked; they may be added later."""

    def __init__(self, folder: Path, row: int, workers: int, handlers: Handlers):
        # The folder is the workers' alone, as long as they live.
        self.folder, self._row, self._workers, self._handlers = folder, row, workers, handlers
        self._server: asyncio.Server | None = None

    def _at(self, row: int) -> str:
        return str(self.folder / f"worker-{row}")

    async def open(self) -> None:
        # What a worker in this place has left behind when it was killed.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(self._row))
        self._server = await asyncio.start_unix_server(self._answer, self._at(self._row))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(OSError):
            os.unlink(self._at(self._row))

    async def ask(self, request: WorkerRequest) -> list[WorkerAnswer]:
        """What each of the others answers, in their order; those that do not are left out."""
        others = [row for row in range(self._workers) if row != self._row]
        answers = await asyncio.gather(*(self._ask_one(row, request) for row in others))
        return [answer for answer in answers if answer is not None]

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Only one of the workers at a time has it; the kernel takes it from one that dies."""
        with (self.folder / "turn").open("w") as file:
            deadline = monotonic() + _TURN_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if monotonic() > deadline:
                        why = "another worker is making a change and does not come to an end; try again"
                        raise RequestRejected(503, why, "busy") from None
                    await asyncio.sleep(_TRY_S)
            yield

    async def _ask_one(self, row: int, request: WorkerRequest) -> WorkerAnswer | None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                reader, writer = await asyncio.open_unix_connection(self._at(row))
                with contextlib.closing(writer):
                    writer.write(framed(request))
                    return decode_answer(await read_frame(reader))
        except (OSError, EOFError, TimeoutError, msgspec.DecodeError):
            # Not there yet, gone, or not to be woken.
            return None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError, msgspec.DecodeError):
            request = decode_request(await read_frame(reader))
            handler = self._handlers.get(type(request))
            answer: WorkerAnswer
            try:
                answer = Failed(f"no {type(request).__name__} here") if handler is None else handler(request)
            except CrosstieError as error:
                answer = Failed(str(error))
            writer.write(framed(answer))
            await writer.drain()

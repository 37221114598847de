"""What the workers of one gateway say to each other: requests, and what answers them. Decoded strictly."""

from collections.abc import Callable
from typing import Any

import msgspec

from crosstie.route.load import State
from crosstie.run.service.admin_view import DecisionView, FleetView
from crosstie.run.service.overlay import Change


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


class Decisions(_Message, frozen=True):
    process: str
    # How many it has ever taken, and how many of those that were asked for it has no more.
    taken: int
    skipped: int
    rows: list[DecisionView]


# Models of shared pools


class LeaderState(_Message, frozen=True):
    """Of each replica its state and why; of each model that is loaded nowhere why, and when to ask again.

    As a request, answered by `FollowerLoad`.
    """

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
    MetricsRequest | ChangesRequest | Changes | ReloadRequest | FleetRequest | DecisionsRequest | LeaderState
    | FollowerReport
)  # fmt: skip
WorkerAnswer = MetricsPage | Changes | FleetAnswer | Decisions | LeaderState | FollowerLoad | Done | Failed
# What a worker can be asked, by the class of the request.
Handlers = dict[type, Callable[[Any], WorkerAnswer]]
# Not JSON, which has no infinity.
encode = msgspec.msgpack.Encoder().encode
decode_request: Callable[[bytes], WorkerRequest] = msgspec.msgpack.Decoder(WorkerRequest).decode
decode_answer: Callable[[bytes], WorkerAnswer] = msgspec.msgpack.Decoder(WorkerAnswer).decode

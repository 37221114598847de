"""What can go wrong with a replica, on request: faults as JSON or as a line of a script, and which requests each hits.

Seconds are emulated ones. Shares are counted, not drawn: of four requests, a share of 0.25 hits the fourth.
"""

import contextlib
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from crosstie.core.errors import BadInput

Kind = Literal[
    "crash", "hang", "slow", "cut", "error", "refuse", "reject", "login", "ping", "poison", "empty-cache", "lose-events"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
# What may be said of each kind besides how long it lasts.
_KEYS: dict[Kind, tuple[str, ...]] = {
    "crash": (),
    "hang": ("share", "health"),
    "slow": ("factor",),
    "cut": ("share", "after_tokens", "mid_event"),
    "error": ("share", "health", "status"),
    "refuse": ("share",),
    "reject": ("share", "health"),
    "login": ("share",),
    "ping": ("share",),
    "poison": (),
    "empty-cache": (),
    "lose-events": (),
}
# A prompt that holds this is more than a replica with the fault of that name can bear.
POISON = "emulate: more than an engine can bear"


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """crash: every connection is dropped and the port refuses; then it is back, empty. hang: connections are taken
    and nothing is answered until it ends. slow: steps take `factor` times as long. cut: streams end after
    `after_tokens`, in the middle of an event or between two. error: requests get `status`. refuse: connections are
    closed as soon as they are made. reject: as with a full queue. login: requests get the page of somebody who asks
    them to sign in, with status 200. ping: streams begin, and nothing comes but keep-alives. poison: prompts that hold
    `POISON` get status 500, and no others. empty-cache: no beginning of a prompt is known any
    more. lose-events: what it tells of its cache does not arrive."""

    kind: Kind
    # None: until it is cleared; nothing but the end of the process clears a crash.
    for_s: float | None = None
    factor: float | None = None
    after_tokens: int | None = None
    mid_event: bool | None = None
    status: int | None = None
    share: float | None = None
    # Whether /health, /metrics and /v1/models go on answering; None: not in a hang, else they do.
    health: bool | None = None

    @property
    def spares_health(self) -> bool:
        return self.kind != "hang" if self.health is None else self.health


@dataclass(frozen=True, slots=True)
class ScriptedFault:
    """A fault that comes by itself; `replica` None: to every one of the pool, or of one of its sides."""

    pool: str
    replica: int | None
    start_s: float
    fault: Fault
    # "prefill" or "decode" of a pool that has engines of both.
    role: str = ""


def read_fault(body: bytes) -> Fault:
    try:
        fault = msgspec.json.decode(body, type=Fault)
    except msgspec.DecodeError as error:
        raise BadInput(f"no fault: {error}") from None
    return _checked(fault)


def read_script(line: str) -> ScriptedFault:
    """POOL[/SIDE][/INDEX]:KIND[@START_S][+FOR_S][,key=value]..."""
    try:
        return _script(line)
    except BadInput as error:
        raise BadInput(f"--fault {line}: {error}") from None


def _script(line: str) -> ScriptedFault:
    where, colon, event = line.partition(":")
    if not colon or not where or not event:
        raise BadInput("write POOL[/SIDE][/INDEX]:KIND[@START_S][+FOR_S][,key=value]")
    pool, slash, index = where.partition("/")
    role = ""
    if index.partition("/")[0] in ("prefill", "decode"):
        role, slash, index = index.partition("/")
    if slash and not (index.isascii() and index.isdigit()):
        raise BadInput(f"'{index}' is no index of a replica; the first is 0")
    head, *pairs = event.split(",")
    head, plus, lasts = head.partition("+")
    kind, at, start = head.partition("@")
    if kind not in KINDS:
        raise BadInput(f"'{kind}' is no fault; there are {', '.join(KINDS)}")
    start_s = _seconds("the start", start) if at else 0.0
    values: dict[str, Any] = {"kind": kind}
    if plus:
        values["for_s"] = _seconds("how long it lasts", lasts)
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise BadInput(f"'{pair}': write key=value")
        if key in values:
            raise BadInput(f"{key} is given twice")
        try:
            values[key] = msgspec.json.decode(value.encode())
        except msgspec.DecodeError:
            raise BadInput(f"{key}: '{value}' is neither a number nor true or false") from None
    try:
        fault = _checked(msgspec.convert(values, type=Fault))
    except msgspec.ValidationError as error:
        raise BadInput(str(error)) from None
    return ScriptedFault(pool, int(index) if slash else None, start_s, fault, role)


def _seconds(name: str, text: str) -> float:
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0.0 <= value < math.inf:
            return value
    raise BadInput(f"{name}: '{text}' is no number of seconds")


def _checked(fault: Fault) -> Fault:
    allowed = _KEYS[fault.kind]
    for key in msgspec.to_builtins(fault):
        if key not in ("kind", "for_s", *allowed):
            raise BadInput(f"{key} has no meaning for {fault.kind}: it takes {', '.join(('for_s', *allowed))}")
    if fault.kind == "slow" and fault.factor is None:
        raise BadInput("slow needs a factor")
    for key, low, high in (
        ("for_s", 0.0, 1e9), ("factor", 0.001, 1e6), ("after_tokens", 0, 10**9), ("status", 400, 599),
        ("share", 0.0, 1.0),
    ):  # fmt: skip
        value = getattr(fault, key)
        if value is not None and not low <= value <= high:
            raise BadInput(f"{key} {value:g}: must be from {low:g} to {high:g}")
    return fault


class Faults(dict[Kind, Fault]):
    """Those in force, one of a kind at a time."""

    def __init__(self) -> None:
        self._counted: Counter[Kind] = Counter()

    def set(self, fault: Fault) -> None:
        self[fault.kind] = fault
        self._counted[fault.kind] = 0

    def hits(self, kind: Kind) -> Fault | None:
        """The fault, if it is in force and this one is among those that it hits; counts it."""
        fault = self.get(kind)
        if fault is None or fault.share is None:
            return fault
        seen = self._counted[kind]
        self._counted[kind] = seen + 1
        return fault if math.floor((seen + 1) * fault.share + 1e-9) > math.floor(seen * fault.share + 1e-9) else None

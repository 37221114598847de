"""What one process has seen of replicas, told to all others, who learn from it as from their own.

Each observation is told once: a lost one only means a little less learnt (`route.corrections`, `route.prefix`). Moments
are the hearer's, so clocks need not agree.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec

from crosstie.route.corrections import Observations
from crosstie.route.live import LiveFleet, Replica
from crosstie.route.prefix import WHOSE_AT
from crosstie_gateway.share.peers import known_as

# Of one prompt: more than `route.prefix` looks at.
_MOST_BLOCKS = 1024
# A factor of e^8 and more is no observation; nor are more tokens, requests or seconds.
_Ratio = Annotated[float, msgspec.Meta(ge=-8.0, le=8.0)]
_Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_At = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
_Block = Annotated[int, msgspec.Meta(ge=0, lt=1 << WHOSE_AT)]
# The owner of prompts, as above a block's bits in `route.prefix`: a number that may be long.
_Whose = Annotated[bytes, msgspec.Meta(max_length=24)]
_Name = Annotated[str, msgspec.Meta(max_length=1024)]
# A replica by its place among the names, two ratios, what they depend on, and seconds.
_Seen = tuple[_At, _Ratio, _Ratio, _Amount, _Amount]
_Prefix = tuple[_Whose, Annotated[list[_Block], msgspec.Meta(max_length=_MOST_BLOCKS)]]
_LOW = (1 << WHOSE_AT) - 1
# Tellers of which the last number is kept.
_MOST_TELLERS = 1024


class LearntReport(msgspec.Struct, array_like=True):
    process: _Name
    # One more with each: what comes twice is learnt once.
    number: _Tokens
    store: _Name
    names: list[_Name]
    first: list[_Seen]
    decoded: list[_Seen]
    sent: list[tuple[_At, _Prefix]]
    lengths: list[tuple[_Name | None, _Name, _Tokens | None, _Tokens | None, _Tokens]]


class Learnt:
    """`process`: a name that no other has."""

    def __init__(self, process: str, store: str):
        self.process, self.store = process, store
        self.observations = Observations()
        self._names: dict[str, str] = {}
        self._replicas: dict[str, Replica] = {}
        self._fleet: LiveFleet | None = None
        self._number = 0
        self._last: dict[str, int] = {}
        self.heard = 0

    def serve(self, fleet: LiveFleet) -> None:
        """Collects observations of this fleet's replicas from now on, and teaches them."""
        self._fleet = fleet
        self._names = {replica.key: known_as(replica.key) for replica in fleet.replicas()}
        self._replicas = {self._names[replica.key]: replica for replica in fleet.replicas()}
        for pool in fleet.pools:
            for side in (pool, pool.prefill):
                if side is not None:
                    side.observations = self.observations

    def news(self) -> LearntReport | None:
        seen = self.observations
        if not len(seen):
            return None
        self._number += 1
        names: dict[str, int] = {}

        def place(key: str) -> int:
            return names.setdefault(self._names.get(key, key), len(names))

        def numbered(kind: Iterable[tuple[str, float, float, float, float]]) -> list[_Seen]:
            return [(place(key), _ratio(ratio), _ratio(error), on, s) for key, ratio, error, on, s in kind]

        report = LearntReport(
            self.process, self._number, self.store, [], numbered(seen.first), numbered(seen.decoded),
            [(place(key), _packed(prefix)) for key, prefix in _latest(seen.sent)], list(seen.lengths),
        )  # fmt: skip
        report.names = list(names)
        seen.clear()
        return report

    def hear(self, report: LearntReport, now: float) -> None:
        fleet = self._fleet
        if report.process == self.process or fleet is None or report.number <= self._last.get(report.process, 0):
            return
        self._last.pop(report.process, None)
        self._last[report.process] = report.number
        if len(self._last) > _MOST_TELLERS:
            del self._last[next(iter(self._last))]
        replicas = [self._replicas.get(name) for name in report.names]

        def at(place: int) -> Replica | None:
            return replicas[place] if place < len(replicas) else None

        for place, ratio, error, tokens, ttft_s in report.first:
            replica = at(place)
            if replica is not None:
                replica.learn_first(ratio, error, tokens, ttft_s, now)
        for place, ratio, error, in_flight, tpot_s in report.decoded:
            replica = at(place)
            if replica is not None:
                replica.learn_decode(ratio, error, in_flight, tpot_s, now)
        for place, (whose, blocks) in report.sent:
            replica = at(place)
            # A key is the same only in the same store.
            if replica is not None and replica.up and (report.store == self.store or not whose):
                own = int.from_bytes(whose, "big") << WHOSE_AT
                replica.prefixes.add(tuple([own | block for block in blocks]))
        for class_name, model, output, counted, prompt_bytes in report.lengths:
            if model in fleet.by_model:
                fleet.lengths.observe(
                    class_name, model, output_tokens=output, input_tokens=counted, prompt_bytes=prompt_bytes
                )
        self.heard += len(report.first) + len(report.decoded) + len(report.sent) + len(report.lengths)


def _ratio(value: float) -> float:
    return min(max(value, -8.0), 8.0)


def _packed(prefix: tuple[int, ...]) -> tuple[bytes, list[int]]:
    whose = prefix[0] >> WHOSE_AT
    return whose.to_bytes(-(-whose.bit_length() // 8), "big"), [block & _LOW for block in prefix[:_MOST_BLOCKS]]


def _latest(sent: Iterable[tuple[str, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]:
    """Each once, in the order in which they were last sent."""
    latest: dict[tuple[str, tuple[int, ...]], None] = {}
    for prompt in sent:
        latest.pop(prompt, None)
        latest[prompt] = None
    return list(latest)

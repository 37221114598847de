"""The choices of an answer that has several: each ends by itself, and the answer when all of them have."""

from crosstie.wire.sse import payloads
from crosstie_gateway.gateway.fields import decode_chunk, decode_ends, readable

_CUT = (None, "abort")


class Choices:
    """Those of a stream. `wanted`: how many were asked for; engines that know only one give that."""

    def __init__(self, wanted: int):
        self._wanted = wanted
        self._seen: set[int] = set()
        self._ended: set[int] = set()

    def note(self, events: bytes) -> None:
        """Whole events that have come."""
        for payload in payloads(events):
            chunk = readable(decode_chunk, payload)
            # What cannot be read is the last word, or an error.
            for choice in chunk.choices if chunk is not None else ():
                self._seen.add(choice.index)
                if choice.finish_reason:
                    self._ended.add(choice.index)

    @property
    def all_seen_ended(self) -> bool:
        """All that there was is complete: of an engine that says so, enough."""
        return bool(self._seen) and self._seen == self._ended

    @property
    def all_ended(self) -> bool:
        """Nothing can be missing, whatever else the engine might have said."""
        return self.all_seen_ended and len(self._ended) >= self._wanted


def has_cut_choice(answer: bytes) -> bool:
    """Whether one of a whole answer's choices was not finished."""
    ends = readable(decode_ends, answer)
    return ends is not None and any(choice.finish_reason in _CUT for choice in ends.choices)

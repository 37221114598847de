"""What a client got, in tokens: as its engine counted them where that can be so, else as they were seen to pass."""

from math import ceil
from typing import Final

from crosstie.route.ask import Ask
from crosstie.route.lengths import TOKENS_PER_ATTACHMENT
from crosstie_gateway.gateway.asks import makes_text
from crosstie_gateway.gateway.body import Usage
from crosstie_gateway.gateway.relay import StreamRelay, WholeRelay
from crosstie_gateway.gateway.roads import PICTURES
from crosstie_gateway.gateway.transcript import Transcript

# How many contexts of its pool an answer or prompt may be said to have: engines' limits differ from the file's, a
# little.
_CONTEXTS: Final = 2
# More bytes than a token has, and than an event or an answer has around one.
_TOKEN_BYTES: Final = 128
_EVENT_BYTES: Final = 1024
_SPARE_BYTES: Final = 2**16
# Above what a picture of a megapixel has as PNG in base64.
_PICTURE_BYTES: Final = 2**22
_PICTURES: Final = PICTURES


def plainly_counted(relay: StreamRelay | WholeRelay, ask: Ask, context: int) -> Usage | None:
    """The engine's own count where nothing calls for a closer look, as nearly always; None: `Passed` takes that
    look."""
    usage = relay.usage
    if usage is None:
        return None
    given, made, _ = usage
    most = _CONTEXTS * context
    plain = 0 < made <= most * ask.copies and given <= most * ask.prompts and relay.passed <= _EVENT_BYTES * made
    return usage if plain else None


class Passed:
    """`before`: tokens of the answer that others had made before."""

    def __init__(
        self, relay: StreamRelay | WholeRelay, transcript: Transcript | None, ask: Ask, path: str, *, context: int,
        bytes_per_token: float, before: int,
    ):  # fmt: skip
        self._relay, self._transcript, self._ask = relay, transcript, ask
        self._makes_text, self._before, self._bytes_per_token = makes_text(path), before, bytes_per_token
        self._makes_pictures = path in _PICTURES
        self._most_input, self._most_output = _CONTEXTS * context * ask.prompts, _CONTEXTS * context * ask.copies

    def usage(self) -> Usage | None:
        """The engine's own count, if it can be so."""
        relay, ask = self._relay, self._ask
        # On the way to the last count, engines count each of several answers by itself.
        usage = relay.counted if isinstance(relay, StreamRelay) and ask.copies == 1 else relay.usage
        if usage is None:
            return None
        given, made, _ = usage
        if self._makes_pictures and not made:
            return None
        if given > self._most_input or (made > self._most_output and made > self.seen()):
            return None
        # Far too few for so many bytes, or none at all, are looked at more closely.
        doubtful = self._makes_text and relay.passed > _EVENT_BYTES * made + (_SPARE_BYTES if made else 0)
        if doubtful and self.seen() * self._bytes_per_token > _TOKEN_BYTES * made:
            return None
        return usage

    def estimate(self, given: int) -> Usage:
        """`given`: the prompt as it was estimated. An answer has an end at the least."""
        made = max(self.seen(), 1) if self._makes_text else self._pictured()
        counted = self._transcript.given if self._transcript is not None else None
        return counted if counted is not None and counted <= self._most_input else given, made, 0

    def _pictured(self) -> int:
        """Pictures that were asked for, or that came, as tokens: few engines count them, and none is free."""
        if not self._makes_pictures:
            return 0
        return int(TOKENS_PER_ATTACHMENT) * max(self._ask.copies, ceil(self._relay.passed / _PICTURE_BYTES))

    def seen(self) -> int:
        """Tokens of the answer so far, by what the client was sent of it."""
        if not self._makes_text:
            return 0
        relay, transcript = self._relay, self._transcript
        here = self._before + relay.seen_tokens(self._bytes_per_token)
        if transcript is None:
            return here
        transcript.read()
        return max(transcript.seen_tokens, here) if transcript.missed else transcript.seen_tokens

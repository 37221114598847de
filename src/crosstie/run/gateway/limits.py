"""Limits by the minute, over a window that slides: what was used in this minute, and of the minute before the part
that the window still covers, as if it had come evenly."""

from math import ceil


class Window:
    __slots__ = ("before", "limit", "passed", "used")

    def __init__(self, limit: int, before: int, used: int, passed: float):
        # What was estimated too high and taken back may, with several counting, leave less than nothing.
        self.limit, self.before, self.used = limit, max(before, 0), max(used, 0)
        # Of the present minute, a fraction.
        self.passed = passed

    @property
    def now(self) -> float:
        return self.before * (1.0 - self.passed) + self.used

    def fits(self, more: int) -> bool:
        return self.now + more <= self.limit

    def wait_s(self, more: int) -> float:
        """Until so much more fits, if nothing else comes; it must be no more than the limit."""
        if self.used + more <= self.limit:
            # The minute before has to slide out far enough.
            return 60.0 * (1.0 - (self.limit - self.used - more) / self.before - self.passed)
        return 60.0 * (1.0 - self.passed + 1.0 - (self.limit - more) / self.used)

    def left(self, more: int) -> int:
        """After so much more."""
        return max(int(self.limit - self.now - more), 0)

    def reset_s(self, more: int) -> float:
        """Until all of it is free again."""
        if self.used or more:
            return 60.0 * (2.0 - self.passed)
        return 60.0 * (1.0 - self.passed) if self.before else 0.0


def rate_headers(requests: Window, more_requests: int, tokens: Window, more_tokens: int) -> bytes:
    """OpenAI's headers for those of both that have a limit, after so much more has been let in."""
    lines = b""
    if requests.limit:
        lines = _REQUESTS % (
            requests.limit,
            requests.left(more_requests),
            _SPANS[ceil(requests.reset_s(more_requests))],
        )
    if tokens.limit:
        lines += _TOKENS % (tokens.limit, tokens.left(more_tokens), _SPANS[ceil(tokens.reset_s(more_tokens))])
    return lines


def _template(what: bytes) -> bytes:
    return b"".join(
        b"x-ratelimit-%b-%b: %%%b\r\n" % (name, what, form)
        for name, form in ((b"limit", b"d"), (b"remaining", b"d"), (b"reset", b"b"))
    )


_REQUESTS, _TOKENS = _template(b"requests"), _template(b"tokens")
# Seconds as OpenAI writes them, such as 59s and 1m2s, made once; it is two minutes at the most.
_SPANS = tuple((b"%dm" % (s // 60) if s >= 60 else b"") + b"%ds" % (s % 60) for s in range(122))

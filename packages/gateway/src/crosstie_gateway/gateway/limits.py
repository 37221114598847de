"""What a key may use: the key as the guard has it, what a request was let in for, and limits by the minute. The
minute's window slides: it has this minute, and of the one before the part still covered, as if used evenly."""

from hmac import compare_digest
from math import ceil
from time import time
from typing import Final, NamedTuple

from crosstie_gateway.gateway.asks import PRIORITIES
from crosstie_gateway.ledger.keys import Key, Team
from crosstie_gateway.ledger.tally import Tally

NEVER: Final = float("inf")


class Account:
    """What has limits, and what it has spent of them."""

    def __init__(self) -> None:
        self.id = 0
        # What refusals call it.
        self.whose = "this key"
        self.rpm = self.tpm = 0
        self.usd_per_day = self.usd_per_month = 0.0
        self.budgeted = False
        # Dollars of today and this month as the store last told; those it did not know then; and those new at the time
        # before, which others may not have heard of.
        self.today_usd = self.month_usd = self.own_usd = self.written_usd = 0.0
        # Requests in flight with a budget: their number, dollars announced, and how many more there may be.
        self.in_flight = 0
        self.reserved_usd = self.more_usd = 0.0

    def limit(self, rpm: int | None, tpm: int | None, usd_per_day: float | None, usd_per_month: float | None) -> None:
        self.rpm, self.tpm = rpm or 0, tpm or 0
        self.usd_per_day, self.usd_per_month = usd_per_day or 0.0, usd_per_month or 0.0
        self.budgeted = self.usd_per_day > 0.0 or self.usd_per_month > 0.0

    def reserve(self, cost: "RequestCost", tally: Tally) -> None:
        self.in_flight += 1
        self.reserved_usd += cost.usd
        self.more_usd += cost.more_usd
        self.tell(tally)

    def release(self, cost: "RequestCost", tally: Tally) -> None:
        self.in_flight -= 1
        # Sums of many floats drift; where nothing is in flight nothing is reserved.
        self.reserved_usd = self.reserved_usd - cost.usd if self.in_flight else 0.0
        self.more_usd = self.more_usd - cost.more_usd if self.in_flight else 0.0
        self.tell(tally)

    def tell(self, tally: Tally) -> None:
        """Others hear what this process has let in, and what has ended of it that the store may not have told them."""
        if self.budgeted:
            tally.hold(self.id, self.reserved_usd + self.own_usd + self.written_usd, self.more_usd)


class TeamAccount(Account):
    """A team, and what its keys have used in this process."""

    def __init__(self, team: Team):
        super().__init__()
        self.requests = self.tokens = 0
        self.usd = 0.0
        self.set(team)

    def set(self, team: Team) -> None:
        self.id, self.name = team.account_id, team.name
        self.whose = f"team {team.name}"
        self.limit(team.rpm, team.tpm, team.usd_per_day, team.usd_per_month)


class RequestCost(NamedTuple):
    """Dollars that a request announces, and how many more it may cost."""

    usd: float
    more_usd: float


NOTHING: Final = RequestCost(0.0, 0.0)


class Holder(Account):
    """A key as the guard has it: what it may do, and what it has spent."""

    def __init__(self, key: Key):
        super().__init__()
        # The team whose limits hold too; and both accounts, its own first.
        self.team: TeamAccount | None = None
        self.accounts: list[Account] = [self]
        # Requests that are being answered, or wait.
        self.open = 0
        # The names of models that it may use, and of which names of the gateway's these were made.
        self.names: dict[str, str] = {}
        self.names_of: dict[str, str] | None = None
        self.set(key)

    def set(self, key: Key) -> None:
        self.key, self.id = key, key.id
        self.explains, self.max_open = key.explains, key.max_open or 0
        self.digest = bytes.fromhex(key.digest)
        self.old_digest = bytes.fromhex(key.old_digest) if key.old_digest else b""
        self.old_until = key.old_until or 0.0
        self.revoked = key.revoked_at is not None
        self.ends_at = NEVER if key.expires_at is None else key.expires_at
        self.models, self.classes = frozenset(key.models), frozenset(key.classes)
        self.priority = PRIORITIES[key.priority]
        self.restricted = bool(key.models or key.classes or self.priority < PRIORITIES["high"])
        self.limit(key.rpm, key.tpm, key.usd_per_day, key.usd_per_month)
        self.limited = bool(self.rpm or self.tpm or self.budgeted or self.max_open)
        self.names_of = None

    def join(self, team: TeamAccount | None) -> None:
        if team is self.team:
            return
        # What the store does not know yet will be written as the new team's.
        if self.team is not None:
            self.team.own_usd -= self.own_usd
        if team is not None:
            team.own_usd += self.own_usd
        self.team = team
        # Another list: requests that were let in before settle with the old one.
        self.accounts = [self] if team is None else [self, team]

    def had(self, digest: bytes) -> bool:
        """Whether this was its secret before it was rotated, and is still good."""
        return time() < self.old_until and compare_digest(digest, self.old_digest)


class Grant:
    """What was let in against a key's limits, to be settled when it has ended."""

    def __init__(self, holder: Holder, minute: int, tokens: int, cost: RequestCost, headers: bytes):
        # As they were when it was let in.
        self.accounts = holder.accounts
        self.holder, self.minute, self.tokens, self.cost = holder, minute, tokens, cost
        # Lines for the answer that say how much is left.
        self.headers = headers


class Window:
    def __init__(self, limit: int, before: int, used: int, passed: float):
        # What was estimated too high and taken back may, with several counting, leave less than nothing.
        self.limit, self.before, self.used = limit, max(before, 0), max(used, 0)
        # Of the present minute, a fraction.
        self.passed = passed

    @property
    def now(self) -> float:
        return self.before * (1.0 - self.passed) + self.used

    def fits(self, more: int, share: float = 1.0) -> bool:
        return self.now + more <= self._most(more, share)

    def wait_s(self, more: int, share: float = 1.0) -> float:
        """Until so much more fits, if nothing else comes; it must be no more than the limit."""
        most = self._most(more, share)
        if self.used + more <= most:
            # The minute before has to slide out far enough.
            return 60.0 * (1.0 - (most - self.used - more) / self.before - self.passed)
        return 60.0 * (1.0 - self.passed + 1.0 - (most - more) / self.used)

    def _most(self, more: int, share: float) -> float:
        """The limit, or that share of it; a single request may always have what it asks for."""
        return float(self.limit) if share == 1.0 else max(self.limit * share, float(min(more, self.limit)))

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
    for form, window, more in ((_REQUESTS, requests, more_requests), (_TOKENS, tokens, more_tokens)):
        if window.limit:
            lines += form % (window.limit, window.left(more), _SPANS[ceil(window.reset_s(more))])
    return lines


def _template(unit: bytes) -> bytes:
    return b"".join(
        b"x-ratelimit-%b-%b: %%%b\r\n" % (name, unit, form)
        for name, form in ((b"limit", b"d"), (b"remaining", b"d"), (b"reset", b"b"))
    )


_REQUESTS, _TOKENS = _template(b"requests"), _template(b"tokens")
# Seconds as OpenAI writes them, such as 59s and 1m2s, made once; it is two minutes at the most.
_SPANS: Final = tuple((b"%dm" % (s // 60) if s >= 60 else b"") + b"%ds" % (s % 60) for s in range(122))

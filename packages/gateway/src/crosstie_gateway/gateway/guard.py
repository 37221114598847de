"""Who may ask, and how much: asked before a request's body is read and after, and earlier for bodies that are long in
coming. All is in memory; `service.ledger` brings it and keeps what was used."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from hmac import compare_digest
from time import time
from typing import Final

from crosstie.route.ask import Ask
from crosstie.route.router import Router
from crosstie_gateway.gateway.asks import PRIORITIES
from crosstie_gateway.gateway.errors import RequestRejected
from crosstie_gateway.gateway.limits import (
    NEVER,
    NOTHING,
    Account,
    Grant,
    Holder,
    RequestCost,
    TeamAccount,
    Window,
    rate_headers,
)
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.gateway.tokens import TokenRefused, TokenVerifier, Verified
from crosstie_gateway.ledger.keys import SUBJECTS_FROM, TEAMS_FROM, Key, Team
from crosstie_gateway.ledger.tally import LocalTally, Tally
from crosstie_gateway.ledger.usage import day_end, month_end
from crosstie_gateway.wire.request import Request

_sha256: Final = hashlib.sha256
# What the secret of a key that does not exist is compared with, so that both take the same time.
_NOBODY: Final = os.urandom(32)
_KEY_HEADERS: Final[tuple[bytes, ...]] = (b"authorization", b"api-key", b"x-api-key")
_CHALLENGE: Final = b"www-authenticate: Bearer\r\n"
# OpenAI's clients try a 429 again unless they are told not to.
_IN_VAIN: Final = b"x-should-retry: false\r\n"
# When to come back if only requests that are being answered may take the rest of a budget, or all places of a key.
_IN_FLIGHT_S: Final = 5.0
_OPEN_S: Final = 0.5
# How much of a budget may be spent at worst, if all answers without a limit get as long as they can; and the rest that
# sums of floats leave.
_AT_WORST: Final = 1.1
_NOBODY_USD: Final = 1e-12
# The part of a key's rates and open requests that its batches leave to its other requests.
_LEFT_BY_BATCHES: Final = 0.2
# Subjects of tokens that are kept in memory.
_MOST_SUBJECTS: Final = 50_000


class Guard:
    def __init__(self, router: Router, tally: Tally | None = None):
        self.router = router
        self.tally: Tally = LocalTally() if tally is None else tally
        # By code.
        self.refused: Counter[str] = Counter()
        self._by_public: dict[bytes, Holder] = {}
        self._by_id: dict[int, Holder] = {}
        self._teams: dict[int, TeamAccount] = {}
        self._teams_by_name: dict[str, TeamAccount] = {}
        self._budgeted: list[Account] = []
        # Signed tokens that are taken beside keys; None: none are.
        self.tokens: TokenVerifier | None = None
        self._subjects: dict[int, Holder] = {}
        # Subjects that the store has not been told of: names and teams' numbers.
        self._untold: dict[int, tuple[int, str, int | None]] = {}
        self._day_ends = self._month_ends = 0.0

    # What the ledger tells

    def know(
        self, keys: Iterable[Key], given_teams: Iterable[Team] = (),
        subjects: Iterable[tuple[int, str, int | None]] = (),
    ) -> None:  # fmt: skip
        """Takes these keys and teams and no others, and adds subjects of tokens that came anywhere."""
        teams: dict[int, TeamAccount] = {}
        for team in given_teams:
            account = self._teams.get(team.id)
            if account is None:
                account = TeamAccount(team)
            else:
                account.set(team)
            teams[team.id] = account
        self._teams, self._teams_by_name = teams, {team.name: team for team in teams.values()}
        by_public: dict[bytes, Holder] = {}
        by_id: dict[int, Holder] = {}
        for key in keys:
            holder = self._by_id.get(key.id)
            if holder is None:
                holder = Holder(key)
            elif holder.key != key:
                holder.set(key)
            holder.join(None if key.team_id is None else teams.get(key.team_id))
            by_public[key.public_id.encode()] = by_id[key.id] = holder
        for number, name, team_id in subjects:
            # Of those that came here, their tokens know better.
            if number not in self._subjects and len(self._subjects) < _MOST_SUBJECTS:
                holder = self._subjects[number] = _subject(number, name)
                holder.join(None if team_id is None else teams.get(team_id))
        by_id.update(self._subjects)
        self._by_public, self._by_id = by_public, by_id
        self._budgeted = [account for account in (*by_id.values(), *teams.values()) if account.budgeted]

    @property
    def keys(self) -> int:
        return len(self._by_id)

    @property
    def teams(self) -> list[TeamAccount]:
        return list(self._teams.values())

    def spent(self, totals: dict[int, tuple[float, float]], included: dict[int, float], at: float) -> None:
        """Takes the store's totals of that time; `included`: this process's dollars that are new in them."""
        self._day_ends, self._month_ends = day_end(at), month_end(at)
        for holder in self._budgeted:
            holder.today_usd, holder.month_usd = totals.get(holder.id, (0.0, 0.0))
        written: dict[int, float] = {}
        for key_id, usd in included.items():
            known = self._by_id.get(key_id)
            for account in known.accounts if known is not None else ():
                account.own_usd -= usd
                written[account.id] = written.get(account.id, 0.0) + usd
        for account in self._budgeted:
            before, account.written_usd = account.written_usd, written.get(account.id, 0.0)
            if before or account.written_usd:
                account.tell(self.tally)

    def settle(self, record: RequestRecord) -> None:
        """A request has ended: what was estimated of it becomes what it was."""
        holder = self._by_id.get(record.key_id)
        if holder is not None:
            holder.own_usd += record.charged_usd
            team = holder.team
            if team is not None:
                team.own_usd += record.charged_usd
                team.usd += record.charged_usd
                team.tokens += record.input_tokens + record.output_tokens
                team.requests += 1
        grant = record.grant
        if grant is None:
            return
        record.grant = None
        grant.holder.open -= 1
        for account in grant.accounts:
            account.release(grant.cost, self.tally)
            if account.tpm:
                more = record.input_tokens + record.output_tokens - grant.tokens
                # What was too much is taken back where it was counted; what is new counts now.
                minute = grant.minute if more < 0 else int(time() // 60.0)
                self.tally.add(account.id, minute, 0, more)

    # What the gateway asks

    def known(self, request: Request) -> int:
        """The id of a request's key, which it then no longer carries, so that no backend sees it. Raises
        RequestRejected."""
        headers = request.headers
        holder = self._holder(request)
        for name in _KEY_HEADERS:
            headers.pop(name, None)
        return holder.id

    def key_of(self, request: Request) -> int:
        """The same, of a request that keeps its key: its body is still to come."""
        return self._holder(request).id

    def may_explain(self, key_id: int, page: str = "explanations") -> None:
        """Raises RequestRejected."""
        if not self._by_id[key_id].explains:
            if key_id >= SUBJECTS_FROM:
                raise self._refuse(403, f"this token has not the scope for {page}", "explain_not_allowed")
            why = "crosstie keys update NAME --explain gives it the right"
            raise self._refuse(403, f"this key may not ask for {page}: {why}", "explain_not_allowed")

    def check_open(self, key_id: int) -> None:
        """Whether a key has requests and money left, before its body is sent or read. Raises RequestRejected."""
        holder, now = self._by_id[key_id], time()
        for account in holder.accounts:
            if account.rpm or account.tpm:
                self._within_rates(account, now, int(now // 60.0), 0)
            if account.budgeted:
                self._check_spent(account, now)

    def check_key(self, key_id: int) -> None:
        """Raises RequestRejected where a key that was let in before no longer would be."""
        holder = self._by_id.get(key_id)
        if holder is None and key_id >= SUBJECTS_FROM:
            raise self._refuse(503, "whose this is has not been heard of here yet", "subject_unknown", _IN_FLIGHT_S)
        if holder is None:
            raise self._refuse(401, "this key is no more", "invalid_api_key")
        self._check_valid(holder)

    def _holder(self, request: Request) -> Holder:
        head = request.head
        credential = head.credential if head is not None else None
        if credential is None:
            credential = _credential(request.headers)
            if head is not None:
                head.credential = credential
        token, public_id, digest = credential
        if not token:
            raise self._refuse(401, "no API key: send it as 'Authorization: Bearer ct-...'", "missing_api_key")
        tokens = self.tokens
        if tokens is not None and token.count(b".") == 2:
            return self._subject(tokens, token.strip())
        holder = self._by_public.get(public_id) if public_id else None
        right = compare_digest(digest, _NOBODY if holder is None else holder.digest)
        if holder is None or not (right or holder.had(digest)):
            raise self._refuse(401, "this is no API key of this gateway", "invalid_api_key")
        self._check_valid(holder)
        return holder

    # Tokens

    def _subject(self, tokens: TokenVerifier, token: bytes) -> Holder:
        try:
            whose = tokens.verified(token)
        except TokenRefused as refused:
            raise self._refuse(refused.status, str(refused), refused.code) from None
        team = self._team_of(whose, tokens.config.team_claim is not None)
        holder = self._subjects.get(whose.id)
        if holder is None:
            if len(self._subjects) >= _MOST_SUBJECTS:
                self._forget_subject()
            holder = self._subjects[whose.id] = self._by_id[whose.id] = _subject(whose.id, whose.subject)
        elif holder.team is team:
            holder.explains = whose.explains
            return holder
        holder.join(team)
        holder.explains = whose.explains
        self._untold[whose.id] = (whose.id, whose.subject, None if team is None else team.id - TEAMS_FROM)
        return holder

    def _team_of(self, whose: Verified, claimed: bool) -> TeamAccount | None:
        """The first existing team that its token names. Raises RequestRejected."""
        for name in whose.teams:
            team = self._teams_by_name.get(name)
            if team is not None:
                return team
        if whose.teams or claimed:
            raise self._refuse(403, "this token names no team that has access here", "unknown_team")
        return None

    def _forget_subject(self) -> None:
        """Forgets the oldest without open requests and unwritten usage."""
        for number, holder in self._subjects.items():
            if not holder.open and abs(holder.own_usd) < _NOBODY_USD and number not in self._untold:
                holder.join(None)
                del self._subjects[number], self._by_id[number]
                return

    def take_subjects(self) -> dict[int, tuple[int, str, int | None]]:
        """Those that are new, or in another team, since this was last asked."""
        taken, self._untold = self._untold, {}
        return taken

    def _check_valid(self, holder: Holder) -> None:
        if holder.revoked:
            raise self._refuse(401, "this API key was revoked", "api_key_revoked")
        if holder.ends_at != NEVER and holder.ends_at <= time():
            raise self._refuse(401, "this API key has expired", "api_key_expired")

    def names_for(self, key_id: int, request: Request) -> dict[str, str]:
        """What names of models mean to this key. Raises RequestRejected for hints that it may not give, before they are
        looked up: a key is told nothing of what it may not use."""
        holder = self._by_id.get(key_id)
        if holder is not None and holder.restricted:
            self._check_hints(holder, request.headers)
        return self.names(key_id)

    def _check_hints(self, holder: Holder, headers: dict[bytes, bytes]) -> None:
        asked = headers.get(b"x-crosstie-class")
        if asked is not None and holder.classes and _text(asked) not in holder.classes:
            raise self._refuse(
                403, f"this key is for class {_listed(holder.classes)}, not '{_text(asked)}'", "class_not_allowed"
            )
        asked = headers.get(b"x-crosstie-priority")
        if asked is not None and PRIORITIES.get(_text(asked), 0) > holder.priority:
            why = f"the highest priority of this key is {holder.key.priority}"
            raise self._refuse(403, why, "priority_not_allowed")
        asked = headers.get(b"x-crosstie-pool")
        if asked is not None and holder.models and not self.may_see(holder.id, _text(asked)):
            raise self._refuse(403, f"no model of this key is served by pool '{_text(asked)}'", "pool_not_allowed")

    def names(self, key_id: int) -> dict[str, str]:
        """What the gateway's names of models are to this key."""
        names = self.router.fleet.names
        holder = self._by_id.get(key_id)
        if holder is None or not holder.models:
            return names
        if holder.names_of is not names:
            adapters = self.router.fleet.adapters
            models = {names.get(name, name) for name in holder.models if name not in adapters}
            # An adapter is nobody's who was not given it by its name, and gives nobody its model.
            holder.names = {
                name: model
                for name, model in names.items()
                if (name in holder.models if name in adapters else model in models)
            }
            holder.names_of = names
        return holder.names

    def may_see(self, key_id: int, pool: str) -> bool:
        """Whether a pool serves any model of this key."""
        models = self.names(key_id).values()
        return any(served.name == pool for model in models for served in self.router.fleet.by_model.get(model, ()))

    def not_allowed(self, key_id: int, model: str | None) -> RequestRejected:
        """The refusal for a model that a key may not use, whether or not it exists."""
        may = _listed(self.names(key_id)) or "none that is served now"
        return self._refuse(403, f"this key may not use '{model}'; it may use {may}", "model_not_allowed")

    def place(self, key_id: int, ask: Ask) -> None:
        """Gives a request the key's class and priority where it names none. Raises RequestRejected."""
        holder = self._by_id.get(key_id)
        if holder is None or not holder.restricted:
            return
        ask.priority = min(ask.priority, holder.priority)
        if holder.classes and ask.class_name not in holder.classes:
            self._own_class(holder, ask)

    def _own_class(self, holder: Holder, ask: Ask) -> None:
        live = self.router.fleet
        of_model = [live.classes[name] for name in holder.key.classes if name in live.classes]
        of_model = [served for served in of_model if served.model == ask.model]
        if not of_model:
            why = f"this key is for class {_listed(holder.classes)}, and none of them is of {ask.model}"
            raise self._refuse(403, why, "class_not_allowed")
        before_ttft_s, before_tpot_s = live.targets.get(ask.class_name or "", (None, None))
        chosen = min(of_model, key=lambda served: abs(served.input_tokens - ask.input_tokens))
        ttft_s, tpot_s = live.targets[chosen.name]
        # Targets that are not those of the class it had been put in are the request's own.
        if ask.ttft_s == before_ttft_s:
            ask.ttft_s = ttft_s
        if ask.tpot_s == before_tpot_s:
            ask.tpot_s = tpot_s
        ask.class_name = chosen.name
        ask.output_tokens = live.lengths.expected_output(chosen.name, ask.model, ask.most_output)

    def admit(self, key_id: int, ask: Ask, max_open: int = 0, share: float = 1.0) -> Grant | None:
        """What settles this with the key's limits; None: there are none. `max_open`: the default for requests open at
        once; `share`: the part of the limits that this may take. Raises RequestRejected."""
        self.place(key_id, ask)
        holder = self._by_id.get(key_id)
        if holder is None or not (holder.limited or holder.team is not None or max_open):
            return None
        return self._grant(holder, ask, max_open, share, False)

    def admit_batched(self, key_id: int, ask: Ask, max_open: int) -> Grant | None:
        """The same for a request of a batch. Raises RequestRejected."""
        return self.admit(key_id, ask, max_open, 1.0 - _LEFT_BY_BATCHES)

    def admit_page(self, key_id: int, max_open: int, spends: bool) -> Grant | None:
        """The same for what costs nothing itself; `spends`: others will on its account, so budgets must not be used up.
        Raises RequestRejected."""
        holder = self._by_id.get(key_id)
        return None if holder is None else self._grant(holder, None, max_open, 1.0, spends)

    def _grant(self, holder: Holder, ask: Ask | None, max_open: int, share: float, spends: bool) -> Grant:
        most = holder.max_open or max_open
        if most and holder.open >= max(int(most * share), 1):
            why = f"this key has {holder.open:,} requests open, and may have {most:,} at once"
            raise self._refuse(429, why, "too_many_open_requests", _OPEN_S)
        now = time()
        minute = int(now // 60.0)
        tokens = int(ask.input_tokens + ask.copies * ask.output_tokens) if ask is not None else 0
        cost, headers = NOTHING, b""
        for account in holder.accounts:
            if account.rpm or account.tpm:
                # Of two with limits, the key's own are told.
                lines = self._within_rates(account, now, minute, tokens, share)
                headers = headers or lines
            if account.budgeted and ask is not None:
                cost = cost if cost is not NOTHING else self._may_cost(ask)
                self._within_budget(account, now, cost)
            elif account.budgeted and spends:
                self._check_spent(account, now)
        # Nothing is counted before all of it has passed.
        for account in holder.accounts:
            if account.rpm or account.tpm:
                self.tally.add(account.id, minute, 1, tokens)
            account.reserve(cost, self.tally)
        holder.open += 1
        return Grant(holder, minute, tokens, cost, headers)

    def _within_rates(self, account: Account, now: float, minute: int, tokens: int, share: float = 1.0) -> bytes:
        passed = now / 60.0 - minute
        before, used = self.tally.total(account.id, minute - 1), self.tally.total(account.id, minute)
        requests = Window(account.rpm, before[0], used[0], passed)
        volume = Window(account.tpm, before[1], used[1], passed)
        for window, more, unit in ((requests, 1, "requests"), (volume, tokens, "tokens")):
            if not window.limit or window.fits(more, share):
                continue
            headers = rate_headers(requests, 0, volume, 0)
            if more > window.limit:
                why = f"about {more:,} tokens in one request, and {account.whose} has {window.limit:,} a minute"
                raise self._refuse(429, why, "rate_limit_exceeded", headers=headers + _IN_VAIN)
            why = f"{account.whose} has {window.limit:,} {unit} a minute"
            raise self._refuse(429, why, "rate_limit_exceeded", window.wait_s(more, share), headers)
        return rate_headers(requests, 1, volume, tokens)

    def _may_cost(self, ask: Ask) -> RequestCost:
        """On its model's dearest pool: with the length announced, else the usual one; and at worst with all of its
        context."""
        usd = worst_usd = 0.0
        for pool in self.router.fleet.by_model.get(ask.model, ()):
            room = max(pool.max_context - ask.input_tokens / ask.prompts, ask.output_tokens)
            most = room if ask.most_output is None else min(float(ask.most_output), room)
            said = ask.output_tokens if ask.most_output is None else most
            usd = max(usd, pool.request_usd(ask.input_tokens, 0.0, ask.copies * said, ask.tpot_s))
            worst_usd = max(worst_usd, pool.request_usd(ask.input_tokens, 0.0, ask.copies * most, ask.tpot_s))
        return RequestCost(usd, max(worst_usd - usd, 0.0))

    def _within_budget(self, account: Account, now: float, cost: RequestCost) -> None:
        """Raises RequestRejected where it may exceed the budget. A request without a limit counts as usual; only one
        such at a time, unless even the worst of all is within a little more."""
        held_usd, held_more_usd = self.tally.held(account.id)
        reserved_usd, more_usd = account.reserved_usd + held_usd, account.more_usd + held_more_usd
        for budget, spent, ends, period in self._check_spent(account, now):
            if spent + cost.usd > budget:
                why = (
                    f"this may cost {cost.usd:.2g} USD, and {budget - spent:.2g} are left of {account.whose}'s "
                    f"{budget:g} a {period} (UTC): ask for a shorter answer (max_tokens), or fewer"
                )
                raise self._refuse(429, why, "insufficient_quota", ends - now, _IN_VAIN)
            taken = spent + reserved_usd + cost.usd
            alone = more_usd <= _NOBODY_USD or cost.more_usd <= _NOBODY_USD
            if taken > budget or not (alone or taken + more_usd + cost.more_usd <= budget * _AT_WORST):
                why = f"requests in flight may take the rest of {account.whose}'s {budget:g} USD a {period}"
                raise self._refuse(429, why, "insufficient_quota", _IN_FLIGHT_S)

    def _check_spent(self, account: Account, now: float) -> list[tuple[float, float, float, str]]:
        """An account's budgets, longest wait first: dollars, dollars spent, the period's end and name. Raises
        RequestRejected where one is spent."""
        if now >= self._day_ends:
            self._next_day(now)
        budgets = [
            (budget, recorded + account.own_usd, ends, period)
            for budget, recorded, ends, period in (
                (account.usd_per_month, account.month_usd, self._month_ends, "month"),
                (account.usd_per_day, account.today_usd, self._day_ends, "day"),
            )
            if budget
        ]
        for budget, spent, ends, period in budgets:
            if spent >= budget:
                why = f"{account.whose}'s budget of {budget:g} USD a {period} (UTC) is spent"
                raise self._refuse(429, why, "insufficient_quota", ends - now, _IN_VAIN)
        return budgets

    def _next_day(self, now: float) -> None:
        """Midnight has passed since the store was last heard."""
        next_month = now >= self._month_ends
        for holder in self._budgeted:
            holder.today_usd = 0.0
            if next_month:
                holder.month_usd = 0.0
        self._day_ends, self._month_ends = day_end(now), month_end(now)

    def _refuse(
        self, status: int, why: str, code: str, retry_after_s: float = 0.0, headers: bytes = b""
    ) -> RequestRejected:
        self.refused[code] += 1
        return RequestRejected(status, why, code, retry_after_s, _CHALLENGE if status == 401 else headers)


def _credential(headers: dict[bytes, bytes]) -> tuple[bytes, bytes, bytes]:
    """The token as it came; the public part of a key, empty where it is none; and the digest of its secret."""
    given = headers.get(b"authorization")
    named, also = headers.get(b"api-key"), headers.get(b"x-api-key")
    token = (named if named is not None else also) or b""
    if given is not None:
        scheme, _, rest = given.partition(b" ")
        if scheme.lower() == b"bearer":
            token = rest
    parts = token.strip().split(b"-", 2)
    secret = parts[2] if len(parts) == 3 else b""
    public_id = parts[1] if len(parts) == 3 and parts[0] == b"ct" else b""
    return token, public_id, _sha256(secret).digest()


def _subject(number: int, name: str) -> Holder:
    """Of tokens; nobody has a secret for it."""
    return Holder(Key(id=number, public_id="", name=name, digest="00" * 32))


def _text(value: bytes) -> str:
    return value.decode("latin-1").strip()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))

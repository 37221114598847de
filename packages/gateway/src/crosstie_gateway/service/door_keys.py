"""The administrator's and the operators' keys, from the environment; the first is else made up and written to a file.
An operator's key opens the page at /crosstie/ and changes nothing. Neither is a user's key."""

import hashlib
import hmac
import os
import secrets
import tempfile
from collections import deque
from hashlib import sha256
from pathlib import Path
from time import time
from typing import Literal, NamedTuple

from crosstie.core.errors import BadInput

Role = Literal["operator", "administrator"]
COOKIE = "crosstie_session"
LASTS_S = 8 * 3600
# Wrong keys in so many seconds, of one address and of all: no further key is looked at until the first is so old.
WINDOW_S, OF_ONE, OF_ALL = 60.0, 8, 60


class DashboardSession(NamedTuple):
    role: Role
    name: str
    ends_at: int


class Sessions:
    """Who is signed in to the page of operators, by signed cookies that every worker can read: role, session and end.
    Their secret is made at start, so a restart signs all out."""

    def __init__(self, secret: bytes):
        self._secret = secret
        # Those that were signed out before their time, and when that would have been.
        self._ended: dict[str, int] = {}

    def begin(self, role: Role) -> DashboardSession:
        return DashboardSession(role, secrets.token_hex(16), int(time()) + LASTS_S)

    def end(self, name: str, ends_at: int) -> None:
        now = time()
        self._ended = {session: until for session, until in self._ended.items() if until > now}
        self._ended[name] = ends_at

    def holds(self, session: DashboardSession) -> bool:
        return session.ends_at > time() and session.name not in self._ended

    def cookie_of(self, session: DashboardSession) -> str:
        said = f"{session.role}.{session.name}.{session.ends_at}"
        return f"{said}.{self._signed(f'session {said}')}"

    def csrf_of(self, session: DashboardSession) -> str:
        """The token that changes must carry, since browsers send cookies by themselves."""
        return self._signed(f"csrf {session.name}")

    def is_csrf(self, session: DashboardSession, given: bytes) -> bool:
        return hmac.compare_digest(self.csrf_of(session).encode(), given)

    def find(self, cookies: bytes) -> DashboardSession | None:
        """The session in a request's Cookie line; None without one that holds."""
        for cookie in cookies.decode("latin-1").split(";"):
            name, _, value = cookie.strip().partition("=")
            if name != COOKIE:
                # A line may have thousands of them, and each signature costs as much as a small request.
                continue
            said, _, signed = value.rpartition(".")
            if hmac.compare_digest(self._signed(f"session {said}").encode(), signed.encode("latin-1")):
                role, which, ends_at = said.split(".")
                session = DashboardSession(
                    "administrator" if role == "administrator" else "operator", which, int(ends_at)
                )
                if self.holds(session):
                    return session
        return None

    def _signed(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), sha256).hexdigest()


class WrongKeys:
    """When and from where wrong keys came lately, as many as are let through."""

    def __init__(self) -> None:
        self._came: deque[tuple[float, str]] = deque(maxlen=OF_ALL)

    def add(self, address: str, now: float) -> None:
        self._came.append((now, address))

    def wait_s(self, address: str, now: float) -> float:
        """Until a key from there is looked at again; 0: now."""
        while self._came and self._came[0][0] <= now - WINDOW_S:
            self._came.popleft()
        own = [at for at, who in self._came if who == address]
        first = [own[-OF_ONE]] if len(own) >= OF_ONE else []
        first += [self._came[0][0]] if len(self._came) >= OF_ALL else []
        return max((at + WINDOW_S - now for at in first), default=0.0)


def set_cookie(value: str, *, secure: bool, lasts_s: int = LASTS_S) -> bytes:
    """The line of an answer; `lasts_s` 0 takes it away."""
    said = f"set-cookie: {COOKIE}={value}; Path=/crosstie; Max-Age={lasts_s}; HttpOnly; SameSite=Strict"
    return f"{said}{'; Secure' if secure else ''}\r\n".encode()


# Sessions at the page of operators


KEY_VARIABLE = "CROSSTIE_ADMIN_KEY"
OPERATOR_VARIABLE = "CROSSTIE_OPERATOR_KEY"
_LEAST_KEY = 16


class DoorKeys:
    def __init__(self) -> None:
        given, operator = _from_environment(KEY_VARIABLE), _from_environment(OPERATOR_VARIABLE)
        if given and given == operator:
            raise BadInput(f"{OPERATOR_VARIABLE}: is the administrator's key; give operators one of their own")
        self.file: Path | None = None
        if not given:
            given = "ca-" + secrets.token_urlsafe(32)
            # mkstemp's files are their owner's alone.
            handle, name = tempfile.mkstemp(prefix="crosstie-admin-", suffix=".key")
            with os.fdopen(handle, "w") as file:
                file.write(given + "\n")
            self.file = Path(name)
        # Of several processes that share it, the one that made it takes it away.
        self._maker = os.getpid()
        self._digest = hashlib.sha256(given.encode()).digest()
        self._operator = hashlib.sha256(operator.encode()).digest() if operator else None
        # What reports call it by; nobody finds the key by it.
        self.fingerprint = hashlib.sha256(b"fingerprint " + given.encode()).hexdigest()[:8]
        # What sessions are signed with, in all workers.
        self.secret = secrets.token_bytes(32)

    def opens(self, authorization: bytes) -> bool:
        """Whether it is the administrator's."""
        scheme, _, given = authorization.partition(b" ")
        right = hmac.compare_digest(hashlib.sha256(given.strip()).digest(), self._digest)
        return right and scheme.lower() == b"bearer"

    def role_of(self, key: object) -> Role | None:
        """The role of the key that somebody signs in with."""
        if not isinstance(key, str):
            return None
        digest = hashlib.sha256(key.strip().encode()).digest()
        if hmac.compare_digest(digest, self._digest):
            return "administrator"
        return "operator" if self._operator is not None and hmac.compare_digest(digest, self._operator) else None

    def forget(self) -> None:
        if self.file is not None and os.getpid() == self._maker:
            self.file.unlink(missing_ok=True)


def _from_environment(variable: str) -> str:
    given = os.environ.get(variable, "").strip()
    if given and (len(given) < _LEAST_KEY or not given.isascii() or not given.isprintable() or " " in given):
        raise BadInput(f"{variable}: must be {_LEAST_KEY} characters or more, plain ASCII without spaces")
    return given

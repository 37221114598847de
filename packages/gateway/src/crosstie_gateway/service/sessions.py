"""Who is signed in to the page of operators: keys, and signed cookies that every worker can read.

A cookie says role, session and end. Its secret is made at start, so a restart signs all out. Signing out reaches every
worker. Who guesses keys has to wait.
"""

import hmac
import secrets
from collections import deque
from hashlib import sha256
from time import time
from typing import Literal, NamedTuple

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

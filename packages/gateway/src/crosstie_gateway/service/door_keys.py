"""The administrator's and the operators' keys, from the environment; the first is else made up and written to a file.
An operator's key opens the page at /crosstie/ and changes nothing. Neither is a user's key."""

import hashlib
import hmac
import os
import secrets
import tempfile
from pathlib import Path

from crosstie.core.errors import BadInput
from crosstie_gateway.service.sessions import Role

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

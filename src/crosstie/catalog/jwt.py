"""The [jwt] of a fleet file: whose signed tokens are taken beside keys, and what they say of who sends them."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from crosstie.catalog.reading import one_of, read_record, table
from crosstie.core.errors import BadData
from crosstie.core.fleet import ASYMMETRIC, JwtIdentity

_HERE = ("127.0.0.1", "::1", "localhost")


def read_jwt(file: Path, raw: object, *, keys: bool) -> JwtIdentity | None:
    """`keys`: whether the file has them required."""
    if raw is None:
        return None
    entry: dict[str, Any] = dict(table(file, "jwt", raw))
    if not keys:
        raise BadData(file, "jwt", 'goes with keys = "required" in [state]: usage and teams are kept in its store')
    if isinstance(entry.get("audience"), str):
        entry["audience"] = [entry["audience"]]
    identity = read_record(file, "jwt", entry, JwtIdentity)
    if not identity.audience:
        raise BadData(file, "jwt.audience", "is empty: tokens for anybody would be taken")
    _check_url(file, "jwt.issuer", identity.issuer)
    if identity.jwks is not None and "://" in identity.jwks:
        _check_url(file, "jwt.jwks", identity.jwks)
    if not identity.algorithms:
        raise BadData(file, "jwt.algorithms", f"is empty; known: {', '.join(ASYMMETRIC)}")
    for index, name in enumerate(identity.algorithms):
        # Neither none nor a shared secret: whoever can verify those can make them.
        one_of(file, f"jwt.algorithms[{index}]", name, ASYMMETRIC)
    if identity.teams and identity.team_claim is None:
        raise BadData(file, "jwt.teams", "goes with team_claim, which is missing")
    if identity.jwks is not None and "://" not in identity.jwks:
        # As that of the store: from where the fleet file lies.
        place = str(file.parent.absolute() / Path(identity.jwks).expanduser())
        return read_record(file, "jwt", {**entry, "jwks": place}, JwtIdentity)
    return identity


def _check_url(file: Path, where: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        host = None
    if host is None or not (parts.scheme == "https" or (parts.scheme == "http" and host in _HERE)):
        raise BadData(file, where, "is no https address; http is for this machine alone")

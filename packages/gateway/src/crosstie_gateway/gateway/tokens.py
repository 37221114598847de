"""Signed tokens (JWT) as identities: whether one holds, and whose it is.

`service.token_keys` brings the issuer's public keys. A verified token is remembered by its hash until it ends, since a
signature costs more than the rest of a request. Not compiled: PyJWT is imported with the first verifier.
"""

import base64
import binascii
import hashlib
from collections.abc import Callable, Iterable, Mapping
from time import time
from typing import Any, NamedTuple

import msgspec

from crosstie.core.errors import MissingExtra
from crosstie.core.fleet import JwtIdentity
from crosstie_gateway.ledger.keys import SUBJECTS_FROM

# Tokens that are remembered, and the longest that is looked at.
_MOST_REMEMBERED, _MOST_BYTES = 10_000, 16_384
_MOST_SUBJECT = 255
# The smallest RSA key that a signature is believed of, in bits.
_LEAST_RSA = 2048
# By how an algorithm's name begins, the only kind of key that it goes with: no public key is ever taken for a secret.
_KINDS = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
_SUBJECT_IDS = 2**49


class TokenRefused(Exception):
    """`code` and the words are for the client; they repeat nothing of its token."""

    def __init__(self, code: str, why: str, status: int = 401):
        super().__init__(why)
        self.code, self.status = code, status


class Verified(NamedTuple):
    """Whose a token is. `teams`: those that it names, by the names that the store has for them, the first first."""

    id: int
    subject: str
    teams: tuple[str, ...]
    explains: bool
    ends_at: float


class _Head(msgspec.Struct):
    alg: str = ""
    kid: str = ""
    crit: list[str] | None = None


class TokenVerifier:
    """`on_unknown_key` is called when a token names a key that is not known."""

    def __init__(self, config: JwtIdentity, on_unknown_key: Callable[[], None] = lambda: None):
        try:
            import jwt
        except ImportError:
            raise MissingExtra("[jwt] needs PyJWT", "jwt", "crosstie-gateway") from None
        self._jwt: Any = jwt
        self.config, self._on_unknown_key = config, on_unknown_key
        # By kid, "" for those that have none.
        self._keys: dict[str, list[Any]] = {}
        self._remembered: dict[bytes, Verified] = {}

    @property
    def keys(self) -> int:
        return sum(map(len, self._keys.values()))

    def know(self, keys: Iterable[Mapping[str, Any]]) -> int:
        """Takes these JWKs and no others from now on; how many are of use. Tokens verified with a key that is gone are
        forgotten."""
        known: dict[str, list[Any]] = {}
        for said in keys:
            made = self._usable(said)
            if made is not None:
                kid = said.get("kid")
                known.setdefault(kid if isinstance(kid, str) else "", []).append(made)
        if {kid: [key[1] for key in made] for kid, made in known.items()} != {
            kid: [key[1] for key in made] for kid, made in self._keys.items()
        }:
            self._remembered.clear()
        self._keys = known
        return self.keys

    def _usable(self, said: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """The key, and what was said of it; None: it is secret, for something else, broken or weak. Nulls count as
        absent."""
        said = {name: value for name, value in said.items() if value is not None}
        if said.get("kty") not in _KINDS.values() or said.get("use", "sig") != "sig":
            return None
        operations = said.get("key_ops", ["verify"])
        if not isinstance(operations, list) or "verify" not in operations:
            return None
        public = {name: value for name, value in said.items() if name not in ("d", "p", "q", "dp", "dq", "qi", "oth")}
        try:
            # Without an algorithm PyJWT goes by the kind of key.
            key = self._jwt.PyJWK({name: value for name, value in public.items() if name != "alg"}).key
        except (self._jwt.PyJWTError, ValueError, TypeError, KeyError):
            return None
        if said["kty"] == "RSA" and key.key_size < _LEAST_RSA:
            return None
        return key, public

    def verified(self, token: bytes) -> Verified:
        """Raises TokenRefused."""
        now, mark = time(), hashlib.sha256(token).digest()
        known = self._remembered.get(mark)
        if known is not None:
            if now < known.ends_at:
                return known
            del self._remembered[mark]
        whose = self._verify(token)
        self._remembered[mark] = whose
        if len(self._remembered) > _MOST_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        return whose

    def _verify(self, token: bytes) -> Verified:
        jwt, config = self._jwt, self.config
        if len(token) > _MOST_BYTES:
            raise TokenRefused("invalid_token", "this token is too long")
        head = _head(token)
        if head.alg not in config.algorithms or head.crit is not None:
            raise TokenRefused("invalid_token", "this token is not signed in a way that is taken here")
        try:
            claims: dict[str, Any] = jwt.decode(
                token, self._key_of(head), algorithms=[head.alg], audience=list(config.audience), issuer=config.issuer,
                leeway=config.leeway_s, options={"require": ["exp", "sub", "iss", "aud"]},
            )  # fmt: skip
        except jwt.ExpiredSignatureError:
            raise TokenRefused("token_expired", "this token has expired") from None
        except (jwt.ImmatureSignatureError, jwt.InvalidIssuedAtError):
            raise TokenRefused("token_not_yet_valid", "this token is not valid yet") from None
        except jwt.InvalidAudienceError:
            raise TokenRefused("wrong_audience", "this token is for somebody else") from None
        except jwt.InvalidIssuerError:
            raise TokenRefused("wrong_issuer", "this token is of another issuer") from None
        except (jwt.PyJWTError, ValueError, TypeError):
            raise TokenRefused("invalid_token", "this token does not hold") from None
        return self._whose(claims)

    def _key_of(self, head: _Head) -> Any:
        kind = _KINDS[head.alg[:2]]
        if not self._keys:
            raise TokenRefused("token_keys_unavailable", "the issuer's keys are not known yet: try again", 503)
        # A token that names no key may be checked only where there is one of that kind.
        named = self._keys.get(head.kid, []) if head.kid else [key for some in self._keys.values() for key in some]
        able = [key for key, said in named if said["kty"] == kind and said.get("alg", head.alg) == head.alg]
        if len(able) != 1:
            if not named:
                self._on_unknown_key()
            raise TokenRefused("unknown_token_key", "this token is signed with a key that is not known")
        return able[0]

    def _whose(self, claims: dict[str, Any]) -> Verified:
        config, subject = self.config, claims["sub"]
        if not isinstance(subject, str) or not subject.isprintable() or not 0 < len(subject) <= _MOST_SUBJECT:
            raise TokenRefused("invalid_token", "this token does not say whose it is")
        scopes = _scopes(claims)
        if config.scope is not None and config.scope not in scopes:
            raise TokenRefused("insufficient_scope", "this token has not the scope that is needed here", 403)
        explains = config.explain_scope is not None and config.explain_scope in scopes
        named = _values(claims.get(config.team_claim)) if config.team_claim else []
        teams = tuple(config.teams[name] for name in named if name in config.teams) if config.teams else tuple(named)
        if not teams and config.team is not None:
            teams = (config.team,)
        ends_at = float(claims["exp"]) + config.leeway_s
        return Verified(subject_id(config.issuer, subject), subject, teams, explains, ends_at)


def subject_id(issuer: str, subject: str) -> int:
    """The number that a subject's usage is kept under: the same everywhere, and nobody's key."""
    said = hashlib.sha256(f"{issuer}\n{subject}".encode()).digest()
    return SUBJECTS_FROM + int.from_bytes(said[:8], "little") % _SUBJECT_IDS


def _head(token: bytes) -> _Head:
    part = token.split(b".", 1)[0]
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4)), type=_Head)
    except (msgspec.DecodeError, binascii.Error, ValueError, RecursionError):
        raise TokenRefused("invalid_token", "this is neither a key nor a token of this gateway") from None


def _scopes(claims: dict[str, Any]) -> list[str]:
    """As RFC 9068 has them, or Azure, or as a list."""
    scopes: list[str] = []
    for name in ("scope", "scp"):
        given = claims.get(name)
        scopes += given.split() if isinstance(given, str) else _values(given)
    return scopes


def _values(given: object) -> list[str]:
    if isinstance(given, str):
        return [given]
    return [value for value in given if isinstance(value, str)] if isinstance(given, list) else []

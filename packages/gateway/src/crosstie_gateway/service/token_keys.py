"""The public keys that tokens are verified with: read from a file, or fetched from their issuer, and kept up to date.

No request waits for them. They are asked for every few minutes, and within seconds for an unknown key; known ones stay
while the issuer is away.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec

from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, JwtIdentity
from crosstie.core.histogram import Family
from crosstie.wire.address import Address, is_loopback
from crosstie.wire.fetch import fetch_once
from crosstie_gateway.gateway.errors import without_address
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.gateway.tokens import TokenVerifier
from crosstie_gateway.service.process import Component, GatewayProcess

_DISCOVERY = "/.well-known/openid-configuration"
_MOST_BYTES = 2**20
_PATIENCE_S = 10.0
# How often it is tried while there are none at all.
_WITHOUT_S = 5.0


class _Discovered(msgspec.Struct):
    issuer: str
    jwks_uri: str


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


class TokenKeys(Component):
    """For the [jwt] of the fleet file; without one it does nothing."""

    async def start(self, process: GatewayProcess) -> None:
        self._process, self._gateway = process, process.gateway
        self._config: JwtIdentity | None = None
        self._verifier: TokenVerifier | None = None
        self._task: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()
        self._failures, self._failing = 0, False
        self._heed(process.fleet)
        if self._verifier is not None:
            await self._refresh(self._verifier)
            self._follow(self._verifier)

    def reloaded(self, fleet: Fleet) -> None:
        before = self._verifier
        self._heed(fleet)
        if self._verifier is not None and self._verifier is not before:
            self._follow(self._verifier, at_once=True)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _heed(self, fleet: Fleet) -> None:
        if fleet.jwt != self._config:
            if self._task is not None:
                self._task.cancel()
                self._task = None
            self._verifier = None if fleet.jwt is None else TokenVerifier(fleet.jwt, self._asked.set)
            self._config = fleet.jwt
        guard = self._gateway.context.guard
        if guard is not None:
            guard.tokens = self._verifier

    def _follow(self, verifier: TokenVerifier, *, at_once: bool = False) -> None:
        self._task = self._gateway.loop.create_task(self._keep(verifier, at_once))

    async def _keep(self, verifier: TokenVerifier, at_once: bool) -> None:
        if at_once:
            await self._refresh(verifier)
        loop, looked_at = self._gateway.loop, float("-inf")
        while True:
            self._asked.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(verifier.config.refresh_s if verifier.keys else _WITHOUT_S):
                    await self._asked.wait()
            if self._asked.is_set():
                # Made-up names of keys must not have the issuer asked as often.
                await asyncio.sleep(max(looked_at + verifier.config.refresh_unknown_s - loop.time(), 0.0))
                looked_at = loop.time()
            await self._refresh(verifier)

    async def _refresh(self, verifier: TokenVerifier) -> None:
        try:
            keys = await self._read(verifier.config)
            usable = verifier.know(keys)
        except (OSError, BadInput, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._fail(verifier, str(error) if isinstance(error, BadInput) else without_address(error))
            return
        except Exception as error:  # noqa: BLE001 (whatever it was: it is told, and the next refresh comes)
            self._fail(verifier, f"{type(error).__name__}: {error}")
            return
        if not usable:
            self._fail(verifier, "there is no key among them that signs as [jwt] algorithms say")
        elif self._failing:
            self._failing = False
            self._process.notify(Notice("jwks_back", "info", "jwt: the issuer's keys are known again"))

    def _fail(self, verifier: TokenVerifier, why: str) -> None:
        self._failures += 1
        if not self._failing:
            self._failing = True
            kept = f"the {verifier.keys} that are known stay" if verifier.keys else "no token is taken until they are"
            line = f"jwt: the issuer's keys cannot be had, {kept}: {why}"
            self._process.notify(Notice("jwks_failing", "error", line, why=why))

    async def _read(self, config: JwtIdentity) -> list[dict[str, Any]]:
        """Raises OSError, BadInput and what msgspec raises."""
        place = config.jwks
        if place is None:
            document = msgspec.json.decode(await _got(config.issuer.rstrip("/") + _DISCOVERY), type=_Discovered)
            if document.issuer != config.issuer:
                raise BadInput("the issuer calls itself something else")
            place = document.jwks_uri
            check_url(place)
        elif "://" not in place:
            text = await asyncio.to_thread(Path(place).read_bytes)
            return msgspec.json.decode(text, type=_KeySet).keys
        return msgspec.json.decode(await _got(place), type=_KeySet).keys

    def families(self) -> list[Family]:
        verifier = self._verifier
        if verifier is None:
            return []
        known, failed = "Keys that tokens are verified with.", "Times that they could not be had."
        return [
            ("crosstie_jwks_keys", "gauge", known, [({}, float(verifier.keys))]),
            ("crosstie_jwks_failures_total", "counter", failed, [({}, float(self._failures))]),
        ]


def check_url(url: str) -> None:
    """Raises BadInput: what says who may come in is not to be had from anybody on the way."""
    at = Address(url)
    if not at.secure and not is_loopback(at.host):
        raise BadInput("the address of the issuer's keys is not https")


async def _got(url: str) -> bytes:
    at = Address(url)
    query = url.partition("?")[2]
    path = (at.base or "/") + (f"?{query}" if query else "")
    headers = [(b"accept", b"application/json"), (b"accept-encoding", b"identity")]
    answer = await fetch_once(at, "GET", path, headers=headers, timeout_s=_PATIENCE_S, most_bytes=_MOST_BYTES)
    if answer.status != 200:
        raise ConnectionError(f"answered {answer.status}")
    return answer.body

"""An issuer of tokens: it signs, publishes its keys, rotates them and goes away."""

import asyncio
import json
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from jwt.algorithms import ECAlgorithm

from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply, Server

AUDIENCE = "crosstie"


class Issuer:
    def __init__(self) -> None:
        self.keys: dict[str, EllipticCurvePrivateKey] = {}
        self.published: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.away = False
        self.called: str | None = None
        self.rotate("first")

    async def start(self) -> None:
        self.server = Server(asyncio.get_running_loop(), self._handle)
        self.port = await self.server.listen("127.0.0.1", 0)

    def close(self) -> None:
        self.server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/realms/ai"

    def rotate(self, kid: str, *, keep: bool = False) -> None:
        """A new key; `keep`: the old ones are still published."""
        self.keys[kid] = generate_private_key(SECP256R1())
        said = {
            **ECAlgorithm.to_jwk(self.keys[kid].public_key(), as_dict=True),
            "kid": kid,
            "use": "sig",
            "alg": "ES256",
        }
        self.published = [*(self.published if keep else []), said]

    def _handle(self, request: Request, reply: Reply) -> None:
        self.asked.append(request.path)
        if self.away:
            reply.send(503, b"{}")
        elif request.path == "/realms/ai/.well-known/openid-configuration":
            said = {"issuer": self.called or self.url, "jwks_uri": f"{self.url}/keys", "token_endpoint": "unused"}
            reply.send(200, json.dumps(said).encode())
        elif request.path == "/realms/ai/keys":
            reply.send(200, json.dumps({"keys": self.published}).encode())
        else:
            reply.send(404, b"{}")

    def token(self, subject: str = "alice", *, kid: str = "first", **claims: Any) -> str:
        now = int(time.time())
        said = {"iss": self.url, "aud": AUDIENCE, "sub": subject, "exp": now + 600, "iat": now, **claims}
        said = {name: value for name, value in said.items() if value is not None}
        return jwt.encode(said, self.keys[kid], algorithm="ES256", headers={"kid": kid})

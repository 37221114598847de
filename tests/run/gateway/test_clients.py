"""Where a request came from: as the socket says, or a proxy that is trusted."""

import pytest

from crosstie_gateway.gateway.identity import Clients
from crosstie_gateway.wire.request import Request

PROXIES = ("10.0.0.0/8", "192.0.2.7", "fd00::/8")


@pytest.mark.parametrize(
    ("trusted", "peer", "forwarded", "client"),
    [
        ((), "10.0.0.1", "203.0.113.5", "10.0.0.1"),
        # Anybody can send one.
        (PROXIES, "198.51.100.1", "203.0.113.5", "198.51.100.1"),
        (PROXIES, "10.0.0.1", None, "10.0.0.1"),
        (PROXIES, "10.0.0.1", "203.0.113.5", "203.0.113.5"),
        # What the client wrote itself stands before what the proxies did.
        (PROXIES, "10.0.0.1", "127.0.0.1, 203.0.113.5, 192.0.2.7", "203.0.113.5"),
        (PROXIES, "::ffff:10.0.0.1", " 203.0.113.5 ", "203.0.113.5"),
        (PROXIES, "fd00::1", "[2001:db8::5]:4711", "2001:db8::5"),
        (PROXIES, "10.0.0.1", "203.0.113.5:4711", "203.0.113.5"),
        (PROXIES, "10.0.0.1", "203.0.113.5, unknown", "10.0.0.1"),
        (PROXIES, "10.0.0.1", "", "10.0.0.1"),
        # Nobody but proxies: the first of them.
        (PROXIES, "10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        (PROXIES, "", "203.0.113.5", ""),
    ],
)
def test_the_client_is_the_last_whom_nobody_vouches_for(
    trusted: tuple[str, ...], peer: str, forwarded: str | None, client: str
) -> None:
    headers = {b"x-forwarded-for": forwarded.encode()} if forwarded is not None else {}
    request = Request("POST", "/v1/chat/completions", "", headers, b"")
    request.peer = peer
    assert Clients(trusted).address(request) == client

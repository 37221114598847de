"""Which pages of other origins may ask from a browser, and what their browsers are told (CORS). Keys come in headers
that a page sets, never in cookies: credentials are not allowed."""

from crosstie_gateway.gateway.attempt import OWN_HEADERS
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

_EXPOSED = b"access-control-expose-headers: %b\r\n" % b", ".join((*OWN_HEADERS, b"retry-after"))
_REMEMBERED_S = 600


def answers_browser(origins: tuple[str, ...], request: Request, reply: Reply) -> bool:
    """Whether it was a browser's preflight, answered here; other answers will say whether the page may read them."""
    origin = request.headers.get(b"origin")
    if origin is None:
        return False
    allowed = "*" in origins or origin.decode("latin-1") in origins
    if allowed:
        named = b"*" if "*" in origins else origin
        reply.lines = b"access-control-allow-origin: %b\r\nvary: origin\r\n%b" % (named, _EXPOSED)
    if request.method != "OPTIONS" or b"access-control-request-method" not in request.headers:
        return False
    wanted = request.headers.get(b"access-control-request-headers", b"authorization, content-type")
    may = b"access-control-allow-methods: GET, POST\r\naccess-control-allow-headers: %b\r\n" % wanted
    may += b"access-control-max-age: %d\r\n" % _REMEMBERED_S
    reply.start(204, may if allowed else b"", 0)
    reply.end()
    return True

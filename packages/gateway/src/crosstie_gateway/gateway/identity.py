"""What a request is known by beyond this gateway: its id, its place in a trace (W3C Trace Context), and its client's
address: the socket's, or what a proxy says of it that is trusted."""

import re
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

from crosstie_gateway.wire.request import Request

# Visible characters only: an id is returned in a header and written to logs.
_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
# Version 00 has four fields and no more; later versions may have more, and ff is none.
_FIELDS: Final = rb"-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_TRACEPARENT: Final = re.compile(rb"00" + _FIELDS + rb"|(?!00|ff)[0-9a-f]{2}" + _FIELDS + rb"(?:-[\x20-\x7e]*)?")
_MOST_TRACEPARENT: Final = 512
_MEMBER: Final = re.compile(
    rb"([a-z0-9][a-z0-9_\-*/]{0,240}(?:@[a-z][a-z0-9_\-*/]{0,13})?|[a-z][a-z0-9_\-*/]{0,255})"
    rb"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_MOST_MEMBERS: Final = 32


def is_id(given: bytes) -> bool:
    """Whether a client's own id of its request may be kept."""
    return _ID.fullmatch(given) is not None


def trace_context(traceparent: bytes, tracestate: bytes | None) -> tuple[bytes, bytes]:
    """The traceparent, and the lines that pass it on with its state; both empty where it is not valid."""
    if len(traceparent) > _MOST_TRACEPARENT or _TRACEPARENT.fullmatch(traceparent) is None:
        # Nothing is known of a state whose parent is not.
        return b"", b""
    lines = b"traceparent: %b\r\n" % traceparent
    if tracestate is not None and is_tracestate(tracestate):
        lines += b"tracestate: %b\r\n" % tracestate
    return traceparent, lines


def context_of(request: Request) -> tuple[bytes, bytes]:
    """The same of a request; both empty where it has none."""
    given = request.headers.get(b"traceparent")
    return (b"", b"") if given is None else trace_context(given, request.headers.get(b"tracestate"))


def is_tracestate(value: bytes) -> bool:
    keys: set[bytes] = set()
    for member in value.split(b","):
        member = member.strip(b" \t")
        if not member:
            continue
        match = _MEMBER.fullmatch(member)
        if match is None or match[1] in keys or len(keys) == _MOST_MEMBERS:
            return False
        keys.add(match[1])
    return bool(keys)


def trace_id(traceparent: bytes) -> str:
    """Of a valid traceparent; empty of none."""
    return traceparent[3:35].decode("ascii")


class Clients:
    """`trusted`: addresses and networks of proxies whose X-Forwarded-For is believed; anybody can send one."""

    def __init__(self, trusted: tuple[str, ...]):
        self._trusted = [ip_network(network, strict=False) for network in trusted]

    def address(self, request: Request) -> str:
        """From the right, where the nearest proxy writes, to the first address that is no trusted proxy's."""
        known = request.peer
        if not self._trusted or not self._trusts(_address(known)):
            return known
        forwarded = request.headers.get(b"x-forwarded-for", b"").decode("latin-1")
        for hop in reversed(forwarded.split(",")):
            address = _address(hop)
            if address is None:
                break
            known = str(address)
            if not self._trusts(address):
                break
        return known

    def _trusts(self, address: IPv4Address | IPv6Address | None) -> bool:
        return address is not None and any(address in network for network in self._trusted)


def _address(said: str) -> IPv4Address | IPv6Address | None:
    """Some write a port behind it."""
    said = said.strip()
    if said.startswith("["):
        said = said[1:].partition("]")[0]
    elif said.count(":") == 1:
        said = said.partition(":")[0]
    try:
        address = ip_address(said)
    except ValueError:
        return None
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address

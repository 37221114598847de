"""Whose a request is by its address: the socket's, or what a proxy says of it that is trusted."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from crosstie_gateway.wire.request import Request


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

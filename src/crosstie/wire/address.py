"""Where a server answers: a base URL taken apart once."""

import ipaddress
from urllib.parse import urlsplit

from crosstie.core.errors import BadInput

_BY_NAME = "dns+"


class Address:
    """`http://host:8000/v1` as what a connection and a request line need. `dns+http://host:8000/v1#10.0.0.1` is one
    of the addresses that a name stands for: the name is what requests and certificates are about. `unix:/run/x.sock`
    is a socket of this machine, with the API below /v1. `kube://...` stands for replicas that nobody has found yet."""

    __slots__ = ("authority", "base", "by_name", "dials", "host", "port", "root", "secure", "socket", "url")

    def __init__(self, url: str):
        parts = urlsplit(url)
        # The file of a socket; "": it has a host and a port.
        self.socket = parts.path if parts.scheme == "unix" else ""
        if self.socket or parts.scheme == "kube":
            self.url, self.secure, self.by_name = url, False, False
            # Nobody was found in the cluster yet: port 0 is one at which nobody can listen, so it is down.
            self.host = self.dials = "localhost" if self.socket else "127.0.0.1"
            self.port, self.authority, self.base, self.root = 0, b"localhost", "/v1", ""
            return
        try:
            port = parts.port
        except ValueError:
            raise BadInput(f"'{url}': the port is no number up to 65535") from None
        scheme = parts.scheme.removeprefix(_BY_NAME)
        if scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(f"'{url}' is no http or https address")
        self.url = url.rstrip("/")
        self.secure = scheme == "https"
        self.host = parts.hostname
        self.by_name = scheme != parts.scheme
        # What is connected to.
        self.dials = (self.by_name and parts.fragment) or self.host
        self.port = port or (443 if self.secure else 80)
        try:
            named = self.host.encode("ascii" if self.host.isascii() else "idna")
        except UnicodeError:
            raise BadInput(f"'{url}': no name of a host is like that") from None
        named = b"[%b]" % named if b":" in named else named
        self.authority = named if port is None else b"%b:%d" % (named, port)
        # The path below which the API lies, and the one below which health and metrics do.
        self.base = parts.path.rstrip("/")
        self.root = self.base.removesuffix("/v1")


def is_loopback(host: str) -> bool:
    """Whether a host, as a name or an address without brackets, is this machine to itself alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

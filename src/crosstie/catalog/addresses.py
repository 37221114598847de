"""Where backends answer, as base URLs in their one normal form; and where engines tell what their caches hold."""

import ipaddress
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from crosstie.catalog.kube import KUBE, read_source
from crosstie.catalog.reading import text, texts
from crosstie.core.errors import BadData

_HOST = re.compile(r"^[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?\.?$")
_PATH = re.compile(r"^[A-Za-z0-9._~!$&'()*+,;=:%/-]*$")
_USUAL_PORTS = {"http": 80, "https": 443}
# Of a name that stands for all of its addresses, a replica each.
BY_NAME = "dns+"
# Of a socket of this machine: its file follows.
ON_SOCKET = "unix:"
# Of the name of such a file, in bytes: what the system has room for, less its end.
_LONGEST_NAME = 107
_ENDPOINTS = ("/completions", "/embeddings", "/responses")


def is_found(backend: str) -> bool:
    """Whether it stands for replicas that come and go: somebody must look for them."""
    return backend.startswith((BY_NAME, KUBE))


def base_urls(file: Path, where: str, raw: object) -> tuple[str, ...]:
    return tuple(read_address(file, f"{where}[{i}]", given) for i, given in enumerate(texts(file, where, raw)))


def read_address(file: Path, where: str, given: str) -> str:
    """A base URL in its one normal form, so that two that mean the same are equal."""
    if given.lower().startswith(BY_NAME):
        address = read_address(file, where, given[len(BY_NAME) :])
        host = urlsplit(address).hostname or ""
        if ":" in host or not host.strip("0123456789."):
            raise BadData(file, where, f"'{given}' is an address already: {BY_NAME} is for a name that has several")
        return BY_NAME + address
    if not given.isprintable() or " " in given:
        raise BadData(file, where, "has spaces, control characters or line breaks")
    if given.lower().startswith(KUBE):
        return read_source(file, where, given)
    if given.lower().startswith(ON_SOCKET):
        return ON_SOCKET + _socket(file, where, given[len(ON_SOCKET) :])
    # These two first, and not repeated: passwords and keys would be in logs.
    if "@" in given:
        raise BadData(file, where, "has a user or a password before '@'; name the key's variable with api_key_env")
    if "?" in given or "#" in given:
        raise BadData(file, where, "has a query or a fragment, and paths are put after it")
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError as error:
        raise BadData(file, where, f"'{given}' is no address: {error}") from None
    if parts.scheme not in _USUAL_PORTS or not parts.hostname:
        raise BadData(file, where, f"'{given}' is no http or https address, such as http://host:8000/v1")
    if port == 0 or parts.netloc.endswith(":"):
        raise BadData(file, where, f"'{given}' has no port from 1 to 65535 after the ':'")
    path = parts.path.rstrip("/")
    if not _PATH.match(path):
        raise BadData(file, where, f"the path '{path}' has characters that an address must percent-encode")
    if path.endswith(_ENDPOINTS):
        raise BadData(file, where, f"'{given}' is an endpoint: give the base URL before it, which usually ends in /v1")
    usual = port is None or port == _USUAL_PORTS[parts.scheme]
    return f"{parts.scheme}://{_host(file, where, parts.hostname)}{'' if usual else f':{port}'}{path}"


def _socket(file: Path, where: str, given: str) -> str:
    """`unix:/run/vllm.sock` and `unix:///run/vllm.sock` mean the same."""
    name = given[2:] if given.startswith("//") else given
    if not name.startswith("/") or name.endswith("/") or not _PATH.match(name) or "%" in name:
        raise BadData(file, where, f"'{given}' is no whole path of a socket, such as unix:/run/vllm.sock")
    if len(name) > _LONGEST_NAME:
        raise BadData(file, where, f"the path of a socket has at most {_LONGEST_NAME} bytes, and this has {len(name)}")
    return name


def _host(file: Path, where: str, host: str) -> str:
    """`host` in lower case and, if it is IPv6, in brackets and its short form."""
    numeric = ":" in host or not host.strip("0123456789.")
    if numeric and "%" not in host:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            raise BadData(file, where, f"'{host}' is no IP address") from None
        return f"[{address}]" if address.version == 6 else str(address)
    if numeric or not _HOST.match(host):
        raise BadData(file, where, f"'{host}' is no host: letters, digits, dots and dashes, or an IP address")
    return host


HOST = "{host}"


def read_endpoints(file: Path, where: str, raw: dict[str, Any], replicas: int) -> dict[str, Any]:
    given = [key for key in ("kv_events", "kv_replay") if key in raw]
    return {key: _endpoints(file, f"{where}.{key}", raw[key], replicas) for key in given}


def _endpoints(file: Path, where: str, raw: object, replicas: int) -> tuple[str, ...]:
    given = (text(file, where, raw),) if isinstance(raw, str) else texts(file, where, raw)
    if not given:
        raise BadData(file, where, "is empty: leave it out, or give an address")
    for address in given:
        rest = address.removeprefix("tcp://")
        host, colon, port = rest.rpartition(":")
        is_tcp = rest != address and host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536
        if not is_tcp and not (address.startswith("ipc://") and len(address) > len("ipc://")):
            raise BadData(file, where, f"'{address}' is no address such as tcp://{HOST}:5557")
    if replicas > 1 and len(given) == 1 and HOST not in given[0]:
        reason = f"one address for {replicas} backends: write {HOST} in it for each backend's own, or a list of them"
        raise BadData(file, where, reason)
    if len(given) > 1 and replicas and len(given) != replicas:
        raise BadData(file, where, f"{len(given)} addresses for {replicas} backends: one for each, or one with {HOST}")
    return given


def endpoint(given: tuple[str, ...], index: int, host: str) -> str | None:
    """Of a pool's replica by its place among its backends; None: it has none."""
    if not given:
        return None
    address = given[0] if len(given) == 1 else given[index] if index < len(given) else ""
    return address.replace(HOST, f"[{host}]" if ":" in host else host) or None

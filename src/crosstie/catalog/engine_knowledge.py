"""Where the engines of a pool tell what their caches hold, as its fleet file says it."""

from pathlib import Path
from typing import Any

from crosstie.catalog.reading import text, texts
from crosstie.core.errors import BadData

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

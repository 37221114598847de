"""What the engines of a pool let others know, as its fleet file says it: a tokenizer, and events of their caches."""

from pathlib import Path
from typing import Any

from crosstie.catalog.reading import text, texts
from crosstie.core.errors import BadData

HOST = "{host}"


def read_known(file: Path, where: str, raw: dict[str, Any], replicas: int) -> dict[str, Any]:
    known: dict[str, Any] = {
        # Meant from where the fleet file lies, as its store is.
        key: str(file.parent.absolute() / Path(text(file, f"{where}.{key}", raw[key])).expanduser())
        for key in ("tokenizer", "chat_template")
        if key in raw
    }
    for key in ("kv_events", "kv_replay"):
        if key in raw:
            known[key] = _endpoints(file, f"{where}.{key}", raw[key], replicas)
    return known


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

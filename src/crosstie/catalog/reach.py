"""The keys of a [[pool]] that say how its backends are reached.

Files are named from where the fleet file lies; what is in them is the gateway's to read, when it begins to serve.
"""

import re
from pathlib import Path
from typing import Any

from crosstie.catalog.addresses import BY_NAME, ON_SOCKET, is_found
from crosstie.catalog.kube import KUBE
from crosstie.catalog.reading import read_values
from crosstie.core.errors import BadData
from crosstie.core.fleet import BackendAccess

# Of the machine that the gateway runs on: only who may write the fleet file may name them.
REACH_FILES = ("tls_ca", "tls_cert", "tls_key")
# The user of a proxy, and a variable that holds the password or both.
_USER = re.compile(r"[^:@/]*(:\$\{\w+\})?")
_PROXY = re.compile(r"http://([^@/]*@)?([a-z0-9_.-]+|\[[0-9a-f:.]+\]):[0-9]{1,5}/?", re.IGNORECASE)


def read_reach(file: Path, where: str, raw: dict[str, Any], backends: tuple[str, ...]) -> BackendAccess:
    given = read_values(file, where, raw, BackendAccess, [key for key in BackendAccess.__struct_fields__ if key in raw])
    for key in REACH_FILES:
        if key in given:
            given[key] = str(file.parent.absolute() / Path(given[key]).expanduser())
    tls = next((key for key in given if key.startswith("tls_")), None)
    if tls and backends and not any(backend.removeprefix(BY_NAME).startswith("https:") for backend in backends):
        raise BadData(file, f"{where}.{tls}", "has no meaning: no backend of the pool is https")
    if "proxy" in given:
        _check_proxy(file, f"{where}.proxy", given["proxy"], backends)
    return BackendAccess(**given)


def _check_proxy(file: Path, where: str, proxy: str, backends: tuple[str, ...]) -> None:
    """What is in a variable is looked at when it is read."""
    user, at, _ = proxy.removeprefix("http://").rpartition("@")
    if at and not _USER.fullmatch(user):
        # Not repeated: it would be in logs.
        raise BadData(file, where, "has a password in it: put it into a variable, as http://${PROXY_USER}@proxy:3128")
    if proxy != "environment" and not proxy.startswith("${") and not _PROXY.fullmatch(proxy):
        raise BadData(file, where, "is no proxy such as http://proxy:3128, nor ${VARIABLE}, nor 'environment'")
    if any(backend.startswith(ON_SOCKET) for backend in backends):
        raise BadData(file, where, f"does not go with {ON_SOCKET}, which is on this machine")
    if any(map(is_found, backends)):
        raise BadData(file, where, f"does not go with {BY_NAME} and {KUBE}: a proxy looks names up itself")

"""The keys of a [[pool]] that say how its backends are reached.

Files are named from where the fleet file lies; what is in them is the gateway's to read, when it begins to serve.
"""

from pathlib import Path
from typing import Any

import msgspec

from crosstie.catalog.addresses import BY_NAME
from crosstie.catalog.reading import read_values
from crosstie.core.errors import BadData
from crosstie.core.fleet import Reach

REACH_KEYS = frozenset(field.encode_name for field in msgspec.structs.fields(Reach))
# Of the machine that the gateway runs on: only who may write the fleet file may name them.
REACH_FILES = ("tls_ca", "tls_cert", "tls_key")


def read_reach(file: Path, where: str, raw: dict[str, Any], backends: tuple[str, ...]) -> Reach:
    given = read_values(file, where, raw, Reach, [key for key in raw if key in REACH_KEYS])
    for key in REACH_FILES:
        if key in given:
            given[key] = str(file.parent.absolute() / Path(given[key]).expanduser())
    if "tls_key" in given and "tls_cert" not in given:
        raise BadData(file, f"{where}.tls_cert", "missing: tls_key is there, and is the key of a certificate")
    tls = next((key for key in given if key.startswith("tls_")), None)
    if tls and backends and not any(one.removeprefix(BY_NAME).startswith("https:") for one in backends):
        raise BadData(file, f"{where}.{tls}", "has no meaning: no backend of the pool is https")
    return Reach(**given)

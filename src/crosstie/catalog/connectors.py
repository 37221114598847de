"""Connectors: how each engine moves a prompt's cache from prefill to decode, as facts of one file."""

from pathlib import Path

from crosstie.catalog.reading import read_record, sourced_file
from crosstie.core.disaggregated import Connector
from crosstie.core.errors import BadData


def read_connectors(file: Path) -> dict[str, Connector]:
    with sourced_file(file) as (raw, sources):
        connectors = {name: read_record(file, name, entry, Connector, sources, id=name) for name, entry in raw.items()}
    for name, connector in connectors.items():
        for key, what in (("vendors", "vendor"), ("stacks", "stack")):
            if not getattr(connector, key):
                raise BadData(file, f"{name}.{key}", f"must name at least one {what}")
        if connector.recomputes and connector.first_token != "decode":
            raise BadData(file, f"{name}.recomputes", 'goes with first_token = "decode"')
    return connectors

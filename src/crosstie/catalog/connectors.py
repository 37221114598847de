"""Connectors: how each engine moves a prompt's cache from prefill to decode, as facts of one file."""

from pathlib import Path

from crosstie.catalog.reading import fact_specs, only_keys, read_facts, read_toml, read_values, sourced_file, table
from crosstie.core.disaggregated import Connector
from crosstie.core.errors import BadData

_PLAIN = (
    "name", "aliases", "stacks", "vendors", "by_layer", "first_token", "recomputes", "room", "states_need_equal_tp",
)  # fmt: skip


def read_connectors(file: Path) -> dict[str, Connector]:
    names = [name for name in read_toml(file) if name != "sources"]
    found, (specs, _) = {}, fact_specs(Connector)
    with sourced_file(file, names) as (raw, sources):
        for name in names:
            entry = table(file, name, raw[name])
            only_keys(file, name, entry, {*_PLAIN, *specs})
            plain = read_values(file, name, entry, Connector, _PLAIN)
            for key, what in (("vendors", "vendor"), ("stacks", "stack")):
                if not plain[key]:
                    raise BadData(file, f"{name}.{key}", f"must name at least one {what}")
            if plain["recomputes"] and plain["first_token"] != "decode":
                raise BadData(file, f"{name}.recomputes", 'goes with first_token = "decode"')
            facts = {key: value for key, value in entry.items() if key in specs}
            found[name] = Connector(id=name, **plain, **read_facts(file, name, facts, Connector, sources))
    return found

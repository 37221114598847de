"""[hosting] of a workload file: which of its models share replicas, and what that may cost in cold loads."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import get_args

import msgspec

from crosstie.catalog.reading import number, only_keys, table, text, texts, whole
from crosstie.core.errors import BadData
from crosstie.core.workload import LoadFrom, Sharing

_KEYS = {field.name for field in msgspec.structs.fields(Sharing)}


def read_sharing(file: Path, raw: object, asked: Collection[str], model_of: Callable[[str, str], str]) -> Sharing:
    """`asked`: models of the classes. `model_of`: the id of a model that a key of the file names."""
    entry = table(file, "hosting", raw)
    only_keys(file, "hosting", entry, _KEYS)
    models = _models(file, "hosting.models", entry.get("models"), asked, model_of) or tuple(dict.fromkeys(asked))
    pinned = _models(file, "hosting.pinned", entry.get("pinned"), models, model_of)
    usual = Sharing(models=models)
    load_from = text(file, "hosting.load_from", entry.get("load_from", usual.load_from))
    if load_from not in get_args(LoadFrom):
        known = ", ".join(get_args(LoadFrom))
        raise BadData(file, "hosting.load_from", f"'{load_from}' is not one of {known}")
    for key, needs in (("host_gb_per_s", ("host",)), ("disk_gb_per_s", ("disk", "start")), ("start_s", ("start",))):
        if key in entry and load_from not in needs:
            raise BadData(file, f"hosting.{key}", f"has no meaning with load_from = '{load_from}'")

    def optional(key: str, low: float, high: float) -> float | None:
        return None if key not in entry else number(file, f"hosting.{key}", entry[key], low, high)

    return msgspec.structs.replace(
        usual,
        pinned=pinned,
        cold_share=number(file, "hosting.cold_share", entry.get("cold_share", usual.cold_share), 1e-6, 1),
        load_from=load_from,
        sequences=whole(file, "hosting.sequences", entry.get("sequences", usual.sequences), 1, 10_000),
        host_gb_per_s=optional("host_gb_per_s", 0.1, 1e4),
        disk_gb_per_s=optional("disk_gb_per_s", 0.001, 1e4),
        start_s=optional("start_s", 0, 3600),
    )


def _models(
    file: Path, where: str, raw: object, among: Collection[str], model_of: Callable[[str, str], str]
) -> tuple[str, ...]:
    found: list[str] = []
    for name in () if raw is None else texts(file, where, raw):
        model = model_of(where, name)
        if model not in among:
            whose = "asked for by no class" if where.endswith("models") else "not among hosting.models"
            raise BadData(file, where, f"{model} is {whose}")
        if model in found:
            raise BadData(file, where, f"{model} is there twice")
        found.append(model)
    if raw is not None and not found:
        raise BadData(file, where, "is empty: leave the key out for " + ("all" if where.endswith("models") else "none"))
    return tuple(found)

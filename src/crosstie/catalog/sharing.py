"""[hosting] of a workload file: which of its models share replicas, and what that may cost in cold loads."""

from collections.abc import Callable, Collection
from pathlib import Path

from crosstie.catalog.reading import only_keys, read_record, table, texts
from crosstie.core.errors import BadData
from crosstie.core.workload import Sharing


def read_sharing(file: Path, raw: object, asked: Collection[str], model_of: Callable[[str, str], str]) -> Sharing:
    """`asked`: models of the classes. `model_of`: the id of a model that a key of the file names."""
    entry = table(file, "hosting", raw)
    only_keys(file, "hosting", entry, set(Sharing.__struct_fields__))
    models = _models(file, "hosting.models", entry.get("models"), asked, model_of) or tuple(dict.fromkeys(asked))
    pinned = _models(file, "hosting.pinned", entry.get("pinned"), models, model_of)
    found = read_record(file, "hosting", raw, Sharing, models=models, pinned=pinned)
    for key, needs in (("host_gb_per_s", ("host",)), ("disk_gb_per_s", ("disk", "start")), ("start_s", ("start",))):
        if key in entry and found.load_from not in needs:
            raise BadData(file, f"hosting.{key}", f"has no meaning with load_from = '{found.load_from}'")
    return found


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

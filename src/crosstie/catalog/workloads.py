"""Workload files: what a plan is for. A slip fails here, with the file and the key."""

import math
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from crosstie.catalog.acceptance import NO_SPECULATION
from crosstie.catalog.classes import ClassReader, look_up, read_classes
from crosstie.catalog.days import USUAL, read_day
from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import (
    Names,
    check_once,
    in_form,
    keys_of,
    number,
    only_keys,
    read_record,
    read_toml,
    read_values,
    table,
    text,
    texts,
    toml_in,
)
from crosstie.catalog.recorded_sessions import workload_text
from crosstie.catalog.traces import find_trace, read_trace
from crosstie.catalog.writing import in_words
from crosstie.core.errors import BadData, BadInput, did_you_mean, near_names
from crosstie.core.fact import NounKind
from crosstie.core.forms import engine_release
from crosstie.core.model import Model
from crosstie.core.schedule import ScheduleRequest, quarter_number
from crosstie.core.workload import Constraints, ModelChoice, Prices, RequestClass, Sharing, Workload

_WORKLOAD = {"name", "sizing", "sure", "traffic", "models", "class", "constraints", "prices", "hosting", "schedule"}
_TRAFFIC = ("mean_over_peak", "growth_per_year", "horizon_years")
# Of the peak: what mean traffic is taken as.
_HALF = 0.5
# Workloads to start from, by name.
EXAMPLES = Path(__file__).parent / "data" / "workloads"


def find_workload(given: Path) -> Path:
    """A file, or the name of a shipped example."""
    shipped = EXAMPLES / f"{given}.toml"
    with in_words(f"{str(given)[:200]}: cannot be read"):
        if given.is_dir():
            raise BadInput(f"{given}: is a folder, not a workload file")
        if given.exists():
            return given
        if given.name == str(given) and shipped.exists():
            return shipped
    names = ", ".join(sorted(file.stem for file in EXAMPLES.glob("*.toml")))
    raise BadInput(f"{given}: no such workload file; shipped examples: {names}")


def example_text(name: str = "assistant") -> str:
    """A workload to start from: a shipped one, or one of the sessions of a recording."""
    shipped = {file.stem: file for file in sorted(EXAMPLES.glob("*.toml"))}
    if name in shipped:
        return shipped[name].read_text(encoding="utf-8")
    try:
        trace = find_trace(name, Path())
    except BadInput:
        hint = did_you_mean(near_names(name, shipped))
        raise BadInput(f"'{name}' is neither a recording nor an example: {', '.join(shipped)}.{hint}") from None
    return workload_text(read_trace(trace))


def read_workload(catalog: Catalog, file: Path, content: str | None = None) -> Workload:
    """`content`: of a file that is not there, in place of it; its name stands in messages."""
    raw = read_toml(file) if content is None else toml_in(file, content)
    only_keys(file, "", raw, _WORKLOAD)
    classes = raw.get("class")
    reader = ClassReader(file, catalog, [], len(classes) if isinstance(classes, list) else 0)
    traffic = table(file, "traffic", raw.get("traffic", {}))
    only_keys(file, "traffic", traffic, {"requests_per_s", "day", *_TRAFFIC})
    values = read_values(file, "traffic", traffic, Workload, _TRAFFIC)
    day = read_day(file, "traffic.day", traffic["day"], values.get("mean_over_peak")) if "day" in traffic else None
    if day:
        values["mean_over_peak"] = fmean(day)
    elif "mean_over_peak" not in traffic:
        reader.notes.append("mean traffic is taken as half the peak (traffic.mean_over_peak)")
    classes = read_classes(reader, raw.get("class"), traffic)
    names = _names(catalog)
    return Workload(
        name=text(file, "name", raw.get("name", file.stem)),
        classes=classes,
        models=_models(reader, raw.get("models", {}), {request_class.model for request_class in classes}),
        constraints=_constraints(file, raw.get("constraints", {}), names),
        prices=_prices(file, raw.get("prices", {}), names),
        sharing=_sharing(reader, raw["hosting"], classes) if "hosting" in raw else None,
        schedule=_schedule(file, raw.get("schedule", {}), names),
        folders=catalog.folders(sorted({request_class.model for request_class in classes})),
        file=str(file),
        notes=tuple(reader.notes),
        day=day or read_day(file, "", USUAL, values.get("mean_over_peak", _HALF)),
        **values,
        **read_values(file, "", raw, Workload, ("sizing",)),
        sure=_sure(file, raw),
    )


def _sure(file: Path, raw: dict[str, Any]) -> float | None:
    """Percent, as people say it."""
    if "sure" not in raw:
        return None
    if "sizing" in raw:
        raise BadData(file, "sure", "cannot go with sizing, which is 50 or 80 by name")
    return number(file, "sure", raw["sure"], 50, 99) / 100.0


def _models(reader: ClassReader, raw: object, asked: set[str]) -> dict[str, ModelChoice]:
    choices: dict[str, ModelChoice] = {}
    for name, said in table(reader.file, "models", raw).items():
        where = f'models."{name}"'
        only_keys(reader.file, where, table(reader.file, where, said), keys_of(ModelChoice) - {"releases"})
        entry = read_record(reader.file, where, said, ModelChoice, releases={})
        model = look_up(reader.file, where, lambda name=name: reader.catalog.model(name))
        check_once(reader.file, where, model.id, choices)
        if model.id not in asked:
            reader.notes.append(f"{where} changes nothing: no class asks for {model.id}")
        if entry.apart:
            # No result and no code of an engine says otherwise (catalog/data/connectors.toml).
            why = "no engine is known to hand a cache from one vendor's GPUs to another's"
            reader.notes.append(f"disaggregated prefill and decode of {model.id} are offered on one accelerator: {why}")
        choices[model.id] = _choice(reader, where, entry, model)
    return choices


def _choice(reader: ClassReader, where: str, entry: ModelChoice, model: Model) -> ModelChoice:
    """What a model's table offers, each of it tried on the model."""
    file, catalog = reader.file, reader.catalog
    for key, given in (("precisions", entry.precisions), ("kv", entry.kv_formats), ("speculation", entry.speculation)):
        if given == ():
            instead = 'write ["none"] for none' if key == "speculation" else "leave the key out for the usual ones"
            raise BadData(file, f"{where}.{key}", f"is empty: {instead}")
    for precision in entry.precisions:
        look_up(file, f"{where}.precisions", partial(catalog.precision, model, precision))
    for way in entry.speculation or ():
        if way != NO_SPECULATION:
            tried = partial(catalog.speculation, model, way, text=entry.text, length=entry.acceptance)
            look_up(file, f"{where}.speculation", tried)
    stacks: list[str] = []
    releases: dict[str, str] = {}
    for said in entry.stacks:
        name, _, release = said.partition("==")
        stacks.append(look_up(file, f"{where}.stacks", partial(catalog.stack, name)).id)
        if "==" in said:
            releases[stacks[-1]] = in_form(file, f"{where}.stacks", release, engine_release)
    return msgspec.structs.replace(
        entry,
        stacks=tuple(dict.fromkeys(stacks)),
        releases=releases,
        speculation=tuple(dict.fromkeys(entry.speculation)) if entry.speculation else None,
    )


def _sharing(reader: ClassReader, raw: object, classes: tuple[RequestClass, ...]) -> Sharing:
    """[hosting]: which models share replicas, and what that may cost in cold loads."""
    entry, asked = table(reader.file, "hosting", raw), tuple(dict.fromkeys(kind.model for kind in classes))
    models = _hosted(reader, "hosting.models", entry.get("models"), asked) or asked
    pinned = _hosted(reader, "hosting.pinned", entry.get("pinned"), models)
    sharing = read_record(reader.file, "hosting", raw, Sharing, models=models, pinned=pinned)
    for index, request_class in enumerate(classes):
        if request_class.lora is not None and request_class.model in models:
            raise BadData(
                reader.file,
                f"class[{index}].lora",
                f"{request_class.model} shares replicas by [hosting]: adapters need their own",
            )
    for key, needs in (("host_gb_per_s", ("host",)), ("disk_gb_per_s", ("disk", "start")), ("start_s", ("start",))):
        if key in entry and sharing.load_from not in needs:
            raise BadData(reader.file, f"hosting.{key}", f"has no meaning with load_from = '{sharing.load_from}'")
    return sharing


def _schedule(file: Path, raw: object, names: Names) -> ScheduleRequest:
    """[schedule]: what `crosstie schedule` asks for."""
    asked = read_record(file, "schedule", raw, ScheduleRequest, names)
    quarters = [(f"deliveries[{i}].quarter", delivery.quarter) for i, delivery in enumerate(asked.deliveries)]
    quarters += [(f"contracts[{i}].until", contract.until) for i, contract in enumerate(asked.contracts)]
    for where, quarter in quarters:
        if quarter_number(quarter) is None:
            raise BadData(file, f"schedule.{where}", f"'{quarter}' is no quarter, such as 2027Q1")
    return asked


def _hosted(reader: ClassReader, where: str, raw: object, among: tuple[str, ...]) -> tuple[str, ...]:
    models: list[str] = []
    for name in () if raw is None else texts(reader.file, where, raw):
        model = look_up(reader.file, where, lambda name=name: reader.catalog.model(name)).id
        if model not in among:
            whose = "asked for by no class" if where.endswith("models") else "not among hosting.models"
            raise BadData(reader.file, where, f"{model} is {whose}")
        if model in models:
            raise BadData(reader.file, where, f"{model} is there twice")
        models.append(model)
    if raw is not None and not models:
        others = "all" if where.endswith("models") else "none"
        raise BadData(reader.file, where, f"is empty: leave the key out for {others}")
    return tuple(models)


def _constraints(file: Path, raw: object, names: Names) -> Constraints:
    asked = read_record(file, "constraints", raw, Constraints, names)
    total = math.fsum(asked.vendor_share.values())
    if total > 1 + 1e-9:
        raise BadData(file, "constraints.vendor_share", f"the least shares add up to {total:g}, more than 1")
    if total > 1 - 1e-9 and sum(share > 0 for share in asked.vendor_share.values()) > 1:
        # Only numbers of GPUs whose prices match to the cent would do, however many it takes.
        reason = "the least shares add up to 1, which leaves nothing to choose: give less"
        raise BadData(file, "constraints.vendor_share", reason)
    for name in asked.inventory:
        if asked.accelerators and name not in asked.accelerators:
            raise BadData(file, f"constraints.inventory.{name}", "is not among constraints.accelerators")
    return asked


def _prices(file: Path, raw: object, names: Names) -> Prices:
    entry = dict(table(file, "prices", raw))
    only_keys(file, "prices", entry, {"kind", *Prices.__struct_fields__} - {"kinds"})
    # One kind, or several of which the first that an accelerator has a price of is taken.
    kind = entry.pop("kind", "on-demand")
    kinds = texts(file, "prices.kind", [kind] if isinstance(kind, str) else kind)
    if not kinds:
        raise BadData(file, "prices.kind", "is empty: leave the key out for on-demand")
    return read_record(file, "prices", entry, Prices, names, kinds=tuple(dict.fromkeys(kinds)))


def _names(catalog: Catalog) -> Names:
    """What a name in a workload stands for, as the structs of `core.workload` say what it is of."""

    def id_of(kind: NounKind, name: str) -> str:
        vendors = {accelerator.vendor.casefold(): accelerator.vendor for accelerator in catalog.accelerators.values()}
        if kind.startswith("vendor") and name.casefold() in vendors:
            return vendors[name.casefold()]
        if kind == "vendor":
            raise BadInput(f"'{name}' is no vendor; known: {', '.join(sorted(vendors.values()))}")
        return (catalog.with_announced if kind == "announced accelerator" else catalog).accelerator(name).id

    return id_of

"""Workload files: what a plan is for. A slip fails here, with the file and the key."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import msgspec

from crosstie.catalog.acceptance import NO_SPECULATION, TEXTS
from crosstie.catalog.classes import ClassReader, look_up, read_classes
from crosstie.catalog.days import USUAL, read_day
from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import (
    number,
    one_of,
    only_keys,
    read_record,
    read_toml,
    read_value,
    read_values,
    table,
    text,
    texts,
    toml_in,
)
from crosstie.catalog.writing import in_words
from crosstie.core.deployment import KV_FORMATS, Accelerator
from crosstie.core.errors import BadData, BadInput
from crosstie.core.model import Model
from crosstie.core.schedule import ScheduleRequest, quarter_number
from crosstie.core.speculation import DEEPEST
from crosstie.core.workload import (
    Constraints,
    Gpus,
    ModelChoice,
    Prices,
    RequestClass,
    Sharing,
    UsdPerGpuHour,
    Workload,
)

_WORKLOAD = {"name", "sizing", "sure", "traffic", "models", "class", "constraints", "prices", "hosting", "schedule"}
_TRAFFIC = ("mean_over_peak", "growth_per_year", "horizon_years")
# Of the peak: what mean traffic is taken as.
_HALF = 0.5
# Off a price; what is free is no price.
MOST_DISCOUNT = 0.99
_RELEASE = re.compile(r"^b?\d[\w.+-]{0,39}$")
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Discount = Annotated[float, msgspec.Meta(ge=0, le=MOST_DISCOUNT)]
# The id that a name at some place of the file stands for.
_KnownAs = Callable[[ClassReader, str, str], str]


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


def example_text() -> str:
    return (EXAMPLES / "assistant.toml").read_text(encoding="utf-8")


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
    return Workload(
        name=text(file, "name", raw.get("name", file.stem)),
        classes=classes,
        models=_models(reader, raw.get("models", {}), {one.model for one in classes}),
        constraints=_constraints(reader, raw.get("constraints", {})),
        prices=_prices(reader, raw.get("prices", {})),
        sharing=_sharing(reader, raw["hosting"], classes) if "hosting" in raw else None,
        schedule=_schedule(reader, raw.get("schedule", {})),
        folders=catalog.folders(sorted({one.model for one in classes})),
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
    found: dict[str, ModelChoice] = {}
    for name, entry in table(reader.file, "models", raw).items():
        where = f'models."{name}"'
        entry = table(reader.file, where, entry)
        only_keys(reader.file, where, entry, {"precisions", "kv", "stacks", "apart", *_DRAFTS})
        model = look_up(reader.file, where, lambda name=name: reader.catalog.model(name))
        _once(reader.file, where, model.id, found)
        if model.id not in asked:
            reader.notes.append(f"{where} changes nothing: no class asks for {model.id}")
        choice = ModelChoice()
        kv = _list(reader.file, f"{where}.kv", entry.get("kv"), choice.kv_formats)
        for format in kv:
            one_of(reader.file, f"{where}.kv", format, KV_FORMATS)
        precisions = _list(reader.file, f"{where}.precisions", entry.get("precisions"), choice.precisions)
        for key, listed in (("precisions", precisions), ("kv", kv)):
            if not listed:
                raise BadData(reader.file, f"{where}.{key}", "is empty: leave the key out for the usual ones")
        for precision in precisions:
            look_up(reader.file, f"{where}.precisions", lambda p=precision, m=model: reader.catalog.precision(m, p))
        stacks: list[str] = []
        releases: dict[str, str] = {}
        for said in _list(reader.file, f"{where}.stacks", entry.get("stacks"), ()):
            stack, _, release = said.partition("==")
            stacks.append(look_up(reader.file, f"{where}.stacks", lambda s=stack: reader.catalog.stack(s)).id)
            if "==" in said:
                releases[stacks[-1]] = release_text(reader.file, f"{where}.stacks", release)
        if entry.get("apart") is True:
            # No result and no code of an engine says otherwise (catalog/data/connectors.toml).
            why = "no engine is known to hand a cache from one vendor's GPUs to another's"
            reader.notes.append(f"disaggregated prefill and decode of {model.id} are offered on one accelerator: {why}")
        found[model.id] = ModelChoice(
            precisions=precisions,
            kv_formats=kv,
            stacks=tuple(dict.fromkeys(stacks)),
            releases=releases,
            **_speculation(reader, where, entry, model),
            **read_values(reader.file, where, entry, ModelChoice, ("apart",)),
        )
    return found


_DRAFTS = ("speculation", "text", "acceptance")


def _speculation(reader: ClassReader, where: str, entry: dict[str, Any], model: Model) -> dict[str, Any]:
    """Ways to draft, each tried on the model."""
    file, found = reader.file, dict[str, Any]()
    if "text" in entry:
        found["text"] = one_of(file, f"{where}.text", text(file, f"{where}.text", entry["text"]), TEXTS)
    if "acceptance" in entry:
        found["acceptance"] = number(file, f"{where}.acceptance", entry["acceptance"], 1, 1 + DEEPEST)
    if "speculation" in entry:
        ways = _list(file, f"{where}.speculation", entry["speculation"], ())
        if not ways:
            raise BadData(file, f"{where}.speculation", 'is empty: write ["none"] for none')
        for way in ways:
            if way != NO_SPECULATION:
                look_up(
                    file,
                    f"{where}.speculation",
                    lambda w=way: reader.catalog.speculation(
                        model, w, text=found.get("text", "chat"), length=found.get("acceptance")
                    ),
                )
        found["speculation"] = tuple(dict.fromkeys(ways))
    elif "acceptance" in entry:
        raise BadData(file, f"{where}.acceptance", "is of a way to draft, which `speculation` must name")
    return found


def release_text(file: Path, where: str, raw: object) -> str:
    """A release of an engine: 0.32.0, or llama.cpp's b6000."""
    said = text(file, where, raw)
    if not _RELEASE.match(said):
        raise BadData(file, where, f"'{said}' is no release of an engine, such as 0.32.0")
    return said


def _sharing(reader: ClassReader, raw: object, classes: tuple[RequestClass, ...]) -> Sharing:
    """[hosting]: which models share replicas, and what that may cost in cold loads."""
    entry, asked = table(reader.file, "hosting", raw), tuple(dict.fromkeys(one.model for one in classes))
    only_keys(reader.file, "hosting", entry, set(Sharing.__struct_fields__))
    models = _hosted(reader, "hosting.models", entry.get("models"), asked) or asked
    pinned = _hosted(reader, "hosting.pinned", entry.get("pinned"), models)
    found = read_record(reader.file, "hosting", raw, Sharing, models=models, pinned=pinned)
    for index, one in enumerate(classes):
        if one.lora is not None and one.model in models:
            raise BadData(
                reader.file,
                f"class[{index}].lora",
                f"{one.model} shares replicas by [hosting]: adapters need their own",
            )
    for key, needs in (("host_gb_per_s", ("host",)), ("disk_gb_per_s", ("disk", "start")), ("start_s", ("start",))):
        if key in entry and found.load_from not in needs:
            raise BadData(reader.file, f"hosting.{key}", f"has no meaning with load_from = '{found.load_from}'")
    return found


def _schedule(reader: ClassReader, raw: object) -> ScheduleRequest:
    """[schedule]: what `crosstie schedule` asks for; accelerators by any of their names, announced ones too."""
    file, known = reader.file, reader.catalog.with_announced

    def named(where: str, name: str) -> str:
        found: Accelerator = look_up(file, where, lambda: known.accelerator(name))
        return found.id

    try:
        found = msgspec.convert(table(file, "schedule", raw), ScheduleRequest)
    except msgspec.ValidationError as error:
        said, _, at = str(error).partition(" - at `$")
        raise BadData(file, f"schedule{at.rstrip('`')}", said[:1].lower() + said[1:]) from None
    for place, one in enumerate(found.deliveries):
        _check_quarter(file, f"schedule.deliveries[{place}].quarter", one.quarter)
    for place, other in enumerate(found.contracts):
        _check_quarter(file, f"schedule.contracts[{place}].until", other.until)
    replaced = msgspec.structs.replace
    return replaced(
        found,
        lead_time_months={
            named(f"schedule.lead_time_months.{name}", name): months for name, months in found.lead_time_months.items()
        },
        deliveries=tuple(
            replaced(one, accelerator=named(f"schedule.deliveries[{place}].accelerator", one.accelerator))
            for place, one in enumerate(found.deliveries)
        ),
        contracts=tuple(
            replaced(one, accelerator=named(f"schedule.contracts[{place}].accelerator", one.accelerator))
            for place, one in enumerate(found.contracts)
        ),
    )


def _check_quarter(file: Path, where: str, name: str) -> None:
    if quarter_number(name) is None:
        raise BadData(file, where, f"'{name}' is no quarter, such as 2027Q1")


def _hosted(reader: ClassReader, where: str, raw: object, among: tuple[str, ...]) -> tuple[str, ...]:
    found: list[str] = []
    for name in _list(reader.file, where, raw, ()):
        model = look_up(reader.file, where, lambda name=name: reader.catalog.model(name)).id
        if model not in among:
            whose = "asked for by no class" if where.endswith("models") else "not among hosting.models"
            raise BadData(reader.file, where, f"{model} is {whose}")
        if model in found:
            raise BadData(reader.file, where, f"{model} is there twice")
        found.append(model)
    if raw is not None and not found:
        others = "all" if where.endswith("models") else "none"
        raise BadData(reader.file, where, f"is empty: leave the key out for {others}")
    return tuple(found)


def _constraints(reader: ClassReader, raw: object) -> Constraints:
    file, at = reader.file, "constraints"
    entry = table(file, at, raw)
    found = read_record(
        file, at, raw, Constraints,
        accelerators=_listed(reader, f"{at}.accelerators", entry.get("accelerators"), _accelerator),
        vendors=_listed(reader, f"{at}.vendors", entry.get("vendors"), _vendor),
        inventory=_by_name(reader, f"{at}.inventory", entry.get("inventory", {}), _accelerator, Gpus),
        at_most=_by_name(reader, f"{at}.at_most", entry.get("at_most", {}), _accelerator, Gpus),
        vendor_share=_vendor_shares(reader, f"{at}.vendor_share", entry.get("vendor_share", {})),
    )  # fmt: skip
    for name in found.inventory:
        if found.accelerators and name not in found.accelerators:
            raise BadData(file, f"{at}.inventory.{name}", f"is not among {at}.accelerators")
    return found


def _listed(reader: ClassReader, where: str, raw: object, known_as: _KnownAs) -> tuple[str, ...]:
    """Names by their ids, each once."""
    return tuple(dict.fromkeys(known_as(reader, where, name) for name in _list(reader.file, where, raw, ())))


def _vendor_shares(reader: ClassReader, where: str, raw: object) -> dict[str, float]:
    shares = _by_name(reader, where, raw, _vendor, _Share)
    total = math.fsum(shares.values())
    if total > 1 + 1e-9:
        raise BadData(reader.file, where, f"the least shares add up to {total:g}, more than 1")
    if total > 1 - 1e-9 and sum(share > 0 for share in shares.values()) > 1:
        # Only numbers of GPUs whose prices match to the cent would do, however many it takes.
        raise BadData(reader.file, where, "the least shares add up to 1, which leaves nothing to choose: give less")
    return shares


def _prices(reader: ClassReader, raw: object) -> Prices:
    file = reader.file
    entry = table(file, "prices", raw)
    only_keys(file, "prices", entry, {"kind", "usd_per_gpu_hour", "reserved_usd_per_gpu_hour", "discount"})

    def vendor_or_accelerator(reader: ClassReader, where: str, name: str) -> str:
        return _vendors(reader.catalog).get(name.casefold()) or _accelerator(reader, where, name)

    return Prices(
        kinds=_kinds(file, entry.get("kind", "on-demand")),
        **{
            key: _by_name(reader, f"prices.{key}", entry.get(key, {}), _accelerator, UsdPerGpuHour)
            for key in ("usd_per_gpu_hour", "reserved_usd_per_gpu_hour")
        },
        discount=_by_name(reader, "prices.discount", entry.get("discount", {}), vendor_or_accelerator, _Discount),
    )


def _kinds(file: Path, raw: object) -> tuple[str, ...]:
    """One kind, or several of which the first that an accelerator has a price of is taken."""
    found = texts(file, "prices.kind", [raw] if isinstance(raw, str) else raw)
    if not found:
        raise BadData(file, "prices.kind", "is empty: leave the key out for on-demand")
    return tuple(dict.fromkeys(found))


def _by_name(reader: ClassReader, where: str, raw: object, known_as: _KnownAs, kind: Any) -> dict[str, Any]:
    """A table whose keys are names of the catalog, by id; each id once."""
    found: dict[str, Any] = {}
    for name, value in table(reader.file, where, raw).items():
        named = known_as(reader, f"{where}.{name}", name)
        _once(reader.file, f"{where}.{name}", named, found)
        found[named] = read_value(reader.file, f"{where}.{name}", value, kind)
    return found


def _once(file: Path, where: str, name: str, others: Mapping[str, object]) -> None:
    """Names have aliases and any case, so that one thing can be there twice."""
    if name in others:
        raise BadData(file, where, f"{name} is there already, under another spelling")


def _accelerator(reader: ClassReader, where: str, name: str) -> str:
    found: str = look_up(reader.file, where, lambda: reader.catalog.accelerator(name)).id
    return found


def _vendors(catalog: Catalog) -> dict[str, str]:
    """By their names in lower case."""
    return {accelerator.vendor.casefold(): accelerator.vendor for accelerator in catalog.accelerators.values()}


def _vendor(reader: ClassReader, where: str, name: str) -> str:
    known = _vendors(reader.catalog)
    if name.casefold() not in known:
        raise BadData(reader.file, where, f"'{name}' is no vendor; known: {', '.join(sorted(known.values()))}")
    return known[name.casefold()]


def _list(file: Path, where: str, raw: object, default: tuple[str, ...]) -> tuple[str, ...]:
    return default if raw is None else texts(file, where, raw)

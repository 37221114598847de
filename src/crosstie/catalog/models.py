"""Model files: who the model is, under which names, where its config was found, and the config's own keys."""

import hashlib
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from crosstie.catalog.config import load_config
from crosstie.catalog.huggingface import read_model
from crosstie.catalog.reading import date, file_id, only_keys, optional_text, read_toml, table, text, texts
from crosstie.catalog.writing import toml_key, toml_value
from crosstie.core.errors import BadData, BadInput
from crosstie.core.model import Model

_KEYS = {"id", "name", "aliases", "source", "date", "licence", "notes", "config"}


def read_model_file(file: Path) -> Model:
    raw = read_toml(file)
    only_keys(file, "", raw, _KEYS)
    identifier = file_id(file, raw.get("id"))
    model, config = read_model(
        table(file, "config", raw.get("config")),
        file,
        id=identifier,
        name=text(file, "name", raw.get("name")),
        aliases=texts(file, "aliases", raw.get("aliases", [])),
        source=text(file, "source", raw.get("source")),
        date=date(file, "date", raw.get("date")),
        licence=optional_text(file, "licence", raw.get("licence")),
        notes=texts(file, "notes", raw.get("notes", [])),
        prefix="config.",
    )
    for key in config.unknown():
        raise BadData(file, key, "unknown key: no reader asks for it")
    return model


def read_model_path(path: Path) -> Model:
    """A model that is not in the catalog, straight from its directory or config.json."""
    raw, file = load_config(path)
    name = model_id(file)
    changed = datetime.fromtimestamp(file.stat().st_mtime, UTC).date().isoformat()
    model, _ = read_model(raw, file, id=name, name=name, source=str(file), date=changed)
    return model


class TextConfig(NamedTuple):
    """A config.json as one line that may stand in a table, under a name that no other structure has."""

    name: str
    text: str


def text_config(path: Path) -> TextConfig:
    """Of a model's directory or config.json: with the keys that a reader asks for."""
    raw, file = load_config(path)
    _, config = read_model(raw, file, id="model", name="model", source=str(file), date="")
    text = json.dumps(config.kept(), separators=(",", ":"), sort_keys=True)
    return TextConfig(f"{model_id(file)}-{hashlib.sha256(text.encode()).hexdigest()[:6]}", text)


def model_of_text(config: TextConfig) -> Model:
    """Raises BadData where it is no config."""
    where = Path("model_config")
    try:
        raw = json.loads(config.text)
    except (ValueError, RecursionError) as error:
        raise BadData(where, "", f"is no JSON: {error}") from None
    if not isinstance(raw, dict):
        raise BadData(where, "", "must be an object")
    return read_model(raw, where, id=config.name, name=config.name, source="the config beside its results", date="")[0]


def model_id(file: Path) -> str:
    stem = file.parent.name if file.name == "config.json" else file.stem
    if not stem:
        stem = file.resolve().parent.name
    return re.sub(r"[^a-z0-9.]+", "-", stem.lower()).strip("-") or "model"


def model_file_text(
    path: Path, *, id: str, name: str, aliases: tuple[str, ...], source: str, date: str, licence: str = ""
) -> str:
    """The catalog file for a config.json: its provenance and the keys that a reader asks for."""
    raw, file = load_config(path)
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", id):
        raise BadInput(f"'{id}' cannot be a catalog id: lower case letters, digits, '.', '_' and '-' only")
    _, config = read_model(raw, file, id=id, name=name, source=source, date=date)
    about = {"id": id, "name": name, "aliases": aliases, "source": source, "date": date}
    about |= {"licence": licence} if licence else {}
    lines = [f"{key} = {toml_value(value)}" for key, value in about.items()]
    return "\n".join([*lines, *_toml_table("config", config.kept())]) + "\n"


def _toml_table(name: str, values: dict[str, Any]) -> list[str]:
    plain = {key: value for key, value in values.items() if value is not None and not isinstance(value, dict)}
    lines = ["", f"[{name}]", *(f"{toml_key(key)} = {toml_value(value)}" for key, value in plain.items())]
    for key, value in values.items():
        lines += _toml_table(f"{name}.{toml_key(key)}", value) if isinstance(value, dict) else []
    return lines


_NAMES = Path(__file__).parent / "data" / "names.toml"


class Suffixes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    trained: tuple[str, ...]
    # A pattern.
    dated: str
    # The precision that each stands for.
    stored: dict[str, str]
    # Names that end like others and are models of their own, and why.
    apart: dict[str, str]


@cache
def shipped_suffixes() -> Suffixes:
    return msgspec.convert(read_toml(_NAMES), Suffixes)


def shorter_names(name: str) -> Iterator[tuple[str, str]]:
    """The name with ever more of its ends taken off, without its owner, and the precision that these named."""
    known = shipped_suffixes()
    left, precision = name.rpartition("/")[2].casefold(), ""
    # Longer ends first: -fp8-kv is one, not -kv behind -fp8.
    plain = sorted((*known.trained, *known.stored), key=len, reverse=True)
    while left not in known.apart:
        dated = re.search(rf"{known.dated}$", left)
        end = next((suffix for suffix in plain if left.endswith(suffix)), dated[0] if dated else "")
        if not end or len(end) == len(left):
            return
        left, precision = left[: -len(end)], known.stored.get(end, precision)
        yield left, precision

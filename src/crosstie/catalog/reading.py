"""Data files in, facts out. A file that cannot be trusted fails here, with its name and the key."""

import csv
import gzip
import io
import json
import re
import tomllib
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date as day
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from crosstie.core.errors import BadData, CrosstieError, near_names
from crosstie.core.fact import (
    BASES,
    BesideFile,
    Fact,
    FileKey,
    Flat,
    Form,
    KeyRule,
    Label,
    NounKind,
    NounName,
    OtherSource,
    Quantity,
    Word,
)
from crosstie.core.units import UNITS, units_of
from crosstie.core.workload import Target

PERCENTILES = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_DATE = re.compile(r"^\d{4}-\d{2}(-\d{2})?$")
# A source in a repository: owner/name@commit, then the path.
_REVISION = re.compile(r"[\w.-]+/[\w.-]+@([^\s:,;)]*)")
_COMMIT = re.compile(r"^[0-9a-f]{7,40}$")


class Sources:
    """The [sources] table of one file; it knows which entries were cited."""

    def __init__(self, file: Path, raw: object):
        self.file, self.cited = file, set[str]()
        self.entries: dict[str, tuple[str, str]] = {}
        for key, entry in table(file, "sources", raw).items():
            where = f"sources.{key}"
            entry = table(file, where, entry)
            only_keys(file, where, entry, {"ref", "date", "licence"})
            reference = text(file, f"{where}.ref", entry.get("ref"))
            for revision in _REVISION.findall(reference):
                if not _COMMIT.match(revision):
                    raise BadData(
                        file, f"{where}.ref", f"'{revision}' after @ is no commit: 7 to 40 hexadecimal digits"
                    )
            licence = optional_text(file, f"{where}.licence", entry.get("licence"))
            self.entries[key] = (
                f"{reference} ({licence})" if licence else reference,
                date(file, f"{where}.date", entry.get("date")),
            )

    def cite(self, where: str, key: object) -> tuple[str, str]:
        if not isinstance(key, str) or not key:
            raise BadData(self.file, f"{where}.source", "missing: every number needs a source")
        if key not in self.entries:
            hint = near_names(key, self.entries)
            more = f"; did you mean {hint[0]}?" if hint else ""
            raise BadData(self.file, f"{where}.source", f"'{key}' is not in [sources]{more}")
        self.cited.add(key)
        return self.entries[key]

    def check_all_cited(self) -> None:
        for key in self.entries:
            if key not in self.cited:
                raise BadData(self.file, f"sources.{key}", "no number cites this source")


def read_toml(file: Path) -> dict[str, Any]:
    return toml_in(file, text_of(file))


def toml_in(file: Path, content: str) -> dict[str, Any]:
    """`file`: what a fault names."""
    try:
        return tomllib.loads(content)
    except (ValueError, RecursionError) as error:
        # tomllib leaves numbers of thousands of digits and lists in thousands of lists to Python.
        raise BadData(file, "", f"not valid TOML: {error}") from None


def read_json(file: Path) -> dict[str, Any]:
    content = text_of(file)
    try:
        raw = json.loads(content)
    except json.JSONDecodeError as error:
        raise BadData(file, f"line {error.lineno}", f"not valid JSON: {error.msg}") from None
    except (RecursionError, ValueError):
        raise BadData(file, "", "not valid JSON: nested too deeply, or a number too long") from None
    if not isinstance(raw, dict):
        raise BadData(file, "", "must hold one JSON object")
    return raw


@contextmanager
def sourced_file(file: Path, known: Collection[str] | None = None) -> Iterator[tuple[dict[str, Any], Sources]]:
    """A TOML file less its [sources], each of which the block must have cited by its end. `known`: its keys, where the
    block does not look for others itself."""
    raw = read_toml(file)
    cited = raw.pop("sources", None)
    if known is not None:
        only_keys(file, "", raw, set(known))
    sources = Sources(file, cited)
    yield raw, sources
    sources.check_all_cited()


def text_of(path: Path) -> str:
    """The text of a file, gzipped or not."""
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise BadData(path, "", f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except UnicodeDecodeError as error:
        raise BadData(path, "", f"is not UTF-8 text (byte {error.start})") from None


def read_table(file: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """The rows of a table that has these columns and no others, each with its line."""
    rows = csv.DictReader(io.StringIO(text_of(file)), strict=True)
    try:
        if tuple(rows.fieldnames or ()) != columns:
            raise BadData(file, "line 1", f"columns must be {','.join(columns)}")
        for row in rows:
            where = f"line {rows.line_num}"
            if None in row or None in row.values():
                raise BadData(file, where, f"must have {len(columns)} fields")
            yield where, row
    except csv.Error as error:
        raise BadData(file, f"line {rows.reader.line_num}", f"not valid CSV: {error}") from None


def read_rows(file: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """The rows of a table of prices; every row has a basis, a source and a date."""
    for where, row in read_table(file, columns):
        if row["basis"] not in BASES:
            raise BadData(file, where, f"basis '{row['basis']}' is not one of {', '.join(BASES)}")
        if not row["source"].strip():
            raise BadData(file, where, "source is empty")
        date(file, where, row["date"])
        yield where, row


def cell_number(file: Path, where: str, row: Mapping[str, str], column: str) -> float:
    try:
        return float(row[column])
    except ValueError:
        raise BadData(file, where, f"{column} '{row[column]}' is not a number") from None


def only_keys(file: Path, where: str, raw: Mapping[str, Any], known: set[str]) -> None:
    for key in raw:
        if key not in known:
            hint = near_names(key, known)
            more = f"; did you mean {hint[0]}?" if hint else f"; known: {', '.join(sorted(known))}"
            raise BadData(file, f"{where}.{key}" if where else key, f"unknown key{more}")


def check_rules(file: Path, where: str, raw: Mapping[str, Any], rules: Iterable[KeyRule]) -> None:
    """Which keys of a table go together, as its struct says."""
    for rule in rules:
        given = [key for key in rule.keys if key in raw]
        others = [key for key in rule.others if key in raw]
        if not given or bool(others) != (rule.kind == "excludes"):
            continue
        if rule.kind == "demands":
            raise BadData(file, f"{where}.{rule.others[0]}", f"missing: {rule.reason.replace('OTHER', given[0])}")
        raise BadData(file, f"{where}.{given[0]}", rule.reason.replace("OTHER", others[0] if others else ""))


def table(file: Path, where: str, raw: object) -> dict[str, Any]:
    if raw is None:
        raise BadData(file, where, "missing")
    if not isinstance(raw, dict):
        raise BadData(file, where, "must be a table")
    return raw


def text(file: Path, where: str, raw: object) -> str:
    if raw is None:
        raise BadData(file, where, "missing")
    if not isinstance(raw, str) or not raw.strip():
        raise BadData(file, where, "must be a non-empty string")
    if not raw.isprintable():
        raise BadData(file, where, "has control characters or line breaks")
    return raw


def optional_text(file: Path, where: str, raw: object) -> str:
    return "" if raw is None or raw == "" else text(file, where, raw)


def number(file: Path, where: str, raw: object, low: float, high: float) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not low <= raw <= high:
        raise BadData(file, where, f"{raw!r} must be a number from {low:g} to {high:g}")
    return float(raw)


def whole(file: Path, where: str, raw: object, low: int, high: int) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or not low <= raw <= high:
        raise BadData(file, where, f"{raw!r} must be a whole number from {low} to {high:,}")
    return raw


Record = TypeVar("Record", bound=msgspec.Struct)
Found = TypeVar("Found")
# Of a kind of noun and any name of it, the id; raises CrosstieError.
Names = Callable[[NounKind, str], str]
# What the annotation of a field says of it.
Spec = Quantity | Word | NounName | Form | BesideFile | Flat
# What fields of a file are read beside: the sources that it cites, or the names of the catalog.
Beside = Sources | Names | None


def read_record(
    file: Path, where: str, raw: object, kind: type[Record], beside: Beside = None, /, **read: Any
) -> Record:
    """A table as the struct that has its keys; `read` are those that the caller has read itself.

    The struct says what each key may be: types, `msgspec.Meta(ge=..., le=...)`, literals, defaults, further structs,
    `Quantity` and `Word` of what has a source, `NounName`, `Form`, `BesideFile`, `Flat`; and by `rules` which keys go
    together. Where it has a `source` and a `date` of its own and there are sources, its table cites one.
    """
    entry = table(file, where, raw)
    known = keys_of(kind)
    if "file" in known:
        # Where it was read from is no key of it.
        known.remove("file")
        read["file"] = str(file)
    if isinstance(beside, Sources) and {"source", "date"} <= known:
        read["source"], read["date"] = beside.cite(where, entry.get("source"))
        known.remove("date")
    only_keys(file, where, entry, known)
    check_rules(file, where, entry, getattr(kind, "rules", ()))
    rest = [name for name in kind.__struct_fields__ if name not in read]
    return kind(**read, **read_values(file, where, entry, kind, rest, beside))


def check_keys(file: Path, where: str, entry: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    """That a table has no keys but those of its struct, and that they go together."""
    only_keys(file, where, entry, keys_of(kind))
    check_rules(file, where, entry, getattr(kind, "rules", ()))


def keys_of(kind: type[msgspec.Struct]) -> set[str]:
    """The keys that a table of a file has for a struct."""
    types = {key: _unwrapped(field.type) for key, field in _fields(kind).items()}
    return {
        name for key, (bare, spec) in types.items() for name in (keys_of(bare) if isinstance(spec, Flat) else [key])
    }


def read_records(file: Path, key: str, raw: object, kind: type[Record], beside: Beside = None) -> tuple[Record, ...]:
    """A list of tables, [[key]]; at least one, whose names or ids differ."""
    if not isinstance(raw, list) or not raw:
        raise BadData(file, key, f"{'is no list of tables' if raw else 'missing'}: write [[{key}]]")
    records = tuple(read_record(file, f"{key}[{i}]", entry, kind, beside) for i, entry in enumerate(raw))
    for named in {"id", "name"} & keys_of(kind):
        check_unique(file, key, named, [getattr(record, named) for record in records])
    return records


def check_unique(file: Path, where: str, key: str, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise BadData(file, f"{where}[{index}].{key}", f"'{name}' is there twice")


def read_values(
    file: Path, where: str, raw: Mapping[str, Any], kind: type[Record], names: Collection[str], beside: Beside = None
) -> dict[str, Any]:
    """These fields of a struct, for a table that has others too; those with a default may be absent."""
    values: dict[str, Any] = {}
    at = f"{where}." if where else ""
    for key, field in _fields(kind).items():
        if field.name not in names:
            continue
        bare, spec = _unwrapped(field.type)
        if isinstance(spec, Flat):
            own = {name: raw[name] for name in keys_of(bare) if name in raw}
            if own or field.required:
                values[field.name] = read_record(file, where, own, bare, beside)
        elif key in raw:
            values[field.name] = read_value(file, f"{at}{key}", raw[key], field.type, beside)
        elif field.required:
            meaning = f": {spec.meaning}" if isinstance(spec, Quantity | Word) else ""
            raise BadData(file, f"{at}{key}", f"missing{meaning}")
    return values


def read_value(file: Path, where: str, raw: object, kind: Any, beside: Beside = None) -> Any:
    """One value of a type, held to what the type says."""
    bare, spec = _unwrapped(kind)
    if bare is str and spec is None:
        return text(file, where, raw)
    outer, inner = get_origin(bare), get_args(bare)
    if isinstance(spec, NounName):
        return _id_of(file, where, raw, spec, beside)
    if isinstance(spec, Form):
        return in_form(file, where, raw, spec.read)
    if isinstance(spec, BesideFile):
        return path_beside(file, text(file, where, raw))
    if isinstance(spec, Quantity | Word) and outer is None:
        assert isinstance(beside, Sources), "whoever reads facts brings the sources of their file"
        return read_fact(file, where, raw, spec, beside)
    if bare is Target:
        return read_target(file, where, raw)
    if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
        return read_record(file, where, raw, bare, beside)
    if outer is dict:
        key_kind, of = inner
        return _read_dict(file, where, raw, key_kind, Annotated[of, spec] if spec else of, beside)
    if outer is tuple:
        of, entry_spec = _unwrapped(inner[0])
        if of is str or get_origin(of) is Literal:
            texts(file, where, raw)
        elif not isinstance(raw, list):
            raise BadData(file, where, "must be a list")
        entries = enumerate(raw) if isinstance(raw, list) else ()
        values = [read_value(file, f"{where}[{i}]", entry, inner[0], beside) for i, entry in entries]
        return tuple(dict.fromkeys(values) if isinstance(entry_spec, NounName) else values)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError:
        raise BadData(file, where, _mismatch(raw, kind)) from None


def read_target(file: Path, where: str, raw: object, thousandths: bool = True) -> Target:
    """In milliseconds, or in seconds."""
    if not isinstance(raw, dict) or len(raw) != 1:
        raise BadData(file, where, "write the percentile and its milliseconds, such as { p90 = 500 }")
    only_keys(file, where, raw, set(PERCENTILES))
    ((key, value),) = raw.items()
    if not thousandths:
        return Target(seconds=number(file, f"{where}.{key}", value, 0.01, 1e5), percentile=PERCENTILES[key])
    milliseconds = number(file, f"{where}.{key}", value, 0.01, 1e8)
    return Target(seconds=milliseconds / 1e3, percentile=PERCENTILES[key])


def in_form(file: Path, where: str, raw: object, read: Callable[[str], Found]) -> Found:
    """What `read` makes of a string: its form, what it names; or its fault with the place in this file."""
    given = text(file, where, raw)
    try:
        return read(given)
    except CrosstieError as error:
        raise BadData(file, where, str(error)) from None


def path_beside(file: Path, given: str) -> str:
    """Meant from where the file lies, wherever the command was given and wherever a copy of it is written to."""
    return str(file.parent.absolute() / Path(given).expanduser())


def _read_dict(file: Path, where: str, raw: object, key_kind: Any, kind: Any, beside: Beside) -> dict[str, Any]:
    """A table of values of one kind; of names of the catalog, each noun once."""
    entries = table(file, where, raw)
    name = _unwrapped(key_kind)[1]
    if isinstance(name, Word):
        only_keys(file, where, entries, set(name.choices))
        entries = {key: entries[key] for key in name.choices if key in entries}
    values: dict[str, Any] = {}
    for key, value in entries.items():
        at = f"{where}.{key}"
        if isinstance(name, NounName):
            key = _id_of(file, at, key, name, beside)
            check_once(file, at, key, values)
        values[key] = read_value(file, at, value, kind, beside)
    return values


def check_once(file: Path, where: str, name: str, others: Collection[str]) -> None:
    """Names have aliases and any case, so that one thing can be there twice."""
    if name in others:
        raise BadData(file, where, f"{name} is there already, under another spelling")


def _id_of(file: Path, where: str, name: object, spec: NounName, names: Beside) -> str:
    assert callable(names), "whoever reads names brings the catalog's"
    return in_form(file, where, name, partial(names, spec.kind))


@cache
def _unwrapped(kind: Any) -> tuple[Any, Spec | None]:
    """A type without None and without annotations, and what one of these says of it."""
    notes = getattr(kind, "__metadata__", ())
    spec = next((note for note in notes if isinstance(note, Spec)), None)
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(bare) not in (Union, UnionType):
        return bare, spec
    members = [member for member in get_args(bare) if member is not NoneType]
    if len(members) > 1:
        return bare, spec
    within, inner = _unwrapped(members[0])
    return within, spec or inner


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {file_key(field): field for field in msgspec.structs.fields(kind)}


def file_key(field: msgspec.structs.FieldInfo) -> str:
    """What files call a field."""
    notes = getattr(field.type, "__metadata__", ())
    return next((note.name for note in notes if isinstance(note, FileKey)), field.name)


def _mismatch(raw: object, expected: Any) -> str:
    bare = _unwrapped(expected)[0]
    if get_origin(bare) is Literal:
        return f"{raw!r} is not one of {', '.join(get_args(bare))}"
    kind = msgspec.inspect.type_info(expected)
    if isinstance(kind, msgspec.inspect.UnionType):
        kind = next(inner for inner in kind.types if not isinstance(inner, msgspec.inspect.NoneType))
    if isinstance(kind, msgspec.inspect.IntType):
        return f"{raw!r} must be a whole number{_limits(kind, ',')}"
    if isinstance(kind, msgspec.inspect.FloatType):
        return f"{raw!r} must be a number{_limits(kind, 'g')}"
    is_bool = isinstance(kind, msgspec.inspect.BoolType)
    return f"{raw!r} is neither true nor false" if is_bool else "must be a non-empty string"


def _limits(kind: msgspec.inspect.IntType | msgspec.inspect.FloatType, form: str) -> str:
    if kind.le is None:
        return ""
    low = f"above {kind.gt:g}, up" if kind.ge is None else f"from {kind.ge:g}"
    return f" {low} to {kind.le:{form}}"


def file_id(file: Path, raw: object) -> str:
    """The id that a file gives itself: lower case, and the file's own name, so that either finds it."""
    name = text(file, "id", raw)
    if name != file.stem or name != name.lower():
        raise BadData(file, "id", f"'{name}' must be lower case and match the file name '{file.stem}'")
    return name


def one_of(file: Path, where: str, raw: object, choices: Iterable[str]) -> str:
    choices = tuple(choices)
    if raw not in choices:
        raise BadData(file, where, f"{raw!r} is not one of {', '.join(choices)}")
    return str(raw)


def texts(file: Path, where: str, raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(item, str) and item for item in raw):
        raise BadData(file, where, "must be a list of strings")
    return tuple(raw)


def date(file: Path, where: str, raw: object) -> str:
    value = text(file, where, str(raw) if raw is not None else None)
    if not is_date(value):
        raise BadData(file, where, f"'{value}' is not a date: write YYYY-MM-DD or YYYY-MM")
    return value


def is_date(value: str) -> bool:
    """YYYY-MM-DD or YYYY-MM, and a day that there is."""
    try:
        day.fromisoformat(value if len(value) > 7 else f"{value}-01")
    except ValueError:
        return False
    return bool(_DATE.match(value))


def read_fact(file: Path, where: str, raw: object, spec: Quantity | Word, sources: Sources) -> Fact | Label:
    """A `Fact` of a quantity, a `Label` of a word."""
    fact: Fact | Label
    if isinstance(spec, Quantity):
        fact = read_record(file, where, raw, Fact, sources)
    else:
        fact = read_record(file, where, raw, Label, sources)
    _check_value(file, where, fact, spec)
    if fact.basis not in spec.bases:
        reason = f"'{fact.basis}' is not allowed here: use {', '.join(spec.bases)}"
        raise BadData(file, f"{where}.basis", reason)
    if fact.basis in ("assumed", "derived") and not fact.note:
        raise BadData(file, f"{where}.note", f"missing: say how it was {fact.basis}")
    if fact.alternatives and not fact.chosen_because:
        raise BadData(file, f"{where}.chosen_because", "missing: there are alternatives, so say why this one")
    for index, other in enumerate(fact.alternatives):
        _check_value(file, f"{where}.alternatives[{index}]", other, spec)
    return fact


def _check_value(file: Path, where: str, of: Fact | Label | OtherSource, spec: Quantity | Word) -> None:
    value, unit = of.value, "" if isinstance(of, Label) else of.unit
    if isinstance(spec, Word):
        if spec.choices:
            one_of(file, f"{where}.value", value, spec.choices)
        if unit:
            raise BadData(file, f"{where}.unit", "a word has none")
        return
    allowed = units_of(spec.dimension)
    if unit not in allowed:
        raise BadData(file, f"{where}.unit", f"'{unit}' is not a unit of {spec.dimension}: use {', '.join(allowed)}")
    if not isinstance(value, float):
        raise BadData(file, f"{where}.value", "must be a number")
    factor = UNITS[unit].si
    if not spec.low <= value * factor <= spec.high:
        reason = f"{value:g} {unit} is outside {spec.low / factor:g} to {spec.high / factor:g} {unit}; a slip of unit?"
        raise BadData(file, where, reason)


@cache
def fact_specs(kind: type[msgspec.Struct]) -> tuple[dict[str, Quantity | Word], frozenset[str]]:
    """What a struct says of its facts, `Annotated[Fact, Quantity(...)]`; those with a default may be absent."""
    of_fields = {name: _unwrapped(field.type) for name, field in _fields(kind).items()}
    specs = {
        name: spec
        for name, (bare, spec) in of_fields.items()
        if bare in (Fact, Label) and isinstance(spec, Quantity | Word)
    }
    return specs, frozenset(name for name in specs if not _fields(kind)[name].required)


def read_facts(
    file: Path,
    where: str,
    raw: object,
    specs: Mapping[str, Quantity | Word] | type[msgspec.Struct],
    sources: Sources,
    optional: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """One table of facts, as its struct or its specification has them: nothing missing, nothing unknown."""
    if isinstance(specs, type):
        specs, optional = fact_specs(specs)
    entries = table(file, where, raw)
    only_keys(file, where, entries, set(specs))
    facts: dict[str, Any] = {}
    for key, spec in specs.items():
        at = f"{where}.{key}"
        if key not in entries:
            if key in optional:
                continue
            raise BadData(file, at, f"missing: {spec.meaning}")
        facts[key] = read_fact(file, at, entries[key], spec, sources)
    return facts

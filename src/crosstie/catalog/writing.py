"""Files that are there whole or not at all."""

import csv
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crosstie.core.errors import BadInput


@contextmanager
def in_words(what: str) -> Iterator[None]:
    """What the system refuses under it, as a sentence that begins so."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{what}: {error.strerror or error}") from None


def write_whole(target: Path, write: Callable[[Path], object]) -> None:
    """`write` fills a draft beside the target, which then takes its place in one go; a failure leaves neither."""
    if target.exists() and not target.is_file():
        # A device or a folder would be replaced by a file, not written to.
        raise BadInput(f"{target}: cannot be written: no plain file")
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=target.suffix)
    os.close(handle)
    draft = Path(name)
    try:
        write(draft)
        # mkstemp's files are for their owner alone; others' eyes are the umask's business.
        mask = os.umask(0)
        os.umask(mask)
        draft.chmod(0o666 & ~mask)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def json_rows(document: dict[str, Any]) -> str:
    """JSON with a line for each entry of its lists and objects, so that two documents can be compared line by line."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_rows(value)}" for key, value in document.items()) + "\n}\n"


def _rows(value: Any) -> str:
    if isinstance(value, dict) and value:
        inner = [f"{json.dumps(key)}: {json.dumps(row, allow_nan=False)}" for key, row in value.items()]
        return "{\n  " + ",\n  ".join(inner) + "\n }"
    if isinstance(value, list) and value:
        return "[\n  " + ",\n  ".join(json.dumps(row, allow_nan=False) for row in value) + "\n ]"
    return json.dumps(value, allow_nan=False)


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any] | Sequence[Any]]) -> str:
    """A table with its header; what a row has no cell for stays empty."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([row.get(name, "") for name in columns] if isinstance(row, Mapping) else row)
    return text.getvalue()


def toml_value(value: Any) -> str:
    """A value as TOML writes it in a line; None has no such form, and is left out of lists and tables."""
    if isinstance(value, str | bool):
        # JSON's strings are TOML's, but for one character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value if item is not None)}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{toml_key(k)} = {toml_value(v)}' for k, v in value.items() if v is not None)} }}"
    raise BadInput(f"cannot write {type(value).__name__} into a catalog file")


def toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_document(content: dict[str, Any]) -> str:
    """A whole file: values, then tables, then lists of tables; tables of tables have headings of their own."""
    lines = [f"{toml_key(key)} = {toml_value(value)}" for key, value in content.items() if not _has_heading(value)]
    for key, value in content.items():
        if not _has_heading(value):
            continue
        if isinstance(value, list):
            tables = [(f"[[{toml_key(key)}]]", row) for row in value]
        elif all(isinstance(inner, dict) for inner in value.values()):
            tables = [(f"[{toml_key(key)}.{toml_key(name)}]", inner) for name, inner in value.items()]
        else:
            tables = [(f"[{toml_key(key)}]", value)]
        for heading, table in tables:
            lines += ["", heading, *(f"{toml_key(k)} = {toml_value(v)}" for k, v in table.items() if v is not None)]
    return "\n".join(lines) + "\n"


def _has_heading(value: Any) -> bool:
    return (isinstance(value, dict) and bool(value)) or (
        isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)
    )


def write_folder(option: str, folder: Path, files: dict[str, str]) -> None:
    """Files by name, in a folder that is made if need be."""
    with in_words(f"{option} {folder}: cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_text(folder / name, text)


def write_text(target: Path, text: str) -> None:
    """A whole text file, or a sentence about why not."""
    with in_words(f"{target}: cannot be written"):
        write_whole(target, lambda draft: draft.write_text(text, encoding="utf-8"))

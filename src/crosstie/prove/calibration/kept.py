"""Results that a user has added: kept in their catalog as tables, so that the next calibration has them too."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from crosstie.catalog.reading import text_of
from crosstie.catalog.writing import csv_text, write_text
from crosstie.prove.calibration.tools import is_tool_file, tool_rows
from crosstie.prove.probe.document import is_probe


class Kept:
    def __init__(self, catalog_folder: Path):
        self.folder = catalog_folder / "measured"

    def files(self, besides: Iterable[Path] = ()) -> list[Path]:
        """Those that were added; one that is added again takes its own place."""
        again = {_name(path) for path in besides}
        there = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(path for path in there if path.suffix in (".csv", ".json") and path.name not in again)

    def add(self, paths: Sequence[Path], given: Mapping[str, str]) -> None:
        """Files of tools become tables, with what was given beside them; the others stay as they are."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            text = text_of(path)
            table = _table(list(tool_rows(path, text, given))) if _is_of_a_tool(text) else text
            write_text(self.folder / _name(path), table)


def _is_of_a_tool(text: str) -> bool:
    return is_tool_file(text) and not is_probe(text)


def _name(path: Path) -> str:
    """A probe's document stays JSON; everything else is kept as a table."""
    text = text_of(path)
    suffix = ".json" if is_tool_file(text) and not _is_of_a_tool(text) else ".csv"
    return path.name.removesuffix(".gz").rpartition(".")[0] + suffix


def _table(rows: list[dict[str, str]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return csv_text(columns, rows)

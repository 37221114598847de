"""What published results were measured with: layouts, lengths and loads of a model on an accelerator under a stack.

They are the shipped ones, and those of the release of the catalog that is in force.
"""

import csv
import gzip
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from crosstie.catalog.calibration import architecture_of
from crosstie.catalog.library import SHIPPED, Catalog, spellings
from crosstie.catalog.releases import measured_files
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import CrosstieError

_FILES = "results*.csv.gz"
_NOT = ("", "none", "false", "no", "off")
_WIDTH = re.compile(r"4|8")
_SPLIT = re.compile(r"(tp|pp|dp|ep)\s*=?\s*(\d+)", re.IGNORECASE)

Range = tuple[float, float]


class _Row(NamedTuple):
    """Of the columns of the shipped results those that are looked at."""

    accelerator: str
    model: str
    precision: str
    engine: str
    parallelism: str
    tp: str
    input_len: str
    output_len: str
    concurrency: str
    spec_decode: str
    disagg: str


@dataclass(frozen=True, slots=True)
class MeasuredWith:
    """Rows of a model, in weights of one width; ranges over those that say so."""

    rows: int
    # Those with most rows first; "" where a source does not say.
    layouts: tuple[str, ...]
    input_tokens: Range | None
    output_tokens: Range | None
    in_flight: Range | None

    @property
    def words(self) -> str:
        known = [layout for layout in self.layouts if layout]
        words = [f"layouts {', '.join(known)}" if known else "layouts that are not said"]
        pairs = ((self.input_tokens, "tokens in"), (self.output_tokens, "out"), (self.in_flight, "in flight"))
        words += [f"{_span(span)} {what}" for span, what in pairs if span]
        return "; ".join(words)

    def misses(self, layout: str, input_tokens: float, in_flight: float) -> list[str]:
        """In what an operating point goes beyond them."""
        beyond = [] if layout in self.layouts else ["this layout"]
        for value, span, what in (
            (input_tokens, self.input_tokens, "prompts of this length"),
            (in_flight, self.in_flight, "this many in flight"),
        ):
            if span and not span[0] / 2.0 <= value <= span[1] * 2.0:
                beyond.append(what)
        return beyond


def _span(span: Range) -> str:
    low, high = span
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def measured_with(catalog: Catalog, own: Deployment) -> MeasuredWith | None:
    """None where nobody has published a row of this model in that width there."""
    same_accelerator = _named(lambda name: catalog.accelerator(name).id == own.accelerator.id)
    same_stack = _named(lambda name: catalog.stack(name).id == own.stack.id)
    shape = architecture_of(own.model)
    same_model = _named(lambda name: architecture_of(catalog.model(name)) == shape)
    rows = [
        row
        for (accelerator, engine, width, model), alike in _rows(frozenset(spellings(own.accelerator)), _files()).items()
        if width == own.weight_width and same_accelerator(accelerator) and same_stack(engine) and same_model(model)
        for row in alike
        if (row.spec_decode.casefold() not in _NOT) == (own.speculation is not None) and row.disagg.casefold() in _NOT
    ]
    if not rows:
        return None
    layouts = Counter(_layout(row.parallelism or (f"tp{row.tp}" if row.tp else "")) for row in rows)
    return MeasuredWith(
        len(rows),
        tuple(name for name, _ in layouts.most_common()),
        *(_range([getattr(row, column) for row in rows]) for column in ("input_len", "output_len", "concurrency")),
    )


def measured_apart(catalog: Catalog, deployment: Deployment) -> bool:
    """Whether anybody has published a disaggregated row of this model there, in any layout."""
    shape = architecture_of(deployment.model)
    same_accelerator = _named(lambda name: catalog.accelerator(name).id == deployment.accelerator.id)
    same_model = _named(lambda name: architecture_of(catalog.model(name)) == shape)
    return any(
        row.disagg.casefold() not in _NOT
        for (accelerator, _, _, model), alike in _rows(frozenset(spellings(deployment.accelerator)), _files()).items()
        if same_accelerator(accelerator) and same_model(model)
        for row in alike
    )


def _named(same: Callable[[str], bool]) -> Callable[[str], bool]:
    """Each name is looked up once; one that the catalog does not have is another."""

    @cache
    def is_same(name: str) -> bool:
        try:
            return bool(name) and same(name)
        except CrosstieError:
            return False

    return is_same


def _layout(said: str) -> str:
    """Sources write TP8, tp8/ep8, or gpus8 tp4 attention_dp2 ep8; "" where no ranks are named."""
    ranks = {kind.lower(): int(number) for kind, number in _SPLIT.findall(said)}
    return str(Parallelism(**ranks)) if "tp" in ranks and 0 not in ranks.values() else ""


@cache
def _width(precision: str) -> str:
    match = _WIDTH.search(precision)
    return match[0] if match else "16"


def _range(values: list[str]) -> Range | None:
    numbers = [float(value) for value in values if re.fullmatch(r"\d+(\.\d+)?", value)]
    return (min(numbers), max(numbers)) if numbers else None


def _files() -> tuple[Path, ...]:
    known = measured_files(sorted((SHIPPED / "measured").glob(_FILES)))
    return tuple(file for file in known if file.match(_FILES))


@cache
def _rows(names: frozenset[str], files: tuple[Path, ...]) -> dict[tuple[str, str, str, str], list[_Row]]:
    """Of one accelerator, by its spellings: rows by accelerator, engine, width of the weights and model, as the sources
    name them. Few lines of the files name it at all, and only these are taken apart."""
    by_key: dict[tuple[str, str, str, str], list[_Row]] = {}
    named = re.compile("|".join(map(re.escape, sorted(names)))).search
    for header, *lines in _lines(files):
        mine = csv.reader(line for line in lines if named(line.casefold()))
        columns = header.split(",")
        looked_at = itemgetter(*(columns.index(column) for column in _Row._fields))
        for row in map(_Row._make, map(looked_at, mine)):
            by_key.setdefault((row.accelerator, row.engine, _width(row.precision), row.model), []).append(row)
    return by_key


@cache
def _lines(files: tuple[Path, ...]) -> list[list[str]]:
    """Of each file, its header first; no row has a line break in it."""
    return [gzip.decompress(file.read_bytes()).decode().splitlines() for file in files]

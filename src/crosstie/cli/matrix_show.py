"""`crosstie preflight MODEL --matrix` on the screen: for each engine a table, its images, and what changed when."""

from collections.abc import Sequence
from itertools import groupby

from crosstie.core.finding import VERDICTS
from crosstie.port.preflight.matrix import MatrixChange, MatrixRow, ReleaseMatrix
from crosstie.web.parts import Heading, Line, Parts, Table, closing, note

# A cell has room for a word or two.
_SHORT = {"ready with settings": "settings", "will not run": "no"}
_LEGEND = (
    "settings: ready with settings; no: will not run; not known: no rule was read. CUDA and ROCm are those of the "
    "project's own images, whose names come from its build files: none was pulled."
)


def matrix_parts(matrix: ReleaseMatrix, verbose: bool) -> Parts:
    yield Heading(f"{matrix.name} by engine and release: {matrix.stored}")
    for engine, group in groupby(matrix.rows, key=lambda row: row.build.engine):
        yield from _engine(engine, list(group), matrix, verbose)
    yield note(_LEGEND)
    yield note("Nothing here ran on an AMD GPU.")
    if not verbose:
        yield closing("all releases, their dates, settings and sources, and each change in full")


def _engine(engine: str, rows: Sequence[MatrixRow], matrix: ReleaseMatrix, verbose: bool) -> Parts:
    parts = list(rows[0].verdicts)
    shown = rows if verbose else _without_tail(rows)
    table = [
        [
            row.build.version + ("" if row is not shown[-1] or len(shown) == len(rows) else " and older"),
            row.build.cuda or "?", row.build.rocm or "?",
            *(_SHORT.get(said, said) for said in row.verdicts.values()),
        ]
        for row in shown
    ]  # fmt: skip
    yield ""
    yield Table([engine, "CUDA", "ROCm", *parts], table)
    yield from (f"  {end.name}: {end.what} ({end.source}, {end.date})" for end in matrix.ended if end.engine == engine)
    named = next((row.build for row in rows if row.build.rocm_image or row.build.cuda_image), None)
    if named:
        images = [image for image in (named.cuda_image, named.rocm_image) if image]
        yield f"  images of {named.version}: {', '.join(images)}"
    if verbose:
        for row in shown:
            settings = "; ".join(f"{part}: {' '.join(said)}" for part, said in row.settings.items() if said)
            yield (
                f"  {row.build.version} of {row.build.released}: {row.build.source}"
                + (f"; {settings}" if settings else "")
            )
    yield from _changes([change for change in matrix.changes if change.engine == engine], verbose)


def _without_tail(rows: Sequence[MatrixRow]) -> Sequence[MatrixRow]:
    """Old releases that all say the same are one row."""
    last = len(rows) - 1
    while last > 0 and rows[last - 1].verdicts == rows[last].verdicts:
        last -= 1
    return rows[: last + 1]


def _changes(changes: Sequence[MatrixChange], verbose: bool) -> Parts:
    """Accelerators that change alike in one release are one line."""
    order = list(VERDICTS.values())
    for (version, before, after), group in groupby(changes, key=lambda one: (one.version, one.before, one.after)):
        alike = list(group)
        parts = ", ".join(change.accelerator for change in reversed(alike))
        word = "gone" if order.index(after) < order.index(before) else "new"
        why = alike[0].why if verbose else alike[0].why.partition(": ")[2].partition(". ")[0] or alike[0].why
        yield Line(f"  {version} ({alike[0].released}), {parts}: {before}, then {after}; {word}: {why}", hang=4)

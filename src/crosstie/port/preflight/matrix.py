"""One model on every release of every engine that was read: verdicts by accelerator, and what changed when.

What each release is built on and where its image is found comes from the engines' own build files (`releases.csv`).
"""

from collections.abc import Mapping, Sequence
from functools import cache

import msgspec
from packaging.version import Version

from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import read_table
from crosstie.catalog.releases import newest_file
from crosstie.core.errors import BadData, BadInput
from crosstie.core.finding import VERDICTS, Finding, rank, verdict
from crosstie.core.progress import OnProgress, no_progress
from crosstie.port.preflight.engine import DATA, EngineEnd, engine_ends, engine_from, engines, release_in
from crosstie.port.preflight.model import ModelOptions, ScanDepth, check_model, checked_features
from crosstie.port.preflight.numbers import stored_findings
from crosstie.port.preflight.stored import read_stored

NOT_READ = VERDICTS["unknown"]


class EngineBuild(msgspec.Struct, frozen=True, kw_only=True):
    """A release as its project builds it; "" where its build files do not say."""

    engine: str
    version: str
    released: str
    cuda: str
    rocm: str
    cuda_image: str
    rocm_image: str
    source: str


class MatrixRow(msgspec.Struct, frozen=True, kw_only=True):
    build: EngineBuild
    # By accelerator.
    verdicts: dict[str, str]
    settings: dict[str, list[str]]


class MatrixChange(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict that is another than in the release before, and the finding that came or went."""

    engine: str
    version: str
    released: str
    accelerator: str
    before: str
    after: str
    why: str


class ReleaseMatrix(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    stored: str
    # The newest release of an engine first.
    rows: tuple[MatrixRow, ...]
    changes: tuple[MatrixChange, ...]
    ended: tuple[EngineEnd, ...]


@cache
def builds() -> tuple[EngineBuild, ...]:
    file = newest_file(DATA / "releases.csv", "preflight/releases.csv")
    engine_builds = []
    for where, row in read_table(file, EngineBuild.__struct_fields__):
        if not row["source"]:
            raise BadData(file, where, "source is empty")
        release_in(file, where, row, "version")
        engine_builds.append(EngineBuild(**row))
    named = list(dict.fromkeys(row.engine for row in engine_builds))
    newest_first = sorted(engine_builds, key=lambda row: Version(row.version), reverse=True)
    return tuple(sorted(newest_first, key=lambda row: named.index(row.engine)))


def matrix(
    model: str, *, on: str | Sequence[str], engine: str | None = None, tp: int | None = None, ep: bool = False,
    kv: str | None = None, context: int | None = None, features: Sequence[str] = (),
    environment: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None, scan: ScanDepth = "sample",
    catalog: Catalog | None = None, on_progress: OnProgress = no_progress,
) -> ReleaseMatrix:  # fmt: skip
    """`preflight` on every release of `engine`, or of all of them, whose build files were read."""
    known = dict.fromkeys(build.engine for build in builds())
    if engine is not None and engine not in known:
        raise BadInput(f"unknown engine '{engine}': with --matrix one of {', '.join(known)}, without a release")
    catalog = catalog or Catalog()
    accelerators = catalog.accelerators_named(on)
    on_progress(0, 0, f"reading {model}")
    stored = read_stored(catalog, model)
    # What the files themselves show is the same for every release, and is read once.
    shown = stored_findings(stored, accelerators, scan, on_progress)
    stored = msgspec.structs.replace(stored, unseen="read before")
    wanted = [build for build in builds() if engine in (None, build.engine)]
    rows, changes = list[MatrixRow](), list[MatrixChange]()
    for name in known:
        older: dict[str, list[Finding]] | None = None
        matrix_rows = list[MatrixRow]()
        for build in reversed([build for build in wanted if build.engine == name]):
            on_progress(len(rows) + len(matrix_rows), len(wanted), f"{name} {build.version}")
            if name not in engines():
                unread = {accelerator.id: NOT_READ for accelerator in accelerators}
                matrix_rows.append(MatrixRow(build=build, verdicts=unread, settings={}))
                continue
            release = engine_from(f"{name}=={build.version}")
            options = ModelOptions(
                engine=release, tp=tp, ep=ep, kv=kv, context=context, features=checked_features(features),
                environment=dict(environment or {}), flags=dict(flags or {}), scan="none",
            )  # fmt: skip
            report = check_model(catalog, stored, accelerators, options)
            by_part = {
                one.id: [f for f in (*shown, *report.findings) if f.target in ("", one.id)] for one in accelerators
            }
            if older is not None:
                changes += _changes(build, older, by_part)
            older = by_part
            verdicts = {part: verdict(findings) for part, findings in by_part.items()}
            matrix_rows.append(MatrixRow(build=build, verdicts=verdicts, settings=report.settings))
        rows += reversed(matrix_rows)
    return ReleaseMatrix(
        name=stored.name, stored=stored.words, rows=tuple(rows), changes=tuple(reversed(changes)),
        ended=tuple(end for end in engine_ends() if engine in (None, end.engine)),
    )  # fmt: skip


def _changes(
    build: EngineBuild, before: dict[str, list[Finding]], after: dict[str, list[Finding]]
) -> list[MatrixChange]:  # fmt: skip
    changes = []
    for part, now in after.items():
        was, said = verdict(before[part]), verdict(now)
        if was != said:
            # The gravest of the graver side is what came, or what is gone.
            graver = max(before[part], now, key=lambda some: max((rank(one.severity) for one in some), default=0))
            why = max(graver, key=lambda one: rank(one.severity)).what
            changes.append(
                MatrixChange(
                    engine=build.engine, version=build.version, released=build.released, accelerator=part, before=was,
                    after=said, why=why,
                )
            )  # fmt: skip
    return changes

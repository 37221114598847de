"""Releases of the catalog's data: newer prices, results and rules, kept beside the shipped ones and revertible.

The folder of each lies under the user's data folder; `in-force.json` there names them in the order in which they were
installed, and the last one is in force. A release that is no newer than the shipped data is not.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from crosstie.catalog.writing import in_words, json_rows, write_text
from crosstie.core.errors import BadData, BadInput

_SHIPPED = Path(__file__).parent / "data" / "release.json"
# A folder in place of the release in force, or "none" for the shipped data alone.
VARIABLE = "CROSSTIE_RELEASE"
_STATE = "in-force.json"


class Release(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a release says of itself. Releases are named by their day, so that the later name is the newer one."""

    release: str
    notes: str = ""


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    release: str
    # By which key it was signed, "" where by none; from where and when it was installed.
    key: str
    source: str
    installed: str
    notes: str = ""


class _State(msgspec.Struct, frozen=True, kw_only=True):
    installed: tuple[Installed, ...]


def shipped_release() -> str:
    return msgspec.json.decode(_SHIPPED.read_bytes(), type=Release).release


def releases_folder() -> Path | None:
    """Where releases are kept; None where there is no home directory."""
    base = os.environ.get("XDG_DATA_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "share") / "crosstie" / "catalog"
    except RuntimeError:
        return None


def installed() -> tuple[Installed, ...]:
    """In the order in which they came."""
    folder = releases_folder()
    if folder is None or not (file := folder / _STATE).is_file():
        return ()
    try:
        return msgspec.json.decode(file.read_bytes(), type=_State).installed
    except (OSError, msgspec.MsgspecError) as error:
        raise BadData(file, "", f"cannot be read: {error}; `crosstie catalog revert --all` removes it") from None


def in_force() -> Path | None:
    """The folder of the release that stands over the shipped data, if any does."""
    given = os.environ.get(VARIABLE)
    if given:
        return None if given == "none" else Path(given)
    there, folder = installed(), releases_folder()
    if not there or folder is None or there[-1].release <= shipped_release():
        return None
    return folder / there[-1].release


def newest_file(shipped: Path, name: str) -> Path:
    """The file of that name of the release in force, else the shipped one."""
    release = in_force()
    return release / name if release and (release / name).is_file() else shipped


def measured_files(shipped: Iterable[Path]) -> tuple[Path, ...]:
    """Files of measured results: the shipped ones, each as the release in force has it, and what that adds."""
    release = in_force()
    brought = {file.name: file for file in sorted((release / "measured").glob("*"))} if release else {}
    kept = [brought.pop(file.name, file) for file in shipped]
    return (*kept, *brought.values())


@contextmanager
def staged(files: Mapping[str, bytes]) -> Iterator[Path]:
    """A folder with these files, beside those of other releases; gone at the end unless `put_in_force` took it."""
    folder = releases_folder()
    if folder is None:
        raise BadInput("there is no home directory: set XDG_DATA_HOME to a folder")
    with in_words(f"{folder}: cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder, prefix="draft-"))
        try:
            draft.chmod(0o755)
            for name, content in files.items():
                (draft / name).parent.mkdir(parents=True, exist_ok=True)
                (draft / name).write_bytes(content)
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def refuse_unless_newer(release: Release) -> None:
    known = installed()
    now = max(known[-1].release if known else "", shipped_release())
    if release.release <= now:
        which = "in force" if known and known[-1].release == now else "the shipped data"
        raise BadInput(
            f"release {release.release} is no newer than {now}, {which}; `crosstie catalog revert` goes back"
        )


def put_in_force(draft: Path, release: Release, key: str, source: str) -> None:
    target = draft.parent / release.release
    # Left behind by a revert that was cut off.
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    own = Installed(release=release.release, key=key, source=source, installed=now, notes=release.notes)
    _keep((*installed(), own))


def revert(everything: bool = False) -> tuple[Installed, ...]:
    """Takes back the last release, or all; which these were."""
    folder = releases_folder()
    if everything and folder is not None:
        # Also where the list of them cannot be read.
        shutil.rmtree(folder, ignore_errors=True)
        return ()
    known = installed()
    if not known or folder is None:
        raise BadInput("nothing to revert: the shipped data are in force")
    _keep(known[:-1])
    shutil.rmtree(folder / known[-1].release, ignore_errors=True)
    return known[-1:]


def _keep(known: tuple[Installed, ...]) -> None:
    folder = releases_folder()
    assert folder is not None, "known releases have a folder"
    write_text(folder / _STATE, json_rows(msgspec.to_builtins(_State(installed=known))))

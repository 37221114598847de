"""`crosstie catalog update`, `revert`, `status` and `pack`: newer data of the catalog without a new Crosstie."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import msgspec

from crosstie.catalog.release_file import NO_KEY, fetched, files_of, opened, packed, shipped_keys
from crosstie.catalog.releases import (
    VARIABLE,
    Release,
    in_force,
    installed,
    put_in_force,
    refuse_unless_newer,
    releases_folder,
    revert,
    shipped_release,
    staged,
)
from crosstie.catalog.workloads import EXAMPLES
from crosstie.catalog.writing import write_whole
from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.options import FILE, file_option, flag_option, json_option, text_option
from crosstie.cli.progress import progress
from crosstie.cli.show import tell
from crosstie.core.errors import BadData, BadInput
from crosstie.core.figures import dollars
from crosstie.web.parts import Parts, Table, note


@dataclass(frozen=True, slots=True)
class Replanned:
    """A workload's cheapest fleet before and after; None where no fleet will do, or it cannot be planned."""

    workload: str
    before: dict[str, int] | None
    after: dict[str, int] | None
    before_usd_per_hour: float | None
    after_usd_per_hour: float | None

    @property
    def flips(self) -> bool:
        """Whether other accelerators are chosen."""
        return set(self.before or {}) != set(self.after or {})


@click.command("update", epilog="Example: crosstie catalog update catalog-2026-12-01.json")
@click.argument("source", metavar="FILE|URL")
@click.option("--key", "keys", multiple=True, type=FILE,
              help="A public Ed25519 key (PEM) to trust, beside Crosstie's own where it ships one.")  # fmt: skip
@flag_option("--unsigned", "Check no signature: take the file on trust.")
@flag_option("--dry-run", "Check it and say what it would flip; change nothing.")
@click.option("--plan", "workloads", multiple=True, type=FILE, help="Workloads to plan again. [default: the shipped]")
@answer_options()
def update_command(
    source: str, keys: tuple[Path, ...], unsigned: bool, dry_run: bool, workloads: tuple[Path, ...], wanted: Wanted
) -> int:
    """Takes newer prices, results and rules from one signed FILE or URL.

    Everything is checked before anything is written. The data are kept beside the shipped ones, in
    $XDG_DATA_HOME/crosstie/catalog, under your own catalog folder; `crosstie catalog revert` takes them back. Workloads
    are planned before and after, to say whose choice of accelerators it flips.
    """
    for file in workloads:
        if not file.is_file():
            raise BadInput(f"--plan {file}: no such file")
    release, files, key = opened(source, fetched(source), keys, unsigned)
    refuse_unless_newer(release)
    with staged(files) as draft:
        _check(source, draft)
        plans = _replanned(workloads or tuple(sorted(EXAMPLES.glob("*.toml"))), draft)
        if not dry_run:
            put_in_force(draft, release, key, source)

    def document() -> dict[str, object]:
        return {
            "release": release.release, "in_force": not dry_run, "signed_by": key, "files": sorted(files),
            "plans": [{**asdict(plan), "flips": plan.flips} for plan in plans],
        }  # fmt: skip

    def parts() -> Parts:
        did = "would be in force" if dry_run else "is in force"
        yield f"Release {release.release} {did} ({_signed(key)}): {', '.join(files_of(files))}"
        if release.notes:
            yield release.notes
        yield _flips(plans)
        if not dry_run:
            yield note("`crosstie catalog revert` takes it back")

    wanted.give(document, lambda _: parts())
    return 0


def _signed(key: str) -> str:
    return f"signed by key {key}" if key else "no signature was checked"


def _crosstie(arguments: list[str], release: Path | None) -> subprocess.CompletedProcess[str]:
    """In a process of its own, where nothing of another release was read yet; None: with what is in force."""
    environment = {**os.environ, **({VARIABLE: str(release)} if release else {})}
    command = [sys.executable, "-m", "crosstie", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _check(source: str, draft: Path) -> None:
    checked = _crosstie(["catalog", "check"], draft)
    if checked.returncode:
        reason = checked.stderr.strip().removeprefix("crosstie: ").replace(f"{draft}/", "")
        raise BadData(source, "", f"is not taken: {reason}")


def _replanned(workloads: tuple[Path, ...], draft: Path) -> list[Replanned]:
    plans = []
    with progress("planning before and after") as on_progress:
        for index, file in enumerate(workloads):
            on_progress(index, len(workloads), file.stem)
            pairs = [_fleet(_crosstie(["plan", str(file), "--quick", "--json"], release)) for release in (None, draft)]
            (gpus, usd), (gpus_then, usd_then) = pairs
            plans.append(Replanned(file.stem, gpus, gpus_then, usd, usd_then))
    return plans


def _fleet(answer: subprocess.CompletedProcess[str]) -> tuple[dict[str, int] | None, float | None]:
    fleet = json.loads(answer.stdout)["fleet"] if answer.returncode == 0 else None
    return (fleet["gpus"], fleet["usd_per_hour"]) if fleet else (None, None)


def _flips(plans: list[Replanned]) -> Table:
    rows = []
    for plan in plans:
        cost, then = plan.before_usd_per_hour, plan.after_usd_per_hour
        change = f"{then / cost - 1.0:+.1%}" if cost and then else "-"
        costs = [dollars(usd) if usd else "-" for usd in (cost, then)]
        verdict = "FLIPS" if plan.flips else "holds"
        rows.append([plan.workload, verdict, _gpus(plan.before), _gpus(plan.after), *costs, change])
    columns = ["workload", "choice", "~before", "~after", ">$/h before", ">after", ">change"]
    return Table(columns, rows, "Plans before and after")


def _gpus(counts: dict[str, int] | None) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items()) if counts else "no fleet"


@click.command("revert", epilog="Example: crosstie catalog revert")
@flag_option("--all everything", "Back to the shipped data, whatever was installed.")
@json_option
def revert_command(everything: bool, as_json: bool) -> int:
    """Takes back the last update: what was in force before is again."""
    gone = revert(everything)
    release = in_force()
    document = {"reverted": [held.release for held in gone], "in_force": release.name if release else "shipped"}
    what = f"release {gone[0].release} is gone" if gone else "all releases are gone"
    now = f"release {release.name} is" if release else "the shipped data are"
    tell(document, f"{what}; {now} in force", as_json=as_json)
    return 0


@click.command("status", epilog="Example: crosstie catalog status")
@answer_options()
def status_command(wanted: Wanted) -> int:
    """Says which data are in force: the shipped ones, or a release, and what can be gone back to."""
    known, release, shipped = installed(), in_force(), shipped_release()

    def document() -> dict[str, object]:
        return {
            "in_force": release.name if release else "shipped", "shipped": shipped, "folder": str(releases_folder()),
            "installed": msgspec.to_builtins(known), "ships_key": bool(shipped_keys()),
        }  # fmt: skip

    def parts() -> Parts:
        yield f"in force: {f'release {release.name}' if release else 'the shipped data'}"
        yield f"shipped: {shipped}"
        for held in reversed(known):
            old = "; older than the shipped data, so not used" if held.release <= shipped else ""
            yield f"release {held.release}: {_signed(held.key)}, from {held.source}, installed {held.installed}{old}"
        if not shipped_keys():
            yield note(NO_KEY)
        if os.environ.get(VARIABLE):
            yield note(f"{VARIABLE} is set to {os.environ[VARIABLE]}")

    wanted.give(document, lambda _: parts())
    return 0


@click.command(
    "pack", epilog="Example: crosstie catalog pack data/ --release 2026-12-01 --sign key.pem -o catalog.json"
)
@click.argument("folder", type=FILE)
@text_option("--release", "YYYY-MM-DD", "Its name, which must be later than the last.", required=True)
@text_option("--notes", "TEXT", "What is new, for those who take it.", default="")
@file_option("--sign key", "An Ed25519 private key (PEM). [default: unsigned]", metavar="KEY")
@file_option("-o --output", "The file to write.", required=True)
@json_option
def pack_command(folder: Path, release: str, notes: str, key: Path | None, output: Path, as_json: bool) -> int:
    """Makes the one file of a release from a FOLDER of catalog files, for `crosstie catalog update`.

    prices.csv, api_prices.csv, acceptance.csv, costs.toml, calibration.json, accelerators/, models/, stacks/,
    efficiency/, measured/ and preflight/rules/ are what it may have.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder")
    try:
        content = packed(folder, Release(release=release, notes=notes), key.read_bytes() if key else None)
        write_whole(output, lambda draft: draft.write_bytes(content))
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}") from None
    document = {"file": str(output), "release": release, "bytes": len(content), "signed": key is not None}
    written = f"release {release} written to {output}: {len(content):,} bytes{'' if key else ', unsigned'}"
    tell(document, written, as_json=as_json)
    return 0

"""Findings for people, programs and code-scanning pages: what `crosstie preflight` and `crosstie doctor` print."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import msgspec
from rich.text import Text

from crosstie.catalog.writing import write_text
from crosstie.cli.answer import Wanted, check_html, html_option
from crosstie.cli.options import json_option, option_group, verbose_option
from crosstie.cli.show import json_text
from crosstie.core.figures import plural
from crosstie.core.finding import GROUNDS, SEVERITIES, Finding, rank
from crosstie.port.preflight.sarif import sarif
from crosstie.web.parts import Heading, Line, Parts, closing, note

_COLOURS = {"note": "dim", "setting": "cyan", "slow": "yellow", "unknown": "magenta", "error": "bold red"}
_VERDICT_COLOURS = {"ready": "green", "ok": "green", "will not run": "bold red", "error": "bold red"}
_MOST_SHOWN = 60
_NO_AMD = "Nothing here ran on an AMD GPU."


# What the command passes on to `report`.
report_options = option_group(
    click.option("--fail-on", type=click.Choice(SEVERITIES), default="error", show_default=True,
                 help="Exit with 1 when a finding is at least this grave."),
    click.option("--sarif", "sarif_file", type=click.Path(dir_okay=False), metavar="FILE",
                 help="Write the findings as SARIF 2.1.0 as well."),
    html_option, verbose_option("where, evidence and remedy of notes"), json_option,
)  # fmt: skip


def report(
    title: str, findings: Sequence[Finding], verdicts: Mapping[str, str], *,
    as_json: bool, sarif_file: str | None, fail_on: str, verbose: bool = False, html: Path | None = None,
    more: Mapping[str, object] | None = None, last: Sequence[str] = (), caveat: str = _NO_AMD,
) -> int:  # fmt: skip
    """Prints or writes all, gravest first, and gives the exit status. Verdicts are by accelerator or callable; the
    `last` lines and the `caveat` stand under the findings."""
    check_html(html)
    ordered = _gravest_first(findings)
    if sarif_file:
        write_text(Path(sarif_file), json_text(sarif(ordered)) + "\n")
    Wanted(verbose, as_json, html).give(
        lambda: to_json(findings, verdicts, more or {}),
        lambda details: _parts(title, ordered, verdicts, details, last, caveat),
        title=title,
    )
    return 1 if any(rank(finding.severity) >= rank(fail_on) for finding in findings) else 0


def to_json(findings: Sequence[Finding], verdicts: Mapping[str, str], more: Mapping[str, object]) -> dict[str, object]:
    documents = [{**msgspec.to_builtins(each), "rests_on": GROUNDS[each.grounds]} for each in _gravest_first(findings)]
    return {"verdicts": dict(verdicts), "findings": documents, **more}


def _gravest_first(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: (-rank(finding.severity), finding.target, finding.check))


def _parts(
    title: str, findings: Sequence[Finding], verdicts: Mapping[str, str], verbose: bool, last: Sequence[str],
    caveat: str,
) -> Parts:  # fmt: skip
    """The verdicts first: whoever reads no further has the answer."""
    yield Heading(title)
    width = max(map(len, verdicts), default=0)
    for name, said in verdicts.items():
        # What follows is about the verdict: settings, or a reason.
        colour = _VERDICT_COLOURS.get(said.partition(":")[0].partition(",")[0], "yellow")
        yield Line(Text.assemble(f"{name:<{width}}  ", (said, colour)), hang=min(width + 2, 24))
    paragraphs = _together(findings)
    shown = paragraphs if verbose or len(paragraphs) <= _MOST_SHOWN else paragraphs[:_MOST_SHOWN]
    for finding, targets in shown:
        on = f"  [{', '.join(targets)}]" if targets else ""
        head = (f"{finding.severity:<8}", _COLOURS[finding.severity])
        yield Line(Text.assemble(head, finding.what, (on, "dim")), hang=8)
        if finding.severity == "note" and not verbose:
            continue
        for name, said in (
            ("where", str(finding.where)),
            ("evidence", f"{finding.evidence} ({GROUNDS[finding.grounds]})"),
            ("remedy", finding.remedy),
        ):
            if said:
                yield Line(Text.assemble(("        " + f"{name:<9}", "dim"), said), hang=17)
    if not findings:
        yield "no findings"
    yield from _count_rest([finding for finding, _ in paragraphs[len(shown) :]])
    yield from last
    yield note(caveat)
    if not verbose and any(finding.severity == "note" for finding in findings):
        yield closing("where, evidence and remedy of notes")


def _count_rest(rest: Sequence[Finding]) -> Parts:
    """A tree of sources may have hundreds of findings: what is not printed is counted, by check."""
    if not rest:
        return
    yield f"and {len(rest):,} more, which -v prints, and --json and --sarif have:"
    for (severity, check), number in Counter((finding.severity, finding.check) for finding in rest).most_common():
        files = len({finding.where.file for finding in rest if (finding.severity, finding.check) == (severity, check)})
        yield Text.assemble((f"{severity:<8}", _COLOURS[severity]), f"{check}: {number:,} in {plural(files, 'file')}")


def _together(findings: Sequence[Finding]) -> list[tuple[Finding, list[str]]]:
    """The same finding on several accelerators is one paragraph."""
    together: dict[Finding, list[str]] = {}
    for finding in findings:
        targets = together.setdefault(msgspec.structs.replace(finding, target=""), [])
        if finding.target:
            targets.append(finding.target)
    return list(together.items())

"""docs/claims.md: the claims by article with verdict, value and reason, for readers of those articles."""

from collections.abc import Iterable, Sequence

from crosstie.prove.claims.check import Checked, summarise
from crosstie.prove.claims.rests import Rest
from crosstie.prove.claims.verdicts import VERDICTS

_INTRO = """# What five articles claim, checked

Five public articles on AMD and NVIDIA for LLM inference, A to E, make 72 assertions that can be put as a subject, a
quantity and a value. This page checks each of them. `crosstie claims --markdown` prints it (`make claims`), and
`crosstie claims c27` shows one claim with everything that its verdict rests on.

Each claim is a row of `claims.toml`: the claim, its readings (the cases that it leaves open), the question that each
asks of the product, and a tolerance. Questions go through what `fit`, `compare` and `tco` run, to the catalog's facts
and prices, to measured results that others published, or to a public source, kept with its date in
`claim_sources.toml`. The verdict follows from how many readings agree; another catalog gives other verdicts. A figure
of the model comes with the interval that 80% of measurements are meant to fall in, and a claim agrees if it lies
inside. Where a source is asked, most of all about software, the verdict is our reading of it.
**Crosstie has run nothing on an AMD GPU**: AMD's measured rows are others', and estimates for AMD rest on them.
"""

_NOTES = """## How to read it

- A claim that names no precision, batch or price kind is tried in several; agreeing in some of them is "under stated
  conditions", and the reason names them. That is generous to vague claims.
- Estimates are for the software that was measured last. A figure that was true of an older release can look wrong here.
- Prices are a snapshot of the catalog's, most of them third parties', and rents of one GPU differ many times
  over. A price that rests on one of the articles is left out, whichever claim is checked.
- Another claim is no evidence: "contradicted by another" is given only where the readings have no answer.
"""


def page(checked: Sequence[Checked]) -> str:
    summary = summarise(checked)
    meanings = [(f"**{verdict}**", meaning, str(summary.counts[verdict])) for verdict, meaning in VERDICTS.items()]
    parts = [_INTRO, summary.line, "\n## Verdicts\n", _table(("verdict", "means", "claims"), meanings)]
    for article in sorted({entry.claim.article for entry in checked}):
        own = [entry for entry in checked if entry.claim.article == article]
        parts += [f"\n## Article {article}\n", _table(("", "claim", "verdict", "computed", "why"), map(_row, own))]
    parts += ["", _NOTES, "## What the verdicts rest on\n", *map(_rests, checked)]
    return "\n".join(parts) + "\n"


def _row(checked: Checked) -> Sequence[str]:
    claim, finding = checked.claim, checked.finding
    against = f" (against {', '.join(finding.contradicted_by)})" if finding.contradicted_by else ""
    verdict = f"**{finding.verdict}**{finding.qualified.removeprefix(finding.verdict)}{against}"
    return claim.id, claim.words, verdict, finding.computed, f"{finding.reason}."


def _rests(checked: Checked) -> str:
    lines = [f"- **{checked.claim.id}**", *(f"  - {rest_words(rest)}" for rest in checked.finding.rests)]
    return "\n".join(lines)


def rest_words(rest: Rest) -> str:
    source = ", ".join(part for part in (rest.source, rest.date) if part)
    return f"{rest.kind}: {rest.what}" + (f" [{source}]" if source else "")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)])

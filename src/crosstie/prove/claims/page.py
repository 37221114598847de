"""docs/claims.md: the claims by article with verdict, value and reason, for readers of those articles."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from crosstie.prove.claims.check import VERDICTS, Judgement, summarise
from crosstie.prove.claims.rests import Rest

_FILE = Path(__file__).parent / "data" / "page.md"


def page(judged: Sequence[Judgement]) -> str:
    summary = summarise(judged)
    meanings = [(f"**{verdict}**", meaning, str(summary.counts[verdict])) for verdict, meaning in VERDICTS.items()]
    articles = []
    for article in sorted({judgement.claim.article for judgement in judged}):
        rows = [_row(judgement) for judgement in judged if judgement.claim.article == article]
        articles += [f"\n## Article {article}\n", _table(("", "claim", "verdict", "computed", "why"), rows)]
    rests = []
    for judgement in judged:
        rests += [f"- **{judgement.claim.id}**", *(f"  - {rest_words(rest)}" for rest in judgement.rests)]
    return _FILE.read_text(encoding="utf-8").format(
        summary=summary.line, verdicts=_table(("verdict", "means", "claims"), meanings),
        articles="\n".join(articles), rests="\n".join(rests),
    )  # fmt: skip


def _row(judgement: Judgement) -> Sequence[str]:
    claim, verdict = judgement.claim, judgement.verdict
    against = f" (against {', '.join(judgement.contradicted_by)})" if judgement.contradicted_by else ""
    told = f"**{verdict}**{judgement.qualified.removeprefix(verdict)}{against}"
    return claim.id, claim.words, told, judgement.computed, f"{judgement.reason}."


def rest_words(rest: Rest) -> str:
    source = ", ".join(part for part in (rest.source, rest.date) if part)
    return f"{rest.kind}: {rest.what}" + (f" [{source}]" if source else "")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)])

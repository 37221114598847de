"""`crosstie claims`: what public articles assert about AMD and NVIDIA, each with a verdict and its reason."""

import click

from crosstie.catalog.library import Catalog
from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.options import flag_option, text_option
from crosstie.core.document import picked
from crosstie.core.errors import BadInput
from crosstie.prove.claims.check import (
    ClaimsSummary,
    Judgement,
    check_claims,
    page,
    rest_words,
    summarise,
    verdict_named,
)
from crosstie.prove.claims.reading import read_claims, select
from crosstie.web.parts import Heading, Parts, Table, note

# So many claims are shown with all that they rest on; more of them as a table.
_IN_FULL = 3
_ASSUMED = "assumes of each claim the lengths, load, precision and prices that its reason names; estimates, even odds"


@click.command("claims")
@click.argument("asked", nargs=-1, metavar="[ID|TEXT]...")
@text_option("--verdict", "V", "Only claims with this verdict: holds, wrong, ...")
@text_option("--article", "A", "Only claims of this article, A to E.")
@flag_option("--markdown", "Print the page docs/claims.md.")
@answer_options()
def command(asked: tuple[str, ...], verdict: str | None, article: str | None, markdown: bool, wanted: Wanted) -> int:
    """What five public articles assert about AMD and NVIDIA for LLM inference, checked one by one.

    Each claim gets a verdict, the computed or sourced value, the reason and its basis. A check is a computation on
    the catalog, so your own catalog files can change verdicts.

    \b
    crosstie claims --verdict wrong
    crosstie claims c27
    crosstie claims mi325x --article A

    Up to three claims are shown with everything that they rest on. Exit status 1 when no claim is left.
    """
    if markdown and (wanted.as_json or asked or verdict or article):
        raise BadInput("--markdown prints the whole page and goes with nothing else")
    chosen = select(read_claims(), asked, article)
    only = verdict_named(verdict) if verdict is not None else None
    claims = [claim for claim in check_claims(Catalog(), chosen) if only is None or claim.verdict == only]
    if not claims and not (markdown or wanted.as_json):
        click.echo("no claim is left", err=True)
        return 1
    wanted.give(lambda: to_json(claims), lambda _: parts(claims), markdown=(lambda: page(claims)) if markdown else None)
    return 0 if claims else 1


def parts(checked: list[Judgement]) -> Parts:
    if len(checked) > _IN_FULL:
        yield Table(["id", "~claim", "~verdict", "~computed"], [_row(claim) for claim in checked])
    else:
        for claim in checked:
            yield from _one(claim)
    yield summarise(checked).line
    if len(checked) > _IN_FULL:
        yield note("crosstie claims ID gives the reason and what it rests on")
    yield note(_ASSUMED)
    yield note("AMD results are published by others; Crosstie has run nothing on AMD")


def _row(judgement: Judgement) -> list[str]:
    claim = judgement.claim
    value = claim.value if claim.unit in ("", "bool") else f"{claim.value} {claim.unit}"
    return [claim.id, f"{claim.subject}: {value}", judgement.qualified, judgement.computed]


def _one(judgement: Judgement) -> Parts:
    claim = judgement.claim
    yield Heading(f"{claim.id}  {claim.words}  (article {claim.article})")
    yield f"  {judgement.qualified}; computed: {judgement.computed}"
    yield f"  {judgement.reason}"
    if judgement.contradicted_by:
        yield f"  other claims say otherwise: {', '.join(judgement.contradicted_by)}"
    yield from (note(f"  - {rest_words(rest)}") for rest in judgement.rests)


def to_json(checked: list[Judgement]) -> dict[str, object]:
    claims = [claim_json(claim) for claim in checked]
    return {"summary": summary_json(summarise(checked)), "claims": claims, "assumptions": {"line": _ASSUMED}}


def summary_json(summary: ClaimsSummary) -> dict[str, object]:
    articles = {
        name: {"claims": total, "hold": held, "hold_under_conditions": under}
        for name, (total, held, under) in summary.articles.items()
    }
    return {"counts": summary.counts, "articles": articles, "best_first": summary.best}


def claim_json(judgement: Judgement) -> dict[str, object]:
    several = len(judgement.tried) > 1
    return {
        **picked(judgement.claim, "id article kind subject value unit claim=text"),
        "verdict": judgement.verdict,
        "readings_agreeing": judgement.agreeing if several else None,
        "readings_tried": len(judgement.tried) if several else None,
        "readings": [picked(reading, "name said agrees") for reading in judgement.readings],
        **picked(judgement, "extrapolated computed reason contradicted_by rests_on=rests"),
    }

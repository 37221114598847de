"""`crosstie tco`: what owning each accelerator would cost, per million tokens."""

from collections.abc import Mapping, Sequence
from datetime import date
from functools import partial
from typing import Any

import click

from crosstie.catalog.library import Catalog, names_in
from crosstie.cli.answer import Drawing, Wanted, answer_options, plot_option
from crosstie.cli.assignments import amount, assigned, assigned_or_common, fraction, read_option
from crosstie.cli.lazy import GroupedCommand
from crosstie.cli.options import flag_option, model_argument, on_option, text_option, whole_option
from crosstie.cli.progress import progress
from crosstie.cli.replica import ReplicaOptions, replica_options
from crosstie.cli.tco_show import DETAILS, facts, parts, to_json
from crosstie.core.deployment import Accelerator
from crosstie.core.errors import BadInput, DoesNotFit
from crosstie.core.question import USUAL
from crosstie.core.units import UNITS
from crosstie.decide.cost.choices import Successor, mean_slip_months
from crosstie.decide.cost.tco import TcoRequest, tco
from crosstie.port.preflight.effort import as_engineers
from crosstie.web.tco_chart import tornado

_WAIT_KEYS = {"months", "speedup", "usd", "slip", "quarterly"}


@click.command(
    "tco",
    cls=GroupedCommand,
    groups={
        "Prices and assumptions": "--purchase --discount --engineers --engineer-usd --set --vary",
        "Load and replica": "--input --output --concurrency --precision --tp --pp --ep --dp --kv --stack",
        "Alternatives to owning": "--rent --rent-usd --wait --api --api-input --api-output",
        "Samples": "--samples --seed",
    },
)
@model_argument
@on_option("Accelerators to buy one of.", required=True)
@click.option("--gpus", type=int, default=8, show_default=True, metavar="N", help="Accelerators bought, of each.")
@click.option("--years", type=float, default=USUAL.horizon_years, show_default=True, metavar="Y", help="Horizon.")
@text_option("--purchase", "A=USD", "Price of one, before discounts. [default: catalog]", multiple=True)
@text_option("--discount", "[A=]P%", "Off the accelerators' price: of all, or of A.", multiple=True)
@text_option("--engineers", "A=N", "Engineers that A needs more than the others; 12d: person-days, once, as preflight "
             "counts them.", multiple=True)  # fmt: skip
@click.option("--engineer-usd", type=float, metavar="USD", help="What one costs a year. Short for --set.")
@text_option("--set settings", "[A:]KEY=V", "An assumption: `crosstie catalog show costs`.", multiple=True)
@replica_options
@click.option("--samples", type=int, default=10_000, show_default=True, metavar="N", help="Samples of the Monte Carlo.")
@whole_option("--seed", 0, None, "Seed of the Monte Carlo.", default=0)
@text_option("--vary", "P%", "Move every assumption by P% instead of over its own range.")
@flag_option("--rent", "Also: rent instead, at the catalog's rents.")
@text_option("--rent-usd", "A=USD", "Rent by the hour in place of the catalog's.", multiple=True)
@text_option("--wait", "B,K=V,...", "Also: wait for B; months, speedup, usd, slip or quarterly.")
@flag_option("--api ask_apis", "Also: an API instead, at what providers charge for the model.")
@click.option("--api-input", type=float, metavar="USD", help="An API of your own: USD per million input tokens.")
@click.option("--api-output", type=float, metavar="USD", help="USD per million output tokens of that API.")
@plot_option("Draw the tornado")
@answer_options(DETAILS, html=True)
def command(
    model: str,
    accelerators: str,
    replica: ReplicaOptions,
    plot: Drawing,
    wanted: Wanted,
    **terms: Any,
) -> int:
    """What owning each accelerator costs over --years for one MODEL: the bill, and USD per million output tokens.

    \b
    crosstie tco llama-3.1-70b --precision fp8 --on mi300x,h200 --gpus 64
    crosstie tco llama-3.1-70b --on mi300x,h200 --discount 14% --years 5
    crosstie tco llama-3.1-70b --on mi325x --purchase mi325x=22000 --set pue=1.2
    crosstie tco llama-3.1-70b --on mi300x --rent --api
    crosstie tco llama-3.1-70b --on h200 --wait b200,months=6,speedup=2,usd=40000
    crosstie tco llama-3.1-70b --on mi355x --wait mi455x

    Throughput is the performance model's at one operating point, times the utilisation. Each assumption has a
    range: the Monte Carlo draws from all of them, the tornado moves one at a time. --wait rents until B is there
    (months, slip = mean months late, or quarterly = chance to slip by another quarter); speedup is over today's
    GPU, usd what one B will cost you. Prices of the catalog are third parties' figures, so bring your own quotes.
    Exit status 1 when no accelerator can run the model.
    """
    catalog = Catalog()
    card = replica.scorecard(catalog, model, accelerators)
    request = _request(catalog, [entry.accelerator for entry in card.entries], **terms)
    try:
        with progress("drawing samples"):
            answer = tco(catalog, card, request)
    except DoesNotFit as error:
        click.echo(str(error), err=True)
        return 1
    plot.draw(lambda: tornado(answer.assessed), "every input is exact, so there is no tornado to draw")
    wanted.give(
        lambda: to_json(answer),
        lambda details: parts(answer, details),
        title=f"What {card.model.name} costs to own",
        facts=lambda: facts(answer),
        pictures=[tornado(answer.assessed)],
    )
    return 0


def _request(
    catalog: Catalog, chosen: Sequence[Accelerator], *, gpus: int, years: float, purchase: tuple[str, ...],
    discount: tuple[str, ...], engineers: tuple[str, ...], engineer_usd: float | None,
    settings: tuple[str, ...], samples: int, seed: int, vary: str | None, rent: bool, rent_usd: tuple[str, ...],
    wait: str | None, ask_apis: bool, api_input: float | None, api_output: float | None,
) -> TcoRequest:  # fmt: skip
    """The options as they were typed, as numbers by accelerator."""
    own_api = None
    if api_input is not None and api_output is not None:
        own_api = (api_input, api_output)
    elif (api_input is None) != (api_output is None):
        raise BadInput("--api-input and --api-output go together")
    if rent_usd and not rent and wait is None:
        raise BadInput("--rent-usd changes nothing without --rent or --wait")

    def by_id(option: str, texts: tuple[str, ...]) -> dict[str, float]:
        return _by_id(catalog, chosen, option, assigned(option, texts, amount))

    return TcoRequest(
        gpus=gpus,
        years=years,
        purchase_usd=by_id("--purchase", purchase),
        discount=_discounts(catalog, chosen, discount),
        engineers=_by_id(catalog, chosen, "--engineers", assigned("--engineers", engineers, partial(_staff, years))),
        assumptions=_assumptions(catalog, chosen, settings, {"engineer_usd_per_year": engineer_usd}),
        samples=samples,
        seed=seed,
        vary=None if vary is None else read_option(f"--vary {vary}", vary, fraction),
        rent=rent,
        rent_usd_per_hour=by_id("--rent-usd", rent_usd),
        api=ask_apis,
        api_usd_per_mtok=own_api,
        successor=_successor(catalog, wait) if wait is not None else None,
    )


def _staff(years: float, text: str) -> float:
    """A number of engineers, or person-days spent once over the horizon: 12d."""
    return as_engineers(amount(text[:-1]), years) if text.endswith("d") else amount(text)


def _by_id(
    catalog: Catalog, chosen: Sequence[Accelerator], option: str, given: Mapping[str, float]
) -> dict[str, float]:
    """The same by the accelerators' ids; a name that is not compared is a slip."""
    by_id = {}
    for name, value in given.items():
        # A part that was named by its file is known here by its id, and to the catalog not at all.
        ids = {a.id for a in chosen}
        known = name if name in ids else catalog.accelerator(name).id
        if known not in ids:
            raise BadInput(f"{option} {name}: {name} is not among --on")
        by_id[known] = value
    return by_id


def _discounts(catalog: Catalog, chosen: Sequence[Accelerator], texts: Sequence[str]) -> dict[str, float]:
    alone, common = assigned_or_common("--discount", texts, fraction)
    everybody = {} if common is None else {a.id: common for a in chosen}
    return everybody | _by_id(catalog, chosen, "--discount", alone)


def _assumptions(
    catalog: Catalog, chosen: Sequence[Accelerator], texts: Sequence[str], shorts: Mapping[str, float | None]
) -> dict[str, dict[str, float]]:
    """Assumptions by accelerator: KEY=V holds for all, A:KEY=V for A."""
    given = assigned("--set", texts, fraction)
    common = {key: value for key, value in shorts.items() if value is not None}
    for key in common:
        if key in given:
            raise BadInput(f"--set {key} is given twice")
    common |= {key: value for key, value in given.items() if ":" not in key}
    settings = {a.id: dict(common) for a in chosen}
    for name, value in given.items():
        who, colon, key = name.partition(":")
        if colon:
            owner = next(iter(_by_id(catalog, chosen, "--set", {who: value})))
            settings[owner][key] = value
    return settings


def _successor(catalog: Catalog, text: str) -> Successor:
    """NAME,months=9,speedup=2.4,usd=35000,slip=3; what is left out of an announced part's is the catalog's."""
    name, *rest = names_in(text) or [""]
    given = assigned("--wait", rest, amount)
    if not name or "=" in name or set(given) - _WAIT_KEYS or {"slip", "quarterly"} <= set(given):
        raise BadInput(f"--wait {text}: write B,months=9,speedup=2.4,usd=35000 and slip=3 or quarterly=0.3")
    later = catalog.with_announced.accelerator(name)
    told = later.announced
    if told is not None:
        today, expected = date.today(), told.expected.value
        months = 12 * (int(expected[:4]) - today.year) + int(expected[5:7]) - today.month
        known = {"months": max(months, 0), "usd": told.usd.value}
        if not {"slip", "quarterly"} & set(given):
            known["slip"] = told.slip.si / UNITS["month"].si
        given = known | given
    missing = {"months", "usd"} - set(given)
    if missing:
        raise BadInput(f"--wait {text}: {name} is not announced in the catalog: give {' and '.join(sorted(missing))}")
    slip = mean_slip_months(given["quarterly"]) if "quarterly" in given else given.get("slip", 0.0)
    return Successor(later, given["months"], slip, given.get("speedup"), given["usd"])

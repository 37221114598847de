"""`crosstie tco`: what owning each accelerator would cost, per million tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from crosstie.catalog.api_prices import ApiPrice
from crosstie.catalog.library import Catalog
from crosstie.cli.assignments import amount, assigned, assigned_or_common, fraction
from crosstie.cli.options import (
    accelerators_from,
    layout_from,
    model_argument,
    replica_options,
)
from crosstie.cli.show import json_option, names, print_json
from crosstie.cli.tco_show import Answer, Hosted, Rented, Sold, Waiting, show, to_json
from crosstie.core.accelerator import Accelerator
from crosstie.core.errors import BadInput
from crosstie.decide.cost.assessment import assess
from crosstie.decide.cost.choices import (
    Api,
    ApiQuote,
    Successor,
    api_quote,
    buy_or_wait,
    given_api,
    host_or_api,
    mean_slip_months,
    rent_or_buy,
)
from crosstie.decide.cost.ownership import Option, throughput
from crosstie.decide.cost.prices import BASES, Quote, behind, quotes, sold_tokens
from crosstie.decide.plan.compare import Entry, Load, Scorecard, compare
from crosstie.web.chart import check_ending
from crosstie.web.tco_chart import draw_tornado

CONTRACT = ("rent-3-years",)
_WAIT_KEYS = {"months", "speedup", "usd", "slip", "quarterly"}


@click.command("tco")
@model_argument
@click.option("--on", "accelerators", required=True, metavar="A,B,...", help="Accelerators to buy one of.")
@click.option("--gpus", type=int, default=8, show_default=True, metavar="N", help="Accelerators bought, of each.")
@click.option("--years", type=float, default=3.0, show_default=True, metavar="Y", help="Horizon.")
@click.option("--purchase", multiple=True, metavar="A=USD", help="Price of one, before discounts. [default: catalog]")
@click.option("--discount", multiple=True, metavar="[A=]P%", help="Off the accelerators' price: of all, or of A.")
@click.option("--engineers", multiple=True, metavar="A=N", help="Engineers that A needs more than the others.")
@click.option("--engineer-usd", type=float, metavar="USD", help="What one costs a year. Short for --set.")
@click.option("--utilisation", metavar="F", help="Mean output over the operating point's. Short for --set.")
@click.option(
    "--set", "settings", multiple=True, metavar="[A:]KEY=V", help="An assumption: `crosstie catalog show costs`."
)
@replica_options
@click.option("--samples", type=int, default=10_000, show_default=True, metavar="N", help="Samples of the Monte Carlo.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Its seed.")
@click.option("--vary", metavar="P%", help="Move every assumption by P% instead of over its own range.")
@click.option("--rent", is_flag=True, help="Also: rent instead, at the catalog's rents.")
@click.option("--rent-usd", multiple=True, metavar="A=USD", help="Rent by the hour in place of the catalog's.")
@click.option("--wait", metavar="B,K=V,...", help="Also: wait for B; months, speedup, usd, and slip or quarterly.")
@click.option("--api", "ask_apis", is_flag=True, help="Also: an API instead, at what providers charge for the model.")
@click.option("--api-input", type=float, metavar="USD", help="An API of your own: USD per million input tokens.")
@click.option("--api-output", type=float, metavar="USD", help="USD per million output tokens of that API.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw the tornado (.svg, .png, .pdf).")
@json_option
def command(
    model: str, accelerators: str, gpus: int, years: float, purchase: tuple[str, ...], discount: tuple[str, ...],
    engineers: tuple[str, ...], engineer_usd: float | None, utilisation: str | None, settings: tuple[str, ...],
    input_tokens: int, output_tokens: int, concurrency: int, precision: str, tp: int | None, pp: int | None,
    ep: int | None, dp: int | None, kv: str, stack: str | None, samples: int, seed: int, vary: str | None,
    rent: bool, rent_usd: tuple[str, ...], wait: str | None, ask_apis: bool, api_input: float | None,
    api_output: float | None, plot: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """What owning each accelerator costs over --years for one MODEL: the bill, and USD per million output tokens.

    \b
    crosstie tco llama-3.1-70b --precision fp8 --on mi300x,h200 --gpus 64
    crosstie tco llama-3.1-70b --precision fp8 --on mi325x,h200 --gpus 800 --purchase mi325x=22000 \\
      --purchase h200=35000 --discount 14% --engineers mi325x=2 --engineer-usd 280000
    crosstie tco llama-3.1-70b --on mi300x,h200 --set usd_per_kwh=0.07 --set mi300x:support_per_year=0.05
    crosstie tco llama-3.1-70b --on mi300x --rent --api
    crosstie tco llama-3.1-70b --on h200 --wait b200,months=6,speedup=2,usd=40000,slip=3

    Throughput is the performance model's at one operating point, times the utilisation. Each assumption has a
    range: the Monte Carlo draws from all of them, the tornado moves one at a time. --wait rents until B is there
    (months, slip = mean months late, or quarterly = chance to slip by another quarter); speedup is over today's
    GPU, usd what one B will cost you. Prices of the catalog are third parties' figures, so bring your own quotes.
    Exit status 1 when no accelerator can run the model.
    """
    if plot:
        check_ending(plot)
    if (api_input is None) != (api_output is None):
        raise BadInput("--api-input and --api-output go together")
    if rent_usd and not rent and wait is None:
        raise BadInput("--rent-usd changes nothing without --rent or --wait")
    catalog = Catalog()
    chosen = accelerators_from(catalog, accelerators, stack)
    load = Load(concurrency, input_tokens, output_tokens)
    card = compare(
        catalog, catalog.model(model), chosen, load,
        parallelism=layout_from(tp, pp, ep, dp), precision=precision, kv_format=kv, stack=stack,
    )  # fmt: skip
    shorts = {
        "engineer_usd_per_year": engineer_usd,
        "utilisation": share_of("--utilisation", utilisation),
    }
    terms = Terms(
        gpus,
        purchase=owned_by(catalog, chosen, "--purchase", assigned("--purchase", purchase, amount)),
        discount=discounts(catalog, chosen, discount),
        engineers=owned_by(catalog, chosen, "--engineers", assigned("--engineers", engineers, amount)),
        overrides=overrides(catalog, chosen, settings, shorts),
    )
    given_rents = owned_by(catalog, chosen, "--rent-usd", assigned("--rent-usd", rent_usd, amount))
    rents = Rents(
        by_the_hour=quotes(catalog.prices, [a.id for a in chosen], BASES["on-demand"], given_rents),
        by_contract=quotes(catalog.prices, [a.id for a in chosen], CONTRACT, {}),
    )
    successor = successor_from(catalog, wait) if wait is not None else None
    selling = selling_from(catalog, card, ask_apis, api_input, api_output)
    options = options_from(catalog, card, terms)
    if not options:
        click.echo(f"none can run it: {'; '.join(f'{e.accelerator.id}: {e.problem}' for e in card.entries)}", err=True)
        return 1
    assessed = assess(options, catalog.costs, years, samples=samples, seed=seed, vary=share_of("--vary", vary))
    answer = Answer(
        card=card,
        assessed=assessed,
        sources={option.name: behind(catalog.prices, option.price) for option in options},
        rented=[rented for option in options for rented in renting(catalog, option, rents, years)] if rent else [],
        sold=sold(catalog, options, selling, years) if selling else None,
        waiting=waiting(catalog, options, assessed.ranking[0], successor, rents, years) if successor else None,
    )
    if plot:
        draw_tornado(assessed, plot)
    if as_json:
        print_json(to_json(answer))
    else:
        show(answer)
    if plot:
        click.echo(f"drawn as {plot}", err=True)
    return 0


@dataclass(frozen=True)
class Terms:
    """What the user says of each accelerator, by its id."""

    gpus: int
    purchase: Mapping[str, float]
    discount: Mapping[str, float]
    engineers: Mapping[str, float]
    overrides: Mapping[str, Mapping[str, float]]


def options_from(catalog: Catalog, card: Scorecard, terms: Terms) -> list[Option]:
    """Those that run the model, each with its price."""
    running = [entry for entry in card.entries if entry.estimate]
    prices = quotes(catalog.prices, [e.accelerator.id for e in running], BASES["purchase"], terms.purchase)
    return [option_from(entry, prices.get(entry.accelerator.id), terms) for entry in running]


def option_from(entry: Entry, price: Quote | None, terms: Terms) -> Option:
    name, found, deployment = entry.accelerator.id, entry.estimate, entry.deployment
    assert found, "only entries that run are bought"
    assert deployment, "what runs is deployed somehow"
    if terms.gpus < deployment.parallelism.gpus:
        raise BadInput(f"--gpus {terms.gpus}: one replica on {name} takes {deployment.parallelism.gpus}")
    if price is None:
        raise BadInput(f"the catalog has no purchase price of {name}: give one with --purchase {name}=USD")
    return Option(
        accelerator=entry.accelerator, gpus=terms.gpus, price=price,
        output_tokens_per_s_per_gpu=throughput(found, deployment.parallelism.gpus, terms.gpus),
        discount=terms.discount.get(name, 0.0), engineers=terms.engineers.get(name, 0.0),
        overrides=terms.overrides[name],
    )  # fmt: skip


def share_of(option: str, text: str | None) -> float | None:
    """14% or 0.14, where it was given."""
    try:
        return None if text is None else fraction(text)
    except BadInput as error:
        raise BadInput(f"{option} {text}: {error}") from None


def owned_by(
    catalog: Catalog, chosen: Sequence[Accelerator], option: str, given: Mapping[str, float]
) -> dict[str, float]:
    """The same by the accelerators' ids; a name that is not compared is a slip."""
    found = {}
    for name, value in given.items():
        # A part that was named by its file is known here by its id, and to the catalog not at all.
        ids = {a.id for a in chosen}
        known = name if name in ids else catalog.accelerator(name).id
        if known not in ids:
            raise BadInput(f"{option} {name}: {name} is not among --on")
        found[known] = value
    return found


def discounts(catalog: Catalog, chosen: Sequence[Accelerator], texts: Sequence[str]) -> dict[str, float]:
    alone, common = assigned_or_common("--discount", texts, fraction)
    everybody = {} if common is None else {a.id: common for a in chosen}
    return everybody | owned_by(catalog, chosen, "--discount", alone)


def overrides(
    catalog: Catalog, chosen: Sequence[Accelerator], texts: Sequence[str], shorts: Mapping[str, float | None]
) -> dict[str, dict[str, float]]:
    """Assumptions by accelerator: KEY=V holds for all, A:KEY=V for A."""
    given = assigned("--set", texts, fraction)
    common = {key: value for key, value in shorts.items() if value is not None}
    for key in common:
        if key in given:
            raise BadInput(f"--set {key} is given twice")
    common |= {key: value for key, value in given.items() if ":" not in key}
    found = {a.id: dict(common) for a in chosen}
    for name, value in given.items():
        who, colon, key = name.partition(":")
        if colon:
            owner = next(iter(owned_by(catalog, chosen, "--set", {who: value})))
            found[owner][key] = value
    return found


@dataclass(frozen=True)
class Rents:
    """What the accelerators rent for, by id: hours as they are needed, or years around the clock."""

    by_the_hour: Mapping[str, Quote]
    by_contract: Mapping[str, Quote]

    def of(self, name: str) -> list[Quote]:
        found = [rents[name] for rents in (self.by_the_hour, self.by_contract) if name in rents]
        if not found:
            raise BadInput(f"the catalog has no rent of {name}: give one with --rent-usd {name}=USD")
        return found


def renting(catalog: Catalog, option: Option, rents: Rents, years: float) -> list[Rented]:
    """Against the least, the usual and the most that is asked, by the hour and under contract."""
    return [
        Rented(
            option.name,
            rent,
            [rent_or_buy(option, catalog.costs, usd, years) for usd in (rent.low, rent.usd, rent.high)],
        )
        for rent in rents.of(option.name)
    ]


def selling_from(
    catalog: Catalog, card: Scorecard, ask_apis: bool, api_input: float | None, api_output: float | None
) -> tuple[ApiQuote, Sequence[ApiPrice]] | None:
    """What tokens cost elsewhere, and what that rests on: the user's own prices, else the catalog's where asked."""
    load, model = card.load, card.model
    if api_input is not None and api_output is not None:
        return given_api(Api(api_input, api_output, load.input_tokens, load.output_tokens)), []
    if not ask_apis:
        return None
    offers = sold_tokens(catalog, model)
    found = api_quote(offers, load.input_tokens, load.output_tokens)
    if found is None:
        raise BadInput(
            f"--api: the catalog has no API price of {model.id}: give one with --api-input USD --api-output USD"
        )
    return found, offers


def sold(
    catalog: Catalog, options: Sequence[Option], selling: tuple[ApiQuote, Sequence[ApiPrice]], years: float
) -> Sold:
    """Against the least, the usual and the most that is charged."""
    quote, sources = selling
    hosted = [
        Hosted(
            option.name, [host_or_api(option, catalog.costs, usd, years) for usd in (quote.low, quote.usd, quote.high)]
        )
        for option in options
    ]
    return Sold(quote, sources, hosted)


def successor_from(catalog: Catalog, text: str) -> Successor:
    """NAME,months=9,speedup=2.4,usd=35000,slip=3"""
    name, *rest = names(text) or [""]
    given = assigned("--wait", rest, amount)
    unknown = set(given) - _WAIT_KEYS
    missing = {"months", "speedup", "usd"} - set(given)
    if not name or "=" in name or unknown or missing or {"slip", "quarterly"} <= set(given):
        raise BadInput(f"--wait {text}: write B,months=9,speedup=2.4,usd=35000 and slip=3 or quarterly=0.3")
    slip = mean_slip_months(given["quarterly"]) if "quarterly" in given else given.get("slip", 0.0)
    return Successor(catalog.accelerator(name), given["months"], slip, given["speedup"], given["usd"])


def waiting(
    catalog: Catalog, options: Sequence[Option], best: str, successor: Successor, rents: Rents, years: float
) -> Waiting:
    """From the cheapest of today's; a bridge of months is rented by the hour where that has a price."""
    option = next(option for option in options if option.name == best)
    rent = rents.of(best)[0]
    return Waiting(option, successor, rent, buy_or_wait(option, successor, catalog.costs, rent, years))

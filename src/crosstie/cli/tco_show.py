"""How `crosstie tco` tells its answer: one table read across, then sentences."""

from collections.abc import Sequence

from rich.text import Text

from crosstie.catalog.prices import Price
from crosstie.cli.fit import deployment_json, describe
from crosstie.core.document import picked, plain
from crosstie.core.figures import dollars, many, plural, seconds, share, significant
from crosstie.core.question import assumptions
from crosstie.decide.compare.scorecard import Entry
from crosstie.decide.cost.assessment import service_gap
from crosstie.decide.cost.choices import ApiQuote, HostOrApi
from crosstie.decide.cost.ownership import LINES, Option, Ownership, price_span
from crosstie.decide.cost.tco import ApiComparison, ApiMarket, RentComparison, Tco, WaitComparison
from crosstie.web.parts import Parts, Table, across, closing, note
from crosstie.web.report import KeyNumber

DETAILS = "the whole bill, break-evens, what moves it most, and what it rests on"
# Of the verdicts: who costs less, and why.
_ANSWERS = 2
HONEST = "Crosstie has run nothing on AMD; its throughputs rest on published results."


def parts(answer: Tco, verbose: bool) -> Parts:
    card, assessed = answer.card, answer.assessed
    bills = list(assessed.bills.values())
    about = f"; {describe(card.model)}" if verbose else ""
    yield Text.assemble((card.model.name, "bold"), f": {card.layouts}" if card.layouts else "", about)
    yield f"  {answer.question.line}"
    yield f"  {bills[0].option.gpus:,} GPUs of each, owned for {assessed.years:g} years"
    if verbose:
        yield across([bill.option.name for bill in bills], scorecard(answer, bills))
    else:
        columns = ["accelerator", ">price of one", ">total", ">$/GPU-hour", ">$/M output tokens"]
        columns += [">80% interval", *([">cheapest in"] if len(bills) > 1 else [])]
        yield Table(columns, [_row(answer, bill)[: len(columns)] for bill in bills])
    yield from (f"  {entry.accelerator.id}: {entry.problem}" for entry in card.entries if entry.problem)
    for sentence in [*assessed.verdicts[: None if verbose else _ANSWERS], *choice_sentences(answer)]:
        yield f"- {sentence}"
    if verbose:
        yield from _grounds(answer, bills)
    if any(entry.accelerator.vendor == "AMD" for entry in answer.running):
        yield note(HONEST)
    yield note("assumptions, ranges and sources: `crosstie catalog show costs`; --set KEY=VALUE changes one")
    if not verbose:
        yield closing(DETAILS)


def facts(answer: Tco) -> list[KeyNumber]:
    """The cheapest first."""
    assessed, unit = answer.assessed, "a million output tokens"
    between = {
        spread.option: f"{dollars(spread.low)} to {dollars(spread.high)}, 80%" for spread in assessed.risk.spreads
    }
    return [
        KeyNumber(f"{name}, {unit}", dollars(assessed.usd_per_mtok[name]), between[name]) for name in assessed.ranking
    ]


def _row(answer: Tco, bill: Ownership) -> list[str]:
    name = bill.option.name
    spread = next(cost for cost in answer.assessed.risk.spreads if cost.option == name)
    return [
        name, dollars(bill.option.price.usd), dollars(bill.total_usd), dollars(bill.usd_per_gpu_hour),
        dollars(answer.assessed.usd_per_mtok[name]), f"{dollars(spread.low)} to {dollars(spread.high)}",
        share(spread.cheapest),
    ]  # fmt: skip


def scorecard(answer: Tco, bills: Sequence[Ownership]) -> list[list[str]]:
    """One line a quantity: what is bought, what it does, what it costs."""
    pairs = [(entry.deployment, entry.estimate) for entry in answer.running]
    spreads = {spread.option: spread for spread in answer.assessed.risk.spreads}
    samples = [spreads[bill.option.name] for bill in bills]
    options = [bill.option for bill in bills]
    ranges = [_price_range(option) for option in options]
    return [
        ["price of one", *(dollars(option.price.usd) for option in options)],
        *([["  from what to what", *ranges]] if any(text != "-" for text in ranges) else []),
        ["discount", *(share(option.discount) for option in options)],
        ["GPUs per replica", *(f"{d.parallelism.gpus} ({d.parallelism})" if d else "-" for d, _ in pairs)],
        ["TPOT", *(seconds(e.tpot_s) if e else "-" for _, e in pairs)],
        ["output tokens/s per GPU", *(_rate(option) for option in options)],
        ["  80% interval", *(_rate_interval(option) for option in options)],
        ["IT power per GPU, rated", *(f"{bill.watts_per_gpu:,.0f} W" for bill in bills)],
        ["  in the mean", *(f"{bill.mean_watts_per_gpu:,.0f} W" for bill in bills)],
        ["  of it the GPU, 80% interval", *map(_draw_interval, bills)],
        ["kWh per million output tokens", *(significant(bill.kwh_per_mtok or 0.0) for bill in bills)],
        *([label, *(dollars(bill.usd[line]) for bill in bills)] for line, label in LINES.items()),
        ["total", *(dollars(bill.total_usd) for bill in bills)],
        ["per GPU-hour", *(dollars(bill.usd_per_gpu_hour) for bill in bills)],
        ["per GB of memory and month", *(dollars(answer.usd_per_gb_month(bill.option.name)) for bill in bills)],
        ["per GB of KV cache and month", *(dollars(answer.usd_per_cache_gb_month(bill.option.name)) for bill in bills)],
        ["per million output tokens", *(dollars(answer.assessed.usd_per_mtok[bill.option.name]) for bill in bills)],
        ["  80% interval", *(f"{dollars(spread.low)} to {dollars(spread.high)}" for spread in samples)],
        *([["  cheapest in", *(share(spread.cheapest) for spread in samples)]] if len(samples) > 1 else []),
    ]


def _price_range(option: Option) -> str:
    span = price_span(option.price)
    return "-" if span.is_exact else f"{dollars(span.low)} to {dollars(span.high)}"


def _rate(option: Option) -> str:
    span = option.output_tokens_per_s_per_gpu
    return significant(span.likely) if span else "-"


def _draw_interval(bill: Ownership) -> str:
    draw = bill.option.used_draw
    if draw is None:
        return "not predicted"
    low, high = draw.interval(bill.utilisation)
    return f"{draw.watts(bill.utilisation):,.0f} W, {low:,.0f} to {high:,.0f}"


def _rate_interval(option: Option) -> str:
    span = option.output_tokens_per_s_per_gpu
    return f"{significant(span.low)} to {significant(span.high)}" if span and not span.is_exact else "-"


def _grounds(answer: Tco, bills: Sequence[Ownership]) -> Parts:
    """What the numbers rest on."""
    yield from (note(f"  {price_ground(bill.option, answer.sources)}") for bill in bills)
    yield from (note(f"  {entry.accelerator.id}: {entry.estimate.basis}") for entry in answer.running if entry.estimate)
    yield from (note(f"  {name}: power {words}") for name, words in answer.power_basis.items())
    if answer.apis and answer.apis.sources:
        origins = sorted({price.output.source for price in answer.apis.sources})
        yield note(f"  API prices: {'; '.join(origins)}")


def price_ground(option: Option, sources: dict[str, list[Price]]) -> str:
    """What is assumed, from where to where, and every price that it was taken from."""
    price, behind = option.price, sources[option.name]
    if price.is_given:
        return f"{option.name}: price given"
    span = price_span(price)
    opening = f"{option.name}: {price.kind} price {dollars(price.usd)}, {dollars(span.low)} to {dollars(span.high)}"
    told = "; ".join(f"{p.provider} {dollars(p.amount.value)} ({p.amount.basis}, {p.amount.date})" for p in behind)
    if price.low == price.high:
        same = "one source" if price.prices == 1 else f"{price.prices} prices that agree"
        return f"{opening} ({same}, so a fifth either way is assumed): {told}"
    providers = plural(len({p.provider for p in behind}), "source")
    middle = f"that of {price.provider}, the middle of {providers}, {plural(price.prices, 'price')}"
    return f"{opening} ({middle}): {told}"


def dates(quote: ApiQuote) -> str:
    return quote.oldest if quote.oldest == quote.newest else f"{quote.oldest} to {quote.newest}"


def choice_sentences(answer: Tco) -> list[str]:
    sentences = [text for text in map(idle_sentence, answer.running, answer.assessed.bills.values()) if text]
    if answer.card.load.output_tokens > 1:
        gap = service_gap({e.accelerator.id: e.estimate.tpot_s for e in answer.running if e.estimate})
        sentences += [gap] if gap else []
    sentences += [answer.layout_flip] if answer.layout_flip else []
    sentences += [rent_sentence(rented) for rented in answer.rented]
    sentences += api_sentences(answer.apis, answer.card.model.id) if answer.apis else []
    return sentences + ([wait_sentence(answer.waiting)] if answer.waiting else [])


def idle_sentence(entry: Entry, bill: Ownership) -> str:
    """GPUs that are paid for and hold no replica."""
    replica = entry.deployment.parallelism.gpus if entry.deployment else 1
    left = bill.option.gpus % replica
    if not left:
        return ""
    idle = f"{left} of {bill.option.gpus} GPUs is" if left == 1 else f"{left} of {bill.option.gpus} GPUs are"
    return f"{entry.accelerator.id}: a replica takes {replica}, so {idle} paid for and without work."


def rent_sentence(rented: RentComparison) -> str:
    quote, usual = rented.rent, rented.choices[1]
    what = "given" if quote.is_given else f"{quote.kind}, {quote.origin}"
    opening = f"Rent {rented.name} at {dollars(usual.rent_usd_per_hour)} an hour ({what}) or own at "
    opening += f"{dollars(usual.owned_usd_per_hour)}: "
    months = f"; the outlay is back after {usual.payback_months:.0f} months" if usual.payback_months else ""
    if quote.kind.startswith(("reserved", "modelled")):
        more = "less" if usual.buy_wins_around_the_clock else "more"
        return f"{opening}owning costs {share(abs(usual.saving_of_buying))} {more} than the contract{months}."
    if not usual.buy_wins_around_the_clock:
        return f"{opening}renting wins even around the clock{months}."
    ends = [share(choice.break_even_utilisation) for choice in reversed(rented.choices)]
    wide = f" ({ends[0]} to {ends[2]} over the range of rents)" if ends[0] != ends[2] else ""
    line = f"owning wins when the GPUs are needed for more than {share(usual.break_even_utilisation)} of all hours"
    return f"{opening}{line}{wide}{months}."


def api_sentences(apis: ApiMarket, model: str) -> list[str]:
    quote = apis.quote
    if quote.is_given:
        return [given_api_sentence(option.name, option.choices[1]) for option in apis.options]
    how_many = f"{plural(len(quote.providers), 'provider')}, {plural(quote.prices, 'price')}, {dates(quote)}"
    ends = f"{dollars(quote.low)} ({quote.cheapest}) to {dollars(quote.high)} ({quote.dearest})"
    opening = f"APIs sell {model} at {ends} per million output tokens, prompts included, median {dollars(quote.usd)}"
    return [f"{opening} ({how_many}).", *(listed_api_sentence(option, quote) for option in apis.options)]


def listed_api_sentence(comparison: ApiComparison, quote: ApiQuote) -> str:
    least, usual, most = comparison.choices
    name, mine = comparison.name, usual.own_usd_per_mtok
    winner = f"{name} beats the median API" if usual.fleet_wins else f"The median API beats {name}"
    beaten = f"cheaper than {quote.dearer_than(mine)} of {plural(len(quote.providers), 'provider')}"
    levels = f"with the cheapest at {_level(least)}, with the dearest at {_level(most)}"
    return (
        f"{winner}: {dollars(mine)} against {dollars(quote.usd)}, {beaten}; level with the median at "
        f"{_level(usual, 'output tokens a day', 'of what the fleet can do')}, {levels}."
    )


def _level(choice: HostOrApi, unit: str = "", of: str = "") -> str:
    needed, used = many(choice.break_even_tokens_per_day), share(choice.break_even_utilisation)
    beyond = ", so never" if choice.break_even_utilisation > 1 else ""
    return f"{' '.join([needed, unit]).strip()} ({' '.join([used, of]).strip()}{beyond})"


def given_api_sentence(name: str, choice: HostOrApi) -> str:
    sums = f"{dollars(choice.own_usd_per_mtok)} against {dollars(choice.api_usd_per_mtok)} per million output tokens"
    winner = f"{name} beats the API" if choice.fleet_wins else f"The API beats {name}"
    line = f"{many(choice.break_even_tokens_per_day)} output tokens a day, {share(choice.break_even_utilisation)}"
    if choice.break_even_utilisation > 1:
        return f"{winner}: {sums}, prompts included; the fleet would have to do {line} of what it can."
    return f"{winner}: {sums}, prompts included; they draw level at {line} of what the fleet can do."


def wait_sentence(waiting: WaitComparison) -> str:
    choice, successor, name = waiting.choice, waiting.successor, waiting.option.name
    better = f"Waiting for {successor.accelerator.id} wins" if choice.waiting_wins else f"Buying {name} now wins"
    sums = f"{dollars(choice.buy_now_usd)} for buying {name} now, {dollars(choice.wait_usd)} expected for waiting"
    parts = f"{dollars(choice.bridge_usd)} of it rent at {dollars(waiting.rent.usd)} an hour"
    speed = choice.break_even_speedup
    level = f"level at a speed-up of {speed:.2f}x" if speed else "at no speed-up would waiting win"
    slip = choice.break_even_slip_months
    late = f"or a mean slip of {slip:.1f} months" if slip is not None else "and no slip within the horizon changes that"
    own = waiting.modelled
    figures = f"{own[0]:.2f}x ({own[1]:.2f} to {own[2]:.2f}) by their own figures" if own else "no figures of both"
    taken = f"{successor.speedup:.3g}x taken, {figures}"
    said = f"{better}: {sums} ({parts}); {level} ({taken}), {late}."
    if waiting.is_denied:
        said += f" The figures of {successor.accelerator.id} deny {successor.speedup:.3g}x at this load."
    if told := successor.accelerator.announced:
        said += f" Nobody has measured it: announced for {told.expected.value}, and its price is {told.usd.basis}."
    return said


def to_json(answer: Tco) -> dict[str, object]:
    assessed, waiting = answer.assessed, answer.waiting
    return {
        **picked(answer, "model=card.model.id load=card.load years=assessed.years"),
        "options": [option_json(answer, entry) for entry in answer.running],
        "problems": {e.accelerator.id: e.problem for e in answer.card.entries if e.problem},
        **picked(
            assessed, "ranking saving_interval=risk.saving samples=risk.samples seed=risk.seed tornado break_evens"
        ),
        "rent_or_buy": [picked(rented, "accelerator=name rent at=choices") for rented in answer.rented],
        "api": sold_json(answer.apis) if answer.apis else None,
        "buy_or_wait": waiting
        and {
            **plain(waiting.choice),
            **picked(waiting, "speedup=successor.speedup speedup_by_their_figures=modelled speedup_denied=is_denied"),
        },
        "verdicts": [*assessed.verdicts, *choice_sentences(answer)],
        **assumptions(answer.question, [answer.reckoned(entry) for entry in answer.running]),
    }


def sold_json(apis: ApiMarket) -> dict[str, object]:
    options = [picked(option, "accelerator=name at=choices") for option in apis.options]
    return {**picked(apis, "price=quote price_sources=sources"), "host_or_api": options}


def power_json(bill: Ownership, words: str) -> dict[str, object]:
    """Of the GPU alone; null where it is a share of the rated power."""
    draw = bill.option.used_draw
    return {
        "basis": words,
        "serving_watts": draw.busy.likely if draw else None,
        "idle_watts": draw.idle if draw else None,
        "mean_watts": draw.watts(bill.utilisation) if draw else None,
        "mean_watts_80": draw.interval(bill.utilisation) if draw else None,
    }


def option_json(answer: Tco, entry: Entry) -> dict[str, object]:
    name = entry.accelerator.id
    bill = answer.assessed.bills[name]
    spread = next(s for s in answer.assessed.risk.spreads if s.option == name)
    return {
        "accelerator": name,
        **picked(bill.option, "gpus price"),
        "price_sources": plain(answer.sources[name]),
        **picked(bill.option, "discount engineers overrides"),
        "deployment": deployment_json(entry.deployment) if entry.deployment else None,
        "estimate": entry.estimate and plain(entry.estimate),
        **picked(bill, "watts_per_gpu mean_watts_per_gpu"),
        "power": power_json(bill, answer.power_basis[name]),
        **picked(bill, "kwh kwh_per_mtok usd total_usd usd_per_gpu_hour"),
        "usd_per_mtok": answer.assessed.usd_per_mtok[name],
        "usd_per_gb_month_of_memory": answer.usd_per_gb_month(name),
        "usd_per_gb_month_of_cache": answer.usd_per_cache_gb_month(name),
        "usd_per_mtok_80": [spread.low, spread.high],
        "cheapest_in": spread.cheapest,
    }

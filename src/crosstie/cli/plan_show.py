"""How a plan looks on a terminal: the answer first, then who goes where, the rivals, and what would change it."""

from datetime import date

from rich.text import Text

from crosstie.cli.hosting_show import show_shared
from crosstie.cli.show import Output, console, count, dollars, print_table, say, seconds, share, table
from crosstie.core.units import HOURS_PER_MONTH
from crosstie.core.workload import Target
from crosstie.decide.plan.answer import Alternative, Carried, FleetPlan, PoolPlan
from crosstie.decide.plan.check import SimulatedClass
from crosstie.decide.plan.flips import Flip
from crosstie.decide.plan.market import Item
from crosstie.decide.plan.plan import Plan
from crosstie.decide.plan.report import horizon_usd
from crosstie.decide.plan.shared import own_classes


def show_plan(plan: Plan) -> None:
    out = console()
    work = plan.workload
    rate = sum(one.requests_per_s for one in work.classes)
    kinds = f"{len(work.classes)} class{'es' if len(work.classes) > 1 else ''} of requests"
    grows = "growing" if work.growth_per_year > 0 else "shrinking"
    growth = f", {grows} {abs(work.growth_per_year):.0%} a year" if work.growth_per_year else ""
    out.print(Text.assemble((work.name, "bold"), f"  {kinds}, {count(rate)} requests/s at the peak{growth}"))
    if plan.shared:
        show_shared(out, plan, plan.shared)
    if plan.fleet is None:
        if own_classes(work):
            _show_obstacles(out, plan)
    else:
        _show_answer(out, plan, plan.fleet)
        _show_pools(out, plan.fleet)
        _show_routes(out, plan.fleet)
        _show_costs(out, plan.fleet)
        _show_simulated(out, plan)
        _show_rivals(out, plan, plan.fleet)
        _show_flips(out, plan)
    _show_rest(out, plan)


def _show_obstacles(out: Output, plan: Plan) -> None:
    out.print(Text("No fleet will do.", "bold"))
    if not plan.obstacles:
        say(out, "- several limits together are in the way; giving up any one of them would not be enough")
    if len(plan.obstacles) > 1:
        any_of = all(one.alone for one in plan.obstacles)
        say(out, "Any one of these would be enough:" if any_of else "All of these are in the way:")
    for one in plan.obstacles:
        say(out, f"- {one.key}: {one.now} would have to be {one.needs}; {one.why}")


def _show_answer(out: Output, plan: Plan, fleet: FleetPlan) -> None:
    each = [f"{n} {name}" for name, n in fleet.gpus.items()]
    made_of = " and ".join([*([", ".join(each[:-1])] if each[1:] else []), each[-1]])
    over, work = horizon_usd(plan), plan.workload
    years = f", {dollars(over)} over {work.horizon_years} years" if over else ""
    month = dollars(fleet.usd_per_hour * HOURS_PER_MONTH)
    price = f"{dollars(fleet.usd_per_hour)} an hour ({month} a month{years})"
    say(out, Text.assemble("The cheapest fleet: ", (made_of, "bold"), f", {price}"))
    if work.constraints.inventory or work.constraints.whole_nodes:
        had = ", ".join(f"{n} {name}" for name, n in fleet.had.items()) or "nothing"
        nodes = " in whole nodes" if work.constraints.whole_nodes else ""
        stock = (
            f"; on hand and used: {', '.join(f'{n} {name}' for name, n in fleet.on_hand.items())}"
            if fleet.on_hand
            else ""
        )
        say(out, f"  to be had{nodes}: {had}{stock}")
    cost = fleet.cost
    tokens = f"{dollars(cost.usd_per_million_input)} input, {dollars(cost.usd_per_million_output)} output"
    say(
        out,
        f"  {dollars(cost.usd_per_million)} a million tokens: {tokens}, at mean traffic of {work.mean_over_peak:.0%} "
        f"of the peak; {count(fleet.watts / 1e3)} kW",
    )
    _show_doubt(out, plan)
    near = "no fleet is cheaper" if fleet.gap < 1e-6 else f"at most {fleet.gap:.1%} above the cheapest there is"
    say(out, f"  {near}, of {plan.replicas_considered} replicas on {len(plan.market.items)} accelerators")
    if plan.cheaper:
        say(out, f"  not as simple: {_beside(plan.cheaper)} (constraints.simplicity)")


def _show_doubt(out: Output, plan: Plan) -> None:
    if plan.by_estimates:
        one = plan.by_estimates
        say(
            out,
            "  sized by the slow end of the estimates' 80% intervals; by the estimates themselves: "
            f"{one.label}, {dollars(one.usd_per_hour)} an hour ({one.dearer:+.0%})",
        )
    doubt = plan.uncertainty
    if doubt is None or doubt.low_usd_per_hour is None or doubt.high_usd_per_hour is None:
        return
    ends = f"{dollars(doubt.low_usd_per_hour)} and {dollars(doubt.high_usd_per_hour)}"
    late = f", and in {share(doubt.unmet)} some pool cannot keep its targets" if doubt.unmet >= 0.005 else ""
    say(
        out,
        f"  as such estimates err, the same pools cost between {ends} an hour in eight cases of ten; these replicas "
        f"are enough in {share(doubt.enough)} of cases{late}",
    )


def _show_pools(out: Output, fleet: FleetPlan) -> None:
    columns = [
        ("pool", "left"), ("model", "left"), ("replicas", "right"), ("each", "left"), ("weights", "left"),
        ("stack", "left"), ("$/GPU-h", "right"), ("$/h", "right"), ("busy", "right"), ("TTFT", "right"),
        ("TPOT", "right"), ("limited by", "left"),
    ]  # fmt: skip
    print_table(out, table("", columns, [_pool_row(pool) for pool in fleet.pools]))
    say(out, "  busy, TTFT, TPOT: at the peak, means, for the class that loads the pool most", "dim")
    for pool in fleet.pools:
        found, sure = pool.estimate, ""
        if found.interval:
            ttft, tpot = (f"{seconds(e[0])} to {seconds(e[1])}" for e in (found.interval.ttft_s, found.interval.tpot_s))
            sure = f"80% intervals TTFT {ttft}, TPOT {tpot}; "
        say(out, f"  {pool.name}: {sure}{found.basis}", "dim")


def _pool_row(pool: PoolPlan) -> list[str]:
    d = pool.deployment
    weights = d.precision.id if d.kv_format == "bf16" else f"{d.precision.id}, kv {d.kv_format}"
    return [
        pool.name, d.model.id, f"{pool.replicas:,}", f"{d.parallelism.gpus} x {d.accelerator.id} {d.parallelism}",
        weights, d.stack.name, f"{pool.usd_per_gpu_hour:.2f}", f"{pool.usd_per_hour:,.2f}", share(pool.utilisation),
        seconds(pool.estimate.ttft_s), seconds(pool.estimate.tpot_s), pool.limit,
    ]  # fmt: skip


def _show_routes(out: Output, fleet: FleetPlan) -> None:
    names = ("class", "targets", "prompts", "share", "goes to", "why")
    columns = [(name, "right" if name == "share" else "left") for name in names]
    rows = []
    carried = [(pool, one) for pool in fleet.pools for one in pool.carried]
    carried.sort(key=lambda pair: (pair[1].part.index, -pair[1].share))
    for pool, one in carried:
        kind = one.part.request_class
        wanted = ", ".join(_target(name, t) for name, t in (("TTFT", kind.ttft), ("TPOT", kind.tpot)) if t)
        part = share(one.share) if one.share >= 0.005 else "<1%"
        rows.append([kind.name, wanted or "none", _prompts(one), part, pool.name, one.why])
    print_table(out, table("Routing guide", columns, rows))


def _prompts(one: Carried) -> str:
    piece = one.part.slice
    if len(one.part.request_class.slices) == 1:
        return f"{piece.input_tokens:,.0f} tokens"
    return f"up to {piece.longest_input:,}{' (may miss TTFT)' if piece.exempt else ''}"


def _target(name: str, target: Target) -> str:
    return f"{name} p{target.percentile * 100:g} {seconds(target.seconds)}"


def _show_costs(out: Output, fleet: FleetPlan) -> None:
    names = ("$/M input", "$/M output", "$/M tokens", "$/1,000 requests")
    columns = [("class", "left"), *((name, "right") for name in names)]
    rows = []
    for name, cost in fleet.by_class.items():
        each = (cost.usd_per_million_input, cost.usd_per_million_output, cost.usd_per_million)
        rows.append([name, *map(dollars, each), dollars(cost.usd_per_thousand_requests)])
    print_table(out, table("", columns, rows))


def _show_simulated(out: Output, plan: Plan) -> None:
    if plan.simulated:
        out.print(Text("Simulated, with the step times that the plan counts with", "bold"))
    for one in plan.simulated:
        say(out, f"- {one.name}: {_seen(one)}")


def _seen(one: SimulatedClass) -> str:
    if not one.requests:
        return "not simulated (pipelines are not)"
    found = []
    for name, seen, target in (("TTFT", one.ttft_s, one.ttft), ("TPOT", one.tpot_s, one.tpot)):
        if target and seen is not None:
            found.append(f"{name} p{target.percentile * 100:g} {seconds(seen)} of {seconds(target.seconds)}")
    verdict = "holds" if one.holds else "MISSES its targets"
    return f"{', '.join(found)}: {verdict}" if found else f"no targets, {one.requests:,} requests served"


def _show_rivals(out: Output, plan: Plan, fleet: FleetPlan) -> None:
    out.print(Text("Beside it", "bold"))
    used = {pool.deployment.accelerator.vendor for pool in fleet.pools}
    for vendor, one in plan.single_vendor.items():
        same = used == {vendor} and one is not None and one.gpus == fleet.gpus
        say(out, f"- {vendor} alone: {'the answer' if same else _beside(one)}")
    if plan.runner_up:
        say(out, f"- runner-up, without {plan.runner_up.without}: {_beside(plan.runner_up.fleet)}")
    else:
        say(out, "- no fleet does without any of its accelerators")
    for bound in plan.binding:
        month = dollars(bound.saves_usd_per_hour * HOURS_PER_MONTH)
        say(out, f"- constraints.{bound.key} = {bound.now} costs {month} a month: without it {_beside(bound.instead)}")
    saved = [one.usd_per_hour - fleet.usd_per_hour for one in plan.single_vendor.values() if one]
    if len(used) > 1 and saved and min(saved) > 0:
        month = dollars(min(saved) * HOURS_PER_MONTH)
        say(out, f"- the second vendor saves {month} a month, which is what running its stack may cost")


def _beside(one: Alternative | None) -> str:
    if one is None:
        return "no fleet will do"
    return f"{one.label}, {dollars(one.usd_per_hour)} an hour ({one.dearer:+.1%})"


def _show_flips(out: Output, plan: Plan) -> None:
    out.print(Text("What would change it", "bold"))
    for flip in plan.flips:
        say(out, f"- {_flip(flip)}")
    for one in plan.lengths:
        word = "the same accelerators" if one.holds else "another fleet"
        then = f"{word}, {_beside(one.fleet)}" if one.fleet else "no pool of the fleets above keeps its targets"
        say(out, f"- prompts {one.factor:g} times as long: {then}")
    if plan.workload.growth_per_year:
        for year in plan.years[1:]:
            say(out, f"- end of year {year.year}, {count(year.requests_per_s)} requests/s: {_beside(year.fleet)}")


def _flip(flip: Flip) -> str:
    doubt = f"; sources say {dollars(flip.low_usd)} to {dollars(flip.high_usd)}" if flip.within_sources else ""
    if flip.kind == "price" and flip.change < 5e-3:
        return f"{flip.accelerator} any dearer: {flip.becomes.label} is as cheap already{doubt}"
    at = f"{flip.accelerator} at {dollars(flip.at_usd_per_gpu_hour)} an hour"
    if flip.kind == "price":
        less = f"{-flip.software:.0%} less throughput than estimated"
        return f"{at} ({flip.change:+.0%}), or with {less}: {flip.becomes.label} costs as much{doubt}"
    more = f"{flip.software:.0%} more throughput"
    return f"{at} ({-flip.change:.0%} off), or with {more}: {flip.becomes.label} is cheaper{doubt}"


def _show_rest(out: Output, plan: Plan) -> None:
    out.print()
    for item in plan.market.items:
        if item.id in plan.accelerators:
            say(out, f"  price of {item.id}: {_price(item, plan.made)}", "dim")
    for note in plan.workload.notes:
        say(out, f"  {note}", "dim")
    if plan.market.left_out:
        say(out, f"  left out for want of a price: {', '.join(plan.market.left_out)} (--price NAME=USD)", "dim")


def _price(item: Item, today: str) -> str:
    quote = item.quote
    off = f", {item.discount:.0%} off" if item.discount else ""
    if quote.is_given:
        return f"{dollars(quote.usd)} as given{off}"
    ends = f"{dollars(quote.low)} to {dollars(quote.high)} over {quote.prices} prices"
    known = ends if quote.prices > 1 else "one price"
    return f"{dollars(quote.usd)} ({quote.kind}, {known}{off}), {_age(quote.newest, today)}"


def _age(dated: str, today: str) -> str:
    whole = dated if len(dated) > 7 else f"{dated}-01"
    days = (date.fromisoformat(today) - date.fromisoformat(whole)).days
    return f"newest of {dated}, {days} days old" if days > 0 else f"newest of {dated}"

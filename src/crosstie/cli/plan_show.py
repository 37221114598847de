"""How a plan looks on a terminal: the fleet and its pools, then alternatives and what would change it."""

import math
from datetime import date

from rich.text import Text

from crosstie.cli.hosting_show import shared_parts
from crosstie.core.figures import dollars, plural, seconds, share, significant
from crosstie.core.units import HOURS_PER_MONTH
from crosstie.core.workload import Target
from crosstie.decide.compare.payoff import FEWER
from crosstie.decide.cost.energy import mean_share
from crosstie.decide.cost.prices import Quote
from crosstie.decide.plan.answer import MOST_TIMES, Alternative, FleetPlan, PoolPlan, found_share
from crosstie.decide.plan.assumed import plan_question
from crosstie.decide.plan.flips import Flip, sure_of_prices
from crosstie.decide.plan.market import Market, MarketItem
from crosstie.decide.plan.mixture import MIXTURE_COSTS, Mixture
from crosstie.decide.plan.plan import Plan
from crosstie.decide.plan.power import FleetPower
from crosstie.decide.plan.report import horizon_usd
from crosstie.decide.plan.run_result import MAY_BE_UNSERVED, PARKED_S, SimulatedClass
from crosstie.decide.plan.shared import own_classes
from crosstie.decide.plan.targets import FACTORS
from crosstie.decide.plan.ways import Outlook
from crosstie.port.preflight.effort import effort_of
from crosstie.web.parts import Heading, Line, Parts, Section, Table, caution, closing, note
from crosstie.web.plan_chart import fleet_bars, flip_bars, memory_bars

DETAILS = "routing and its reasons, cost by class, intervals, growth, prices and their age"


def plan_parts(plan: Plan, verbose: bool) -> Parts:
    work = plan.workload
    if verbose and plan.fleet:
        yield from fleet_bars(plan)
    rate = sum(request_class.requests_per_s for request_class in work.classes)
    kinds = f"{len(work.classes)} request class{'es' if len(work.classes) > 1 else ''}"
    grows = "growing" if work.growth_per_year > 0 else "shrinking"
    growth = f", {grows} {abs(work.growth_per_year):.0%} a year" if work.growth_per_year else ""
    yield Text.assemble((work.name, "bold"), f": {kinds}, {significant(rate)} requests/s at the peak{growth}")
    if plan.shared:
        yield from shared_parts(plan, plan.shared, verbose)
    if plan.fleet is None:
        if own_classes(work):
            yield from _obstacles(plan)
    else:
        yield from _answer(plan, plan.fleet)
        yield from _prices(plan)
        yield Section("Pools")
        yield from _pools(plan, plan.fleet, verbose)
        yield from _drafts(plan)
        yield from _simulated(plan)
        yield from _targets(plan)
        yield Section("How sure it is")
        yield from _doubt(plan, plan.fleet, verbose)
        if verbose:
            yield from _routes(plan, plan.fleet)
            yield from _classes(plan.fleet)
        yield from _engines(plan, plan.fleet, verbose)
        yield from _alternatives_parts(plan, plan.fleet, verbose)
        yield from _flips(plan, verbose)
        yield from _worth(plan)
    yield from _rest(plan, verbose)


def _obstacles(plan: Plan) -> Parts:
    yield Heading("No fleet will do.")
    if not plan.obstacles:
        yield "- several limits together are in the way; giving up any one of them would not be enough"
    if len(plan.obstacles) > 1:
        any_of = all(obstacle.alone for obstacle in plan.obstacles)
        yield "Any one of these would be enough:" if any_of else "All of these are in the way:"
    yield from (f"- {limit.key}: {limit.now} would have to be {limit.needs}; {limit.why}" for limit in plan.obstacles)


def _answer(plan: Plan, fleet: FleetPlan) -> Parts:
    each = [f"{n} {name}" for name, n in fleet.gpus.items()]
    made_of = " and ".join([*([", ".join(each[:-1])] if each[1:] else []), each[-1]])
    over, work = horizon_usd(plan), plan.workload
    years = f", {dollars(over)} over {work.horizon_years} years" if over else ""
    month = dollars(fleet.usd_per_hour * HOURS_PER_MONTH)
    price = f"{dollars(fleet.usd_per_hour)} an hour ({month} a month{years})"
    mean = f"at the mean, {mean_share(work):.0%} of the peak"
    tokens = f"{dollars(fleet.cost.usd_per_million)} per million tokens, in and out, {mean}"
    yield Text.assemble("Cheapest fleet: ", (made_of, "bold"), f", {price}; {tokens}")
    if work.constraints.inventory or work.constraints.whole_nodes:
        nodes = " in whole nodes" if work.constraints.whole_nodes else ""
        stock = f"; on hand and used: {_gpus(fleet.on_hand)}" if fleet.on_hand else ""
        yield f"  to rent or buy{nodes}: {_gpus(fleet.bought) or 'nothing'}{stock}"


def _prices(plan: Plan) -> Parts:
    """Which price decides, where one seller's is not the market, before anything is called sure."""
    sure = sure_of_prices(plan.flips, plan.market)
    if sure is None:
        return
    beyond = [
        f"{flip.accelerator} {'above' if flip.kind == 'price' else 'below'} {dollars(flip.at_usd_per_gpu_hour)} "
        f"(sellers: {dollars(flip.low_usd)} to {dollars(flip.high_usd)})"
        for flip in plan.flips
        if flip.within_sources
    ]
    if beyond:
        told = f"the answer stands in {share(sure)} of worlds that each draw a seller"
        yield caution(f"The seller decides: another fleet is cheaper with {', or '.join(beyond)}; {told}")


def _gpus(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items())


def _doubt(plan: Plan, fleet: FleetPlan, verbose: bool) -> Parts:
    doubt = plan.uncertainty
    if doubt is not None and doubt.low_usd_per_hour is not None and doubt.high_usd_per_hour is not None:
        ends = f"{dollars(doubt.low_usd_per_hour)} to {dollars(doubt.high_usd_per_hour)} an hour"
        late = f"; in {share(doubt.unmet)} a pool cannot keep its targets" if doubt.unmet >= 0.005 else ""
        asked = f"{plan.workload.sureness:.0%} sure"
        sized = "Sized by the estimates themselves" if plan.too_dear else f"Sized to be {asked}"
        if not plan.too_dear and doubt.enough < plan.workload.sureness - 0.005:
            # One accelerator's errors go together, and are not sized as if they did not.
            sized = f"Each pool sized to be {asked}, not all of them together"
        yield f"{sized}; these replicas suffice in {share(doubt.enough)} of cases{late}"
        yield f"80% interval of what the same pools would need: {ends}"
        if plan.too_dear and not plan.too_dear.gpus:
            yield caution(f"No fleet would be {asked}: at the slow end of the estimates none keeps the targets")
        elif plan.too_dear:
            held = f" ({plan.too_dear.limit} holds the slow end back)" if plan.too_dear.limit else ""
            more = f"{1.0 + plan.too_dear.dearer:,.0f} times what the estimates do{held}"
            yield caution(f"To be {asked} would cost {more}: so little is known that measuring is cheaper")
    yield from _sureness(plan, fleet)
    if not verbose:
        return
    near = "no fleet is cheaper" if fleet.gap < 1e-6 else f"at most {fleet.gap:.1%} above the cheapest there is"
    yield f"{near}, of {plan.replicas_considered} replicas on {len(plan.market.items)} accelerators"
    if plan.cheaper:
        yield f"cheaper with more kinds of pools: {_beside(plan.cheaper)} (constraints.simplicity)"
    cost, mean = fleet.cost, plan.workload.mean_over_peak
    used = f"input {dollars(cost.usd_per_million_input)}, output {dollars(cost.usd_per_million_output)}"
    idle = f"idle headroom {dollars(cost.usd_per_million_idle)} over all tokens"
    yield f"a million tokens at today's mean traffic, {mean:.0%} of the peak: {used} by what each uses; {idle}"
    for pool in fleet.pools:
        cache = pool.usd_per_cache_gb_month
        beside = f", of KV cache {dollars(cache)}" if cache else ""
        yield f"{pool.name}: a GB of memory {dollars(pool.usd_per_gb_month)} a month{beside}"
    if plan.power:
        yield from _power(plan.power)


def _power(power: FleetPower) -> Parts:
    watts = (power.rated, power.at_peak, power.mean, *power.mean_80)
    rated, peak, mean, low, high = (significant(watt / 1e3) for watt in watts)
    told = f"{rated} kW rated; predicted {peak} at the peak, {mean} in the mean ({low} to {high})"
    yield f"{told}; {significant(power.kwh_per_million_output_tokens)} kWh per million output tokens, with cooling"
    if power.not_predicted:
        yield f"  power of {', '.join(power.not_predicted)} was not measured: a usual share of the rated"


def _sureness(plan: Plan, fleet: FleetPlan) -> Parts:
    if not plan.sureness:
        return
    fleets = [(sureness.sure, sureness.fleet) for sureness in plan.sureness]
    said = [f"{sure:.0%} {_priced(alternative)}" for sure, alternative in fleets]
    yield f"How sure, and what that costs an hour: {'; '.join(said)} (--sure)"
    likely = plan.by_estimates
    vendors = {item.id: item.vendor for item in plan.market.items}
    used, other = ({vendors[name] for name in gpus} for gpus in (fleet.gpus, likely.gpus if likely else {}))
    if likely and used != other:
        yield caution(
            f"By the estimates themselves {' and '.join(sorted(other))} would win: {likely.label}, "
            f"{dollars(likely.usd_per_hour)} an hour. It is how far these may be off that decides here"
        )


def _priced(other: Alternative | None) -> str:
    if other is None:
        return "no fleet"
    return f"over {MOST_TIMES:g} times that" if other.is_absurd else f"{dollars(other.usd_per_hour)} ({other.label})"


def _worth(plan: Plan) -> Parts:
    worth = plan.worth_measuring
    if worth is None:
        return
    d = worth.deployment
    yield Heading("Worth measuring first")
    month = dollars(worth.saves_usd_per_hour * HOURS_PER_MONTH)
    what = f"{d.model.id} on {d.label} with {d.stack.name}"
    mean = dollars(worth.expected_usd_per_hour * HOURS_PER_MONTH)
    would = f"{_gpus(worth.gpus)} would do"
    yield f"- {what}: as fast as estimated, it saves {month} a month ({would}); {mean} on average"
    yield f"- known of it: {d.correction.basis}"
    yield f"- {worth.input_tokens:,} tokens in, {worth.output_tokens:,} out, {worth.in_flight:,} in flight:"
    yield from (f"    {command}" for command in plan.measure_commands)


def _pools(plan: Plan, fleet: FleetPlan, verbose: bool) -> Parts:
    columns = ["pool", "model", ">replicas", "replica", ">$/h", ">util"]
    if verbose:
        columns += ["weights", "stack", ">$/GPU-h", ">TTFT", ">TPOT", "limited by", "~80% intervals", "~estimate"]
    yield Table(columns, [_pool_row(pool, plan.measured[pool.name], verbose) for pool in fleet.pools])
    if verbose:
        yield note("  util (utilisation), TTFT, TPOT: at the peak, means, for the class that loads the pool most")


def _drafts(plan: Plan) -> Parts:
    """Why pools speculate, and what hangs on it."""
    for draft in plan.drafts:
        worth, kept = draft.payoff, draft.speculation
        until = "at any load" if worth.pays_below is None else f"up to {worth.pays_below:,} requests in flight"
        bill = "then no number of replicas keeps the targets"
        if draft.replicas_if_fewer is not None and draft.more_usd_per_hour is not None:
            more = f"{dollars(draft.more_usd_per_hour)} an hour more"
            bill = more if draft.more_usd_per_hour > 0 else "the replicas still suffice"
        yield (
            f"{draft.pool} drafts by {kept}, which keeps {kept.acceptance_length:.2f} tokens a step on {kept.text} "
            f"({kept.basis}): {worth.gain:.2f}x the tokens/s of none, and it pays {until}; if {share(FEWER)} fewer "
            f"drafts are kept, {bill}"
        )


def _engines(plan: Plan, fleet: FleetPlan, verbose: bool) -> Parts:
    """Which engine and release runs where, and what preflight says of that; pools of one verdict together."""
    together: dict[tuple[str, str, str], dict[str, None]] = {}
    for pool in fleet.pools:
        d, judged = pool.deployment, plan.readiness[pool.name]
        engine = f"{d.stack.name} {judged.release}".strip()
        settings = f": {' '.join(judged.settings)}" if judged.settings else ""
        key = f"{d.model.id} in {d.precision.id} on", f"with {engine}", f"{judged.verdict}{settings}"
        together.setdefault(key, {})[f"{d.accelerator.id} {d.parallelism}"] = None
    yield Heading("Engines, and what preflight says of them")
    yield from (f"- {what} {', '.join(names)} {engine}: {said}" for (what, engine, said), names in together.items())
    if not verbose:
        return
    for pool in fleet.pools:
        judged = plan.readiness[pool.name]
        if judged.checkpoint:
            yield note(f"  {pool.name}: taken to be a checkpoint as {judged.checkpoint} writes it")
        if judged.findings:
            needed = effort_of(judged.findings)
            yield note(f"  {pool.name}: porting is {needed} ({needed.basis}, in no bill here)")
        for finding in judged.findings:
            cure = f" Remedy: {finding.remedy}" if finding.remedy else ""
            yield note(f"  {pool.name}: {finding.severity}: {finding.what}{cure}")


def _pool_row(pool: PoolPlan, measured: str, verbose: bool) -> list[str]:
    d, run = pool.deployment, pool.estimate
    weights = d.precision.id if d.kv_format == "bf16" else f"{d.precision.id}, kv {d.kv_format}"
    row = [
        pool.name, d.model.id, f"{pool.replicas:,}", f"{d.accelerator.id} {d.layout}",
        f"{pool.usd_per_hour:,.2f}", share(pool.utilisation),
    ]  # fmt: skip
    if not verbose:
        return row
    sure = ""
    if run.interval:
        ttft, tpot = (f"{seconds(e[0])} to {seconds(e[1])}" for e in (run.interval.ttft_s, run.interval.tpot_s))
        sure = f"TTFT {ttft}, TPOT {tpot}"
    return [
        *row, weights, d.stack.name, f"{pool.usd_per_gpu_hour:.2f}", seconds(run.ttft_s), seconds(run.tpot_s),
        pool.limit, sure, f"{run.basis}; {measured}",
    ]  # fmt: skip


def _routes(plan: Plan, fleet: FleetPlan) -> Parts:
    """Where requests go while the fleet is idle, by the gateway's router; and what carries them at the peak."""
    carried = {pool.name: pool.carried for pool in fleet.pools}
    pieces = {
        (kind.name, piece.longest_input): (kind, piece) for kind in plan.workload.classes for piece in kind.slices
    }
    rows, exempt = [], False
    for goes in plan.guide:
        kind, piece = pieces[goes.class_name, goes.up_to_input]
        prompts = f"up to {piece.longest_input:,}" if len(kind.slices) > 1 else f"{piece.input_tokens:,.0f}"
        exempt |= piece.exempt
        there = {name: own for name, mine in carried.items() for own in mine if own.part.slice is piece}
        peak = sorted(there, key=lambda name: -there[name].share)
        shares = ", ".join(f"{share(there[name].share)} {name}" for name in peak)
        why = there[goes.pool].why if goes.pool in there else goes.why
        rows.append([kind.name, prompts + (" *" if piece.exempt else ""), goes.pool, shares, why])
    yield Table(["class", "prompt tokens", "goes to", "at the peak", "~why"], rows, "Routing")
    if exempt:
        yield note("  * may miss its TTFT target")


def _classes(fleet: FleetPlan) -> Parts:
    kinds = {own.part.request_class.name: own.part.request_class for pool in fleet.pools for own in pool.carried}
    rows = []
    for name, cost in fleet.by_class.items():
        each = (
            cost.usd_per_million_input, cost.usd_per_million_output, cost.usd_per_million_idle, cost.usd_per_million,
            cost.usd_per_thousand_requests,
        )  # fmt: skip
        wanted = [_target(what, t) for what, t in (("TTFT", kinds[name].ttft), ("TPOT", kinds[name].tpot)) if t]
        rows.append([name, *map(dollars, each), ", ".join(wanted) or "none"])
    columns = ["class", ">$/M input", ">$/M output", ">idle", ">$/M tokens", ">$/1,000 requests", "~targets"]
    yield Table(columns, rows, "Cost by class")


def _target(name: str, target: Target) -> str:
    return f"{name} p{target.percentile * 100:g} {seconds(target.seconds)}"


def _simulated(plan: Plan) -> Parts:
    if plan.search_failed:
        yield Line("NOT confirmed: simulation found no fleet that holds; this one is by closed forms alone", "red")
    elif not plan.confirmed:
        yield note("by closed forms alone: not confirmed by simulation")
    if not plan.confirmed:
        return
    last = sum(simulated_class.requests for simulated_class in plan.simulated)
    runs = plural(plan.confirmed.simulations, "simulation")
    how = f"{runs} behind the gateway's policy, the last of {last:,} requests"
    if plan.holds:
        yield Heading(f"Simulated: confirmed by {how}")
        gap = plan.fleet.gap if plan.fleet else 0.0
        less = f"{gap:.1%} less" if gap >= 1e-3 else "no less"
        yield f"- by the capacities that simulation has shown, the cheapest fleet there is could cost {less}"
    else:
        yield Heading(f"Simulated, NOT confirmed: no fleet within the limits was found that holds, in {how}")
    yield from (f"- {simulated_class.name}: {_seen(simulated_class)}" for simulated_class in plan.simulated)


def _targets(plan: Plan) -> Parts:
    """A row a target: the fleet's dollars an hour with it moved both ways."""
    if not plan.targets:
        return
    columns = [
        "class",
        "target",
        *(f">{factor - 1.0:+.0%}" if factor != 1.0 else ">as it is" for factor in FACTORS),
        "knee",
    ]
    rows = []
    for target in plan.targets:
        at = f"{target.metric.upper()} p{target.percentile * 100:g} {seconds(target.seconds)}"
        costs = [
            "none" if step.usd_per_hour is None else f"{'>' if step.at_least else ''}{step.usd_per_hour:,.0f}"
            for step in target.steps
        ]
        knee = "at the floor" if target.at_floor else seconds(target.knee_s) if target.knee_s else "no"
        rows.append([target.class_name, at, *costs, knee])
    yield Table(columns, rows, "What your targets cost, $ an hour with each moved, by closed forms")
    if any(step.at_least for price in plan.targets for step in price.steps):
        yield note("  >: more than that; this fleet misses it when simulated")
    if any(price.at_floor for price in plan.targets):
        yield note("  at the floor: hardly above what a request sees by itself on the fastest replica")


def _seen(simulated: SimulatedClass) -> str:
    if not simulated.requests:
        return "not simulated (pipelines are not)"
    words = []
    kept = (
        ("TTFT", simulated.ttft_s, simulated.ttft, simulated.keeps_ttft, simulated.predicted_ttft),
        ("TPOT", simulated.tpot_s, simulated.tpot, simulated.keeps_tpot, simulated.predicted_tpot),
    )
    for name, seen, target, keeps, predicted in kept:
        if target and seen is not None:
            within = "" if keeps is None else f" ({share(keeps)} within"
            within += f", {share(predicted)} predicted" if within and predicted is not None else ""
            at = seconds(seen) if math.isfinite(seen) else "turned away"
            words.append(
                f"{name} p{target.percentile * 100:g} {at} of {seconds(target.seconds)}{within}{')' if within else ''}"
            )
    if not words:
        words = ["no targets", f"{simulated.requests:,} requests"]
    if simulated.refused > MAY_BE_UNSERVED:
        words.append(f"{share(simulated.refused)} turned away")
    elif simulated.parked > MAY_BE_UNSERVED:
        words.append(f"{share(simulated.parked)} wait for longer than {seconds(PARKED_S)}")
    if simulated.ttft or simulated.tpot:
        return f"{', '.join(words)}: {'holds' if simulated.holds else 'MISSES its targets'}"
    return f"{', '.join(words)}{' served' if simulated.holds else ': NOT served'}"


def _alternatives_parts(plan: Plan, fleet: FleetPlan, verbose: bool) -> Parts:
    yield Heading(_alternatives(plan, fleet))
    used = {pool.deployment.accelerator.vendor for pool in fleet.pools}
    for vendor, alternative in plan.single_vendor.items():
        same = used == {vendor} and alternative is not None and alternative.gpus == fleet.gpus
        yield f"- {vendor} alone: {'the answer' if same else _beside(alternative)}"
    if plan.runner_up:
        yield f"- runner-up, without {plan.runner_up.without}: {_beside(plan.runner_up.fleet)}"
    else:
        yield "- no fleet does without any of its accelerators"
    for bound in plan.binding:
        month = dollars(bound.saves_usd_per_hour * HOURS_PER_MONTH)
        yield f"- constraints.{bound.key} = {bound.now} costs {month} a month: without it {_beside(bound.without_it)}"
    if plan.unmeasured:
        stacks = ", ".join(plan.unmeasured.stacks)
        yield caution(f"- with {stacks}, not measured there (--evidence any): {_beside(plan.unmeasured.fleet)}")
    for way, fleet_of_it in (("together", plan.together), ("disaggregated", plan.apart)):
        if fleet_of_it:
            rare = way == "disaggregated" and fleet_of_it.dearer < 0.0
            unmeasured = ", which nobody has measured there (--evidence any makes it the answer)" if rare else ""
            yield f"- prefill and decode {way}: {_beside(fleet_of_it)}{unmeasured}"
    for look in plan.outlooks if not plan.apart and not plan.together else ():
        if verbose or look.usd_per_hour:
            of = f" of {look.model}" if len(plan.outlooks) > 1 else ""
            yield f"- prefill and decode{of} disaggregated: {_outlook(look, fleet)}"
    yield from (f"- with {lighter.what}: {_beside(lighter.fleet)}; {lighter.but}" for lighter in plan.lighter)
    if plan.mixture:
        yield from _mixture(plan.mixture)
    alike = [alt for alt in plan.single_vendor.values() if alt and alt.confirmed == (plan.confirmed is not None)]
    saved = [other.usd_per_hour - fleet.usd_per_hour for other in alike]
    if len(used) > 1 and saved and min(saved) > 0:
        month = dollars(min(saved) * HOURS_PER_MONTH)
        yield f"- the second vendor saves {month} a month, which is what running its stack may cost"


def _outlook(ahead: Outlook, fleet: FleetPlan) -> str:
    if ahead.usd_per_hour is None:
        return f"not looked at further: {ahead.why}"
    cost = f"{dollars(ahead.usd_per_hour)} an hour ({ahead.usd_per_hour / fleet.usd_per_hour - 1.0:+.1%}) by {ahead.by}"
    return f"{cost}; {ahead.why}" if ahead.why else cost


def _mixture(day: Mixture) -> Parts:
    """What the shape of a day is worth: a contract for its base, rent by the hour for its peak."""
    if day.accelerators:
        parts = [
            f"{used.reserved} {name} reserved at {dollars(used.contract.usd)} ({_contract(used.contract)}) and up to "
            f"{used.most_on_demand} on-demand at {dollars(used.by_the_hour.usd)}"
            for name, used in day.accelerators.items()
        ]
        cost, every, needed, clock = (dollars(day.total(what)) for what in MIXTURE_COSTS)
        mean = f"over a day with a mean of {day.mean:.0%} of its peak"
        beside = f"all reserved {every}, on-demand as needed {needed}, on-demand around the clock {clock}"
        yield f"- {'; '.join(parts)}: {cost} an hour {mean}; {beside}"
    for name, (kind, level) in day.lacking.items():
        pays = f"; a contract for all of them pays below {dollars(level)} an hour" if level else ""
        yield f"- {name}: no seller's {kind} price is known for the base of a day (--reserved {name}=USD){pays}"


def _contract(quote: Quote) -> str:
    return "given" if quote.is_given else f"{quote.kind}, {quote.provider}, {quote.date}"


def _alternatives(plan: Plan, fleet: FleetPlan) -> str:
    """By which measure: what was not simulated is not compared with what was."""
    if plan.confirmed is None:
        return "Alternatives"
    usd = plan.closed_form_usd_per_hour
    less = usd < 0.995 * fleet.usd_per_hour
    beside = f", by which the answer's accelerators would cost {dollars(usd)}" if less else ""
    return f"Alternatives; those not simulated are by closed forms{beside}"


def _beside(alt: Alternative | None) -> str:
    if alt is None:
        return "no fleet will do"
    if alt.is_absurd:
        why = f": {alt.limit} leaves its replicas next to nothing" if alt.limit else ""
        return f"{1.0 + alt.dearer:.0f} times the price ({alt.label}){why}"
    return f"{alt.label}, {dollars(alt.usd_per_hour)} an hour ({alt.dearer:+.1%}){', simulated' * alt.confirmed}"


def _flips(plan: Plan, verbose: bool) -> Parts:
    lines: list[str] = [_flip(flip) for flip in plan.flips]
    if verbose:
        for band in plan.lengths:
            word = "the same accelerators" if band.decision_holds else "another fleet"
            then = f"{word}, {_beside(band.fleet)}" if band.fleet else "no pool of the fleets above keeps its targets"
            lines.append(f"prompts {band.factor:g} times as long: {then}")
        if plan.workload.growth_per_year:
            for year in plan.years[1:]:
                lines.append(
                    f"end of year {year.year}, {significant(year.requests_per_s)} requests/s: {_beside(year.fleet)}"
                )
    if lines:
        yield Heading("What would change it")
    if verbose:
        yield from flip_bars(plan)
        yield from memory_bars(plan)
    yield from (f"- {line}" for line in lines)


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


def _found_again(plan: Plan) -> list[str]:
    """What prefixes of prompts are worth to the plan, a line for each class that counts on them."""
    lines = []
    for kind in plan.workload.classes:
        if kind.prefix is None or plan.fleet is None:
            continue
        endless = kind.cached_tokens / kind.input_tokens
        most = f"; with endless memory {share(endless)}" if kind.prefix.measured else ", as given"
        lines.append(f"{kind.name}: {share(found_share(plan.fleet, kind))} of prompt tokens are in a cache{most}")
        if kind.sessions:
            lines += _memory_lines(plan, kind.name)
            usd = plan.fleet.by_class[kind.name].usd_per_thousand_requests / 1e3
            hourly = usd * kind.requests_per_s * 3600 / kind.sessions.live
            session = usd * kind.sessions.turns
            solved = (
                f", {dollars(session / kind.sessions.success_rate)} a solved task" if kind.sessions.success_rate else ""
            )
            lines.append(
                f"{kind.name}: {dollars(hourly)} an hour of a session at work, {dollars(session)} a session of "
                f"{significant(kind.sessions.turns)} turns{solved}, idle hours included"
            )
    return lines


def _memory_lines(plan: Plan, name: str) -> list[str]:
    """What sessions find, and the GPUs that it takes, with other memory for them."""
    said = [f"with {step.what} {share(step.found[name])} and {_beside(step.fleet)}" for step in plan.memory]
    return [f"{name}: {'; '.join(said)}, by closed forms"] if said else []


def _rest(plan: Plan, verbose: bool) -> Parts:
    yield Section("Prices, and what was left out")
    market = plan.market
    used = [item for item in market.items if item.id in plan.accelerators]
    if used:
        yield f"prices {market.kinds[0]}: {'; '.join(_price(item, market, plan.made, verbose) for item in used)}"
    yield from _found_again(plan)
    yield from map(note, plan.workload.notes)
    if market.left_out:
        names = [f"{name} ({_asked(other)})" if other else name for name, other in market.left_out.items()]
        yield note(f"left out, no {' or '.join(market.kinds)} price: {', '.join(names)}; --price NAME=USD gives one")
    yield from _left_out(plan, verbose)
    yield note(plan_question(plan).line)
    if not verbose and plan.answered:
        yield closing(DETAILS)


def _left_out(plan: Plan, verbose: bool) -> Parts:
    """What preflight keeps out; without -v each engine and accelerator once, and only where nothing of it is left."""
    if plan.passed_over:
        names = dict.fromkeys(over.stack for over in plan.passed_over)
        more = "" if verbose else f": {', '.join(names)} on some accelerators"
        yield note(f"not compared, since other stacks were measured there and these were not{more} (--evidence any)")
    if verbose:
        for passed in plan.passed_over:
            yield note(f"- {passed.model} with {passed.stack} on {', '.join(passed.accelerators)}")
        for left_out in plan.will_not_run:
            where = f"{', '.join(left_out.accelerators)}{' ' + ', '.join(left_out.layouts) if left_out.layouts else ''}"
            of = f"{left_out.model} in {left_out.precision} with {left_out.engine} on {where}"
            yield note(f"left out, {left_out.verdict}: {of}: {left_out.why}")
        return
    together: dict[tuple[str, str, str], dict[str, None]] = {}
    for left_out in plan.will_not_run:
        if not left_out.layouts:
            whom = together.setdefault((left_out.verdict, left_out.model, left_out.engine), {})
            whom.update(dict.fromkeys(left_out.accelerators))
    for (verdict, model, engine), names in together.items():
        yield note(f"left out, {verdict}: {model} with {engine} on {', '.join(names)}")


def _price(item: MarketItem, market: Market, today: str, verbose: bool) -> str:
    """Whose price it is and how old, and of which kind where that is another than was asked for."""
    quote = item.quote
    other = f"{quote.kind}, " if item in market.of_other_kinds else ""
    origin = "given" if quote.is_given else quote.origin if verbose else f"{quote.provider}, {quote.date}"
    age = f", {_days_old(quote.date, today)} days old" if verbose and quote.date else ""
    off = f", {item.discount:.0%} off" if item.discount else ""
    return f"{item.id} {dollars(quote.usd)} ({other}{origin}{age}{off})"


def _asked(other: Quote) -> str:
    return f"{other.kind} {dollars(other.usd)}"


def _days_old(dated: str, today: str) -> int:
    whole = dated if len(dated) > 7 else f"{dated}-01"
    return max((date.fromisoformat(today) - date.fromisoformat(whole)).days, 0)

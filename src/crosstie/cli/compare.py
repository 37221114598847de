"""`crosstie compare`: the scorecard."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.text import Text

from crosstie.catalog.library import Catalog
from crosstie.cli.answer import Drawing, Wanted, answer_options
from crosstie.cli.fit import deployment_json, describe
from crosstie.cli.options import dark_option, file_option, flag_option, model_argument, on_option, text_option
from crosstie.cli.replica import ReplicaOptions, replica_options
from crosstie.core.document import picked
from crosstie.core.errors import BadInput
from crosstie.core.figures import seconds, share, significant
from crosstie.core.question import USUAL, assumptions
from crosstie.core.speculation import Speculation
from crosstie.decide.compare.apart import ApartEntry
from crosstie.decide.compare.payoff import FEWER, Payoff
from crosstie.decide.compare.scaling import FOUR_FIFTHS, SEVERAL_MACHINES, Scaling, Size
from crosstie.decide.compare.scorecard import Entry, Load, Scorecard
from crosstie.decide.cost.curves import Curve, context_curves, curves, frontiers
from crosstie.decide.cost.prices import Quote, quotes
from crosstie.perf.fit import BARELY
from crosstie.perf.roofline import Roofline, roofline
from crosstie.prove.calibration.published import PublishedPoint, all_results, published_points
from crosstie.web.chart import Picture, check_picture, costs_picture, curves_picture
from crosstie.web.parts import Parts, Table, across, closing, note
from crosstie.web.report import KeyNumber
from crosstie.web.roofline_chart import roofline_picture

INTERVAL = "80% interval"
_DETAILS = "the whole scorecard (bounds, roofline, one stream, intervals) and what it rests on"

_UNPRICED = "none of these accelerators has a price by the hour in the catalog"


@click.command("compare")
@model_argument
@on_option("Accelerators to compare.", required=True)
@replica_options
@flag_option("--sweep", "Also from one request in flight to a full replica, and by length of prompt.")
@file_option("--plot", "Draw the sweep (.svg, .png, .pdf).")
@file_option("--plot-cost", "Draw $ a million tokens over TPOT: the best layouts.")
@file_option("--plot-context", "Draw $ a million tokens over the length of prompts.")
@file_option("--plot-roofline", "Draw a step's operations under the roofline.")
@dark_option
@text_option("--gpus", "N,N", "One service on so many GPUs each, and how it scales: 8,16,32.")
@text_option("--disaggregated apart", "P:D", "Also disaggregated prefill and decode: 1xTP4:2xTP8.")
@answer_options(_DETAILS, html=True)
def command(
    model: str, accelerators: str, replica: ReplicaOptions, sweep: bool, plot: Path | None, plot_cost: Path | None,
    plot_context: Path | None, plot_roofline: Path | None, dark: bool, gpus: str | None, apart: str | None,
    wanted: Wanted,
) -> int:  # fmt: skip
    """One MODEL under one load on several accelerators: the scorecard, and why one wins.

    \b
    crosstie compare llama-3.1-70b --on mi300x,h200 --input 4096 --output 1024
    crosstie compare deepseek-v3 --on mi355x,b200 --tp 8 --kv fp8
    crosstie compare llama-3.1-405b --on mi300x,h200 --precision fp8
    crosstie compare deepseek-r1 --on mi355x --tp 8 --disaggregated 1xTP8:2xTP8
    crosstie compare deepseek-r1 --on mi355x,b200 --tp 8 --speculation mtp:3
    crosstie compare deepseek-r1 --on gb200,mi355x --gpus 8,16,32,64 --kv fp8

    Without --tp each accelerator gets the fewest GPUs that hold the model and the load. TTFT and TPOT
    are means in a steady state; "all clients at once" is the mean TTFT when every client starts together,
    as most benchmarks do. --sweep and --plot show what each replica trades between the speed of one user
    and the tokens of a GPU, with published results of this model at these lengths on it.
    Exit status 1 when no accelerator can run it.
    """
    catalog = Catalog()
    if gpus is not None:
        if sweep or plot or plot_cost or plot_context or plot_roofline or apart or wanted.html:
            raise BadInput("--gpus stands alone: leave --sweep, the plots, --disaggregated and --html out")
        sizes, asked = replica.scaled(catalog, model, accelerators, gpus), replica.load
        wanted.give(lambda: scaled_json(sizes, asked), lambda _: scaled_parts(sizes, asked))
        return 0
    for file in filter(None, (plot, plot_cost, plot_context, plot_roofline)):
        check_picture(file)
    card = replica.scorecard(catalog, model, accelerators)
    split = replica.apart(catalog, card, apart) if apart else []
    swept = curves(card) if sweep or plot or wanted.html else []
    published = _published(card) if plot or wanted.html else []
    of = f"{card.model.name}, {replica.precision}"
    title = f"{of}: {card.load.input_tokens:,} tokens in, {card.load.output_tokens:,} out"
    names = [entry.accelerator.id for entry in card.entries]
    by_context = sweep or plot_context or wanted.html
    prices = quotes(catalog.prices, names, [USUAL.price], {}) if plot_cost or by_context else {}
    costs = frontiers(catalog, card, prices) if plot_cost or wanted.html else []
    contexts = context_curves(card, prices) if by_context else []
    roofs = rooflines(card) if plot_roofline else []
    by_cost = _cost_picture(card, of, costs, prices)
    by_speed = curves_picture(swept, title, published) if swept else None
    by_length = _cost_picture(card, of, contexts, prices, by_context=True)
    Drawing(plot_cost, dark).draw(lambda: by_cost, _UNPRICED)
    Drawing(plot, dark).draw(lambda: curves_picture(swept, title, published))
    Drawing(plot_context, dark).draw(lambda: by_length, _UNPRICED)
    Drawing(plot_roofline, dark).draw(lambda: roofline_picture(roofs, f"{title}, {card.load.concurrency:,} in flight"))
    several = {"sweep": swept, "costs": costs, "context_sweep": contexts}
    # Without what a curve does not know.
    more: dict[str, object] = {
        key: [{name: value for name, value in asdict(curve).items() if value != []} for curve in curves]
        for key, curves in several.items()
        if curves
    }
    more |= {"roofline": [roofline_json(roof) for roof in roofs]} if roofs else {}
    more |= {"apart": [apart_json(apart_entry) for apart_entry in split]} if split else {}

    def shown(details: bool) -> Parts:
        yield from parts(card, details)
        if split:
            yield from apart_parts(split, card)
        if sweep:
            yield from curve_parts(swept)
            yield from curve_parts(contexts, card.load)

    wanted.give(
        lambda: to_json(card) | more,
        shown,
        title=f"{card.model.name} on {', '.join(names)}",
        facts=lambda: facts(card),
        pictures=[by_cost, by_speed, by_length],
    )
    return 0 if any(entry.estimate for entry in card.entries) else 1


def _cost_picture(
    card: Scorecard, of: str, curves: Sequence[Curve], prices: Mapping[str, Quote], *, by_context: bool = False
) -> Picture | None:
    """Titled with all that it assumes; `of`: the model and how its weights are stored."""
    load, names = card.load, [entry.accelerator.id for entry in card.entries]
    lacking = ", ".join(name for name in names if name not in prices)
    if by_context:
        what, asked = "Cost over context length", f"{load.output_tokens:,} tokens out, {load.concurrency:,} in flight"
    else:
        lengths = f"{load.input_tokens:,} tokens in, {load.output_tokens:,} out"
        what, asked = "Cost against latency", f"{lengths}, the best layout and load at each TPOT"
    priced = f"{USUAL.price} prices, the middle seller's{f' (none for {lacking})' if lacking else ''}"
    return costs_picture(curves, prices, f"{what}\n{of}: {asked}; {priced}", of=names, by_context=by_context)


def _published(card: Scorecard) -> list[PublishedPoint]:
    deployments = [entry.deployment for entry in card.entries if entry.deployment]
    return published_points(all_results(), deployments, card.load.input_tokens, card.load.output_tokens)


def rooflines(card: Scorecard) -> list[Roofline]:
    load = asdict(card.load)
    return [roofline(entry.deployment, **load) for entry in card.entries if entry.deployment and entry.estimate]


def roofline_json(limits: Roofline) -> dict[str, object]:
    steps = []
    for step in limits.steps:
        spots = [{**asdict(spot), **picked(spot, "flop_per_byte flop_per_s")} for spot in step.spots]
        steps.append({**asdict(step), "spots": spots})
    return {
        "deployment": deployment_json(limits.deployment),
        **picked(limits, "memory_bytes_per_s roofs"),
        "steps": steps,
    }


def scaled_json(sizes: list[Scaling], load: Load) -> dict[str, object]:
    return {"load": asdict(load), "scaling": [_scaling_json(entry) for entry in sizes]}


def scaled_parts(scaled: list[Scaling], load: Load) -> Parts:
    """One table an accelerator, a size a line."""
    yield (
        f"{load.input_tokens:,} tokens in, {load.output_tokens:,} out, {load.concurrency:,} requests in flight at the "
        "first size and as many a GPU at the others; each size in the layout that gives most"
    )
    columns = [">GPUs", "replicas", ">TTFT", ">TPOT", ">tokens/s", ">per GPU", ">efficiency"]
    for scaling_of in scaled:
        yield Table(columns, [_size_row(size, load) for size in scaling_of.sizes], scaling_of.accelerator.id)
        yield from (f"  {size.problem}" for size in scaling_of.sizes if size.problem)
    low, high = map(share, FOUR_FIFTHS)
    kept = f"{share(SEVERAL_MACHINES)} ({low} to {high})"
    yield note(
        f"  several machines behind one door keep {kept}, as in MLPerf's results, which show no trend from 16 to 288"
    )


def _size_row(size: Size, load: Load) -> list[str]:
    if size.deployment is None or size.estimate is None:
        return [f"{size.gpus}", *("-" for _ in range(6))]
    return [
        f"{size.gpus}", f"{size.replicas} x {size.deployment.parallelism}", seconds(size.estimate.ttft_s),
        seconds(size.estimate.tpot_s) if load.output_tokens > 1 else "-", significant(size.output_tokens_per_s),
        significant(size.output_tokens_per_s / size.gpus), share(size.efficiency) if size.efficiency else "-",
    ]  # fmt: skip


def _scaling_json(entry: Scaling) -> dict[str, object]:
    return {
        "accelerator": entry.accelerator.id,
        "sizes": [
            {
                **picked(size, "gpus replicas"),
                "deployment": deployment_json(size.deployment) if size.deployment else None,
                **picked(size, "estimate output_tokens_per_s"),
                "output_tokens_per_s_per_gpu": size.output_tokens_per_s / size.gpus,
                **picked(size, "efficiency problem"),
            }
            for size in entry.sizes
        ],
    }


def parts(card: Scorecard, verbose: bool) -> Parts:
    load = card.load
    about = f"; {describe(card.model)}" if verbose else ""
    yield Text.assemble((card.model.name, "bold"), f": {card.layouts}" if card.layouts else "", about)
    yield f"  {card.question.line}"
    running = [entry for entry in card.entries if entry.estimate]
    if running and running[0].deployment and running[0].deployment.speculation:
        yield f"  {kept_text(running[0].deployment.speculation)}"
    if running and verbose:
        yield across([entry.accelerator.id for entry in running], scorecard(running, load.output_tokens))
    elif running:
        columns = ["accelerator", ">GPUs", ">TTFT", ">TPOT", ">tokens/s per GPU", f">{INTERVAL}", ">requests that fit"]
        yield Table(columns, [_row(entry, load.output_tokens) for entry in running])
        if load.concurrency > 1:
            yield note(f"  {ttft_text(running, load.concurrency)}")
    for entry in card.entries:
        barely = entry.memory if entry.memory == BARELY else ""
        against = f"preflight: {entry.caveat}" if entry.caveat else ""
        drafts = payoff_text(entry.payoff, load.concurrency)
        remarks = filter(None, (entry.problem, against, barely, *entry.emulated, entry.at_length, drafts))
        yield from (f"  {entry.accelerator.id}: {remark}" for remark in remarks)
    yield from (f"- {sentence}" for sentence in card.verdicts)
    for entry in running if verbose else ():
        assert entry.estimate
        yield note(f"  {entry.accelerator.id}: {entry.estimate.basis}")
    if running and not verbose:
        yield closing(_DETAILS)


def facts(card: Scorecard) -> list[KeyNumber]:
    """The most tokens of a GPU first."""
    several = card.load.output_tokens > 1
    made = [(entry.accelerator.id, entry.estimate) for entry in card.entries if entry.estimate]
    return [
        KeyNumber(
            f"{name}, output tokens/s a GPU",
            significant(estimate.output_tokens_per_s_per_gpu),
            f"TTFT {seconds(estimate.ttft_s)}" + (f", TPOT {seconds(estimate.tpot_s)}" if several else ""),
        )
        for name, estimate in sorted(made, key=lambda pair: -pair[1].output_tokens_per_s_per_gpu)
    ]


def apart_parts(split: list[ApartEntry], card: Scorecard) -> Parts:
    """The service, and the same GPUs with prefill and decode together at as many requests per GPU."""
    columns = ["accelerator", "prefill:decode", ">GPUs", ">TTFT", ">TPOT", ">tokens/s per GPU", ">together"]
    rows = [
        [
            entry.accelerator.id, entry.service.layout, f"{entry.service.gpus}", seconds(entry.estimate.ttft_s),
            seconds(entry.estimate.tpot_s) if card.load.output_tokens > 1 else "-",
            significant(entry.estimate.output_tokens_per_s_per_gpu),
            significant(entry.together.output_tokens_per_s_per_gpu),
        ]
        for entry in split
        if entry.service and entry.estimate and entry.together
    ]  # fmt: skip
    if rows:
        yield Table(columns, rows, f"disaggregated prefill and decode, {card.load.concurrency:,} requests in flight")
    yield from (f"- {apart_entry.accelerator.id}: {apart_entry.verdict}" for apart_entry in split)


def apart_json(entry: ApartEntry) -> dict[str, object]:
    service = entry.service
    return {
        "accelerator": entry.accelerator.id,
        **picked(entry, "layout=service.layout connector=service.connector.id link=service.link gpus=service.gpus"),
        "prefill": deployment_json(service.prefill) if service else None,
        "decode": deployment_json(service.decode) if service else None,
        **picked(entry, "estimate together transfer_s prefill_busy problem"),
    }


def kept_text(drafts: Speculation) -> str:
    """mtp:3 keeps 2.54 tokens a step on chat, 2.23 to 2.92 by other measurements (derived, ...)."""
    low, high = drafts.range
    between = f", {low:.2f} to {high:.2f} elsewhere" if high - low > 0.01 else ""
    kind = "" if drafts.source == "given" else f" on {drafts.text}"
    source = "as given" if drafts.source == "given" else f"{drafts.basis}: {drafts.source}"
    return f"{drafts} keeps {drafts.acceptance_length:.2f} tokens a step{kind}{between} ({source})"


def payoff_text(payoff: Payoff | None, concurrency: int) -> str:
    if payoff is None:
        return ""
    until = "a full replica" if payoff.pays_below is None else f"{payoff.pays_below:,} requests in flight"
    if payoff.pays_below is not None and payoff.pays_below <= 1:
        pays = "it pays at no load"
    elif payoff.pays_below is not None and payoff.pays_below <= concurrency:
        pays = f"it pays below {until} only"
    else:
        pays = f"it pays up to {until}"
    return (
        f"drafts give {payoff.gain:.2f}x the tokens/s of none, {payoff.gain_if_fewer:.2f}x if {share(FEWER)} fewer "
        f"are kept; {pays}"
    )


def curve_parts(swept: list[Curve], load: Load | None = None) -> Parts:
    """By requests in flight, or of a load by the length of its prompts."""
    begins = [">prompt tokens", ">run at once"] if load else [">in flight"]
    what = f", {load.concurrency:,} requests in flight by their prompts" if load else ""
    for curve in swept:
        lines = zip(
            curve.input_tokens if load else curve.concurrency, curve.running, curve.ttft_s,
            curve.tokens_per_s_per_user, curve.output_tokens_per_s_per_gpu, strict=True,
        )  # fmt: skip
        cells = [
            [f"{n:,}", *([significant(running)] if load else []), seconds(ttft), significant(user), significant(gpu)]
            for n, running, ttft, user, gpu in lines
        ]
        yield Table([*begins, ">TTFT", ">tokens/s per user", ">tokens/s per GPU"], cells, f"{curve.label}{what}")


def ttft_text(entries: Sequence[Entry], concurrency: int) -> str:
    """Which TTFT is meant, and the other one, since most benchmarks report that."""
    times = [(entry.accelerator.id, seconds(entry.estimate.ttft_burst_s)) for entry in entries if entry.estimate]
    begin = f"if all {concurrency:,} clients begin at once, as most benchmarks do"
    if len(times) == 1:
        return f"TTFT: steady arrivals; {times[0][1]} {begin}"
    return f"TTFT: steady arrivals; {begin}: {', '.join(f'{name} {time}' for name, time in times)}"


def _row(entry: Entry, output_tokens: int) -> list[str]:
    deployment, run = entry.deployment, entry.estimate
    assert deployment
    assert run
    gpus = deployment.parallelism.gpus
    return [
        entry.accelerator.id, f"{gpus}", seconds(run.ttft_s), seconds(run.tpot_s) if output_tokens > 1 else "-",
        significant(run.output_tokens_per_s_per_gpu),
        _between(significant, run.interval.per_gpu(gpus)) if run.interval else "-",
        significant(run.concurrency_that_fits),
    ]  # fmt: skip


def scorecard(entries: list[Entry], output_tokens: int) -> list[list[str]]:
    """One line a quantity: a scorecard is read across."""
    pairs = [(e.deployment, e.estimate) for e in entries if e.deployment and e.estimate]
    decodes = output_tokens > 1
    rows = [
        ["GPUs per replica", *(f"{d.parallelism.gpus} ({d.parallelism})" for d, _ in pairs)],
        ["weights", *(d.precision.id for d, _ in pairs)],
        ["engine", *(d.stack.name for d, _ in pairs)],
        ["speculation", *(str(d.speculation or "-") for d, _ in pairs)],
        ["TTFT", *(seconds(e.ttft_s) for _, e in pairs)],
        [f"  {INTERVAL}", *(_between(seconds, e.interval.ttft_s) if e.interval else "-" for _, e in pairs)],
        ["TTFT, all clients at once", *(seconds(e.ttft_burst_s) for _, e in pairs)],
        ["TPOT", *(seconds(e.tpot_s) if decodes else "-" for _, e in pairs)],
        [f"  {INTERVAL}", *(_between(seconds, e.interval.tpot_s) if e.interval and decodes else "-" for _, e in pairs)],
        ["output tokens/s per replica", *(significant(e.output_tokens_per_s) for _, e in pairs)],
        ["output tokens/s per GPU", *(significant(e.output_tokens_per_s_per_gpu) for _, e in pairs)],
        [
            f"  {INTERVAL}",
            *(_between(significant, e.interval.per_gpu(d.parallelism.gpus)) if e.interval else "-" for d, e in pairs),
        ],
        ["requests that fit", *(significant(e.concurrency_that_fits) for _, e in pairs)],
        ["prefill bound by", *(e.prefill_bound for _, e in pairs)],
        ["  of its roofline", *(share(e.prefill_roofline_fraction) for _, e in pairs)],
        ["decode bound by", *(e.decode_bound for _, e in pairs)],
        ["  of its roofline", *(share(e.decode_roofline_fraction) for _, e in pairs)],
        ["  bookkeeping's share", *(share(e.decode_shares["bookkeeping"]) for _, e in pairs)],
        ["  the host's share", *(share(e.decode_shares["host"]) for _, e in pairs)],
        ["one stream, tokens/s", *(significant(e.single_stream_tokens_per_s) for _, e in pairs)],
        ["  its ceiling", *(significant(e.single_stream_ceiling_tokens_per_s) for _, e in pairs)],
    ]
    return [row for row in rows if row[0].strip() not in (INTERVAL, "speculation") or set(row[1:]) != {"-"}]


def _between(show: Callable[[float], str], ends: tuple[float, float]) -> str:
    return f"{show(ends[0])} to {show(ends[1])}"


def to_json(card: Scorecard) -> dict[str, object]:
    return {
        **picked(card, "model=model.id load"),
        "entries": [
            {
                "accelerator": entry.accelerator.id,
                "deployment": deployment_json(entry.deployment) if entry.deployment else None,
                **picked(entry, "estimate emulated problem memory preflight=caveat at_length"),
                **({"speculation": asdict(entry.payoff)} if entry.payoff else {}),
            }
            for entry in card.entries
        ],
        "verdicts": card.verdicts,
        **assumptions(card.question, [card.reckoned(entry) for entry in card.entries if entry.estimate]),
    }

"""`crosstie parity`: whether two endpoints give the same model; and a drained pool let in once it is shown to."""

import asyncio
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from crosstie.cli.admin import AdminPort, AdminRejected, reach
from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.lazy import GroupedCommand
from crosstie.cli.options import file_option, flag_option, real_option, text_option, whole_option
from crosstie.cli.progress import progress
from crosstie.core.errors import BadInput
from crosstie.core.figures import percent, plural, significant
from crosstie.port.doctor.machine import gpus_of
from crosstie.prove.parity.endpoint import WAYS, Asking, Party, Way, ask_all
from crosstie.prove.parity.groups import Group, Groups
from crosstie.prove.parity.harness import Score, harness_line, scored
from crosstie.prove.parity.power import SIZES, Power
from crosstie.prove.parity.prompts import BUNDLED, read_prompts
from crosstie.prove.parity.verdict import DISAGREEMENT, EARLY, Gauge, Limits, Parity, document, judged
from crosstie.web.parts import Line, Parts, Table, closing, note
from crosstie.wire.address import Address

_KEY = "OPENAI_API_KEY"
_DETAILS = "by position, length and language; what every gauge means"
_VERDICTS = {
    "same": "the same model",
    "unsure": "not shown to be the same model: more prompts (--long, --prompts) would tell",
    "differs": "NOT the same model",
}
_MEANINGS = {
    "forced KL": "nats a token over forced texts, the least that the lists allow",
    DISAGREEMENT: "top-1 agreement is that of the likeliest tokens at all places of forced texts",
    "chat KL": "the same over answers, as far as both have said the same",
    "early divergence": f"answers that part within {EARLY} tokens, and at no near tie",
    "invalid tool calls": "answers that call no tool where one is asked for, or call it wrongly",
    "invalid JSON": "answers that are not the JSON asked for",
    "repetition": "answers that end in a loop",
    "garbage": "answers in broken signs, or in scripts that the prompt has none of",
    "empty answers": "neither text nor a tool call",
}


@click.command(
    "parity", cls=GroupedCommand,
    groups={
        "What is asked": "--prompts --limit --long --tokens --positions --top --concurrency --way --body",
        "What counts as the same": "--max-kl --min-top1 --fault",
        "Which GPUs answered": "--machine --machine-b",
        "A pool of a gateway": "--pool --gateway --key-file --admit",
        "lm-eval": "--lm-eval --lm-eval-limit",
    },
)  # fmt: skip
@click.argument("a", metavar="A")
@click.argument("others", metavar="[B]...", nargs=-1)
@text_option("--model", "M", "The model to ask for. [default: the only one that is served]")
@text_option("--model-b", "M", "Its name at B, where that is another.")
@text_option("--key-env", "NAME", "The variable with the key of A.", default=_KEY, show_default=True)
@text_option("--key-env-b", "NAME", "The variable with the key of B. [default: that of A]")
@file_option("--prompts file", "Prompts of your own (TOML).", default=BUNDLED)
@whole_option("--limit", 1, None, "Only the first N prompts.")
@whole_option(
    "--long long_tokens", 100, 10**6, "Four more prompts of about N tokens: where RoPE scaling and windows show."
)
@whole_option("--tokens", 1, 4096, "The longest greedy answer.", default=64)
@whole_option("--positions", 1, 1000, "Places a text, where it is forced step by step.", default=12)
@whole_option("--top", 1, 100, "Log-probabilities a place; 5 where so many are refused.", metavar="K", default=20)
@whole_option("--concurrency", 1, 1000, "Requests at once; the second pass of A has four times as many.", default=4)
@click.option("--way", type=click.Choice(WAYS), help="How to force texts. [default: the best that all of them have]")
@text_option("--body", "JSON", "More keys of every request, such as chat_template_kwargs.", default="{}")
@real_option("--max-kl", 0, 100, "Nats a token.", default=Limits().kl)
@real_option(
    "--min-top1", 0, 1, "The share of places with the same likeliest token.", default=1 - Limits().disagreement
)
@real_option("--fault", 1e-9, 100, "Say how many prompts a fault of so many nats a token needs.")
@file_option("--machine", "What `crosstie doctor --json` wrote where A runs.")
@file_option("--machine-b", "The same of B: the answer then names their GPUs.")
@text_option("--pool", "NAME", "B is every backend of this pool; A may then be a pool's name too.")
@text_option("--gateway", "URL", "The gateway's --admin-port, for --pool.", default="http://127.0.0.1:8081",
             show_default=True, envvar="CROSSTIE_ADMIN_URL")  # fmt: skip
@file_option("--key-file", "Where its key is, if not in CROSSTIE_ADMIN_KEY.")
@flag_option("--admit", "Undrain the pool if all of its backends are the same as A.")
@text_option("--lm-eval tasks", "TASK,...", "Also run tasks of lm-evaluation-harness on both.")
@whole_option("--lm-eval-limit task_limit", 1, None, "Only N questions a task.")
@answer_options(_DETAILS, html=True)
def command(
    a: str, others: tuple[str, ...], model: str | None, model_b: str | None, key_env: str, key_env_b: str | None,
    file: Path, limit: int | None, long_tokens: int | None, tokens: int, positions: int, top: int, concurrency: int,
    way: Way | None, body: str, max_kl: float, min_top1: float, fault: float | None, machine: Path | None,
    machine_b: Path | None, pool: str | None, gateway: str, key_file: Path | None, admit: bool, tasks: str | None,
    task_limit: int | None, wanted: Wanted,
) -> int:  # fmt: skip
    """Do A and B, two OpenAI-compatible endpoints, give the same model?

    \b
    crosstie parity http://h200:8000 http://mi300x:8000
    crosstie parity http://h200:8000 http://mi300x:8000 --long 16000 --json
    crosstie parity chat-h200 --pool chat-mi300x --admit

    Both answer the same prompts greedily. Both then read the same texts, and at each place their predictions are
    compared: the likeliest token, and the KL divergence over the --top likeliest. A is asked twice with another
    batching: how far A is from itself is the noise. docs/parity.md explains every line.

    Exit status: 0 the same, 1 they differ or it is not sure, 2 the question was wrong.
    """
    gpus = {end: gpus_of(file) for end, file in (("a", machine), ("b", machine_b)) if file is not None}
    prompts = read_prompts(file).taken(limit, long_tokens)
    asking = Asking(top=top, tokens=tokens, positions=positions, body=_object(body))
    port = reach(gateway, key_file) if pool is not None else None
    if (admit or port is None) and pool is None and not others:
        raise BadInput("give B, an endpoint, or --pool NAME")
    if pool is None and admit:
        raise BadInput("--admit goes with --pool")
    if port is not None:
        if others:
            raise BadInput("give B, or --pool NAME, not both")
        a, others = _of_gateway(port, a, pool or "", admit)
    key = os.environ.get(key_env) or None
    key_b = os.environ.get(key_env_b) or None if key_env_b else key
    party = Party(url=Address(a).url, model=model, api_key=key)
    parties = [Party(url=Address(other_url).url, model=model_b or model, api_key=key_b) for other_url in others]
    if tasks:
        harness_line()
    with progress() as on_progress:
        passes = asyncio.run(
            ask_all(party, parties, prompts, asking, concurrency=concurrency, way=way, on_progress=on_progress)
        )
    limits = Limits(kl=max_kl, disagreement=1 - min_top1)
    faults = SIZES if fault is None else (fault,)
    parities = [judged(party.url, other.url, both, limits, faults) for other, both in zip(parties, passes, strict=True)]
    scores: list[Score] = []
    if tasks:
        with progress() as on_progress:
            for other, both in zip(parties, passes, strict=True):
                scores += scored(
                    (party, both.a_model), (other, both.b_model), tasks.split(","), task_limit, on_progress=on_progress
                )
    same = all(parity.verdict == "same" for parity in parities) and not any(score.worse for score in scores)
    admitted = _admitted(port, pool or "") if port is not None and admit and same else None
    wanted.give(
        lambda: document(parities, scores) | {"admitted": admitted is not None, "gpus": gpus},
        lambda details: _parts(parities, scores, gpus, admitted, details, pool if admit else None),
        title=f"{party.url} and {', '.join(compared.url for compared in parties)}: the same model?",
    )
    return 0 if same else 1


def _object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise BadInput("--body: must be a JSON object")
    return body


def _of_gateway(port: AdminPort, a: str, pool: str, admit: bool) -> tuple[str, tuple[str, ...]]:
    """The address of A, and the backends of the pool. One that is to be admitted must not have requests already."""
    pools = {entry["pool"]: entry for entry in json.loads(port.get("pools"))["pools"]}
    for name in (pool, *([] if "://" in a else [a])):
        if name not in pools:
            raise BadInput(f"{port.url}: no pool '{name}'; there are {', '.join(pools)}")
        if not pools[name]["backends"]:
            raise BadInput(f"pool {name} has no backends")
    if admit and not pools[pool]["draining"]:
        raise BadInput(
            f"pool {pool} has requests already: --admit lets in one that is drained (`drained = true` in the fleet "
            f"file, or `crosstie admin drain {pool}`)"
        )
    backends = [backend["backend"] for backend in pools[pool]["backends"]]
    if "://" not in a:
        up = [backend["backend"] for backend in pools[a]["backends"] if backend["up"]]
        if not up:
            raise BadInput(f"pool {a}: no backend is up")
        a = up[0]
    return a, tuple(backends)


def _admitted(port: AdminPort, pool: str) -> str:
    try:
        done = port.post("undrain", {"pool": pool})
    except AdminRejected as rejected:
        raise BadInput(f"{port.url}: pool {pool} was not admitted: {rejected}") from None
    return f"pool {pool} is admitted: {done['what']}"


def _parts(
    parities: list[Parity], scores: list[Score], gpus: dict[str, dict[str, int]], admitted: str | None, verbose: bool,
    pool: str | None,
) -> Parts:  # fmt: skip
    for number, parity in enumerate(parities):
        if number:
            yield ""
        yield from parity_parts(parity, verbose)
    for end, counts in gpus.items():
        held = ", ".join(f"{count} x {name}" for name, count in counts.items())
        yield f"{end.upper()} runs on a machine with {held or 'no GPU of the catalog'}, as its record says"
    if scores:
        yield scores_table(scores)
    if admitted:
        yield admitted
    elif pool is not None:
        yield f"pool {pool} stays drained"


def _figure(gauge: Gauge, value: float) -> str:
    return nats(value) if gauge.name.endswith("KL") else percent(value)


def nats(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "0" if value < 5e-6 else significant(value, 2) if value < 0.1 else significant(value)


def parity_parts(pair: Parity, verbose: bool) -> Parts:
    names = pair.a_model if pair.a_model == pair.b_model else f"{pair.a_model} and {pair.b_model}"
    yield f"{pair.a} (A) and {pair.b} (B): {_VERDICTS[pair.verdict]} ({names})"
    forced = f"{pair.positions:,} places forced by {pair.way}" if pair.way else "none forced"
    yield f"{plural(pair.prompts, 'prompt')}, {forced}, top {pair.top}; A was asked twice"
    yield Table(["distance", ">A/A", ">A/B", ">95%", ">allowed", "says"], _rows(pair.gauges, of_answers=False))
    yield Table(["answers", ">A", ">B", ">more, 95%", ">allowed", "says"], _rows(pair.gauges, of_answers=True))
    yield _parted(pair.first_divergence)
    if pair.power is not None:
        yield Line(_sees(pair.power), hang=2)
    yield from (f"- likely: {cause}" for cause in pair.causes)
    for text, listed in (("A did not answer", pair.left_out), ("B did not answer", pair.unanswered)):
        if listed:
            yield f"- {text} {plural(len(listed), 'prompt')}; the first: {listed[0]}"
    yield from (f"- {note}" for note in pair.notes)
    if not verbose:
        yield closing(_DETAILS)
        return
    if pair.first_divergence.by_token:
        rows = [[part.name, f"{part.floor:,}", f"{part.answers:,}"] for part in pair.first_divergence.by_token]
        yield Table(["answers part at token", ">A/A", ">A/B"], rows)
    cuts = {"position": pair.by_position, "length of the prompt": pair.by_length, "language": pair.by_language}
    for what, groups in cuts.items():
        if groups:
            yield from _groups(f"by {what}", groups)
    for gauge in pair.gauges:
        meaning = _MEANINGS[gauge.name]
        yield note(meaning if gauge.name == DISAGREEMENT else f"{gauge.name}: {meaning}")


def _sees(power: Power) -> str:
    """What so many prompts can see, 80% of the time, and how many a fault needs."""
    seen = []
    if power.noticed is not None:
        said = f"of {nats(power.noticed)} nats a token" if power.noticed else "of any size, since A repeats itself,"
        seen.append(f"a fault {said} is told from noise")
    if power.differs is not None:
        seen.append(f"one of {nats(power.differs)} is called a difference")
    needs = []
    for need in power.needed:
        called = "" if need.to_differ is None else f", {need.to_differ:,} to be called a difference"
        needs.append(f"{nats(need.nats)} nats: {need.to_notice:,} to be noticed{called}")
    told = " and ".join(seen) or "no fault for sure"
    asked = plural(power.prompts, "prompt")
    return f"{asked} see, in 80% of runs: {told}. Prompts that a fault needs: {'; '.join(needs)}"


def _rows(gauges: Sequence[Gauge], *, of_answers: bool) -> list[list[str]]:
    rows = []
    for gauge in gauges:
        if (gauge.a_rate is not None) is of_answers:
            first, second = gauge.a_rate, gauge.b_rate
            if first is None or second is None:
                first, second = gauge.floor, gauge.value
            values, name = (first, second, gauge.low, gauge.high, gauge.allowed), gauge.name
            if name == DISAGREEMENT:
                values = (1 - first, 1 - second, 1 - gauge.high, 1 - gauge.low, 1 - gauge.allowed)
                name = "top-1 agreement"
            figures = [_figure(gauge, value) for value in values]
            rows.append([name, *figures[:2], f"{figures[2]} to {figures[3]}", figures[4], gauge.says])
    return rows


def _parted(said: Groups) -> str:
    def of(equal: int, at: float, clear: int) -> str:
        where = "" if math.isnan(at) else f", others part at token {at:g} (median), {clear} of them at no near tie"
        return f"{equal} of {said.prompts} answers are equal{where}"

    return (
        f"A/B: {of(said.equal, said.median_token, said.clear)}; "
        f"A/A: {of(said.floor_equal, said.floor_median_token, said.floor_clear)}"
    )


def _groups(title: str, groups: Sequence[Group]) -> Parts:
    def parted(group: Group) -> str:
        if math.isnan(group.parted):
            return "-"
        return percent(group.parted) + ("" if math.isnan(group.parted_at) else f" at {group.parted_at:g}")

    rows = [
        [
            part.name, f"{part.prompts:,}", f"{part.places:,}", nats(part.floor_kl), nats(part.kl),
            percent(part.agreement), parted(part),
        ]
        for part in groups
    ]  # fmt: skip
    columns = [title, ">prompts", ">places", ">KL A/A", ">KL A/B", ">top-1", ">answers part"]
    yield Table(columns, rows)


def scores_table(scores: Sequence[Score]) -> Table:
    rows = [
        [
            score.task, score.metric, f"{score.a:.4f} ± {score.a_error:.4f}", f"{score.b:.4f} ± {score.b_error:.4f}",
            "worse" if score.worse else "no worse",
        ]
        for score in scores
    ]  # fmt: skip
    return Table(["lm-eval", "metric", ">A", ">B", "says"], rows)

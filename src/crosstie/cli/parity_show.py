"""How a comparison of two endpoints looks on a terminal: the verdict, its gauges, and where they differ."""

import math
from collections.abc import Sequence

from crosstie.core.figures import percent, plural, significant
from crosstie.prove.parity.groups import Group, Groups
from crosstie.prove.parity.harness import Score
from crosstie.prove.parity.power import Power
from crosstie.prove.parity.verdict import DISAGREEMENT, EARLY, Gauge, Parity
from crosstie.web.parts import Line, Parts, Table, closing, note

DETAILS = "by position, length and language; what every gauge means"
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


def _figure(gauge: Gauge, value: float) -> str:
    return nats(value) if gauge.name.endswith("KL") else percent(value)


def nats(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "0" if value < 5e-6 else significant(value, 2) if value < 0.1 else significant(value)


def parity_parts(one: Parity, verbose: bool) -> Parts:
    names = one.a_model if one.a_model == one.b_model else f"{one.a_model} and {one.b_model}"
    yield f"{one.a} (A) and {one.b} (B): {_VERDICTS[one.verdict]} ({names})"
    forced = f"{one.positions:,} places forced by {one.way}" if one.way else "none forced"
    yield f"{plural(one.prompts, 'prompt')}, {forced}, top {one.top}; A was asked twice"
    yield Table(["distance", ">A/A", ">A/B", ">95%", ">allowed", "says"], _rows(one.gauges, of_answers=False))
    yield Table(["answers", ">A", ">B", ">more, 95%", ">allowed", "says"], _rows(one.gauges, of_answers=True))
    yield _parted(one.first_divergence)
    if one.power is not None:
        yield Line(_sees(one.power), hang=2)
    yield from (f"- likely: {cause}" for cause in one.causes)
    for text, listed in (("A did not answer", one.left_out), ("B did not answer", one.unanswered)):
        if listed:
            yield f"- {text} {plural(len(listed), 'prompt')}; the first: {listed[0]}"
    yield from (f"- {note}" for note in one.notes)
    if not verbose:
        yield closing(DETAILS)
        return
    if one.first_divergence.by_token:
        rows = [[part.name, f"{part.floor:,}", f"{part.answers:,}"] for part in one.first_divergence.by_token]
        yield Table(["answers part at token", ">A/A", ">A/B"], rows)
    for title, groups in (
        ("by position", one.by_position), ("by length of the prompt", one.by_length), ("by language", one.by_language),
    ):  # fmt: skip
        if groups:
            yield from _groups(title, groups)
    for gauge in one.gauges:
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
    for one in power.needed:
        called = "" if one.to_differ is None else f", {one.to_differ:,} to be called a difference"
        needs.append(f"{nats(one.nats)} nats: {one.to_notice:,} to be noticed{called}")
    told = " and ".join(seen) or "no fault for sure"
    asked = plural(power.prompts, "prompt")
    return f"{asked} see, in 80% of runs: {told}. Prompts that a fault needs: {'; '.join(needs)}"


def _rows(gauges: Sequence[Gauge], *, of_answers: bool) -> list[list[str]]:
    rows = []
    for one in gauges:
        if (one.a_rate is not None) is of_answers:
            first, second = (
                (one.floor, one.value) if one.a_rate is None or one.b_rate is None else (one.a_rate, one.b_rate)
            )
            values, name = (first, second, one.low, one.high, one.allowed), one.name
            if name == DISAGREEMENT:
                values, name = (1 - first, 1 - second, 1 - one.high, 1 - one.low, 1 - one.allowed), "top-1 agreement"
            figures = [_figure(one, value) for value in values]
            rows.append([name, *figures[:2], f"{figures[2]} to {figures[3]}", figures[4], one.says])
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
            one.name, f"{one.prompts:,}", f"{one.places:,}", nats(one.floor_kl), nats(one.kl), percent(one.agreement),
            parted(one),
        ]
        for one in groups
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

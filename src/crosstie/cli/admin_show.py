"""How a gateway's pools, changes and decisions look on a terminal."""

import time
from typing import Any

import click

from crosstie.core.figures import number, seconds, significant
from crosstie.web.parts import Parts, Table


def pools_parts(said: dict[str, Any]) -> Parts:
    processes = f", {said['processes']} processes" if said["processes"] > 1 else ""
    yield f"{said['fleet']}: {said['policy']}, {said['exchanges']} requests, {said['queued']} queued{processes}"
    columns = [
        "backend", "pool", "state", ">in flight", ">engine runs", ">waits", "breaker", ">TTFT x", ">TPOT x", ">weight",
        "model", "~why",
    ]  # fmt: skip
    rows = []
    for pool in said["pools"]:
        for row in pool["backends"]:
            load = row["reported"] or {}
            rows.append([
                row["backend"] + (" (added)" if row["from"] == "admin" else ""),
                pool["pool"] + (f"/{side}" if (side := row.get("side")) else ""), row["state"],
                str(row["in_flight"]), number(load.get("running")), number(load.get("waiting")), row["breaker"],
                f"{row['ttft_correction']:.2f}", f"{row['tpot_correction']:.2f}", number(pool["weight"]), pool["model"],
                row["why_down"],
            ])  # fmt: skip
    yield Table(columns, rows)
    for one in said["leaving"]:
        yield f"removed, still answering {one['in_flight']}: {one['backend']} of {one['pool']}"
    yield from (f"changed: {words}" for words in said["changes"])
    yield from (f"dropped: {one['change']}: {one['why']}" for one in said["dropped"])


def trials_parts(said: dict[str, Any]) -> Parts:
    if not said["trials"]:
        yield "no pool is on trial: give one `shadow` or `canary` in the fleet file"
    for trial in said["trials"]:
        whose = f"{trial['model']}, class {trial['class_name']}" if trial["class_name"] else trial["model"]
        yield f"{trial['pool']}: ready for {whose}: {trial['ready'].upper()}"
        yield from (f"  {reason}" for reason in trial["why"])
        copies = ", ".join(f"{count} {outcome}" for outcome, count in sorted(trial["copies"].items())) or "none yet"
        slower = f"; an answer takes {trial['slower']:.2f} times as long" if trial["slower"] is not None else ""
        yield f"copies ({trial['shadow']:.1%} of requests): {copies}{slower}"
        if trial["gauges"]:
            yield Table(
                ["distance", ">in service", ">on trial", ">allowed", "says"],
                [
                    [
                        gauge["name"],
                        *(significant(gauge[key], 3) for key in ("floor", "value", "allowed")),
                        gauge["says"],
                    ]
                    for gauge in trial["gauges"]
                ],
            )
        if trial["canary"] is not None:
            yield (
                f"canary ({trial['canary']:.1%} of requests): {trial['served']} served, {trial['faults']} faults"
                + "".join(
                    f", {what} {trial[key]:.2f} times as long"
                    for what, key in (("first tokens", "ttft_ratio"), ("tokens", "token_ratio"))
                    if trial[key] is not None
                )
            )


def show_done(done: dict[str, Any]) -> None:
    click.echo(f"{done['what']}: {'done' if done['changed'] else 'nothing to change'}")
    for words in done["dropped"]:
        click.echo(f"dropped with it: {words}")
    for words in done["warnings"]:
        click.echo(f"warning: {words}", err=True)
    for why in done["refused_by"]:
        click.echo(f"one of its processes refused: {why}", err=True)


def show_decision(row: dict[str, Any]) -> None:
    at = time.strftime("%H:%M:%S", time.localtime(row["at"]))
    where = row["pool"] or row["outcome"].upper()
    again = f", attempt {row['attempt']}" if row["attempt"] > 1 else ""
    told = row["predicted"]
    predicted = f", TTFT {seconds(told['ttft_s'])}, TPOT {seconds(told['tpot_s'])}" if told else ""
    click.echo(
        _plain(
            f"{at} {row['request_id']} {row['model']} {row['class'] or '-'} {row['input_tokens']}+"
            f"{row['expected_output_tokens']} -> {where}{again}{predicted}: {row['reason']}"
        )
    )
    for one in row["considered"]:
        score = "-" if one["score"] is None else significant(one["score"], 4)
        click.echo(_plain(f"         {one['pool']}: score {score} {one['dropped'] or ''}".rstrip()))


def _plain(text: str) -> str:
    """Request ids are the clients' own: what they hold must not steer a terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)

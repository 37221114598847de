"""`crosstie replay`: recorded requests sent to any OpenAI-compatible endpoint, at their times."""

import os
from pathlib import Path

import click

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.traces import Trace, find_trace, read_trace
from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.options import FILE, real_option, whole_option
from crosstie.cli.progress import progress
from crosstie.cli.replay_show import DETAILS, replay_parts
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet
from crosstie.prove.replay.accounts import fleet_usd_per_good_million, replayed
from crosstie.prove.replay.document import result_document
from crosstie.prove.replay.outcomes import result_of, targets_of
from crosstie.prove.replay.traffic import TimedRequest, from_trace
from crosstie.wire.address import Address

_KEY = "OPENAI_API_KEY"


@click.command("replay")
@click.argument("trace", metavar="TRACE")
@click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="The gateway, or any OpenAI server.")
@click.option("--model", required=True, metavar="M", help="The model to ask for.")
@click.option(
    "--class", "class_name", metavar="NAME", help="The class that requests say they belong to. [default: the trace's]"
)
@real_option("--rate", 1e-4, 1e6, "Requests a second. [default: the trace's]")
@real_option(
    "--speed", 0.01, 1000, "Of a server that is emulated X times as fast: all seconds are then its own.", default=1.0
)
@whole_option("--requests most", 1, 10**7, "The first N requests.")
@real_option("--for for_s", 0.01, 1e7, "The first S seconds.", metavar="S")
@whole_option("--start", 0, 10**9, "Leave out the first N requests.", default=0, show_default=False)
@click.option("--fleet", type=FILE, metavar="FILE", help="Targets and prices of the fleet.")
@answer_options(DETAILS)
def command(
    trace: str, url: str, model: str, class_name: str | None, rate: float | None, speed: float, most: int | None,
    for_s: float | None, start: int, fleet: Path | None, wanted: Wanted,
) -> int:  # fmt: skip
    """Sends the requests of TRACE at their recorded times (an open loop) and measures the answers.

    \b
    crosstie replay azure-2023-conversation --model llama-3.1-8b --rate 5 --for 60
    crosstie replay requests.csv --url http://server:8000 --model llama-3.1-8b

    TRACE is a shipped trace (azure-2023-conversation, azure-2023-code, mooncake-conversation), a file in a format
    that docs/catalog.md names, or what `crosstie serve --record` wrote. Prompts are filler of the recorded length
    and share beginnings where the trace has hash_ids; answers are as long as recorded (max_tokens and ignore_eos).
    Without --for or --requests the whole trace is sent, an hour or more. Coarse times, as Mooncake's, are spread
    within their steps. $OPENAI_API_KEY is sent if set.

    Exit status 1 if any request failed.
    """
    Address(url)
    promised = None if fleet is None else read_fleet(Catalog(), fleet)
    read = read_trace(find_trace(trace, Path()))
    longest = _checked(promised, model, class_name, read)
    requests: list[TimedRequest] = from_trace(
        read, class_name=class_name, requests_per_s=rate, requests=most, seconds=for_s, start=start, longest=longest
    )
    with progress() as on_progress:
        outcomes, spent = replayed(
            url, model, requests, speed=speed, api_key=os.environ.get(_KEY) or None,
            on_progress=on_progress,
        )  # fmt: skip
    result = result_of(outcomes, targets_of(promised) if promised else {})
    per_good = fleet_usd_per_good_million(promised, result) if promised else None
    wanted.give(
        lambda: result_document(result, spent, per_good),
        lambda details: replay_parts(result, spent, per_good, speed, details),
    )
    return 1 if result.failed else 0


def _checked(fleet: Fleet | None, model: str, class_name: str | None, trace: Trace) -> int | None:
    """The longest request that the fleet takes; None where nobody says."""
    if fleet is None:
        return None
    known = [one.name for one in fleet.classes]
    if class_name is not None and class_name not in known:
        raise BadInput(f"--class {class_name}: the fleet has {', '.join(known) or 'none'}")
    unknown = {one for one in trace.classes or () if one is not None} - set(known)
    if class_name is None and unknown:
        raise BadInput(
            f"{trace.file}: has requests of {', '.join(sorted(unknown))}, but the fleet has "
            f"{', '.join(known) or 'no class'}; --class NAME has them all say another"
        )
    lengths = [pool.max_context for pool in fleet.pools if model in (pool.model, pool.served_as)]
    if not lengths:
        raise BadInput(f"--model {model}: no pool of the fleet serves it")
    return max(lengths)

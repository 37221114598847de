"""`crosstie replay`: recorded requests sent to any OpenAI-compatible endpoint, at their times; `bench` with a trace."""

import os
from pathlib import Path

import click

from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.bench import measured, promised, traced
from crosstie.cli.bench_show import DETAILS
from crosstie.cli.options import file_option, real_option, text_option, whole_option
from crosstie.prove.bench.bench import Settings
from crosstie.prove.bench.loads import BenchLoad

_KEY = "OPENAI_API_KEY"


@click.command("replay")
@click.argument("trace", metavar="TRACE")
@click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="The gateway, or any OpenAI server.")
@text_option("--model", "M", "The model to ask for.", required=True)
@text_option("--class class_name", "NAME", "The class that requests say they belong to. [default: the trace's]")
@real_option("--rate", 1e-4, 1e6, "Requests a second. [default: the trace's]")
@real_option(
    "--speed", 0.01, 1000, "Of a server that is emulated X times as fast: all seconds are then its own.", default=1.0
)
@whole_option("--requests most", 1, 10**7, "The first N requests.")
@real_option("--for for_s", 0.01, 1e7, "The first S seconds.", metavar="S")
@whole_option("--start", 0, 10**9, "Leave out the first N requests.", default=0, show_default=False)
@file_option("--fleet", "Targets and prices of the fleet.")
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

    `crosstie bench URL --trace TRACE` is the same with everything else that a benchmark has, and keeps a file.
    Exit status 1 if any request failed.
    """
    lengths = traced(trace, start, class_name)
    if most is None and for_s is None and lengths.trace:
        most = max(len(lengths.trace) - start, 1)
    settings = Settings(
        lengths=lengths,
        requests=most,
        seconds=for_s,
        warm_up=0,
        speed=speed,
        api_key=os.environ.get(_KEY) or None,
        alone=True,
    )
    if fleet is not None:
        settings = promised(settings, fleet, model)
    return measured([url], model, [BenchLoad(requests_per_s=rate, by_trace=True)], settings, wanted)

"""`crosstie bench`: load on one endpoint or several, and one file of results."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.tokenizer import Tokenizer
from crosstie.catalog.traces import find_trace, read_trace
from crosstie.catalog.writing import write_text
from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.bench_show import DETAILS, bench_parts
from crosstie.cli.lazy import GroupedCommand
from crosstie.cli.options import (
    FILE,
    endpoint_options,
    file_option,
    flag_option,
    real_option,
    text_option,
    whole_option,
)
from crosstie.cli.progress import progress
from crosstie.cli.show import json_text
from crosstie.core.errors import BadInput, UnknownName
from crosstie.core.workload import Target
from crosstie.prove.bench.bench import Bench, Measured, Settings, bench, fitted
from crosstie.prove.bench.document import document
from crosstie.prove.bench.endpoint import BenchEndpoint, described, named, words_by_file
from crosstie.prove.bench.gpus import check, local_tool
from crosstie.prove.bench.loads import BenchLengths, BenchLoad, made, phases_of
from crosstie.prove.bench.resume import EarlierRun, read_earlier
from crosstie.prove.replay.outcomes import ClassTargets, targets_of
from crosstie.prove.replay.prompts import Sizing, corpus
from crosstie.prove.replay.texts import read_texts
from crosstie.wire.address import Address, is_loopback

_KEY = "OPENAI_API_KEY"
_CLIENTS = "1,4,16,64"
_TARGET = re.compile(r"(?:p(\d{1,2}(?:\.\d+)?)=)?(\d+(?:\.\d+)?)")
_USUAL_PERCENTILE = 0.95
_VARY = 0.2
_INTERRUPTED = 130
_NOT_WRITTEN = 2


@click.command(
    "bench", cls=GroupedCommand,
    groups={
        "Load": "--concurrency --rate --schedule --sessions --turns --pause --trace --class --poisson --lockstep "
                "--find-limit --ttft-ms --tpot-ms --fleet",
        "Requests": "--prompts --input --output --vary --shortest --requests --for --start --model --completions "
                    "--let-stop --field --tokenizer",
        "Measuring": "--warmup --repeat --resume --workers --gpu-metrics --speed --seed",
        "What it runs on, for validate and calibrate":
            "--accelerator --precision --engine --tp --gpus --layout --speculation",
    },
)  # fmt: skip
@click.argument("urls", nargs=-1, required=True, metavar="[NAME=]URL...")
@text_option("--concurrency", "N,N,...", f"Closed loop: so many clients, each load in turn. [default: {_CLIENTS}]")
@text_option("--rate", "X,X,...", "Open loop: requests a second, arriving by chance (Poisson).")
@text_option("--schedule", "SCHEDULE", "Open loop whose rate changes: ramp:2-20:300, burst:4-12:120, day:10:600.")
@whole_option("--sessions", 1, 10**5, "Conversations side by side: each prompt is the last, its answer and more.")
@whole_option("--turns", 1, 1000, "With --sessions: prompts of each.", default=5)
@real_option("--pause", 0.0, 1e5, "With --sessions: seconds between an answer and the next prompt.", metavar="S",
             default=1.0)  # fmt: skip
@text_option("--trace", "TRACE", "Lengths and shared prefixes of a trace, and its times unless --concurrency.")
@text_option("--class class_name", "NAME", "With --trace: of all its requests. [default: its own]")
@flag_option("--poisson", "With --trace and --rate: arrivals by chance, not the trace's own stretched.")
@flag_option("--find-limit", "The highest rate that keeps the targets, from --rate on where given.")
@text_option("--ttft-ms", "[pNN=]MS", "Target, such as p95=1000; a bare number is of the 95th percentile.")
@text_option("--tpot-ms", "[pNN=]MS", "Target, such as p90=50.")
@file_option("--fleet", "Targets by class, and prices, of the fleet that answers.")
@click.option(
    "--prompts", type=FILE, metavar="FILE|FOLDER",
    help="Text that prompts are cut from: recorded requests, chats, documents. [default: filler]",
)  # fmt: skip
@whole_option("--input input_tokens", 1, 10**7, "Tokens of a prompt.", default=1024)
@whole_option("--output output_tokens", 1, 10**6, "Tokens of an answer.", default=128)
@real_option("--vary", 0.0, 0.9, f"Lengths vary evenly by so much both ways. [default: {_VARY}; 0 with --lockstep]")
@real_option("--shortest", 0.01, 1.0, "Instead: lengths drawn evenly from X times to the whole.")
@flag_option("--lockstep", "All clients begin at once. [default: one by one, measured once all run]")
@whole_option("--requests most", 1, 10**7, "Of each run. [default: 10 a client, or --for]")
@real_option("--for for_s", 0.01, 1e7, "Seconds of each run. [default: 60 of an open loop]", metavar="S")
@whole_option("--start", 0, 10**9, "Leave out the trace's first N requests.", default=0, show_default=False)
@text_option("--model", "M", "The model to ask for, or its folder. [default: the only one served]")
@flag_option("--completions", "Ask /v1/completions, not chat.")
@flag_option("--let-stop", "Answers may end by themselves: no ignore_eos is sent.")
@text_option("--field fields", "KEY=JSON", "A field of every request, such as temperature=0.", multiple=True)
@file_option("--tokenizer", "The model's tokenizer.json: counts where the engine does not.")
@whole_option("--warmup", 0, 10**6, "Requests before each load, not counted. [default: one a client]")
@whole_option("--repeat", 1, 1000, "Runs of each load; intervals are over them.", default=1)
@flag_option("--resume", "Go on with the file of a run that ended early; the same settings only.")
@whole_option("--workers", 1, 512, "Processes that send. [default: as many as the load needs]")
@text_option("--gpu-metrics", "SOURCE", "nvidia-smi, amd-smi, an exporter's URL, or none. "
             "[default: what is here, for a local endpoint]", multiple=True)  # fmt: skip
@real_option("--speed", 0.01, 1000, "Of a server that is emulated X times as fast: all seconds are then its own.",
             default=1.0, show_default=False)  # fmt: skip
@whole_option("--seed", 0, 2**31, "For lengths and arrivals.", default=0)
@file_option("-o --output-file target", "Where results go. [default: bench.json]")
@endpoint_options
@answer_options(DETAILS)
def command(
    urls: tuple[str, ...], concurrency: str | None, rate: str | None, schedule: str | None, sessions: int | None,
    turns: int, pause: float,
    trace: str | None, class_name: str | None, poisson: bool, find_limit: bool, ttft_ms: str | None,
    tpot_ms: str | None, fleet: Path | None, prompts: Path | None, input_tokens: int, output_tokens: int,
    vary: float | None, shortest: float | None, lockstep: bool, most: int | None, for_s: float | None, start: int,
    model: str | None, completions: bool, let_stop: bool, fields: tuple[str, ...], tokenizer: Path | None,
    warmup: int | None, repeat: int, resume: bool, workers: int | None, gpu_metrics: tuple[str, ...], speed: float,
    seed: int, target: Path | None, wanted: Wanted, **given: str,
) -> int:  # fmt: skip
    """Sends load to endpoints and measures TTFT, TPOT and throughput with intervals, and the GPUs' power.

    \b
    crosstie bench http://server:8000 --concurrency 1,8,64 --repeat 3
    crosstie bench http://server:8000 --rate 2,4,8 --for 120
    crosstie bench http://server:8000 --trace mooncake-conversation --rate 2
    crosstie bench http://gateway:8080 --trace trace.jsonl --fleet fleet.toml
    crosstie bench http://server:8000 --schedule day:10:600 --ttft-ms p95=1000
    crosstie bench http://server:8000 --sessions 16 --turns 6 --prompts ./src
    crosstie bench http://server:8000 --find-limit --ttft-ms p95=1000
    crosstie bench mi300x=http://a:8000 h200=http://b:8000 --tp 1 --repeat 5

    By default clients of a closed loop start one by one, and only the time counts in which all are at work: steady,
    as in production and as `compare` predicts. --lockstep starts all at once with equal lengths, as most benchmarks
    do. The file says which, and `validate` predicts that one.

    Any OpenAI-compatible server will do. Prompts are generated English text; --prompts cuts them from your own,
    since the number of kept drafts depends on the text. The engine's /tokenize (or --tokenizer) gives them their
    exact lengths. Several endpoints take turns under each load. $OPENAI_API_KEY is sent if set. The file is written
    after every load: Ctrl-C, a crash or a kill loses at most one, and --resume continues.

    `crosstie validate` and `crosstie calibrate` read the result file; --accelerator, --tp and the like add what the
    endpoint does not say about itself. `calibrate` learns from closed loops; open ones are only validated.

    Exit status 1 if a request failed, or no rate keeps the targets.
    """
    loads = _loads(concurrency, rate, trace is not None, poisson, find_limit)
    if schedule is not None:
        if concurrency or rate or sessions or find_limit or poisson or most or for_s:
            raise BadInput("--schedule says when requests come, and how many: leave --concurrency, --rate, --sessions, "
                           "--find-limit, --poisson, --requests and --for out")  # fmt: skip
        phases_of(schedule)
        loads = [BenchLoad(schedule=schedule)]
    if sessions is not None:
        if concurrency or rate or trace or find_limit or completions or lockstep:
            raise BadInput("--sessions is a load of its own, of chats: leave --concurrency, --rate, --trace, "
                           "--find-limit, --completions and --lockstep out")  # fmt: skip
        loads = [BenchLoad(clients=sessions, turns=turns, pause_s=pause)]
    if find_limit and fleet is not None:
        raise BadInput("--find-limit is of --ttft-ms and --tpot-ms: leave --fleet out")
    usual = BenchLengths(input_tokens, output_tokens)
    lengths = traced(trace, start, class_name) if trace else _lengths(usual, vary, shortest, lockstep)
    settings = Settings(
        lengths=lengths, requests=most, seconds=for_s, repeats=repeat, warm_up=warmup, lockstep=lockstep,
        targets=ClassTargets(_target("--ttft-ms", ttft_ms), _target("--tpot-ms", tpot_ms)),
        speed=speed, seed=seed, senders=workers, api_key=os.environ.get(_KEY) or None,
        tokenizer=str(tokenizer) if tokenizer else None, chat=not completions, ignore_eos=not let_stop,
        more=dict(map(_field, fields)), prompts=read_texts(prompts) if prompts else None,
    )  # fmt: skip
    if fleet is not None:
        settings = promised(settings, fleet, model)
    file = target or Path("bench.json")
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise BadInput(f"{file}: is no file that can be written")
    sizing = None if tokenizer is None or prompts else _sizing(tokenizer)
    return measured(
        urls, model, loads, settings, wanted, file=file, resume=resume, limit=find_limit, sizing=sizing,
        gpus=gpu_metrics, given=given,
    )  # fmt: skip


def measured(
    urls: Sequence[str], model: str | None, loads: Sequence[BenchLoad], settings: Settings, wanted: Wanted, *,
    file: Path | None = None, resume: bool = False, limit: bool = False, sizing: Sizing | None = None,
    gpus: tuple[str, ...] = (), given: Mapping[str, str] | None = None,
) -> int:  # fmt: skip
    """Whatever the command was that asked for it. `file`: where results are kept, load by load."""
    for load in loads if settings.lengths.trace else ():
        # What a trace has not is said before anything is asked.
        made(load, settings.lengths, settings.count(load), settings.run_seconds(load), settings.seed)
    sources = _sources(gpus, urls)
    kept = True

    def keep(results: Bench) -> None:
        nonlocal kept
        kept = file is None or _keep_if_it_can(file, results)

    with progress("asking") as on_progress:
        endpoints = [_endpoint(url, model, settings, given or {}) for url in urls]
        if not gpus and all(endpoint.emulated for endpoint in endpoints):
            sources = ()
        settings = fitted(settings, endpoints)
        earlier = read_earlier(file) if resume and file else EarlierRun()
        earlier.check(document(Bench(settings, [Measured(endpoint, Sizing()) for endpoint in endpoints])))
        results = bench(
            endpoints, loads, settings, limit=limit, sizing=sizing, gpus=sources, earlier=earlier,
            on_progress=on_progress, on_point=keep,
        )  # fmt: skip
    keep(results)
    wanted.give(lambda: document(results), lambda details: bench_parts(results, details))
    if kept and file and not wanted.as_json:
        click.echo(f"written to {file}", err=True)
    if not kept:
        return _NOT_WRITTEN
    if results.interrupted:
        return _INTERRUPTED
    failed = any(point.failed for own in results.measured for point in own.points if not limit)
    return int(failed or any(own.limit and own.limit.requests_per_s is None for own in results.measured))


def traced(name: str, start: int, class_name: str | None) -> BenchLengths:
    if class_name is not None and not class_name.isprintable():
        raise BadInput("--class: has signs that no header can carry")
    return BenchLengths(trace=read_trace(find_trace(name, Path())), start=start, class_name=class_name)


def promised(settings: Settings, file: Path, model: str | None) -> Settings:
    """Held against a fleet: what it promised each class, its bill, and the longest request that it takes."""
    fleet, lengths = read_fleet(Catalog(), file), settings.lengths
    known = [served_class.name for served_class in fleet.classes]
    if lengths.class_name is not None and lengths.class_name not in known:
        raise BadInput(f"--class {lengths.class_name}: the fleet has {', '.join(known) or 'none'}")
    of_trace = lengths.trace.classes or () if lengths.trace and lengths.class_name is None else ()
    if unknown := {name for name in of_trace if name is not None} - set(known):
        raise BadInput(
            f"{lengths.trace and lengths.trace.file}: has requests of {', '.join(sorted(unknown))}, but the fleet has "
            f"{', '.join(known) or 'no class'}; --class NAME has them all say another"
        )
    longest = [pool.max_context for pool in fleet.pools if model in (None, pool.model, pool.served_as)]
    if not longest:
        raise BadInput(f"--model {model}: no pool of the fleet serves it")
    targets = replace(settings.targets, by_class=targets_of(fleet).by_class)
    return replace(settings, fleet=fleet, targets=targets, lengths=replace(lengths, longest=max(longest)))


def _keep_if_it_can(file: Path, results: Bench) -> bool:
    """A disk that is full now may have room after the next load; what was measured so far is no reason to end."""
    try:
        write_text(file, json_text(document(results)) + "\n")
    except BadInput as error:
        click.echo(f"crosstie: {error}", err=True)
        return False
    return True


def _loads(concurrency: str | None, rate: str | None, traced: bool, poisson: bool, limit: bool) -> list[BenchLoad]:
    if concurrency and rate:
        raise BadInput("--concurrency is a closed loop and --rate an open one: give one of them")
    if poisson and not (traced and rate):
        raise BadInput("--poisson is for --trace with --rate: a rate without a trace arrives by chance already")
    if limit and concurrency:
        raise BadInput("--find-limit looks for a rate: give --rate X to begin at, or nothing")
    if rate:
        return [BenchLoad(requests_per_s=x, by_trace=traced and not poisson) for x in _numbers("--rate", rate)]
    if limit:
        return [BenchLoad(by_trace=traced)]
    if traced and not concurrency:
        return [BenchLoad(by_trace=True)]
    counts = _numbers("--concurrency", concurrency or _CLIENTS)
    if any(count != int(count) or not 1 <= count <= 100_000 for count in counts):
        raise BadInput(f"--concurrency {concurrency}: must be whole numbers from 1 to 100,000")
    return [BenchLoad(clients=int(count)) for count in counts]


def _numbers(option: str, text: str) -> list[float]:
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        raise BadInput(f"{option} {text}: must be numbers with commas between them") from None
    if not all(1e-4 <= number <= 1e6 for number in numbers):
        raise BadInput(f"{option} {text}: must be from 0.0001 to 1,000,000")
    return numbers


def _lengths(usual: BenchLengths, vary: float | None, shortest: float | None, lockstep: bool) -> BenchLengths:
    if vary is not None and shortest is not None:
        raise BadInput("--vary and --shortest both say how lengths differ: give one of them")
    if shortest is not None:
        return replace(usual, shortest=shortest)
    return replace(usual, vary=vary if vary is not None else 0.0 if lockstep else _VARY)


def _target(option: str, text: str | None) -> Target | None:
    if text is None:
        return None
    match = _TARGET.fullmatch(text)
    if not match or not float(match[2]) > 0 or (match[1] and not 0 < float(match[1]) < 100):
        raise BadInput(f"{option} {text}: must be milliseconds, or a percentile and milliseconds as p95=1000")
    percentile = float(match[1]) / 100 if match[1] else _USUAL_PERCENTILE
    return Target(seconds=float(match[2]) / 1e3, percentile=percentile)


def _field(text: str) -> tuple[str, object]:
    key, sign, value = text.partition("=")
    try:
        return key, json.loads(value) if sign and key else _no_field(text)
    except ValueError:
        return _no_field(text)


def _no_field(text: str) -> tuple[str, object]:
    raise BadInput(f"--field {text}: must be a name and JSON, such as temperature=0 or user='\"me\"'")


def _sizing(file: Path) -> Sizing:
    """Tokens of our words, by the model's own tokenizer."""
    reader = Tokenizer(file)
    words = words_by_file(reader)
    if words:
        return Sizing().with_words(words, file.name)
    sample = corpus()[:100_000].decode("ascii")
    return Sizing(len(sample) / len(reader.encode(sample)), counted_by=file.name)


def _sources(gpu_metrics: Sequence[str], urls: Sequence[str]) -> tuple[str, ...]:
    if gpu_metrics == ("none",):
        return ()
    for gpu_metric in gpu_metrics:
        check(gpu_metric)
    if gpu_metrics:
        return tuple(gpu_metrics)
    tool = local_tool()
    local = all(is_loopback(Address(named(url)[1]).host) for url in urls)
    return (tool,) if tool and local else ()


def _endpoint(url: str, model: str | None, settings: Settings, given: Mapping[str, str]) -> BenchEndpoint:
    """With the catalog's names where what is served, or what the endpoint is called, has one."""
    catalog = Catalog()
    name, _ = named(url)
    try:
        known = {"accelerator": catalog.accelerator(name).id}
    except UnknownName:
        known = {}
    known |= {key: value for key, value in given.items() if value}
    return described(url, model, settings.api_key, settings.chat, known, catalog, tried=not settings.alone)

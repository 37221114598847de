"""The `crosstie` command. Each subcommand is one file, imported only when it runs."""

import io
import os
import sys

import click

from crosstie.cli.lazy import LazyGroup
from crosstie.core.errors import BadParameter, CrosstieError
from crosstie.core.version import __version__

SECTIONS = {
    "Decide": {
        "fit": "how many GPUs hold a model, and what room they leave for requests",
        "compare": "one model under one load on several accelerators, and why one wins",
        "scorecard": "accelerators by axis and scenario: who wins, by how much, how sure, every cell sourced",
        "reconcile": "two saved answers: which assumption makes which part of their difference",
        "schedule": "what to order now, what to rent until it comes, quarter by quarter, with announced parts",
        "init": "a first workload or fleet file, from five questions",
        "plan": "the cheapest fleet for your traffic and latency targets, and what would change it",
        "simulate": "a fleet under traffic: percentiles, cost, queues, policies side by side, a pool that dies",
        "ui": "a page on this machine: change a workload and see the fleet change",
        "tco": "what owning costs over years and per million tokens, beside rent, an API and waiting",
        "catalog": "accelerators, models, stacks and prices, each number with its source",
    },
    "Port": {
        "doctor": "what an engine would trip over on this machine: GPUs, drivers, limits, software",
        "preflight": "what breaks on ROCm before anyone rents the GPU: FP8, kernels, graph capture, CUDA source",
        "recipe": "how to start a model's engines, or a fleet's: flags, images and devices, each with its reason",
        "convert": "an FP8 checkpoint from one dialect to the other, exactly",
        "port": "every step of a port in order, with commands, person-days and what is done",
        "diff": "the first module whose numbers differ between two machines, and the likely cause",
    },
    "Run": {
        "serve": "one OpenAI endpoint over the fleet, each request to the cheapest pool that is fast enough",
        "pick": "where Envoy's requests go: an endpoint picker of the Gateway API Inference Extension",
        "keys": "API keys of the gateway: models, limits and budgets of each",
        "usage": "requests, tokens and dollars by key, model, pool, class or day",
        "explain": "where a running gateway would send a request, and why",
        "admin": "pools of a running gateway: state, drain, add, remove, weights, decisions",
        "scale": "how many replicas of each pool, by cost and forecast: KEDA, HPA, patches, hooks, a dry run",
        "emulate": "a fleet without its accelerators: replicas that answer in the predicted time, and faults",
    },
    "Prove": {
        "loop": "predict a replica, measure it, learn from that and plan again: one report",
        "bench": "how much load endpoints carry, side by side: TTFT, TPOT, throughput, limits",
        "parity": "whether two endpoints give the same model: agreement, KL, divergence, noise, a verdict",
        "replay": "recorded requests sent to an endpoint at their times: latencies against targets",
        "demo": "a mixed fleet planned, emulated and served on this machine, in a minute, without a GPU",
        "profile": "where a traced step's time goes, beside its roofline, and what could be recovered",
        "probe": "what the GPU of this machine reaches, measured through PyTorch",
        "validate": "predictions against measured results: coverage, error, rank, intervals",
        "calibrate": "fit the constants to measured results, with cross-validated errors",
        "tax": "what software leaves of each accelerator's roofline, release by release",
        "review": "a saved plan against what production recorded, and what to demand in a contract",
        "claims": "what public articles assert about AMD and NVIDIA, checked one by one",
    },
    "Assistants": {
        "mcp": "these answers as read-only tools for an AI assistant (Model Context Protocol)",
    },
    "Shell": {
        "completion": "completion of commands, models and accelerators in your shell",
    },
}

# Commands of packages beside this one, which they bring as entry points.
OTHERS = {
    **dict.fromkeys(("serve", "pick", "keys", "usage", "scale", "emulate", "demo"), "crosstie-gateway"),
    **dict.fromkeys(("convert", "port", "diff", "profile"), "crosstie-port"),
}

# What a newcomer needs; the others are a line of names in the help, and `--commands` describes all.
FIRST = {
    "fit", "compare", "plan", "tco", "doctor", "preflight", "recipe", "port", "serve", "emulate", "bench", "loop",
    "demo",
}  # fmt: skip

# Parameters of the library whose option has another name.
_OPTIONS = {"features": "--with"}


def _all_commands(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if not asked:
        return
    group, formatter = ctx.command, ctx.make_formatter()
    assert isinstance(group, LazyGroup)
    group.describe(formatter, set(group.list_commands(ctx)))
    click.echo(formatter.getvalue().strip())
    ctx.exit()


@click.group(
    cls=LazyGroup,
    sections=SECTIONS,
    home="crosstie.cli.",
    first=FIRST,
    others=OTHERS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="crosstie")
@click.option("--commands", is_flag=True, is_eager=True, expose_value=False, callback=_all_commands,
              help="Describe every command and exit.")  # fmt: skip
def crosstie() -> None:
    """Run LLM inference on AMD and NVIDIA accelerators as one fleet.

    \b
    Start here:
      crosstie fit llama-3.1-70b --on mi300x,h100-sxm
      crosstie compare llama-3.1-70b --on mi300x,h200 --input 4096 --output 1024
      crosstie plan assistant
      crosstie catalog show mi300x

    A model is a catalog name, a Hugging Face model directory or a config.json. Every command takes
    --json; answers come first and -v adds the details. They are as wide as the terminal, or as COLUMNS
    says, or 80 columns in a pipe. Exit status: 0 answered, 1 the answer is no (nothing fits), 2 the question was wrong.
    """


def run() -> None:
    """Entry point: a user's mistake is one line on stderr and status 2, never a traceback."""
    _replace_what_is_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a sign gets a question mark, not a traceback.
            stream.reconfigure(errors="replace")
    try:
        status = crosstie.main(prog_name="crosstie", standalone_mode=False)
        sys.stdout.flush()
    except BadParameter as error:
        fail(as_typed(error))
    except CrosstieError as error:
        fail(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(0)
    except click.UsageError as error:
        hint = f" See `{error.ctx.command_path} --help`." if error.ctx else ""
        said = error.format_message().rstrip(".")
        fail(f"{said}{'' if said.endswith('?') else '.'}{hint}")
    except click.ClickException as error:
        fail(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        # The reader went away (`| head`): nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        fail(f"cannot write the answer: {error.strerror}")
    sys.exit(status if isinstance(status, int) else 0)


def _replace_what_is_closed() -> None:
    """What is written to a stream that whoever started it has closed (`2>&-`) goes nowhere: above all not to the file
    or the client that would be opened under its number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def as_typed(error: BadParameter) -> str:
    """By the option, not the parameter of the library."""
    return f"{_OPTIONS.get(error.parameter, f'--{error.parameter}')} {error.rest}"


def fail(message: str) -> None:
    """One line, whatever the message quotes."""
    click.echo(f"crosstie: {' '.join(message.split())}", err=True)
    sys.exit(2)

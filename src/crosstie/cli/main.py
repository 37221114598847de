"""The `crosstie` command. Each subcommand is one file, imported only when it runs."""

import io
import os
import sys
import tomllib
from pathlib import Path

import click

from crosstie.cli.lazy import LazyGroup
from crosstie.core.errors import BadParameter, CrosstieError
from crosstie.core.version import __version__

_COMMANDS = tomllib.loads((Path(__file__).parent / "data" / "commands.toml").read_text(encoding="utf-8"))
SECTIONS: dict[str, dict[str, str]] = _COMMANDS["sections"]
FIRST = frozenset(_COMMANDS["first"])
OTHERS = {name: package for package, names in _COMMANDS["packages"].items() for name in names}

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

"""`crosstie preflight capture`: would a graph capture of a PyTorch function succeed, and stay true at replay."""

from typing import Any

import click

from crosstie.cli.findings_show import report, report_options
from crosstie.cli.progress import progress
from crosstie_port.capture.parts import DEFAULT
from crosstie_port.capture.report import preflight_capture


@click.command("capture")
@click.argument("target", metavar="MODULE:CALLABLE")
@click.option(
    "--inputs",
    required=True,
    metavar="MODULE:FACTORY",
    help="Makes the arguments: FACTORY(), FACTORY(device) or FACTORY(device, seed). MODULE: may be left out.",
)
@click.option(
    "--state",
    metavar="MODULE:FACTORY",
    help="Makes what the function keeps between calls, its first argument; a class State is found by itself.",
)
@click.option("--all", "every", is_flag=True, help="Every function of MODULE that takes these inputs.")
@click.option(
    "--on",
    default=DEFAULT,
    show_default=True,
    metavar="PART",
    help="The part that the device stands for: an accelerator of the catalog, or an instruction set such as gfx942.",
)
@report_options
def command(target: str, inputs: str, state: str | None, every: bool, on: str, **reporting: Any) -> int:
    """Would a graph capture of a function or torch module succeed, and would its replays be true?

    \b
    crosstie preflight capture my_module:step --inputs my_module:inputs
    crosstie preflight capture ./cases.py:CASES --inputs inputs
    crosstie preflight capture './cases.py:CASES[decode]' --inputs inputs --json
    crosstie preflight capture my_module:step --inputs inputs --on mi300x

    MODULE is a dotted name or a .py file; CALLABLE a function, a module, a class or factory of one, an entry of a
    dictionary, or a whole dictionary. The function runs on the CPU, on a stand-in for the device: warm-up, capture,
    replays, beside plain calls. Verdicts: ok; error, capture fails; stale, replays give other numbers than calls;
    unknown, something ran that cannot be followed.
    """
    with progress() as on_progress:
        found = preflight_capture(target, inputs=inputs, state=state, every=every, on=on, on_progress=on_progress)
    title = f"Graph capture of {target}, on a stand-in for {found.stand_in}"
    more = {"target": target, "stand_in": found.stand_in}
    return report(title, found.findings, found.verdicts, **reporting, more=more)

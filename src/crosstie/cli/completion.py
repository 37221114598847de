"""`crosstie completion`: a script with which a shell completes commands, options, models and accelerators."""

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from crosstie.catalog.writing import write_text
from crosstie.cli.main import crosstie
from crosstie.cli.options import flag_option, json_option
from crosstie.cli.show import tell
from crosstie.core.errors import BadInput


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@flag_option("--install", "Put it where new shells load it from; once is enough.")
@json_option
def command(shell: str, install: bool, as_json: bool) -> int:
    """Completion of commands, options, models and accelerators in your SHELL.

    \b
    crosstie completion bash --install
    crosstie completion zsh > ~/.zfunc/_crosstie

    --install writes the script to $XDG_DATA_HOME/crosstie and one line to ~/.bashrc or ~/.zshrc that loads it; for
    fish it is one file in its own folder. Names come from the catalog, your own files included.
    """
    made = get_completion_class(shell)
    assert made is not None, "click knows these three"
    script = made(crosstie, {}, "crosstie", "_CROSSTIE_COMPLETE").source()
    if not install:
        tell({"shell": shell, "script": script}, script, as_json=as_json)
        return 0
    try:
        written = _install(shell, script)
    except (OSError, RuntimeError) as error:
        raise BadInput(f"cannot be installed: {getattr(error, 'strerror', None) or error}") from None
    files = list(map(str, written))
    told = f"written to {' and '.join(files)}; new shells complete crosstie"
    tell({"shell": shell, "files": files}, told, as_json=as_json)
    return 0


def _install(shell: str, script: str) -> list[Path]:
    """The files that it is in; nothing is added twice."""
    home = Path.home()
    if shell == "fish":
        target = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish" / "completions" / "crosstie.fish"
    else:
        target = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "crosstie" / f"completion.{shell}"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, script + "\n")
    if shell == "fish":
        return [target]
    rc = Path(os.environ.get("ZDOTDIR") or home) / ".zshrc" if shell == "zsh" else home / ".bashrc"
    line = f'[ -r "{target}" ] && . "{target}"\n'
    before = rc.read_text(encoding="utf-8") if rc.exists() else ""
    if line not in before:
        with rc.open("a", encoding="utf-8") as file:
            file.write(line if not before or before.endswith("\n") else f"\n{line}")
    return [target, rc]

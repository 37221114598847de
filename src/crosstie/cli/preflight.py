"""`crosstie preflight`: what breaks when a model, a kernel or a source moves from CUDA to ROCm, found without a GPU."""

import click

from crosstie.cli.lazy import LazyGroup

COMMANDS = {
    "model": "a checkpoint: FP8 dialect, kernels, memory, features, and a verdict per accelerator",
    "kernels": "Triton kernels, compiled ahead of time for each target",
    "capture": "a PyTorch function: would a graph capture of it succeed, and stay true at replay",
    "source": "CUDA C++ and Python sources: what HIPIFY converts, and the hazards that it does not see",
}
OTHERS = dict.fromkeys(("kernels", "capture", "source"), "crosstie-port")


class PreflightGroup(LazyGroup):
    """A first argument that names no command is the directory of a model."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in COMMANDS and args[0] not in ("-h", "--help"):
            args = ["model", *args]
        return super().parse_args(ctx, args)


@click.group(
    "preflight", cls=PreflightGroup, sections={"Commands": COMMANDS}, home="crosstie.cli.preflight_", others=OTHERS,
    prefix="preflight.",
)  # fmt: skip
def command() -> None:
    """What breaks when a model moves from CUDA to ROCm, found without a GPU, with evidence and remedy.

    \b
    crosstie preflight ./my-model --on mi300x,mi355x --engine vllm
    crosstie preflight kernels ./my_kernels.py --on mi300x,h100-sxm
    crosstie preflight capture my_module:step --inputs my_module:inputs
    crosstie preflight source ./csrc --on mi300x

    A directory that is named like a command is given as ./kernels. Nothing is run on an accelerator: each finding
    says what it rests on. Exit status: 0 nothing as grave as --fail-on, 1 something is, 2 the check could not run.
    """

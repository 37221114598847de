"""`crosstie profile`: where a step's time goes."""

from pathlib import Path

import click
import msgspec
from rich.text import Text

from crosstie.catalog.library import Catalog
from crosstie.cli.options import FILE, complete_accelerators, complete_models, json_option, verbose_option
from crosstie.cli.replica import kv_option, stack_option
from crosstie.cli.show import closing, console, print_json, say, show_table
from crosstie.core.errors import BadInput
from crosstie.core.figures import plural, seconds, share, significant
from crosstie_port.profile.roofline import StepRoofline, deployment_of, roofline
from crosstie_port.profile.shares import KernelShare, Profile, Share, profile
from crosstie_port.profile.trace import read_trace

_DETAILS = "the kernels that take longest, each with its class"
_MOST = 25
_WIDEST = 78


@click.command("profile")
@click.argument("trace", type=FILE)
@click.option("--model", metavar="M", shell_complete=complete_models, help="Whose step it is: also the roofline of it.")
@click.option(
    "--on", "accelerator", metavar="A", shell_complete=complete_accelerators, help="With --model: where it ran."
)
@click.option("--batch", type=int, default=1, show_default=True, metavar="N", help="Sequences that decode in the step.")
@click.option("--context", type=int, default=1024, show_default=True, metavar="N", help="Tokens that each has.")
@click.option("--prefill", type=int, default=0, show_default=True, metavar="N", help="Prompt tokens in the step.")
@click.option("--tp", type=int, default=1, show_default=True, metavar="N", help="GPUs that share the model.")
@click.option("--precision", default="native", show_default=True, metavar="P", help="How weights are stored.")
@kv_option
@stack_option
@click.option("--steps", type=int, metavar="N", help="Steps in the trace. [default: those that it marks, or 1]")
@click.option("--device", metavar="D", help="Which GPU of the trace. [default: the busiest]")
@verbose_option(_DETAILS)
@json_option
def command(
    trace: Path, model: str | None, accelerator: str | None, batch: int, context: int, prefill: int, tp: int,
    precision: str, kv: str, stack: str | None, steps: int | None, device: str | None, verbose: bool, as_json: bool,
) -> int:  # fmt: skip
    """Where the time of a traced step goes, and what of it could be recovered.

    \b
    crosstie profile trace.json.gz
    crosstie profile trace.json.gz --model llama-3.1-8b --on h200 \\
        --batch 32 --context 2048
    crosstie profile 4711_kernel_trace.csv --steps 10
    crosstie profile report.sqlite -v

    TRACE is a Chrome trace of torch.profiler (.json, .json.gz); rocprofv3's CSV, JSON or database; or of Nsight
    Systems `nsys export --type sqlite` or `nsys stats --report cuda_gpu_trace --format csv`. Kernels are sorted by
    name; one that is not known is counted and named, never guessed. With --model and --on, what the performance
    model predicts for such a step and the roofline stand beside it. docs/profile.md says how kernels are sorted.
    """
    if (model is None) != (accelerator is None):
        raise BadInput("--model and --on go together: the roofline is that of a model on an accelerator")
    asked: StepRoofline | None = None
    if model is not None and accelerator is not None:
        where = deployment_of(Catalog(), model, accelerator, tp=tp, precision=precision, kv=kv, stack=stack)
        asked = roofline(where, batch=batch, context=context, prefill=prefill)
    found = profile(read_trace(trace), steps=steps, device=device, roofline=asked)
    print_json(msgspec.to_builtins(found)) if as_json else show(found, verbose)
    return 0


def show(found: Profile, verbose: bool) -> None:
    out = console()
    of = f"  {found.made_by}, {plural(found.steps, 'step')}, device {found.device}"
    others = f"; {plural(found.others, 'other device')} in it left out" if found.others else ""
    say(out, Text.assemble((Path(found.file).name, "bold"), of + others))
    busy = f", busy {share(found.busy_s / found.step_s)}" if found.timeline and found.step_s else ""
    say(out, f"  a step takes {seconds(found.step_s)}{busy}, {significant(found.launches)} kernels and copies")
    for phase in found.phases:
        carried = f"{significant(phase.sequences)} sequences"
        carried += f" and {significant(phase.prompt_tokens)} prompt tokens" if phase.prompt_tokens else ""
        say(out, f"  {plural(phase.steps, 'step')} {phase.name}, {carried}: {seconds(phase.step_s)} each, the GPU "
            f"busy for {seconds(phase.busy_s)}", hang=4)  # fmt: skip
    beside = found.roofline
    columns = ["where it goes", ">time", ">share"]
    if beside is not None:
        columns += [">predicted", ">roofline", ">recoverable"]
        said = f"{beside.batch} sequences with {beside.context:,} tokens"
        prompt = f", {beside.prefill:,} prompt tokens" if beside.prefill else ""
        say(out, f"  beside it: {beside.deployment}, {said}{prompt}: {seconds(beside.step_s)} predicted, "
            f"{seconds(beside.ideal_step_s)} at the roofline")  # fmt: skip
    show_table(out, columns, [_row(one, found, beside is not None) for one in found.shares])
    if found.bookkeeping:
        parts = ", ".join(f"{name} {seconds(spent)}" for name, spent in found.bookkeeping.items())
        say(out, f"  bookkeeping: {parts}", hang=15)
    if found.hidden_collectives_s:
        say(out, f"  collectives behind other kernels, which cost nothing: {seconds(found.hidden_collectives_s)}")
    for sentence in found.verdict:
        say(out, f"- {sentence}")
    if verbose:
        show_table(out, ["~kernel", "class", ">calls", ">time"], [_kernel_row(one) for one in found.kernels[:_MOST]])
    else:
        closing(out, _DETAILS)


def _row(one: Share, found: Profile, beside: bool) -> list[str]:
    cells = [one.sort, seconds(one.seconds), share(one.fraction)]
    if beside:
        saved = share(one.recoverable_s / found.step_s) if one.recoverable_s and found.step_s else "-"
        cells += ["-" if value is None else seconds(value) for value in (one.predicted_s, one.roofline_s)] + [saved]
    return cells


def _kernel_row(one: KernelShare) -> list[str]:
    # What every name of PyTorch's begins with says nothing; --json has names whole.
    name = one.name.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")
    name = name if len(name) <= _WIDEST else f"{name[: _WIDEST - 3]}..."
    return [name, f"{one.sort}, {one.what}" if one.what else one.sort, significant(one.calls), seconds(one.seconds)]

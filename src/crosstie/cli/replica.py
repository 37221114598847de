"""Options that describe a replica and the load on it, which `fit`, `compare` and `tco` share."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import click

from crosstie.catalog.library import Catalog, names_in
from crosstie.catalog.precision import PRECISIONS
from crosstie.cli.options import Decorator, gathered, option_group
from crosstie.core.deployment import KV_FORMATS, Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.model import Model
from crosstie.core.question import USUAL
from crosstie.core.speculation import TEXTS
from crosstie.decide.compare.apart import ApartEntry, compare_apart
from crosstie.decide.compare.scaling import Scaling, scaling
from crosstie.decide.compare.scorecard import Load, Scorecard, compare
from crosstie.port.preflight.stored import read_stored

kv_option: Decorator = click.option(
    "--kv",
    type=click.Choice(list(KV_FORMATS)),
    default=USUAL.kv_format,
    show_default=True,
    help="Format of the KV cache.",
)
PRECISION_HELP = f"How weights are stored: {', '.join(PRECISIONS)}."
stack_option: Decorator = click.option(
    "--stack", metavar="S", help="Engine: vllm, sglang, tensorrt-llm, llama.cpp. [default: vllm, or llama.cpp for GGUF]"
)


# What is drafted, and how much of it is kept.
speculation_options = option_group(
    click.option("--speculation", metavar="METHOD:N",
                 help="Draft N tokens a step: mtp:3, eagle3:3, dspark:5, ngram:4 or draft:4:MODEL."),
    click.option("--text", type=click.Choice(TEXTS), default="chat", show_default=True,
                 help="Kind of text, on which it depends how many drafts are kept."),
    click.option("--acceptance", type=float, metavar="TOKENS", help="Tokens kept a step, where you measured them."),
)  # fmt: skip


def layout_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--tp, --pp, --ep and --dp, which a command gets as `layout`: None where the user said nothing at all."""

    @wraps(function)
    def called(*, tp: int | None, pp: int | None, ep: int | None, dp: int | None, **given: Any) -> Any:
        said = {name: ranks for name, ranks in (("tp", tp), ("pp", pp), ("ep", ep), ("dp", dp)) if ranks is not None}
        return function(layout=Parallelism(**said) if said else None, **given)

    return option_group(
        click.option("--tp", type=int, metavar="N", help="Tensor-parallel ranks."),
        click.option("--pp", type=int, metavar="N", help="Pipeline stages."),
        click.option("--ep", type=int, metavar="N", help="Groups over which experts are spread."),
        click.option("--dp", type=int, metavar="N", help="Attention replicas that share the experts."),
    )(called)


def named_model(catalog: Catalog, name: str, precision: str) -> tuple[Model, str]:
    """A model by its name or files, and how its weights are stored: those of a GGUF file as they are."""
    if not name.endswith(".gguf"):
        return catalog.model(name), precision
    stored = read_stored(catalog, name)
    return stored.model(catalog), stored.precision if precision == USUAL.precision else precision


class ReplicaOptions(NamedTuple):
    """What `replica_options` were given as."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    precision: str
    layout: Parallelism | None
    kv: str
    stack: str | None
    speculation: str | None
    text: str
    acceptance: float | None

    @property
    def load(self) -> Load:
        return Load(self.concurrency, self.input_tokens, self.output_tokens)

    def _kind(self, catalog: Catalog, model: Model, precision: str = "") -> dict[str, Any]:
        """What says how a replica is made, apart from its layout."""
        drafts = None
        if self.speculation is not None:
            drafts = catalog.speculation(model, self.speculation, text=self.text, length=self.acceptance)
        elif self.acceptance is not None:
            raise BadInput("--acceptance is about --speculation, which is not given")
        kind = {"precision": precision or self.precision, "kv_format": self.kv, "stack": self.stack}
        return {**kind, "speculation": drafts}

    def scorecard(self, catalog: Catalog, model: str, accelerators: str) -> Scorecard:
        asked, stored = named_model(catalog, model, self.precision)
        chosen, kind = catalog.accelerators_named(accelerators, self.stack), self._kind(catalog, asked, stored)
        return compare(catalog, asked, chosen, self.load, parallelism=self.layout, **kind)

    def scaled(self, catalog: Catalog, model: str, accelerators: str, gpus: str) -> list[Scaling]:
        """One service on each of these numbers of GPUs, "8,16,32"."""
        if self.layout is not None:
            raise BadInput("--gpus chooses the layout of each size itself: leave --tp, --pp, --ep and --dp out")
        counts = names_in(gpus)
        if not all(count.isdigit() for count in counts):
            raise BadInput(f"--gpus '{gpus}': write numbers of GPUs of at least 1, such as 8,16,32")
        asked, chosen = catalog.model(model), catalog.accelerators_named(accelerators, self.stack)
        return scaling(catalog, asked, chosen, list(map(int, counts)), self.load, **self._kind(catalog, asked))

    def apart(self, catalog: Catalog, card: Scorecard, layout: str) -> list[ApartEntry]:
        """The scorecard's accelerators with disaggregated prefill and decode."""
        chosen = [entry.accelerator for entry in card.entries]
        return compare_apart(catalog, card.model, chosen, self.load, layout, **self._kind(catalog, card.model))


def _count(flag: str, name: str, default: int, what: str) -> Decorator:
    return click.option(flag, name, type=int, default=default, show_default=True, metavar="N", help=what)


# The load and the kind of replica, which a command gets as `replica`.
replica_options = gathered(
    "replica", ReplicaOptions,
    _count("--input", "input_tokens", USUAL.input_tokens, "Prompt tokens."),
    _count("--output", "output_tokens", USUAL.output_tokens, "Output tokens."),
    _count("--concurrency", "concurrency", USUAL.in_flight or 1, "Requests in flight on a replica."),
    click.option("--precision", metavar="P", default=USUAL.precision, show_default=True, help=PRECISION_HELP),
    layout_options, kv_option, stack_option, speculation_options,
)  # fmt: skip

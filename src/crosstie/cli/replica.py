"""Options that describe a replica and the load on it, which `fit`, `compare` and `tco` share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click

from crosstie.catalog.library import Catalog
from crosstie.catalog.precision import PRECISIONS
from crosstie.cli.options import Decorator
from crosstie.core.deployment import KV_FORMATS, Parallelism
from crosstie.decide.compare.apart import ApartEntry, compare_apart
from crosstie.decide.compare.scorecard import Load, Scorecard, compare

kv_option: Decorator = click.option(
    "--kv", type=click.Choice(list(KV_FORMATS)), default="bf16", show_default=True, help="Format of the KV cache."
)
PRECISION_HELP = f"How weights are stored: {', '.join(PRECISIONS)}."
stack_option: Decorator = click.option(
    "--stack", metavar="S", help="Engine: vllm, sglang, tensorrt-llm, llama.cpp. [default: vllm, or llama.cpp for GGUF]"
)


def layout_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for name, what in (
        ("--dp", "Attention replicas that share the experts."),
        ("--ep", "Groups over which experts are spread."),
        ("--pp", "Pipeline stages."),
        ("--tp", "Tensor-parallel ranks."),
    ):
        function = click.option(name, type=int, metavar="N", help=what)(function)
    return function


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """What `replica_options` were given as."""

    load: Load
    parallelism: Parallelism | None
    precision: str
    kv_format: str
    stack: str | None

    def scorecard(self, catalog: Catalog, model: str, accelerators: str) -> Scorecard:
        return compare(
            catalog,
            catalog.model(model),
            catalog.accelerators_named(accelerators, self.stack),
            self.load,
            parallelism=self.parallelism,
            precision=self.precision,
            kv_format=self.kv_format,
            stack=self.stack,
        )

    def apart(self, catalog: Catalog, card: Scorecard, layout: str) -> list[ApartEntry]:
        """The scorecard's accelerators with prefill and decode apart."""
        return compare_apart(
            catalog,
            card.model,
            [entry.accelerator for entry in card.entries],
            self.load,
            layout,
            precision=self.precision,
            kv_format=self.kv_format,
            stack=self.stack,
        )


def replica_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The load and the kind of replica, which the command gets as `replica`."""

    @wraps(function)
    def gathered(
        *, input_tokens: int, output_tokens: int, concurrency: int, precision: str, tp: int | None, pp: int | None,
        ep: int | None, dp: int | None, kv: str, stack: str | None, **others: Any,
    ) -> Any:  # fmt: skip
        load = Load(concurrency, input_tokens, output_tokens)
        return function(replica=ReplicaOptions(load, layout_from(tp, pp, ep, dp), precision, kv, stack), **others)

    found: Callable[..., Any] = gathered
    for option in reversed((
        _count("--input", "input_tokens", 4096, "Prompt tokens."),
        _count("--output", "output_tokens", 1024, "Output tokens."),
        _count("--concurrency", "concurrency", 64, "Requests in flight on a replica."),
        click.option("--precision", metavar="P", default="native", show_default=True, help=PRECISION_HELP),
        layout_options, kv_option, stack_option,
    )):  # fmt: skip
        found = option(found)
    return found


def _count(flag: str, name: str, default: int, what: str) -> Decorator:
    return click.option(flag, name, type=int, default=default, show_default=True, metavar="N", help=what)


def layout_from(tp: int | None, pp: int | None, ep: int | None, dp: int | None) -> Parallelism | None:
    """None where the user said nothing at all."""
    if tp is None and pp is None and ep is None and dp is None:
        return None

    def one(value: int | None) -> int:
        return 1 if value is None else value

    return Parallelism(tp=one(tp), pp=one(pp), ep=one(ep), dp=one(dp))

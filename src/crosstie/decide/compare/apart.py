"""Disaggregated prefill and decode, beside the same accelerators with both together."""

from collections.abc import Sequence
from dataclasses import dataclass

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator
from crosstie.core.disaggregated import Disaggregated
from crosstie.core.errors import BadInput, DoesNotFit
from crosstie.core.estimate import Estimate
from crosstie.core.figures import seconds
from crosstie.core.model import Model
from crosstie.core.speculation import Speculation
from crosstie.decide.compare.scorecard import Load
from crosstie.perf.disaggregated import Sides, disaggregated_state, transfer
from crosstie.perf.estimate import estimate
from crosstie.perf.fit import place
from crosstie.perf.service_layouts import SideLayout, parse_layout

_BUSY = 0.95
_ROOM = ("memory capacity", "engine limit")


@dataclass(frozen=True, slots=True)
class ApartEntry:
    """One accelerator, disaggregated; without an estimate where that cannot be."""

    accelerator: Accelerator
    service: Disaggregated | None = None
    estimate: Estimate | None = None
    # The same GPUs as replicas like the decode side's that prefill too, each with its part of the requests.
    together: Estimate | None = None
    # Of one prompt of the load's length, with nothing else on the links; and the share of the prefill side's rate.
    transfer_s: float = 0.0
    prefill_busy: float = 0.0
    problem: str = ""

    @property
    def verdict(self) -> str:
        """One sentence: what disaggregation is worth here, and which side is short."""
        if self.service is None or self.estimate is None or self.together is None:
            return self.problem
        own, other = self.estimate, self.together
        ratio = own.output_tokens_per_s_per_gpu / other.output_tokens_per_s_per_gpu
        side = "prefill" if self.prefill_busy > _BUSY else "decode"
        short = f"the {side} side is full" if side == "prefill" or own.decode_bound in _ROOM else ""
        short = short or f"prefill is {self.prefill_busy:.0%} busy"
        return (
            f"disaggregated it gives {ratio:.2f}x the tokens/s per GPU of together, with {seconds(own.ttft_s)} TTFT "
            f"against {seconds(other.ttft_s)} and {seconds(own.tpot_s)} TPOT against {seconds(other.tpot_s)}; {short}; "
            f"a prompt's cache takes {seconds(self.transfer_s)} over the {self.service.link}"
        )


def compare_apart(
    catalog: Catalog,
    model: Model,
    accelerators: Sequence[Accelerator],
    load: Load,
    layout: str,
    *,
    precision: str | None = None,
    kv_format: str = "bf16",
    stack: str | None = None,
    speculation: Speculation | None = None,
    connector: str | None = None,
) -> list[ApartEntry]:
    """`layout`: replicas and split of prefill, then of decode, "1xTP4:2xTP8", each `@` an accelerator where that is not
    the entry's. The link is the fabric where one domain holds both sides, else the network."""
    prefill, decode = parse_layout(layout)

    def named(side: SideLayout) -> Accelerator | None:
        return catalog.accelerator(side.accelerator) if side.accelerator else None

    apart_entries: list[ApartEntry] = []
    refused: list[BadInput] = []
    for accelerator in accelerators:
        try:
            sides = [
                catalog.deployment(
                    model, named(side) or accelerator, side.parallelism, precision, kv_format, stack, speculation
                )
                for side in (prefill, decode)
            ]
            for name, deployment in zip(("prefill", "decode"), sides, strict=True):
                if not place(deployment, load.context).fits:
                    raise DoesNotFit(f"{name} {deployment.parallelism} cannot hold it")
            first, second = (side.accelerator for side in sides)
            way = catalog.connector(connector) if connector else catalog.connector_for(sides[0].stack, first)
            gpus = prefill.gpus + decode.gpus
            service = Disaggregated(
                prefill=sides[0],
                prefill_replicas=prefill.replicas,
                decode=sides[1],
                decode_replicas=decode.replicas,
                connector=way,
                link="fabric" if first.id == second.id and gpus <= first.domain else "network",
            )
            lengths = {"input_tokens": load.input_tokens, "output_tokens": load.output_tokens}
            got = estimate(service, concurrency=load.concurrency, **lengths)
            part = max(round(load.concurrency * sides[1].parallelism.gpus / gpus), 1)
            together = estimate(sides[1], concurrency=part, **lengths)
        except (DoesNotFit, BadInput) as error:
            if isinstance(error, BadInput):
                refused.append(error)
            apart_entries.append(ApartEntry(accelerator, problem=str(error)))
            continue
        moved = transfer(Sides([service]), float(load.input_tokens))
        state = disaggregated_state(Sides([service]), load.concurrency, load.input_tokens, load.output_tokens)
        moved_s, busy = float((moved.start_s + moved.wire_s)[0, 0]), float(state.prefill_busy[0, 0])
        apart_entries.append(ApartEntry(accelerator, service, got, together, moved_s, busy))
    if len(refused) == len(accelerators) and refused:
        raise refused[0]
    return apart_entries

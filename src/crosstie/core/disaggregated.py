"""Prefill and decode on replicas of their own, and how a prompt's cache travels between them."""

from typing import Annotated, Literal

import msgspec

from crosstie.core.deployment import Accelerator, Deployment, Parallelism, Stack
from crosstie.core.errors import BadInput
from crosstie.core.estimate import Correction
from crosstie.core.fact import Fact, Label, Quantity, Word
from crosstie.core.model import Model, Precision
from crosstie.core.speculation import Speculation

# Over the scale-up links of one domain, or through each GPU's network port.
Link = Literal["fabric", "network"]
# The side that hands the first token to the client: the prefill replica, the decode replica once the cache is there
# (the token was made by prefill), or the decode replica after a step of its own.
FirstToken = Literal["prefill", "transfer", "decode"]
# When the decode replica sets memory aside for a request: before its prefill begins, or once that is done.
RoomTaken = Literal["before prefill", "after prefill"]


class Connector(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine moves a prompt's cache: when, in which pieces, and what it wants equal on both sides."""

    id: str
    name: str
    # Engines as published results name them when they run this way.
    aliases: tuple[str, ...] = ()
    # Stacks whose replicas it joins, each with its own kind.
    stacks: tuple[str, ...]
    vendors: tuple[str, ...]
    # Each layer's cache leaves as soon as it is computed.
    by_layer: bool
    first_token: FirstToken
    # Whether the decode replica computes the last prompt token again.
    recomputes: bool
    room: RoomTaken
    # A recurrent state cannot be cut again for another TP.
    states_need_equal_tp: bool
    habits: Annotated[Label, Word("when the cache travels and who gives the first token, in words")]
    # A transfer takes start + descriptors x descriptor + bytes / (link x bandwidth).
    start: Annotated[Fact, Quantity("seconds", 0, 1, "time that a transfer takes with nothing to send")]
    descriptor: Annotated[Fact, Quantity("seconds", 0, 1e-3, "time that each piece of memory adds")]
    bandwidth: Annotated[Fact, Quantity("fraction", 0.01, 1.0, "share of the link's bandwidth that transfers reach")]
    block_tokens: Annotated[Fact, Quantity("tokens", 1, 1e5, "tokens of a block")]
    # Keys and values apart: 2.
    pieces: Annotated[Fact, Quantity("count", 1, 100, "descriptors for each block of a layer")]


def check_joined(connector: Connector, prefill: Deployment, decode: Deployment) -> None:
    """Refuses two sides that the connector cannot join, and says why."""
    if prefill.stack.id != decode.stack.id:
        raise BadInput(f"prefill runs {prefill.stack.id} and decode {decode.stack.id}: both sides run one engine")
    if prefill.model.id != decode.model.id:
        raise BadInput(f"prefill of {prefill.model.id} and decode of {decode.model.id}: both sides serve one model")
    if prefill.speculation != decode.speculation:
        raise BadInput("prefill and decode must speculate alike: the drafter's cache travels with the model's")
    if prefill.kv_format != decode.kv_format:
        raise BadInput(
            f"prefill keeps its cache in {prefill.kv_format} and decode in {decode.kv_format}: "
            f"{connector.id} hands it over as it is, so both must be equal"
        )
    if prefill.accelerator.vendor != decode.accelerator.vendor:
        raise BadInput(
            f"prefill on {prefill.accelerator.id} ({prefill.accelerator.vendor}) and decode on "
            f"{decode.accelerator.id} ({decode.accelerator.vendor}): no engine is known to hand a cache from one "
            "vendor to the other"
        )
    for name, side in (("prefill", prefill), ("decode", decode)):
        if side.stack.id not in connector.stacks:
            able = " or ".join(connector.stacks)
            raise BadInput(f"{connector.id} joins replicas of {able}, and {name} runs {side.stack.id}")
        if side.accelerator.vendor not in connector.vendors:
            runs = " and ".join(connector.vendors)
            raise BadInput(
                f"{connector.id} runs on {runs}, and {name} is on {side.accelerator.id} ({side.accelerator.vendor})"
            )
        if side.parallelism.pp > 1:
            raise BadInput(f"{name} {side.parallelism}: pipeline stages are not modelled when disaggregated")
    # Of a state that is not cut into heads every rank keeps a copy.
    states = any(layer.state is not None and layer.state.heads > 1 for layer in decode.model.layers)
    if states and connector.states_need_equal_tp and prefill.parallelism.tp != decode.parallelism.tp:
        raise BadInput(
            f"{decode.model.id} keeps recurrent states, which {connector.id} hands over only between equal TP: "
            f"prefill has {prefill.parallelism.tp}, decode {decode.parallelism.tp}"
        )


class Disaggregated(msgspec.Struct, frozen=True, kw_only=True):
    """One service: replicas that compute prompts, replicas that decode, and the way between them."""

    prefill: Deployment
    prefill_replicas: int
    decode: Deployment
    decode_replicas: int
    connector: Connector
    link: Link = "network"

    def __post_init__(self) -> None:
        for name, replicas in (("prefill", self.prefill_replicas), ("decode", self.decode_replicas)):
            if replicas < 1:
                other = "decode" if name == "prefill" else "prefill"
                raise BadInput(f"{replicas} {name} replicas: a {other} pool alone answers nobody")
        check_joined(self.connector, self.prefill, self.decode)
        if self.link == "fabric":
            domain = min(self.prefill.accelerator.domain, self.decode.accelerator.domain)
            if self.prefill.accelerator.id != self.decode.accelerator.id or self.gpus > domain:
                raise BadInput(f"{self.layout}: its {self.gpus} GPUs are not in one scale-up domain of {domain}")

    # What it has in common with a replica that does both, so that a plan can choose between them.

    @property
    def model(self) -> Model:
        return self.decode.model

    @property
    def accelerator(self) -> Accelerator:
        return self.decode.accelerator

    @property
    def stack(self) -> Stack:
        return self.decode.stack

    @property
    def precision(self) -> Precision:
        return self.decode.precision

    @property
    def kv_format(self) -> str:
        return self.decode.kv_format

    @property
    def speculation(self) -> Speculation | None:
        return self.decode.speculation

    def drafting(self, speculation: Speculation | None) -> "Disaggregated":
        both = {side: getattr(self, side).drafting(speculation) for side in ("prefill", "decode")}
        return msgspec.structs.replace(self, **both)

    @property
    def parallelism(self) -> Parallelism:
        """Of a decode replica."""
        return self.decode.parallelism

    @property
    def correction(self) -> Correction:
        """Of the decode side: what is known of both stands with each."""
        return self.decode.correction

    @property
    def prefill_gpus(self) -> int:
        return self.prefill_replicas * self.prefill.parallelism.gpus

    @property
    def decode_gpus(self) -> int:
        return self.decode_replicas * self.decode.parallelism.gpus

    @property
    def gpus(self) -> int:
        return self.prefill_gpus + self.decode_gpus

    @property
    def layout(self) -> str:
        """Prefill, then decode: 1xTP4:2xTP8, each with its accelerator where they have two."""
        sides = (self.prefill_replicas, self.prefill), (self.decode_replicas, self.decode)
        two = self.prefill.accelerator.id != self.decode.accelerator.id
        return ":".join(f"{n}x{one.parallelism}{f'@{one.accelerator.id}' if two else ''}" for n, one in sides)

    @property
    def label(self) -> str:
        one, other = self.prefill.accelerator.id, self.decode.accelerator.id
        where = one if one == other else f"{one} and {other}"
        return f"{self.gpus} x {where} {self.layout} {self.decode.precision.id}"


# Whatever answers requests alone: a replica, or a disaggregated service.
Servable = Deployment | Disaggregated

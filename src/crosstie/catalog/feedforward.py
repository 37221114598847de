"""Feed-forward kinds: dense, gated or not, and mixtures of experts with or without shared ones."""

from dataclasses import dataclass

from crosstie.catalog.attention import plain, split_in, split_out, vector
from crosstie.core.model import Tensor

# Small kernels around the experts of a layer: top-k, sorting and alignment, quantising what goes into the
# two products, gathering, summing. Eight rather than four brings published serving results of mixtures
# from 6% too fast to even (see docs/notes/measurements.md).
ROUTING_KERNELS = 8


@dataclass(frozen=True, slots=True)
class FeedForward:
    kind: str
    tensors: tuple[Tensor, ...]
    moved_elements: float
    routing_kernels: int = 0
    # Elements per token that summing the experts' outputs moves on every rank.
    gathered_elements: float = 0.0


NO_FORWARD = FeedForward("no feed-forward", (), 0.0)


def dense(hidden: int, inner: int, *, gated: bool = True, bias: bool = False, prefix: str = "mlp") -> FeedForward:
    width = 2 * inner if gated else inner
    tensors = [
        split_out(f"{prefix}_up", width, hidden, f"{prefix}_up", prefix),
        split_in(f"{prefix}_down", hidden, inner, f"{prefix}_down", f"{prefix}_down"),
    ]
    if bias:
        tensors.append(vector(f"{prefix}_bias", width + hidden))
    return FeedForward("dense", tuple(tensors), float(width + inner))


def experts(
    hidden: int,
    inner: int,
    *,
    count: int,
    active: int,
    shared_inner: int = 0,
    shared_gate: bool = False,
    router_bias: bool = False,
    expert_bias: bool = False,
    latent: int | None = None,
    latent_norm: bool = True,
    router_extra: int = 0,
    gated: bool = True,
) -> FeedForward:
    """`latent`: routed experts that work in a narrower space, entered and left by a projection."""
    width = latent or hidden
    up = 2 * inner if gated else inner
    tensors = [
        plain("router", count, hidden, "router", "router"),
        Tensor(
            name="experts_up", role="experts", rows=up, cols=width, copies=count, active=active,
            kernel="experts_up",
        ),
        Tensor(
            name="experts_down", role="experts_down", rows=width, cols=inner, copies=count, active=active,
            kernel="experts_down",
        ),
    ]  # fmt: skip
    if latent:
        tensors += [
            plain("latent_in", latent, hidden, "latent_in", "auxiliary"),
            plain("latent_out", hidden, latent, "latent_out", "auxiliary"),
        ]
    if latent and latent_norm:
        tensors.append(vector("latent_norm", latent))
    if router_bias:
        tensors.append(vector("router_bias", count))
    if router_extra:
        tensors.append(vector("router_scale", router_extra))
    if expert_bias:
        tensors.append(Tensor(name="expert_bias", role="small", rows=up + hidden, copies=count, active=active))
    moved = (up + inner) * float(active)
    if shared_inner:
        shared = dense(hidden, shared_inner, gated=gated, prefix="shared")
        tensors += shared.tensors
        moved += shared.moved_elements
        if shared_gate:
            tensors.append(vector("shared_gate", hidden))
    return FeedForward(
        f"{count} experts, {active} active" + (", shared" if shared_inner else ""),
        tuple(tensors), moved, routing_kernels=ROUTING_KERNELS, gathered_elements=(1.0 + active) * width,
    )  # fmt: skip

"""Graph-capture cases, third set: how Python code is built: out=, hooks, wrappers, containers, caches, subclasses."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import collections
import dataclasses
import functools
import math
import typing

import torch
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import B, D, H, S, collected, inputs, registry
from torch import nn

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry()


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("gain", torch.full((D,), 1.5))
        self.calls = 0

    def forward(self, x, *, bias=None):
        self.calls += 1
        return x * self.gain if bias is None else x * self.gain + bias


class State(setting.State):
    def __init__(self, dev):
        super().__init__(dev)
        self.gain = Gain().to(dev)
        self.kept = {"a": torch.zeros(B, H, 1, D, device=dev), "b": torch.zeros(B, H, 1, D, device=dev)}
        self.ring: collections.deque[torch.Tensor] = collections.deque(maxlen=2)


class Pair(typing.NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    count: int = 0
    more: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


case("out_of_add", lambda s, q, k, v, lens, score: torch.add(q, 1, out=s.out))


def out_same_as_input(s, q, k, v, lens, score):
    s.out.copy_(q)
    torch.mul(s.out, 2, out=s.out)
    return s.out


def out_slices_of_one_buffer(s, q, k, v, lens, score):
    whole = torch.empty(2, B, H, 1, D, device=q.device)
    torch.mul(q, 2, out=whole[0])
    torch.exp(q, out=whole[1])
    return whole


def out_of_two_results(s, q, k, v, lens, score):
    values = torch.empty(B, 4, device=q.device)
    where = torch.empty(B, 4, dtype=torch.long, device=q.device)
    torch.topk(score, 4, out=(values, where))
    return values, where


def out_of_matmul_and_cat(s, q, k, v, lens, score):
    both = torch.empty(B, H, 2, D, device=q.device)
    torch.cat([q, torch.matmul(q, s.w)], 2, out=both)
    return both


def out_empty_grows(s, q, k, v, lens, score):
    out = torch.empty(0, device=q.device)
    torch.add(q, 1, out=out)
    return out


def out_of_nonzero_static(s, q, k, v, lens, score):
    out = torch.empty(4, 2, dtype=torch.long, device=q.device)
    torch.nonzero_static(score > 0, size=4, out=out)
    return out


def form_partial_and_lambda(s, q, k, v, lens, score):
    step = functools.partial(torch.clamp, min=-1)
    return (lambda x: step(x, max=1))(q)


case("form_reduce_and_map", lambda s, q, k, v, lens, score: functools.reduce(torch.add, map(torch.relu, q.unbind(1))))


def form_named_tuple_and_dataclass(s, q, k, v, lens, score):
    pair = Pair(q, q * 2)
    return {"pair": pair._replace(left=pair.right), "rows": [pair.left, (pair.right,)]}


def form_dataclass_fields(s, q, k, v, lens, score):
    out = Output(q * 2, more={"k": k.sum()})
    return [out.logits, out.more["k"], dataclasses.replace(out, count=3).count]


def form_hook_changes_output(s, q, k, v, lens, score):
    handle = s.gain.register_forward_hook(lambda module, given, out: out * 2)
    try:
        return s.gain(q)
    finally:
        handle.remove()


def form_pre_hook_reads_value(s, q, k, v, lens, score):
    handle = s.gain.register_forward_pre_hook(lambda module, given: (given[0] * given[0].max().item(),))
    try:
        return s.gain(q)
    finally:
        handle.remove()


case("form_module_counter_unused", lambda s, q, k, v, lens, score: s.gain(q, bias=score[0, :D]))
case("form_module_counter_used", lambda s, q, k, v, lens, score: s.gain(q) / s.gain.calls)


def form_buffer_written(s, q, k, v, lens, score):
    s.gain.gain.mul_(0.5).add_(1)
    return s.gain(q)


def form_buffer_assigned(s, q, k, v, lens, score):
    s.gain.gain = s.gain.gain * 0.5 + 1
    return s.gain(q)


def form_buffer_data_assigned(s, q, k, v, lens, score):
    s.gain.gain.data = s.gain.gain * 0.5 + 1
    return s.gain(q)


def form_dictionary_of_kept_tensors(s, q, k, v, lens, score):
    s.kept["a"].add_(q)
    s.kept["b"].copy_(s.kept["a"])
    return {name: tensor * 2 for name, tensor in s.kept.items()}


def form_dictionary_entries_swapped(s, q, k, v, lens, score):
    s.kept["a"], s.kept["b"] = s.kept["b"], s.kept["a"]
    s.kept["a"].add_(q)
    return s.kept["a"] + 0


def form_ring_of_outputs(s, q, k, v, lens, score):
    s.ring.append(q * 2)
    return s.ring[0] + s.ring[-1]


@case
def form_mutable_default(s, q, k, v, lens, score, seen=[]):  # noqa: B006
    seen.append(1)
    return q * min(len(seen), 2)


def form_cached_by_dtype(s, q, k, v, lens, score):
    key = (q.dtype, q.shape)
    if key not in s.table:
        s.table[key] = torch.full((D,), 2.0, dtype=q.dtype, device=q.device)
    return q * s.table[key]


def form_parametrised(s, q, k, v, lens, score):
    layer = s.table.get("layer")
    if layer is None:
        layer = s.table["layer"] = torch.nn.utils.parametrizations.weight_norm(nn.Linear(D, D).to(q.device))
    return layer(q)


def form_no_grad_decorated(s, q, k, v, lens, score):
    @torch.no_grad()
    def inner(x):
        return x * 2

    return inner(q)


def form_inference_mode_decorated(s, q, k, v, lens, score):
    @torch.inference_mode()
    def inner(x):
        return x.add(1).mul_(2)

    return inner(q)


case("form_gradient_enabled_asked", lambda s, q, k, v, lens, score: q * (2 if torch.is_grad_enabled() else 3))
case("form_functional_transform", lambda s, q, k, v, lens, score: torch.func.vmap(lambda row: row / row.norm())(score))
case("form_gradient_transform", lambda s, q, k, v, lens, score: torch.func.grad(lambda x: (x @ s.w).square().sum())(q))
case("form_jacobian", lambda s, q, k, v, lens, score: torch.func.jacrev(lambda x: (x * x).cumsum(0))(score[0, :4]))


def form_einsum_and_tensordot(s, q, k, v, lens, score):
    return torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1) @ v + torch.tensordot(q, s.w, 1)


def form_numbers_from_shape(s, q, k, v, lens, score):
    return q / math.sqrt(q.shape[-1]) * math.prod(k.shape) / k.numel() + len(score)


case("form_max_of_two_tensors", lambda s, q, k, v, lens, score: max(q.sum(), k.sum()) + q)
case("form_sum_of_list", lambda s, q, k, v, lens, score: sum([q, q * 2, q * 3]))
case("form_sorted_by_key", lambda s, q, k, v, lens, score: sorted([q, q * 2], key=lambda t: t.norm())[0])
case("form_ternary_on_shape", lambda s, q, k, v, lens, score: q * 2 if k.size(2) > 32 else q)
case("form_ternary_on_value", lambda s, q, k, v, lens, score: q * 2 if lens[0] > 32 else q)


def form_assert_on_value(s, q, k, v, lens, score):
    assert (lens <= S).all(), "too long"
    return q * 2


def form_assert_async(s, q, k, v, lens, score):
    torch._assert_async((lens <= S).all())
    return q * 2


case("form_enumerate_rows", lambda s, q, k, v, lens, score: torch.stack([row * i for i, row in enumerate(score)]))


def form_zip_with_lengths(s, q, k, v, lens, score):
    return torch.stack([row[:n].sum() for row, n in zip(score, lens, strict=True)])


def form_scatter_by_lengths(s, q, k, v, lens, score):
    return score.gather(1, lens.clamp(max=S - 1).view(B, 1)).squeeze(1)


def form_format_of_scalar(s, q, k, v, lens, score):
    s.table["text"] = f"{score.mean():.3f}"
    return q * 2


def form_hash_and_id(s, q, k, v, lens, score):
    s.table[id(q)] = hash(q)
    return q * 2


case("form_tensor_in_list", lambda s, q, k, v, lens, score: q * (2 if any(t is q for t in [k, v, q]) else 3))


def form_subclass_of_tensor(s, q, k, v, lens, score):
    class Named(torch.Tensor):
        pass

    return q.as_subclass(Named).mul(2).as_subclass(torch.Tensor)


case("form_parameter_made_inside", lambda s, q, k, v, lens, score: nn.Parameter(q.clone(), requires_grad=False) * 2)


def form_tensor_type_asked(s, q, k, v, lens, score):
    return q * (2 if q.type() == "torch.cuda.FloatTensor" and isinstance(q, torch.Tensor) else 3)


case("form_legacy_constructor", lambda s, q, k, v, lens, score: q + torch.cuda.FloatTensor(D).zero_())
case("form_legacy_constructor_of_list", lambda s, q, k, v, lens, score: q + torch.cuda.FloatTensor([1.0] * D))


def form_checkpoint(s, q, k, v, lens, score):
    return torch.utils.checkpoint.checkpoint(lambda x: (x @ s.w).relu(), q, use_reentrant=False)


def form_profiler_scope(s, q, k, v, lens, score):
    with torch.profiler.record_function("step"):
        return q * 2


def form_detect_anomaly(s, q, k, v, lens, score):
    with torch.autograd.set_detect_anomaly(True):
        return q * 2


def form_deterministic_asked(s, q, k, v, lens, score):
    return q * (2 if torch.are_deterministic_algorithms_enabled() else 3)


case("form_sync_debug_mode", lambda s, q, k, v, lens, score: q * (torch.cuda.get_sync_debug_mode() + 1))


def form_matmul_precision_set(s, q, k, v, lens, score):
    torch.set_float32_matmul_precision("highest")
    return q @ s.w


def form_memory_summary(s, q, k, v, lens, score):
    s.table["memory"] = torch.cuda.memory_stats().get("allocated_bytes.all.current", 0)
    return q * 2


def form_capability_branch(s, q, k, v, lens, score):
    major, _ = torch.cuda.get_device_capability(q.device)
    return q * (2 if major >= 8 and torch.version.hip is None else 3)


CASES |= collected(globals())

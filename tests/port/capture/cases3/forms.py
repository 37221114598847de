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
CASES, case = registry(globals())


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


def out_of_nonzero_static(s, q, k, v, lens, score):
    out = torch.empty(4, 2, dtype=torch.long, device=q.device)
    torch.nonzero_static(score > 0, size=4, out=out)
    return out


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


def form_subclass_of_tensor(s, q, k, v, lens, score):
    class Named(torch.Tensor):
        pass

    return q.as_subclass(Named).mul(2).as_subclass(torch.Tensor)


def form_profiler_scope(s, q, k, v, lens, score):
    with torch.profiler.record_function("step"):
        return q * 2


def form_detect_anomaly(s, q, k, v, lens, score):
    with torch.autograd.set_detect_anomaly(True):
        return q * 2


def form_capability_branch(s, q, k, v, lens, score):
    major, _ = torch.cuda.get_device_capability(q.device)
    return q * (2 if major >= 8 and torch.version.hip is None else 3)


CASES |= collected(globals())

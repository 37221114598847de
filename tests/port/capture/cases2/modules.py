"""Graph-capture cases, second set: torch modules with buffers, hooks, modes and counters of their own."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-subclassing-any

import random

import torch
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import B, D, collected, inputs, registry, seeded
from torch import nn

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


class Tracker(nn.Module):
    """A layer with every kind of attribute that a forward may change."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, D))
        self.steps = 0
        self.last = None
        self.warned = False
        self.late = None

    def forward(self, x):
        return x * self.gain if self.training else x + self.gain


class State(setting.State):
    """Besides the common state: modules with weights that do not depend on any generator's state."""

    def __init__(self, dev):
        super().__init__(dev)
        self.tracker = Tracker().to(dev).requires_grad_(False)
        self.linear = nn.Linear(D, D, bias=False).requires_grad_(False)
        self.linear.weight.copy_(seeded(50, D, D))
        self.linear.to(dev)
        self.stack = nn.ModuleList(nn.LayerNorm(D) for _ in range(4)).to(dev).requires_grad_(False)
        for i, layer in enumerate(self.stack):
            layer.weight.fill_(1.0 + i)
        self.cell = nn.RNNCell(D, D).requires_grad_(False)
        for i, weight in enumerate(self.cell.parameters()):
            weight.copy_(seeded(60 + i, *weight.shape) * 0.2)
        self.cell.to(dev)
        self.hidden = torch.zeros(B, D, device=dev)
        self.saved = {"weight": seeded(51, D, D)}


def mode_toggled_and_restored(s, q, k, v, lens, score):
    before = s.tracker.training
    s.tracker.train(False)
    try:
        return s.tracker(q)
    finally:
        s.tracker.train(before)


def batch_norm_cumulative_average(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = nn.BatchNorm1d(D, momentum=None).to(q.device).requires_grad_(False)
    return s.cache(k[:, 0].transpose(1, 2))


def batch_norm_with_momentum(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = nn.BatchNorm1d(D).to(q.device).requires_grad_(False)
    return s.cache(k[:, 0].transpose(1, 2)), s.cache.running_mean * 1, s.cache.num_batches_tracked + 0


def weight_made_on_first_forward(s, q, k, v, lens, score):
    if s.tracker.late is None:
        s.tracker.late = nn.Parameter(torch.tensor([[2.0]]).expand(D, D).triu().to(q.device), requires_grad=False)
    return q @ s.tracker.late


def layer_dropped_by_python_random(s, q, k, v, lens, score):
    x = q
    for layer in s.stack:
        if random.random() < 0.5:
            continue
        x = layer(x) + q
    return x


def hook_that_logs_the_norm(s, q, k, v, lens, score):
    with s.linear.register_forward_hook(lambda module, given, out: s.history.append(out.norm().item())):
        return s.linear(q)


def hook_that_keeps_the_output(s, q, k, v, lens, score):
    with s.linear.register_forward_hook(lambda module, given, out: s.history.append(out)):
        return s.linear(q) * 2


def hook_that_counts(s, q, k, v, lens, score):
    def count(module, given):
        module.seen = getattr(module, "seen", 0) + 1
        return (given[0] * module.seen,)

    with s.linear.register_forward_pre_hook(count):
        return s.linear(q)


def hook_removed_after_first_step(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = s.linear.register_forward_hook(lambda module, given, out: s.history.append(out.sum().item()))
        s.linear(q)
        s.cache.remove()
    return s.linear(q)


def spectral_norm_in_training(s, q, k, v, lens, score):
    if s.cache is None:
        layer = nn.Linear(D, D, bias=False)
        layer.weight.data.copy_(s.saved["weight"])
        torch.manual_seed(3)
        s.cache = nn.utils.parametrizations.spectral_norm(layer).to(q.device)
    with torch.no_grad():
        return s.cache(q)


def gradient_step_on_adapter(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = nn.Parameter(torch.ones(D, device=q.device))
        s.table["optimiser"] = torch.optim.SGD([s.cache], lr=0.01)
    s.table["optimiser"].zero_grad(set_to_none=True)
    ((q * s.cache) ** 2).mean().backward()
    s.table["optimiser"].step()
    return s.cache.detach() * 1


CASES |= collected(globals())

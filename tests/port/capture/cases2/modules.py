"""Graph-capture cases, second set: torch modules with buffers, hooks, modes and counters of their own."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-subclassing-any

import random

import torch
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import B, D, collected, inputs, registry, seeded
from torch import nn

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry()


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


def buffer_reassigned(s, q, k, v, lens, score):
    s.tracker.mean = s.tracker.mean * 0.9 + q.mean((0, 1, 2)) * 0.1
    return q - s.tracker.mean


def buffer_updated_in_place(s, q, k, v, lens, score):
    s.tracker.mean.mul_(0.9).add_(q.mean((0, 1, 2)), alpha=0.1)
    return q - s.tracker.mean


def buffer_registered_again_same_value(s, q, k, v, lens, score):
    s.tracker.register_buffer("ones", torch.ones(D, device=q.device))
    return q + s.tracker.ones


def parameter_data_swapped(s, q, k, v, lens, score):
    s.tracker.gain.data = s.tracker.gain.data * 0.9 + q.mean((0, 1, 2))
    return q * s.tracker.gain


def parameter_averaged_in_place(s, q, k, v, lens, score):
    s.tracker.gain.lerp_(q.mean((0, 1, 2)), 0.1)
    return q * s.tracker.gain


def attribute_counter_scales(s, q, k, v, lens, score):
    s.tracker.steps += 1
    return q / (1 + s.tracker.steps) ** 0.5


def attribute_counter_saturates(s, q, k, v, lens, score):
    s.tracker.steps = min(s.tracker.steps + 1, 2)
    return q * s.tracker.steps


def residual_of_last_step_kept(s, q, k, v, lens, score):
    last = s.tracker.last
    s.tracker.last = s.linear(q)
    return s.tracker.last if last is None else s.tracker.last + last


def mode_toggled_every_step(s, q, k, v, lens, score):
    s.tracker.train(not s.tracker.training)
    return s.tracker(q)


def mode_set_to_eval_every_step(s, q, k, v, lens, score):
    s.tracker.eval()
    return s.tracker(q)


def mode_toggled_and_restored(s, q, k, v, lens, score):
    before = s.tracker.training
    s.tracker.train(False)
    try:
        return s.tracker(q)
    finally:
        s.tracker.train(before)


case("dropout_module_in_training", lambda s, q, k, v, lens, score: nn.Dropout1d(0.5).train()(k.flatten(1, 2)))


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


def weights_reloaded_from_host(s, q, k, v, lens, score):
    s.linear.load_state_dict(s.saved)
    return s.linear(q)


def state_dict_looked_at(s, q, k, v, lens, score):
    weights = s.stack.state_dict()
    return q * sum(weights[name].sum() for name in weights) * len(weights)


def weight_norm_reported(s, q, k, v, lens, score):
    report = {name: round(float(weight.norm()), 2) for name, weight in s.linear.named_parameters()}
    return q * len(report)


case("module_moved_where_it_is", lambda s, q, k, v, lens, score: s.linear.to(q.device, dtype=torch.float32)(q))
case("module_cast_on_first_step", lambda s, q, k, v, lens, score: s.linear.bfloat16()(q.bfloat16()).float())


def recurrent_state_rebound(s, q, k, v, lens, score):
    s.hidden = s.cell(q[:, 0, 0], s.hidden)
    return s.hidden * 2


def recurrent_state_copied(s, q, k, v, lens, score):
    s.hidden.copy_(s.cell(q[:, 0, 0], s.hidden))
    return s.hidden * 2


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


def functional_call_with_scaled_weight(s, q, k, v, lens, score):
    return torch.func.functional_call(s.linear, {"weight": s.linear.weight * score.mean()}, (q,))


CASES |= collected(globals())

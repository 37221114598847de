"""Graph-capture cases: state between calls; many of them capture without error and replay what was."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import collections
import functools
import gc
import itertools
import random
import threading
import time
import weakref

import torch
from tests.port.capture.cases.setting import B, D, S, State, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry()
TICKS = itertools.count(1)
SEEN: list[object] = []
SCALE = {"value": 1.0}


class Counter:
    """Class-level state, as a layer's global step would be."""

    total = 0
    toggled = False


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.step = 0
        self.first = True

    def forward(self, x):
        self.step += 1
        return x * self.step


LAYER = Layer()


def counter_multiplier(s, q, k, v, lens, score):
    s.calls += 1
    return q * s.calls


def counter_not_used(s, q, k, v, lens, score):
    s.calls += 1
    return q * 2


def counter_on_device(s, q, k, v, lens, score):
    s.step += 1
    return q * s.step


def counter_as_index(s, q, k, v, lens, score):
    s.calls += 1
    return q * score[0, s.calls]


def counter_as_device_index(s, q, k, v, lens, score):
    s.step += 1
    return q * score[0].gather(0, s.step)


def counter_as_slice_bound(s, q, k, v, lens, score):
    s.calls += 1
    return q * score[:, : s.calls].sum()


def counter_as_mask_bound(s, q, k, v, lens, score):
    s.step += 1
    return q * torch.where(torch.arange(S, device=q.device) < s.step, score, 0.0).sum()


def counter_as_kv_slot(s, q, k, v, lens, score):
    s.kv[s.calls : s.calls + 1] = k[:1, :, 0]
    s.calls += 1
    return q + s.kv.sum()


def device_counter_as_kv_slot(s, q, k, v, lens, score):
    s.kv.index_copy_(0, s.step, k[:1, :, 0])
    s.step += 1
    return q + s.kv.sum()


def counter_as_rope_position(s, q, k, v, lens, score):
    s.calls += 1
    angle = torch.arange(D, device=q.device) * (s.calls / 100)
    return q * angle.cos()


def counter_parity_double_buffer(s, q, k, v, lens, score):
    s.calls += 1
    return q + score[s.calls % 2].sum()


def counter_once_only_branch(s, q, k, v, lens, score):
    s.calls += 1
    return q * 3 if s.calls == 1 else q * 2


def counter_every_other_call(s, q, k, v, lens, score):
    s.calls += 1
    if s.calls % 2 == 0:
        s.buf += 1
    return q + s.buf[0]


def counter_in_added_constant(s, q, k, v, lens, score):
    s.calls += 1
    s.buf.fill_(s.calls)
    return q + s.buf.sum()


def class_counter(s, q, k, v, lens, score):
    Counter.total += 1
    return q * Counter.total


def class_flag_toggled(s, q, k, v, lens, score):
    Counter.toggled = not Counter.toggled
    return q if Counter.toggled else -q


case("global_iterator", lambda s, q, k, v, lens, score: q * next(TICKS))


def global_list_length(s, q, k, v, lens, score):
    SEEN.append(1)
    return q * len(SEEN)


def global_list_unused(s, q, k, v, lens, score):
    SEEN.append(q.shape)
    return q * 2


def global_dict_value(s, q, k, v, lens, score):
    SCALE["value"] *= 1.5
    return q * SCALE["value"]


case("global_dict_constant", lambda s, q, k, v, lens, score: q * SCALE.get("other", 2.0))
case("module_attribute_step", lambda s, q, k, v, lens, score: LAYER(q))


@case
def default_argument_list(s, q, k, v, lens, score, seen=[]):  # noqa: B006 - the mutable default is the case
    seen.append(0)
    return q * len(seen)


def generator_object(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = itertools.cycle([1.0, 2.0, 3.0, 4.0, 5.0])
    return q * next(s.cache)


def closure_counter(s, q, k, v, lens, score):
    if s.cache is None:
        count = 0

        def tick():
            nonlocal count
            count += 1
            return count

        s.cache = tick
    return q + s.cache()


def deque_of_python_numbers(s, q, k, v, lens, score):
    s.cache = s.cache or collections.deque([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    s.cache.rotate(1)
    return q * s.cache[0]


@functools.lru_cache
def scale_of(size):
    return size**-0.5


case("lru_cached_constant", lambda s, q, k, v, lens, score: q * scale_of(q.shape[-1]))


@functools.lru_cache
def table_of(size, device):
    return torch.tensor([float(i) for i in range(size)], device=device)


case("lru_cached_device_table", lambda s, q, k, v, lens, score: q * table_of(D, q.device))


def dict_cache_by_shape(s, q, k, v, lens, score):
    if q.shape not in s.table:
        s.table[q.shape] = torch.arange(float(D)).to(q.device)
    return q * s.table[q.shape]


def dict_cache_by_call(s, q, k, v, lens, score):
    s.calls += 1
    if s.calls not in s.table:
        s.table[s.calls] = torch.full((1,), float(s.calls), device=q.device)
    return q * s.table[s.calls]


def dict_cache_by_pointer(s, q, k, v, lens, score):
    if q.data_ptr() not in s.table:
        s.table[q.data_ptr()] = torch.zeros_like(q)
    return q + s.table[q.data_ptr()]


def cached_constant_host_to_device(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = torch.linspace(0, 1, D).to(q.device)
    return q * s.cache


def cached_from_first_input(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = q.abs().amax()
    return q / s.cache


def cached_item_from_first_input(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = q.abs().amax().item()
    return q / s.cache


def cached_lens_list(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = lens.tolist()
    return q * s.cache[0]


def cached_per_pair_of_calls(s, q, k, v, lens, score):
    if s.calls % 2 == 0:
        s.cache = score.sum()
    s.calls += 1
    return q * s.cache


def cached_reference_to_input(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = score
    return q * s.cache.sum()


def rebind_to_fresh(s, q, k, v, lens, score):
    previous = s.cache if s.cache is not None else torch.zeros_like(q)
    s.cache = previous * 0.5 + q
    return s.cache * 2


def rebind_in_place(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = torch.zeros_like(q)
    s.cache.mul_(0.5).add_(q)
    return s.cache * 2


def rebind_previous_output(s, q, k, v, lens, score):
    last = s.cache if s.cache is not None else q
    s.cache = q.clone()
    return q + last


def copy_previous_output(s, q, k, v, lens, score):
    r = q + s.out
    s.out.copy_(q)
    return r


def rebind_write_only(s, q, k, v, lens, score):
    s.cache = q * 2
    return s.cache + 1


def cat_growing_cache(s, q, k, v, lens, score):
    s.cache = k[:, :, :1] if s.cache is None else torch.cat([s.cache, k[:, :, :1]], 2)
    return q + s.cache.sum()


def roll_fixed_cache(s, q, k, v, lens, score):
    s.kv.copy_(s.kv.roll(-1, 0))
    s.kv[-1:].copy_(k[:1, :, 0])
    return q + (s.kv.sum((1, 2)) * torch.arange(S, device=q.device)).sum()


def rebind_rolled_cache(s, q, k, v, lens, score):
    s.kv = torch.cat([s.kv[1:], k[:1, :, 0]])
    return q + (s.kv.sum((1, 2)) * torch.arange(S, device=q.device)).sum()


def augmented_assign_in_place(s, q, k, v, lens, score):
    s.buf += score.sum()
    return q + s.buf[0]


def plain_assign_rebinds(s, q, k, v, lens, score):
    s.buf = s.buf + score.sum()
    return q + s.buf[0]


def swap_two_buffers(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = torch.zeros_like(s.buf)
    s.cache.add_(score[0, :8])
    s.buf, s.cache = s.cache, s.buf
    return q + s.buf.sum()


def list_of_outputs_summed(s, q, k, v, lens, score):
    s.history.append(q * 1)
    return torch.stack(s.history).sum(0)


def list_of_outputs_last(s, q, k, v, lens, score):
    s.history.append(q * 2)
    return s.history[-1] + 1


def list_of_shapes(s, q, k, v, lens, score):
    s.history.append(tuple(q.shape))
    return q * len(s.history[-1])


def fixed_list_of_layers(s, q, k, v, lens, score):
    r = q
    for expert in s.experts:
        r = r @ expert
    return r


def host_scalar_mutated(s, q, k, v, lens, score):
    s.host += 1
    return q * s.host


case("host_scalar_constant", lambda s, q, k, v, lens, score: q * (s.host + 1))


def host_row_mutated_item(s, q, k, v, lens, score):
    s.host_row[2] += 1
    return q * s.host_row[2].item()


def host_row_mutated_zero_dim(s, q, k, v, lens, score):
    s.host_row += 1
    return q * s.host_row[2]


def pinned_mutated_by_host(s, q, k, v, lens, score):
    s.pinned += 1
    s.buf.copy_(s.pinned, non_blocking=True)
    return q + s.buf.sum()


def pinned_filled_same_value(s, q, k, v, lens, score):
    s.pinned.fill_(3.0)
    s.buf.copy_(s.pinned, non_blocking=True)
    return q + s.buf.sum()


def pinned_feedback_loop(s, q, k, v, lens, score):
    s.buf.copy_(s.pinned, non_blocking=True)
    s.buf.add_(score[0, :8])
    s.pinned.copy_(s.buf, non_blocking=True)
    return q + s.buf.sum()


def pinned_result_read_next_call(s, q, k, v, lens, score):
    scale = float(s.pinned_out[0])
    s.pinned_out.copy_(score[0, :8], non_blocking=True)
    return q * (scale + 1)


case("clock_baked_in", lambda s, q, k, v, lens, score: q * (time.perf_counter_ns() % 1_000_003))
case("clock_fraction_of_millisecond", lambda s, q, k, v, lens, score: q + (time.time() * 1000) % 1)
case("python_random", lambda s, q, k, v, lens, score: q * random.random())
case("python_random_seeded_each_call", lambda s, q, k, v, lens, score: q * random.Random(7).random())
case("python_random_choice_of_layer", lambda s, q, k, v, lens, score: q @ s.experts[random.randrange(len(s.experts))])
case("host_torch_random_item", lambda s, q, k, v, lens, score: q * torch.rand(()).item())
case("host_torch_random_zero_dim", lambda s, q, k, v, lens, score: q * torch.rand(()))
case("host_bernoulli_branch", lambda s, q, k, v, lens, score: q * 2 if torch.rand(1) < 0.5 else q * 3)


def annealed_temperature(s, q, k, v, lens, score):
    s.calls += 1
    return (score / (1.0 + 0.1 * s.calls)).softmax(-1)


def temperature_in_device_buffer(s, q, k, v, lens, score):
    s.step += 1
    return (score / (1.0 + 0.1 * s.step)).softmax(-1)


def running_mean_momentum(s, q, k, v, lens, score):
    s.buf.lerp_(score[0, :8], 0.1)
    return q + s.buf.mean()


def running_mean_by_count(s, q, k, v, lens, score):
    s.calls += 1
    s.buf += (score[0, :8] - s.buf) / s.calls
    return q + s.buf.sum()


def running_mean_by_device_count(s, q, k, v, lens, score):
    s.step += 1
    s.buf += (score[0, :8] - s.buf) / s.step
    return q + s.buf.sum()


def batch_norm_training_stats(s, q, k, v, lens, score):
    torch.nn.functional.batch_norm(score[:, :8], s.buf, torch.ones_like(s.buf), training=True)
    return q + s.buf.sum()


def weakref_alive(s, q, k, v, lens, score):
    ref = weakref.ref(score)
    return q * 2 if ref() is not None else q


def gc_collect(s, q, k, v, lens, score):
    gc.collect()
    return q * 2


def thread_host_only(s, q, k, v, lens, score):
    done: list[object] = []
    thread = threading.Thread(target=done.append, args=(2.0,))
    thread.start()
    thread.join()
    return q * done[0]


def thread_device_work(s, q, k, v, lens, score):
    done: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: done.append(score * 2))
    thread.start()
    thread.join()
    return q * done[0].sum()


def lock_around(s, q, k, v, lens, score):
    with threading.Lock():
        return q * 2


case("shape_baked_in", lambda s, q, k, v, lens, score: q * (B * k.shape[2]) ** -0.5)


def training_flag_constant(s, q, k, v, lens, score):
    return torch.nn.functional.dropout(q, 0.5, training=LAYER.first and False)


def flag_cleared_on_first_call(s, q, k, v, lens, score):
    if LAYER.first:
        LAYER.first = False
        s.buf.fill_(2.0)
    return q * s.buf[0]


def none_then_allocated_every_second(s, q, k, v, lens, score):
    s.cache = None if s.cache is not None else torch.ones_like(q)
    return q if s.cache is None else q + s.cache


CASES |= collected(globals())

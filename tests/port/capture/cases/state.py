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
CASES, case = registry(globals())
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


def counter_every_other_call(s, q, k, v, lens, score):
    s.calls += 1
    if s.calls % 2 == 0:
        s.buf += 1
    return q + s.buf[0]


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


@functools.lru_cache
def scale_of(size):
    return size**-0.5


@functools.lru_cache
def table_of(size, device):
    return torch.tensor([float(i) for i in range(size)], device=device)


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


def rebind_in_place(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = torch.zeros_like(q)
    s.cache.mul_(0.5).add_(q)
    return s.cache * 2


def roll_fixed_cache(s, q, k, v, lens, score):
    s.kv.copy_(s.kv.roll(-1, 0))
    s.kv[-1:].copy_(k[:1, :, 0])
    return q + (s.kv.sum((1, 2)) * torch.arange(S, device=q.device)).sum()


def swap_two_buffers(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = torch.zeros_like(s.buf)
    s.cache.add_(score[0, :8])
    s.buf, s.cache = s.cache, s.buf
    return q + s.buf.sum()


def fixed_list_of_layers(s, q, k, v, lens, score):
    r = q
    for expert in s.experts:
        r = r @ expert
    return r


def pinned_feedback_loop(s, q, k, v, lens, score):
    s.buf.copy_(s.pinned, non_blocking=True)
    s.buf.add_(score[0, :8])
    s.pinned.copy_(s.buf, non_blocking=True)
    return q + s.buf.sum()


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


def flag_cleared_on_first_call(s, q, k, v, lens, score):
    if LAYER.first:
        LAYER.first = False
        s.buf.fill_(2.0)
    return q * s.buf[0]


CASES |= collected(globals())

"""Graph-capture cases, second set: what Python does around the tensors: caches, logs, clocks, exceptions, results."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import contextlib
import contextvars
import copy
import dataclasses
import functools
import io
import itertools
import logging
import operator
import os
import pickle
import time
import typing
import warnings

import numpy as np
import torch
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import B, D, S, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry(globals())
LOG = logging.getLogger("serving")
LOG.addHandler(logging.StreamHandler(io.StringIO()))
PHASE = {"now": "prefill"}
ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}
DEPTH = contextvars.ContextVar("DEPTH", default=0)
GAIN = [1.0]


class Scored(typing.NamedTuple):
    out: torch.Tensor
    mass: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Progress:
    step: int = 0
    scale: float = 0.5


class Meter:
    """Reading it changes it."""

    __slots__ = ("reads",)

    def __init__(self):
        self.reads = 0

    @property
    def value(self):
        self.reads += 1
        return self.reads


class State(setting.State):
    """Besides the common state: records that a scheduler would hand down."""

    def __init__(self, dev):
        super().__init__(dev)
        self.progress = Progress()
        self.meter = Meter()
        self.deadline = float("inf")
        self.rng = np.random.default_rng(5)
        self.weights_np = np.linspace(0.5, 1.5, 4, dtype=np.float32)
        self.warned = False


def counted(function):
    calls = itertools.count(1)

    @functools.wraps(function)
    def wrapper(*arguments):
        return function(*arguments) * next(calls)

    return wrapper


def timed(function):
    @functools.wraps(function)
    def wrapper(s, *arguments):
        begun = time.perf_counter()
        out = function(s, *arguments)
        s.history.append(time.perf_counter() - begun)
        return out

    return wrapper


@contextlib.contextmanager
def gain(value):
    GAIN.append(value)
    try:
        yield
    finally:
        GAIN.pop()


@functools.lru_cache(maxsize=1)
def ramp(size, device):
    return torch.arange(size, device=device) / size


@functools.cache
def warmed(step):
    return 1.0 / (1 + step)


def halves(x):
    while x.shape[-1] > 4:
        x = x[..., ::2] + x[..., 1::2]
        yield x


@case
@counted
def decorator_counts(s, q, k, v, lens, score):
    return q + 1


@case
@timed
def decorator_times_on_host(s, q, k, v, lens, score):
    return q + 1


def log_debug_by_fstring(s, q, k, v, lens, score):
    LOG.debug(f"longest {lens.max()}")  # formatted although nobody reads it
    return q * 2


def warn_once_of_dtype(s, q, k, v, lens, score):
    if not s.warned:
        warnings.warn(f"{q.dtype} is slow", stacklevel=1)
        s.warned = True
    return q * 2


def deadline_never_reached(s, q, k, v, lens, score):
    if time.monotonic() > s.deadline:
        return q
    return q * 2


def phase_alternates(s, q, k, v, lens, score):
    PHASE["now"] = "decode" if PHASE["now"] == "prefill" else "prefill"
    return q * 2 if PHASE["now"] == "decode" else q + 2


def context_manager_restores(s, q, k, v, lens, score):
    with gain(3.0):
        return q * GAIN[-1]


def frozen_record_replaced(s, q, k, v, lens, score):
    s.progress = dataclasses.replace(s.progress, step=s.progress.step + 1)
    return q * (s.progress.scale + s.progress.step)


def calibrated_on_first_call(s, q, k, v, lens, score):
    if s.calls < 1:
        s.cache = score.abs().max().item()
    s.calls += 1
    return q / s.cache


def calibrated_every_fourth_call(s, q, k, v, lens, score):
    if s.calls % 4 in (0, 3):
        s.cache = score.abs().max().item()
    s.calls += 1
    return q / s.cache


def key_error_fills_the_table(s, q, k, v, lens, score):
    try:
        table = s.table[q.shape[-1]]
    except KeyError:
        table = s.table[q.shape[-1]] = torch.tensor([0.5, 2.0]).to(q.device)
    return q * table.sum()


def index_error_falls_back(s, q, k, v, lens, score):
    with contextlib.suppress(IndexError):
        return q * score[:, S + 3].sum()
    return q * 3


def shape_mismatch_falls_back(s, q, k, v, lens, score):
    try:
        return q @ s.w[:5]
    except RuntimeError:
        return q @ s.w


def broad_except_hides_the_read(s, q, k, v, lens, score):
    try:
        limit = int(lens.max())
    except Exception:  # noqa: BLE001 - hiding it is the case
        limit = S
    return q * limit


def exact_type_demanded(s, q, k, v, lens, score):
    if type(q) is not torch.Tensor:
        raise TypeError("a plain tensor")
    return q * 2


def fast_path_on_gpu_only(s, q, k, v, lens, score):
    if q.is_cuda:
        return q * (score > 0).sum()
    return q * int((score > 0).sum())


def slow_path_if_device_is_gpu(s, q, k, v, lens, score):
    if q.device.type == "cpu":
        return q * 2
    return q * lens.cpu().max().item()


def range_over_length(s, q, k, v, lens, score):
    total = q
    for _ in range(lens[0] // 16):
        total = total * 1.5
    return total


def match_on_value(s, q, k, v, lens, score):
    match (lens.sum() % 3).item():
        case 0:
            return q
        case _:
            return q * 2


def match_on_rank(s, q, k, v, lens, score):
    match q.shape:
        case (_, heads, 1, _):
            return q * heads
        case _:
            return q


def nothing_returned(s, q, k, v, lens, score):
    s.out.copy_(q)


def schedule_from_iterator(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = iter([0.1 * i for i in range(40)])
    return q * (1 + next(s.cache, 0.0))


def schedule_that_has_run_out(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = iter([0.1, 0.2])
    return q * (1 + next(s.cache, 0.5))


CASES |= collected(globals())

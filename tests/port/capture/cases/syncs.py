"""Graph-capture cases: host syncs, said plainly or hidden in Python's own operators."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import contextlib
import math
import sys
import time
import warnings

import torch
from tests.port.capture.cases.setting import State, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


def iterate_and_compare(s, q, k, v, lens, score):
    total = q
    for n in lens:
        if n > 30:
            total = total + 1
    return total


def eos_while(s, q, k, v, lens, score):
    n = lens.clone()
    while (n > 20).all():
        n = n - 10
    return q * n.sum()


def for_range_fixed(s, q, k, v, lens, score):
    n = lens.clone()
    for _ in range(3):
        n = torch.where(n > 20, n - 10, n)
    return q * n.sum()


def shape_check(s, q, k, v, lens, score):
    if score.shape[0] != q.shape[0]:
        raise ValueError("batch")
    return q * 2


def warn_on_nan(s, q, k, v, lens, score):
    if not torch.isfinite(q).all():
        warnings.warn("not finite", stacklevel=2)
    return q * 2


def try_around_item(s, q, k, v, lens, score):
    try:
        n = lens[0].item()
    except RuntimeError:
        n = 1
    return q * n


def suppress_around_cpu(s, q, k, v, lens, score):
    with contextlib.suppress(RuntimeError):
        lens.cpu()
    return q * 2


def synchronize(s, q, k, v, lens, score):
    r = q * 2
    torch.cuda.synchronize()
    return r


def event_timing(s, q, k, v, lens, score):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    r = q * 2
    end.record()
    end.synchronize()
    start.elapsed_time(end)
    return r


def side_stream_joined(s, q, k, v, lens, score):
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        r = q * 2
    main.wait_stream(side)
    return r + 1


def side_stream_not_joined(s, q, k, v, lens, score):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        score * 2
    return q * 2


def side_stream_not_forked(s, q, k, v, lens, score):
    with torch.cuda.stream(torch.cuda.Stream()):
        k * 2
    return q * 2


def empty_cache(s, q, k, v, lens, score):
    r = q * 2
    torch.cuda.empty_cache()
    return r


def memory_allocated(s, q, k, v, lens, score):
    torch.cuda.memory_allocated()
    return q * 2


def mem_get_info(s, q, k, v, lens, score):
    torch.cuda.mem_get_info()
    return q * 2


def is_capturing_branch(s, q, k, v, lens, score):
    if not torch.cuda.is_current_stream_capturing():
        lens.max().item()
    return q * 2


def record_function_scope(s, q, k, v, lens, score):
    with torch.profiler.record_function("attention"):
        return q * 2


def nvtx_range(s, q, k, v, lens, score):
    with torch.cuda.nvtx.range("attention"):
        return q * 2


CASES |= collected(globals())

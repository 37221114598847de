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
CASES, case = registry()


case("item_of_max", lambda s, q, k, v, lens, score: k[:, :, : lens.max().item()].sum(2))
case("max_kept_on_device", lambda s, q, k, v, lens, score: q * lens.max())


def float_of_scale(s, q, k, v, lens, score):
    scale = float(score.abs().max())
    return q / scale


case("scale_kept_on_device", lambda s, q, k, v, lens, score: q / score.abs().max())
case("bool_of_flag", lambda s, q, k, v, lens, score: q + 1 if bool((lens > 30).any()) else q)
case("flag_multiplied", lambda s, q, k, v, lens, score: q + (lens > 30).any())
case("tolist_of_lens", lambda s, q, k, v, lens, score: q * sum(lens.tolist()))
case("tolist_of_shape", lambda s, q, k, v, lens, score: q * sum(list(score.shape)))
case("numpy_of_score", lambda s, q, k, v, lens, score: q * float(score.detach().cpu().numpy().mean()))


def cpu_of_lens(s, q, k, v, lens, score):
    lens.cpu()
    return q * 2


def to_cpu_non_blocking(s, q, k, v, lens, score):
    lens.to("cpu", non_blocking=True)
    return q * 2


case("len_of_tensor", lambda s, q, k, v, lens, score: q * len(score))
case("numel_and_size", lambda s, q, k, v, lens, score: q * score.numel() / score.size(-1))
case("iterate_rows", lambda s, q, k, v, lens, score: q * sum(row.sum() for row in score))


def iterate_and_compare(s, q, k, v, lens, score):
    total = q
    for n in lens:
        if n > 30:
            total = total + 1
    return total


def unpack_two(s, q, k, v, lens, score):
    first, second = lens
    return q * first + second


case("builtin_max", lambda s, q, k, v, lens, score: q * max(lens))
case("builtin_sum", lambda s, q, k, v, lens, score: q * sum(lens))
case("builtin_sorted", lambda s, q, k, v, lens, score: q * sorted(lens)[0])
case("torch_sort_instead", lambda s, q, k, v, lens, score: q * lens.sort().values[0])
case("builtin_abs", lambda s, q, k, v, lens, score: abs(q))
case("builtin_any", lambda s, q, k, v, lens, score: q * 2 if any(lens > 30) else q)
case("tensor_in_tensor", lambda s, q, k, v, lens, score: q * 2 if 24 in lens else q)


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


def short_circuit_and(s, q, k, v, lens, score):
    keep = (score.sum() > 0) and (lens.sum() > 0)
    return q * keep


case("bitwise_and", lambda s, q, k, v, lens, score: q * ((score.sum() > 0) & (lens.sum() > 0)))
case("python_not", lambda s, q, k, v, lens, score: q * (1 if not (lens > 100).any() else 2))
case("logical_not", lambda s, q, k, v, lens, score: q * (~(lens > 100)).sum())
case("chained_compare", lambda s, q, k, v, lens, score: q if 0 < lens[0] < 30 else -q)
case("none_check", lambda s, q, k, v, lens, score: q * 2 if score is not None else q)


def shape_check(s, q, k, v, lens, score):
    if score.shape[0] != q.shape[0]:
        raise ValueError("batch")
    return q * 2


def assert_shape(s, q, k, v, lens, score):
    assert k.shape == v.shape
    return q * 2


def assert_max_len(s, q, k, v, lens, score):
    assert lens.max() <= k.shape[2], "too long"
    return q * 2


def fstring_of_tensor(s, q, k, v, lens, score):
    len(f"scores {score[0, :2]}")
    return q * 2


def fstring_of_shape(s, q, k, v, lens, score):
    len(f"scores {tuple(score.shape)} {score.dtype} {score.device}")
    return q * 2


def repr_of_tensor(s, q, k, v, lens, score):
    repr(lens)
    return q * 2


def print_value(s, q, k, v, lens, score):
    print(lens.sum(), file=sys.stderr)
    return q * 2


def print_shape(s, q, k, v, lens, score):
    print(lens.shape, file=sys.stderr)
    return q * 2


def format_spec(s, q, k, v, lens, score):
    len(f"{score.mean():.3f}")
    return q * 2


def warn_on_nan(s, q, k, v, lens, score):
    if not torch.isfinite(q).all():
        warnings.warn("not finite", stacklevel=2)
    return q * 2


case("nan_to_num_instead", lambda s, q, k, v, lens, score: torch.nan_to_num(q))
case("is_nonzero", lambda s, q, k, v, lens, score: q * 2 if torch.is_nonzero(lens[0]) else q)
case("equal_of_two", lambda s, q, k, v, lens, score: q * (2 if torch.equal(k, v) else 3))
case("equal_shapes_differ", lambda s, q, k, v, lens, score: q * (2 if torch.equal(k, q) else 3))
case("isclose_kept", lambda s, q, k, v, lens, score: q * torch.isclose(k, v).sum())
case("eq_all_kept", lambda s, q, k, v, lens, score: q * (k == v).all())
case("math_sqrt_of_tensor", lambda s, q, k, v, lens, score: q / math.sqrt(lens.sum()))
case("math_sqrt_of_size", lambda s, q, k, v, lens, score: q / math.sqrt(q.size(-1)))


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


def stream_synchronize(s, q, k, v, lens, score):
    r = q * 2
    torch.cuda.current_stream().synchronize()
    return r


def stream_query(s, q, k, v, lens, score):
    r = q * 2
    torch.cuda.current_stream().query()
    return r


def current_stream_only(s, q, k, v, lens, score):
    torch.cuda.current_stream()
    return q * 2


def event_record(s, q, k, v, lens, score):
    event = torch.cuda.Event()
    r = q * 2
    event.record()
    return r


def event_synchronize(s, q, k, v, lens, score):
    event = torch.cuda.Event()
    r = q * 2
    event.record()
    event.synchronize()
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


def device_properties(s, q, k, v, lens, score):
    torch.cuda.get_device_properties(0)
    return q * torch.cuda.device_count()


def is_capturing_branch(s, q, k, v, lens, score):
    if not torch.cuda.is_current_stream_capturing():
        lens.max().item()
    return q * 2


def clock_without_use(s, q, k, v, lens, score):
    time.perf_counter()
    return q * 2


def record_function_scope(s, q, k, v, lens, score):
    with torch.profiler.record_function("attention"):
        return q * 2


def nvtx_range(s, q, k, v, lens, score):
    with torch.cuda.nvtx.range("attention"):
        return q * 2


CASES |= collected(globals())

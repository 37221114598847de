"""Graph-capture cases, second set: strides, reductions by index, out= variants, scripted and custom operators, streams."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import io

import torch
import torch.nn.functional as F  # noqa: N812
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import B, D, H, S, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


class State(setting.State):
    """Besides the common state: outputs to write into, and a stream with an event where there is a GPU."""

    def __init__(self, dev):
        super().__init__(dev)
        self.values = torch.zeros(B, 8, device=dev)
        self.indices = torch.zeros(B, 8, dtype=torch.long, device=dev)
        self.offset = 0
        self.stream = torch.cuda.Stream() if dev == "cuda" else None
        self.event = torch.cuda.Event() if dev == "cuda" else None


@torch.jit.script
def scripted_gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * y + 0.5


@torch.jit.script
def scripted_slice(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return x[:, : int(n[0])].sum(1)


@torch.library.custom_op("serving_cases::scaled", mutates_args=())
def custom_scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@torch.library.custom_op("serving_cases::clipped", mutates_args=())
def custom_clipped(x: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    return x.clamp(max=limit.max().item())


def mean_by_bucket(s, q, k, v, lens, score):
    bucket = torch.arange(S, device=q.device) // lens.view(B, 1)
    return torch.zeros(B, 8, device=q.device).scatter_reduce(1, bucket, score, "mean", include_self=False)


def masked_reductions(s, q, k, v, lens, score):
    keep = torch.arange(S, device=q.device) < lens.view(B, 1)
    return torch.masked.mean(score, -1, mask=keep), torch.masked.softmax(score, -1, mask=keep).nan_to_num()


def bounds_from_host_lengths(s, q, k, v, lens, score):
    first, second = s.host_lens.tolist()
    return F.pad(score, [first, second]).split([first + 8, S + second - 8], 1)[1] * 2


def results_into_kept_outputs(s, q, k, v, lens, score):
    torch.topk(score, 8, out=(s.values, s.indices))
    torch.matmul(q, s.w, out=s.out)
    return s.out * s.values.sum(), s.indices


def layout_repaired_if_needed(s, q, k, v, lens, score):
    heads_last = k.transpose(1, 2)
    if not heads_last.is_contiguous() or heads_last.stride(-1) != 1:
        heads_last = heads_last.contiguous()
    return heads_last.view(B, S, H * D)[:, ::8]


def streams_shared_experts_beside(s, q, k, v, lens, score):
    if s.stream is None:
        return q @ s.w + q @ s.experts[0]
    main = torch.cuda.current_stream()
    s.event.record(main)
    s.stream.wait_event(s.event)
    with torch.cuda.stream(s.stream):
        beside = q @ s.experts[0]
    done = s.stream.record_event()
    routed = q @ s.w
    main.wait_event(done)
    beside.record_stream(main)
    return routed + beside


def streams_event_of_last_step(s, q, k, v, lens, score):
    if s.event is not None:
        torch.cuda.current_stream().wait_event(s.event)
    out = q @ s.w
    if s.event is not None:
        s.event.record()
    return out


def streams_event_polled(s, q, k, v, lens, score):
    out = q * 2
    if s.event is not None:
        s.event.record()
        s.event.query()
    return out


def streams_side_synchronised(s, q, k, v, lens, score):
    if s.stream is None:
        return q * 2
    s.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s.stream):
        out = q * 2
    s.stream.synchronize()
    return out


def streams_prefetch_pinned(s, q, k, v, lens, score):
    if s.stream is None:
        return q + s.pinned.sum()
    main = torch.cuda.current_stream()
    s.stream.wait_stream(main)
    with torch.cuda.stream(s.stream):
        s.buf.copy_(s.pinned, non_blocking=True)
    main.wait_stream(s.stream)
    return q + s.buf.sum()


def streams_scope_of_current(s, q, k, v, lens, score):
    if not q.is_cuda:
        return q * 2
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.device(q.device):
        return q * 2


def streams_default_waits(s, q, k, v, lens, score):
    out = q * 2
    if q.is_cuda:
        torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())
    return out


def accelerator_asked_about(s, q, k, v, lens, score):
    wide = q.is_cuda and torch.cuda.get_device_capability()[0] >= 8
    return q.to(torch.bfloat16 if wide else torch.float32).float() * 2


def accelerator_synchronised(s, q, k, v, lens, score):
    out = q * 2
    if q.is_cuda:
        torch.accelerator.synchronize()
    return out


def peak_memory_reset(s, q, k, v, lens, score):
    if q.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        s.history.append(torch.cuda.max_memory_allocated())
    return q * 2


CASES |= collected(globals())

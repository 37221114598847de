"""Graph-capture cases, second set: strides, reductions by index, out= variants, scripted and custom operators, streams."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import io

import torch
import torch.nn.functional as F  # noqa: N812
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import B, D, H, S, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry()


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


def strided_relative_shift(s, q, k, v, lens, score):
    wide = F.pad(score[0, :16].view(4, 4).repeat(1, 2), (0, 1))
    return wide.flatten()[:32].as_strided((4, 4), (7, 1), 3) * 2


case("strided_offset_from_length", lambda s, q, k, v, lens, score: score.as_strided((8,), (1,), int(lens[0])))


def strided_offset_from_step(s, q, k, v, lens, score):
    s.offset += 2
    return score.as_strided((2, 8), (S, 1), s.offset) * 2


def rolled_by_step(s, q, k, v, lens, score):
    s.calls += 1
    return score.roll(s.calls, -1)


case("rolled_by_length", lambda s, q, k, v, lens, score: torch.roll(score, lens[0], -1))


def rolled_by_gather(s, q, k, v, lens, score):
    index = (torch.arange(S, device=q.device) - lens.view(B, 1)) % S
    return score.gather(1, index)


def repeated_by_step(s, q, k, v, lens, score):
    s.calls += 1
    return torch.cat([q] * s.calls, 2).sum(2)


def half_seen_as_integers(s, q, k, v, lens, score):
    bits = score.half().view(torch.int16)
    return (bits & 0x3FF).view(torch.float16).float() + (bits >> 10)


def top_scores_spread_back(s, q, k, v, lens, score):
    value, index = score.topk(8)
    return torch.zeros_like(score).scatter_(1, index, value.softmax(-1)) @ k[:, 0]


def mean_by_bucket(s, q, k, v, lens, score):
    bucket = torch.arange(S, device=q.device) // lens.view(B, 1)
    return torch.zeros(B, 8, device=q.device).scatter_reduce(1, bucket, score, "mean", include_self=False)


def index_reduced_maximum(s, q, k, v, lens, score):
    return torch.full((4, D), -9.0, device=q.device).index_reduce_(0, lens % 4, k[:, 0, 0], "amax")


def masked_reductions(s, q, k, v, lens, score):
    keep = torch.arange(S, device=q.device) < lens.view(B, 1)
    return torch.masked.mean(score, -1, mask=keep), torch.masked.softmax(score, -1, mask=keep).nan_to_num()


def searchsorted_through_sorter(s, q, k, v, lens, score):
    order = score.argsort(-1)
    return torch.searchsorted(score, score[:, :4].contiguous(), sorter=order)


def flat_index_unravelled(s, q, k, v, lens, score):
    row, column = torch.unravel_index(score.argmax(), score.shape)
    return q * row + column


def bounds_from_host_lengths(s, q, k, v, lens, score):
    first, second = s.host_lens.tolist()
    return F.pad(score, [first, second]).split([first + 8, S + second - 8], 1)[1] * 2


case("leaky_slope_from_tensor", lambda s, q, k, v, lens, score: F.leaky_relu(q, lens[0] / 100))


def exponent_from_lengths(s, q, k, v, lens, score):
    return torch.ldexp(q, -(lens // 16).view(B, 1, 1, 1)) + torch.pow(2, -(lens % 4)).sum()


def results_into_kept_outputs(s, q, k, v, lens, score):
    torch.topk(score, 8, out=(s.values, s.indices))
    torch.matmul(q, s.w, out=s.out)
    return s.out * s.values.sum(), s.indices


def nonzero_into_kept_output(s, q, k, v, lens, score):
    torch.nonzero(score > 2, out=s.indices)
    return q * s.indices.shape[1]


def alpha_from_step(s, q, k, v, lens, score):
    s.calls += 1
    return torch.add(q, v[:, :, :1], alpha=s.calls)


def input_overwritten(s, q, k, v, lens, score):
    k[:, :, -1:] = q
    score[0] = score[1]
    v.zero_()
    return (q @ k.transpose(-1, -2)).sum() + score + v.sum()


def alias_scaled_in_place(s, q, k, v, lens, score):
    flat = q.view(-1)
    flat.mul_(2)
    return q, flat[:4], q.transpose(0, 1)


def layout_repaired_if_needed(s, q, k, v, lens, score):
    heads_last = k.transpose(1, 2)
    if not heads_last.is_contiguous() or heads_last.stride(-1) != 1:
        heads_last = heads_last.contiguous()
    return heads_last.view(B, S, H * D)[:, ::8]


def exchanged_by_dlpack(s, q, k, v, lens, score):
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(score)) * 2


def saved_to_memory(s, q, k, v, lens, score):
    file = io.BytesIO()
    torch.save(score, file)
    return q * 2


case("scripted_elementwise", lambda s, q, k, v, lens, score: scripted_gate(q, v[:, :, :1]))
case("scripted_with_a_read", lambda s, q, k, v, lens, score: scripted_slice(score, lens))
case("custom_operator_of_numbers", lambda s, q, k, v, lens, score: custom_scaled(q, D**-0.5))
case("custom_operator_with_a_read", lambda s, q, k, v, lens, score: custom_clipped(q, score))
case("pseudo_inverse", lambda s, q, k, v, lens, score: q @ torch.linalg.pinv(s.w + k[0, 0, :D]))


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

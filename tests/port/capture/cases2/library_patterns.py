"""Graph-capture cases, second set: passages in the manner of serving libraries' own code, each told anew in small."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import collections
import itertools
import random

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import EXPERTS, B, D, H, S, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry()


class State(setting.State):
    """Besides the common state: what engines keep per step, on either side."""

    def __init__(self, dev):
        super().__init__(dev)
        self.unfinished = torch.ones(B, dtype=torch.long, device=dev)
        self.grid = torch.tensor([[1, 4, 4], [2, 2, 4]]).to(dev)
        self.grid_list = [[1, 4, 4], [2, 2, 4]]
        self.recent: collections.deque[torch.Tensor] = collections.deque(maxlen=3)
        self.double = [torch.zeros(B, H, 1, D, device=dev) for _ in range(2)]
        self.decay = 1.0
        self.phase = "warm"
        self.rotation = itertools.cycle(self.experts)


def generation_loop_asks_unfinished(s, q, k, v, lens, score):
    s.unfinished.mul_((score.argmax(-1) != 3).long())
    return q if s.unfinished.max() == 0 else q * 2


def generation_loop_masks_finished(s, q, k, v, lens, score):
    s.unfinished.mul_((score.argmax(-1) != 40).long())
    return score.argmax(-1) * s.unfinished + 7 * (1 - s.unfinished)


def unpadded_for_varlen_attention(s, q, k, v, lens, score):
    mask = torch.arange(S, device=q.device) < lens.view(B, 1)
    rows = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    return k.transpose(1, 2).reshape(B * S, H, D).index_select(0, rows).sum(0)


def unpadded_to_fixed_bound(s, q, k, v, lens, score):
    mask = torch.arange(S, device=q.device) < lens.view(B, 1)
    rows = torch.nonzero_static(mask.flatten(), size=B * S, fill_value=B * S).flatten()
    flat = F.pad(k.transpose(1, 2).reshape(B * S, H * D), (0, 0, 0, 1))
    return flat.index_select(0, rows).sum(0)


def sequences_found_by_position_zero(s, q, k, v, lens, score):
    positions = torch.arange(S, device=q.device) % lens[0]
    starts = (positions == 0).nonzero().view(-1)
    return q * torch.diff(starts, append=starts.new_full((1,), S)).amax()


def image_grid_unpacked(s, q, k, v, lens, score):
    rows = [torch.arange(h, device=q.device).repeat(t) for t, h, _w in s.grid]
    return q * torch.cat(rows).sum()


def image_grid_from_python(s, q, k, v, lens, score):
    rows = [torch.arange(h, device=q.device).repeat_interleave(w).repeat(t) for t, h, w in s.grid_list]
    return q * torch.cat(rows).sum()


def prompt_tokens_of_each_row(s, q, k, v, lens, score):
    ids = (score * 10).long()
    kept = [row[mask == 1] for row, mask in zip(ids, ids > 0, strict=True)]
    return torch.stack([row.sum() for row in kept])


def tokens_per_expert_as_numpy(s, q, k, v, lens, score):
    chosen = (q.reshape(-1, D) @ s.experts[:, :, 0].t()).argmax(-1)
    counts = F.one_hot(chosen, EXPERTS).sum(0).cpu().numpy()
    rows = q.reshape(-1, D)[chosen.argsort()]
    edges = np.cumsum(counts)
    return torch.cat([rows[a:b] @ w for a, b, w in zip([0, *edges], edges, s.experts, strict=False)])


def lengths_uploaded_unpinned(s, q, k, v, lens, score):
    prompts = ["a b c", "d e"]
    sizes = torch.tensor([len(p.split()) for p in prompts], dtype=torch.int32, device="cpu")
    return q * sizes.to(q.device, non_blocking=True).view(B, 1, 1, 1)


def lengths_pinned_then_blocking(s, q, k, v, lens, score):
    sizes = torch.arange(B, pin_memory=q.is_cuda)
    return q * sizes.to(q.device).view(B, 1, 1, 1)


def asserted_through_torch(s, q, k, v, lens, score):
    torch._assert((lens < S).all(), "a request has left its cache")
    return q * 2


case("rows_indexed_by_range", lambda s, q, k, v, lens, score: score[range(B), lens])
case("rows_indexed_by_numpy", lambda s, q, k, v, lens, score: score[np.arange(B), lens] + 1)


def rows_indexed_by_device_range(s, q, k, v, lens, score):
    return score[torch.arange(score.shape[0], device=score.device), lens] + 1


def rows_reset_with_template(s, q, k, v, lens, score):
    s.kv[:B][lens > 30] = k[0, :, 0]
    return s.kv[:B] * 2


def rows_reset_with_where(s, q, k, v, lens, score):
    s.kv[:B] = torch.where((lens > 30).view(B, 1, 1), k[0, :, 0], s.kv[:B])
    return s.kv[:B] * 2


def unpad_sequence_of_library(s, q, k, v, lens, score):
    rows = torch.nn.utils.rnn.unpad_sequence(score, lens, batch_first=True)
    return torch.stack([row.mean() for row in rows])


def mask_dropped_when_trivial(s, q, k, v, lens, score):
    mask = score > 9
    mask = mask if mask.sum() else None
    return q if mask is None else q * 2


def draft_length_from_acceptance(s, q, k, v, lens, score):
    rate = (score[:, :8] > 0).float().mean()
    width = 4 if rate > 0.5 else 2
    return score[:, :width].sum(-1)


def draft_length_from_schedule(s, q, k, v, lens, score):
    s.calls += 1
    return score[:, : 2 + s.calls % 3].sum(-1)


def mean_of_recent_outputs(s, q, k, v, lens, score):
    s.recent.append(q * 1)
    return torch.stack(list(s.recent)).mean(0)


def double_buffer_rotated(s, q, k, v, lens, score):
    write, read = s.double
    write.copy_(q)
    s.double.reverse()
    return read * 2 + q


def double_buffer_shifted(s, q, k, v, lens, score):
    newer, older = s.double
    older.copy_(newer)
    newer.copy_(q)
    return older * 2 + q


def python_float_decays(s, q, k, v, lens, score):
    s.decay *= 0.9
    return q * s.decay + score.mean()


def state_machine_of_names(s, q, k, v, lens, score):
    s.phase = {"warm": "first", "first": "second", "second": "third", "third": "first"}[s.phase]
    return q * len(s.phase)


def state_machine_settles(s, q, k, v, lens, score):
    s.phase = {"warm": "first", "first": "steady", "steady": "steady"}[s.phase]
    return q * len(s.phase)


case("weights_taken_in_turn", lambda s, q, k, v, lens, score: q @ next(s.rotation))


def host_scalar_rebound(s, q, k, v, lens, score):
    s.host = s.host * 0.9 + 0.1
    return q * s.host


def sums_of_all_steps(s, q, k, v, lens, score):
    s.table[len(s.table)] = q.sum()
    return q + sum(s.table.values())


def seed_from_step(s, q, k, v, lens, score):
    s.calls += 1
    return q * random.Random(s.calls).random()


case("seed_from_shape", lambda s, q, k, v, lens, score: q * random.Random(q.shape[-1]).random())


CASES |= collected(globals())

"""Graph-capture cases, fourth set: steps of engines, written after the checker was mended and before their truth."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import math

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import BLOCK, EXPERTS, VOCAB, B, D, H, S, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry()


class State(setting.State):
    def __init__(self, dev):
        super().__init__(dev)
        self.adapters = (setting.seeded(11, 3, D, 4) * 0.1).to(dev)
        self.adapter_of = torch.tensor([0, 2]).to(dev)
        self.beams = torch.zeros(B, dtype=torch.long, device=dev)
        self.draft = torch.tensor([[3, 5, 7], [2, 4, 6]]).to(dev)
        self.scale = torch.tensor(0.25)
        self.window = 16
        self.seen = set()
        self.gates = torch.nn.Linear(D, EXPERTS).to(dev)
        self.finished = torch.zeros(B, dtype=torch.bool, device=dev)


def alibi_bias_built_each_step(s, q, k, v, lens, score):
    slopes = torch.tensor([2 ** -(h + 1) for h in range(H)]).to(q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=slopes[:, None, None] * torch.arange(S, device=q.device))


def alibi_bias_by_exp2(s, q, k, v, lens, score):
    slopes = torch.exp2(-(torch.arange(H, device=q.device) + 1.0))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=slopes[:, None, None] * torch.arange(S, device=q.device))


def sliding_window_mask_of_lengths(s, q, k, v, lens, score):
    at = torch.arange(S, device=q.device)
    live = (at < lens[:, None]) & (at >= lens[:, None] - s.window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=live[:, None, None])


def sliding_window_by_slice(s, q, k, v, lens, score):
    start = int(lens.min()) - s.window
    return k[:, :, max(start, 0) :].sum()


def lora_by_adapter_gather(s, q, k, v, lens, score):
    chosen = s.adapters[s.adapter_of]
    return torch.einsum("bhd,bdr->bhr", q[:, :, 0], chosen)


def lora_loop_over_adapters(s, q, k, v, lens, score):
    out = torch.zeros(B, H, 4, device=q.device)
    for adapter in range(3):
        mask = s.adapter_of == adapter
        if mask.any():
            out[mask] = q[mask][:, :, 0] @ s.adapters[adapter]
    return out


def beam_reorder_in_place(s, q, k, v, lens, score):
    s.beams.copy_(score.argmax(-1) % B)
    return k.index_select(0, s.beams)


def beam_reorder_rebound(s, q, k, v, lens, score):
    s.kv = s.kv.roll(1, 0) + 1
    return s.kv[:2] + q[0, :, 0]


def draft_acceptance_mask(s, q, k, v, lens, score):
    wanted = score[:, :3].argsort(-1)
    accepted = (wanted == s.draft % 3).cumprod(-1)
    return accepted.sum(-1)


def draft_acceptance_sliced(s, q, k, v, lens, score):
    count = (score[0, :3] > 0).sum().item()
    return s.draft[:, :count]


def stop_when_all_finished(s, q, k, v, lens, score):
    s.finished |= score.argmax(-1) == 3
    if s.finished.all():
        return torch.zeros_like(score)
    return score * 2


def finished_rows_masked(s, q, k, v, lens, score):
    s.finished |= score.argmax(-1) == 3
    return score.masked_fill(s.finished[:, None], float("-inf"))


case("host_scale_multiplied", lambda s, q, k, v, lens, score: q * s.scale)
case("host_scale_moved", lambda s, q, k, v, lens, score: q * s.scale.to(q.device))
case("host_scale_in_where", lambda s, q, k, v, lens, score: torch.where(score > 0, score, s.scale))
case("temperature_as_python_float", lambda s, q, k, v, lens, score: (score / (0.7 + 0.1 * math.sin(1.0))).softmax(-1))


def request_ids_in_a_set(s, q, k, v, lens, score):
    s.seen.add(len(s.seen))
    return score + len(s.seen)


def block_table_lookup(s, q, k, v, lens, score):
    at = lens - 1
    block = s.blocks.gather(1, (at // BLOCK)[:, None].clamp(max=s.blocks.shape[1] - 1)).squeeze(1)
    return s.pages[block.long(), at % BLOCK]


def block_table_python_loop(s, q, k, v, lens, score):
    return torch.stack([s.pages[int(row[0]), 0] for row in s.blocks])


def block_table_unbind(s, q, k, v, lens, score):
    return torch.stack([s.pages.index_select(0, row[:1])[0, 0] for row in s.blocks.unbind()])


def slot_write_index_copy(s, q, k, v, lens, score):
    s.kv.index_copy_(0, s.step, q[:1, :, 0])
    s.step.add_(1).remainder_(S)
    return s.kv.sum((0, 1))


def slot_write_python_position(s, q, k, v, lens, score):
    s.kv[s.calls] = q[0, :, 0]
    s.calls += 1
    return s.kv.sum((0, 1))


case("cu_seqlens_from_lengths", lambda s, q, k, v, lens, score: F.pad(lens.cumsum(0), (1, 0)).to(torch.int32))
case("ragged_rows_packed", lambda s, q, k, v, lens, score: torch.cat([score[row, : lens[row]] for row in range(B)]))


def positions_repeat_interleave(s, q, k, v, lens, score):
    return torch.repeat_interleave(torch.arange(B, device=q.device), lens % 4 + 1)


def positions_repeat_interleave_sized(s, q, k, v, lens, score):
    return torch.repeat_interleave(torch.arange(B, device=q.device), torch.full_like(lens, 3), output_size=3 * B)


def logits_bad_words(s, q, k, v, lens, score):
    score = score.clone()
    score[:, [1, 5, 9]] = float("-inf")
    return score


case("logits_bad_words_index_fill", lambda s, q, k, v, lens, score: score.index_fill(1, s.draft[0], float("-inf")))


def logits_bias_element(s, q, k, v, lens, score):
    score = score.clone()
    score[0, 3] += 1.5
    return score


def logits_bias_element_set(s, q, k, v, lens, score):
    score = score.clone()
    score[0, 3] = 1.5
    return score


def repetition_penalty_gather(s, q, k, v, lens, score):
    old = score.gather(1, s.draft)
    return score.scatter(1, s.draft, torch.where(old > 0, old / 1.2, old * 1.2))


def min_p_filter_of_scores(s, q, k, v, lens, score):
    probs = score.softmax(-1)
    return score.masked_fill(probs < 0.1 * probs.amax(-1, keepdim=True), float("-inf"))


case("top_k_by_device_k", lambda s, q, k, v, lens, score: score.topk(int(lens[0] % 4) + 1).values)


def gumbel_noise_sampling(s, q, k, v, lens, score):
    return (score - torch.empty_like(score).exponential_().log()).argmax(-1)


def entropy_logged(s, q, k, v, lens, score):
    probs = score.softmax(-1)
    s.history.append(float(-(probs * probs.log()).sum()))
    return probs


def router_losses_kept_on_device(s, q, k, v, lens, score):
    logits = s.gates(q[:, 0, 0])
    s.buf[:EXPERTS].add_(logits.softmax(-1).sum(0).detach())
    return logits.topk(2).indices


def router_capacity_bincount(s, q, k, v, lens, score):
    chosen = s.gates(k[:, 0]).argmax(-1).flatten()
    return torch.bincount(chosen, minlength=EXPERTS)


def router_histc(s, q, k, v, lens, score):
    chosen = s.gates(k[:, 0]).argmax(-1).flatten().float()
    return torch.histc(chosen, EXPERTS, 0, EXPERTS - 1)


def experts_loop_over_all(s, q, k, v, lens, score):
    x = k[:, 0].reshape(-1, D)
    weights = s.gates(x).softmax(-1)
    return sum(weights[:, e, None] * (x @ s.experts[e]) for e in range(EXPERTS))


def experts_where_one_argument(s, q, k, v, lens, score):
    x = k[:, 0].reshape(-1, D)
    chosen = s.gates(x).argmax(-1)
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows = torch.where(chosen == e)[0]
        out.index_add_(0, rows, x[rows] @ s.experts[e])
    return out


def quantised_per_row_int8(s, q, k, v, lens, score):
    scale = score.abs().amax(-1, keepdim=True) / 127
    return (score / scale).round().clamp(-128, 127).to(torch.int8), scale


def quantised_to_fp8_dynamic(s, q, k, v, lens, score):
    scale = score.abs().max() / 448
    return (score / scale).to(torch.float8_e4m3fn).float() * scale


def rope_table_longer_when_needed(s, q, k, v, lens, score):
    need = int(lens.max())
    if s.cache is None or s.cache.shape[0] < need:
        s.cache = torch.arange(need, device=q.device).float().cos()
    return s.cache[:1] * q


def rope_by_position_tensor(s, q, k, v, lens, score):
    inverse = 1.0 / 10000 ** (torch.arange(0, D, 2, device=q.device) / D)
    angles = lens[:, None] * inverse
    return torch.cat([q[:, 0, 0, ::2] * angles.cos(), q[:, 0, 0, 1::2] * angles.sin()], -1)


def warnings_only_in_first_call(s, q, k, v, lens, score):
    if s.calls == 0:
        print("first call, mean", float(score.mean()))
    s.calls = 1
    return score * 2


def vocabulary_shard_masked(s, q, k, v, lens, score):
    inside = (lens >= 10) & (lens < VOCAB)
    rows = F.embedding(torch.where(inside, lens - 10, 0), s.emb)
    return rows * inside[:, None]


def vocabulary_shard_boolean(s, q, k, v, lens, score):
    rows = F.embedding(lens.clamp(max=VOCAB - 1), s.emb)
    rows[lens < 20] = 0
    return rows


def vocabulary_shard_boolean_rows(s, q, k, v, lens, score):
    rows = F.embedding(lens.clamp(max=VOCAB - 1), s.emb)
    rows[lens < 20] = s.emb[0]
    return rows


CASES |= collected(globals())
CASES["gumbel_noise_sampling"].random = True
